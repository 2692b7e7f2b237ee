"""One job from request to records: find the device, make the plan, measure what is missing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from castwise.spec.options import RunOptions
from castwise.spec.plan import Plan, build_plan
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

# What `castwise run` measures without a workload: short, and interesting on the machine.
_BARE_CPU = ("mnist-cnn", ("fp32", "bf16-mixed", "fp16-mixed", "bf16-true"))
_BARE_CUDA = ("resnet50", None)

# By whether it is a CPU, and whether there are rounds.
_PROTOCOLS = {
    (False, False): CUDA_PROTOCOL,
    (False, True): CUDA_ROUND,
    (True, False): CPU_PROTOCOL,
    (True, True): CPU_ROUND,
}
# A CPU's steps take long, and vary too much for any number of rounds to help. It holds unless the user gives a number.
_CPU_BUDGET_SECONDS = 75.0

_SEED_LIMIT = 2**63  # of torch.manual_seed


@dataclass(frozen=True)
class Job:
    """A request made concrete on this machine.

    Attributes:
        plan: Every configuration of the job.
        missing: Those without a usable record; with a rule, the others may need another round.
        recorded: The trials that need not be measured again, by spec key, those of further rounds included.
        problems: Files in the machine's results folder that are not records.
        notes: What the user should know before it starts, a sentence each.
        runner: Measures what is missing.
        rule: When a comparison's rounds end; None measures each configuration once, alone.
        own: What is known of the user's models, by their names in the request.
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
        """Measure what is missing and return all trials, by configuration in the plan's order."""
        if self.rule is not None:
            return self._run_rounds(self.rule)
        fresh = {trial.spec.key: trial for trial in self.runner.run(self.missing)}
        return [fresh.get(spec.key) or self.recorded[spec.key] for spec in self.plan.specs]

    def _run_rounds(self, rule: StopRule) -> list[Trial]:
        unsupported = [spec for spec in self.plan.specs if unsupported_reason(spec, self.runner.environment)]
        by_configuration: dict[str, list[Trial]] = {}
        comparisons: dict[str, list[TrialSpec]] = {}
        for spec in self.plan.specs:
            if spec not in unsupported:
                comparisons.setdefault(spec.comparison, []).append(spec)
        for number, specs in enumerate(comparisons.values()):
            configurations = {spec.configuration for spec in specs}
            recorded = [trial for trial in self.recorded.values() if trial.spec.configuration in configurations]
            recorded.sort(key=lambda trial: trial.started_at)
            share = rule.share_of_budget(len(comparisons) - number)
            compared = Rounds(self.runner, specs, share, recorded).run()
            rule = rule.after(compared.seconds)
            for trial in compared.trials:
                by_configuration.setdefault(trial.spec.configuration, []).append(trial)
        for trial in self.runner.run(unsupported):
            by_configuration.setdefault(trial.spec.configuration, []).append(trial)
        return [trial for spec in self.plan.specs for trial in by_configuration.get(spec.configuration, [])]


def prepare(
    options: RunOptions,
    listener: Listener | None = None,
    make_engine: EngineFactory | None = None,
    *,
    rule: StopRule | None = None,
    short: bool = False,
) -> Job:
    """Check what a user asked for against the machine, and return the job that answers it.

    Args:
        options: What the user asked for.
        listener: Receives progress.
        make_engine: Makes the engine from the data folder and castwise's commit; real processes by default.
        rule: When the comparison's rounds end; None takes what the options say.
        short: Somebody waits at a prompt: on a CPU, whose steps take long, a second a trial and few precisions.

    Raises:
        UsageError: The request cannot be carried out as it stands.
        StoreError: The results folder cannot be written.
        EngineError: No measuring process could be started.
    """
    rule = rule or StopRule.of(options)
    _check(options)
    store = Store(options.results) if options.results is not None else None
    own, zoo = _models_to_look_up(options)
    machine = detect_machine(options.device, options.data_dir, make_engine, zoo)
    own_workloads = inspect_user_model(machine, own)
    is_cpu = machine.device == "cpu"
    names_precisions = options.precisions is not None
    notes: tuple[str, ...] = ()
    if options.workloads is None:
        options, notes = _bare_run(options, machine)
    if short and is_cpu and options.precisions is None:
        options = replace(options, precisions=_BARE_CPU[1])
    data_set = options.data_set or SYNTHETIC
    protocol = CPU_SHORT if short and is_cpu and rule is None else _PROTOCOLS[is_cpu, rule is not None]
    plan = build_plan(
        options,
        device=machine.device,
        data_set=data_set,
        protocol=_limited(protocol, options),
        seed=options.seed,
        user_workloads=own_workloads,
    )
    if data_set != SYNTHETIC:
        provide(machine.engine, find_data_set(data_set), machine.data_dir)
    specs = _supported(plan.specs, machine.environment, explicit=names_precisions)
    policy = ResumePolicy(options.retry, options.again, notes, _rule(rule, machine.device))
    return replace(build_job(machine, store, specs, policy, listener), own=own_workloads)


@dataclass(frozen=True)
class ResumePolicy:
    """Which records a job uses, and what its own hold.

    Attributes:
        retry: Measure crashed and timed-out trials again.
        again: Measure everything again.
        notes: What the user should know before it starts.
        rule: When a comparison's rounds end; None measures each configuration once, alone.
        weights: The folder in which trained models' weights are kept; None keeps none.
    """

    retry: bool = False
    again: bool = False
    notes: tuple[str, ...] = ()
    rule: StopRule | None = None
    weights: Path | None = None

    @property
    def note(self) -> str | None:
        """Return the notes in a line; None without any."""
        return " ".join(self.notes) or None


def build_job(
    machine: Machine,
    store: Store | None,
    specs: Sequence[TrialSpec],
    policy: ResumePolicy,
    listener: Listener | None = None,
) -> Job:
    """Return the job that measures the specs without a usable record."""
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


def _check(options: RunOptions) -> None:
    """Refuse unknown names and impossible numbers before any process is started."""
    if options.data_set not in (None, SYNTHETIC):
        find_data_set(str(options.data_set))
    for name, value in (("time", options.seconds), ("time limit", options.timeout_seconds)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UsageError(f"A {name} of {value:g} seconds is impossible. Give a number above 0.")
    if not 0 <= options.seed < _SEED_LIMIT:
        raise UsageError(f"A seed is a whole number from 0 to 2^63 - 1; {options.seed} is none.")
    check_device_name(options.device)
    for reference in _models_to_look_up(options)[0]:
        locate(reference)
    grid = replace(options, workloads=options.workloads or (_BARE_CPU[0],))
    build_plan(grid, device="cpu", data_set=options.data_set or SYNTHETIC)


def _models_to_look_up(options: RunOptions) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the user's own models, and those of zoos, among the workloads."""
    families = {name: find_workload(name).family for name in options.workloads or ()}
    own = tuple(name for name, family in families.items() if family == "own")
    return own, tuple(name for name in families if ":" in name and name not in own)


def _bare_run(options: RunOptions, machine: Machine) -> tuple[RunOptions, tuple[str, ...]]:
    """Return the options with a workload that suits the machine, and what must be noted."""
    workload, precisions = _BARE_CPU if machine.device == "cpu" else _BARE_CUDA
    options = replace(options, workloads=(workload,), precisions=options.precisions or precisions)
    if options.data_set is not None or MNIST.name not in find_workload(workload).data_sets:
        return options, ()
    data_set, note = _mnist_or_synthetic(machine.engine, machine.data_dir)
    return replace(options, data_set=data_set), () if note is None else (note,)


def _limited(protocol: MeasurementProtocol, options: RunOptions) -> MeasurementProtocol:
    """Return the protocol with the time and the time limit that the user set."""
    update: dict[str, float] = {}
    if options.seconds is not None:
        update = {"max_seconds": options.seconds, "block_seconds": options.seconds / protocol.num_blocks}
    if options.timeout_seconds is not None:
        update["timeout_seconds"] = options.timeout_seconds
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
        place = str(data_dir).replace(str(Path.home()), "~", 1)  # it is in records, which are shared
        why = f"MNIST is not in '{place}' and could not be downloaded; --data DIR names its folder"
    return SYNTHETIC, f"Synthetic images stand in for MNIST's: {why}."


def _supported(specs: Sequence[TrialSpec], environment: Environment, *, explicit: bool) -> tuple[TrialSpec, ...]:
    """Return the specs that the device can run; refuse the job if the user named a precision that it cannot."""
    kept: list[TrialSpec] = []
    for spec in specs:
        reason = why_unsupported(find_precision(spec.precision), environment.hardware)
        if reason and explicit:
            raise UsageError(f"{reason}. Leave it out, or leave --precision out to measure what the device has.")
        if not reason:
            kept.append(spec)
    return tuple(kept)
