"""Nests of tensors: the tuples, lists, dicts and data classes that batches and outputs are made of."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

TreeSignature = Hashable


def tree_map_tensors(function: Callable[[Tensor], Any], nest: Any) -> Any:
    """Return the same nest with every tensor replaced; whatever is neither nest nor tensor stays as it is.

    Data classes and mappings that torch's pytrees do not know (a tokenizer's output) are rebuilt from their parts.
    """
    return pytree.tree_map(lambda leaf: _map_leaf(function, leaf), nest)


def tree_tensors(nest: Any) -> list[Tensor]:
    """Return the tensors of a nest, in its order."""
    if type(nest) is tuple and all(type(part) is Tensor for part in nest):  # by far the most, in every step
        return list(nest)
    found: list[Tensor] = []
    tree_map_tensors(lambda tensor: found.append(tensor) or tensor, nest)  # type: ignore[func-returns-value]
    return found


def tree_signature(nest: Any) -> TreeSignature:
    """Return a nest's form: what its parts are and are called, in their order, and its tensors' shapes and dtypes.

    Raises:
        TypeError: Something else than tensors and None is in it, or a nest of a kind that is not looked into.
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


def _map_leaf(function: Callable[[Tensor], Any], leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return function(leaf)
    if isinstance(leaf, Mapping):
        parts = {key: tree_map_tensors(function, value) for key, value in leaf.items()}
        return type(leaf)(parts)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        parts = {part.name: tree_map_tensors(function, getattr(leaf, part.name)) for part in _initialised(leaf)}
        return dataclasses.replace(leaf, **parts)
    return leaf


def _initialised(instance: Any) -> list[Any]:
    return [part for part in dataclasses.fields(instance) if part.init]
