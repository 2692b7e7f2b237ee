"""Nests of tensors: the tuples, lists, dicts and data classes that batches and outputs are made of."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def map_tensors(function: Callable[[Tensor], Any], nest: Any) -> Any:
    """Return the same nest with every tensor replaced; whatever is neither nest nor tensor stays as it is.

    Data classes and mappings that torch's pytrees do not know (a tokenizer's output) are rebuilt from their parts.
    """
    return pytree.tree_map(lambda leaf: _map_leaf(function, leaf), nest)


def tensors_of(nest: Any) -> list[Tensor]:
    """Return the tensors of a nest, in its order."""
    if type(nest) is tuple and all(type(part) is Tensor for part in nest):  # by far the most, in every step
        return list(nest)
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, nest)  # type: ignore[func-returns-value]
    return found


def has_only_tensors(nest: Any) -> bool:
    """Return whether nests of this form differ by their tensors alone: nothing else is in them."""
    return all(_has_only_tensors(leaf) for leaf in pytree.tree_leaves(nest))


def _has_only_tensors(leaf: Any) -> bool:
    if isinstance(leaf, Mapping):
        return all(map(has_only_tensors, leaf.values()))
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return all(has_only_tensors(getattr(leaf, part.name)) for part in dataclasses.fields(leaf))
    return leaf is None or isinstance(leaf, Tensor)


def _map_leaf(function: Callable[[Tensor], Any], leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return function(leaf)
    if isinstance(leaf, Mapping):
        parts = {key: map_tensors(function, value) for key, value in leaf.items()}
        return type(leaf)(parts)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        parts = {part.name: map_tensors(function, getattr(leaf, part.name)) for part in _initialised(leaf)}
        return dataclasses.replace(leaf, **parts)
    return leaf


def _initialised(instance: Any) -> list[Any]:
    return [part for part in dataclasses.fields(instance) if part.init]
