"""What is run for a row of the speed goals: the task of a loop by hand, the trial of one of castwise's."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from goal_rows import GoalRow, HandLoop, OurLoop

from castwise.errors import MissingDataError
from castwise.registry.datasets import find_data_set, synthetic_like, verify
from castwise.registry.precisions import find_precision
from castwise.registry.suites import SuiteFilter, find_suite, specs_of
from castwise.registry.techniques import compiles, for_one_gpu, parse_techniques, why_unsupported
from castwise.spec.recipe import Recipe
from castwise.spec.trial import CUDA_PROTOCOL, MeasurementProtocol, TrialSpec

_NUM_BLOCKS = 20
_WARM_UP_SECONDS, _TINY_WARM_UP_SECONDS = 1.5, 0.05
_TINY_RUN = SuiteFilter(epochs=2, max_steps=3)


@dataclass(frozen=True)
class Setting:
    """Where and how long rows are measured."""

    device: str  # "cpu" or "cuda:N"
    data_dir: Path  # where real data lies
    seconds: float = 4.0  # time of the timed blocks of a turn
    epochs: int | None = None  # epochs after which a run is cut short; None runs all
    max_steps: int | None = None  # steps after which an epoch is cut short; None runs all
    is_tiny: bool = False  # the smallest sizes are run, to try the program itself


def tiny(row: GoalRow, device: str) -> GoalRow:
    """Return a row with the smallest sizes; its figures mean nothing."""
    hand = tuple(replace(loop, compiled=loop.compiled and device != "cpu") for loop in row.hand)
    world_size = 2 if row.world_size > 1 and device == "cpu" else row.world_size
    return replace(row, batch_size=min(row.batch_size, 8), hand=hand, world_size=world_size, block_seconds=0.02)


def data_set_of(row: GoalRow, setting: Setting) -> str | None:
    """Return the data of a run: real, or random samples of the same shape and number where there is none."""
    if row.data_set is None:
        return None
    if setting.is_tiny:
        return synthetic_like(row.data_set)
    try:
        verify(find_data_set(row.data_set), setting.data_dir)
    except MissingDataError:
        return synthetic_like(row.data_set)
    return row.data_set


def _run_spec(row: GoalRow, setting: Setting) -> TrialSpec | None:
    """Return the published run of a row, in float32; None of a row of steps."""
    if row.suite is None:
        return None
    choice = _TINY_RUN if setting.is_tiny else SuiteFilter(epochs=setting.epochs, max_steps=setting.max_steps)
    choice = replace(choice, workloads=(row.workload,), precisions=("fp32",))
    return specs_of(find_suite(row.suite), device=setting.device, choice=choice)[0]


def run_recipe(row: GoalRow, setting: Setting) -> Recipe | None:
    """Return the recipe of a row's run; None of a row of steps."""
    spec = _run_spec(row, setting)
    return None if spec is None else spec.recipe


def steps_per_epoch(row: GoalRow, recipe: Recipe) -> int:
    """Return the steps of a whole epoch."""
    assert row.num_samples is not None, "a run's row says how many samples it has"
    whole, rest = divmod(row.num_samples, row.batch_size)
    return whole if recipe.loader.drop_last or not rest else whole + 1


def hand_task(row: GoalRow, loop: HandLoop, setting: Setting, world_size: int) -> dict[str, Any]:
    """Return the task of a loop by hand, as `goal_hand.py` reads it."""
    recipe = run_recipe(row, setting)
    return {
        **asdict(loop),
        "workload": row.workload,
        "batch_size": row.batch_size,
        "device": setting.device,
        "seconds": setting.seconds,
        "block_seconds": row.block_seconds,
        "warm_up_seconds": _TINY_WARM_UP_SECONDS if setting.is_tiny else _WARM_UP_SECONDS,
        "world_size": world_size,
        "recipe": None if recipe is None else recipe.model_dump(mode="json"),
        "data_set": data_set_of(row, setting),
        "data_dir": str(setting.data_dir),
    }


def our_spec(row: GoalRow, loop: OurLoop, setting: Setting, world_size: int, timeout_seconds: float) -> TrialSpec:
    """Return the trial of a loop of castwise's."""
    precision = find_precision(loop.precision)
    techniques = parse_techniques(loop.techniques)
    fields: dict[str, Any] = {
        "precision": precision.name,
        "loss_scale": precision.loss_scale,
        "batch_size": row.batch_size,
        "techniques": techniques if world_size > 1 else for_one_gpu(techniques),
        "world_size": world_size,
        "parallelism": "ddp" if world_size > 1 else "none",
        "protocol": _protocol(row, setting, timeout_seconds),
    }
    base = _run_spec(row, setting)
    if base is None:
        spec = TrialSpec(workload=row.workload, device=setting.device, **fields)
    else:
        spec = base.model_copy(update={**fields, "data_set": data_set_of(row, setting)})
    return _as_far_as_possible(spec) if setting.is_tiny and setting.device == "cpu" else spec


def _protocol(row: GoalRow, setting: Setting, timeout_seconds: float) -> MeasurementProtocol:
    own = {"block_seconds": row.block_seconds, "max_seconds": setting.seconds, "timeout_seconds": timeout_seconds}
    if setting.is_tiny:
        return MeasurementProtocol(warm_up_steps=2, warm_up_seconds=_TINY_WARM_UP_SECONDS, num_blocks=3, **own)
    return MeasurementProtocol(
        num_blocks=max(_NUM_BLOCKS, round(setting.seconds / row.block_seconds)),
        lead_in_seconds=CUDA_PROTOCOL.lead_in_seconds,  # the loops by hand have no pauses between blocks, either
        **own,
    )


def _as_far_as_possible(spec: TrialSpec) -> TrialSpec:
    # On a CPU code takes its compiler half a minute.
    kept = [
        name
        for name in spec.techniques
        if not compiles([name]) and why_unsupported(spec.model_copy(update={"techniques": (name,)})) is None
    ]
    return spec.model_copy(update={"techniques": tuple(kept)})
