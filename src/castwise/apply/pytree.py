"""Nested tensors: the tuples, lists, dicts and data classes of batches and outputs, through torch's pytrees."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

Batch = tuple[Tensor, ...]
TreeSignature = Hashable


def tree_map_tensors(function: Callable[[Tensor], Any], nest: Any) -> Any:
    """Return the same nest with every tensor replaced; other leaves stay as they are.

    Data classes and mappings that torch's pytrees do not know, such as a tokenizer's output, are rebuilt.
    """

    def map_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if isinstance(leaf, Mapping):
            parts = {key: tree_map_tensors(function, value) for key, value in leaf.items()}
            return type(leaf)(parts)  # type: ignore[call-arg]
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            names = [part.name for part in dataclasses.fields(leaf) if part.init]
            changes = {name: tree_map_tensors(function, getattr(leaf, name)) for name in names}
            return dataclasses.replace(leaf, **changes)
        return leaf

    return pytree.tree_map(map_leaf, nest)


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
