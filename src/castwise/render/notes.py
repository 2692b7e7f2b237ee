"""The lines around a table of steady trials: machine, failures, warnings, costs and code to paste."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from castwise.analysis.advice import Advice
from castwise.analysis.energy import JOULES_PER_KWH, SECONDS_PER_HOUR, EpochCost, Prices, cost_of, gpus_read
from castwise.analysis.result_table import Row
from castwise.analysis.statistics import has_interval
from castwise.analysis.steady_metrics import cold_start_seconds, spread
from castwise.analysis.warnings import NOISE, TrialWarning, warnings_of_all
from castwise.records.schema import Trial
from castwise.registry.datasets import imitated_data_set, train_samples
from castwise.registry.precisions import known_precision, why_emulated
from castwise.registry.techniques import join
from castwise.render.units import format_ratio, format_seconds
from castwise.spec.quantities import format_share, truncate_list

_MILLION = 1_000_000
_MOST_TRIALS_NAMED = 6  # in a warning; JSON has all


def measured_on(trials: Sequence[Trial]) -> str:
    """Return the devices, the software and the dates: `NVIDIA H200 (castwise 0.1.0 at 80a6, torch 2.11.0, 2026-11-21)`.

    If the trials (at least one) differ, every device, version and commit is named.
    """
    environments = [trial.environment for trial in trials]
    commits = _and(each.commit for each in environments if each.commit)
    drivers = _and(each.driver for each in environments if each.driver)
    dates = sorted({trial.started_at[:10] for trial in trials})
    software = (
        f"castwise {_and(each.castwise for each in environments)}" + (f" at {commits}" if commits else ""),
        f"torch {_and(each.torch for each in environments)}",
        f"driver {drivers}" if drivers else "",
        " to ".join(dict.fromkeys((dates[0], dates[-1]))),
    )
    return f"{_and(each.device_name for each in environments)} ({', '.join(filter(None, software))})"


def _and(values: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(values))


def headline(rows: Sequence[Row]) -> str:
    """Return what all rows share: workload, batch, data, GPUs, techniques, device, software."""
    if not rows:
        return "no trials"
    specs = [row.trial.spec for row in rows]

    def shared(values: Iterable[Any]) -> list[Any]:
        distinct = list(dict.fromkeys(values))
        return distinct if len(distinct) == 1 else []

    parts: list[str] = shared(spec.workload for spec in specs)
    parts += [f"batch {batch}" for batch in shared(spec.batch_size for spec in specs)]
    if specs[0].user_model is None:  # the data of a user's model is the user's
        parts += [f"{data} data" for data in shared(spec.data_set for spec in specs)]
    parts += filter(None, shared(spec.world_size_label for spec in specs))
    parts += [join(techniques) for techniques in shared(spec.techniques for spec in specs) if techniques]
    place = measured_on([trial for row in rows for trial in row.trials])
    return f"{', '.join(parts)} on {place}" if parts else f"On {place}"


def remarks(rows: Sequence[Row]) -> list[str]:
    """Return what a reader of the table must know besides its figures, a line each."""
    trials = [row.trial for row in rows]
    facts = [trial.facts for trial in trials if trial.facts is not None]
    lines = _failures(trials)
    lines += dict.fromkeys(fact.data_note for fact in facts if fact.data_note)
    lines += dict.fromkeys(note for fact in facts for note in fact.notes)
    lines += _side_effects(rows)
    lines += _emulated(trials)
    lines += _warnings(rows)
    lines += _disagreements(rows)
    lines += _on_several_gpus(trials)
    for row in rows:
        kind = row.verdict and row.verdict.kind
        if row.verdict and (kind == "incomparable" or (kind == "inconclusive" and len(row.trials) > 1)):
            lines.append(f"{row.trial.spec.label}: {kind}: {row.verdict.reason}")
    if any(trial.spec.device == "cpu" for trial in trials):
        lines.append("peak allocated on a CPU is the growth of the process's resident set: an upper bound")
    lines += _cold_starts(rows)
    lines += dict.fromkeys(f"telemetry {trial.telemetry_note}" for trial in trials if trial.telemetry_note)
    return lines


def _failures(trials: Sequence[Trial]) -> list[str]:
    failed = [trial for trial in trials if trial.status != "ok"]
    reasons = {(trial.status, trial.message) for trial in failed}
    if len(failed) == len(trials) > 1 and len(reasons) == 1:  # then no precision is the cause
        return [f"all {len(trials)} trials: {failed[0].status}: {failed[0].message}"]
    return [f"{trial.spec.label}: {trial.status}: {trial.message}" for trial in failed]


def _side_effects(rows: Sequence[Row]) -> list[str]:
    """Return what the user's own code was seen to do while it was timed, each with the precisions."""
    precisions: dict[str, list[str]] = {}
    for row in rows:
        for note in dict.fromkeys(note for trial in row.trials for rank in trial.ranks for note in rank.notes):
            precisions.setdefault(note, []).append(row.trial.spec.precision)
    return [f"{note} ({', '.join(names)})" for note, names in precisions.items()]


def _emulated(trials: Sequence[Trial]) -> list[str]:
    lines = []
    for trial in trials:
        precision = known_precision(trial.spec.precision)
        why = None if precision is None else why_emulated(precision, trial.environment.hardware)
        if why is not None:
            lines.append(f"{trial.spec.precision} is emulated here: {why}")
    return list(dict.fromkeys(lines))


def _warnings(rows: Sequence[Row]) -> list[str]:
    """Return a line for each warning with what was seen in which trial, its likely cause and what to try."""
    found: dict[tuple[str, str, str], list[tuple[str, TrialWarning]]] = {}
    for row in rows:
        for each in warnings_of_all(row.trials):
            found.setdefault((each.name, each.cause, each.advice), []).append((row.trial.spec.label, each))
    return [
        f"{name}: {_seen(warned, len(rows))}; likely cause: {cause}; to try: {advice}"
        for (name, cause, advice), warned in found.items()
    ]


def _seen(warned: Sequence[tuple[str, TrialWarning]], num_rows: int) -> str:
    if len(warned) == num_rows > 1 and len({each.seen for _, each in warned}) == 1:
        return f"all trials ({warned[0][1].seen})"
    named = ", ".join(f"{label} ({each.seen})" for label, each in warned[:_MOST_TRIALS_NAMED])
    others = dict.fromkeys(label for label, _ in warned[_MOST_TRIALS_NAMED:])
    return f"{named}, and as well {', '.join(others)}" if others else named


def _disagreements(rows: Sequence[Row]) -> list[str]:
    """Return an explanation for each pair of figures in the table that seem to contradict each other."""
    lines, ratios = [], []
    for row in rows:
        paired, unpaired = row.speedup_estimate, row.unpaired_speedup
        if paired is None or not has_interval(paired) or unpaired is None or paired.low <= unpaired <= paired.high:
            continue
        if format_ratio(unpaired) != format_ratio(row.speedup):
            ratios.append(f"{format_ratio(unpaired)} for {row.trial.spec.label} (speed-up {format_ratio(row.speedup)})")
    if ratios:
        lines.append(
            "speed-up compares blocks measured moments apart; throughput is that of all blocks, whatever drifted "
            f"between them: its ratio is {truncate_list(ratios)}"
        )
    most = [max(spread(trial) or 0.0 for trial in row.trials) for row in rows]
    if any(
        len(row.trials) > 1 and noisiest > NOISE and format_share(noisiest) != format_share(row.spread or 0.0)
        for row, noisiest in zip(rows, most, strict=True)
    ):
        lines.append(
            "the column spread is the median over the processes of a configuration; the warning is of the noisiest"
        )
    return lines


def _on_several_gpus(trials: Sequence[Trial]) -> list[str]:
    several = [trial for trial in trials if trial.spec.world_size > 1]
    lines = []
    for trial in several:
        units, unit = ("CPU processes", "process") if trial.spec.device_type == "cpu" else ("GPUs", "GPU")
        lines.append(f"throughput is that of all {units} together; batch and peak memory are those of one {unit}")
    partly_read = [
        f"{read} of {trial.spec.world_size}"
        for trial in several
        if (read := gpus_read(trial)) is not None and read < trial.spec.world_size
    ]
    if partly_read:
        lines.append(f"energy and power were read of {_and(partly_read)} GPUs here; the others are taken to be alike")
    return list(dict.fromkeys(lines))


def _cold_starts(rows: Sequence[Row]) -> list[str]:
    """Return how long users wait before the first timed step: processes, libraries, searches, compilation."""
    found = [(seconds, row.trial.spec.label) for row in rows if (seconds := cold_start_seconds(row.trials[0]))]
    if not found:
        return []
    least, most = min(found, key=lambda pair: pair[0]), max(found, key=lambda pair: pair[0])
    words = format_seconds(least[0])
    if least is not most:
        words += f" ({least[1]}) to {format_seconds(most[0])} ({most[1]})"
    return [f"cold start, from the request for a process to the first timed step: {words}"]


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
    """Return what an epoch of each trial costs, by the trial's key, for JSON."""
    return [{"key": trial.spec.key, **asdict(cost)} for trial, cost in _costs(rows, prices)]


def _costs(rows: Sequence[Row], prices: Prices | None) -> list[tuple[Trial, EpochCost]]:
    if not prices:
        return []
    found = ((row.trial, cost_of(row.trial, _epoch(row.trial) or _MILLION, prices)) for row in rows)
    return [(trial, cost) for trial, cost in found if cost is not None]


def _epoch(trial: Trial) -> int | None:
    return train_samples(imitated_data_set(trial.spec.data_set) or trial.spec.data_set)


def snippet_lines(advice: Advice) -> list[str]:
    """Return a comment for each framework with what to set there, and one for those that have no such mode."""
    lines = [f"# {snippet.framework}: {snippet.code}" for snippet in advice.snippets if snippet.code]
    lacking = [snippet.framework for snippet in advice.snippets if not snippet.code]
    return lines + ([f"# {', '.join(lacking)}: no such mode"] if lacking else [])
