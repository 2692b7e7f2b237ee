from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from castwise.apply.pytree import tree_map_tensors, tree_tensors

Pair = namedtuple("Pair", ["first", "second"])
ONE, TWO = torch.ones(2), torch.full((3,), 2)


@dataclass
class Sample:
    image: Tensor
    name: str


@pytest.mark.parametrize(
    "nest",
    [
        (ONE, [TWO, "text"], 3),
        {"a": ONE, "b": {"c": TWO}},
        Pair(ONE, TWO),
        UserDict({"a": ONE, "b": (TWO,)}),  # what tokenizers return is one
        [Sample(ONE, "one"), Sample(TWO, "two")],
    ],
)
def test_nests_keep_their_types(nest: Any) -> None:
    doubled = tree_map_tensors(lambda tensor: tensor * 2, nest)
    assert type(doubled) is type(nest)
    assert [tensor.tolist() for tensor in tree_tensors(nest)] == [[1, 1], [2, 2, 2]]
    assert [tensor.tolist() for tensor in tree_tensors(doubled)] == [[2, 2], [4, 4, 4]]


def test_other_leaves_are_kept() -> None:
    thing = object()
    assert tree_map_tensors(lambda tensor: tensor, [thing, None, 1.5])[0] is thing
    assert tree_tensors({"a": [None, "x"]}) == []
    assert tree_map_tensors(lambda tensor: tensor, Sample(ONE, "one")).name == "one"
