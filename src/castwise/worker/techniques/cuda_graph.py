"""Whole training steps as CUDA graphs: captured once, replayed for every batch of the same shape, some at a launch."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from castwise.errors import TechniqueError
from castwise.worker.models.task import Batch, RecurrentState
from castwise.worker.pytree import TreeSignature, tree_map_tensors, tree_signature, tree_tensors

# Steps on the capture's stream before it: libraries are loaded, algorithms are chosen, the optimizer has its state.
# Source: PyTorch, "CUDA semantics", Whole-network capture: 3 steps.
_WARM_UP_STEPS = 3
# Batches of another shape, such as a short last one, find libraries and state there; algorithms are chosen by shape.
_MORE_WARM_UP_STEPS = 1
_MOST_SHAPES = 2


class CudaCaptures:
    """Captures work as CUDA graphs, which share their memory: no two of them run at once.

    Attributes:
        seconds: What capturing took so far; None before the first.
        peak_bytes: The most memory that tensors held during a capture, which every replay uses again though the
            allocator counts it as free; 0 before the first.
        earlier_peak_bytes: The most that they held outside, which capturing makes the allocator forget; 0 before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.seconds: float | None = None
        self.peak_bytes = self.earlier_peak_bytes = 0

    def run_aside(self, work: Callable[[], Tensor]) -> Tensor:
        """Run work on the stream of the captures: backward runs where forward first ran."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            result = work()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return result

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture work, which computes nothing, and return what runs it.

        Raises:
            TechniqueError: It cannot be captured.
        """
        started = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        torch.cuda.synchronize(self._device)
        self.earlier_peak_bytes = max(self.earlier_peak_bytes, torch.cuda.max_memory_allocated(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            # A loader's thread may pin memory meanwhile, and NCCL's watchdog ask for work that is under way: what other
            # threads do is not the capture's. Torch keeps captured collectives from the watchdog.
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
        """Destroy all graphs; what runs them cannot any more.

        As long as one holds a collective, NCCL waits for its end in `destroy_process_group`.
        Source: NVIDIA/nccl src/init.cc (commDestroySync); pytorch/pytorch issue 115388.
        """
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


@dataclass(frozen=True)
class _Captured:
    """Steps as one graph.

    Attributes:
        places: Where the batches of a replay are put: of each of their parts, that of every batch.
        losses: Where their losses come to lie, of shape (steps,).
        replay: Takes the steps.
    """

    places: Sequence[list[Tensor]]
    losses: Tensor
    replay: Callable[[], None]


def _by_part(batches: Sequence[Batch]) -> list[list[Tensor]]:
    """Return the tensors of batches by part: those of all batches are one copy."""
    return [list(parts) for parts in zip(*map(tree_tensors, batches), strict=True)]


class StepGraph:
    """A training step that runs as a CUDA graph once it has run a few times, one step or several at a launch.

    The steps before the capture are real ones, and capturing computes nothing, so that every batch is trained on once,
    in its order. Nothing within a step may depend on the host: learning rates that move are tensors, loss scaling is on
    the device, and what the task carries from step to step is copied into place.

    Where a launch takes several steps, a batch waits until as many of its shape have come; a loss that was returned
    is NaN until then. `flush` takes the steps that wait, one by one.

    Attributes:
        captures: Captures the graphs.
    """

    def __init__(
        self,
        step: Callable[[Batch], Tensor],
        device: torch.device,
        carried: RecurrentState | None,
        steps_per_launch: int = 1,
        captures: CudaCaptures | None = None,
    ) -> None:
        """Wrap a step.

        Args:
            step: Trains on a batch and returns the loss.
            device: The GPU.
            carried: What the task carries from step to step, if anything.
            steps_per_launch: Steps that are one launch.
            captures: Captures the graphs; None makes one for the device.
        """
        self._step, self._carried, self._device = step, carried, device
        self._steps_per_launch = steps_per_launch
        self.captures = captures or CudaCaptures(device)
        self._warm_up_steps: dict[TreeSignature, int] = {}  # that are still to be run, by a batch's form
        self._captured: dict[tuple[TreeSignature, int], _Captured] = {}
        self._state: tuple[Tensor, ...] = ()
        self._waiting: list[Batch] = []
        self._waiting_form: TreeSignature = None
        self._losses = torch.empty(0)  # of the steps that wait

    def __call__(self, batch: Batch) -> Tensor:
        """Train on a batch, now or with those that follow, and return its loss.

        A batch of a third shape runs uncaptured.
        """
        try:
            form = tree_signature(batch)
        except TypeError as error:  # it would stay the first's
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
        """Take the steps that wait for others; their losses are there then."""
        for index, batch in enumerate(self._waiting):
            self._launch([batch], self._losses[index : index + 1])
        self._waiting = []

    def _is_ready(self, form: TreeSignature) -> bool:
        """Return whether batches of this shape had their warm-up, and what is carried has a form."""
        if form not in self._warm_up_steps:
            if len(self._warm_up_steps) == _MOST_SHAPES:
                return False
            self._warm_up_steps[form] = _MORE_WARM_UP_STEPS if self._warm_up_steps else _WARM_UP_STEPS
        if self._warm_up_steps[form]:
            self._warm_up_steps[form] -= 1
            return False
        return self._carried is None or bool(self._state) or bool(self._carried.read())

    def _launch(self, batches: Sequence[Batch], losses: Tensor) -> None:
        """Take steps that wait in one launch, and put their losses where they were promised."""
        key = (self._waiting_form, len(batches))
        if key not in self._captured:
            self._captured[key] = self._capture(batches)
        captured = self._captured[key]
        for places, parts in zip(captured.places, _by_part(batches), strict=True):
            torch._foreach_copy_(places, parts, non_blocking=True)
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
        """Bring what is carried into the graphs' place, where a new epoch or a step of another shape moved it."""
        now = carried.read()
        if not now:
            for place in self._state:
                place.zero_()
        elif now[0] is not self._state[0]:
            for place, value in zip(self._state, now, strict=True):
                place.copy_(value)
        carried.write(self._state)
