"""Batches of the user's data: of any size, from an example batch or a function, on the device."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from castwise.errors import UsageError
from castwise.worker.pytree import tree_map_tensors, tree_tensors

_MAX_SHAPES_SHOWN = 6


class BatchMaker:
    """Makes batches of any size from the user's batch.

    Args:
        batch: An example batch, a function of the batch size, or a data loader, whose first batch is the example.
        accumulate: Batches of one optimizer step.
        source: The user's function, for messages: "train_me.py:build".

    Raises:
        UsageError: It holds no tensor, the loader is empty, or the function does not take a batch size.
    """

    def __init__(self, batch: Any, accumulate: int, source: str) -> None:
        self._source, self._accumulate = source, accumulate
        self._function: Callable[[int], Any] | None = None
        self._example: Any = None
        if is_batch_function(batch):
            if not _takes_one_argument(batch):
                raise UsageError(
                    f"The batch function of {source} must take one argument, the batch size, and return a batch."
                )
            self._function = batch
        else:
            self._example = first_of(batch, source)
            self._check_holds_tensors(self._example)

    @property
    def batch_size(self) -> int | None:
        """Return the samples per optimizer step of the example batch; None if they are unknown."""
        if self._function is not None:
            return None
        size = _common_first_size(self._example)
        return None if size is None else size * self._accumulate

    def make(self, count: int, batch_size: int, device: torch.device, generator: torch.Generator) -> Sequence[Any]:
        """Return batches on the device; of an example only one, since all would be equal.

        Raises:
            UsageError: A batch of this size cannot be made.
        """
        if batch_size % self._accumulate:
            raise UsageError(
                f"A batch of {batch_size} cannot be accumulated from {self._accumulate} equal parts. "
                f"Take a multiple of {self._accumulate}."
            )
        size = batch_size // self._accumulate
        torch.manual_seed(generator.initial_seed())  # the user's function draws from torch's global generator
        steps = count if self._function is not None else 1
        made = [tuple(self._make_one(size, device) for _ in range(self._accumulate)) for _ in range(steps)]
        return made if self._accumulate > 1 else [parts[0] for parts in made]

    def _make_one(self, size: int, device: torch.device) -> Any:
        if self._function is None:
            return to_device(self._resized(size), device)
        batch = self._function(size)
        self._check_holds_tensors(batch)
        if not _may_hold(batch, size):
            raise UsageError(
                f"The batch function of {self._source} was asked for {size} samples, and none of what it returned has "
                f"so many: shapes {_shapes(batch)}."
            )
        return to_device(batch, device)

    def _resized(self, size: int) -> Any:
        own = _common_first_size(self._example)
        if own == size:
            return self._example
        if own is None:
            raise UsageError(
                f"The batch size of {self._source} cannot be told: its example batch's tensors differ in their first "
                f"dimension (shapes {_shapes(self._example)}). Give a function of the batch size in its place."
            )
        return tree_map_tensors(lambda t: _resize(t, size) if t.dim() else t, self._example)

    def _check_holds_tensors(self, batch: Any) -> None:
        if not tree_tensors(batch):
            raise UsageError(
                f"The batch of {self._source} holds no tensor: it is {type(batch).__name__}. Give a tensor, or a "
                "tuple, list or dict of tensors."
            )


def is_batch_function(batch: Any) -> bool:
    """Return whether this is a function that makes batches; a tokenizer's output can be called, but holds tensors."""
    return callable(batch) and not isinstance(batch, Tensor) and not tree_tensors(batch)


def first_of(batch: Any, source: str) -> Any:
    """Return the first batch of a data loader; anything else unchanged.

    Raises:
        UsageError: The loader is empty.
    """
    if not is_loader(batch):
        return batch
    for first in batch:
        return first
    raise UsageError(f"The data loader of {source} is empty.")


def is_loader(batch: Any) -> bool:
    """Return whether this is a data loader, torch's or a similar one."""
    return isinstance(batch, Iterable) and hasattr(batch, "dataset")


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on the device, floating-point ones in float32, from which precisions cast."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, torch.float32 if tensor.is_floating_point() else None)

    return tree_map_tensors(move, batch)


def _common_first_size(batch: Any) -> int | None:
    sizes = {tensor.shape[0] for tensor in tree_tensors(batch) if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 and 0 not in sizes else None


def _resize(tensor: Tensor, size: int) -> Tensor:
    """Return the tensor with its rows repeated in turn, or cut off, until there are `size`."""
    rows = torch.arange(size, device=tensor.device) % tensor.shape[0]
    return tensor.index_select(0, rows)


def _may_hold(batch: Any, size: int) -> bool:
    """Return whether a batch may be one of `size` samples: in some dimension, as a list, or flattened in the first."""
    tensors = tree_tensors(batch)
    if any(size in tensor.shape or (tensor.dim() and tensor.shape[0] % size == 0) for tensor in tensors):
        return True
    return any(isinstance(part, list | tuple) and len(part) == size for part in (batch, *_children(batch)))


def _children(batch: Any) -> Iterable[Any]:
    if isinstance(batch, dict):
        return batch.values()
    return batch if isinstance(batch, list | tuple) else ()


def _shapes(batch: Any) -> str:
    shapes = [tuple(tensor.shape) for tensor in tree_tensors(batch)]
    shown = ", ".join(map(str, shapes[:_MAX_SHAPES_SHOWN]))
    return shown + (", …" if len(shapes) > _MAX_SHAPES_SHOWN else "")


def _takes_one_argument(function: Callable[..., Any]) -> bool:
    """Return whether a function can be called with one positional argument; True if that is unknown."""
    try:
        inspect.signature(function).bind(1)
    except TypeError:
        return False
    except ValueError:
        return True
    return True
