"""What steady trials and training runs have in common: a task in a precision, as one training step."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name

import torch

from castwise.errors import TechniqueError
from castwise.records.schema import Facts
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import step_config_of
from castwise.registry.workloads import OptimizerSpec, Workload, find_workload
from castwise.spec.trial import TrialSpec
from castwise.worker.data.seeding import seed_of
from castwise.worker.distributed import Peers, spread
from castwise.worker.models import build_task
from castwise.worker.models.task import Task
from castwise.worker.precision import numeric_state
from castwise.worker.step import TrainingStep, describe
from castwise.worker.techniques.batch_layout import Prepare, preparation
from castwise.worker.techniques.optimizer_options import keep_rates_on_device, optimizer_for
from castwise.worker.user_model.load import build_user_model


@dataclass(frozen=True)
class TrialSetup:
    """A spec's task and its training step, on the device.

    Attributes:
        task: The model with its data and its loss.
        step: The training step.
        facts: What is known once the precision is applied.
        prepare: What is done to every batch on the device; None for nothing.
    """

    task: Task
    step: TrainingStep
    facts: Facts
    prepare: Prepare | None


def build_trial(spec: TrialSpec, stack: ExitStack, peers: Peers, data_dir: Path | None = None) -> TrialSetup:
    """Set the numeric state, and build the spec's model and optimizer in it.

    Args:
        spec: What is to be run.
        stack: Restores the process's numeric state when it is closed.
        peers: The processes that share its steps.
        data_dir: Where the real data of a steady trial lies; a training run reads its data through feeds.
    """
    row, precision = find_workload(spec.workload), find_precision(spec.precision)
    torch.manual_seed(spec.seed)
    own = (
        build_user_model(spec.user_model) if spec.user_model is not None else None
    )  # first: what it sets globally is the trial's to decide
    stack.enter_context(numeric_state(precision))
    loop = step_config_of(spec.techniques)
    recipe_searches = spec.recipe is not None and spec.recipe.cudnn_benchmark
    if own is None or loop.cudnn_search:  # the user's own setting is kept
        stack.enter_context(_cudnn_search(loop.cudnn_search or recipe_searches))
    task = own or _build_task(spec, row, data_dir)
    if spec.weights is not None and task.load_weights is not None:
        task.load_weights(Path(spec.weights))  # in float32: the precision is applied to them
    for change in loop.model_changes:
        resolve_name(change.function)(task.model, *change.arguments)
    if loop.loss_chunks > 1:
        if task.chunk_loss is None:
            raise TechniqueError("chunked-loss is for language models, and this is none.")
        task.chunk_loss(loop.loss_chunks)
    optimizer = optimizer_for(loop, _optimizer(spec, row.optimizer), torch.device(spec.device))
    step = TrainingStep(
        task,
        precision,
        optimizer,
        loss_scale=spec.loss_scale,
        clip_grad_norm=row.clip_grad_norm if task.user_loop is None else task.user_loop.clip_grad_norm,
        device=torch.device(spec.device),
        loop=loop,
    )
    if loop.reads_rates_on_device and spec.recipe is not None and spec.recipe.schedule.kind != "constant":
        keep_rates_on_device(step.optimizer, torch.device(spec.device))
    stack.callback(step.close)
    if loop.coalesced_reduce:
        step.average_gradients(peers)
    else:
        step.spread(lambda model: spread(model, spec))
    if peers.rank > 0:
        torch.manual_seed(seed_of(spec.seed, rank=peers.rank))  # the same weights, but dropout of one's own
    return TrialSetup(task, step, describe(step, task, optimizer), preparation(loop))


def _build_task(spec: TrialSpec, row: Workload, data_dir: Path | None) -> Task:
    if spec.recipe is not None:
        return build_task(row)  # a training run reads its real data through feeds
    return build_task(row, data_set=spec.data_set, data_dir=data_dir)


def _optimizer(spec: TrialSpec, own: OptimizerSpec) -> OptimizerSpec:
    if spec.recipe is None:
        return own
    asked = spec.recipe.optimizer
    chosen = own if asked is None else OptimizerSpec(asked.name, tuple(asked.arguments.items()))
    return replace(chosen, group_rates=spec.recipe.group_rates)


@contextmanager
def _cudnn_search(wanted: bool) -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
