"""`castwise tune` from the request to the result: prepare the search, then measure what is decided until it is done."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from castwise.errors import UsageError
from castwise.orchestrator.job import Job, prepare
from castwise.orchestrator.machine import FindMachine, detect_machine
from castwise.orchestrator.rounds import Rounds, StopRule
from castwise.orchestrator.runner import Listener, TrialRunner, UnboundedProgress
from castwise.records.schema import Environment, Trial
from castwise.records.store import is_reusable
from castwise.registry.datasets import SYNTHETIC_PREFIX
from castwise.registry.precisions import (
    BASELINE,
    DEFAULT,
    NARROW_PRECISIONS,
    find_precision,
    why_unsupported,
    why_without_torchao,
)
from castwise.registry.suites import SUITE_NAMES, find_suite
from castwise.registry.workloads import find_workload
from castwise.spec.options import DurationOptions, steps_of
from castwise.spec.recipe import Recipe
from castwise.spec.trial import TrialSpec
from castwise.spec.types import SYNTHETIC
from castwise.spec.user_model import is_script
from castwise.tune.candidates import Change, SearchSpace, allowed_techniques
from castwise.tune.decide import Ending, Session, TuningSteps, advance
from castwise.tune.measurements import FIRST_FINAL_REPEAT, Measurements
from castwise.tune.options import TuneOptions
from castwise.tune.result import TuningResult
from castwise.tune.time_budget import (
    FIRST_PROCESS_SECONDS,
    TimeLeft,
    default_budget,
    has_long_first_step,
    is_short,
    phase_limit,
)

_ONCE = StopRule(min_rounds=1, max_rounds=1)
# Screening is short: a step that waits for the host never settles, and what is in doubt is measured again.
_SCREENED = {"warm_up_seconds": 1.0, "num_blocks": 8}
_PROFILE = {"profile_steps": 3}  # of the plain loop: what is against its causes is tried first
# The blocks of a training run are epochs: fewer than blocks of steps, the first not counted, none longer than this.
# Source: chosen here; 118 steps are an epoch of MNIST at batch 512.
_MAX_EPOCHS, _MIN_EPOCHS = 8, 3
_MAX_STEPS = 120


@dataclass(frozen=True)
class TuningSearch:
    space: SearchSpace
    job: Job = field(repr=False)
    budget_seconds: float | None = None  # None takes what suits the plain loop
    recorded: tuple[Trial, ...] = field(default=(), repr=False)  # trials that need not be measured again
    spent_seconds: float = 0.0  # of the budget, by imports and the user's code
    clock: Callable[[], float] = field(default=time.perf_counter, repr=False)

    def run(self) -> TuningResult:
        """Measure what is decided until nothing is left to try, or no time for it, or until Ctrl-C.

        Raises:
            KeyboardInterrupt: It was interrupted before the plain loop was measured.
        """
        began = self.clock()
        start = self.space.start
        runner = replace(self.job.runner, listener=UnboundedProgress(self.job.runner.listener))
        measured = Measurements.from_records(self.recorded, start)
        process_seconds = FIRST_PROCESS_SECONDS
        is_interrupted = False

        def budget() -> float:
            return default_budget(measured.of(start)) if self.budget_seconds is None else self.budget_seconds

        def time_left() -> TimeLeft:
            seconds = -math.inf if is_interrupted else budget() - self.spent_seconds - (self.clock() - began)
            return TimeLeft(seconds, process_seconds, is_short(measured.of(start)), budget() / 2)

        left = time_left()
        steps = TuningSteps(self.space, measured.part(is_final=False), left).run()
        decision = advance(steps)
        while isinstance(decision, Session):
            if is_interrupted:
                raise KeyboardInterrupt
            session_began = self.clock()
            self.job.runner.listener.remark(decision.purpose)
            # The configurations are measured once more each, in fresh processes that are interleaved.
            earlier = [trial for spec in decision.specs for trial in measured.of(spec)]
            specs = decision.specs
            if any(trial.profile for trial in earlier):  # one process's profile is enough
                specs = tuple(spec.with_protocol(profile_steps=0) for spec in specs)
            rule = replace(_ONCE, budget_seconds=max(left.seconds, 1.0))
            rounds = Rounds(runner, specs, rule, earlier, specs[0])
            try:
                rounds.run_once()
            except KeyboardInterrupt:
                is_interrupted = True
            measured = measured.plus(rounds.trials[len(earlier) :], decision.specs)
            if not any(map(has_long_first_step, decision.specs)):
                process_seconds = (self.clock() - session_began) / len(decision.specs)
            left = time_left()
            decision = advance(steps, (measured.part(is_final=False), left))
        done, recorded = decision, {id(trial) for trial in self.recorded}

        def result(ending: Ending) -> TuningResult:
            trials = tuple(trial for spec in done.used for trial in measured.of(spec))
            return TuningResult(
                start=start,
                tried=done.tried,
                trials=trials,
                ending="interrupted" if is_interrupted and ending != "failed" else ending,
                seconds=self.spent_seconds + self.clock() - began,
                num_recorded=sum(id(trial) in recorded for trial in trials),
                budget_seconds=budget(),
                memory_bytes=self.space.memory_bytes if math.isfinite(self.space.memory_bytes) else None,
                fp32=self.space.fp32,
                without_layers=self.space.without_layers(measured.layers(start)),
            )

        ending, final_specs = done.ending, result(done.ending).final_specs
        if not is_interrupted and not measured.is_final_done(final_specs):
            rounds = self._final_rounds(runner, final_specs, measured, left)
            try:
                rounds.run()
                ending = "budget" if rounds.ending == "budget" else ending
            except KeyboardInterrupt:
                is_interrupted = True
            measured = measured.plus(rounds.trials)
        return result(ending).confirmed

    def _final_rounds(
        self, runner: TrialRunner, specs: Sequence[TrialSpec], measured: Measurements, left: TimeLeft
    ) -> Rounds:
        """Return the rounds of the final session, in processes that did not lead the search; the winner comes first."""
        self.job.runner.listener.remark("the final session")
        earlier = [trial.spec.repeat for spec in specs for trial in measured.final.of(spec)]
        first = 1 + max(earlier, default=FIRST_FINAL_REPEAT - 1)
        rule = replace(StopRule.of(DurationOptions()), one_look=False, budget_seconds=max(left.seconds, 0.0))
        specs = [spec.with_protocol(profile_steps=0).model_copy(update={"repeat": first}) for spec in specs]
        seconds = left.session_seconds(specs, measured, is_repeated=True)
        return Rounds(runner, specs, rule, (), specs[0], seconds)


def prepare_tuning(
    request: TuneOptions, listener: Listener | None = None, find_machine: FindMachine = detect_machine
) -> TuningSearch:
    """Check a request against the machine, and return the search that answers it.

    Raises:
        UsageError: The request cannot be carried out as it stands.
        StoreError: The results folder cannot be written.
        EngineError: No measuring process could be started.
    """
    began = time.perf_counter()
    source = source_of(request)
    of_script = is_script(request.workload)
    if of_script and (request.larger_batches or request.memory_bytes is not None):
        raise UsageError("A script has its own batch: leave --larger-batches and --memory out.")
    data_set = source[0] if source is not None else request.data_set or SYNTHETIC
    limit = phase_limit(request.budget_seconds) if request.timeout_seconds is None else request.timeout_seconds
    run_options = steps_of(
        request,
        workloads=(request.workload,),
        batch_sizes=None if request.batch_size is None else (request.batch_size,),
        world_sizes=None if request.num_gpus is None else (request.num_gpus,),
        parallelisms=None if request.parallelism is None else (request.parallelism,),
        data_set=SYNTHETIC if data_set.startswith(SYNTHETIC_PREFIX) else None if of_script else data_set,
        timeout_seconds=limit,
    )
    rule = StopRule(budget_seconds=request.budget_seconds)
    job = prepare(run_options, listener, find_machine, rule=rule, is_search=True)
    space = _space_of(request, job, source)
    store = None if request.again else job.runner.store
    stored = () if store is None else store.load(job.runner.environment)[0].values()
    reusable = tuple(trial for trial in stored if is_reusable(trial, limit, retry=request.retry))
    spent_seconds = 0.0 if request.budget_seconds is None else time.perf_counter() - began
    return TuningSearch(space, job, request.budget_seconds, reusable, spent_seconds)


def _space_of(request: TuneOptions, job: Job, source: tuple[str, Recipe] | None) -> SearchSpace:
    """Return what a search may try, from the trials that `castwise run` would make of its request."""
    # Unless told otherwise, it starts from PyTorch's default, the first row; a device without TF32 has none.
    rows = [find_precision(spec.precision) for spec in job.specs]
    kept = [row for row in rows if request.precisions or row.keeps_float32_weights]
    names = [row.name for row in (kept[0], *sorted(kept[1:], key=lambda row: row.loop_changes))]  # the simplest first
    start = job.specs[0]
    if source is not None:
        start = _training_spec(start, *source)
    elif start.device_type != "cpu":
        start = start.with_protocol(**_SCREENED, **_PROFILE)
    environment = job.runner.environment
    if request.precisions is None and start.device_type == "cuda" and not start.is_script:
        names += _fp8_names(environment)  # to be tried on a compiled loop
    has_both = request.precisions is None and start.precision == DEFAULT
    return SearchSpace(
        start=start,
        precisions=tuple(name for name in names if not (has_both and name == BASELINE)),
        # It takes minutes, and none of the three searches on an H200 that tried it gained by it.
        techniques=allowed_techniques(request.numerics, start, autotunes=request.budget_seconds is not None),
        environment=environment,
        larger_batches=request.larger_batches,
        memory_bytes=math.inf if request.memory_bytes is None else request.memory_bytes,
        fp32=Change(precision=BASELINE).on(start) if has_both else None,
        is_fp8_asked_for=request.precisions is not None,
    )


def _fp8_names(environment: Environment) -> list[str]:
    """Return the precisions of FP8 that this machine can compute, but MXFP8, which nobody has measured yet."""
    return [
        row.name
        for row in NARROW_PRECISIONS
        if row.float8_recipe not in ("", "mxfp8")
        and why_unsupported(row, environment.hardware) is None
        and why_without_torchao(row, environment.torchao) is None
    ]


def source_of(request: TuneOptions) -> tuple[str, Recipe] | None:
    """Return the data set and the recipe with which a suite trains what is asked for; None if steps are timed.

    Raises:
        UsageError: No suite does, although the request asks for it.
    """
    asked = request.data_set
    if not request.training and asked in (None, SYNTHETIC):
        return None
    name = find_workload(request.workload).name
    wanted = None if asked is None else asked.removeprefix(SYNTHETIC_PREFIX)
    for suite in map(find_suite, SUITE_NAMES):
        for cells in suite.cells:
            names = {find_workload(workload).name for workload in cells.workloads}
            if name in names and wanted in (None, cells.data_set):
                return asked or cells.data_set, suite.recipes[cells.recipe]
    if request.training or str(asked).startswith(SYNTHETIC_PREFIX):
        raise UsageError(
            f"No suite trains {request.workload} on {asked or 'any data'}. "
            "Leave --training and --data-set out to tune its steps."
        )
    return None


def _training_spec(steady: TrialSpec, data_set: str, recipe: Recipe) -> TrialSpec:
    """Return the training run whose epochs are timed instead of blocks of steps."""
    epochs = 1 + _MAX_EPOCHS
    changes = {
        "epochs": max(epochs, recipe.epochs),
        "stop_after": epochs,
        "max_steps": min(_MAX_STEPS, recipe.max_steps or _MAX_STEPS),
        "skip_epochs": 1,
        "skip_batches": 0,
        "validate_each_epoch": False,
    }
    protocol = steady.protocol.model_copy(update={"num_blocks": _MAX_EPOCHS, "min_blocks": _MIN_EPOCHS})
    return TrialSpec.model_validate(
        steady.model_dump()
        | {"kind": "training", "data_set": data_set, "protocol": protocol.model_dump()}
        | {"recipe": recipe.model_dump() | changes}
    )
