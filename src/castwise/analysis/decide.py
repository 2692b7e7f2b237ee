"""Decide which loop to take, from ratios of rows and their intervals: one answer everywhere, as data and in words."""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from castwise.analysis.causes import diagnose, try_line
from castwise.analysis.code_snippets import (
    Snippet,
    framework_snippets,
    loop_code,
    script_code,
    written_in_words,
    written_name,
)
from castwise.analysis.model_flops import why_inexact
from castwise.analysis.result_table import Row
from castwise.analysis.speedup import session_speedup_estimate, speedup_estimate, strays_among
from castwise.analysis.statistics import MOST_ROUNDS, Estimate
from castwise.analysis.steady_metrics import block_means, peak_allocated_bytes, step_seconds
from castwise.analysis.training_metrics import data_share, epochs_of, is_whole, length_in_words, perplexity
from castwise.analysis.warnings import mean_reading, warnings_of_all
from castwise.records.schema import Epoch, Trial
from castwise.registry.datasets import imitated_data_set
from castwise.registry.precisions import (
    AS_WRITTEN,
    BASELINE,
    BESIDE_FP8,
    DEFAULT,
    REFERENCE_WORDS,
    find_precision,
    is_same_as_fp32,
    known_precision,
    precision_row,
    why_emulated,
)
from castwise.registry.techniques import join, narrowing, rows_of
from castwise.spec.quantities import TOO_NOISY, format_interval, with_interval
from castwise.spec.trial import TrialSpec
from castwise.spec.typed import TypedLine, advised_line, measuring_options

# A gain smaller than this is not worth a change of numerics. The figure is a choice, not a measurement.
WORTHWHILE = 1.03
# A configuration that one process shows to be faster, or slower, by more than this factor needs no other: processes of
# a configuration were never seen to differ by so much. One of an emulated precision need only be slower, as is to be
# expected.
CLEAR = 2.0
# The same if the machine was disturbed, or there is no interval over blocks. Source: equal loops on a busy CPU, which
# differed by 0.39 to 2.09.
_CLEAR_WITH_DOUBTS = 5.0

_MODE_DIFFERENCE = 0.02  # the share by which the clock or the memory of a mode is another. Source: chosen here
# From this factor on, and of so many sessions, it is said that what was chosen is as fast by luck, too.
_LUCK, _FEWEST_SESSIONS = 1.01, 3

Decision = Literal["take", "stay", "undecided", "nothing"]

# Why a reference has no figures, by its status.
_WITHOUT_REFERENCE = {
    "oom": "{} does not fit into memory at this batch size",
    "crashed": "{} crashed, so there is nothing to compare with",
    "timeout": "{} took too long, so there is nothing to compare with",
    "unsupported": "{} does not run here, so there is nothing to compare with",
    "diverged": "{} diverged: look at the learning rate before anything else",
}
# Intervals hold what processes differ by. These say that the machine itself was disturbed.
_DOUBTS: dict[str, str] = {
    "noisy": "noisy",
    "cpu-starved": "busy CPU",
    "foreign-process": "shared GPU",
    "untimed-work": "work between steps not timed whole",
    "thermal-drift": "GPU warming up",
}
# Why one that was faster is not taken; why not FP8 is in the sentence.
_WHY_NOT = (
    ", but keeps no fp32 weights",
    ", but has numbers in fewer bits",
    ": within 3 %, so the simpler one",
    ", but not proven",
)
_WHAT_IS_NARROW = {"state": "the optimizer's state in fewer bits", "sums": "sums of products in fewer bits"}
_FAILURES = {"diverged": "diverged", "oom": "ran out of memory"}
_REFERENCES = (AS_WRITTEN, DEFAULT, BASELINE)  # the first that was measured is what a gain is over
_SAVES = 0.95  # of the memory: what holds less is said to save some. Source: chosen here
_CHECK_ACCURACY = "check the accuracy first."
_NO_INTERVAL = "but one process of each gives no interval"
_CLEAR_SLOWER = "At half the speed or less, one run is enough."
_CLEAR_FASTER = "At twice the speed or more, one run is enough."
_WAITS = 0.5  # of the training time; a run that waits longer for its data says little about precisions


@dataclass(frozen=True, repr=False, eq=False)
class Advice:
    """What to do, how sure that is, and the code that does it."""

    rows: tuple[Row, ...]  # what was measured of a workload with a batch size on a number of GPUs
    decision: Decision  # `take` another loop and `stay` rest on intervals, of training runs on the figures if need be
    row: Row | None = None  # to take or to stay with; None if that is undecided
    reference: Row | None = None  # what the others are compared with
    next: Row | None = None  # the fastest that is not taken, if none is proven faster than the reference
    over_next: Estimate | None = None  # how many times as fast as the reference that is
    rivals: tuple[Row, ...] = ()  # that may be as fast or faster
    over_written: Estimate | None = None  # the row's speed-up over the script as written
    over_default: Estimate | None = None  # over PyTorch's default in the plain loop
    over_fp32: Estimate | None = None  # and over fp32
    expected: float | None = None  # the row's speed-up over the reference without the luck that made it the fastest
    memory_ratio: float | None = None  # peak allocated over that of what it is compared with
    sentence: str = ""
    written: str = ""  # of a script: what it trains in as written, and what that loses; empty if that is plain float32
    why: str = ""  # why this one and no other
    how_sure: str = ""  # how many processes it rests on, and what disturbed them
    accuracy: str = ""  # whether what is taken trains as well, as far as records show it; empty if that is no question
    is_less_accurate: bool = False  # it trains worse, or some of its runs diverge
    is_as_accurate: bool = False  # a verdict is on record that it trains as well, or better
    limit: str = ""  # why the fastest is no faster, as far as the records show it
    code: str = ""  # the lines that switch the precision on; empty if there is nothing to switch
    snippets: tuple[Snippet, ...] = ()  # what to set in the frameworks around PyTorch
    command: str = ""  # decides what is undecided; of objects a call of castwise.compare
    ask: str = ""  # the command, or the call, that says more of the limit
    cut: str = ""  # how training runs were cut short, in words; empty for whole runs and for timed steps
    narrow: "Mapping[Row, Advice]" = field(default_factory=dict)  # rows with numbers in fewer bits, each as judged

    def __repr__(self) -> str:
        return f"Advice({self.sentence!r})"

    def __str__(self) -> str:
        return self.sentence

    @property
    def workload(self) -> str:
        return self.rows[0].trial.spec.workload

    @property
    def batch_size(self) -> int:
        return self.rows[0].trial.spec.batch_size

    @property
    def num_gpus(self) -> int:
        return self.rows[0].trial.spec.world_size

    @property
    def precision(self) -> str | None:
        """Return the precision to take or to stay with; None if that is undecided."""
        return None if self.row is None else self.row.precision

    @property
    def techniques(self) -> tuple[str, ...]:
        return () if self.row is None else self.row.techniques

    @property
    def key(self) -> str | None:
        return None if self.row is None else self.row.trial.spec.key

    def may_take(self, row: Row) -> bool:
        """Return whether weights and optimizer are as exact as in float32, or a verdict says that it trains as well."""
        return _keeps_float32(row) or (row in self.narrow and self.narrow[row].is_as_accurate)

    @property
    def same_loop(self) -> str:
        """Return in words that the reference has the same techniques; empty if it is the plain loop."""
        loop = () if self.reference is None else self.reference.techniques
        return " in the same loop" if loop and loop == self.techniques else ""

    @property
    def over(self) -> Estimate | None:
        """Return how many times as fast what is taken trains as the reference; None without one."""
        return self.over_written or self.over_default or self.over_fp32

    @property
    def speedup(self) -> float | None:
        return None if self.over is None else self.over.value


Judge = Callable[[Advice], Advice]  # adds whether what is taken trains as well


def decide(rows: Sequence[Row], typed: TypedLine | None = None, judge: Judge = lambda advice: advice) -> list[Advice]:
    """Return one piece of advice for each workload, batch size and number of GPUs, in order.

    It is the fastest loop that keeps float32 weights, or that a verdict calls as accurate, over all precisions and
    techniques that were measured, compared with the plain loop; of training runs, whose figures count without an
    interval, too, one that is no less accurate, if there is one. Commands are built from what the user typed, if that
    is at hand.
    """
    settings: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        spec = row.trial.spec
        loop = spec.parallelism if spec.kind == "training" else ""
        settings.setdefault((spec.kind, spec.workload, spec.batch_size, spec.world_size, loop), []).append(row)
    return [_answer(own, typed, judge) for own in settings.values()]


def _answer(rows: list[Row], typed: TypedLine | None, judge: Judge) -> Advice:
    narrow = {
        row: judge(Advice(tuple(rows), "take", row=row))
        for row in rows
        if not _keeps_float32(row) and _is_measured(row)
    }
    advice = _decide(rows, narrow)
    if advice.decision == "undecided":
        advice = replace(advice, command=_command(advice, typed))
    elif advice.decision == "take":
        advice = _with_code(advice)
    ask = advised_line("why", advice.workload, {}, typed)
    written = next((row.trial for row in rows if row.precision == AS_WRITTEN), None)
    said = "" if written is None else written_in_words(written)
    advice = judge(replace(advice, sentence=_sentence(advice), written=said, limit=_limit(advice), ask=ask))
    if _is_run(rows) and advice.is_less_accurate:
        rest = [row for row in rows if row is not advice.row]
        slower = _answer(rest, typed, judge)
        if slower.decision == "take" and not slower.is_less_accurate:
            return replace(slower, rows=tuple(rows), why=f"the fastest that is no less accurate; {slower.why}")
    return advice


def _is_run(rows: Sequence[Row]) -> bool:
    return rows[0].trial.spec.kind == "training"


def _limit(advice: Advice) -> str:
    """Return the first cause of what is taken, or of the fastest that is not; empty if none is known."""
    timed = [] if _is_run(advice.rows) else [row for row in advice.rows if _is_measured(row)]
    taken = [row for row in timed if row is advice.row]
    if advice.decision != "take":
        taken = [row for row in timed if row.precision not in (DEFAULT, BASELINE) and advice.may_take(row)]
    if not taken:
        return ""
    (found,) = diagnose([max(taken, key=_speed)], advice.rows)
    if not found.causes:
        return ""
    cause, spec = found.causes[0], found.row.trial.spec
    said = f"{_name(found.row)}: {cause.evidence}"
    codes = [technique.code for technique in rows_of([cause.technique]) if technique.code is not None]
    lines = [code.loader for code in codes if code.loader]
    line = f"; DataLoader(..., {lines[0]})" if lines else ""
    return f"{said}. Try {try_line(cause, spec.techniques)}{line}" if spec.is_script else said


def _decide(rows: list[Row], narrow: Mapping[Row, Advice]) -> Advice:
    """Return the decision as data, without its sentence, the lines to paste and the command that decides."""
    measured = [row for row in rows if _is_measured(row)]
    references = references_among(rows)
    reference = next((row for row in references if row in measured), None)
    advice = Advice(tuple(rows), "nothing", reference=reference, narrow=narrow)
    if not measured:
        return replace(advice, why=next((row.trial.message for row in rows if row.trial.message), ""))
    candidates = _candidates(advice, measured)
    if reference is None:
        return _decide_without_reference(advice, candidates)
    ratios = _ratios_over(reference, candidates)
    if not ratios:
        failed = [f"{_loop_name(row, reference)}: {row.trial.status}" for row in rows if row.trial.status != "ok"]
        alone = "no other precision was measured (--precision names them, --budget gives time)"
        return replace(advice, why=", ".join(failed) or alone * (len(measured) == 1))
    if proven := [row for row, ratio in ratios if _is_proven(ratio, reference, row)]:
        advice = replace(advice, decision="take", expected=_expected(proven, reference))
        return _with_row(advice, _simplest_of_the_fastest(proven))
    return _decide_without_proof(advice, reference, ratios)


def _ratios_over(reference: Row, candidates: Sequence[Row]) -> list[tuple[Row, Estimate]]:
    """Return the ratios of rows to one, with low ends that hold for the choice among them.

    The more rows there are to choose among, the more likely one of them looks faster by chance.
    Source: S. Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Stat. 6 (1979).
    """
    ratios = {row: ratio for row in candidates if (ratio := row.over(reference)) is not None}
    left = [row for row, ratio in ratios.items() if _is_known(ratio)]
    while left:
        bounds = {row: row.over(reference, family=len(left)) or ratios[row] for row in left}
        ratios |= {row: replace(ratios[row], low=bound.low) for row, bound in bounds.items()}
        proven = [row for row in left if ratios[row].low > 1]
        left = [row for row in left if row not in proven] if proven else []
    return list(ratios.items())


def _expected(proven: Sequence[Row], reference: Row) -> float | None:
    """Return how fast the choice is if luck has no part in it; None if that cannot be told, and of training runs.

    Each session says how fast the one is that the others choose: the fastest of several is so by luck, too.
    """
    values = []
    for own in reference.trials:
        others = {row: [trial for trial in row.trials if trial.session_id != own.session_id] for row in proven}
        ratios = {row: speedup_estimate(reference.trials, trials) for row, trials in others.items()}
        speeds = {row: ratio.value for row, ratio in ratios.items() if ratio is not None}
        chosen = _simplest_of_the_fastest(list(speeds), speeds.__getitem__).trials if speeds else ()
        kept = [trial for trial in chosen if trial.session_id == own.session_id]
        if (ratio := speedup_estimate([own], kept)) is not None:
            values.append(ratio.value)
    return statistics.geometric_mean(values) if len(values) >= _FEWEST_SESSIONS and not _is_run(proven) else None


def _decide_without_proof(advice: Advice, reference: Row, ratios: Sequence[tuple[Row, Estimate]]) -> Advice:
    """Return to stay with the reference, or that some may be faster; of training runs the figures decide."""
    own = written_name(reference.trial)  # the same loop under another name
    may_be_faster = [
        (row, each)
        for row, each in ratios
        if (row.precision, row.techniques) != (own, reference.techniques)
        if (_is_open(each) or not _is_known(each)) and one_process_shows(reference.trials, row.trials) != "slower"
    ]
    is_undecided = may_be_faster and not _is_run(advice.rows)
    best, ratio = max(may_be_faster if is_undecided else ratios, key=lambda pair: pair[1].value)
    advice = replace(advice, next=best, over_next=ratio, how_sure=_how_sure(reference, best))
    if is_undecided:
        about = "about " if _is_too_noisy(ratio) else ""
        times = f"{ratio.value:.2f}×" if about else _times(ratio)
        why = f"{_name(best)} was {about}{times} as fast as {_reference_name(reference)}"
        return replace(advice, decision="undecided", rivals=tuple(row for row, _ in may_be_faster), why=why)
    chance = ", perhaps by chance" if ratio.value >= WORTHWHILE else ""
    why = _waiting(best) or f"{_name(best)}, the next, trains {_times(ratio)} as fast{chance}"
    return replace(_with_row(replace(advice, decision="stay"), reference), how_sure=advice.how_sure, why=why)


def _waiting(row: Row) -> str:
    """Return that a training run waits for its data, if it does for most of the time."""
    share = data_share(row.trial) or 0.0
    return f"waits for data {100 * share:.0f} % of the time" if share >= _WAITS else ""


def _decide_without_reference(advice: Advice, candidates: Sequence[Row]) -> Advice:
    """Return the fastest of those that could be measured, if that is proven, and why there is nothing to compare."""
    why = "neither PyTorch's default nor fp32 was measured"
    if references := references_among(advice.rows):
        failed = references[0]
        why = _WITHOUT_REFERENCE.get(failed.trial.status, "{} was not measured").format(_reference_name(failed))
    elif len({row.precision for row in advice.rows if _is_measured(row)}) == 1:
        return replace(advice, next=candidates[0], why=why)
    fastest = max(candidates, key=_speed)
    rivals = [(row, fastest.over(row)) for row in candidates if row is not fastest]
    rest = [row for row, ratio in rivals if ratio is None or not _is_known(ratio) or _is_open(ratio)]
    how_sure = _how_sure(fastest, (rest or candidates)[0])
    advice = replace(advice, next=fastest, how_sure=how_sure, why=why)
    if not rest:
        return replace(advice, decision="take", row=_simplest_of_the_fastest(candidates))
    doubt = f"but {_and(rest)} may be as fast" if all(_is_known(ratio) for _, ratio in rivals) else _NO_INTERVAL
    among = _among(advice, [row for row in advice.rows if _is_measured(row)])
    seen = f"{_name(fastest)} was the fastest{among}, {doubt}; {why}"
    return replace(advice, decision="undecided", rivals=tuple(rest), why=seen)


def _candidates(advice: Advice, measured: Sequence[Row]) -> list[Row]:
    """Return what may be taken: it is exact, or judged as accurate, if any is, and FP8 is good enough."""
    reference = advice.reference
    keeping = [row for row in measured if advice.may_take(row) and row is not reference]
    keeping = [row for row in keeping if _why_not_fp8(row, is_proven=reference is None) is None]
    return keeping or ([] if reference is not None else list(measured))


def _is_measured(row: Row) -> bool:
    return row.trial.status == "ok" and row.throughput is not None


def _is_proven(ratio: Estimate, reference: Row, row: Row) -> bool:
    """Return whether a ratio is worth a change; that of one training run, which has no interval, counts as it is."""
    has_proof = ratio.low > 1 and _is_known(ratio)
    if _is_run([row]):
        has_proof |= ratio.n == 1
    elif not has_proof:
        has_proof = one_process_shows(reference.trials, row.trials) == "faster"
    return ratio.value >= WORTHWHILE and has_proof


def _with_row(advice: Advice, row: Row) -> Advice:
    """Return advice on a row, with how it compares with the references and with all others."""
    reference, references = advice.reference, references_among(advice.rows)
    assert reference is not None
    over = {other.precision: row.over(other) for other in references if other is not row and _is_measured(other)}
    luck, stated = "", row.over(reference)
    if advice.expected is not None and stated is not None and stated.value >= _LUCK * advice.expected:
        luck = f", expect {advice.expected:.2f}× (the fastest of several is so by luck, too)"
    memory = None
    if row.peak_allocated_bytes and reference.peak_allocated_bytes:
        memory = row.peak_allocated_bytes / reference.peak_allocated_bytes
    cut = ""
    if _is_run(advice.rows):
        shortened = (side.trial for side in (row, reference, advice.next) if side and not is_whole(side.trial))
        cut = next(map(length_in_words, shortened), "")
    return replace(
        advice,
        row=row,
        over_written=over.get(AS_WRITTEN),
        over_default=over.get(DEFAULT),
        over_fp32=over.get(BASELINE),
        memory_ratio=memory,
        why=_waiting(row) or _why(row, advice),
        how_sure=_how_sure(reference, row) + luck,
        cut=cut,
    )


def _sentence(advice: Advice) -> str:
    spec, row, reference = advice.rows[0].trial.spec, advice.row, advice.reference
    where = f"{spec.workload}, batch {spec.batch_size}"
    where += f" on {spec.world_size} GPUs" if spec.world_size > 1 else ""
    measured = [candidate for candidate in advice.rows if _is_measured(candidate)]
    cut = f" in runs that were cut short ({advice.cut}), so that their end is unknown" if advice.cut else ""
    if advice.decision == "undecided":
        return f"{where}: undecided. {_doubt(advice)}"
    if row is None or reference is None:
        return f"{where}: {_without_comparison(advice, measured)}"
    if advice.decision == "stay":
        stay = f"stay with {_reference_name(reference)}"
        if not precision_row(written_name(reference.trial) or reference.precision).keeps_float32_weights:
            stay = f"no precision with float32 weights is as fast as {_reference_name(reference)}"
        return f"{where}: {stay}. {_closest(advice, cut)}{_caution(advice, measured, reference)}"
    doubts = _doubts(reference, row)
    verb = f"{_name(row)} looks faster ({', '.join(doubts)})" if doubts else f"take {_name(row)}"
    verb = f"{verb}. It" if not cut else _name(row)
    over = row.over(reference)
    clear = "" if _is_run(measured) or over is None or _is_known(over) else f" {_CLEAR_FASTER}"
    return f"{where}: {verb} trains {_gain(advice)}{cut}.{clear}{_caution(advice, measured, row)}"


def _without_comparison(advice: Advice, measured: Sequence[Row]) -> str:
    """Return what to do, in words, if there is no reference, or nothing to compare it with."""
    row, reference, other = advice.row, advice.reference, advice.next
    if reference is not None:
        if narrow := [each for each in measured if each is not reference]:
            said = f"nothing else keeps as many bits as {_reference_name(reference)}."
            return f"{said} {_not_taken(advice, narrow, reference)}"
        name = _name(reference) if reference.trial.spec.techniques else _reference_name(reference)
        return f"only {name} was measured: there is nothing to compare it with."
    if other is None:
        return "nothing to recommend. No trial ended well."
    if row is None:
        return f"nothing to compare {_name(other)} with: {advice.why}."
    rank = (
        f"the fastest{_among(advice, measured)}" if row is other else f"simpler than {_name(other)} and hardly slower"
    )
    if len(_candidates(advice, measured)) == 1:
        is_fp8_refused = any(_why_not_fp8(each, is_proven=True) for each in measured)
        rank = f"the only one{_among(advice, measured)} that {'can be taken' if is_fp8_refused else 'trained'}"
    weights = "" if advice.may_take(row) else f" It keeps {_what_is_narrow([row])}: {_CHECK_ACCURACY}"
    return f"take {_name(row)}, {rank}; {advice.why}.{weights}{_caution(advice, measured, row)}"


def _closest(advice: Advice, cut: str) -> str:
    """Return what comes closest to the reference that one stays with, and why it is not taken."""
    row, ratio = advice.next, advice.over_next
    assert row is not None
    assert ratio is not None
    if ratio.value >= WORTHWHILE:
        return f"{_name(row)} trains {_times(ratio)} as fast{cut}, which may be chance."
    if ratio.value > 1:
        return f"{_name(row)} gains too little for a change of numerics: it trains {_times(ratio)} as fast{cut}."
    clear = ""
    if not _is_run(advice.rows) and (not _is_known(ratio) or _is_open(ratio)):
        clear = f" {_CLEAR_SLOWER}"
        if _is_emulated(row.trial):
            clear = " It is emulated here, and one run shows that it is slower."
    return f"{_name(row)} comes closest, at {_times(ratio)} its speed{cut}.{clear}"


def _doubt(advice: Advice) -> str:
    """Return what was seen and what decides; on a busy CPU nothing does before other programs end.

    Without a command nothing decides.
    """
    seen, ratio, rows = advice.why, advice.over_next, _compared(advice)
    if advice.reference is not None and ratio is not None:
        doubt = "so it may be slower or faster" if _is_known(ratio) else _NO_INTERVAL
        seen += f", {'but runs differ too much' if _is_too_noisy(ratio) else doubt}"
    if not advice.command:
        many = f"after {min(len(row.trials) for row in rows)} rounds"
        return f"{seen}. This machine is too noisy to tell them apart {many}."
    warnings = (warning for row in rows for warning in warnings_of_all(row.trials))
    busy = next((warning.brief for warning in warnings if warning.name == "cpu-starved"), None)
    if busy is None:
        return f"{seen}. More rounds may decide: {advice.command}"
    return f"{seen}. Other programs use the CPU ({busy}). Stop them, then run: {advice.command}"


def _compared(advice: Advice) -> list[Row]:
    """Return what is undecided: the reference, or else the fastest, and what may be as fast."""
    first = advice.reference or advice.next
    return [*([] if first is None else [first]), *advice.rivals]


def _is_too_noisy(ratio: Estimate) -> bool:
    return format_interval(ratio.value, ratio.low, ratio.high) == TOO_NOISY


def _among(advice: Advice, measured: Sequence[Row]) -> str:
    return " with float32 weights" if len(_candidates(advice, measured)) < len(measured) else ""


def _gain(advice: Advice) -> str:
    """Return how much faster what is taken is than the reference and than fp32, how well it trains, in which memory."""
    row, reference = advice.row, advice.reference
    assert row is not None
    assert reference is not None
    over = row.over(reference)
    words = f"{_times(over)} as fast as {_reference_name(reference)}{advice.same_loop}" if over is not None else ""
    if reference.precision != BASELINE and advice.over_fp32 is not None:
        words += f" ({advice.over_fp32.value:.2f}× as fast as fp32)"
    words += _learned(row, reference)
    if (memory := advice.memory_ratio) is not None:
        share = "the same" if 0.995 <= memory < 1.005 else f"{memory:.2f}× the"
        words += f", in {share} peak allocated memory"
    if row.skipped_steps:
        words += f"; loss scaling skipped {row.skipped_steps} step{'s' if row.skipped_steps > 1 else ''}"
    return words


def _why_not_fp8(row: Row, *, is_proven: bool = False) -> str | None:
    """Return why a row of FP8 is not taken; None if it may be, and for other precisions.

    Its products have to be good enough, and it has to be proven faster than bf16-mixed in the same loop, unless the
    caller proves that itself.
    """
    if not precision_row(row.precision).float8_recipe:
        return None
    if (reason := why_inexact(row.trials)) is not None:
        return reason
    ratio = row.bf16_estimate
    if row.trial.spec.kind == "training":  # whose accuracy is known, and its ratio to fp32
        return None
    if ratio is None:
        return f"{BESIDE_FP8} was not measured in the same loop"
    if is_proven or (_is_known(ratio) and ratio.low > 1 and ratio.value >= WORTHWHILE):
        return None
    return f"not proven faster than {BESIDE_FP8} in the same loop"


def references_among(rows: Sequence[Row]) -> list[Row]:
    """Return PyTorch's default and fp32 in the simplest loop that was measured in one of them, the default first.

    A script as it is written comes before both.
    """
    plain = [row for row in rows if row.precision in _REFERENCES]
    if not plain:
        return []
    spec = min(plain, key=lambda row: (len(row.trial.spec.techniques), row.trial.spec.parallelism == "dp")).trial.spec
    same = [
        row
        for row in plain
        if (row.trial.spec.techniques, row.trial.spec.parallelism) == (spec.techniques, spec.parallelism)
    ]
    return sorted(same, key=lambda row: _REFERENCES.index(row.precision))


def _why(best: Row, advice: Advice) -> str:
    """Return why this row and no other, in a few words: what was faster, and why it is not taken."""
    fastest: dict[str, Row] = {}  # of each kind
    for row in sorted(advice.rows, key=_speed):
        if row.trial.status == "ok" and _speed(row) > _speed(best) and _why_not_fp8(row) is None:
            is_near = _speed(row) <= _speed(best) * WORTHWHILE
            kind = (2 if is_near else 3) if advice.may_take(row) else int(_narrows_state(row))
            fastest[_WHY_NOT[kind]] = row
    reasons = []
    for why in filter(fastest.get, _WHY_NOT):
        percent = f"+{100 * (_speed(fastest[why]) / _speed(best) - 1):.1f} %".replace(".0 %", " %")
        reasons.append(f"{_loop_name(fastest[why], best)} {percent}{why}")
    failed = [
        f"{_loop_name(row, best)} {_FAILURES[row.trial.status]}" for row in advice.rows if row.trial.status in _FAILURES
    ]
    return "; ".join(reasons or failed[:1]) or "the fastest"


def _loop_name(row: Row, best: Row) -> str:
    """Return a row's precision, and the techniques that the best one has not."""
    spec, techniques = row.trial.spec, best.trial.spec.techniques
    if spec.techniques == techniques:
        return spec.precision
    added = [name for name in spec.techniques if name not in techniques]
    return f"{spec.precision} with {join(added) if added else 'fewer techniques'}"


def _how_sure(reference: Row, best: Row) -> str:
    """Return on how many processes a comparison rests, which were in another mode, and what disturbed them."""
    fewest = min(len(reference.trials), len(best.trials))
    words = "one run" if fewest == 1 else f"{fewest} runs each"
    doubts = _doubts(reference, best)
    strays = [strays_in_words(row.trials, f" of {_name(row)}", doubts) for row in (reference, best)]
    return ", ".join([words, *filter(None, strays), *doubts])


def strays_in_words(trials: Sequence[Trial], of: str = "", said: Collection[str] = ()) -> str:
    """Return how many processes are in another mode than most, and what the records show of it; empty if none is.

    Doubts that are said elsewhere are left out.
    """
    if not (found := strays_among(trials)):
        return ""
    strays = [trial for trial, _ in found]
    others = [trial for trial in trials if not any(trial is stray for stray in strays)]
    ratios = [f"{ratio:.2f}" for ratio in sorted(ratio for _, ratio in found)]
    shown = []
    for name in ("clock", "memory"):
        read = peak_allocated_bytes if name == "memory" else partial(mean_reading, field="sm_clock_hertz")
        own, usual = ([known for trial in side if (known := read(trial))] for side in (strays, others))
        ratio = statistics.fmean(own) / statistics.fmean(usual) if own and usual else 1.0
        shown += [f"at {ratio:.2f}× the {name}"] if abs(ratio - 1) >= _MODE_DIFFERENCE else []
    shown += [doubt for doubt in doubts_of(strays) if doubt not in (*doubts_of(others), *said)]
    span = " to ".join(dict.fromkeys((ratios[0], ratios[-1])))
    words = f"{len(strays)} of {len(trials)} processes{of} took {span}× as long as the others"
    return f"{words} ({', '.join(shown)})" if shown else words


def _doubts(*rows: Row) -> list[str]:
    return doubts_of([trial for row in rows for trial in row.trials])


def doubts_of(trials: Sequence[Trial]) -> list[str]:
    """Return what disturbed the machine while these processes ran, in a word each."""
    names = {warning.name for warning in warnings_of_all(trials)}
    return [word for name, word in _DOUBTS.items() if name in names]


def _with_code(advice: Advice) -> Advice:
    row, reference = advice.row, advice.reference
    assert row is not None
    spec, facts = row.trial.spec, row.trial.facts
    precision = precision_row(spec.precision)
    snippets: tuple[Snippet, ...] = ()
    written = None if reference is None or reference.precision != AS_WRITTEN else reference.trial
    if written is not None and written.facts is not None and written.facts.framework is not None:
        code = script_code(written, row.trial)
    else:
        is_known = known_precision(spec.precision) is not None
        code = "\n".join(loop_code(precision, spec, facts)) if is_known else ""
        snippets = framework_snippets(precision, spec.device_type, facts, spec.techniques) if code else ()
    if code and spec.changed_loss_scale:
        code = f"# Measured with the loss scale {spec.loss_scale}; this is {precision.loss_scale} loss scaling.\n{code}"
    return replace(advice, code=code, snippets=snippets)


def _simplest_of_the_fastest(rows: Sequence[Row], speed: Callable[[Row], float] | None = None) -> Row:
    """Return the fastest row, or of those hardly slower the one that changes the loop least."""
    speed = speed or _speed
    fastest = max(speed(row) for row in rows)
    near = [row for row in rows if speed(row) * WORTHWHILE >= fastest]
    # Of loops as simple as each other the one that was measured most: the fastest of many is so by luck.
    return min(near, key=lambda row: (changes_of(row.trial.spec), -len(row.trials), -speed(row)))


def changes_of(spec: TrialSpec) -> int:
    """Return how much a loop's precision and techniques change it; of nearly equal speeds one takes the least."""
    techniques = sum(row.loop_changes for row in rows_of(spec.techniques))
    return precision_row(spec.precision).loop_changes + techniques


def _learned(best: Row, baseline: Row) -> str:
    """Return what both reached, in the mean of their runs, after as many epochs; empty if their data is made up."""
    sides = [[epochs_of(trial) for trial in row.trials] for row in (best, baseline)]
    done = min(len(epochs) for side in sides for epochs in side)
    if not done or imitated_data_set(best.trial.spec.data_set) is not None:
        return ""
    measures: tuple[tuple[Callable[[Epoch], float | None], str], ...] = (
        (
            lambda epoch: None if epoch.accuracy is None else 100 * epoch.accuracy,
            "{:.1f} % accuracy compared with {:.1f} %",
        ),
        (perplexity, "perplexity {:.4g} compared with {:.4g}"),
        (lambda epoch: epoch.score, "a score of {:.4g} compared with {:.4g}"),
    )
    for value, text in measures:
        known = [[v for epochs in side if (v := value(epochs[done - 1])) is not None] for side in sides]
        if all(known):
            reached = text.format(*map(statistics.fmean, known))
            return f", at {reached} after {done} epoch{'s' if done > 1 else ''}"
    return ""


def _caution(advice: Advice, measured: Sequence[Row], best: Row) -> str:
    """Return sentences about FP8 that is not taken, and about what is faster, or smaller, in fewer bits."""
    refused = [(row, why) for row in measured if row is not best and (why := _why_not_fp8(row))]
    said = f" Not taken: {'; '.join(f'{_name(row)} ({why})' for row, why in refused)}." if refused else ""
    narrow = [row for row in measured if row is not best and not advice.may_take(row)]
    better = [row for row in narrow if _is_faster(row, best) or (_narrows_state(row) and _memory_share(row, best))]
    return f"{said} {_not_taken(advice, better, best)}" if better and advice.may_take(best) else said


def _is_faster(row: Row, best: Row) -> bool:
    return _speed(row) > _speed(best) * WORTHWHILE


def _memory_share(row: Row, best: Row) -> float | None:
    """Return the peak allocated memory over that of another row if it is clearly less, else None."""
    if not row.peak_allocated_bytes or not best.peak_allocated_bytes:
        return None
    share = row.peak_allocated_bytes / best.peak_allocated_bytes
    return share if share < _SAVES else None


def _not_taken(advice: Advice, rows: Sequence[Row], best: Row) -> str:
    """Return what rows in fewer bits bring, and what is known of their accuracy."""

    def bring(row: Row) -> str:
        share = _memory_share(row, best) if _narrows_state(row) else None
        return f" ({_speed(row) / _speed(best):.2f}×{'' if share is None else f', {share:.2f}× the memory'})"

    was, s = ("was", "s") if len(rows) == 1 else ("were", "")
    verb = f"keep{s}"
    if all(_is_faster(row, best) for row in rows):
        is_proven = all((over := row.over(best)) is not None and _is_proven(over, best, row) for row in rows)
        verb = f"{was} faster but {verb}" if is_proven else f"look{s} faster ({_how_sure(best, rows[0])}) but {verb}"
    said = f"{_and(rows, bring)} {verb} {_what_is_narrow(rows)}"
    known = {_name(row): advice.narrow[row].accuracy for row in rows}
    if not any(":" in words for words in known.values()):
        return f"{said}: {_CHECK_ACCURACY}"
    return " ".join((f"{said}.", *(f"The accuracy of {name} is {words}." for name, words in known.items())))


def _is_known(ratio: Estimate | None) -> bool:
    return ratio is not None and math.isfinite(ratio.half_width)


def _is_open(ratio: Estimate) -> bool:
    """Return whether a speed-up may be worthwhile, and may be none."""
    return ratio.low <= 1 and ratio.high >= WORTHWHILE


def one_process_shows(
    baselines: Sequence[Trial], trials: Sequence[Trial], beyond: float = CLEAR, units: float = 1.0
) -> Literal["faster", "slower"] | None:
    """Return how a configuration compares with its baseline, if one process is enough to show it.

    On a machine at rest the interval over the blocks of a session is beyond a factor; the figure itself has to be
    beyond a larger one if the machine was disturbed or there is no interval. On a GPU blocks that vary disturb nothing
    else: the interval has that. Each process beside the baseline shows that it is faster, and the slowest is faster
    than the baseline's fastest. If one shows that it is slower, the others need only be slower: nothing depends on by
    how much.
    Old records have no sessions: on a GPU each block of one side is compared with each of the other.

    Args:
        baselines: The trials of the baseline.
        trials: Those of the configuration.
        beyond: The factor.
        units: How many times as many units as the baseline's a step has, on a batch of another size.
    """
    ratios, shown = list[float](), list[Literal["faster", "slower"] | None]()
    is_apart = {trial.session_id for trial in (*baselines, *trials)} == {None}
    for trial in trials:
        if (alone := speedup_estimate(baselines, [trial])) is None:
            continue
        value, needed = alone.value * units, max(beyond, CLEAR * is_apart)
        low = high = value
        beside, blocks = _blocks_beside(baselines, trial, alone, is_apart=is_apart)
        doubts = set(doubts_of([*beside, trial])) - ({"noisy"} if trial.spec.device_type == "cuda" else set())
        if blocks is None or not _is_known(blocks) or doubts:
            needed = max(beyond, _CLEAR_WITH_DOUBTS)
        else:
            low, high = blocks.low * units, blocks.high * units
        ratios.append(value)
        if low >= needed and beside:
            shown.append("faster")
        elif high <= 1 / needed or (value <= 1 and _is_emulated(trial)):
            shown.append("slower")
        elif beside:
            shown.append(None)
    if "slower" in shown and max(ratios) <= 1:
        return "slower"
    is_faster = set(shown) == {"faster"} and not any(map(_is_emulated, trials))
    return "faster" if is_faster and _least_ratio(baselines, trials) * units >= beyond else None


def _least_ratio(baselines: Sequence[Trial], trials: Sequence[Trial]) -> float:
    """Return the speed-up of the slowest process over the baseline's fastest: one may have been held up, or not."""
    before, after = ([each for trial in side if (each := step_seconds(trial))] for side in (baselines, trials))
    return min(before, default=math.inf) / max(after, default=math.inf)


def _blocks_beside(
    baselines: Sequence[Trial], trial: Trial, ratio: Estimate, *, is_apart: bool
) -> tuple[list[Trial], Estimate | None]:
    """Return the baselines beside a trial, and the ratio with the interval, or else the range, over their blocks."""
    if is_apart and trial.spec.device_type == "cuda" and not doubts_of([*baselines, trial]):
        before, after = [mean for other in baselines for mean in block_means(other)], block_means(trial)
        share = ratio.value * statistics.median(after) / statistics.median(before)
        low, high = share * min(before) / max(after), share * max(before) / min(after)
        return list(baselines), Estimate(ratio.value, low, high, 1)
    beside = [other for other in baselines if other.session_id == trial.session_id is not None]
    # One block of a busy machine may be long since another program kept it waiting.
    if beside and min(len(block_means(each)) for each in (*beside, trial)) < 2 and doubts_of([*beside, trial]):
        return [], None
    return beside, session_speedup_estimate(beside, [trial])


def _is_emulated(trial: Trial) -> bool:
    return why_emulated(precision_row(trial.spec.precision), trial.environment.hardware) is not None


def _times(ratio: Estimate) -> str:
    """Return a speed-up with its interval: `1.37× [1.35, 1.39]`."""
    return with_interval(f"{ratio.value:.2f}×", format_interval(ratio.value, ratio.low, ratio.high))


def _name(row: Row) -> str:
    """Return the precision, with the loss scale if it is not the precision's own, and the techniques."""
    spec = row.trial.spec
    name = spec.precision
    if known_precision(spec.precision) is not None and spec.changed_loss_scale:
        name += f" with loss scale {spec.loss_scale}"
    if spec.parallelism not in ("none", "ddp"):
        name += f" ({spec.parallelism})"
    return f"{name} with {', '.join(spec.techniques)}" if spec.techniques else name


def _reference_name(row: Row) -> str:
    if row.precision in REFERENCE_WORDS:
        return REFERENCE_WORDS[row.precision]
    is_default = is_same_as_fp32(find_precision(DEFAULT), row.trial.environment.hardware)
    return "fp32 (PyTorch's default here)" if is_default else "fp32"


def _and(rows: Sequence[Row], addition: Callable[[Row], str] = lambda _: "") -> str:
    """Return the rows' precisions as a list in words, each with an addition."""
    *others, last = (_name(row) + addition(row) for row in rows)
    return f"{', '.join(others)} and {last}" if others else last


def _command(advice: Advice, typed: TypedLine | None) -> str:
    """Return what measures rows more closely: a command, or of a Python session's objects the call.

    It is empty if it would measure nothing, as they had the most rounds.
    """
    rows = _compared(advice)
    if advice.reference is None and any(precision_row(row.precision).float8_recipe for row in rows):
        beside = [row for row in advice.rows if row.precision == BESIDE_FP8 and row not in rows and _is_measured(row)]
        rows = beside + rows
    if min(len(row.trials) for row in rows) >= MOST_ROUNDS:
        return ""
    options = measuring_options([row.trial.spec for row in rows]) | {"within": "1%"}
    return advised_line("run", advice.workload, options, typed)


def _keeps_float32(row: Row) -> bool:
    """Return whether weights and the optimizer's state are those of a float32 loop."""
    return precision_row(row.precision).keeps_float32_weights and not _narrows_state(row)


def _narrows_state(row: Row) -> bool:
    return bool(narrowing(row.trial.spec.techniques))


def _what_is_narrow(rows: Sequence[Row]) -> str:
    """Return what some rows keep, none of which keeps float32 as a float32 loop does."""
    techniques = rows_of(name for row in rows for name in row.techniques)
    found = {_WHAT_IS_NARROW[each.numerics] for each in techniques if each.numerics in _WHAT_IS_NARROW}
    found |= {"no float32 weights"} if not all(map(_narrows_state, rows)) else set()
    return found.pop() if len(found) == 1 else "fewer bits of weights, sums or optimizer state"


def _speed(row: Row) -> float:
    return row.throughput or 0.0
