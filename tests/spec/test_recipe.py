"""What a recipe refuses."""

from typing import Any

import pytest
from pydantic import ValidationError

from castwise.spec.recipe import Recipe, Schedule

ONE_CYCLE = Schedule(kind="one_cycle")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"first_cycle_epochs": 1}, "needs a schedule of kind one_cycle, not 'constant'"),
        ({"schedule": ONE_CYCLE, "first_cycle_epochs": -1}, "greater than or equal to 0"),
        ({"schedule": ONE_CYCLE, "first_cycle_epochs": 1, "first_cycle_rates": (0.1, 0.2)}, "2 rates where .* has 1"),
        ({"schedule": ONE_CYCLE, "group_rates": (0.1, 0.2), "first_cycle_rates": (0.1,)}, "1 rates where .* has 2"),
        ({"group_rates": (0.0, 0.1)}, "greater than 0"),
    ],
)
def test_rates_and_cycles_that_do_not_fit(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Recipe(epochs=3, **fields)


@pytest.mark.parametrize(
    ("fields", "num_epochs"),
    [
        ({}, 3),
        ({"stop_after": 1}, 1),
        ({"max_steps": 5}, 3),
        ({"stop_after": 2, "max_steps": 5}, 2),
    ],
)
def test_a_recipe_says_how_long_it_runs(fields: dict[str, Any], num_epochs: int) -> None:
    recipe = Recipe(epochs=3, **fields)
    assert recipe.num_epochs == num_epochs
