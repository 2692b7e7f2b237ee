"""What an epoch costs at the user's prices, in words and for JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from castwise.analysis.energy import JOULES_PER_KWH, SECONDS_PER_HOUR, EpochCost, Prices, cost_of
from castwise.analysis.result_table import Row
from castwise.records.schema import Trial
from castwise.registry.datasets import imitated_data_set, train_samples

_MILLION = 1_000_000


def cost_lines(rows: Sequence[Row], prices: Prices | None) -> list[str]:
    """Return a line a trial on what an epoch of it costs, or a million samples where its data set has no known size."""
    if not prices:
        return []
    found = ((row.trial, _cost(row.trial, prices)) for row in rows)
    return [_line(trial, cost) for trial, cost in found if cost is not None]


def costs(rows: Sequence[Row], prices: Prices) -> list[dict[str, Any]]:
    """Return what each trial's epoch costs, by the trial's key, for JSON."""
    found = ((row.trial, _cost(row.trial, prices)) for row in rows)
    return [{"key": trial.spec.key, **asdict(cost)} for trial, cost in found if cost is not None]


def _cost(trial: Trial, prices: Prices) -> EpochCost | None:
    return cost_of(trial, _epoch(trial) or _MILLION, prices)


def _epoch(trial: Trial) -> int | None:
    return train_samples(imitated_data_set(trial.spec.data_set) or trial.spec.data_set)


def _line(trial: Trial, cost: EpochCost) -> str:
    what = "a million samples cost" if _epoch(trial) is None else f"an epoch of {cost.samples:,} samples costs"
    parts = []
    if cost.energy_cost is not None and cost.joules is not None:
        parts.append(f"{cost.energy_cost:.3g} in electricity ({cost.joules / JOULES_PER_KWH:.3g} kWh, GPU alone)")
    if cost.gpu_hour_cost is not None:
        hours = cost.seconds * trial.spec.world_size / SECONDS_PER_HOUR
        parts.append(f"{cost.gpu_hour_cost:.3g} in GPU hours ({hours:.3g} h)")
    return f"{trial.spec.label}: {what} {' or '.join(parts) or 'what is not known: no energy was measured'}"
