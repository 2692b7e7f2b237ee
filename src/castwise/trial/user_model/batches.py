"""Batches of the user's data: of any size, from an example batch or a function, on the device."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from castwise.apply.pytree import tree_map_tensors, tree_tensors
from castwise.errors import UsageError

_MAX_SHAPES_SHOWN = 6


class BatchMaker:
    """Makes batches of any size from the user's batch."""

    def __init__(self, batch: Any, accumulate: int, source: str, check: Callable[[Any], None] = lambda _: None) -> None:
        """Read the user's batch.

        Args:
            batch: An example batch, a function of the batch size, or a data loader, whose first batch is the example.
            accumulate: Batches of one optimizer step.
            source: The user's function, for messages: "train_me.py:build".
            check: Raises UsageError for a batch that the model cannot mean.
        """
        self._source, self._accumulate, self._check = source, accumulate, check
        self.kind: Literal["example", "function", "loader"] = "example"
        if callable(batch) and not tree_tensors(batch):  # a tokenizer's output can be called, but holds tensors
            try:
                inspect.signature(batch).bind(1)
            except TypeError:
                raise UsageError(
                    f"The batch function of {source} must take one argument, the batch size, and return a batch."
                ) from None
            except ValueError:  # some built-in functions have no signature
                pass
            self.kind, self._function, self.example = "function", batch, None
            return
        if isinstance(batch, Iterable) and hasattr(batch, "dataset"):  # a data loader, torch's or a similar one
            self.kind, batch = "loader", next(iter(batch), None)
            if batch is None:
                raise UsageError(f"The data loader of {source} is empty.")
        self.example = batch
        self._check_batch(batch)

    @property
    def batch_size(self) -> int | None:
        """Return the samples per optimizer step of the example batch; None if they are unknown."""
        size = common_first_size(self.example)
        return None if size is None else size * self._accumulate

    def make(self, count: int, batch_size: int, device: torch.device, generator: torch.Generator) -> Sequence[Any]:
        """Return batches on the device; of an example only one, since all would be equal."""
        if batch_size % self._accumulate:
            raise UsageError(
                f"A batch of {batch_size} cannot be accumulated from {self._accumulate} equal parts. "
                f"Take a multiple of {self._accumulate}."
            )
        size = batch_size // self._accumulate
        make_one = self._called if self.kind == "function" else self._resized
        torch.manual_seed(generator.initial_seed())  # the user's function draws from torch's global generator
        steps = count if self.kind == "function" else 1
        made = [tuple(to_device(make_one(size), device) for _ in range(self._accumulate)) for _ in range(steps)]
        return made if self._accumulate > 1 else [parts[0] for parts in made]

    def _called(self, size: int) -> Any:
        batch = self._function(size)
        self._check_batch(batch)
        if not _may_hold(batch, size):
            raise UsageError(
                f"The batch function of {self._source} was asked for {size} samples, and none of what it returned has "
                f"so many: shapes {_shapes(batch)}."
            )
        return batch

    def _resized(self, size: int) -> Any:
        """Return the example with its rows repeated in turn, or cut off, until there are `size`."""
        own = common_first_size(self.example)
        if own == size:
            return self.example
        if own is None:
            raise UsageError(
                f"The batch size of {self._source} is unknown: its example batch's tensors differ in their first "
                f"dimension (shapes {_shapes(self.example)}). Give a function of the batch size instead."
            )
        rows = torch.arange(size) % own
        return tree_map_tensors(lambda t: t.index_select(0, rows.to(t.device)) if t.dim() else t, self.example)

    def _check_batch(self, batch: Any) -> None:
        if not tree_tensors(batch):
            raise UsageError(
                f"The batch of {self._source} holds no tensor: it is {type(batch).__name__}. Give a tensor, or a "
                "tuple, list or dict of tensors."
            )
        self._check(batch)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on the device, floating-point ones in float32, from which precisions cast."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, torch.float32 if tensor.is_floating_point() else None)

    return tree_map_tensors(move, batch)


def common_first_size(batch: Any) -> int | None:
    """Return the first dimension that all tensors of a batch share, None if they share none."""
    sizes = {tensor.shape[0] for tensor in tree_tensors(batch) if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 and 0 not in sizes else None


def _may_hold(batch: Any, size: int) -> bool:
    """Return whether a batch may be one of `size` samples: in some dimension, as a list, or flattened in the first."""
    if any(size in tensor.shape or (tensor.dim() and tensor.shape[0] % size == 0) for tensor in tree_tensors(batch)):
        return True
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return any(isinstance(part, list | tuple) and len(part) == size for part in (batch, *parts))


def _shapes(batch: Any) -> str:
    shapes = [tuple(tensor.shape) for tensor in tree_tensors(batch)]
    shown = ", ".join(map(str, shapes[:_MAX_SHAPES_SHOWN]))
    return shown + (", …" if len(shapes) > _MAX_SHAPES_SHOWN else "")
