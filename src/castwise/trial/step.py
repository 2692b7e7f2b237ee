"""One training step: a task in a precision, with its optimizer, loss scaling and techniques."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.profiler import record_function

from castwise.apply.applied import Applied
from castwise.apply.precision import Weights, read_fp32_precision
from castwise.apply.pytree import Batch
from castwise.apply.techniques.batch_layout import Prepare
from castwise.apply.techniques.compile import CompiledLoss, run_uncompiled
from castwise.apply.techniques.compiled_update import CompiledUpdate
from castwise.apply.techniques.cuda_graph import StepGraph
from castwise.apply.techniques.gelu import form_of_gelu
from castwise.apply.techniques.optimizer_options import check_hooks, check_reads_rates, set_as_wanted
from castwise.errors import TechniqueError, UsageError
from castwise.records.schema import Facts
from castwise.registry.precisions import Precision
from castwise.registry.techniques import PLAIN, StepConfig
from castwise.registry.workloads import OptimizerSpec
from castwise.spec.loss_scale import is_dynamic
from castwise.trial.distributed import Peers
from castwise.trial.kernels.allreduce.gradient_reducer import CoalescedReduce
from castwise.trial.kernels.allreduce.reducer import CollectiveMean, SymmetricMean
from castwise.trial.lr_schedules import AfterStep, DeviceLearningRates
from castwise.trial.models.task import Task, UserLoop
from castwise.trial.trace_summary import SCALING_RANGE, UPDATE_RANGE

# The kinds of layers that techniques act on, as `Technique.layer` names them.
_LAYERS: dict[str, Callable[[nn.Module], bool]] = {
    # Or a module of the user's own that calls one.
    "convolution": lambda part: (
        isinstance(part, nn.modules.conv._ConvNd) or any(each.ndim >= 4 for each in part.parameters(recurse=False))
    ),
    "max pooling": lambda part: isinstance(part, nn.MaxPool2d),
    "embedding": lambda part: isinstance(part, nn.Embedding),
    "batch norm": lambda part: isinstance(part, nn.modules.batchnorm._BatchNorm),
    "GELU": lambda part: isinstance(part, nn.GELU) or form_of_gelu(part) is not None,
}


class TrainingStep(Applied):
    """Forward, backward and update, as one call."""

    def __init__(  # noqa: PLR0913  a setting each, by keyword
        self,
        task: Task,
        precision: Precision,
        optimizer: OptimizerSpec,
        *,
        loss_scale: str,
        clip_grad_norm: float | None,
        device: torch.device,
        loop: StepConfig = PLAIN,
        shard: Callable[[nn.Module], None] | None = None,
    ) -> None:
        user_loop = task.user_loop

        def make(weights: Weights) -> Optimizer:
            if user_loop is None:
                return make_optimizer(optimizer, _layer_groups(task, optimizer.group_rates, weights.stepped))
            made = user_loop.make_optimizer(weights)
            set_as_wanted(made, loop, device, may_skip=is_dynamic(loss_scale))
            return made

        task.model.to(device).train()
        super().__init__(task.model, precision, make, loss_scale=loss_scale, device=device, loop=loop, shard=shard)
        if shard is not None and type(self.optimizer) is SGD and self.optimizer.defaults["fused"]:
            raise TechniqueError("torch has no fused SGD for sharded weights. Leave fused out, or take ddp.")
        self.clip_grad_norm = clip_grad_norm
        self.accumulate = 1 if user_loop is None else user_loop.accumulate
        self.steps_per_launch = loop.steps_per_launch  # before `flush` the last ones may not have been taken
        # The optimizer makes its states in a step of its own, before a compiled update takes over.
        self.steps_to_compile = 2 if loop.compiled_update else 1

        # The parts of a step, in their order.
        self._called = self.model
        self._make: Prepare | None = None
        self._compute_loss = task.compute_loss
        if loop.compile_mode is not None:
            self._compute_loss = CompiledLoss(task.compute_loss, None if loop.compile_blocks else loop.compile_mode)
        # Validation, whose batches have shapes of their own, runs within it.
        self.uncompiled = run_uncompiled if loop.compile_blocks else nullcontext
        # Forward and backward on a batch; returns the loss.
        self.run_backward = self._backward if self.accumulate == 1 else self._accumulated_backward
        self._reduce: CoalescedReduce | None = None
        # Steps the weights by the gradients of `run_backward`, without what compiles or captures it.
        self.plain_update: Callable[[], None] = partial(self._step_optimizer, clip_grad_norm)
        self._update: Callable[[], None] = self.plain_update
        if loop.compiled_update:
            self._update = CompiledUpdate(self.optimizer, self._weights, self.scaling, clip_grad_norm)
        self.graph = (
            StepGraph(self._train, device, task.recurrent_state, loop.steps_per_launch) if loop.cuda_graph else None
        )
        self._run = self.graph or self._train
        self._after_step = None if user_loop is None else self._make_after_step(user_loop, loop, device)

    def _make_after_step(self, user_loop: UserLoop, loop: StepConfig, device: torch.device) -> AfterStep | None:
        """Return what steps the user's scheduler, if any; raise TechniqueError if the loop cannot follow it."""
        step_scheduler = None if user_loop.make_scheduler is None else user_loop.make_scheduler(self.optimizer)
        if step_scheduler is None:
            return None
        if loop.steps_per_launch > 1:
            raise TechniqueError("cuda-graph-8 cannot follow a scheduler that is stepped each step: take cuda-graph.")
        if not loop.reads_loss and not loop.cuda_graph and self.scaling.may_skip:
            raise TechniqueError("Your scheduler waits in each step for whether it was skipped.")
        if loop.reads_rates_on_device:
            check_hooks(self.optimizer, loop)  # again: a scheduler may have hooked something
            check_reads_rates(self.optimizer, loop)
            step_scheduler = DeviceLearningRates(self.optimizer, device, step_scheduler)
        return AfterStep(self.scaling, step_scheduler)

    def spread(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        """Let forward passes go through a wrapper of the converted model that runs it on several GPUs."""
        self._called = wrap(self.model)
        if self.accumulate > 1 and getattr(self._called, "static_graph", False):  # torch 2.15 fails in backward
            raise TechniqueError("ddp-static-graph does not fit no_sync(), within which your step adds up gradients.")

    def average_gradients(self, peers: Peers) -> None:
        """Let ranks average their gradients after backward, without a wrapper; they start with rank 0's model."""
        whole = (*self.model.parameters(), *self.model.buffers(), *self._weights.kept)
        peers.broadcast({id(tensor): tensor for tensor in whole}.values())
        self._reduce = CoalescedReduce(self.model, peers)

    def share_statistics(self) -> None:
        """Give all ranks rank 0's running statistics, if each updates its own; to be called before they are read."""
        if self._reduce is not None:
            self._reduce.share_statistics()

    def make_batches_by(self, make: Prepare | None) -> None:
        """Let every step make its batch from what it is given; in a CUDA graph that is part of the launch."""
        self._make = make

    def __call__(self, batch: Batch) -> Tensor:
        """Train on one batch and return its loss, still on the device.

        It is not detached: that would cost the host some microseconds a step. A caller that keeps it detaches it.
        """
        loss = self._run(batch)
        if self._after_step is not None:  # outside of a graph: a scheduler computes on the host
            self._after_step()
        return loss

    def flush(self) -> None:
        """Take the steps that wait to be launched together; to be called before the clock or a loss is read."""
        if self.graph is not None:
            self.graph.flush()

    def close(self) -> None:
        """Release the CUDA graphs: NCCL does not end its connections while a graph holds a collective."""
        if self.graph is not None:
            self.graph.captures.release()

    def _train(self, batch: Batch) -> Tensor:
        if self._make is not None:
            batch = self._make(batch)
        self._zero_grad()
        loss = self.run_backward(batch)
        if self._reduce is not None:
            self._reduce()
        self._update()
        return loss

    def _backward(self, batch: Batch) -> Tensor:
        with self._autocast():
            loss = self._compute_loss(self._called, batch)
        self.scaling.backward(loss)
        return loss

    def _accumulated_backward(self, batches: Sequence[Any]) -> Tensor:
        """Add up the gradients of the mean loss; ranks average them with the last batch only, as loops by hand do."""
        total: Tensor | None = None
        called = self._called
        for number, batch in enumerate(batches, start=1):
            waits = number < len(batches)
            with called.no_sync() if waits and isinstance(called, DistributedDataParallel) else nullcontext():
                with self._autocast():
                    loss = self._compute_loss(called, batch) / len(batches)
                self.scaling.backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None, "there is at least one batch"
        return total

    def within_ranges(self) -> AbstractContextManager[object]:
        """Return a context with a profiler's range around a compiled update, or loss scaling's part of a plain one."""
        if isinstance(self._update, CompiledUpdate):
            return patch.object(self, "_update", record_function(UPDATE_RANGE)(self._update))
        if self.scaling.read_scale() is None:
            return nullcontext()
        return patch.object(self.scaling, "step", record_function(SCALING_RANGE)(self.scaling.step))

    def peak_allocated(self, seen: int | None, *, ever: bool = False) -> int | None:
        """Return the most bytes that tensors held at once; the allocator saw `seen`, without those of a CUDA graph.

        With `ever` it is the peak of all steps so far, even if the allocator's counter was reset since.
        """
        if seen is None:
            return None
        if self.graph is not None:
            captures = self.graph.captures
            seen = max(seen, captures.peak_bytes, captures.earlier_peak_bytes if ever else 0)
        if self._mean is None:
            return seen
        return max(seen + self._mean.outside_bytes, self._mean.earlier_peaks[0] if ever else 0)

    def peak_reserved(self, seen: int | None, *, ever: bool = False) -> int | None:
        """Return the most bytes that were held for tensors, of which the allocator held `seen`."""
        if seen is None or self._mean is None:
            return seen
        return max(seen + self._mean.outside_bytes, self._mean.earlier_peaks[1] if ever else 0)

    @property
    def averaged_by(self) -> Literal["collectives", "shared memory"] | None:
        return None if self._mean is None else self._mean.kind

    @property
    def _mean(self) -> CollectiveMean | SymmetricMean | None:
        return None if self._reduce is None else self._reduce.mean


def _layer_groups(task: Task, rates: Sequence[float], stepped: Sequence[Tensor]) -> list[Tensor] | list[dict[str, Any]]:
    """Return a parameter group for each layer group that has anything to step; without rates the tensors.

    A parameter group has its layer group's number under "layer_group", for schedules that change its rate later.
    """
    if not rates:
        return list(stepped)
    if task.group_of is None:
        raise UsageError("The recipe has group_rates, and the workload has no layer groups. Leave group_rates out.")
    groups = {name: task.group_of(name) for name, _ in task.model.named_parameters()}
    num_groups = max(groups.values()) + 1
    if len(rates) != num_groups:
        raise UsageError(
            f"The recipe's group_rates are {len(rates)}, and the workload has {num_groups} layer groups. "
            "Give each its rate."
        )
    members: dict[int, list[Tensor]] = {}
    learning = [name for name, parameter in task.model.named_parameters() if parameter.requires_grad]
    for name, tensor in zip(learning, stepped, strict=True):
        members.setdefault(groups[name], []).append(tensor)
    return [{"params": members[index], "lr": rates[index], "layer_group": index} for index in sorted(members)]


def make_optimizer(spec: OptimizerSpec, tensors: Sequence[Tensor] | Sequence[dict[str, Any]]) -> Optimizer:
    """Return the optimizer of `torch.optim` that the row names, over these tensors or parameter groups."""
    optimizer: Optimizer = getattr(torch.optim, spec.name)(list(tensors), **dict(spec.arguments))
    return optimizer


def describe_optimizer(optimizer: OptimizerSpec | Optimizer) -> str:
    """Return an optimizer as one would write it: `Adam(lr=0.0002, ...)`."""
    if isinstance(optimizer, Optimizer):
        given = {name: value for name, value in optimizer.defaults.items() if value not in (None, False)}
        optimizer = OptimizerSpec(type(optimizer).__name__, tuple(given.items()))
    written = f"{optimizer.name}({', '.join(f'{name}={value}' for name, value in optimizer.arguments)})"
    return (
        f"{written}, layer groups at lr {', '.join(map(str, optimizer.group_rates))}"
        if optimizer.group_rates
        else written
    )


def count_dtypes(parameters: Iterable[Tensor]) -> dict[str, int]:
    """Return the number of values in each dtype."""
    found: Counter[str] = Counter()
    for parameter in parameters:
        found[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return dict(found)


def layers_of(model: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, is_one in _LAYERS.items() if any(map(is_one, model.modules())))


def describe(step: TrainingStep, task: Task, optimizer: OptimizerSpec) -> Facts:
    """Return what is known of a trial once its precision is applied; `optimizer` unless it is the user's own."""
    dtypes = count_dtypes(step.model.parameters())
    return Facts(
        num_parameters=sum(dtypes.values()),
        units_per_sample=task.units_per_sample,
        unit=task.unit,
        param_dtypes=dtypes,
        layers=layers_of(step.model),
        optimizer=describe_optimizer(optimizer if task.user_loop is None else step.optimizer),
        float8=step.float8,
        clip_grad_norm=step.clip_grad_norm,
        accumulate=step.accumulate,
        higher_is_better=task.higher_is_better,
        fp32_precision=read_fp32_precision(),
        notes=(*task.notes, *step.notes),
    )
