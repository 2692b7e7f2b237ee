"""Figures of one trial, computed from its raw samples."""

import statistics
from collections.abc import Iterable

from castwise.analysis.statistics import pseudomedian
from castwise.records.schema import Block, Facts, Trial
from castwise.registry import workloads
from castwise.spec.trial import TrialSpec
from castwise.spec.types import Unit

# What a step takes longer at a stretch than in blocks is told from here. Source: H200s far from their power limit took
# 0.2 to 0.4 % less (docs/method.md): there are no pauses in a stretch.
_STRETCH_EXCESS = 0.005


def step_times(trial: Trial) -> list[float]:
    """Return the seconds a step of each block, in order."""
    return [block.seconds / block.num_steps for block in _blocks(trial)]


def block_means(trial: Trial) -> list[float]:
    """Return the seconds a step of each turn: of each block, or of a training run of each epoch that counts."""
    recipe = trial.spec.recipe
    if recipe is None or not trial.ranks:
        return step_times(trial)
    counted = [epoch for epoch in trial.ranks[0].epochs[recipe.skip_epochs :] if epoch.counted_samples]
    return [epoch.counted_seconds / epoch.counted_samples * trial.spec.process_batch_size for epoch in counted]


def block_lengths(trial: Trial) -> list[float]:
    """Return how many times as long as the shortest each turn is, in steps; of a training run's epochs, 1 each."""
    if trial.spec.recipe is not None:
        return [1.0] * len(block_means(trial))
    steps = [block.num_steps for block in _blocks(trial)]
    return [count / min(steps) for count in steps]


def step_seconds(trial: Trial) -> float | None:
    """Return the pseudomedian over blocks of seconds per step, None where nothing was timed."""
    per_step = step_times(trial)
    return pseudomedian(per_step) if per_step else None


def sustained_slowdown(trial: Trial) -> float | None:
    """Return how much longer a step took where steps ran on and on than in the timed blocks, as a share of these.

    Between blocks may be pauses, and other cells' blocks. None where it was not measured, or is too little to tell:
    no more than the blocks spread by.
    """
    seconds = step_seconds(trial)
    if trial.energy_measurement is None or not trial.energy_measurement.step_seconds or not seconds:
        return None
    excess = trial.energy_measurement.step_seconds / seconds - 1
    return excess if excess >= max(_STRETCH_EXCESS, spread(trial) or 0.0) else None


def cold_start_seconds(trial: Trial) -> float | None:
    """Return the seconds from the request for a process to its first timed step; None where it did not get there."""
    facts = trial.facts
    if facts is None or not _blocks(trial):
        return None
    return facts.ready_seconds + facts.set_up_seconds + facts.first_step_seconds + facts.warm_up_seconds


def throughput(trial: Trial) -> float | None:
    """Return units (images, tokens, samples) per second of all processes together, None where nothing was timed.

    It is the units of a step over the middle step time, so that one disturbed block does not move it. Never a
    mean of rates: that weighs fast blocks twice.
    """
    seconds = step_seconds(trial)
    if not seconds or trial.facts is None:
        return None
    return units_per_step(trial.spec, trial.facts) / seconds


def unit_of(trial: Trial) -> Unit:
    """Return what a trial's throughput counts: what a user's own model says, or what the workload's name does."""
    own = trial.facts.unit if trial.facts is not None else None
    return own or workloads.unit_of(trial.spec.workload)


def units_per_step(spec: TrialSpec, facts: Facts) -> int:
    """Return the units (images, tokens, samples) of one step of all processes together."""
    return spec.batch_size * facts.units_per_sample * spec.world_size


def spread(trial: Trial) -> float | None:
    """Return the blocks' interquartile range over their median; None with fewer than four blocks.

    It is the noise within one process. The noise between processes is larger.
    """
    per_step = step_times(trial)
    if len(per_step) < 4:
        return None
    low, middle, high = statistics.quantiles(per_step, n=4, method="inclusive")
    return (high - low) / middle


def final_loss(trial: Trial) -> tuple[float, int] | None:
    """Return the last timed step's loss and how many training steps came before and with it."""
    blocks = _blocks(trial)
    if not blocks or trial.facts is None:
        return None
    return blocks[-1].loss, trial.facts.warm_up_steps + sum(block.all_steps for block in blocks)


def skipped_steps(trial: Trial) -> int:
    """Return the steps after warm-up that loss scaling skipped, over all processes."""
    return sum(block.skipped_steps for rank in trial.ranks for block in rank.blocks)


def peak_allocated_bytes(trial: Trial) -> int | None:
    """Return the most memory tensors held in any one process."""
    return largest([rank.peak_allocated_bytes for rank in trial.ranks])


def peak_reserved_bytes(trial: Trial) -> int | None:
    """Return the most memory the caching allocator held in any one process."""
    return largest([rank.peak_reserved_bytes for rank in trial.ranks])


def largest(values: Iterable[int | None]) -> int | None:
    """Return the largest of the values that there are, None where there is none."""
    return max((value for value in values if value is not None), default=None)


def _blocks(trial: Trial) -> tuple[Block, ...]:
    # Processes of one step wait for each other: the first speaks for all.
    return trial.ranks[0].blocks if trial.ranks else ()
