import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from castwise.api import compare
from castwise.errors import UsageError
from castwise.trial.user_model.contract import NAMES, Contract, call_without_arguments, read_contract

MODEL = nn.Linear(2, 2)
FROZEN = nn.Linear(1, 1).requires_grad_(False)
LOSS, BATCH = nn.MSELoss(), torch.ones(1)
PAIR = (BATCH, BATCH)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def make_batch(size: int) -> Any:
    return torch.ones(size)


@pytest.mark.parametrize(
    ("returned", "parts"),
    [
        (MODEL, {}),
        ((MODEL,), {}),
        ((MODEL, BATCH), {"batch": BATCH}),
        ((MODEL, PAIR, LOSS), {"batch": PAIR, "loss": LOSS}),
        ((MODEL, make_batch, LOSS), {"batch": make_batch, "loss": LOSS}),
        ((MODEL, make_batch, torch.sum), {"batch": make_batch, "loss": torch.sum}),
        ((MODEL, BATCH, None), {"batch": BATCH}),
        ({"model": MODEL, "batch": BATCH, "accumulate": 2}, {"batch": BATCH, "accumulate": 2}),
        ({"model": lambda: MODEL}, {}),
    ],
)
def test_returned_forms(returned: Any, parts: dict[str, Any]) -> None:
    assert read_contract(returned, "x.py:build") == Contract(model=MODEL, **parts)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned None. It must return a model, "),
        (3, "returned an int"),
        ([MODEL], r"returned a list of 1 \(Linear\)"),
        ((MODEL, 1, 2, 3), r"returned a tuple of 4 \(Linear, int, int, int\)"),
        ({"batch": 1}, "a dict without 'model'"),
        ({"model": MODEL, "optimiser": 1}, "a dict with 'optimiser'. Its keys may be: model, batch, "),
        ({"model": "resnet"}, "model of x.py:build is a str, not a torch.nn.Module"),
        ({"model": None}, "model of x.py:build is None"),
        ({"model": lambda: 3}, "is an int, not a torch.nn.Module"),
        ({"model": lambda size: MODEL}, r"the model of x.py:build needs arguments \(size\)"),
        (FROZEN, r"\(Linear\) has no parameter that learns"),
        ((MODEL, torch.ones(1), 3), "loss of x.py:build is an int, not a function"),
        ({"model": MODEL, "loss": nn.MSELoss(), "training_step": print}, "has both a loss and a training_step"),
        (
            (MODEL, {"x": BATCH}, lambda step: step),
            r"loss of x.py:build is called as loss\(output, batch\), but <lambda> takes \(step\). For a step of your "
            r"own return {'model': ..., 'batch': ..., 'training_step': f}, with f\(model, batch\) returning the loss",
        ),
        ((MODEL, (BATCH, BATCH), lambda a, b, c: a), r"as loss\(output, target\), but <lambda> takes \(a, b, c\)"),
        ((MODEL, BATCH, nn.MSELoss()), r"called as loss\(output\), but MSELoss takes \(input, target\)"),
        ((MODEL, lambda size: BATCH, lambda: BATCH), r"but <lambda> takes \(\)"),
        (
            {"model": MODEL, "training_step": lambda batch: batch},
            r"called as training_step\(model, batch\), but <lambda> takes",
        ),
        ({"model": MODEL, "optimizer": "adam"}, "neither an optimizer nor a function"),
        ({"model": MODEL, "optimizer": [torch.optim.SGD(MODEL.parameters())] * 2}, "has 2 optimizers"),
        ({"model": MODEL, "accumulate": 0}, "accumulate of x.py:build is 0, not a whole number from 1"),
        ({"model": MODEL, "batch_size": 2.5}, "batch_size of x.py:build is 2.5"),
        ({"model": MODEL, "clip_grad_norm": 0}, "clip_grad_norm of x.py:build is 0, not a number above 0"),
        ({"model": MODEL, "training_set": iter([BATCH])}, "without a length. It must be batches with a length"),
        ({"model": MODEL, "training_set": DataLoader(Endless(), 4)}, "is a DataLoader without a length"),
        ({"model": MODEL, "training_set": TensorDataset(torch.ones(8, 4))}, "is a TensorDataset. It must be batches"),
        ({"model": MODEL, "training_set": []}, "training_set of x.py:build has no batches"),
        ({"model": MODEL, "higher_is_better": "no"}, "higher_is_better of x.py:build is 'no', not True or False"),
        ({"model": MODEL, "unit": "frames"}, "unit of x.py:build is 'frames'. It may be: images, tokens, samples"),
    ],
)
def test_bad_parts_are_refused(returned: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refusal:
        read_contract(returned, "x.py:build")
    assert "\n" not in str(refusal.value)


def test_call_without_arguments() -> None:
    assert call_without_arguments(lambda size=3, *rest, **more: size, "x.py:build") == 3
    with pytest.raises(UsageError, match=r"x.py:build needs arguments \(size, depth\)"):
        call_without_arguments(lambda size, *, depth: None, "x.py:build")
    with pytest.raises(UsageError, match=r"x\.py:build is no function but a str"):
        call_without_arguments("text", "x.py:build")


def test_compare_takes_every_part_of_the_contract() -> None:
    of_accuracy = {"training_set", "validate", "higher_is_better"}  # for whole runs, which `compare` does not make
    assert set(NAMES) - of_accuracy <= set(inspect.signature(compare).parameters)
