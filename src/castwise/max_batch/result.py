"""The largest batch that fits, read from trials alone: the prediction from small ones, what was verified, the knee."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from castwise.analysis import steady_metrics
from castwise.analysis.speedup import comparison_key
from castwise.records.schema import MemoryParts, Trial
from castwise.spec.grouping import grouped
from castwise.spec.trial import TrialSpec

# The first batch tried, and how much larger each further one of the small ones is.
START, GROWTH = 8, 4
MULTIPLE = 8  # of the batches that are tried
# Small batches end at this share of the batch that they predict. cuDNN takes other algorithms, with other workspaces,
# for larger batches: ResNet-50 in fp32 on an H200 takes 88 MiB a sample from 32 to 128 and 83 MiB from 128 on.
_SMALL = 0.4
# Of what the allocator may hold, the share that tensors come to at the largest batch; fragmentation takes the rest.
# Source: ResNet-50 on an H200 (benchmarks/records/fit): 0.990 to 0.994. DPN-92 there: 0.934 to 0.953, as far as
# multiples of 128 tell (records/suites/quick of castwise 4bce9a48f35e). A guess that is too high costs less than one
# that is too low: an out-of-memory comes at once.
USABLE = 0.99
# A throughput this near to the best is as good. Source: chosen here, as the project's goal states it.
KNEE = 0.02


# Whether all loops were searched, no time was left for a further trial, or Ctrl-C came.
Ending = Literal["done", "budget", "interrupted"]


def has_trained(trial: Trial) -> bool:
    """Return whether a trial's steps ran to their end; a NaN loss does not matter, since memory use is the same."""
    return trial.status in ("ok", "diverged")


def is_too_large(trial: Trial, trained_batch: int) -> bool:
    """Return whether a trial shows that its batch is too large, given the largest batch that is known to train.

    It ran out of memory, or it crashed above a batch that trains: libraries have errors of their own for lack of
    memory, and limits of their own on sizes.
    """
    return trial.status == "oom" or (trial.status == "crashed" and 0 < trained_batch < trial.spec.batch_size)


def is_max_batch_trial(trial: Trial) -> bool:
    """Return whether a trial was made to find the largest batch."""
    return trial.spec.kind == "steady" and trial.spec.protocol.memory_parts


def held_bytes(trial: Trial) -> int | None:
    """Return the memory of a trial that counts for a limit.

    On a GPU it is the tensors' peak in the timed steps: the allocator gives back what it keeps beyond that when memory
    runs out. On a CPU it is the growth of the process from its start.
    """
    peak = steady_metrics.peak_allocated_bytes(trial)
    if trial.spec.device_type != "cpu" or not trial.ranks:
        return peak
    return steady_metrics.largest([peak, *(rank.warm_up_peak_allocated_bytes for rank in trial.ranks)])


def available_bytes(trial: Trial) -> int | None:
    """Return what a trial's allocator, or its process on a CPU, could have held; None if it is not known."""
    limit, whole = trial.spec.memory_limit_bytes, trial.environment.gpu_memory_bytes
    if trial.spec.device_type == "cpu" or whole is None:
        return limit
    outside = [rank.memory_parts.outside_bytes for rank in trial.ranks if rank.memory_parts is not None]
    outside += [
        rank.driver_used_bytes - rank.peak_reserved_bytes
        for rank in trial.ranks
        if rank.driver_used_bytes is not None and rank.peak_reserved_bytes is not None
    ]
    room = whole - max(0, steady_metrics.largest(outside) or 0)
    return room if limit is None else min(limit, room)


@dataclass(frozen=True)
class Prediction:
    """What two small batches predict."""

    fixed_bytes: float  # memory that does not depend on the batch
    sample_bytes: float  # memory of each sample on top
    usable_bytes: float  # memory that tensors can hold in all

    @property
    def batch_size(self) -> int | None:
        """Return the predicted largest batch, 0 if none fits; None if a sample takes no memory."""
        if self.sample_bytes <= 0:
            return None
        return max(0, int((self.usable_bytes - self.fixed_bytes) / self.sample_bytes))


def predict(trials: Sequence[Trial], usable: float = USABLE) -> Prediction | None:
    """Return what the two largest of some small batches predict; None if fewer than two have trained.

    On a GPU tensors can come to the share `usable` of what the allocator may hold.
    """
    known = sorted((t for t in trials if has_trained(t) and held_bytes(t)), key=lambda trial: trial.spec.batch_size)
    available = available_bytes(known[-1]) if len(known) > 1 else None
    if available is None:
        return None
    pair = known[-2:]
    held = [held_bytes(trial) or 0 for trial in pair]
    parts = [own for trial in pair if (own := parts_of(trial)) is not None]
    if len(parts) == len(pair):
        # Both are counted with the smaller workspace. cuDNN chooses algorithms with much workspace while there is
        # plenty of memory (0.8 GiB of the 3.5 that 128 images took in a ResNet-18), and with little at the limit.
        spaces = [own.workspace_bytes or 0 for own in parts]
        held = [own - space + min(spaces) for own, space in zip(held, spaces, strict=True)]
    small, large = (trial.spec.batch_size for trial in pair)
    sample = (held[1] - held[0]) / (large - small)
    share = 1.0 if pair[1].spec.device_type == "cpu" else usable
    return Prediction(held[0] - small * sample, sample, available * share)


def next_small(trials: Sequence[Trial]) -> int | None:
    """Return the next small batch to try after these; None if there are enough of them, or one did not train."""
    if not has_trained(trials[-1]):
        return None
    following = trials[-1].spec.batch_size * GROWTH
    found = predict(trials)
    if found is None:
        return following if len(trials) < 2 else None
    largest = found.batch_size
    return following if largest is None or following <= largest * _SMALL else None


def small_ones(trials: Sequence[Trial]) -> list[Trial]:
    """Return the small batches that a search began with, by the order in which its trials were run.

    A search that began with a traced step measures them for the curve.
    """
    found: list[Trial] = []
    ordered = sorted(trials, key=lambda each: each.started_at)
    if ordered[0].spec.batch_size != min(trial.spec.batch_size for trial in ordered):
        ordered = sorted(trials, key=lambda each: each.spec.batch_size)
    for trial in ordered:
        if found and next_small(found) != trial.spec.batch_size:
            break
        found.append(trial)
    return found


@dataclass(frozen=True)
class MaxBatch:
    """All trials that differ in their batch size alone, by batch size."""

    trials: tuple[Trial, ...]

    def __repr__(self) -> str:
        largest = None if self.largest is None else self.largest.spec.batch_size
        return f"MaxBatch({self.spec.workload} {self.spec.precision}: largest batch {largest} of {len(self.trials)})"

    @property
    def spec(self) -> TrialSpec:
        """Return what all have in common; of the smallest batch."""
        return self.trials[0].spec

    @cached_property
    def trained(self) -> list[Trial]:
        return [trial for trial in self.trials if has_trained(trial)]

    @property
    def largest(self) -> Trial | None:
        return self.trained[-1] if self.trained else None

    @property
    def words(self) -> str:
        """Return the largest batch: `1,688`; `at least 8` if the next was not seen to fail; `none` if none trained."""
        if self.largest is None:
            return "none"
        size, facts = self.largest.spec.batch_size, self.largest.facts
        step = math.lcm(MULTIPLE, 1 if facts is None else facts.accumulate)
        is_known = self.failing is not None and self.failing.spec.batch_size - size <= step
        return f"{'at least ' * (not is_known)}{size:,}"

    @property
    def failing(self) -> Trial | None:
        """Return the smallest batch above it that did not train."""
        above = self.largest.spec.batch_size if self.largest else 0
        return next((t for t in self.trials if is_too_large(t, above) and t.spec.batch_size > above), None)

    @property
    def problem(self) -> Trial | None:
        """Return a trial that ended in neither steps nor an out-of-memory, the largest batch's first; None for none."""
        return next((t for t in reversed(self.trials) if not has_trained(t) and t.status != "oom"), None)

    @cached_property
    def prediction(self) -> Prediction | None:
        return predict(small_ones(self.trials))

    @property
    def prediction_error(self) -> float | None:
        """Return by what share the prediction missed what was verified; None without either.

        Nothing is known of the batches between the largest that trained and the first that did not, so that a
        prediction of one of them is no miss.
        """
        predicted = self.prediction.batch_size if self.prediction is not None else None
        if predicted is None or self.largest is None or self.failing is None:
            return None
        least, most = self.largest.spec.batch_size, self.failing.spec.batch_size - 1
        return predicted / min(max(predicted, least), most) - 1

    @property
    def usable(self) -> float | None:
        """Return the share of the memory that tensors held at the largest batch; None if that is not known."""
        largest = self.largest
        if largest is None or self.failing is None:
            return None
        available, held = available_bytes(largest), held_bytes(largest)
        return held / available if available and held else None

    @property
    def num_foreign(self) -> int:
        """Return the most foreign processes that computed on the GPU while steps were timed."""
        counts = [reading.foreign_processes for trial in self.trained for reading in trial.readings]
        return max((count for count in counts if count is not None), default=0)

    @property
    def knee(self) -> Trial | None:
        """Return the smallest batch whose throughput is within 2 % of the best."""
        rates = {trial.spec.key: steady_metrics.throughput(trial) for trial in self.trained}
        best = max((rate for rate in rates.values() if rate), default=None)
        if best is None:
            return None
        return next(trial for trial in self.trained if (rates[trial.spec.key] or 0.0) >= (1 - KNEE) * best)


@dataclass(frozen=True)
class MaxBatchResult:
    """What came of `castwise max-batch`."""

    max_batches: tuple[MaxBatch, ...]  # one for each loop
    seconds: float  # wall time
    num_recorded: int = 0  # trials that were on record before, and are not in the wall time
    ending: Ending = "done"
    # Unless it is done: the loops that were not searched, the first of them perhaps in part.
    left: tuple[TrialSpec, ...] = ()

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(trial for found in self.max_batches for trial in found.trials)


def max_batches_of(trials: Iterable[Trial]) -> list[MaxBatch]:
    """Return trials that were made to find the largest batch, put together, in the order of their first ones."""
    groups = grouped(filter(is_max_batch_trial, trials), lambda trial: comparison_key(trial, "batch_size"))
    return [MaxBatch(tuple(sorted(own, key=lambda each: each.spec.batch_size))) for own in groups.values()]


def parts_of(trial: Trial) -> MemoryParts | None:
    """Return what held a trial's memory; None if that was not measured."""
    parts = trial.ranks[0].memory_parts if trial.ranks else None
    return None if parts is None or parts.missing else parts
