"""The published runs' loops by hand."""

import pytest
import torch
from suite_loops import scheduled
from torch import nn

from castwise.spec.recipe import Recipe, Schedule


@pytest.mark.parametrize(
    ("kind", "max_steps", "batches", "rates"),
    [("step", None, 3, 1), ("step", 2, 2, 1), ("one_cycle", None, 3, 3), ("one_cycle", 2, 2, 2)],
)
def test_the_rate_moves_with_each_batch_or_with_the_epoch(
    kind: str, max_steps: int | None, batches: int, rates: int
) -> None:
    recipe = Recipe(epochs=1, schedule=Schedule(kind=kind), max_steps=max_steps)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    seen = []
    for batch in scheduled(range(3), recipe, scheduler):
        optimizer.step()
        seen.append(batch)
    assert (len(seen), scheduler.last_epoch) == (batches, rates)
