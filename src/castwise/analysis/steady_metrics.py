"""Figures of one trial, computed from its raw samples."""

import statistics
from collections.abc import Iterable, Sequence

from castwise.analysis.statistics import FEWEST_BLOCKS, pseudomedian
from castwise.records.schema import Block, Facts, Trial
from castwise.registry import workloads
from castwise.spec.trial import TrialSpec
from castwise.spec.types import Unit

# The least slowdown of sustained steps that is reported. Source: chosen here.
_LEAST_SLOWDOWN = 0.005
_LEAST_BATCH_DIFFERENCE = 0.02  # of two scripts' batches, as a share. Source: chosen here


def blocks_of(trial: Trial) -> tuple[Block, ...]:
    """Return a trial's timed blocks: the first process's, since processes of one step wait for each other."""
    return trial.ranks[0].blocks if trial.ranks else ()


def step_times(trial: Trial) -> list[float]:
    """Return the seconds a step of each block, in order."""
    return [block.seconds / block.num_steps for block in blocks_of(trial)]


def block_means(trial: Trial) -> list[float]:
    """Return the seconds a step of each block, or of a training run of each epoch that counts."""
    recipe = trial.spec.recipe
    if recipe is None or not trial.ranks:
        return step_times(trial)
    counted = [epoch for epoch in trial.ranks[0].epochs[recipe.skip_epochs :] if epoch.counted_samples]
    return [epoch.counted_seconds / epoch.counted_samples * trial.spec.process_batch_size for epoch in counted]


def was_at_power_limit(trial: Trial) -> bool:
    """Return whether the power limit held a GPU's clock down in any timed block."""
    return any(reading.is_at_power_limit for reading in trial.readings)


def block_lengths(trial: Trial) -> list[float]:
    """Return how many times as long as the shortest each block is, in steps; 1 for each epoch of a training run."""
    if trial.spec.recipe is not None:
        return [1.0] * len(block_means(trial))
    steps = [block.num_steps for block in blocks_of(trial)]
    return [count / min(steps) for count in steps]


def step_seconds(trial: Trial) -> float | None:
    """Return the pseudomedian over blocks of seconds per step, None if nothing was timed."""
    per_step = step_times(trial)
    return pseudomedian(per_step) if per_step else None


def sustained_slowdown(trial: Trial) -> float | None:
    """Return how much longer a sustained step takes than one in the timed blocks, as a share of the latter.

    Between blocks there may be idle gaps and other configurations' blocks. None if it was not measured, or is not more
    than the blocks spread by.
    """
    seconds, measured = step_seconds(trial), trial.energy_measurement
    if measured is None or not measured.step_seconds or not seconds:
        return None
    excess = measured.step_seconds / seconds - 1
    return excess if excess >= max(_LEAST_SLOWDOWN, spread(trial) or 0.0) else None


def cold_start_seconds(trial: Trial) -> float | None:
    """Return the seconds from the request for a process to its first timed step; None if it did not get there."""
    facts = trial.facts
    if facts is None or not blocks_of(trial):
        return None
    to_build = facts.ready_seconds + facts.join_seconds + facts.set_up_seconds
    return to_build + facts.first_step_seconds + facts.warm_up_seconds


def throughput(trial: Trial) -> float | None:
    """Return units (images, tokens, samples) per second of all processes together, None if nothing was timed.

    It is the units of a step over the pseudomedian step time, so that one disturbed block does not change it. Never a
    mean of rates: that weights fast blocks twice.
    """
    seconds = step_seconds(trial)
    if not seconds or trial.facts is None:
        return None
    return units_per_step(trial.spec, trial.facts, blocks_of(trial)) / seconds


def unit_of(trial: Trial) -> Unit:
    """Return what a trial's throughput counts: what a user's own model says, or what the workload's name does."""
    unit = trial.facts.unit if trial.facts is not None else None
    return unit or workloads.unit_of(trial.spec.workload)


def units_per_step(spec: TrialSpec, facts: Facts, blocks: Sequence[Block] = ()) -> float:
    """Return the units (images, tokens, samples) of one step of all processes together.

    If the samples of the timed blocks were counted, batches may differ, and it is the mean.
    """
    counted = [block.num_samples for block in blocks if block.num_samples is not None]
    is_counted = counted and len(counted) == len(blocks)
    samples = sum(counted) / sum(block.num_steps for block in blocks) if is_counted else spec.batch_size
    return samples * facts.units_per_sample * spec.world_size


def batch_ratio(trials: Sequence[Trial], others: Sequence[Trial]) -> float:
    """Return how many times as large the batches of some scripts' timed steps were as others', by all their values.

    It is 1 if that is not known, or near enough: the time of a step need not be in proportion to its batch.
    """
    sizes = []
    for side in (trials, others):
        blocks = [block for trial in side for block in blocks_of(trial)]
        values = [block.num_values for block in blocks if block.num_values is not None]
        if not values or len(values) < len(blocks):
            return 1.0
        sizes.append(sum(values) / sum(block.num_steps for block in blocks))
    ratio = sizes[0] / sizes[1]
    return ratio if abs(ratio - 1) >= _LEAST_BATCH_DIFFERENCE else 1.0


def warm_step_seconds(facts: Facts | None) -> float | None:
    """Return about how long a step took in the warm-up after the first one; None if there was no further one."""
    if facts is None or facts.warm_up_steps < 2 or not facts.warm_up_seconds:
        return None
    return facts.warm_up_seconds / (facts.warm_up_steps - 1)


def spread(trial: Trial) -> float | None:
    """Return the blocks' interquartile range over their median; None with fewer than four blocks.

    It is the noise within one process. The noise between processes is larger.
    """
    per_step = step_times(trial)
    if len(per_step) < FEWEST_BLOCKS:
        return None
    low, middle, high = statistics.quantiles(per_step, n=4, method="inclusive")
    return (high - low) / middle


def final_loss(trial: Trial) -> tuple[float, int] | None:
    """Return the last timed step's loss and its number, counted from the first training step."""
    blocks = blocks_of(trial)
    if not blocks or blocks[-1].loss is None or trial.facts is None:
        return None
    return blocks[-1].loss, trial.facts.warm_up_steps + sum(block.all_steps for block in blocks)


def skipped_steps(trial: Trial) -> int:
    """Return the steps after warm-up that loss scaling skipped, over all processes."""
    return sum(block.skipped_steps for rank in trial.ranks for block in rank.blocks)


def peak_allocated_bytes(trial: Trial) -> int | None:
    """Return the most memory tensors held in any one process."""
    return largest(rank.peak_allocated_bytes for rank in trial.ranks)


def peak_reserved_bytes(trial: Trial) -> int | None:
    """Return the most memory the caching allocator held in any one process."""
    return largest(rank.peak_reserved_bytes for rank in trial.ranks)


def largest(values: Iterable[int | None]) -> int | None:
    """Return the largest of the values that are not None, None if there is none."""
    return max((value for value in values if value is not None), default=None)


def data_share(trials: Iterable[Trial]) -> float | None:
    """Return the share of a script's timed steps in which it waited for its loader's batches; None without a loader."""
    blocks = [block for trial in trials for rank in trial.ranks for block in rank.blocks]
    if not blocks or any(block.data_seconds is None for block in blocks):
        return None
    return sum(block.data_seconds or 0.0 for block in blocks) / sum(block.seconds for block in blocks)
