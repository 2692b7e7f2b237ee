"""A whole training step as one CUDA graph: captured once, replayed for every batch of the same shape."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from castwise.errors import UsageError
from castwise.measure.techniques.compiled import Shapes, shapes_of
from castwise.measure.workloads.task import Batch, Carried

# Steps on the capture's stream before it: libraries are loaded, algorithms are chosen, the optimizer has its state.
# Source: PyTorch, "CUDA semantics", Whole-network capture: 3 steps.
_WARM_UP_STEPS = 3


class StepGraph:
    """A training step that runs as a CUDA graph once it has run a few times.

    The steps before the capture are real ones, and capturing computes nothing, so that every batch is trained on once.
    Nothing within the step may depend on the host: learning rates that move are tensors, loss scaling is on the
    device, and what the task carries from step to step is copied into place.

    Attributes:
        capture_seconds: What capturing took; None before.
        peak_bytes: The most memory that tensors held while it was captured, which every replay uses again though the
            allocator counts it as free; 0 before.
        earlier_peak_bytes: The most that they held before, which capturing makes the allocator forget; 0 before.
    """

    def __init__(self, step: Callable[[Batch], Tensor], device: torch.device, carried: Carried | None) -> None:
        """Wrap a step.

        Args:
            step: Trains on a batch and returns the loss.
            device: The GPU.
            carried: What the task carries from step to step, if anything.
        """
        self._step, self._carried, self._device = step, carried, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph = torch.cuda.CUDAGraph()
        self._shapes: Shapes | None = None
        self._num_steps = 0
        self._inputs: Batch = ()
        self._loss: Tensor | None = None
        self._state: tuple[Tensor, ...] = ()
        self.capture_seconds: float | None = None
        self.peak_bytes = self.earlier_peak_bytes = 0

    def __call__(self, batch: Batch) -> Tensor:
        """Train on a batch and return its loss; a batch of another shape than the first runs uncaptured."""
        shapes = shapes_of(batch)
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes:
            return self._step(batch)
        if self._loss is None:
            if not self._is_ready():
                return self._step_aside(batch)
            self._capture(batch)
        return self._replay(batch)

    def _is_ready(self) -> bool:
        """Return whether there has been a warm-up, and what is carried has a form to be given a place."""
        return self._num_steps >= _WARM_UP_STEPS and (self._carried is None or bool(self._carried.read()))

    def _step_aside(self, batch: Batch) -> Tensor:
        """Step on the stream of the capture: backward runs where forward first ran."""
        self._num_steps += 1
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            loss = self._step(batch)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return loss

    def _capture(self, batch: Batch) -> None:
        started = time.perf_counter()
        self._inputs = tuple(part.clone() for part in batch)
        if self._carried is not None:
            self._state = tuple(part.clone() for part in self._carried.read())
            self._carried.write(self._state)
        torch.cuda.synchronize(self._device)
        self.earlier_peak_bytes = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            # A loader's thread may pin memory meanwhile: what other threads do is not the capture's.
            with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
                self._loss = self._step(self._inputs).detach()
                if self._carried is not None:
                    for place, value in zip(self._state, self._carried.read(), strict=True):
                        place.copy_(value)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first_line = str(error).strip().partition("\n")[0]
            raise UsageError(f"cuda-graph cannot capture this step: {first_line}") from error
        if self._carried is not None:
            self._carried.write(self._state)
        torch.cuda.synchronize(self._device)
        self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
        self.capture_seconds = time.perf_counter() - started

    def _replay(self, batch: Batch) -> Tensor:
        for place, part in zip(self._inputs, batch, strict=True):
            place.copy_(part, non_blocking=True)
        if self._carried is not None:
            self._fill_state(self._carried)
        self._graph.replay()
        assert self._loss is not None, "captured"
        return self._loss.clone()  # the next replay overwrites it

    def _fill_state(self, carried: Carried) -> None:
        """Bring what is carried into the graph's place, where a new epoch or a step of another shape moved it."""
        now = carried.read()
        if not now:
            for place in self._state:
                place.zero_()
        elif now[0] is not self._state[0]:
            for place, value in zip(self._state, now, strict=True):
                place.copy_(value)
        carried.write(self._state)
