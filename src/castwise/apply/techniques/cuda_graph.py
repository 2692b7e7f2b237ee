"""Whole training steps as CUDA graphs: captured once, replayed for every batch of the same shape, several a launch."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from castwise.apply.pytree import Batch, TreeSignature, tree_map_tensors, tree_signature, tree_tensors
from castwise.errors import TechniqueError

# Steps on the capture's stream before it: they load libraries, choose algorithms and create the optimizer's state.
# Source: PyTorch, "CUDA semantics", Whole-network capture: 3 steps.
_WARM_UP_STEPS = 3
# For batches of another shape, such as a short last one, only algorithms are still to be chosen.
_MORE_WARM_UP_STEPS = 1
_MOST_SHAPES = 2


class RecurrentState(Protocol):
    """State that a task carries from step to step, such as a language model's hidden state."""

    def read(self) -> tuple[Tensor, ...]:
        """Return the tensors that the next step starts from; none if it starts from zeros."""

    def write(self, tensors: tuple[Tensor, ...]) -> None:
        """Let the next step start from these tensors, as many as `read` returned."""


class CudaCaptures:
    """Captures work as CUDA graphs, which share their memory: no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.seconds: float | None = None  # that all captures took; None before the first
        # The most that tensors held during a capture: replays use it again, though the allocator counts it as free.
        self.peak_bytes = 0
        # The most that they held before; capturing resets the allocator's peak.
        self.earlier_peak_bytes = 0

    def run_aside(self, work: Callable[[], Tensor]) -> Tensor:
        """Run work on the stream of the captures: backward runs on the stream where forward first ran."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            result = work()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return result

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture work, which computes nothing, and return a function that runs it."""
        started = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        torch.cuda.synchronize(self._device)
        self.earlier_peak_bytes = max(self.earlier_peak_bytes, torch.cuda.max_memory_allocated(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            # Other threads may use CUDA meanwhile: a loader's pins memory, and NCCL's watchdog asks for work that is
            # under way. Torch keeps captured collectives from the watchdog.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first_line = str(error).strip().partition("\n")[0]
            raise TechniqueError(f"cuda-graph cannot capture this step: {first_line}") from error
        torch.cuda.synchronize(self._device)
        self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(self._device))
        self.seconds = (self.seconds or 0.0) + time.perf_counter() - started
        return graph.replay

    def release(self) -> None:
        """Destroy all graphs; they cannot be run any more.

        As long as a graph holds a collective, NCCL waits for its end in `destroy_process_group`.
        Source: NVIDIA/nccl src/init.cc (commDestroySync); pytorch/pytorch issue 115388.
        """
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


@dataclass(frozen=True)
class _Captured:
    inputs: Sequence[list[Tensor]]  # that a replay reads: for each part of a batch the tensors of all batches
    losses: Tensor  # of shape (steps,)
    replay: Callable[[], None]  # takes the steps


def _by_part(batches: Sequence[Batch]) -> list[list[Tensor]]:
    """Return the tensors of batches by part, so that one kernel copies a part of all batches."""
    return [list(parts) for parts in zip(*map(tree_tensors, batches), strict=True)]


class StepGraph:
    """A training step that runs as a CUDA graph after a few warm-up steps, one step or several at a launch.

    The steps before the capture are real, and capturing computes nothing: every batch is trained on once, in order.
    Nothing within a step may depend on the host: learning rates that change are tensors, loss scaling is on the device,
    and the state that the task carries from step to step is copied into the graph's tensors.

    If a launch takes several steps, a batch waits until as many of its shape have come; a loss that was returned is NaN
    until then. `flush` takes the steps that wait, one by one.
    """

    def __init__(
        self,
        step: Callable[[Batch], Tensor],
        device: torch.device,
        carried: RecurrentState | None,
        steps_per_launch: int = 1,
        captures: CudaCaptures | None = None,
    ) -> None:
        """Wrap a step, which trains on a batch and returns its loss; `carried` is the task's recurrent state."""
        self._step, self._carried, self._device = step, carried, device
        self._steps_per_launch = steps_per_launch
        self.captures = captures or CudaCaptures(device)
        self._warm_up_steps: dict[TreeSignature, int] = {}  # still to be run, by the signature of a batch
        self._captured: dict[tuple[TreeSignature, int], _Captured] = {}
        self._state: tuple[Tensor, ...] = ()
        self._waiting: list[Batch] = []
        self._waiting_form: TreeSignature = None
        self._losses = torch.empty(0)  # of the batches that wait

    def __call__(self, batch: Batch) -> Tensor:
        """Train on a batch, now or with those that follow, and return its loss.

        A batch of a third shape runs uncaptured.
        """
        try:
            form = tree_signature(batch)
        except TypeError as error:  # a graph would keep the value of the first batch
            raise TechniqueError(f"cuda-graph needs batches of tensors alone: {error}.") from error
        if self._waiting and form != self._waiting_form:
            self.flush()
        if not self._is_ready(form):
            return self.captures.run_aside(lambda: self._step(batch))
        if not self._waiting:
            self._waiting_form = form
            self._losses = torch.full((self._steps_per_launch,), math.nan, device=self._device)
        self._waiting.append(batch)
        loss = self._losses[len(self._waiting) - 1]
        if len(self._waiting) == self._steps_per_launch:
            self._launch(self._waiting, self._losses)
            self._waiting = []
        return loss

    def flush(self) -> None:
        """Take the steps of the batches that wait; then their losses are known."""
        for index, batch in enumerate(self._waiting):
            self._launch([batch], self._losses[index : index + 1])
        self._waiting = []

    def _is_ready(self, form: TreeSignature) -> bool:
        """Return whether batches of this shape had their warm-up, and the carried state exists."""
        if form not in self._warm_up_steps:
            if len(self._warm_up_steps) == _MOST_SHAPES:
                return False
            self._warm_up_steps[form] = _MORE_WARM_UP_STEPS if self._warm_up_steps else _WARM_UP_STEPS
        if self._warm_up_steps[form]:
            self._warm_up_steps[form] -= 1
            return False
        return self._carried is None or bool(self._state) or bool(self._carried.read())

    def _launch(self, batches: Sequence[Batch], losses: Tensor) -> None:
        """Take the steps of batches that waited in one launch, and fill in their losses."""
        key = (self._waiting_form, len(batches))
        if key not in self._captured:
            self._captured[key] = self._capture(batches)
        captured = self._captured[key]
        for inputs, parts in zip(captured.inputs, _by_part(batches), strict=True):
            torch._foreach_copy_(inputs, parts, non_blocking=True)
        if self._carried is not None:
            self._fill_state(self._carried)
        captured.replay()
        losses.copy_(captured.losses)  # the next replay overwrites them

    def _capture(self, batches: Sequence[Batch]) -> _Captured:
        held = [tree_map_tensors(torch.empty_like, batch) for batch in batches]
        losses = torch.empty(len(batches), device=self._device)
        carried = self._carried
        if carried is not None and not self._state:
            self._state = tuple(part.clone() for part in carried.read())
        if carried is not None:
            self._fill_state(carried)

        def take_steps() -> None:
            for index, batch in enumerate(held):
                losses[index].copy_(self._step(batch).detach())
            if carried is not None:
                for kept, value in zip(self._state, carried.read(), strict=True):
                    kept.copy_(value)
                carried.write(self._state)

        replay = self.captures.capture(take_steps)
        return _Captured(_by_part(held), losses, replay)

    def _fill_state(self, carried: RecurrentState) -> None:
        """Copy the carried state into the graphs' tensors, if a new epoch or an uncaptured step replaced it."""
        now = carried.read()
        if not now:
            for kept in self._state:
                kept.zero_()
        elif now[0] is not self._state[0]:
            for kept, value in zip(self._state, now, strict=True):
                kept.copy_(value)
        carried.write(self._state)
