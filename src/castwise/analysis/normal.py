"""Whether a speed is normal: what others measured of the same configuration on the same GPU model."""

from collections.abc import Sequence
from dataclasses import dataclass

from castwise.analysis.result_table import Row
from castwise.analysis.statistics import Estimate, has_interval
from castwise.records.shared import question_of, shared_records
from castwise.registry.precisions import BASELINE
from castwise.registry.published import published_speedups

# How far from the others' range a figure still is normal: their cards, drivers and versions differ. In the records that
# come with castwise, cards of one model differ by at most 3.3 % (docs/share.md). Chosen here: twice that, about.
_TOLERANCE = 0.06


@dataclass(frozen=True)
class Others:
    """What others measured of a row's configuration on its GPU model: castwise's records, and sources of the suites."""

    throughputs: tuple[float, ...]  # units per second, one for each card
    speedups: tuple[float, ...]  # over fp32 with the same techniques; none for fp32

    def is_normal(self, row: Row) -> bool:
        """Return whether a row's figures are in the range of the others, or as near as cards and versions differ."""
        return _near(row.throughput_estimate, self.throughputs) and _near(row.speedup_estimate, self.speedups)


def _near(own: Estimate | None, others: Sequence[float]) -> bool:
    """Return whether a figure, or some of its interval, is near the others'."""
    if own is None or not others:
        return True
    low, high = (own.low, own.high) if has_interval(own) else (own.value, own.value)
    return high >= min(others) * (1 - _TOLERANCE) and low <= max(others) * (1 + _TOLERANCE)


def others_of(row: Row) -> Others | None:
    """Return what others measured of a row's configuration on its GPU model; None if nobody did."""
    gpu, spec = row.trial.environment.gpu, row.trial.spec
    if gpu is None or row.trial.status != "ok" or row.throughput is None or spec.user_model is not None:
        return None
    question = question_of(spec)
    records = [record for record in shared_records() if record.gpu == gpu]
    found = [each for record in records for each in record.rows if each.question == question]
    speedups = [each.speedup for each in found if each.speedup is not None] + published_speedups(gpu, spec)
    if not found and not speedups:
        return None
    return Others(tuple(each.throughput for each in found), () if spec.precision == BASELINE else tuple(speedups))
