"""Nested tensors: the tuples, lists, dicts and data classes of batches and outputs."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import Tensor

Batch = tuple[Tensor, ...]
TreeSignature = Hashable


def tree_map_tensors(function: Callable[[Tensor], Any], nest: Any) -> Any:
    """Return the same nest with every tensor replaced; other leaves stay as they are.

    Of mappings and data classes others are made, such as a tokenizer's output.
    """

    def replaced(part: Any) -> Any:
        return tree_map_tensors(function, part)

    if isinstance(nest, Tensor):
        return function(nest)
    if type(nest) in (tuple, list) or hasattr(nest, "n_sequence_fields"):  # the latter as `torch.max` returns them
        return type(nest)([replaced(part) for part in nest])
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*[replaced(part) for part in nest])
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        names = [part.name for part in dataclasses.fields(nest) if part.init]
        return dataclasses.replace(nest, **{name: replaced(getattr(nest, name)) for name in names})
    if isinstance(nest, Mapping):
        parts = {key: replaced(part) for key, part in nest.items()}
        factory = (nest.default_factory,) if isinstance(nest, defaultdict) else ()
        return type(nest)(*factory, parts)  # type: ignore[call-arg]
    return nest


def tree_tensors(nest: Any) -> list[Tensor]:
    """Return the tensors of a nest, in its order."""
    if type(nest) is tuple and all(type(part) is Tensor for part in nest):  # the most frequent kind
        return list(nest)
    found: list[Tensor] = []
    tree_map_tensors(lambda tensor: found.append(tensor) or tensor, nest)  # type: ignore[func-returns-value]
    return found


def tree_signature(nest: Any) -> TreeSignature:
    """Return the types and keys of a nest, and its tensors' shapes and dtypes, in order.

    Raises:
        TypeError: The nest holds anything but tensors, None, tuples, lists, mappings and data classes.
    """
    if isinstance(nest, Tensor):
        return nest.shape, nest.dtype
    if isinstance(nest, Mapping):
        return type(nest), tuple((key, tree_signature(part)) for key, part in nest.items())
    if isinstance(nest, tuple | list):
        return type(nest), tuple(map(tree_signature, nest))
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return type(nest), tuple(tree_signature(getattr(nest, part.name)) for part in dataclasses.fields(nest))
    if nest is None:
        return None
    raise TypeError(f"{type(nest).__name__} is neither a tensor nor a tuple, list, dict or data class of tensors")
