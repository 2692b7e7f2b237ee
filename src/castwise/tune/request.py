"""A request to tune, checked against the machine: the plain loop, what may be tried on it, and for how long."""

from castwise.errors import UsageError
from castwise.orchestrator.job import Job, prepare
from castwise.orchestrator.machine import EngineFactory
from castwise.orchestrator.reuse import is_reusable
from castwise.orchestrator.rounds import StopRule
from castwise.orchestrator.trial import Listener
from castwise.records.schema import Trial
from castwise.registry.datasets import SYNTHETIC_PREFIX
from castwise.registry.precisions import find_precision
from castwise.registry.suites import SUITE_NAMES, find_suite
from castwise.registry.workloads import find_workload
from castwise.spec.options import steps_of
from castwise.spec.recipe import Recipe
from castwise.spec.trial import TrialSpec
from castwise.spec.types import SYNTHETIC
from castwise.tune.candidates import SearchSpace, allowed_techniques
from castwise.tune.options import TuneOptions
from castwise.tune.search import TuningSearch
from castwise.tune.time_budget import phase_limit

# Screening is short: a step that waits for the host never settles, and what is in doubt is measured again.
_SCREENED = {"warm_up_seconds": 1.0, "num_blocks": 8}
# The blocks of a training run are epochs: fewer than blocks of steps, the first not counted, none longer than this.
# Source: chosen here; 118 steps are an epoch of MNIST at batch 512.
_MAX_EPOCHS, _MIN_EPOCHS = 8, 3
_MAX_STEPS = 120


def prepare_tuning(
    request: TuneOptions, listener: Listener | None = None, make_engine: EngineFactory | None = None
) -> TuningSearch:
    """Check a request against the machine, and return the search that answers it.

    Raises:
        UsageError: The request cannot be carried out as it stands.
        StoreError: The results folder cannot be written.
        EngineError: No measuring process could be started.
    """
    source = source_of(request)
    data_set = source[0] if source is not None else request.data_set or SYNTHETIC
    limit = phase_limit(request.budget_seconds) if request.timeout_seconds is None else request.timeout_seconds
    run_options = steps_of(
        request,
        workloads=(request.workload,),
        precisions=request.precisions,
        batch_sizes=None if request.batch_size is None else (request.batch_size,),
        data_set=SYNTHETIC if data_set.startswith(SYNTHETIC_PREFIX) else data_set,
        timeout_seconds=limit,
    )
    job = prepare(run_options, listener, make_engine, rule=StopRule())
    specs = [
        spec for spec in job.plan.specs if request.precisions or find_precision(spec.precision).keeps_float32_weights
    ]
    start = _screened(specs[0]) if source is None else training_spec(specs[0], *source)
    space = SearchSpace(
        start=start,
        precisions=tuple(spec.precision for spec in specs),
        techniques=allowed_techniques(request.numerics, start.kind),
        environment=job.runner.environment,
        larger_batches=request.larger_batches,
        memory_bytes=request.memory_bytes,
    )
    return TuningSearch(space, job, request.budget_seconds, _reusable(job, start, request))


def _screened(spec: TrialSpec) -> TrialSpec:
    if spec.device_type == "cpu":
        return spec
    return spec.model_copy(update={"protocol": spec.protocol.model_copy(update=_SCREENED)})


def published_run(workload: str, data_set: str | None) -> tuple[str, Recipe] | None:
    """Return the data set and the recipe with which a suite trains a workload; None if none does.

    Args:
        workload: Its name.
        data_set: The data set, or random samples in its shape; None takes the suite's.
    """
    name = find_workload(workload).name
    wanted = None if data_set is None else data_set.removeprefix(SYNTHETIC_PREFIX)
    for suite in map(find_suite, SUITE_NAMES):
        for cells in suite.cells:
            if name in {find_workload(each).name for each in cells.workloads} and wanted in (None, cells.data_set):
                return data_set or cells.data_set, suite.recipes[cells.recipe]
    return None


def training_spec(steady: TrialSpec, data_set: str, recipe: Recipe) -> TrialSpec:
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


def source_of(request: TuneOptions) -> tuple[str, Recipe] | None:
    """Return how the suites train what is asked for; None if steps are timed.

    Raises:
        UsageError: No suite does, although the request asks for it.
    """
    if not request.training and request.data_set in (None, SYNTHETIC):
        return None
    source = published_run(request.workload, request.data_set)
    if source is None and (request.training or str(request.data_set).startswith(SYNTHETIC_PREFIX)):
        raise UsageError(
            f"No suite trains {request.workload} on {request.data_set or 'any data'}. "
            "Leave --training and --data-set out to tune its steps."
        )
    return source


def _reusable(job: Job, start: TrialSpec, request: TuneOptions) -> tuple[Trial, ...]:
    """Return the records of this machine that need not be measured again."""
    if request.again or job.runner.store is None:
        return ()
    trials = job.runner.store.load(job.runner.environment)[0].values()
    limit = start.protocol.timeout_seconds
    return tuple(trial for trial in trials if is_reusable(trial, limit, retry=request.retry))
