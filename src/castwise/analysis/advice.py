"""Decide which precision to take, from the intervals of the speed-ups, and say it in words."""

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from castwise.analysis.code_snippets import Snippet, framework_snippets, pytorch_code
from castwise.analysis.result_table import Row
from castwise.analysis.speedup import speedup_estimate
from castwise.analysis.statistics import Estimate, has_interval
from castwise.registry.precisions import BASELINE, DEFAULT, find_precision, is_same_as_fp32, precision_row, why_emulated
from castwise.registry.techniques import join
from castwise.spec.types import SYNTHETIC

# A gain smaller than this is not worth a change of numerics. The figure is a choice, not a measurement.
WORTHWHILE = 1.03
# One process that is slower than this share of the reference's speed needs no interval: processes of a configuration
# were never seen to differ by so much. One of an emulated precision need only be slower, as is to be expected.
_HOPELESS = 0.5

Decision = Literal["take", "stay", "undecided", "nothing"]

# Why a reference has no figures, by its status.
_WITHOUT_REFERENCE = {
    "oom": "{} does not fit into memory at this batch size",
    "crashed": "{} crashed, so there is nothing to compare with",
    "timeout": "{} took too long, so there is nothing to compare with",
    "unsupported": "{} does not run here, so there is nothing to compare with",
    "diverged": "{} diverged: look at the learning rate before anything else",
}
_CHECK_ACCURACY = "check the accuracy before you take it."
_NO_INTERVAL = "but one process of each gives no interval"


@dataclass(frozen=True)
class Advice:
    """What to do, and the code that does it."""

    workload: str
    decision: Decision  # `take` another precision and `stay` rest on intervals
    precision: str | None  # to take or to stay with; None if that is undecided
    sentence: str
    code: str = ""  # the lines of PyTorch that switch the precision on; empty if there is nothing to switch
    key: str | None = None  # of the trial that it rests on
    snippets: tuple[Snippet, ...] = ()  # what to set in the frameworks around PyTorch
    command: str = ""  # decides what is undecided


def recommend(rows: Sequence[Row]) -> list[Advice]:
    """Return one piece of advice for each workload, batch size, number of GPUs and set of techniques, in order."""
    groups: dict[tuple[str, int, str, tuple[str, ...]], list[Row]] = {}
    for row in rows:
        spec = row.trial.spec
        groups.setdefault((spec.workload, spec.batch_size, spec.world_size_label, spec.techniques), []).append(row)
    return [_advise(group) for group in groups.values()]


def _advise(rows: list[Row]) -> Advice:
    spec = rows[0].trial.spec
    where = f"{spec.workload}, batch {spec.batch_size}"
    where += f" on {spec.world_size_label}" if spec.world_size_label else ""
    where += f", {join(spec.techniques)}" if spec.techniques else ""
    measured = [row for row in rows if row.trial.status == "ok" and row.throughput is not None]
    if not measured:
        return Advice(spec.workload, "nothing", None, f"{where}: nothing to recommend. No trial ended well.")
    references = [row for name in (DEFAULT, BASELINE) for row in rows if row.trial.spec.precision == name]
    reference = next((row for row in references if row in measured), None)
    keeping = [row for row in measured if _keeps_float32_weights(row) and row is not reference]
    if reference is None:
        return _without_reference(where, references, keeping or measured, measured)
    name = _reference_name(reference)
    ratios = [(row, ratio) for row in keeping if (ratio := speedup_estimate(reference.trials, row.trials)) is not None]
    if not ratios:
        sentence = f"{where}: nothing to compare {name} with: no other precision with float32 weights was measured."
        return Advice(spec.workload, "nothing", None, sentence + _caution(measured, reference))
    proven = [row for row, ratio in ratios if _is_known(ratio) and ratio.low > 1 and ratio.value >= WORTHWHILE]
    if proven:
        best = _simplest_of_the_fastest(proven)
        ratio = next(ratio for row, ratio in ratios if row is best)
        gain = _gain(best, ratio, reference, name)
        sentence = f"{where}: take {_name(best)}. It trains {gain}.{_caution(measured, best)}"
        return _take(best, sentence)
    best, ratio = max(ratios, key=lambda pair: pair[1].value)
    may_be_faster = [(row, each) for row, each in ratios if _is_open(each) or _may_be_faster_in_one(row, each)]
    if may_be_faster:
        return _undecided(where, may_be_faster, reference, name)
    found = f"{_name(best)} comes closest, at {_times(ratio)} its speed."
    if ratio.value > 1:
        found = f"{_name(best)} gains too little for a change of numerics: it trains {_times(ratio)} as fast."
    sentence = f"{where}: stay with {name}. {found}{_caution(measured, reference)}"
    return Advice(spec.workload, "stay", reference.trial.spec.precision, sentence, key=reference.trial.spec.key)


def _undecided(where: str, candidates: Sequence[tuple[Row, Estimate]], reference: Row, reference_name: str) -> Advice:
    """Return what was seen, and the command that decides it."""
    best, ratio = max(candidates, key=lambda pair: pair[1].value)
    seen = f"{_name(best)} was {_times(ratio)} as fast as {reference_name}"
    doubt = "so it may be slower or faster" if _is_known(ratio) else _NO_INTERVAL
    command = _command([reference, *(row for row, _ in candidates)])
    sentence = f"{where}: undecided. {seen}, {doubt}. {_more_rounds(command)}"
    return Advice(best.trial.spec.workload, "undecided", None, sentence, command=command)


def _without_reference(
    where: str, references: Sequence[Row], candidates: Sequence[Row], measured: Sequence[Row]
) -> Advice:
    """Return the fastest of those that could be measured, if that is proven, and why there is nothing to compare."""
    workload = candidates[0].trial.spec.workload
    why = "neither PyTorch's default nor fp32 was measured"
    if references:
        failed = references[0].trial
        why = _WITHOUT_REFERENCE.get(failed.status, "{} was not measured").format(_reference_name(references[0]))
    elif len(measured) == 1:
        sentence = f"{where}: nothing to compare {_name(candidates[0])} with: {why}."
        return Advice(workload, "nothing", None, sentence)
    among = " with float32 weights" if len(candidates) < len(measured) else ""
    fastest = max(candidates, key=_speed)
    rivals = [(row, speedup_estimate(row.trials, fastest.trials)) for row in candidates if row is not fastest]
    rest = [row for row, ratio in rivals if ratio is None or not _is_known(ratio) or _is_open(ratio)]
    if rest:
        doubt = f"but {_and(rest)} may be as fast" if all(_is_known(ratio) for _, ratio in rivals) else _NO_INTERVAL
        command = _command([fastest, *rest])
        seen = f"{_name(fastest)} was the fastest{among}, {doubt}; {why}"
        return Advice(
            workload, "undecided", None, f"{where}: undecided. {seen}. {_more_rounds(command)}", command=command
        )
    best = _simplest_of_the_fastest(candidates)
    rank = f"the fastest{among}" if best is fastest else f"simpler than {_name(fastest)} and hardly slower"
    if not rivals:
        rank = f"the only one{among} that trained"
    sentence = f"{where}: take {_name(best)}, {rank}; {why}."
    if not _keeps_float32_weights(best):
        sentence += f" It keeps no float32 weights: {_CHECK_ACCURACY}"
    return _take(best, sentence + _caution(measured, best))


def _take(row: Row, sentence: str) -> Advice:
    """Return the advice to take a row's precision, with what to paste."""
    spec, facts = row.trial.spec, row.trial.facts
    precision = precision_row(spec.precision)
    code = pytorch_code(precision, spec.device_type, facts, spec.techniques if precision.code else ())
    if code and spec.loss_scale != precision.loss_scale:
        code = f"# Measured with the loss scale {spec.loss_scale}; this is {precision.loss_scale} loss scaling.\n{code}"
    snippets = framework_snippets(precision, spec.device_type, facts, spec.techniques) if code else ()
    return Advice(spec.workload, "take", spec.precision, sentence, code, spec.key, snippets)


def _simplest_of_the_fastest(rows: Sequence[Row]) -> Row:
    """Return the fastest row, or of those hardly slower the one that changes the loop least."""
    fastest = max(_speed(row) for row in rows)
    near = [row for row in rows if _speed(row) * WORTHWHILE >= fastest]
    return min(near, key=lambda row: precision_row(row.trial.spec.precision).loop_changes)


def _gain(row: Row, ratio: Estimate, reference: Row, reference_name: str) -> str:
    """Return how much faster a row is than the reference and than fp32, and in how much memory."""
    words = f"{_times(ratio)} as fast as {reference_name}"
    if reference.trial.spec.precision != BASELINE and row.speedup is not None:
        words += f" ({row.speedup:.2f}× as fast as fp32)"
    if row.peak_allocated_bytes and reference.peak_allocated_bytes:
        memory = row.peak_allocated_bytes / reference.peak_allocated_bytes
        words += ", in the same memory" if 0.995 <= memory < 1.005 else f", in {memory:.2f}× the memory"
    if row.skipped_steps:
        words += f"; loss scaling skipped {row.skipped_steps} step{'s' if row.skipped_steps > 1 else ''}"
    return words


def _caution(measured: Sequence[Row], best: Row) -> str:
    """Return a sentence about what was faster and keeps no float32 weights; empty if nothing was."""
    faster = [row for row in measured if not _keeps_float32_weights(row) and _speed(row) > _speed(best) * WORTHWHILE]
    if not faster or not _keeps_float32_weights(best):
        return ""
    names = _and(faster, lambda row: f" ({_speed(row) / _speed(best):.2f}×)")
    verbs = "was faster but keeps" if len(faster) == 1 else "were faster but keep"
    return f" {names} {verbs} no float32 weights: {_CHECK_ACCURACY}"


def _is_known(ratio: Estimate | None) -> bool:
    return ratio is not None and math.isfinite(ratio.half_width)


def _is_open(ratio: Estimate) -> bool:
    """Return whether a speed-up may be worthwhile, and may be none."""
    return ratio.low <= 1 and ratio.high >= WORTHWHILE


def _may_be_faster_in_one(row: Row, ratio: Estimate) -> bool:
    """Return whether what one process showed, without an interval, leaves open that a precision is faster."""
    is_emulated = why_emulated(precision_row(row.trial.spec.precision), row.trial.environment.hardware) is not None
    return not _is_known(ratio) and ratio.value > (1.0 if is_emulated else _HOPELESS)


def _times(ratio: Estimate) -> str:
    """Return a speed-up with its interval: `1.37× [1.35, 1.39]`."""
    interval = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if has_interval(ratio) else ""
    return f"{ratio.value:.2f}×{interval}"


def _name(row: Row) -> str:
    """Return the precision, with the loss scale if it is not the precision's own."""
    spec = row.trial.spec
    precision = precision_row(spec.precision)
    if not precision.code or spec.loss_scale == precision.loss_scale:
        return spec.precision
    return f"{spec.precision} with loss scale {spec.loss_scale}"


def _reference_name(row: Row) -> str:
    if row.trial.spec.precision == DEFAULT:
        return "PyTorch's default"
    is_default = is_same_as_fp32(find_precision(DEFAULT), row.trial.environment.hardware)
    return "fp32 (PyTorch's default here)" if is_default else "fp32"


def _and(rows: Sequence[Row], addition: Callable[[Row], str] = lambda _: "") -> str:
    """Return the rows' precisions as a list in words, each with an addition."""
    *others, last = (_name(row) + addition(row) for row in rows)
    return f"{', '.join(others)} and {last}" if others else last


def _more_rounds(command: str) -> str:
    return f"More rounds decide: {command}" if command else "More rounds decide."


def _command(rows: Sequence[Row]) -> str:
    """Return the command that measures rows more closely; empty if a shell cannot name them."""
    specs = [row.trial.spec for row in rows]
    spec = specs[0]
    if spec.workload.startswith("pickle:"):
        return ""
    # A loss scale goes to the precisions that scale their loss; if none does, to all.
    scaling = [each for each in specs if precision_row(each.precision).loss_scale != "none"] or specs
    parts = ["castwise", "run", spec.workload]
    parts += ["--precision", ",".join(dict.fromkeys(each.precision for each in specs))]
    parts += ["--batch-size", str(spec.batch_size)]
    if any(each.loss_scale != precision_row(each.precision).loss_scale for each in scaling):
        parts += ["--loss-scale", ",".join(dict.fromkeys(each.loss_scale for each in scaling))]
    parts += ["--techniques", join(spec.techniques)] if spec.techniques else []
    parts += ["--gpus", str(spec.world_size)] if spec.world_size > 1 else []
    parts += ["--parallelism", spec.parallelism] if spec.parallelism == "dp" else []
    parts += ["--device", spec.device] if spec.device != "cuda:0" else []
    parts += ["--data-set", spec.data_set] if spec.data_set != SYNTHETIC and spec.user_model is None else []
    parts += ["--seed", str(spec.seed)] if spec.seed else []
    return shlex.join([*parts, "--within", "1%"])


def _keeps_float32_weights(row: Row) -> bool:
    return precision_row(row.trial.spec.precision).keeps_float32_weights


def _speed(row: Row) -> float:
    return row.throughput or 0.0
