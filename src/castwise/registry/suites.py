"""A suite: the plan of a published benchmark, its source, and its published figures, in one TOML file."""

import itertools
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from castwise.errors import UsageError, unknown_name
from castwise.registry.datasets import is_real, synthetic_like
from castwise.registry.precisions import find_precision
from castwise.registry.technique_fit import resolve
from castwise.registry.techniques import NONE, SETS, TUNED, normalize_for_world_size, parse_techniques
from castwise.registry.workloads import check_data_set, find_workload
from castwise.spec.frozen import FrozenModel
from castwise.spec.loss_scale import parse_loss_scale
from castwise.spec.options import SuiteFilter
from castwise.spec.recipe import Recipe
from castwise.spec.trial import TrialSpec
from castwise.spec.types import SYNTHETIC, Parallelism

LIMIT_STEPS = 4  # of a search for the largest batch: optimizer state is there after the first

_MOST_SEEDS = 1000
_MOST_CHARACTERS = 10**6  # of a file

SUITE_NAMES = (
    "tensorcore",
    "fast-mnist",
    "wrn-cifar10",
    "fast-cifar10",
    "dpn-cifar10",
    "fastai-cifar100",
    "rnn-lm",
    "fast-wikitext2",
    "amd-nvidia",
)


def is_chosen(choice: SuiteFilter, workload: str, precision: str, world_size: int = 1) -> bool:
    workloads = choice.workloads and {find_workload(name).name for name in choice.workloads}
    precisions = choice.precisions and {find_precision(name).name for name in choice.precisions}
    return (
        (workloads is None or workload in workloads)
        and (precisions is None or precision in precisions)
        and (choice.world_sizes is None or world_size in choice.world_sizes)
    )


def _known_workload(name: str) -> str:
    row = find_workload(name)
    if row.family == "own":
        raise UsageError(f"'{name}' is a model of a user's own, and suites have none: `castwise run` measures it.")
    return row.name


# Names as users write them, and as the registry does after a suite was read.
_WorkloadName = Annotated[str, AfterValidator(_known_workload)]
_PrecisionName = Annotated[str, AfterValidator(lambda name: find_precision(name).name)]
_LossScale = Annotated[str, AfterValidator(parse_loss_scale)]


class _Grid(FrozenModel):
    """What grids of runs and searches have in common."""

    workloads: tuple[_WorkloadName, ...] = Field(min_length=1)
    recipe: str  # a name of the suite's recipes
    precisions: tuple[_PrecisionName, ...] = Field(min_length=1)
    loss_scales: tuple[_LossScale, ...] = ()  # for precisions that scale their loss; empty takes each precision's own
    data_set: str = SYNTHETIC


class RunGrid(_Grid):
    """A product of axes, all with one recipe; batch sizes are samples per GPU and step."""

    batch_sizes: tuple[int, ...] = Field(min_length=1)
    world_sizes: tuple[int, ...] = (1,)
    parallelisms: tuple[Parallelism, ...] = ("ddp",)  # on more than one GPU


class Limit(_Grid):
    """A search on one GPU for the largest batch that trains and the first that does not; its epoch is cut short."""

    multiple: int = Field(ge=1)  # batch sizes tried are multiples of this


class Published(FrozenModel):
    """One figure of the source."""

    gpu: str  # as the source names it
    workload: _WorkloadName
    precision: _PrecisionName
    batch_size: int = Field(ge=1)  # per GPU
    loss_scale: _LossScale | None = None  # None if the source does not vary it
    world_size: int = Field(default=1, ge=1)
    outcome: Literal["ok", "oom", "diverged"] = "ok"
    seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # wall time of the run
    memory_bytes: int | None = Field(default=None, gt=0)
    memory: Literal["allocated", "reserved", "driver"] = "allocated"  # what `memory_bytes` is
    accuracy: float | None = Field(default=None, ge=0, le=1)  # on the validation data
    epoch_accuracy: tuple[float, ...] = ()


class Suite(FrozenModel):
    """A published benchmark."""

    name: str
    title: str
    source: str  # repository, commit and date, or the document
    machine: str  # what the source ran on
    oddities: tuple[str, ...] = ()  # of the source, kept here, a sentence each
    contradictions: tuple[str, ...] = ()  # within the source, a sentence each
    recipes: dict[str, Recipe]
    quick: dict[str, dict[str, int | bool]] = Field(default_factory=dict)  # changes to recipes in the quick form
    cells: tuple[RunGrid, ...] = Field(min_length=1)
    limits: tuple[Limit, ...] = ()  # after the runs
    published: tuple[Published, ...] = ()
    fills_memory: bool = False  # the source took the largest batches that its GPU's memory allowed
    tuned: dict[str, str] = Field(default_factory=dict)  # the techniques that `tuned` stands for, by workload

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        workloads = {workload for grid in self.cells for workload in grid.workloads}
        for workload, techniques in self.tuned.items():
            if workload not in workloads:
                raise UsageError(f"[tuned] names '{workload}', which none of [[cells]] runs.")
            if not set(parse_techniques(techniques)).isdisjoint(SETS):
                raise UsageError(f"[tuned] {workload} = '{techniques}': name techniques, not sets of them.")
        for grid in (*self.cells, *self.limits):
            if grid.recipe not in self.recipes:
                raise ValueError(f"[[cells]] names the recipe '{grid.recipe}', which is not among [recipes]")
            for workload in grid.workloads:
                row = find_workload(workload)
                check_data_set(row, grid.data_set)
                if row.family == "transformer" and grid.data_set in row.data_sets:
                    raise UsageError(f"No suite trains {workload} on {grid.data_set}: `castwise run` times its steps.")
        unknown = set(self.quick) - set(self.recipes)
        if unknown:
            raise ValueError(f"[quick.{unknown.pop()}] names no recipe")
        return self

    def technique_sets(self, workload: str) -> dict[str, tuple[str, ...]]:
        """Return what names of several techniques stand for: `tuned` for what the suite names for a workload."""
        return SETS | ({TUNED: parse_techniques(self.tuned[workload])} if workload in self.tuned else {})


def find_suite(name: str) -> Suite:
    """Return a suite by its name, or from a TOML file if the name is a path.

    Raises:
        UsageError: There is no such suite, or the file is no suite: the message names the key.
    """
    if name.endswith(".toml") or "/" in name:
        try:
            with Path(name).open(encoding="utf-8") as file:
                text = file.read(_MOST_CHARACTERS + 1)  # a device might never end
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
            raise UsageError(f"The suite '{Path(name)}' cannot be read: {reason}.") from None
        if len(text) > _MOST_CHARACTERS:
            raise UsageError(f"'{Path(name)}' is no suite: it has more than {_MOST_CHARACTERS:,} characters.")
        return parse_suite(text, str(Path(name)))
    if name not in SUITE_NAMES:
        raise unknown_name(
            "suite", name, SUITE_NAMES, "`castwise list suites` shows them; one of your own is named by its TOML file."
        )
    text = resources.files("castwise").joinpath("suites", f"{name}.toml").read_text(encoding="utf-8")
    return parse_suite(text, name)


@cache
def _recipes() -> dict[str, list[tuple[Suite, RunGrid]]]:
    """Return the suites that train a workload on real data, and their grids of runs, by the workload's name."""
    found: dict[str, list[tuple[Suite, RunGrid]]] = {}
    for suite in map(find_suite, SUITE_NAMES):
        for grid in suite.cells:
            for workload in grid.workloads if is_real(grid.data_set) else ():
                found.setdefault(workload, []).append((suite, grid))
    return found


def find_recipe(workload: str, data_set: str | None = None, name: str | None = None) -> tuple[Suite, RunGrid]:
    """Return the suite of a name, or else the first, that trains a workload on real data, and its grid of runs."""
    known = _recipes()
    found = known.get(find_workload(workload).name, [])
    if not found:
        raise UsageError(
            f"No suite trains '{workload}' on real data, and without it there is no accuracy. There are recipes for "
            f"{', '.join(known)}."
        )
    if name is not None:
        suites = dict.fromkeys(suite.name for suite, _ in found)
        found = [(suite, grid) for suite, grid in found if suite.name == name]
        if not found:
            raise UsageError(f"'{workload}' is trained by the suite {' or '.join(suites)}, not by '{name}'.")
    sets = list(dict.fromkeys(grid.data_set for _, grid in found))
    if data_set is not None and data_set not in sets:
        raise UsageError(f"'{workload}' is trained on {' or '.join(sets)}, not on '{data_set}'.")
    return next((suite, grid) for suite, grid in found if data_set in (None, grid.data_set))


def parse_suite(text: str, origin: str) -> Suite:
    """Return the suite that a TOML text from `origin` holds; raise UsageError with the wrong key or line."""
    try:
        return Suite.model_validate(tomllib.loads(text))
    except RecursionError:
        raise UsageError(f"'{origin}' is no suite: it is nested too deep.") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"'{origin}' is no TOML: {error}.") from None
    except ValidationError as error:
        # A key that is misspelt is also one that is missing: the first is what the user wrote.
        first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(f"'{origin}': {where}: {first['msg']}.") from None
    except UsageError as error:
        raise UsageError(f"'{origin}': {error}") from None


def specs_of(suite: Suite, *, device: str, choice: SuiteFilter | None = None) -> list[TrialSpec]:
    """Return the trials of a suite's chosen runs, in the order of its file; all, as published, without a choice."""
    choice = choice or SuiteFilter()
    if choice.seeds > _MOST_SEEDS:
        raise UsageError(f"{choice.seeds} seeds are more than anybody can wait for. Give at most {_MOST_SEEDS}.")
    recipes = {name: _recipe(suite, name, choice) for name in suite.recipes}
    loops = [parse_techniques(text) for text in choice.techniques or (NONE,)]
    chosen = [
        (grid, values)
        for grid in suite.cells
        for values in _runs_of(grid)
        if is_chosen(choice, values["workload"], values["precision"], values["world_size"])
    ]
    most_gpus = max((values["world_size"] for _, values in chosen), default=1)
    specs: dict[str, TrialSpec] = {}
    for grid, values in chosen:
        recipe = recipes[grid.recipe]
        if choice.validate and grid.data_set != SYNTHETIC and not recipe.validate_each_epoch:
            recipe = recipe.model_copy(update={"validate_at_end": True})
        for seed, techniques in itertools.product(range(choice.seeds), loops):
            spec = _training_spec({**values, "seed": seed}, grid.data_set, recipe, device, choice)
            names = normalize_for_world_size(techniques, spec.world_size, most_gpus)
            spec = resolve(names, spec, suite.technique_sets(spec.workload))
            specs.setdefault(spec.key, spec)
    if not specs:
        raise UsageError(f"The suite '{suite.name}' has no run that these filters leave; leave out one of them.")
    return list(specs.values())


def is_search(spec: TrialSpec) -> bool:
    """Return whether a trial is a step in a search for the largest batch."""
    return spec.recipe is not None and (spec.recipe.max_steps, spec.recipe.stop_after) == (LIMIT_STEPS, 1)


def limit_specs(suite: Suite, *, device: str, choice: SuiteFilter | None = None) -> list[tuple[TrialSpec, int]]:
    """Return the searches of a suite: a trial of a few steps, and the number its batch size is a multiple of."""
    choice = choice or SuiteFilter()
    searches = []
    for limit in suite.limits:
        recipe = _recipe(suite, limit.recipe, choice)
        short = recipe.model_copy(update={"stop_after": 1, "max_steps": LIMIT_STEPS, "skip_batches": 0})
        grid = RunGrid(**limit.model_dump(exclude={"multiple"}), batch_sizes=(limit.multiple,))
        for values in _runs_of(grid):
            if is_chosen(choice, values["workload"], values["precision"]):
                searches.append((_training_spec(values, grid.data_set, short, device, choice), limit.multiple))
    return searches


def _training_spec(
    values: dict[str, Any], data_set: str, recipe: Recipe, device: str, choice: SuiteFilter
) -> TrialSpec:
    if choice.synthetic and data_set != SYNTHETIC:
        data_set = synthetic_like(data_set)
    return TrialSpec(device=device, data_set=data_set, kind="training", recipe=recipe, **values)


def _recipe(suite: Suite, name: str, choice: SuiteFilter) -> Recipe:
    """Return a recipe as it is to be run; options of the user override the quick form."""
    published = suite.recipes[name]
    changes: dict[str, int | bool] = dict(suite.quick.get(name, {})) if choice.quick else {}
    if choice.max_steps is not None:
        changes["max_steps"] = choice.max_steps
    if choice.epochs is not None:
        changes["stop_after"] = choice.epochs
    if changes.get("stop_after", 0) >= published.epochs:
        del changes["stop_after"]
    return Recipe.model_validate({**published.model_dump(), **changes})


def _runs_of(grid: RunGrid) -> Iterator[dict[str, Any]]:
    for workload, world_size in itertools.product(grid.workloads, grid.world_sizes):
        parallelisms = grid.parallelisms if world_size > 1 else ("none",)
        for parallelism, batch_size, name in itertools.product(parallelisms, grid.batch_sizes, grid.precisions):
            precision = find_precision(name)
            scales = grid.loss_scales if precision.loss_scale != "none" else ()
            for scale in scales or (precision.loss_scale,):
                yield {
                    "workload": workload,
                    "precision": name,
                    "batch_size": batch_size,
                    "loss_scale": scale,
                    "world_size": world_size,
                    "parallelism": parallelism,
                }
