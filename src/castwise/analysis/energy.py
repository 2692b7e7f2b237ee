"""Energy per unit of throughput, and what an epoch costs, from a trial's readings.

The units that energy is divided by are those of as many GPUs as a reading covers, each with its share of a batch: of
all of a trial's, or, in older records, of the first alone, which the others are then taken to be like.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from castwise.analysis import steady_metrics, training_metrics
from castwise.analysis.statistics import student_quantile
from castwise.errors import UsageError
from castwise.records.schema import TelemetrySummary, Trial

JOULES_PER_KWH = 3.6e6
SECONDS_PER_HOUR = 3600.0


Source = Literal["counter at a stretch", "counter", "power × time"]

_FEWEST_FOR_INTERVAL = 3
# A tick is seen late by up to the time between two looks, each alike: so much of it is the difference of two such at
# the most, 95 % of the time. By hand: about 1 - sqrt(0.05).
_LATE_SHARE = 0.775
# Where cells take turns, a shorter turn's power is a mean over its neighbours' too (NVML: over the last second), and
# the counter ticks too seldom to tell them apart.
_LONG_ENOUGH_SECONDS = 1.0


@dataclass(frozen=True)
class BlockEnergy:
    """The energy of one timed block or epoch.

    Attributes:
        joules: The energy, of the GPUs that the reading covers.
        units: Images, tokens or samples that they trained on with it.
    """

    joules: float
    units: int


@dataclass(frozen=True)
class Energy:
    """The energy of a trial.

    Attributes:
        joules_per_unit: Mean power over a stretch of steps × the time of a step of it; without such a stretch, energy
            of all blocks over units of all blocks.
        low: The lower end of its 95 % interval: how late a counter's tick may be seen; without a stretch by Student's t
            over blocks, None with too few of them.
        high: The upper end.
        source: The driver's counter, read over a stretch of steps or over each block; or mean power × time where not
            every block has the counter's word.
        power_watts: Mean power of one GPU.
        blocks: The values it comes from; one for a stretch.
    """

    joules_per_unit: float
    low: float | None
    high: float | None
    source: Source
    power_watts: float
    blocks: tuple[BlockEnergy, ...]


@dataclass(frozen=True)
class Prices:
    """Prices in one currency; None where the user gave none.

    Attributes:
        per_kwh: Of a kilowatt-hour.
        per_gpu_hour: Of a GPU for an hour, its electricity included.
    """

    per_kwh: float | None = None
    per_gpu_hour: float | None = None

    def __bool__(self) -> bool:
        """Return whether there is a price to reckon with."""
        return self.per_kwh is not None or self.per_gpu_hour is not None

    def check(self) -> None:
        """Make sure that prices can be such.

        Raises:
            UsageError: One is negative or no number.
        """
        for what, price in (("kWh", self.per_kwh), ("GPU hour", self.per_gpu_hour)):
            if price is not None and not (price >= 0 and math.isfinite(price)):
                raise UsageError(f"A price of {price:g} per {what} is impossible. Give a number from 0.")


@dataclass(frozen=True)
class EpochCost:
    """What training on a number of samples takes, on all GPUs of a trial together.

    Attributes:
        samples: How many.
        seconds: The time it takes at the trial's throughput.
        joules: The GPUs' energy, the rest of the machine's left out; None where it was not measured.
        energy_cost: Of that energy, in the prices' currency; None without a price per kWh or without the energy.
        gpu_hour_cost: Of the GPUs for that time; None without a price per GPU hour.
    """

    samples: int
    seconds: float
    joules: float | None
    energy_cost: float | None
    gpu_hour_cost: float | None


def energy_of(trial: Trial) -> Energy | None:
    """Return a trial's energy with its interval; None where no reading tells it."""
    at_a_stretch = _at_a_stretch(trial)
    if at_a_stretch is not None:
        return at_a_stretch
    return _with_interval(found, trial) if (found := _blocks(trial)) is not None else None


def joules_per_unit(trial: Trial) -> float | None:
    """Return joules per image, token or sample of a trial without the interval; None where no reading tells it."""
    at_a_stretch = _at_a_stretch(trial)
    if at_a_stretch is not None:
        return at_a_stretch.joules_per_unit
    found = _blocks(trial)
    return None if found is None else _ratio(found[0])


def power_watts(trial: Trial) -> float | None:
    """Return one GPU's mean power, over a stretch of steps, else over the timed blocks, each weighed by its time.

    Of several GPUs it is the mean of all that the readings cover. None where it is not known.
    """
    if trial.energy_measurement is not None and trial.energy_measurement.seconds:
        return trial.energy_measurement.joules / trial.energy_measurement.seconds / trial.energy_measurement.num_gpus
    if _is_mixed(trial):
        return None
    watched = [(power, reading.seconds) for reading in trial.readings if (power := reading.gpu_power_watts) is not None]
    seconds = sum(time for _, time in watched)
    return sum(power * time for power, time in watched) / seconds if seconds > 0 else None


def gpus_read(trial: Trial) -> int | None:
    """Return of how many GPUs a trial's energy was read, the fewest in any reading; None where none was."""
    if joules_per_unit(trial) is None:
        return None
    if trial.energy_measurement is not None and trial.energy_measurement.seconds:
        return trial.energy_measurement.num_gpus
    return min((reading.num_gpus for reading in trial.readings), default=None)


def cost_of(trial: Trial, samples: int, prices: Prices) -> EpochCost | None:
    """Return what an epoch of so many samples costs; None where nothing was timed.

    Args:
        trial: The trial whose throughput and energy it is reckoned from.
        samples: Samples of the epoch, over all GPUs.
        prices: What electricity and GPUs cost.
    """
    throughput = steady_metrics.throughput(trial) or training_metrics.throughput(trial)
    if not throughput or trial.facts is None:
        return None
    units = samples * trial.facts.units_per_sample
    seconds, per_unit = units / throughput, joules_per_unit(trial)
    joules = None if per_unit is None else per_unit * units
    paid = joules is not None and prices.per_kwh is not None
    rented = prices.per_gpu_hour is not None and trial.spec.device_type != "cpu"
    return EpochCost(
        samples=samples,
        seconds=seconds,
        joules=joules,
        energy_cost=(joules or 0.0) / JOULES_PER_KWH * (prices.per_kwh or 0.0) if paid else None,
        gpu_hour_cost=(
            seconds / SECONDS_PER_HOUR * trial.spec.world_size * (prices.per_gpu_hour or 0.0) if rented else None
        ),
    )


def _at_a_stretch(trial: Trial) -> Energy | None:
    """Return the energy of a step at the mean power of a stretch of them; None where that was not measured.

    The step's time is that of the stretch, too: where the host paces it or a power limit does, blocks take another.
    """
    found, in_blocks = trial.energy_measurement, steady_metrics.step_seconds(trial)
    if found is None or not found.seconds or not in_blocks or trial.facts is None:
        return None
    step_seconds = found.step_seconds or in_blocks
    watts = found.joules / found.seconds / found.num_gpus
    joules = watts * trial.spec.world_size * step_seconds
    block = BlockEnergy(joules=joules, units=steady_metrics.units_per_step(trial.spec, trial.facts))
    share = _LATE_SHARE * found.late_seconds / found.seconds
    return Energy(
        joules_per_unit=_ratio([block]),
        low=_ratio([block]) * (1 - share),
        high=_ratio([block]) * (1 + share),
        source="counter at a stretch",
        power_watts=watts,
        blocks=(block,),
    )


def _is_mixed(trial: Trial) -> bool:
    """Return whether other cells' power is in a trial's readings."""
    return trial.session_id is not None and any(each.seconds < _LONG_ENOUGH_SECONDS for each in trial.readings)


def _blocks(trial: Trial) -> tuple[tuple[BlockEnergy, ...], Source] | None:
    if _is_mixed(trial):
        return None
    watched = [(reading, count) for reading, count in _units(trial) if reading.seconds and count]
    if not watched:
        return None
    share = _running_share(trial)
    counted = _each(watched, [_times(share, reading.energy_joules) for reading, _ in watched])
    if counted is not None:
        return counted, "counter"
    # A counter that stands still in some blocks (it ticks at a pace of its own) has their energy in the next one's:
    # without those blocks the mean would be too high, so that all or none are taken.
    powered = _each(watched, [_times(share, _power_energy(reading)) for reading, _ in watched])
    return None if powered is None else (powered, "power × time")


def _each(
    watched: Sequence[tuple[TelemetrySummary, int]], joules: Sequence[float | None]
) -> tuple[BlockEnergy, ...] | None:
    if any(value is None for value in joules):
        return None
    pairs = zip(watched, joules, strict=True)
    return tuple(BlockEnergy(joules=value or 0.0, units=units) for (_, units), value in pairs)


def _running_share(trial: Trial) -> float:
    """Return which share of the time that readings are of went into steps; the rest is starting and asking.

    The counter ticks seldom: what it says of a block is that of as long a time, wherever it lies.
    """
    if not trial.ranks or not trial.ranks[0].blocks:
        return 1.0
    watched = sum(reading.seconds for reading in trial.readings)
    return min(1.0, sum(block.seconds for block in trial.ranks[0].blocks) / watched) if watched else 1.0


def _times(share: float, joules: float | None) -> float | None:
    return None if joules is None else share * joules


def _power_energy(reading: TelemetrySummary) -> float | None:
    return None if reading.power_watts is None else reading.power_watts * reading.seconds


def _units(trial: Trial) -> list[tuple[TelemetrySummary, int]]:
    """Return each block's or epoch's reading with the units that the GPUs it covers trained on."""
    if not trial.ranks or trial.facts is None:
        return []
    spec, first = trial.spec, trial.ranks[0]
    of_process = [block.num_steps * spec.process_batch_size for block in first.blocks]
    of_process = of_process or [epoch.num_samples for epoch in first.epochs]
    found = []
    for reading, samples in zip(trial.readings, of_process, strict=False):
        share = samples * spec.num_processes * max(1, reading.num_gpus) // spec.world_size
        found.append((reading, share * trial.facts.units_per_sample))
    return found


def _with_interval(found: tuple[tuple[BlockEnergy, ...], Source], trial: Trial) -> Energy:
    blocks, source = found
    low, high = _interval(blocks)
    # As many GPUs each for so long.
    seconds = _running_share(trial) * sum(each.seconds * max(1, each.num_gpus) for each in trial.readings)
    return Energy(
        joules_per_unit=_ratio(blocks),
        low=low,
        high=high,
        source=source,
        power_watts=sum(block.joules for block in blocks) / seconds,
        blocks=blocks,
    )


def _interval(blocks: Sequence[BlockEnergy]) -> tuple[float | None, float | None]:
    """Return Student's 95 % interval from the blocks' joules per unit; None with too few of them.

    It errs on the wide side: what the counter did not yet count in one block it counts in the next.
    """
    count = len(blocks)
    if count < _FEWEST_FOR_INTERVAL:
        return None, None
    error = statistics.stdev(block.joules / block.units for block in blocks) / math.sqrt(count)
    half = student_quantile(count - 1, level=0.95) * error
    return _ratio(blocks) - half, _ratio(blocks) + half


def _ratio(blocks: Sequence[BlockEnergy]) -> float:
    return sum(block.joules for block in blocks) / sum(block.units for block in blocks)
