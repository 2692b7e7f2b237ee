from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from castwise.apply.pytree import tree_tensors
from castwise.errors import UsageError
from castwise.trial.user_model.batches import BatchMaker

CPU = torch.device("cpu")


def make(batch: Any, batch_size: int, *, accumulate: int = 1, count: int = 3, seed: int = 0) -> Any:
    maker = BatchMaker(batch, accumulate, "train_me.py:build")
    return maker.make(count, batch_size, CPU, torch.Generator().manual_seed(seed))


EXAMPLES: list[Any] = [
    torch.arange(4.0),
    (torch.arange(4.0), torch.arange(4)),
    {"ids": torch.arange(4), "more": {"mask": torch.ones(4, 7)}, "scale": torch.tensor(0.5), "name": "text"},
    [torch.zeros(4, 2), (torch.arange(4), None)],
]


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("batch_size", [1, 4, 9])
def test_example_is_resized(example: Any, batch_size: int) -> None:
    (batch,) = make(example, batch_size)
    assert type(batch) is type(example)
    for old, new in zip(tree_tensors(example), tree_tensors(batch), strict=True):
        assert new.shape == ((batch_size, *old.shape[1:]) if old.dim() else ())
        if old.dim():
            assert torch.equal(new, old[torch.arange(batch_size) % 4])


def test_batch_size_of_an_example() -> None:
    assert BatchMaker(EXAMPLES[1], 1, "x").batch_size == 4
    assert BatchMaker(EXAMPLES[1], 3, "x").batch_size == 12
    assert BatchMaker((torch.zeros(4), torch.zeros(5)), 1, "x").batch_size is None
    assert BatchMaker(torch.zeros, 1, "x").batch_size is None


def test_example_of_unknown_batch_size_is_refused() -> None:
    with pytest.raises(UsageError, match=r"batch size of train_me.py:build is unknown.*\(4,\), \(5, 2\)"):
        make((torch.zeros(4), torch.zeros(5, 2)), 4)


def test_function_draws_by_the_seed() -> None:
    first, second = make(lambda size: torch.rand(size, 2), 5, count=2)
    assert first.shape == (5, 2)
    assert not torch.equal(first, second)
    assert torch.equal(make(lambda size: torch.rand(size, 2), 5)[0], first)
    assert not torch.equal(make(lambda size: torch.rand(size, 2), 5, seed=1)[0], first)


def test_function_that_ignores_the_batch_size_is_refused() -> None:
    with pytest.raises(UsageError, match=r"asked for 64 samples.*shapes \(32, 3\), \(32,\)"):
        make(lambda size: (torch.zeros(32, 3), torch.zeros(32)), 64)


@pytest.mark.parametrize(
    "function",
    [
        lambda size: torch.zeros(7, size),  # time first
        lambda size: torch.zeros(size * 7),  # flattened
        lambda size: [torch.zeros(3, 5 + index) for index in range(size)],  # a list of samples
    ],
)
def test_samples_need_not_come_first(function: Any) -> None:
    assert len(make(function, 13)) == 3


@pytest.mark.parametrize("function", [lambda: torch.zeros(1), lambda size, device: torch.zeros(size)])
def test_function_of_other_arguments_is_refused(function: Any) -> None:
    with pytest.raises(UsageError, match="must take one argument, the batch size"):
        make(function, 1)


@pytest.mark.parametrize("batch", ["text", 3, {"a": [1, 2]}, ()])
def test_batch_without_tensors_is_refused(batch: Any) -> None:
    with pytest.raises(UsageError, match="holds no tensor"):
        make(batch, 2)


def test_first_batch_of_a_loader_is_the_example() -> None:
    loader = DataLoader(TensorDataset(torch.arange(10), torch.arange(10)), batch_size=4)
    (batch,) = make(loader, 6)
    assert [part.tolist() for part in batch] == [[0, 1, 2, 3, 0, 1]] * 2
    with pytest.raises(UsageError, match=r"loader of train_me\.py:build is empty"):
        make(DataLoader(TensorDataset(torch.zeros(0))), 1)


def test_accumulated_batches() -> None:
    batches = make(torch.rand, 12, accumulate=3, count=2)
    assert [[part.shape for part in parts] for parts in batches] == [[(4,)] * 3] * 2
    assert not torch.equal(batches[0][0], batches[0][1])
    with pytest.raises(UsageError, match="A batch of 10 cannot be accumulated from 3 equal parts"):
        make(torch.rand, 10, accumulate=3)


def test_floating_point_parts_are_float32() -> None:
    (batch,) = make((torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int32)), 2)
    assert [part.dtype for part in batch] == [torch.float32, torch.int32]


def test_examples_and_made_batches_are_checked() -> None:
    def refuse(_: Any) -> None:
        raise UsageError("not this one")

    with pytest.raises(UsageError, match="not this one"):
        BatchMaker(torch.zeros(4), 1, "x", refuse)
    maker = BatchMaker(torch.zeros, 1, "x", refuse)
    with pytest.raises(UsageError, match="not this one"):
        maker.make(1, 4, CPU, torch.Generator())
