"""One job from request to records: find the device, make the plan, measure what is missing."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from castwise.errors import MissingDataError, UsageError
from castwise.orchestrator.machine import (
    EngineFactory,
    Machine,
    check_device_name,
    detect_machine,
    inspect_user_model,
    provide,
)
from castwise.orchestrator.reuse import is_reusable, matches_configuration
from castwise.orchestrator.rounds import Rounds, StopRule
from castwise.orchestrator.runner import TrialRunner
from castwise.orchestrator.session import Engine
from castwise.orchestrator.trial import Listener, NullListener, unsupported_reason
from castwise.records.schema import Environment, Trial
from castwise.records.store import Problem, Store
from castwise.registry.datasets import MNIST, find_data_set
from castwise.registry.precisions import find_precision, why_unsupported
from castwise.registry.workloads import find_workload
from castwise.spec.plan import ParameterGrid, Plan, build_plan
from castwise.spec.quantities import as_tuple, split_names
from castwise.spec.trial import (
    CPU_PROTOCOL,
    CPU_ROUND,
    CPU_SHORT,
    CUDA_PROTOCOL,
    CUDA_ROUND,
    MeasurementProtocol,
    TrialSpec,
)
from castwise.spec.types import SYNTHETIC
from castwise.spec.user_model import UserWorkload, locate

# What a bare `castwise run` measures: short, and worth telling, on the machine it stands on.
_BARE_CPU = ("mnist-cnn", ("fp32", "bf16-mixed", "fp16-mixed", "bf16-true"))
_BARE_CUDA = ("resnet50", None)

# By whether it is a CPU, and whether there are rounds.
_PROTOCOLS = {
    (False, False): CUDA_PROTOCOL,
    (False, True): CUDA_ROUND,
    (True, False): CPU_PROTOCOL,
    (True, True): CPU_ROUND,
}
# A CPU's steps take long, and its figures spread too widely for any number of rounds to help; unless that is named.
_CPU_BUDGET_SECONDS = 75.0

_SEED_LIMIT = 2**63  # of torch.manual_seed


@dataclass(frozen=True)
class Request:
    """What a user asked for; None stands for "what suits the machine".

    Attributes:
        axes: What is crossed with what.
        device: "cpu", "cuda" or "cuda:N".
        data_set: `synthetic` or the name of a real data set.
        data_dir: Where real data lies.
        results: The results folder; None keeps no records.
        seconds: Seconds to time each trial for; None takes the device type's own.
        timeout_seconds: Seconds one phase may take before a trial is given up.
        seed: Seeds weights, data and dropout.
        rule: When a comparison's rounds end; None measures each cell once, by itself.
        retry: Measure crashed and timed-out trials again.
        again: Measure everything again, whatever is recorded.
        short: Somebody waits at a prompt: on a CPU, whose steps take long, a second a trial and few precisions.
    """

    axes: ParameterGrid = field(default_factory=ParameterGrid)
    device: str | None = None
    data_set: str | None = None
    data_dir: Path | None = None
    results: Path | None = None
    seconds: float | None = None
    timeout_seconds: float | None = None
    seed: int = 0
    rule: StopRule | None = None
    retry: bool = False
    again: bool = False
    short: bool = False


@dataclass(frozen=True)
class Job:
    """A request made concrete on this machine.

    Attributes:
        plan: Every cell of the job.
        missing: The cells that no record answers yet; with a rule, another round may be due for the others.
        recorded: The trials that stand already, by spec key, further rounds' among them.
        problems: Files in the machine's results folder that are no records.
        notes: What the user should know before it starts, a sentence each.
        runner: Measures what is missing.
        rule: When a comparison's rounds end; None measures each cell once, by itself.
        own: What a look at the user's own models told, by their names in the request.
    """

    plan: Plan
    missing: tuple[TrialSpec, ...]
    recorded: dict[str, Trial]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    runner: TrialRunner = field(repr=False)
    rule: StopRule | None = None
    own: Mapping[str, UserWorkload] = field(default_factory=dict)

    def run(self) -> list[Trial]:
        """Measure what is missing and return all trials, cell by cell in the plan's order."""
        if self.rule is not None:
            return self._run_rounds(self.rule)
        fresh = {trial.spec.key: trial for trial in self.runner.run(self.missing)}
        return [fresh.get(spec.key) or self.recorded[spec.key] for spec in self.plan.specs]

    def _run_rounds(self, rule: StopRule) -> list[Trial]:
        lacking = [spec for spec in self.plan.specs if unsupported_reason(spec, self.runner.environment)]
        by_cell: dict[str, list[Trial]] = {}
        comparisons: dict[str, list[TrialSpec]] = {}
        for spec in self.plan.specs:
            if spec not in lacking:
                comparisons.setdefault(spec.comparison, []).append(spec)
        for number, cells in enumerate(comparisons.values()):
            own = {spec.configuration for spec in cells}
            known = sorted(
                (t for t in self.recorded.values() if t.spec.configuration in own), key=lambda t: t.started_at
            )
            share = rule.share_of_budget(len(comparisons) - number)
            compared = Rounds(self.runner, cells, share, known).run()
            rule = rule.after(compared.seconds)
            for trial in compared.trials:
                by_cell.setdefault(trial.spec.configuration, []).append(trial)
        for trial in self.runner.run(lacking):
            by_cell.setdefault(trial.spec.configuration, []).append(trial)
        return [trial for spec in self.plan.specs for trial in by_cell.get(spec.configuration, [])]


def run(  # noqa: PLR0913  the command line's options, all by keyword
    workload: str | Sequence[str] | None = None,
    *,
    precision: str | Sequence[str] | None = None,
    batch_size: int | Sequence[int] | None = None,
    loss_scale: str | float | Sequence[str | float] | None = None,
    device: str | None = None,
    data_set: str | None = None,
    data: str | os.PathLike[str] | None = None,
    results: str | os.PathLike[str] | None = None,
    seconds: float | None = None,
    timeout_seconds: float | None = None,
    seed: int = 0,
    retry: bool = False,
    again: bool = False,
    gpus: int | Sequence[int] | None = None,
    parallelism: str | Sequence[str] | None = None,
    techniques: str | Sequence[str] | None = None,
) -> list[Trial]:
    """Measure a workload in every precision and return the records, as `castwise run` does.

    Args:
        workload: One name or several; None takes a short job that suits the machine.
        precision: One name or several; None takes all that the device has.
        batch_size: Samples per step; None takes the workload's own.
        loss_scale: `none`, `dynamic`, `dynamic-apex` or numbers, for the precisions that scale their loss.
        device: "cpu", "cuda" or "cuda:N"; None takes the first GPU, or the CPU where there is none.
        data_set: `synthetic` or the name of a real data set, such as "mnist".
        data: The folder in which real data lies.
        results: The folder for records; None keeps them in memory only, and measures everything.
        seconds: Seconds to time each trial for; None takes the device type's own.
        timeout_seconds: Seconds one phase may take before a trial is given up.
        seed: Seeds weights, data and dropout.
        retry: Measure crashed and timed-out trials again.
        again: Measure everything again, whatever is recorded.
        gpus: Numbers of GPUs, each of which trains on `batch_size` samples; processes, on a CPU. None takes one.
        parallelism: How more than one GPU share a step: "ddp" (None takes it) or "dp".
        techniques: Changes to the loop, those of one trial joined: "channels-last+compile"; several strings are several
            trials. "none" and None are the plain loop.

    Returns:
        A trial for each cell of the axes, in the order workload, batch size, GPUs, parallelism, techniques, precision,
        loss scale.

    Raises:
        UsageError: The request cannot be carried out as it stands.
        StoreError: The results folder cannot be written.
        EngineError: No measuring process could be started.
    """
    scales: tuple[str | float, ...] | None = as_tuple(loss_scale)
    request = Request(
        axes=ParameterGrid(
            workloads=split_names(workload),
            precisions=split_names(precision),
            batch_sizes=as_tuple(batch_size),
            loss_scales=tuple(str(scale) for scale in scales) if scales is not None else None,
            world_sizes=as_tuple(gpus),
            parallelisms=split_names(parallelism),
            techniques=split_names(techniques),
        ),
        device=device,
        data_set=data_set,
        data_dir=None if data is None else Path(data),
        results=None if results is None else Path(results),
        seconds=seconds,
        timeout_seconds=timeout_seconds,
        seed=seed,
        retry=retry,
        again=again,
    )
    return prepare(request).run()


def prepare(request: Request, listener: Listener | None = None, make_engine: EngineFactory | None = None) -> Job:
    """Check a request against the machine, and return the job that answers it.

    Args:
        request: What the user asked for.
        listener: Is told of progress.
        make_engine: Makes the engine from the data folder and castwise's commit; real processes by default.

    Raises:
        UsageError: The request cannot be carried out as it stands.
        StoreError: The results folder cannot be written.
        EngineError: No measuring process could be started.
    """
    _check_names(request)
    store = Store(request.results) if request.results is not None else None
    machine = detect_machine(request.device, request.data_dir, make_engine, _zoo_models(request))
    own = inspect_user_model(machine, _own_models(request))
    specs, notes = _plan_for(request, machine, own)
    specs = _supported(specs, machine.environment, explicit=request.axes.precisions is not None)
    policy = ResumePolicy(request.retry, request.again, notes, _rule(request.rule, machine.device))
    return replace(build_job(machine, store, specs, policy, listener), own=own)


@dataclass(frozen=True)
class ResumePolicy:
    """How a job goes on from what is recorded.

    Attributes:
        retry: Measure crashed and timed-out trials again.
        again: Measure everything again.
        notes: What the user should know before it starts.
        rule: When a comparison's rounds end; None measures each cell once, by itself.
        weights: The folder in which trained models' weights are kept; None keeps none.
    """

    retry: bool = False
    again: bool = False
    notes: tuple[str, ...] = ()
    rule: StopRule | None = None
    weights: Path | None = None

    @property
    def note(self) -> str | None:
        """Return the notes in a line; None where there are none."""
        return " ".join(self.notes) or None


def build_job(
    machine: Machine,
    store: Store | None,
    specs: Sequence[TrialSpec],
    policy: ResumePolicy,
    listener: Listener | None = None,
) -> Job:
    """Return the job that measures those specs that no record answers yet."""
    environment = machine.environment
    known, problems = store.load(environment) if store is not None else ({}, [])
    recorded = load_cached(specs, known, policy)
    if policy.again and store is not None:
        for spec in specs:
            store.checkpoint(spec, environment).unlink(missing_ok=True)
    return Job(
        plan=Plan(specs=tuple(specs)),
        missing=tuple(spec for spec in specs if spec.key not in recorded),
        recorded=recorded,
        problems=tuple(problems),
        notes=policy.notes,
        runner=TrialRunner(
            machine.engine, store, environment, listener or NullListener(), policy.note, weights=policy.weights
        ),
        rule=policy.rule,
    )


def load_cached(specs: Sequence[TrialSpec], known: Mapping[str, Trial], policy: ResumePolicy) -> dict[str, Trial]:
    """Return the recorded trials that need not be measured again, by the key of their spec."""
    if policy.again:
        return {}
    asked = {spec.configuration: spec for spec in specs}
    found: dict[str, Trial] = {}
    for key, trial in known.items():
        spec = asked.get(trial.spec.configuration)
        if spec is not None and matches_configuration(trial, spec):
            limit = spec.protocol.timeout_seconds
            found |= {key: trial} if is_reusable(trial, limit, retry=policy.retry) else {}
    return found


def _check_names(request: Request) -> None:
    """Refuse unknown names before any process is started."""
    for axis in fields(request.axes):
        if getattr(request.axes, axis.name) == ():
            words = axis.name.replace("_", " ")
            raise UsageError(f"The list of {words} is empty. Name at least one, or leave it out.")
    if request.data_set not in (None, SYNTHETIC):
        find_data_set(str(request.data_set))
    for name, value in (("time", request.seconds), ("time limit", request.timeout_seconds)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UsageError(f"A {name} of {value:g} seconds is impossible. Give a number above 0.")
    if not 0 <= request.seed < _SEED_LIMIT:
        raise UsageError(f"A seed is a whole number from 0 to 2^63 - 1; {request.seed} is none.")
    check_device_name(request.device)
    for reference in _own_models(request):
        locate(reference)
    axes = replace(request.axes, workloads=request.axes.workloads or (_BARE_CPU[0],))
    build_plan(axes, device="cpu", data_set=request.data_set or SYNTHETIC)


def _zoo_models(request: Request) -> tuple[str, ...]:
    names = [name for name in request.axes.workloads or () if ":" in name]
    return tuple(name for name in names if find_workload(name).family != "own")


def _own_models(request: Request) -> tuple[str, ...]:
    return tuple(name for name in request.axes.workloads or () if find_workload(name).family == "own")


def _plan_for(
    request: Request, machine: Machine, own: Mapping[str, UserWorkload]
) -> tuple[tuple[TrialSpec, ...], tuple[str, ...]]:
    is_cpu = machine.device == "cpu"
    axes = request.axes
    data_set, notes = request.data_set or SYNTHETIC, list[str]()
    if axes.workloads is None:
        workload, precisions = _BARE_CPU if is_cpu else _BARE_CUDA
        axes = replace(axes, workloads=(workload,), precisions=axes.precisions or precisions)
        if request.data_set is None and MNIST.name in find_workload(workload).data_sets:
            data_set, note = _mnist_or_synthetic(machine.engine, machine.data_dir)
            notes += [note] if note else []
    protocol = _protocol(request, is_cpu)
    if request.short and is_cpu and axes.precisions is None:
        axes = replace(axes, precisions=_BARE_CPU[1])
    plan = build_plan(axes, device=machine.device, data_set=data_set, protocol=protocol, seed=request.seed, own=own)
    if data_set != SYNTHETIC:
        provide(machine.engine, find_data_set(data_set), machine.data_dir)
    return plan.specs, tuple(notes)


def _protocol(request: Request, is_cpu: bool) -> MeasurementProtocol:
    protocol = (
        CPU_SHORT if is_cpu and request.short and not request.rule else _PROTOCOLS[is_cpu, request.rule is not None]
    )
    update: dict[str, float] = {}
    if request.seconds is not None:
        update = {"max_seconds": request.seconds, "block_seconds": request.seconds / protocol.num_blocks}
    if request.timeout_seconds is not None:
        update["timeout_seconds"] = request.timeout_seconds
    return protocol.model_copy(update=update)


def _rule(rule: StopRule | None, device: str) -> StopRule | None:
    if rule is None or device != "cpu" or rule.budget_seconds is not None or rule.are_rounds_named:
        return rule
    return replace(rule, budget_seconds=_CPU_BUDGET_SECONDS)


def _mnist_or_synthetic(engine: Engine, data_dir: Path) -> tuple[str, str | None]:
    try:
        provide(engine, MNIST, data_dir)
        return MNIST.name, None
    except MissingDataError:
        place = str(data_dir).replace(str(Path.home()), "~", 1)  # it stands in records, which are shared
        why = f"MNIST is not in '{place}' and could not be downloaded; --data DIR names its folder"
    return SYNTHETIC, f"Synthetic images stand in for MNIST's: {why}."


def _supported(specs: Sequence[TrialSpec], environment: Environment, *, explicit: bool) -> tuple[TrialSpec, ...]:
    """Return the specs the device can run; refuse the job where the user named a precision it cannot."""
    kept: list[TrialSpec] = []
    for spec in specs:
        reason = why_unsupported(find_precision(spec.precision), environment.hardware)
        if reason and explicit:
            raise UsageError(f"{reason}. Leave it out, or leave --precision out to measure what the device has.")
        if not reason:
            kept.append(spec)
    return tuple(kept)
