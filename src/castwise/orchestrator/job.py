"""One job from request to records: find the device, make the plan, measure what is missing."""

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from castwise.analysis.steady_metrics import warm_step_seconds
from castwise.errors import MissingDataError, UsageError
from castwise.orchestrator.machine import (
    FindMachine,
    Machine,
    check_device_name,
    detect_machine,
    inspect_user_model,
    may_have_gpu,
    provide,
)
from castwise.orchestrator.processes import import_once
from castwise.orchestrator.rounds import Rounds, StopRule
from castwise.orchestrator.runner import Listener, NullListener, TrialRunner, unsupported_reason
from castwise.orchestrator.session import BackgroundCloser, Session, TrialFailedError
from castwise.records.schema import Environment, Trial
from castwise.records.store import Problem, ResumePolicy, Store, reusable_trials
from castwise.registry.datasets import MNIST, find_data_set
from castwise.registry.precisions import (
    AS_WRITTEN,
    BASELINE,
    OF_SCRIPTS,
    PRECISIONS,
    REFERENCE_WORDS,
    USUAL_OF_SCRIPTS,
    find_precision,
    is_same_as_fp32,
    this_cpu,
    why_emulated,
    why_unsupported,
)
from castwise.registry.techniques import SETS, TECHNIQUES, compiles, parse_techniques
from castwise.registry.workloads import find_workload
from castwise.spec.grouping import grouped
from castwise.spec.options import (
    OF_MACHINE,
    RunOptions,
    ScriptOptions,
    WhyOptions,
    options_of,
    parse_options,
    steps_of,
)
from castwise.spec.plan import Axes, parse_grid
from castwise.spec.plan_file import PlanFile, planned_options
from castwise.spec.trial import CPU_ROUND, CPU_SHORT, CUDA_ROUND, MeasurementProtocol, TrialSpec
from castwise.spec.types import SYNTHETIC
from castwise.spec.user_model import UserModel, UserWorkload, is_script, locate, slow_imports, with_ranks

# What `castwise run` measures without a workload: short, and interesting on the machine.
_BARE_CPU = ("mnist-cnn", ("fp32", "bf16-mixed", "fp16-mixed", "bf16-true"))
_BARE_CUDA = ("resnet50", None)

# A CPU's steps take long, and vary too much for any number of rounds to help. It holds unless the user gives a number.
CPU_BUDGET_SECONDS = 75.0

# A step of the baseline takes this share of a budget at most, if no batch size is named: then precisions that are
# emulated, whose steps may take ten times as long, are warmed up and timed in time, too. Source: chosen here.
_STEP_SHARE = 1 / 200
# How often the usual batch is halved for it at most. The last one's step is timed. It predicts longer steps of larger
# batches than they take, and on a busy CPU still smaller batches are hardly faster.
_MOST_HALVINGS = 4
_PROBE = {"warm_up_steps": 3, "warm_up_seconds": 0.3}

# The share of a budget that is for a script's first steps, and for rounds, however long imports took: without any time
# nothing can be compared.
_LEAST_OF_BUDGET = 0.5
_LEAST_AFTER_LOOK = 0.05  # of a script that has taken its first steps

# What `castwise why` explains without other wishes, and how many steps of each it profiles.
_EXPLAINED = ("default", "fp32", "tf32", "fp16-mixed", "bf16-mixed")
# Each row costs a script's set-up and a profile: two say what limits it, and what would in 16 bits.
_EXPLAINED_OF_SCRIPTS = (AS_WRITTEN, "bf16-mixed")
_PROFILE_STEPS = 3
# How long each takes on a GPU, in words: 80 % of 109 profiled trials of castwise's loop and of 60 of scripts in
# benchmarks/records (H100 and H200, torch 2.11) took 3.9 to 17.8 s, and 2.6 to 11.3 s.
_PROFILE_TAKES = "on an H100 each takes 3 to 18 s in most cases"

_COMPILER = "castwise.trial.preload_compiler"
_SEED_LIMIT = 2**63  # of torch.manual_seed


@dataclass(frozen=True)
class Job:
    specs: tuple[TrialSpec, ...]
    recorded: dict[str, Trial]  # not measured again, by spec key, those of further rounds included
    problems: tuple[Problem, ...]  # files in the machine's results folder that are not records
    runner: TrialRunner = field(repr=False)
    notes: tuple[str, ...] = ()  # what the user should know before it starts, a sentence each
    rule: StopRule | None = None  # when a comparison's rounds end; None measures each configuration once, alone
    user_workloads: Mapping[str, UserWorkload] = field(default_factory=dict)  # by the models' names in the request

    @property
    def missing(self) -> tuple[TrialSpec, ...]:
        """Return the specs without a usable record; with a rule, the others may need another round."""
        return tuple(spec for spec in self.specs if spec.key not in self.recorded)

    @property
    def job(self) -> "Job":
        """Return the job itself: it is a search whose trials are known before it begins."""
        return self

    def run(self) -> list[Trial]:
        """Measure what is missing and return all trials, by configuration in the plan's order."""
        try:
            if self.rule is not None:
                return self._run_rounds(self.rule)
            fresh = {trial.spec.key: trial for trial in self.runner.run(self.missing)}
            return [fresh.get(spec.key) or self.recorded[spec.key] for spec in self.specs]
        finally:
            _close(self.runner.begun)

    def _run_rounds(self, rule: StopRule) -> list[Trial]:
        unsupported = [spec for spec in self.specs if unsupported_reason(spec, self.runner.environment)]
        comparisons = grouped((spec for spec in self.specs if spec not in unsupported), lambda spec: spec.comparison)
        trials: list[Trial] = []
        budget, session_seconds = rule.budget_seconds, 0.0
        for number, specs in enumerate(comparisons.values()):
            configurations = {spec.configuration for spec in specs}
            recorded = [trial for trial in self.recorded.values() if trial.spec.configuration in configurations]
            recorded.sort(key=lambda trial: trial.started_at)
            if budget is not None:  # what is left of it is for the comparisons that are left
                rule = replace(rule, budget_seconds=budget / (len(comparisons) - number))
            started = time.perf_counter()
            if specs[0].protocol.profile_steps:  # another process of each configuration without a profile
                known = {trial.spec.configuration for trial in recorded if _answers(trial, specs[0].protocol)}
                lacking = [spec for spec in specs if self.runner.traces or spec.configuration not in known]
                trials += Rounds(self.runner, lacking, rule, recorded).run_once() if lacking else recorded
                continue
            rounds = Rounds(self.runner, specs, rule, recorded, session_seconds=session_seconds)
            trials += rounds.run()
            session_seconds = rounds.session_seconds
            budget = None if budget is None else budget - (time.perf_counter() - started)
        trials += self.runner.run(unsupported)
        position = {spec.configuration: index for index, spec in enumerate(self.specs)}
        return sorted(trials, key=lambda trial: position[trial.spec.configuration])


def outlook(options: RunOptions) -> str:
    """Return what is measured on a CPU, for how long, and what cannot gain: known before PyTorch is imported.

    Empty if there may be a GPU.
    """
    if may_have_gpu(options.device):
        return ""
    usual = tuple(row.name for row in PRECISIONS) if options.workloads else _BARE_CPU[1]
    usual = USUAL_OF_SCRIPTS if any(map(is_script, options.workloads or ())) else usual
    cpu, rows = this_cpu(), [find_precision(name) for name in options.precisions or usual]
    rows = [row for row in rows if why_unsupported(row, cpu) is None and not is_same_as_fp32(row, cpu)]
    names = ", ".join(REFERENCE_WORDS[AS_WRITTEN] if row.name == AS_WRITTEN else row.name for row in rows)
    emulated = ", ".join(row.name for row in rows if why_emulated(row, cpu) is not None)
    is_open = options.budget_seconds is None and options.rounds is None
    limit = f" for {CPU_BUDGET_SECONDS:g} s (--budget changes it)" if is_open else ""
    no_gain = f" The CPU emulates {emulated}: expect no gain there." if emulated else ""
    return f"Will measure {names} on {cpu.name}{limit}.{no_gain}"


def profile_outlook(options: WhyOptions) -> str:
    """Return what is profiled, and how long that takes: known before PyTorch is imported."""
    usual = _EXPLAINED_OF_SCRIPTS if any(map(is_script, options.workloads or ())) else _EXPLAINED
    names = options.precisions or usual
    said = ", ".join(REFERENCE_WORDS[AS_WRITTEN] if name == AS_WRITTEN else name for name in names)
    return (
        outlook(steps_of(options, budget_seconds=options.budget_seconds, precisions=names))
        or f"Will profile {said}: {_PROFILE_TAKES}."
    )


def prepare(  # noqa: PLR0913  what a job depends on, by keyword
    options: RunOptions,
    listener: Listener | None = None,
    find_machine: FindMachine = detect_machine,
    *,
    rule: StopRule | None = None,
    short: bool = False,
    profiles: Mapping[str, Any] | None = None,
    is_planned: bool = False,
    is_search: bool = False,
) -> Job:
    """Check what a user asked for against the machine, and return the job that answers it.

    Args:
        options: What the user asked for.
        listener: Receives progress.
        find_machine: Returns the machine that the job runs on.
        rule: When the comparison's rounds end; None takes what the options say.
        short: Somebody waits at a prompt: on a CPU, whose steps take long, a second a trial and few precisions.
        profiles: What the protocol says of the steps that are profiled, after the timed ones, in one process of each
            configuration; None profiles none.
        is_planned: The batch sizes are those of a plan: no smaller ones are taken because steps are slow.
        is_search: Loops that are compiled will be tried, too.

    Raises:
        UsageError: The request cannot be carried out as it stands.
        StoreError: The results folder cannot be written.
        EngineError: No measuring process could be started.
    """
    began = time.perf_counter()
    rule = rule or StopRule.of(options)
    phase = (listener or NullListener()).phase
    own_models, zoo_models = _own_and_zoo_models(options)
    script = next(filter(is_script, own_models), None)
    names_precisions = options.precisions is not None
    if script is not None:
        options = _for_script(options, script, _EXPLAINED_OF_SCRIPTS if profiles else USUAL_OF_SCRIPTS)
        own_models = list(options.workloads or ())
    check_request(options)
    store = Store(options.results) if options.results is not None else None
    import_once([*slow_imports([*own_models, *zoo_models]), *_compiler_of(options, is_search=is_search)])
    phase("starting PyTorch, which takes longest the first time", 0.0)
    machine = find_machine(options.device, options.data_dir, zoo_models)
    phase("looking for data", 0.0)
    options, data_note = _for_machine(options, machine, short=short, explains=bool(profiles) and script is None)

    limit = options.timeout_seconds
    if script is not None and (budget := options.budget_seconds or rule.budget_seconds) is not None:
        limit = min(limit or math.inf, _left_of(budget, began))
    begun: list[Session] = []
    with ExitStack() as undo:
        undo.callback(_close, begun)
        phase("looking at your code", 0.0)
        user_workloads = _inspect(options, own_models, machine, limit, listener, begun)
        notes = [*filter(None, [data_note])]
        if script is not None and not is_planned:
            options = _without_repeats(options, user_workloads[own_models[0]], notes)
        protocol = _protocol(options, machine.device, short=short, profiles=profiles)
        specs = _axes(options).specs(machine.device, protocol, options.seed, user_workloads)
        if options.data_set not in (None, SYNTHETIC):
            provide(machine.engine, find_data_set(str(options.data_set)), machine.data_dir)
        specs = _supported(specs, machine.environment, explicit=names_precisions)

        if (budget := _budget_of(options, rule, machine)) is not None:
            if machine.device == "cpu" and options.batch_sizes is None and not is_planned:
                phase("timing a step, for the batch size", 0.0)
                specs = _with_quick_steps(specs, machine, store, _STEP_SHARE * _left_of(budget, began), notes)
            least = _LEAST_OF_BUDGET if script is None else _LEAST_AFTER_LOOK
            rule = replace(rule, budget_seconds=_left_of(budget, began, least))
        job = build_job(machine, store, specs, ResumePolicy(options.retry, options.again), listener)
        runner = replace(job.runner, data_note=data_note, begun=begun)
        undo.pop_all()
    return replace(job, runner=runner, notes=tuple(notes), rule=rule, user_workloads=user_workloads)


def _compiler_of(options: RunOptions, *, is_search: bool) -> list[str]:
    """Return the module that imports torch's compiler, if a loop may be compiled."""
    names = [name for loop in options.techniques or () for name in parse_techniques(loop)]
    return [_COMPILER] if is_search or any(name in SETS or compiles([name]) for name in names) else []


def _own_and_zoo_models(options: RunOptions) -> tuple[list[str], list[str]]:
    names = dict.fromkeys(options.workloads or ())
    own_models = [name for name in names if find_workload(name).family == "own"]
    return own_models, [name for name in names if ":" in name and name not in own_models]


def _protocol(
    options: RunOptions, device: str, *, short: bool = False, profiles: Mapping[str, Any] | None = None
) -> MeasurementProtocol:
    protocol = CUDA_ROUND
    if device == "cpu":
        is_open = options.within is None and options.budget_seconds is None and options.rounds is None
        protocol = CPU_SHORT if short and is_open else CPU_ROUND
    asked: dict[str, Any] = {
        "timeout_seconds": options.timeout_seconds,
        "num_steps": options.num_steps,
        "warm_up_steps": options.warm_up_steps,
        "max_seconds": options.seconds,
        "block_seconds": None if options.seconds is None else options.seconds / protocol.num_blocks,
    }
    update = {name: value for name, value in asked.items() if value is not None}
    return protocol.model_copy(update=update | dict(profiles or {}))


def _budget_of(options: RunOptions, rule: StopRule, machine: Machine) -> float | None:
    """Return the budget that is asked for; on a CPU there is one unless the rounds are, or a search has its own."""
    is_open = options.budget_seconds is None and options.rounds is None and rule.budget_seconds is None
    return CPU_BUDGET_SECONDS if is_open and machine.device == "cpu" else options.budget_seconds


def _left_of(budget: float, began: float, least: float = _LEAST_OF_BUDGET) -> float:
    """Return what is left of a budget: imports and the user's code have taken a part of it."""
    return max(budget - (time.perf_counter() - began), least * budget)


def _inspect(
    options: RunOptions,
    names: Sequence[str],
    machine: Machine,
    limit: float | None,
    listener: Listener | None,
    begun: list[Session],
) -> dict[str, UserWorkload]:
    update = {
        "units_per_step": options.units_per_step,
        "unit": options.step_unit,
        "scratch": "" if options.scratch is None else str(options.scratch.absolute()),
    }
    remark = None if listener is None else listener.remark
    models = {name: locate(name).model_copy(update=update) for name in names}
    return {name: inspect_user_model(machine, model, limit, remark, begun) for name, model in models.items()}


def _close(begun: list[Session]) -> None:
    closer = BackgroundCloser()
    closer.close(begun)
    closer.wait()
    begun.clear()


def _without_repeats(options: RunOptions, script: UserWorkload, notes: list[str]) -> RunOptions:
    """Return the options without the precisions that are the same as the script as it is written."""
    same = [name for name in options.precisions or () if name in script.same_precisions]
    if same:
        verb = "computes" if len(same) == 1 else "compute"
        notes.append(f"{' and '.join(same)} {verb} what your script computes as written. That is measured once.")
    return replace(options, precisions=tuple(name for name in options.precisions or () if name not in same))


def _for_machine(
    options: RunOptions, machine: Machine, *, short: bool, explains: bool
) -> tuple[RunOptions, str | None]:
    """Return the options with what the machine decides if the user does not, and what must be noted of the data.

    Raises:
        UsageError: It has no GPU, and several are asked for.
    """
    most_gpus = max(options.world_sizes or (1,))
    if machine.device == "cpu" and options.device is None and most_gpus > 1:
        raise UsageError(
            f"{most_gpus} GPUs are asked for, and this machine has none. Name --device cpu to share the step among CPU "
            "processes."
        )
    data_note: str | None = None
    if explains and options.precisions is None:
        options = replace(options, precisions=_EXPLAINED)
    if options.workloads is None:
        workload, precisions = _BARE_CPU if machine.device == "cpu" else _BARE_CUDA
        options = replace(options, workloads=(workload,), precisions=options.precisions or precisions)
        if options.data_set is None and MNIST.name in find_workload(workload).data_sets:
            try:
                provide(machine.engine, MNIST, machine.data_dir)
                options = replace(options, data_set=MNIST.name)
            except MissingDataError:
                place = str(machine.data_dir).replace(str(Path.home()), "~", 1)  # it is in records, which are shared
                why = f"MNIST is not in '{place}' and could not be downloaded; --data DIR names its folder"
                data_note = f"Synthetic images stand in for MNIST's: {why}."
                options = replace(options, data_set=SYNTHETIC)
    if short and machine.device == "cpu" and options.precisions is None:
        options = replace(options, precisions=_BARE_CPU[1])
    return options, data_note


def make_plan(options: RunOptions) -> PlanFile:
    """Return the plan of what a user asked for: for any machine, of which nothing is looked at.

    It is for a GPU unless the options name the CPU. A process of this machine reads a user's model.

    Raises:
        UsageError: The request cannot be carried out as it stands, or depends on the machine.
        EngineError: No process could be started for a user's model.
    """
    if options.workloads is None:
        raise UsageError(
            "A plan is for other machines, so it needs a workload: castwise run resnet50 --plan-only FILE."
        )
    device = options.device or "cuda"
    options = replace(options, device=device if device == "cpu" or ":" in device else f"{device}:0")
    user_workloads, specs = planned_specs(options)
    return PlanFile(
        options=planned_options(options),
        models={name: workload.model.redacted for name, workload in user_workloads.items()},
        specs=tuple(spec.redacted for spec in specs),
    )


def planned_specs(
    options: RunOptions, machine: Machine | None = None, *, runs_scripts: bool = True
) -> tuple[dict[str, UserWorkload], tuple[TrialSpec, ...]]:
    """Return what is known of a request's models, read by a process of this machine, and its trials on any machine.

    Unless scripts are to be run for it, nothing is known of them, not even their batch size: it is 1.
    """
    own_models, _ = _own_and_zoo_models(options)
    script = None if runs_scripts else next(filter(is_script, own_models), None)
    if script is not None:
        options = _for_script(options, script, ())
        own_models = list(options.workloads or ())
    check_request(options)
    user_workloads: dict[str, UserWorkload] = {}
    if own_models:
        import_once(slow_imports(own_models))
    if script is not None:
        user_workloads = {name: UserWorkload(model=locate(name), batch_size=1) for name in own_models}
    elif own_models:
        machine = machine or detect_machine("cpu", options.data_dir)
        user_workloads = {n: inspect_user_model(machine, locate(n), options.timeout_seconds) for n in own_models}
    device = options.device or "cuda:0"
    return user_workloads, _axes(options).specs(device, _protocol(options, device), options.seed, user_workloads)


def prepare_shard(
    plan: PlanFile,
    specs: Sequence[TrialSpec],
    options: RunOptions,
    listener: Listener | None = None,
    find_machine: FindMachine = detect_machine,
) -> Job:
    """Return the job that measures some of a plan's trials on this machine, with the options of `OF_MACHINE`.

    Precisions that the device lacks are left out, as `prepare` does, whose errors these are.
    """
    request = parse_options(RunOptions, plan.options)
    request = replace(request, **{name: getattr(options, name) for name in OF_MACHINE})
    job = prepare(request, listener, find_machine, is_planned=True)
    own_models: dict[UserModel, UserModel] = {}
    for name, planned in plan.models.items():
        own = job.user_workloads[name].model
        if own.digest != planned.digest:
            raise UsageError(
                f"The files of '{name}' are not those that the plan was made of (digest {own.digest}, the plan's "
                f"{planned.digest}). Copy them to this machine, or make the plan anew."
            )
        own_models[planned] = own
    wanted = [
        spec if spec.user_model is None else spec.model_copy(update={"user_model": own_models[spec.user_model]})
        for spec in specs
    ]
    here = {spec.configuration: spec for spec in job.specs}
    lacking = [spec for spec in wanted if spec.configuration not in here]
    if others := _supported(lacking, job.runner.environment, explicit=False):
        raise UsageError(
            f"This machine makes other trials of the plan: it has no {others[0].label}. Make the plan anew."
        )
    kept = tuple(here[spec.configuration] for spec in wanted if spec.configuration in here)
    configurations = {spec.configuration for spec in kept}
    return replace(
        job,
        specs=kept,
        recorded={key: t for key, t in job.recorded.items() if t.spec.configuration in configurations},
    )


def prepare_profiles(
    options: WhyOptions, listener: Listener | None = None, find_machine: FindMachine = detect_machine
) -> Job:
    """Return the job that profiles steps of what a user asked for; the arguments and errors are `prepare`'s."""
    request = steps_of(options, budget_seconds=options.budget_seconds)
    rule = StopRule(min_rounds=1, max_rounds=1)
    profiles = {"profile_steps": _PROFILE_STEPS, "numerics": options.numerics}
    found = prepare(request, listener, find_machine, rule=rule, profiles=profiles)
    if options.trace is not None and options.trace.suffix == ".json" and len(found.specs) > 1:
        raise UsageError(
            f"'{options.trace}' has room for one configuration's trace, and there are {len(found.specs)}. Name a "
            "folder, or one precision."
        )
    return replace(found, runner=replace(found.runner, traces=options.trace))


def build_job(
    machine: Machine,
    store: Store | None,
    specs: Sequence[TrialSpec],
    policy: ResumePolicy,
    listener: Listener | None = None,
    weights: Path | None = None,
) -> Job:
    """Return the job that measures the specs without a usable record, and keeps trained models' weights in a folder."""
    environment = machine.environment
    known, problems = store.load(environment) if store is not None else ({}, [])
    return Job(
        specs=tuple(specs),
        recorded=reusable_trials(specs, known, policy),
        problems=tuple(problems),
        runner=TrialRunner(
            machine.engine, store, environment, listener or NullListener(), weights=weights, policy=policy
        ),
    )


def _answers(trial: Trial, protocol: MeasurementProtocol) -> bool:
    """Return whether a trial has the profile, and the numerics, that a protocol asks for, or cannot have them."""
    if trial.status != "ok" or trial.profile is None:
        return trial.status != "ok"
    return trial.profile.numerics is not None or not protocol.numerics


def _for_script(options: RunOptions, script: str, usual: Sequence[str]) -> RunOptions:
    """Return the options with the precisions of a script, the usual ones unless some are named, always its own.

    Raises:
        UsageError: They ask for what a script cannot be given from outside.
    """
    own = {
        "--batch-size": options.batch_sizes,
        "--seq-len": options.lengths,
        "--parallelism": options.parallelisms,
        "--loss-scale": options.loss_scales,
        "--data-set": options.data_set,
        "--seed": options.seed or None,
    }
    for flag, value in own.items():
        if value is not None:
            raise UsageError(f"{flag} is for castwise's own loop, and '{script}' has one itself: leave it out.")
    if options.scratch is not None:
        try:
            options.scratch.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=options.scratch).close()
        except OSError as error:
            raise UsageError(f"No file can be written to '{options.scratch}': {error.strerror}.") from None
    takes = [row.name for row in TECHNIQUES if row.fits_scripts]
    for name in (technique for loop in options.techniques or () for technique in parse_techniques(loop)):
        if name not in (*takes, *SETS):
            raise UsageError(f"A script cannot be given {name} from outside. It takes: {', '.join(takes)}.")
    named = [find_precision(name).name for name in options.precisions or usual]
    for name in named:
        if name not in OF_SCRIPTS:
            raise UsageError(f"A script cannot be given {name} from outside. It takes: {', '.join(OF_SCRIPTS)}.")
    scripts = options.workloads
    if options.world_sizes is not None:
        _axes(options)  # refuses impossible numbers
        if options.units_per_step is not None:
            raise UsageError("--units-per-step counts what one number of GPUs trains on: leave it or --gpus out.")
        scripts = tuple(with_ranks(script, count) for count in options.world_sizes)
    return replace(options, workloads=scripts, world_sizes=None, precisions=tuple(dict.fromkeys([AS_WRITTEN, *named])))


def check_request(options: RunOptions) -> None:
    """Refuse unknown names and impossible numbers before any process is started."""
    user_models, _ = _own_and_zoo_models(options)
    if not any(map(is_script, user_models)):
        if AS_WRITTEN in (options.precisions or ()):
            raise UsageError(f"'{AS_WRITTEN}' is the precision of a script: castwise run -- python train.py")
        given = {option.label: getattr(options, option.name) for option in options_of(ScriptOptions)}
        for flag, value in given.items():
            if value is not None:
                raise UsageError(f"{flag} is for scripts: castwise run -- python train.py")
    if options.data_set not in (None, SYNTHETIC):
        find_data_set(str(options.data_set))
    for name, value in (("time", options.seconds), ("time limit", options.timeout_seconds)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UsageError(f"A {name} of {value:g} seconds is impossible. Give a number above 0.")
    if not 0 <= options.seed < _SEED_LIMIT:
        raise UsageError(f"A seed is a whole number from 0 to 2^63 - 1, not {options.seed}.")
    check_device_name(options.device)
    for name in user_models:
        locate(name)
    _axes(replace(options, workloads=options.workloads or (_BARE_CPU[0],)))


def _axes(options: RunOptions) -> Axes:
    return parse_grid(options, options.data_set or SYNTHETIC, options.nodes_per_trial or 1)


def _with_quick_steps(
    specs: Sequence[TrialSpec], machine: Machine, store: Store | None, most_seconds: float, notes: list[str]
) -> tuple[TrialSpec, ...]:
    """Return the specs with the largest batches whose steps are quick enough; note each that is not the usual.

    What an earlier command took is taken again, so that its records count.
    """
    known = {} if store is None else store.load(machine.environment)[0]
    measured = {trial.spec.configuration for trial in known.values() if trial.status == "ok"}
    batch_of: dict[str, int] = {}
    for spec in sorted(specs, key=lambda spec: spec.precision != BASELINE):
        usual = spec.batch_size
        if spec.workload in batch_of or spec.user_model is not None:
            continue
        sizes = list(dict.fromkeys(max(1, usual >> halvings) for halvings in range(_MOST_HALVINGS + 1)))
        on_record = [size for size in sizes if spec.model_copy(update={"batch_size": size}).configuration in measured]
        taken, why = on_record[0] if on_record else usual, "as on record"
        if not on_record and (sample_seconds := _time_a_sample(spec, sizes[-1], machine)) is not None:
            taken = next((size for size in sizes if size * sample_seconds <= most_seconds), sizes[-1])
            why = f"as a step of {usual} would take about {usual * sample_seconds:.2g} s here"
        batch_of[spec.workload] = taken
        if taken != usual:
            notes.append(f"{spec.workload} is measured with batch {taken}, {why}. --batch-size sets another.")
    return tuple(spec.model_copy(update={"batch_size": batch_of.get(spec.workload, spec.batch_size)}) for spec in specs)


def _time_a_sample(spec: TrialSpec, batch_size: int, machine: Machine) -> float | None:
    """Return about how many seconds of a step a sample takes, from steps of this batch; None if they fail."""
    session = machine.engine.start(spec.protocol.timeout_seconds, spec.num_processes)
    try:
        session.open(spec.device)
        session.set_up(spec.with_protocol(**_PROBE).model_copy(update={"batch_size": batch_size}))
        step_seconds = warm_step_seconds(session.warm_up())
    except TrialFailedError:  # its trial will report why
        return None
    finally:
        BackgroundCloser().close([session])
    return step_seconds and step_seconds / batch_size


def _supported(specs: Sequence[TrialSpec], environment: Environment, *, explicit: bool) -> tuple[TrialSpec, ...]:
    """Return the specs that the device can run; refuse the job if the user named a precision that it cannot."""
    kept: list[TrialSpec] = []
    for spec in specs:
        reason = why_unsupported(find_precision(spec.precision), environment.hardware)
        if reason and explicit:
            raise UsageError(f"{reason}. Leave it out, or leave --precision out to measure what the device has.")
        is_repeat = not explicit and is_same_as_fp32(find_precision(spec.precision), environment.hardware)
        if not reason and not is_repeat:
            kept.append(spec)
    return tuple(kept)
