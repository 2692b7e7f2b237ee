"""Say in words which precision to take, what it buys, and what speaks against the faster ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from castwise.analysis.code_snippets import Snippet, framework_snippets, pytorch_code
from castwise.analysis.result_table import Row
from castwise.analysis.statistics import Estimate
from castwise.registry.precisions import BASELINE, known_precision
from castwise.registry.techniques import join

# A gain smaller than this is not worth a change of numerics. The figure is a choice, not a measurement:
# processes of the same cell were seen to differ by 0.1 % on an H200, and by some per cent on a busy CPU.
WORTHWHILE = 1.03

# The precisions that keep float32 weights, from the least change to a training loop to the largest.
SIMPLEST_FIRST = ("fp32", "tf32", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master")

# What a baseline that did not end well says about the others, by its status.
_WITHOUT = {
    "oom": "fp32 does not fit into memory at this batch size",
    "crashed": "fp32 crashed, so by how much is open",
    "timeout": "fp32 took too long, so by how much is open",
    "diverged": "fp32 diverged: look at the learning rate before anything else",
}


@dataclass(frozen=True)
class Advice:
    """What to do, and the code that does it.

    Attributes:
        workload: The workload it is about.
        precision: The precision to take; None where nothing could be measured.
        sentence: The advice in words.
        code: The lines of PyTorch that switch the precision on; empty where there is nothing to switch.
        key: The key of the trial it rests on; None where nothing could be measured.
        snippets: What to set in the frameworks round PyTorch; empty where there is nothing to switch.
    """

    workload: str
    precision: str | None
    sentence: str
    code: str
    key: str | None = None
    snippets: tuple[Snippet, ...] = ()


def recommend(rows: Sequence[Row]) -> list[Advice]:
    """Return one piece of advice for each workload, batch size, spread over GPUs and loop among the rows, in order."""
    groups: dict[tuple[str, int, str, tuple[str, ...]], list[Row]] = {}
    for row in rows:
        spec = row.trial.spec
        groups.setdefault((spec.workload, spec.batch_size, spec.spread, spec.techniques), []).append(row)
    return [_advise(name, _where(group[0]), group) for (name, *_), group in groups.items()]


def _where(row: Row) -> str:
    spec = row.trial.spec
    spread = f" on {spec.spread}" if spec.spread else ""
    return f"{spec.workload}, batch {spec.batch_size}{spread}" + (
        f", {join(spec.techniques)}" if spec.techniques else ""
    )


def _advise(name: str, where: str, rows: list[Row]) -> Advice:
    measured = [row for row in rows if row.trial.status == "ok" and row.throughput is not None]
    if not measured:
        return Advice(name, None, f"{where}: nothing to recommend, no trial ended well.", "")
    baseline = next((row for row in measured if row.trial.spec.precision == BASELINE), None)
    if baseline is None:
        failed = next((row.trial.status for row in rows if row.trial.spec.precision == BASELINE), None)
        return _without_baseline(name, where, measured, failed)
    safe = [row for row in measured if _keeps_float32_weights(row) and row.speedup is not None]
    worthwhile = [row for row in safe if _is_faster(row, baseline)]
    if not worthwhile:
        sentence = f"{where}: stay with fp32. {_nothing_gained(safe)}"
        return Advice(name, BASELINE, sentence + _caution(measured, baseline), "", baseline.trial.spec.key)
    best = _simplest_of_the_fastest(worthwhile)
    sentence = f"{where}: take {_name(best)}. {_gain(best, measured)}"
    return _take(name, best, sentence + _caution(measured, best))


def _take(name: str, row: Row, sentence: str) -> Advice:
    spec = row.trial.spec
    known = known_precision(spec.precision)
    snippets = framework_snippets(known, spec.device_type, row.trial.facts) if known is not None else ()
    return Advice(name, spec.precision, sentence, _code(row), spec.key, snippets)


def _simplest_of_the_fastest(safe: list[Row]) -> Row:
    """Return the fastest row, or the one that changes the loop least among those hardly slower."""
    fastest = max(_speed(row) for row in safe)
    near = [row for row in safe if _speed(row) * WORTHWHILE >= fastest]
    return min(near, key=lambda row: SIMPLEST_FIRST.index(row.trial.spec.precision))


def _is_faster(row: Row, baseline: Row) -> bool:
    """Return whether a gain is worth a change of numerics, and no play of noise.

    Where several processes tell, it is none if the interval lies above 1; else, if it is more than both sides'
    blocks spread.
    """
    interval = _interval(row)
    if interval is not None:
        return interval.value >= WORTHWHILE and interval.low > 1
    noise = (row.spread or 0.0) + (baseline.spread or 0.0)
    return _speed(row) >= max(WORTHWHILE, 1 + noise) * _speed(baseline)


def _interval(row: Row) -> Estimate | None:
    """Return the speed-up where it has an interval."""
    found = row.speedup_estimate
    return found if found is not None and math.isfinite(found.half_width) else None


def _without_baseline(name: str, where: str, measured: list[Row], failed: str | None) -> Advice:
    safe = [row for row in measured if _keeps_float32_weights(row)]
    best = _simplest_of_the_fastest(safe) if safe else max(measured, key=_speed)
    among = "what was measured" if len(safe) in (0, len(measured)) else "those that keep float32 weights"
    why = _WITHOUT.get(failed or "", "without fp32 beside it, by how much is open")
    sentence = f"{where}: take {_name(best)}, the fastest of {among}; {why}."
    if not safe:
        sentence += " It keeps no float32 weights: check the accuracy before you take it."
    return _take(name, best, sentence + _caution(measured, best))


def _gain(row: Row, measured: list[Row]) -> str:
    words = f"It trains {row.speedup:.2f} times as fast as fp32"
    tf32 = next((other for other in measured if other.trial.spec.precision == "tf32"), None)
    if tf32 is not None and tf32 is not row and tf32.trial.spec.device_type == "cuda":
        words += f" ({_speed(row) / _speed(tf32):.2f} times tf32, which PyTorch uses in convolutions and RNNs unasked)"
    if row.memory_ratio is not None:
        words += f" in {_times(row.memory_ratio)} memory"
    if row.skipped_steps:
        words += f"; loss scaling skipped {row.skipped_steps} step{'s' if row.skipped_steps > 1 else ''}"
    return words + "."


def _times(ratio: float) -> str:
    return "the same" if 0.995 <= ratio < 1.005 else f"{ratio:.2f} times the"


def _nothing_gained(safe: list[Row]) -> str:
    others = [row for row in safe if row.trial.spec.precision != BASELINE]
    if not others:
        return "No other precision that keeps float32 weights was measured."
    best = max(others, key=_gained)
    if _gained(best) <= 1:
        return "No other precision that keeps float32 weights was faster."
    if _gained(best) >= WORTHWHILE:
        return f"{_name(best)} was {best.speedup:.2f} times as fast, but {_doubt(best)}."
    return f"{_name(best)} comes closest, at {best.speedup:.2f} times its speed: not worth a change of numerics."


def _gained(row: Row) -> float:
    return row.speedup or 0.0


def _doubt(row: Row) -> str:
    interval = _interval(row)
    if interval is None:
        return "the blocks spread by as much: measure it again"
    return f"the 95 % interval reaches from {interval.low:.2f} to {interval.high:.2f}: more rounds tell more"


def _caution(measured: list[Row], best: Row) -> str:
    faster = [row for row in measured if not _keeps_float32_weights(row) and _speed(row) > _speed(best) * WORTHWHILE]
    if not faster or not _keeps_float32_weights(best):
        return ""
    names = ", ".join(f"{_name(row)} ({_speed(row) / _speed(best):.2f}×)" for row in faster)
    still = "" if best.trial.spec.precision == BASELINE else "still "
    are = f"was faster {still}but keeps" if len(faster) == 1 else f"were faster {still}but keep"
    return f" {names} {are} no float32 weights: check the accuracy before you take it."


def _name(row: Row) -> str:
    """Return the precision, with the loss scale where it is not the precision's own."""
    spec = row.trial.spec
    known = known_precision(spec.precision)
    return (
        spec.precision
        if known is None or spec.loss_scale == known.loss_scale
        else f"{spec.precision} with loss scale {spec.loss_scale}"
    )


def _keeps_float32_weights(row: Row) -> bool:
    precision = known_precision(row.trial.spec.precision)
    return precision is not None and (precision.param_dtype == "float32" or precision.master_weights)


def _speed(row: Row) -> float:
    return row.throughput or 0.0


def _code(row: Row) -> str:
    spec = row.trial.spec
    precision = known_precision(spec.precision)
    if precision is None:
        return ""
    code = pytorch_code(precision, spec.device_type, row.trial.facts)
    if spec.loss_scale == precision.loss_scale:
        return code
    return f"# Measured with the loss scale {spec.loss_scale}; this is {precision.loss_scale} loss scaling.\n{code}"
