"""The search for verdicts: seed by seed, until each precision has one, or the budget ends."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from castwise.accuracy.options import AccuracyOptions
from castwise.accuracy.result import AccuracyResult, Runs, runs_of
from castwise.analysis.equivalence import looks_of
from castwise.errors import UsageError
from castwise.orchestrator.job import Job, build_job
from castwise.orchestrator.machine import FindMachine, check_device_name, detect_machine, inspect_user_model, provide
from castwise.orchestrator.processes import import_once
from castwise.orchestrator.runner import CachedMeasure, Listener, unsupported_reason
from castwise.records.schema import Environment, Trial
from castwise.records.store import ResumePolicy, Store
from castwise.registry.datasets import find_data_set
from castwise.registry.precisions import BASELINE, find_precision, is_same_as_fp32, why_unsupported
from castwise.registry.suites import RunGrid, Suite, find_recipe
from castwise.registry.technique_fit import resolve
from castwise.registry.techniques import (
    NONE,
    SETS,
    join,
    loops_with_states,
    narrowing,
    parse_techniques,
    precision_name,
)
from castwise.registry.workloads import find_workload
from castwise.show.units import format_duration
from castwise.spec.loss_scale import parse_loss_scale
from castwise.spec.options import check_budget
from castwise.spec.recipe import Recipe
from castwise.spec.trial import TrialSpec
from castwise.spec.user_model import UserWorkload, locate, slow_imports

_PRECISIONS = (BASELINE, "tf32", "fp16-mixed", "bf16-mixed")  # if none is named
_FEWEST_SEEDS = 2
# After so many seconds and reports the pace of steps tells what a run takes: the first few may compile the optimizer's
# update, some seconds for each shape. Source: chosen here.
_PACE_SECONDS, _PACE_REPORTS = 10.0, 8


@dataclass(frozen=True)
class AccuracyJob:
    specs: tuple[TrialSpec, ...]  # with seed 0; the baseline first
    options: AccuracyOptions
    began: float  # `time.perf_counter()` when the command began
    job: Job = field(repr=False)

    def run(self) -> AccuracyResult:
        """Train pairs of runs until each has its verdict, or the budget ends; UsageError if that is too short."""
        watched = _WatchedRun(self.job.runner.listener, self._check_pace)
        measure = CachedMeasure(replace(self.job.runner, listener=watched))
        trials: list[Trial] = []
        open_specs = list(self.specs)
        budget_ended = False
        for seed in range(self.options.seeds):
            started = time.perf_counter()
            # In turns, so that none always trains on a GPU that the one before it has warmed.
            for spec in open_specs if seed % 2 == 0 else reversed(open_specs):
                trial = measure(spec.model_copy(update={"seed": seed}))
                trials.append(trial)
                if not seed:
                    self._check_budget(trials, measure.known)
            found = self._runs(trials)
            failed = [each.spec.key for each in found if each.failed is not None]
            if found[0].spec.key in failed or (found[0].mean is None and seed + 1 >= _FEWEST_SEEDS):
                break  # there is nothing to compare with
            if seed + 1 in looks_of(found[0].num_seeds):
                failed += [each.spec.key for each in found if each.verdict is not None and each.verdict.is_decided]
            open_specs = [spec for spec in open_specs if spec.key not in failed]
            if len(open_specs) < 2:  # the baseline alone
                break
            if seed + 1 < self.options.seeds and time.perf_counter() - started > self._seconds_left():
                budget_ended = True
                break
        num_recorded = sum(trial.spec.key in measure.known for trial in trials)
        seconds = time.perf_counter() - self.began
        return AccuracyResult(self._runs(trials), seconds, num_recorded, budget_ended)

    def _runs(self, trials: list[Trial]) -> tuple[Runs, ...]:
        return runs_of(trials, self.specs[0].precision, self.options.margin, self.options.seeds)

    def _seconds_left(self) -> float:
        budget = math.inf if self.options.budget_seconds is None else self.options.budget_seconds
        return budget - (time.perf_counter() - self.began)

    def _check_pace(self, spec: TrialSpec, run_seconds: float, left_seconds: float) -> None:
        """Raise UsageError if not even two runs of a precision fit, by the pace of its first."""
        if spec.seed or left_seconds + (_FEWEST_SEEDS - 1) * run_seconds <= self._seconds_left():
            return
        raise UsageError(
            f"A budget of {format_duration(self.options.budget_seconds or 0.0)} is too short: one run of "
            f"{precision_name(spec)} takes about {format_duration(run_seconds)}, and each of {len(self.specs)} "
            "precisions needs at least two. Give a longer --budget, or shorter runs by --epochs and --max-steps."
        )

    def _check_budget(self, trials: Sequence[Trial], known: Collection[str]) -> None:
        """Raise UsageError if two runs of each precision do not fit, as long as those that were trained."""
        seconds = {precision_name(trial.spec): trial.duration_seconds for trial in trials}
        mean = statistics.fmean(seconds.values())
        done = {*known, *(trial.spec.key for trial in trials)}
        pairs = [spec.model_copy(update={"seed": seed}) for spec in self.specs for seed in range(_FEWEST_SEEDS)]
        left = self._seconds_left()
        needed = sum(seconds.get(precision_name(spec), mean) for spec in pairs if spec.key not in done)
        if needed > left:
            whole = self.options.budget_seconds or 0.0
            raise UsageError(
                f"A budget of {whole:.0f} s is too short: two runs of each of {len(self.specs)} precisions take about "
                f"{whole - left + needed:.0f} s in all. What was trained is on record."
            )


class _WatchedRun:
    """Passes progress on, and the pace of a run to a check: what a whole run takes, and what is left of this one."""

    def __init__(self, listener: Listener, check: Callable[[TrialSpec, float, float], None]) -> None:
        self._listener, self._check = listener, check
        self._spec: TrialSpec | None = None
        self._seen: list[tuple[float, float]] = []  # when which share of the run was done
        self.ended, self.remark = listener.ended, listener.remark

    def started(self, spec: TrialSpec, index: int, count: int) -> None:
        self._spec, self._seen = spec, []
        self._listener.started(spec, index, count)

    def phase(self, name: str, done: float) -> None:
        self._listener.phase(name, done)
        if self._spec is None or not name.startswith("epoch "):
            return
        self._seen.append((monotonic(), done))
        # The first report comes before the first step, which may search for kernels or compile them.
        steps = itertools.pairwise(self._seen[1:])
        paces = [(now - began) / (after - before) for (began, before), (now, after) in steps if after > before]
        if len(paces) >= _PACE_REPORTS and self._seen[-1][0] - self._seen[1][0] >= _PACE_SECONDS:
            run_seconds = statistics.median(paces)
            self._check(self._spec, run_seconds, run_seconds * (1 - done))


def prepare_accuracy(
    options: AccuracyOptions, listener: Listener | None = None, find_machine: FindMachine = detect_machine
) -> AccuracyJob:
    """Check a request against the machine and get its data, and return the search that answers it."""
    began = time.perf_counter()
    _check(options)
    is_own = find_workload(options.workload).family == "own"
    if is_own and (options.suite or options.data_set):
        named = "--suite" if options.suite else "--data-set"
        raise UsageError(f"{named} is for workloads of castwise: '{options.workload}' trains on its own training_set.")
    recipe = None if is_own else find_recipe(options.workload, options.data_set, options.suite)
    own = locate(options.workload) if is_own else None
    import_once(slow_imports([options.workload] if is_own else []))
    machine = find_machine(options.device, options.data_dir, ())
    user_workload = None if own is None else inspect_user_model(machine, own, options.timeout_seconds)
    if user_workload is not None and not user_workload.can_be_judged:
        raise UsageError(
            f"'{options.workload}' does not return both training_set and validate, and without them there is no "
            "accuracy. training_set is a DataLoader; validate(model) returns the score."
        )
    trained = recipe if user_workload is None else user_workload
    loops = _loops(options, _precisions(options, machine.environment))
    specs = tuple(_spec(options, trained, *each, machine.device) for each in loops)
    for spec in specs:
        reason = unsupported_reason(spec, machine.environment)
        if reason is not None:
            raise UsageError(f"{spec.label}: {reason}.")
    if (took := time.perf_counter() - began) > (options.budget_seconds or math.inf):
        raise UsageError(f"A budget of {options.budget_seconds:g} s is too short: getting ready took {took:.0f} s.")
    if recipe is not None:
        provide(machine.engine, find_data_set(recipe[1].data_set), machine.data_dir)
    store = Store(options.results) if options.results is not None else None
    job = build_job(machine, store, specs, ResumePolicy(options.retry, options.again), listener)
    if user_workload is not None:
        job = replace(job, user_workloads={options.workload: user_workload})
    return AccuracyJob(specs, options, began, job)


def _check(options: AccuracyOptions) -> None:
    if options.seeds < _FEWEST_SEEDS:
        raise UsageError(f"{options.seeds} seed tells nothing about the spread between seeds: name at least 2.")
    names = {find_precision(name).name for name in options.precisions or (BASELINE, "tf32")}
    if len(names) < 2 and not set(loops_with_states([NONE], options.optimizer_states or ())) - {NONE}:
        raise UsageError("Name at least two precisions: the first is the baseline, unless fp32 is among them.")
    if len(options.techniques or (NONE,)) > 1:
        raise UsageError("--techniques is one loop here: join techniques by '+'. Give one command for each loop.")
    if options.loss_scale is not None:
        parse_loss_scale(options.loss_scale)  # also if no precision has one
    check_device_name(options.device)
    check_budget(options.budget_seconds)


def _precisions(options: AccuracyOptions, environment: Environment) -> list[str]:
    """Return the precisions to train in, the baseline first."""
    names = [find_precision(name).name for name in options.precisions or _PRECISIONS]
    kept = []
    for name in dict.fromkeys(names):
        row = find_precision(name)
        reason = why_unsupported(row, environment.hardware)
        if reason and options.precisions:
            raise UsageError(f"{reason}. Leave it out.")
        if not reason and (options.precisions or not is_same_as_fp32(row, environment.hardware)):
            kept.append(name)
    return sorted(kept, key=lambda name: name != BASELINE)  # stable: the first named without fp32


def _loops(options: AccuracyOptions, precisions: Sequence[str]) -> list[tuple[str, str]]:
    """Return each precision with each loop, the baseline first: the first one, with nothing in fewer bits besides."""
    (loop,), states = options.techniques or (NONE,), options.optimizer_states or ("fp32",)
    plain = join([name for name in parse_techniques(loop) if not narrowing([name])])
    first, *others = precisions
    found = [(first, each) for each in (plain, *loops_with_states([plain], states))]
    found += [(name, each) for name in others for each in loops_with_states([loop], states)]
    return list(dict.fromkeys(found))


def _spec(
    options: AccuracyOptions,
    trained: tuple[Suite, RunGrid] | UserWorkload | None,
    precision: str,
    loop: str,
    device: str,
) -> TrialSpec:
    name = find_workload(options.workload).name
    changes: dict[str, Any] = {}
    sets = SETS
    if isinstance(trained, UserWorkload):
        recipe, batch_size = Recipe(epochs=options.epochs or 1), trained.batch_size or trained.accumulate
        changes["user_model"] = trained.model
    else:
        assert trained is not None
        suite, grid = trained
        recipe, batch_size = suite.recipes[grid.recipe], grid.batch_sizes[0]
        if options.epochs is not None and options.epochs < recipe.epochs:
            recipe = recipe.model_copy(update={"stop_after": options.epochs})
        changes["data_set"] = grid.data_set
        sets = suite.technique_sets(name)
    scale = find_precision(precision).loss_scale
    if options.loss_scale is not None and scale != "none":
        scale = parse_loss_scale(options.loss_scale)
    of_recipe = {"validate_each_epoch": True, "max_steps": options.max_steps or recipe.max_steps}
    spec = TrialSpec(
        workload=name,
        precision=precision,
        loss_scale=scale,
        batch_size=batch_size,
        device=device,
        kind="training",
        recipe=recipe.model_copy(update=of_recipe),
        **changes,
    )
    if options.timeout_seconds is not None:
        spec = spec.with_protocol(timeout_seconds=options.timeout_seconds)
    return resolve(parse_techniques(loop), spec, sets)
