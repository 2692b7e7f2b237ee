"""Energy per unit of throughput, and what an epoch costs, from a trial's readings.

Energy is divided by the units (images, tokens, samples) of as many GPUs as a reading covers: of all of a trial's, or,
in older records, of the first alone; the other GPUs are then assumed to be like it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from castwise.analysis import steady_metrics
from castwise.analysis.statistics import Estimate, estimate
from castwise.errors import UsageError
from castwise.records.schema import TelemetrySummary, Trial

JOULES_PER_KWH = 3.6e6
SECONDS_PER_HOUR = 3600.0

Source = Literal["sustained counter", "counter", "power × time"]

# In interleaved sessions the power in a shorter block is a mean over other configurations' blocks, too (NVML: over the
# last second), and the counter ticks too seldom to tell them apart.
_LONG_ENOUGH_SECONDS = 1.0


def energy_of(trials: Sequence[Trial]) -> tuple[Estimate, Source] | None:
    """Return joules per unit of throughput over the processes that have them from the best source, and that source.

    The interval is that of the differences between processes: of one there is none. None if energy was not read.
    """
    found = [each for trial in trials if (each := _energy_of(trial)) is not None and each[0] > 0]
    source = min((source for _, source in found), key=get_args(Source).index, default=None)
    over_all = estimate([joules for joules, own in found if own == source])
    return None if over_all is None or source is None else (over_all, source)


def joules_per_unit(trial: Trial) -> float | None:
    energy = _energy_of(trial)
    return None if energy is None else energy[0]


def _energy_of(trial: Trial) -> tuple[float, Source] | None:
    """Return a trial's energy, of sustained steps or else of its blocks; None if it was not read.

    The step's time is that of the sustained steps, too: if the host or a power limit sets the pace, blocks differ.
    """
    measured, block_step_seconds = trial.energy_measurement, steady_metrics.step_seconds(trial)
    if measured is None or not measured.seconds or not block_step_seconds or trial.facts is None:
        return _energy_of_blocks(trial)
    watts = measured.joules / measured.seconds / measured.num_gpus
    step_joules = watts * trial.spec.world_size * (measured.step_seconds or block_step_seconds)
    units = steady_metrics.units_per_step(trial.spec, trial.facts, steady_metrics.blocks_of(trial))
    return step_joules / units, "sustained counter"


def power_watts(trial: Trial) -> float | None:
    """Return one GPU's mean power, over sustained steps, else over the timed blocks, each weighted by its time.

    Of several GPUs it is the mean of all that the readings cover. None if it is not known.
    """
    measured = trial.energy_measurement
    if measured is not None and measured.seconds:
        return measured.joules / measured.seconds / measured.num_gpus
    if _is_mixed(trial):
        return None
    powers = [(watts, reading.seconds) for reading in trial.readings if (watts := reading.gpu_power_watts) is not None]
    seconds = sum(time for _, time in powers)
    return sum(watts * time for watts, time in powers) / seconds if seconds > 0 else None


def gpus_read(trial: Trial) -> int | None:
    """Return of how many GPUs a trial's energy was read, the fewest in any reading; None if of none."""
    if joules_per_unit(trial) is None:
        return None
    if trial.energy_measurement is not None and trial.energy_measurement.seconds:
        return trial.energy_measurement.num_gpus
    return min((reading.num_gpus for reading in trial.readings), default=None)


def _energy_of_blocks(trial: Trial) -> tuple[float, Source] | None:
    if _is_mixed(trial):
        return None
    pairs = [(reading, units) for reading, units in _units(trial) if reading.seconds and units]
    # A counter that stands still in one block (it ticks at its own pace) has that block's energy in the next one.
    # Without such blocks the mean would be too high, so power is taken for all blocks then.
    source: Source = "counter"
    joules = [reading.energy_joules for reading, _ in pairs]
    if None in joules:
        source = "power × time"
        joules = [None if each.power_watts is None else each.power_watts * each.seconds for each, _ in pairs]
    share = _share_of_steps(trial)
    known = [share * block for block in joules if block is not None]
    if not known or len(known) < len(joules):
        return None
    return sum(known) / sum(count for _, count in pairs), source


def _share_of_steps(trial: Trial) -> float:
    """Return the steps' share of the readings' time; the counter ticks too seldom to separate the two."""
    watched = sum(reading.seconds for reading in trial.readings)
    timed = sum(block.seconds for block in steady_metrics.blocks_of(trial))
    return min(1.0, timed / watched) if watched and timed else 1.0


def _is_mixed(trial: Trial) -> bool:
    """Return whether other configurations' power is in a trial's readings."""
    return trial.session_id is not None and any(reading.seconds < _LONG_ENOUGH_SECONDS for reading in trial.readings)


def _units(trial: Trial) -> list[tuple[TelemetrySummary, float]]:
    """Return each block's or epoch's reading with the units that the GPUs it covers trained on."""
    if not trial.ranks or trial.facts is None:
        return []
    spec, first = trial.spec, trial.ranks[0]
    process_samples = [block.num_samples or block.num_steps * spec.process_batch_size for block in first.blocks]
    process_samples = process_samples or [epoch.num_samples for epoch in first.epochs]
    found = []
    for reading, samples in zip(trial.readings, process_samples, strict=False):
        covered = samples * spec.num_processes * max(1, reading.num_gpus) // spec.world_size
        found.append((reading, covered * trial.facts.units_per_sample))
    return found


@dataclass(frozen=True)
class Prices:
    """Prices in one currency; None if the user gave none."""

    per_kwh: float | None = None
    per_gpu_hour: float | None = None  # its electricity included

    def __bool__(self) -> bool:
        return self.per_kwh is not None or self.per_gpu_hour is not None

    def check(self) -> None:
        """Raise UsageError if a price is negative or no finite number."""
        for what, price in (("kWh", self.per_kwh), ("GPU hour", self.per_gpu_hour)):
            if price is not None and not (price >= 0 and math.isfinite(price)):
                raise UsageError(f"A price of {price:g} per {what} is impossible. Give a number from 0.")


@dataclass(frozen=True)
class EpochCost:
    """What training on some samples takes, on all GPUs of a trial together; costs are in the prices' currency."""

    samples: int
    seconds: float  # at the throughput of its table
    joules: float | None  # the GPUs', without the rest of the machine; None if it was not measured
    energy_cost: float | None  # None without a price per kWh or without the energy
    gpu_hour_cost: float | None  # None without a price per GPU hour


def cost_of(trials: Sequence[Trial], throughput: float | None, samples: int, prices: Prices) -> EpochCost | None:
    """Return what an epoch of so many samples, over all GPUs, costs at a throughput; None if nothing was timed."""
    trial = trials[0]
    if not throughput or trial.facts is None:
        return None
    units = samples * trial.facts.units_per_sample
    seconds = units / throughput
    energy = energy_of(trials)
    joules = None if energy is None else energy[0].value * units
    energy_cost = gpu_hour_cost = None
    if joules is not None and prices.per_kwh is not None:
        energy_cost = joules / JOULES_PER_KWH * prices.per_kwh
    if prices.per_gpu_hour is not None and trial.spec.device_type != "cpu":
        gpu_hour_cost = seconds / SECONDS_PER_HOUR * trial.spec.world_size * prices.per_gpu_hour
    return EpochCost(samples, seconds, joules, energy_cost, gpu_hour_cost)
