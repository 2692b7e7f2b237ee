"""The rows of the speed goals are those of the issue, and every loop of castwise's can be run on a GPU."""

from pathlib import Path

import pytest
from goal_rows import ROWS, GoalRow, find_rows, with_max_autotune
from goal_specs import Setting, hand_task, our_spec, run_recipe, steps_per_epoch, tiny

from castwise.registry.technique_constraints import why_unsupported
from castwise.spec.plan import TrialSpec

CUDA = Setting("cuda:0", Path("nowhere"))
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def specs(row: GoalRow, setting: Setting) -> list[TrialSpec]:
    return [our_spec(row, loop, setting, row.world_size, 60.0) for loop in row.ours]


@every_row
def test_castwise_can_run_its_loops_on_a_gpu(row: GoalRow) -> None:
    for spec in specs(with_max_autotune(row), CUDA):
        assert why_unsupported(spec, (9, 0)) is None
        assert spec.techniques


@every_row
def test_the_smallest_form_fits_a_cpu(row: GoalRow) -> None:
    setting = Setting("cpu", Path("nowhere"), seconds=0.05, is_tiny=True)
    for spec in specs(tiny(row, "cpu"), setting):
        assert why_unsupported(spec) is None
        assert spec.batch_size <= 8
        assert spec.world_size <= 2
        assert not {"compile", "cuda-graph", "cuda-graph-8"} & set(spec.techniques)


def test_names_are_different() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("name", "goal"),
    [
        ("mlp", 0.090),
        ("resnet50", 8000),
        ("resnet101", 4400),
        ("inception", 4500),
        ("efficientnet", 8000),
        ("wrn", 11_000),
        ("wrn-run", 46),
        ("mnist", 1.5),
        ("lstm-200", 500_000),
        ("lstm-1500", 260_000),
        ("resnet50-x4", 0.98),
    ],
)
def test_goals(name: str, goal: float) -> None:
    (row,) = find_rows(name)
    assert row.goal == goal


def test_rows_are_found_by_name_in_the_order_asked_for() -> None:
    assert [row.name for row in find_rows("wrn, mlp")] == ["wrn", "mlp"]
    assert find_rows(None) == ROWS
    with pytest.raises(ValueError, match="No row named 'vgg'"):
        find_rows("vgg")


def test_max_autotune_is_tried_beside_compile() -> None:
    (row,) = find_rows("resnet50")
    plain, tried = row.ours, with_max_autotune(row).ours[len(row.ours) :]
    assert len(tried) == len(plain)
    for before, after in zip(plain, tried, strict=True):
        assert after.techniques == before.techniques.replace("+compile+", "+compile-max-autotune+")


def test_a_run_is_the_published_one_with_another_loop() -> None:
    (row,) = find_rows("mnist")
    spec = specs(row, CUDA)[0]
    assert spec.recipe is not None
    assert (spec.recipe.epochs, spec.recipe.max_steps, spec.precision, spec.loss_scale) == (
        20,
        None,
        "bf16-mixed",
        "none",
    )
    assert spec.data_set == "synthetic:mnist"  # there is none in a folder that is not there
    assert hand_task(row, row.hand[0], CUDA, 1)["recipe"] == spec.recipe.model_dump(mode="json")


def test_steps_of_an_epoch() -> None:
    def steps(name: str) -> int:
        (row,) = find_rows(name)
        recipe = run_recipe(row, CUDA)
        assert recipe is not None
        return steps_per_epoch(row, recipe)

    assert steps("mnist") == 118  # 117 whole batches and a short one
    assert steps("wrn-run") == 390  # the short one is left out


def test_several_gpus_share_a_step_and_one_takes_it_alone() -> None:
    (row,) = find_rows("resnet50-x4")
    together, alone = (our_spec(row, row.ours[0], CUDA, world, 60.0) for world in (4, 1))
    assert (together.world_size, together.parallelism) == (4, "ddp")
    assert (alone.world_size, alone.parallelism) == (1, "none")
    assert [name for name in together.techniques if name not in alone.techniques] == ["coalesced-reduce"]
    assert {"compile", "cuda-graph"} <= set(alone.techniques)
    assert why_unsupported(alone, (9, 0)) is None
