"""What steady trials and training runs have in common: a task in a precision, as one training step."""

from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import torch
from torch import nn

from castwise.apply.precision import numeric_state
from castwise.apply.techniques.batch_layout import Prepare, preparation
from castwise.apply.techniques.optimizer_options import keep_rates_on_device, optimizer_for
from castwise.errors import TechniqueError
from castwise.records.schema import Facts
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import StepConfig, step_config_of
from castwise.registry.workloads import OptimizerSpec, Workload, find_workload
from castwise.spec.recipe import Recipe
from castwise.spec.trial import TrialSpec
from castwise.spec.types import SYNTHETIC
from castwise.trial.data.sharding import seed_generators, seed_of
from castwise.trial.distributed import Peers, shard, spread
from castwise.trial.flops import make_fake_copy
from castwise.trial.models import build_task
from castwise.trial.models.task import Task
from castwise.trial.step import TrainingStep, describe
from castwise.trial.user_model.load import build_user_model


@dataclass(frozen=True)
class TrialSetup:
    """A spec's task and its training step, on the device; `prepare`, if any, is applied to every batch there."""

    task: Task
    step: TrainingStep
    facts: Facts
    prepare: Prepare | None


def build_trial(spec: TrialSpec, stack: ExitStack, peers: Peers, data_dir: Path | None = None) -> TrialSetup:
    """Set the numeric state, which `stack` restores, and build the spec's model and optimizer in it.

    `data_dir` is for a steady trial on real data; a training run reads its data itself.
    """
    row, precision, device = find_workload(spec.workload), find_precision(spec.precision), torch.device(spec.device)
    loop, recipe = step_config_of(spec.techniques), spec.recipe
    seed_generators(spec.seed)
    # The user's code runs first: the trial then decides about what that code sets globally.
    task = None if spec.user_model is None else build_user_model(spec.user_model)
    stack.enter_context(numeric_state(precision, loop))
    if task is None:
        if not loop.cudnn_search:  # the user's own setting is kept
            torch.backends.cudnn.benchmark = recipe is not None and recipe.cudnn_benchmark
        task = _build_workload(spec, row, data_dir)
    _apply_techniques(task, loop)
    optimizer = optimizer_for(loop, _chosen_optimizer(row, recipe), device)
    step = TrainingStep(
        task,
        precision,
        optimizer,
        loss_scale=spec.loss_scale,
        clip_grad_norm=row.clip_grad_norm if task.user_loop is None else task.user_loop.clip_grad_norm,
        device=device,
        loop=loop,
        shard=partial(_shard, task, peers, loop.keeps_whole_weights) if spec.parallelism == "fsdp" else None,
    )
    if loop.reads_rates_on_device and recipe is not None and recipe.schedule.kind != "constant":
        keep_rates_on_device(step.optimizer, device)
    stack.callback(step.close)
    if loop.coalesced_reduce:
        step.average_gradients(peers)
    else:
        step.spread(lambda model: spread(model, spec))
    if peers.rank > 0:
        torch.manual_seed(seed_of(spec.seed, rank=peers.rank))  # ranks have the same weights and different dropout
    return TrialSetup(task, step, describe(step, task, optimizer), preparation(loop))


def _build_workload(spec: TrialSpec, row: Workload, data_dir: Path | None) -> Task:
    """Build the task of one of castwise's workloads, with pretrained weights if the spec names some."""
    # A transformer's weights are drawn on the device: for a billion of them a CPU takes 10 s or more. Those that are to
    # be sharded may not fit there.
    draws_there = row.family == "transformer" and spec.parallelism != "fsdp"
    with torch.device(spec.device) if draws_there else nullcontext():
        task = build_task(row, data_set=SYNTHETIC if spec.recipe is not None else spec.data_set, data_dir=data_dir)
    if spec.weights is not None and task.load_weights is not None:
        task.load_weights(Path(spec.weights))  # in float32: the precision is applied to them
    return task


def _apply_techniques(task: Task, loop: StepConfig) -> None:
    for change in loop.model_changes:
        resolve_name(change.function)(task.model, *change.arguments)
    if loop.loss_options:
        if task.loss_with is None:
            raise TechniqueError("chunked-loss is for language models, and this is none.")
        task.compute_loss = partial(task.loss_with, **dict(loop.loss_options))


def _chosen_optimizer(row: Workload, recipe: Recipe | None) -> OptimizerSpec:
    if recipe is None:
        return row.optimizer
    asked = recipe.optimizer
    chosen = row.optimizer if asked is None else OptimizerSpec(asked.name, tuple(asked.arguments.items()))
    return replace(chosen, group_rates=recipe.group_rates)


def _shard(task: Task, peers: Peers, keeps_whole_weights: bool, model: nn.Module) -> None:
    """Shard a task's model, of which a copy remains that computes shapes alone."""
    with suppress(Exception):  # the user's model may raise anything; its products are not counted then
        task.fake_copy = make_fake_copy(model, task.compute_loss)
    shard(model, peers, keeps_whole_weights=keeps_whole_weights)
