"""Say in words which precision to take, what it buys, and what speaks against the faster ones."""

from collections.abc import Sequence
from dataclasses import dataclass

from castwise.analyze.compare import Row
from castwise.precisions import BASELINE, find_precision

# A gain smaller than this is not worth a change of numerics. The figure is a choice, not a measurement:
# processes of the same cell were seen to differ by 0.1 % on an H200, and by some per cent on a busy CPU.
_WORTHWHILE = 1.03

# The precisions that keep float32 weights, from the least change to a training loop to the largest.
SIMPLEST_FIRST = ("fp32", "tf32", "bf16-mixed", "fp16-mixed", "fp16-master")


@dataclass(frozen=True)
class Advice:
    """What to do, and the code that does it.

    Attributes:
        workload: The workload it is about.
        precision: The precision to take; None where nothing could be measured.
        sentence: The advice in words.
        code: The lines of PyTorch that switch the precision on; empty where there is nothing to switch.
    """

    workload: str
    precision: str | None
    sentence: str
    code: str


def recommend(rows: Sequence[Row]) -> list[Advice]:
    """Return one piece of advice for each workload and batch size among the rows, in order."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.trial.spec.workload, row.trial.spec.batch_size), []).append(row)
    return [_advise(name, batch, group) for (name, batch), group in groups.items()]


def _advise(name: str, batch: int, rows: list[Row]) -> Advice:
    where = f"{name}, batch {batch}"
    measured = [row for row in rows if row.trial.status == "ok" and row.throughput is not None]
    if not measured:
        return Advice(name, None, f"{where}: nothing to recommend, no trial ended well.", "")
    baseline = next((row for row in measured if row.trial.spec.precision == BASELINE), None)
    safe = [row for row in measured if _keeps_float32_weights(row)]
    if baseline is None or not safe:
        return _without_baseline(name, where, measured)
    best = _simplest_of_the_fastest(safe)
    if best is baseline or (best.speedup or 0.0) < _WORTHWHILE:
        sentence = f"{where}: stay with fp32. {_nothing_gained(best, baseline)}"
        return Advice(name, BASELINE, sentence + _caution(measured, baseline), "")
    sentence = f"{where}: take {best.trial.spec.precision}. {_gain(best)}"
    return Advice(name, best.trial.spec.precision, sentence + _caution(measured, best), _code(best))


def _simplest_of_the_fastest(safe: list[Row]) -> Row:
    """Return the fastest row, or the one that changes the loop least among those hardly slower."""
    fastest = max(_speed(row) for row in safe)
    near = [row for row in safe if _speed(row) * _WORTHWHILE >= fastest]
    return min(near, key=lambda row: SIMPLEST_FIRST.index(row.trial.spec.precision))


def _without_baseline(name: str, where: str, measured: list[Row]) -> Advice:
    best = max(measured, key=_speed)
    precision = best.trial.spec.precision
    sentence = (
        f"{where}: {precision} was the fastest of what was measured; without fp32 beside it, by how much is open."
    )
    return Advice(name, precision, sentence, _code(best))


def _gain(row: Row) -> str:
    words = f"It trains {row.speedup:.2f} times as fast as fp32"
    if row.memory_ratio is not None:
        words += f" in {row.memory_ratio:.2f} times the memory"
    if row.skipped_steps:
        words += f"; loss scaling skipped {row.skipped_steps} steps"
    return words + "."


def _nothing_gained(best: Row, baseline: Row) -> str:
    if best is baseline:
        return "No other precision that keeps float32 weights was faster."
    return f"{best.trial.spec.precision} comes closest, at {best.speedup:.2f} times its speed."


def _caution(measured: list[Row], best: Row) -> str:
    faster = [row for row in measured if not _keeps_float32_weights(row) and _speed(row) > _speed(best) * _WORTHWHILE]
    if not faster:
        return ""
    names = ", ".join(f"{row.trial.spec.precision} ({_speed(row) / _speed(best):.2f}×)" for row in faster)
    are = "was faster still but keeps" if len(faster) == 1 else "were faster still but keep"
    return f" {names} {are} no float32 weights: check the accuracy before you take it."


def _keeps_float32_weights(row: Row) -> bool:
    precision = find_precision(row.trial.spec.precision)
    return precision.param_dtype == "float32" or precision.master_weights


def _speed(row: Row) -> float:
    return row.throughput or 0.0


def _code(row: Row) -> str:
    precision = find_precision(row.trial.spec.precision)
    return precision.code.replace("{device!r}", repr(row.trial.spec.device_type))
