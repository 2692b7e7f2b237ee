"""Find the largest batch of each precision and set of techniques, and the curve below it, in fresh processes."""

import math
import time
from dataclasses import dataclass, field

from castwise.analysis import steady_metrics
from castwise.errors import UsageError
from castwise.max_batch.bisect import BatchGrid, find_limit
from castwise.max_batch.options import MaxBatchOptions
from castwise.max_batch.result import (
    GROWTH,
    START,
    USABLE,
    MaxBatch,
    MaxBatchResult,
    is_max_batch_trial,
    max_batches_of,
)
from castwise.orchestrator.cached_measure import CachedMeasure
from castwise.orchestrator.job import Job, ResumePolicy, prepare
from castwise.orchestrator.machine import EngineFactory
from castwise.orchestrator.reuse import is_reusable
from castwise.orchestrator.trial import Listener
from castwise.records.schema import Environment, Trial
from castwise.spec.options import steps_of
from castwise.spec.trial import FIT, TrialSpec

MULTIPLE = 8
# Around the knee, batches are tried until neighbours differ by no more than this factor.
_KNEE_WITHIN = 2


@dataclass(frozen=True)
class MaxBatchJob:
    """A search made concrete on this machine.

    Attributes:
        templates: A trial of each loop, whatever its batch size.
        grid: Which batch sizes are tried.
        curve: Whether batches below the largest are measured.
        job: The machine, its records, and where to tell of progress.
    """

    templates: tuple[TrialSpec, ...]
    grid: BatchGrid
    curve: bool
    job: Job = field(repr=False)
    _policy: ResumePolicy = field(default_factory=ResumePolicy, repr=False)

    def run(self) -> MaxBatchResult:
        """Search for each loop's largest batch, and fill in its curve."""
        began = time.perf_counter()
        measure = CachedMeasure(self.job.runner, self._policy)
        found: list[MaxBatch] = []
        for template in self.templates:
            # How much of this device fragmentation takes is known once one search has ended.
            usable = next((share for each in reversed(found) if (share := each.usable) is not None), USABLE)
            found.append(self._search(template, measure, usable))
        recorded = {id(trial) for trial in measure.known.values()}
        num_recorded = sum(id(trial) in recorded for each in found for trial in each.trials)
        return MaxBatchResult(tuple(found), time.perf_counter() - began, num_recorded)

    def _search(self, template: TrialSpec, measure: CachedMeasure, usable: float) -> MaxBatch:
        trials = find_limit(measure, template, self.grid, usable)
        # What an earlier search of the same loop measured belongs to it, too.
        earlier = [] if self._policy.again else [t for t in measure.known.values() if _is_of(t, template)]
        tried = {trial.spec.key: trial for trial in (*earlier, *trials)}
        while self.curve and (size := self._next_of_curve(max_batches_of(tried.values())[0])) is not None:
            trial = measure(template.model_copy(update={"batch_size": size}))
            tried[trial.spec.key] = trial
        return max_batches_of(tried.values())[0]

    def _next_of_curve(self, found: MaxBatch) -> int | None:
        """Return a batch below the largest that the curve lacks: one of the small ones, or one below the knee."""
        if found.largest is None or found.failing is None:
            return None
        tried = [trial.spec.batch_size for trial in found.trials]
        size = self.grid.aligned(START)
        while 2 * size <= found.largest.spec.batch_size:  # nearer ones only where the knee may lie there
            if size not in tried:
                return size
            size *= GROWTH
        knee = found.knee
        if knee is None or steady_metrics.throughput(knee) is None:
            return None
        at = knee.spec.batch_size
        below = max((each for each in tried if each < at), default=at)
        middle = self.grid.aligned(math.isqrt(below * at))
        return middle if at > _KNEE_WITHIN * below and middle not in tried and below < middle < at else None


def prepare_max_batch(
    request: MaxBatchOptions, listener: Listener | None = None, make_engine: EngineFactory | None = None
) -> MaxBatchJob:
    """Check a request against the machine, and return the search that answers it.

    Raises:
        UsageError: The request cannot be carried out as it stands.
        StoreError: The results folder cannot be written.
        EngineError: No measuring process could be started.
    """
    least = 1 + FIT.min_blocks
    steps = FIT.warm_up_steps + FIT.min_blocks if request.steps is None else request.steps
    if steps < least:
        raise UsageError(f"A batch is seen to train after {least} steps at the least; {steps} are too few.")
    run_options = steps_of(
        request,
        workloads=(request.workload,),
        precisions=request.precisions,
        batch_sizes=(START,),
        techniques=request.techniques,
    )
    job = prepare(run_options, listener, make_engine)
    limit = _limit(request, job.runner.environment)
    protocol = FIT.model_copy(update={"warm_up_steps": steps - FIT.min_blocks})
    if request.timeout_seconds is not None:
        protocol = protocol.model_copy(update={"timeout_seconds": request.timeout_seconds})
    update = {"protocol": protocol, "memory_limit_bytes": limit}
    templates = tuple(spec.model_copy(update=update) for spec in job.plan.specs)
    finest = max((own.accumulate for own in job.own.values()), default=1)
    multiple = finest if request.exact else math.lcm(MULTIPLE, finest)
    policy = ResumePolicy(request.retry, request.again)
    return MaxBatchJob(templates, BatchGrid(multiple, finest, math.lcm(START, finest)), request.curve, job, policy)


def _limit(request: MaxBatchOptions, environment: Environment) -> int | None:
    """Return the most that a trial may take, None where the device alone decides."""
    whole = environment.gpu_memory_bytes if environment.gpu is not None else None
    asked = request.memory_bytes
    if whole is None and asked is None:
        raise UsageError(
            "On a CPU memory ends where the machine begins to swap, which no batch is worth: "
            "name a limit with --memory, such as --memory 2GiB."
        )
    if whole is not None and asked is not None and asked > whole:
        raise UsageError(
            f"--memory {asked / 2**30:.3g} GiB is more than {environment.device_name} has ({whole / 2**30:.1f} GiB)."
        )
    if asked is None and request.margin is None:
        return None
    return max(1, int((asked if asked is not None else whole or 0) * (1 - (request.margin or 0.0))))


def _is_of(trial: Trial, template: TrialSpec) -> bool:
    own = template.without_timeout.model_copy(update={"batch_size": trial.spec.batch_size})
    limit = template.protocol.timeout_seconds
    return is_max_batch_trial(trial) and trial.spec.without_timeout == own and is_reusable(trial, limit)
