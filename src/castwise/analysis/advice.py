"""Say in words which precision to take, how much faster it is, and what speaks against the faster ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from castwise.analysis.code_snippets import Snippet, framework_snippets, pytorch_code
from castwise.analysis.result_table import Row
from castwise.analysis.statistics import Estimate
from castwise.registry.precisions import BASELINE, PYTORCH_DEFAULT, precision_row
from castwise.registry.techniques import join

# A gain smaller than this is not worth a change of numerics. The figure is a choice, not a measurement:
# processes of the same configuration were seen to differ by 0.1 % on an H200, and by some per cent on a busy CPU.
WORTHWHILE = 1.03

# What a baseline that did not end well says about the others, by its status.
_WITHOUT_BASELINE = {
    "oom": "fp32 does not fit into memory at this batch size",
    "crashed": "fp32 crashed, so by how much is open",
    "timeout": "fp32 took too long, so by how much is open",
    "diverged": "fp32 diverged: look at the learning rate before anything else",
}
_CHECK_ACCURACY = "check the accuracy before you take it."


@dataclass(frozen=True)
class Advice:
    """What to do, and the code that does it."""

    workload: str
    precision: str | None  # to take; None if nothing could be measured
    sentence: str
    code: str  # the lines of PyTorch that switch the precision on; empty if there is nothing to switch
    key: str | None = None  # of the trial that it rests on
    snippets: tuple[Snippet, ...] = ()  # what to set in the frameworks around PyTorch


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
        return Advice(spec.workload, None, f"{where}: nothing to recommend, no trial ended well.", "")
    baselines = [row for row in rows if row.trial.spec.precision == BASELINE]
    baseline = next((row for row in baselines if row in measured), None)
    keeping = [row for row in measured if _keeps_float32_weights(row)]
    if baseline is None:
        best = _simplest_of_the_fastest(keeping) if keeping else max(measured, key=_speed)
        among = "what was measured" if len(keeping) in (0, len(measured)) else "those that keep float32 weights"
        status = baselines[0].trial.status if baselines else ""
        why = _WITHOUT_BASELINE.get(status, "without fp32 to compare with, by how much is open")
        sentence = f"{where}: take {_name(best)}, the fastest of {among}; {why}."
        if not keeping:
            sentence += f" It keeps no float32 weights: {_CHECK_ACCURACY}"
        return _take(best, sentence + _caution(measured, best))
    compared = [row for row in keeping if row.speedup is not None]
    worthwhile = [row for row in compared if _is_faster(row, baseline)]
    if not worthwhile:
        sentence = f"{where}: stay with fp32. {_nothing_gained(compared)}{_caution(measured, baseline)}"
        return Advice(spec.workload, BASELINE, sentence, "", baseline.trial.spec.key)
    best = _simplest_of_the_fastest(worthwhile)
    return _take(best, f"{where}: take {_name(best)}. {_gain(best, measured)}{_caution(measured, best)}")


def _take(row: Row, sentence: str) -> Advice:
    """Return the advice to take a row's precision, with what to paste."""
    spec, facts = row.trial.spec, row.trial.facts
    precision = precision_row(spec.precision)
    code = pytorch_code(precision, spec.device_type, facts)
    if code and spec.loss_scale != precision.loss_scale:
        code = f"# Measured with the loss scale {spec.loss_scale}; this is {precision.loss_scale} loss scaling.\n{code}"
    snippets = framework_snippets(precision, spec.device_type, facts) if code else ()
    return Advice(spec.workload, spec.precision, sentence, code, spec.key, snippets)


def _simplest_of_the_fastest(rows: list[Row]) -> Row:
    """Return the fastest row, or of those hardly slower the one that changes the loop least."""
    fastest = max(_speed(row) for row in rows)
    near = [row for row in rows if _speed(row) * WORTHWHILE >= fastest]
    return min(near, key=lambda row: precision_row(row.trial.spec.precision).loop_changes)


def _is_faster(row: Row, baseline: Row) -> bool:
    """Return whether a gain is worth a change of numerics, and not noise.

    With an interval, from several processes, the interval has to lie above 1; without one, the gain has to be larger
    than both sides' blocks spread.
    """
    interval = _interval(row)
    if interval is not None:
        return interval.value >= WORTHWHILE and interval.low > 1
    noise = (row.spread or 0.0) + (baseline.spread or 0.0)
    return _speed(row) >= max(WORTHWHILE, 1 + noise) * _speed(baseline)


def _gain(row: Row, measured: list[Row]) -> str:
    words = f"It trains {row.speedup:.2f} times as fast as fp32"
    default = next((other for other in measured if other.trial.spec.precision == PYTORCH_DEFAULT), None)
    if default is not None and default is not row and default.trial.spec.device_type == "cuda":
        ratio = _speed(row) / _speed(default)
        words += f" ({ratio:.2f} times tf32, which PyTorch uses in convolutions and RNNs unasked)"
    if row.memory_ratio is not None:
        is_same = 0.995 <= row.memory_ratio < 1.005
        words += " in the same memory" if is_same else f" in {row.memory_ratio:.2f} times the memory"
    if row.skipped_steps:
        words += f"; loss scaling skipped {row.skipped_steps} step{'s' if row.skipped_steps > 1 else ''}"
    return words + "."


def _nothing_gained(compared: list[Row]) -> str:
    others = [row for row in compared if row.trial.spec.precision != BASELINE]
    if not others:
        return "No other precision that keeps float32 weights was measured."
    best = max(others, key=lambda row: row.speedup or 0.0)
    speedup = best.speedup or 0.0
    if speedup <= 1:
        return "No other precision that keeps float32 weights was faster."
    if speedup < WORTHWHILE:
        return f"{_name(best)} comes closest, at {speedup:.2f} times its speed: not worth a change of numerics."
    interval = _interval(best)
    doubt = "the blocks spread by as much: measure it again"
    if interval is not None:
        doubt = f"the 95 % interval reaches from {interval.low:.2f} to {interval.high:.2f}: more rounds tell more"
    return f"{_name(best)} was {speedup:.2f} times as fast, but {doubt}."


def _caution(measured: list[Row], best: Row) -> str:
    """Return a sentence about what was faster and keeps no float32 weights; empty if nothing was."""
    faster = [row for row in measured if not _keeps_float32_weights(row) and _speed(row) > _speed(best) * WORTHWHILE]
    if not faster or not _keeps_float32_weights(best):
        return ""
    names = ", ".join(f"{_name(row)} ({_speed(row) / _speed(best):.2f}×)" for row in faster)
    still = "" if best.trial.spec.precision == BASELINE else "still "
    verbs = f"was faster {still}but keeps" if len(faster) == 1 else f"were faster {still}but keep"
    return f" {names} {verbs} no float32 weights: {_CHECK_ACCURACY}"


def _name(row: Row) -> str:
    """Return the precision, with the loss scale if it is not the precision's own."""
    spec = row.trial.spec
    precision = precision_row(spec.precision)
    if not precision.code or spec.loss_scale == precision.loss_scale:
        return spec.precision
    return f"{spec.precision} with loss scale {spec.loss_scale}"


def _interval(row: Row) -> Estimate | None:
    """Return the speed-up if it has an interval."""
    found = row.speedup_estimate
    return found if found is not None and math.isfinite(found.half_width) else None


def _keeps_float32_weights(row: Row) -> bool:
    return precision_row(row.trial.spec.precision).keeps_float32_weights


def _speed(row: Row) -> float:
    return row.throughput or 0.0
