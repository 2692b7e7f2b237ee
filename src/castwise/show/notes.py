"""The lines around a table of steady trials: machine, notes, costs and code to paste."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from castwise.analysis.decide import strays_in_words
from castwise.analysis.energy import JOULES_PER_KWH, SECONDS_PER_HOUR, EpochCost, Prices, cost_of, gpus_read
from castwise.analysis.model_flops import float8_of, flops_of, fp8_share
from castwise.analysis.normal import Others, others_of
from castwise.analysis.result_table import Row
from castwise.analysis.statistics import has_interval
from castwise.analysis.steady_metrics import batch_ratio, cold_start_seconds, spread, unit_of
from castwise.analysis.warnings import NOISE, WARNING_NAMES, TrialWarning, warnings_of_all
from castwise.records.schema import Trial
from castwise.registry.datasets import imitated_data_set, train_samples
from castwise.registry.precisions import AS_WRITTEN, known_precision, why_emulated
from castwise.registry.techniques import join
from castwise.show.presentation import Lines
from castwise.show.units import format_ratio, format_seconds, pluralize
from castwise.spec.grouping import grouped
from castwise.spec.quantities import format_share, truncate_list

_MILLION = 1_000_000
_MOST_TRIALS_NAMED = 6  # in a warning; JSON has all
MORE = "with --verbose"  # where the notes are that are not printed
_MOST_NOTES = 3  # below a table
_OWN_STAGES = ("ready", "join", "set_up", "first_step", "compile", "warm_up")  # of a process
_WORTH_SECONDS = 0.05  # a shorter stage is left out
_MOST_NAMED = 2  # precisions in a note; of more, their number


def measured_on(trials: Sequence[Trial], *, is_brief: bool = False) -> str:
    """Return the devices, the software and the dates: `NVIDIA H200 (castwise 0.1.0 at 80a6, torch 2.11.0, 2026-11-21)`.

    If the trials (at least one) differ, every device, version and commit is named. In brief it has device, torch and
    date alone. Of scripts it also says how they were timed.
    """

    def every(name: str, prefix: str = "") -> str:
        values = dict.fromkeys(getattr(trial.environment, name) for trial in trials)
        text = " and ".join(filter(None, values))
        return text and prefix + text

    dates = sorted({trial.started_at[:10] for trial in trials})
    hooked = dict.fromkeys(each for trial in trials if trial.facts is not None for each in trial.facts.hooked)
    ways = ["each ran alone, the others paused"] if any(trial.spec.is_script for trial in trials) else []
    ways += [each for each in hooked if each.startswith("samples are ")]
    if is_brief:
        return "; ".join([f"{every('device_name')}, torch {every('torch')}, {dates[-1]}", *ways])
    software = (
        f"castwise {every('castwise')}{every('commit', ' at ')}",
        f"torch {every('torch')}",
        every("driver", "driver "),
        " to ".join(dict.fromkeys((dates[0], dates[-1]))),
    )
    return "; ".join([f"{every('device_name')} ({', '.join(filter(None, software))})", *ways])


class _HasTrials(Protocol):
    @property
    def trials(self) -> Sequence[Trial]: ...


def machine_line(results: Sequence[_HasTrials], *, is_brief: bool) -> Lines:
    """Return what results were measured on; it is in full wherever there is more room than in a terminal."""
    trials = [trial for result in results for trial in result.trials]
    return Lines([measured_on(trials, is_brief=is_brief)], "dim", is_list=False, full=[measured_on(trials)])


def headline(rows: Sequence[Row]) -> str:
    """Return what all rows share: workload, batch, data, GPUs, techniques; empty if they share nothing."""
    specs = [row.trial.spec for row in rows]

    def shared(values: Iterable[Any]) -> list[Any]:
        distinct = list(dict.fromkeys(values))
        return distinct if len(distinct) == 1 else []

    parts: list[str] = shared(spec.workload for spec in specs)
    parts += [f"batch {batch}" for batch in shared(spec.batch_size for spec in specs)]
    if rows and specs[0].user_model is None:  # the data of a user's model is the user's
        parts += [f"{data} data" for data in shared(spec.data_set for spec in specs)]
    parts += filter(None, shared(spec.world_size_label for spec in specs))
    parts += [join(techniques) for techniques in shared(spec.techniques for spec in specs) if techniques]
    return ", ".join(parts)


@dataclass(frozen=True)
class Note:
    """What a reader of a table must know besides its figures."""

    name: str  # docs/method.md explains each
    short: str  # what was seen, in a few words
    details: tuple[str, ...]  # in full, a line each
    is_routine: bool = False  # whether it holds for any run, and only a detailed answer has it

    @property
    def line(self) -> str:
        return f"{self.name}: {self.short}"


def notes_of(rows: Sequence[Row]) -> list[Note]:
    """Return the notes on a table of steady trials, the most important first."""
    trials = [row.trial for row in rows]
    facts = [trial.facts for trial in trials if trial.facts is not None]
    about_data = dict.fromkeys(fact.data_note for fact in facts if fact.data_note)
    about_model = dict.fromkeys(note for fact in facts for note in fact.notes)
    subject = "script" if any(trial.spec.is_script for trial in trials) else "model"
    is_on_cpu = any(trial.spec.device == "cpu" for trial in trials)
    about_memory = ["peak allocated on a CPU is the growth of the process's resident set: an upper bound"] * is_on_cpu
    telemetry = dict.fromkeys(trial.telemetry_note for trial in trials if trial.telemetry_note)
    return [
        *_failures(rows),
        *(Note("data", each, (each,)) for each in about_data),
        *(Note(subject, each, (each,)) for each in [*about_model, *_side_effects(rows)]),
        *_emulated(rows),
        *_float8(rows),
        *_others(rows),
        *_warnings(rows),
        *_modes(rows),
        *_adjustments(rows),
        *_disagreements(rows),
        *_on_several_gpus(trials),
        *_verdicts(rows),
        *(Note("memory", each, (each,), is_routine=True) for each in about_memory),
        *_cold_starts(rows),
        *(Note("telemetry", each, (f"telemetry {each}",), is_routine=True) for each in telemetry),
    ]


def note_lines(rows: Sequence[Row], more: str) -> list[str]:
    """Return the most important notes in a line each, and where the others are."""
    return first_of([note.line for note in notes_of(rows) if not note.is_routine], more)


def first_of(lines: Sequence[str], more: str = MORE) -> list[str]:
    """Return the first three of some notes, and where the others are: `2 more with --verbose`."""
    left = len(lines) - _MOST_NOTES
    return [*lines[:_MOST_NOTES], *([f"{left} more {more}"] if left > 0 else [])]


def remarks(rows: Sequence[Row]) -> list[str]:
    """Return all notes in full, a line each."""
    return [line for note in notes_of(rows) for line in note.details]


def _who(rows: Sequence[Row], among: Sequence[Row]) -> str:
    """Return which rows of a table a note is about: their precisions, if these tell them apart, or how many."""
    names = [row.trial.spec.precision for row in rows]
    if len(names) <= _MOST_NAMED and len({row.trial.spec.precision for row in among}) == len(among):
        return ", ".join(names)
    return f"{len(rows)} of {pluralize(len(among), 'configuration')}"


def _failures(rows: Sequence[Row]) -> list[Note]:
    failed = [row for row in rows if row.trial.status != "ok"]
    reasons = {(row.trial.status, row.trial.message) for row in failed}
    if len(failed) == len(rows) > 1 and len(reasons) == 1:  # then no precision is the cause
        status, message = reasons.pop()
        return [Note(status, f"all {len(rows)} trials: {message}", (f"all {len(rows)} trials: {status}: {message}",))]
    notes = []
    # Where memory ran out says little; any other message is the cause.
    causes = [
        (row.trial.status, "" if row.trial.status == "oom" else row.trial.message.partition(";")[0]) for row in failed
    ]
    for status, message in dict.fromkeys(causes):
        own = [row for row, cause in zip(failed, causes, strict=True) if cause == (status, message)]
        cause = f" ({message})" if message else ""
        details = tuple(f"{row.trial.spec.label}: {status}: {row.trial.message}" for row in own)
        notes.append(Note(status, f"{_who(own, rows)}{cause}", details))
    return notes


def _float8(rows: Sequence[Row]) -> list[Note]:
    """Return for each precision of FP8 how much of the model runs in it, and what that does to its products."""
    notes = []
    for row in rows:
        facts, share, flops = float8_of(row.trials), fp8_share(row.trials), flops_of(row.trials)
        if facts is None or row.trial.status not in ("ok", "diverged"):
            continue
        part = "an unknown share" if share is None else format_share(share)
        layers = pluralize(facts.num_converted, "layer")
        short, left = f"{row.precision}: {part} of its FLOPs in FP8", [f"{n} {why}" for why, n in facts.left.items()]
        if flops is not None and "attention" in flops.products:
            left.append(f"attention's own products ({format_share(flops.share_of('attention'))} of the FLOPs)")
        noise, underflow = f"not compared with bfloat16: {facts.missing or 'nothing has gradients'}", ""
        if facts.min_sqnr_db is not None:
            noise = f"lowest SQNR {facts.min_sqnr_db:.1f} dB"
            lost = format_share(facts.max_underflow_share or 0.0)
            underflow = f" in {facts.min_sqnr_product}; casts make at most {lost} of values 0"
            underflow += f", in {facts.max_underflow_factor}" if facts.max_underflow_share else ""
        detail = (
            f"fp8: {row.trial.spec.label}: {part} of the FLOPs in FP8, {layers}; left: {', '.join(left) or 'none'}; "
        )
        notes.append(Note("fp8", f"{short}, {noise}", (detail + noise + underflow,)))
    return notes


def _side_effects(rows: Sequence[Row]) -> list[str]:
    """Return what the user's own code was seen to do while it was timed, each with the precisions."""
    precisions: dict[str, list[str]] = {}
    for row in rows:
        for note in dict.fromkeys(note for trial in row.trials for rank in trial.ranks for note in rank.notes):
            precisions.setdefault(note, []).append(row.precision)
    return [f"{note} ({', '.join(dict.fromkeys(names))})" for note, names in precisions.items()]


def _emulated(rows: Sequence[Row]) -> list[Note]:
    found: dict[str, str] = {}
    for row in rows:
        precision = known_precision(row.trial.spec.precision)
        why = None if precision is None else why_emulated(precision, row.trial.environment.hardware)
        if why is not None:
            found[row.trial.spec.precision] = f"{row.trial.spec.precision} is emulated here: {why}"
    return [Note("emulated", f"{', '.join(found)}: no hardware for it", tuple(found.values()))] if found else []


def _others(rows: Sequence[Row]) -> list[Note]:
    """Return in which rows others with the same GPU measured another speed, or that theirs are alike."""
    found = [(row, others) for row in rows if (others := others_of(row)) is not None]
    if not found:
        return []
    strange = [(row, others) for row, others in found if not others.is_normal(row)]
    if not strange:
        alike = f"{_who([row for row, _ in found], rows)}: as fast as others measured with this GPU"
        return [Note("others", alike, (f"others: {alike}",), is_routine=True)]
    lines = [_beside(row, others) for row, others in strange]
    details = tuple(f"others: {row.trial.spec.label}: {line}" for (row, _), line in zip(strange, lines, strict=True))
    return [Note("others", f"{strange[0][0].precision}: {lines[0]}", details)]


def _beside(row: Row, others: Others) -> str:
    """Return what others reached with a row's GPU, what the row has, and the command that says why."""
    unit, theirs, own = unit_of(row.trial), list[str](), list[str]()
    if others.speedups and row.speedup is not None:
        ends = dict.fromkeys(map(format_ratio, (min(others.speedups), max(others.speedups))))
        theirs.append(f"{' to '.join(ends)} fp32")
        own.append(format_ratio(row.speedup))
    if others.throughputs and row.throughput is not None:
        ends = dict.fromkeys(f"{end:,.0f}" for end in (min(others.throughputs), max(others.throughputs)))
        theirs.append(f"{' to '.join(ends)} {unit}/s")
        own.append(f"{row.throughput:,.0f}")
    n = max(len(others.speedups), len(others.throughputs))
    why = f"castwise why {row.trial.spec.workload}"
    return f"others with this GPU reached {' and '.join(theirs)} (n = {n}); yours {' and '.join(own)}: {why}"


def _warnings(rows: Sequence[Row]) -> list[Note]:
    """Return a note for each warning, the noisiest configuration first, with its likely cause and what to try."""
    every = ((row, each) for row in sorted(rows, key=_noise, reverse=True) for each in warnings_of_all(row.trials))
    found = grouped(every, lambda pair: pair[1].name)
    notes = []
    for name in sorted(found, key=WARNING_NAMES.index):
        causes: dict[tuple[str, str], list[tuple[str, TrialWarning]]] = {}
        for row, each in found[name]:
            causes.setdefault((each.cause, each.advice), []).append((row.trial.spec.label, each))
        details = tuple(
            f"{name}: {_seen(warned, len(rows))}; likely cause: {cause}; to try: {advice}"
            for (cause, advice), warned in causes.items()
        )
        who = _who([row for row, _ in found[name]], rows)
        notes.append(Note(name, f"{who} ({found[name][0][1].brief})", details))
    return notes


def warning_lines(rows: Sequence[Row], *, in_full: bool) -> list[str]:
    """Return all warnings of rows in full, or the first three in a line each."""
    found = _warnings(rows)
    return [line for each in found for line in each.details] if in_full else first_of([each.line for each in found])


def warning_values(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return the warnings of rows for JSON, each with the row's key."""
    return [{"key": row.trial.spec.key, **asdict(each)} for row in rows for each in warnings_of_all(row.trials)]


def _modes(rows: Sequence[Row]) -> list[Note]:
    """Return a note for each configuration some of whose processes are in another mode, or how likely none was seen."""
    found = {row: words for row in rows if (words := strays_in_words(row.trials))}
    counts = [len(row.trials) for row in rows if len(row.trials) > 2]  # of two, none stands out
    if found or not counts:
        return [
            Note("modes", f"{row.precision}: {words}", (f"modes: {row.trial.spec.label}: {words}",))
            for row, words in found.items()
        ]
    why = f"{min(counts)} of {min(counts)} processes agree; "
    why += f"{format_share((1 - 1 / 5) ** min(counts))} of runs do not see a slow mode of one process in five"
    return [Note("modes", why, (f"modes: {why}",), is_routine=True)]


def _noise(row: Row) -> float:
    """Return the spread of a configuration's noisiest process."""
    return max(spread(trial) or 0.0 for trial in row.trials)


def _seen(warned: Sequence[tuple[str, TrialWarning]], num_rows: int) -> str:
    if len(warned) == num_rows > 1 and len({each.seen for _, each in warned}) == 1:
        return f"all trials ({warned[0][1].seen})"
    named = ", ".join(f"{label} ({each.seen})" for label, each in warned[:_MOST_TRIALS_NAMED])
    others = dict.fromkeys(label for label, _ in warned[_MOST_TRIALS_NAMED:])
    return f"{named} and {len(others)} more" if others else named


def _batch_ratios(rows: Sequence[Row]) -> dict[Row, float]:
    """Return how large the timed batches of scripts were over those as written, of the rows in which they differ."""
    written = [row for row in rows if row.trial.spec.is_script and row.precision == AS_WRITTEN]
    ratios = {row: batch_ratio(row.trials, written[0].trials) for row in rows if written}
    return {row: ratio for row, ratio in ratios.items() if ratio != 1}


def _adjustments(rows: Sequence[Row]) -> list[Note]:
    """Return why a speed-up is not the ratio of two throughputs as they were measured."""
    notes, ratios = [], _batch_ratios(rows)
    for row, ratio in ratios.items():
        said = f"its timed batches were {format_ratio(ratio)} as large as {AS_WRITTEN}'s, for which speed-ups allow"
        notes.append(Note("batches", f"{row.precision} ({said})", (f"batches: {row.trial.spec.label}: {said}",)))
    drifted = [row for row in rows if row.adjusted_to and row not in ratios]
    for other in dict.fromkeys(row.adjusted_to for row in drifted):
        own = [row for row in drifted if row.adjusted_to == other]
        why = f"the machine's pace changed between rounds: throughput is that of {other}, times the speed-up"
        notes.append(Note("drift", f"{_who(own, rows)}: {why}", tuple(f"{row.trial.spec.label}: {why}" for row in own)))
    return notes


def _disagreements(rows: Sequence[Row]) -> list[Note]:
    """Return an explanation for each pair of figures in the table that seem to contradict each other."""
    notes, ratios, different = list[Note](), list[str](), list[Row]()
    for row in rows:
        paired, unpaired = row.speedup_estimate, row.unpaired_speedup
        if row.adjusted_to or paired is None or not has_interval(paired) or unpaired is None:
            continue
        if paired.low <= unpaired <= paired.high:
            continue
        if format_ratio(unpaired) != format_ratio(row.speedup):
            different.append(row)
            ratios.append(f"{format_ratio(unpaired)} for {row.trial.spec.label} (speed-up {format_ratio(row.speedup)})")
    if ratios:
        why = (
            "speed-up compares blocks measured moments apart; throughput is that of all blocks, whatever drifted "
            f"between them: its ratio is {truncate_list(ratios)}"
        )
        notes.append(Note("drift", f"{_who(different, rows)} (speed-up differs from the ratio of throughputs)", (why,)))
    if any(
        len(row.trials) > 1 and _noise(row) > NOISE and format_share(_noise(row)) != format_share(row.spread or 0.0)
        for row in rows
    ):
        why = "the column spread is the median over the processes of a configuration; the warning is of the noisiest"
        notes.append(Note("spread", why, (why,), is_routine=True))
    return notes


def _on_several_gpus(trials: Sequence[Trial]) -> list[Note]:
    several = [trial for trial in trials if trial.spec.world_size > 1]
    lines = []
    for trial in several:
        units, unit = ("CPU processes", "process") if trial.spec.device_type == "cpu" else ("GPUs", "GPU")
        lines.append(f"throughput is that of all {units} together; batch and peak memory are those of one {unit}")
    notes = [Note("gpus", line, (line,)) for line in dict.fromkeys(lines)]
    partly_read = [
        f"{read} of {trial.spec.world_size}"
        for trial in several
        if (read := gpus_read(trial)) is not None and read < trial.spec.world_size
    ]
    if partly_read:
        read_of = " and ".join(dict.fromkeys(partly_read))
        line = f"energy and power were read of {read_of} GPUs here; the others are taken to be alike"
        notes.append(Note("energy", line, (line,), is_routine=True))
    return notes


def _verdicts(rows: Sequence[Row]) -> list[Note]:
    notes = []
    for kind in ("inconclusive", "incomparable"):
        own = [row for row in rows if row.verdict and row.verdict.kind == kind]
        own = [row for row in own if kind == "incomparable" or len(row.trials) > 1]
        labels: dict[str, list[str]] = {}
        for row in own:
            labels.setdefault(row.verdict.reason if row.verdict else "", []).append(row.trial.spec.label)
        details = tuple(f"{truncate_list(names)}: {kind}: {reason}" for reason, names in labels.items())
        if own:
            notes.append(Note(kind, _who(own, rows), details, is_routine=True))
    return notes


def _cold_starts(rows: Sequence[Row]) -> list[Note]:
    """Return how long users wait before the first timed step: processes, libraries, searches, compilation."""
    found = [(seconds, row.trial.spec.label) for row in rows if (seconds := cold_start_seconds(row.trials[0]))]
    if not found:
        return []
    least, most = min(found, key=lambda pair: pair[0]), max(found, key=lambda pair: pair[0])
    words = format_seconds(least[0])
    if least is not most:
        words += f" ({least[1]}) to {format_seconds(most[0])} ({most[1]})"
    line = f"cold start, from the request for a process to the first timed step: {words}"
    lines = [line for row in rows for trial in row.trials[:: max(1, len(row.trials) - 1)] for line in _stages(trial)]
    return [Note("cold start", words, (line, *lines), is_routine=True)]


def _stages(trial: Trial) -> list[str]:
    """Return a line on what a trial's session spent its time on, and its process within that."""
    facts = trial.facts
    if facts is None or not trial.stage_seconds:
        return []
    own = {name.replace("_", " "): getattr(facts, f"{name}_seconds") for name in _OWN_STAGES}
    session, process = (
        ", ".join(f"{name} {each:.1f}" for name, each in found.items() if each >= _WORTH_SECONDS)
        for found in (trial.stage_seconds, own)
    )
    graphs = f"; {facts.compiled_graphs} graphs compiled, {facts.loaded_graphs} loaded" if facts.compile_seconds else ""
    return [f"seconds of process {trial.spec.repeat + 1}, {trial.spec.label}: {session} (of these {process}{graphs})"]


def cost_lines(rows: Sequence[Row], prices: Prices | None) -> list[str]:
    """Return what an epoch of each trial costs, or a million samples if the size of its data set is unknown."""
    lines = []
    for trial, cost in _costs(rows, prices):
        what = "a million samples cost" if _epoch(trial) is None else f"an epoch of {cost.samples:,} samples costs"
        parts = []
        if cost.energy_cost is not None and cost.joules is not None:
            parts.append(f"{cost.energy_cost:.3g} in electricity ({cost.joules / JOULES_PER_KWH:.3g} kWh, GPU alone)")
        if cost.gpu_hour_cost is not None:
            hours = cost.seconds * trial.spec.world_size / SECONDS_PER_HOUR
            parts.append(f"{cost.gpu_hour_cost:.3g} in GPU hours ({hours:.3g} h)")
        unknown = "what is not known: no energy was measured"
        lines.append(f"{trial.spec.label}: {what} {' or '.join(parts) or unknown}")
    return lines


def costs(rows: Sequence[Row], prices: Prices) -> list[dict[str, Any]]:
    """Return the same for JSON, by the trial's key."""
    return [{"key": trial.spec.key, **asdict(cost)} for trial, cost in _costs(rows, prices)]


def _costs(rows: Sequence[Row], prices: Prices | None) -> list[tuple[Trial, EpochCost]]:
    if not prices:
        return []
    found = ((row.trial, cost_of(row.trials, row.throughput, _epoch(row.trial) or _MILLION, prices)) for row in rows)
    return [(trial, cost) for trial, cost in found if cost is not None]


def _epoch(trial: Trial) -> int | None:
    return train_samples(imitated_data_set(trial.spec.data_set) or trial.spec.data_set)
