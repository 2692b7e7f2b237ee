"""A suite: the plan of a published benchmark, its source, and its published figures, in one TOML file."""

import itertools
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from castwise.document import Document
from castwise.errors import UsageError, unknown_name
from castwise.loss_scales import parse_loss_scale
from castwise.plan import SYNTHETIC, Parallelism, TrialSpec
from castwise.precisions import find_precision
from castwise.recipe import Recipe
from castwise.workloads import find_workload

SUITE_NAMES = ("tensorcore", "wrn-cifar10", "dpn-cifar10", "fastai-cifar100", "rnn-lm", "amd-nvidia")


class Cells(Document):
    """A product of axes, all with one recipe.

    Attributes:
        workloads: Workload names.
        recipe: A name of the suite's recipes.
        precisions: Precision names.
        batch_sizes: Samples per GPU and step, as the source gives them for one GPU.
        loss_scales: For the precisions that scale their loss; empty takes each precision's own.
        data_set: `synthetic`, or a real data set.
        world_sizes: Numbers of GPUs.
        parallelisms: How more than one GPU share a step.
    """

    workloads: tuple[str, ...] = Field(min_length=1)
    recipe: str
    precisions: tuple[str, ...] = Field(min_length=1)
    batch_sizes: tuple[int, ...] = Field(min_length=1)
    loss_scales: tuple[str, ...] = ()
    data_set: str = SYNTHETIC
    world_sizes: tuple[int, ...] = (1,)
    parallelisms: tuple[Parallelism, ...] = ("none",)


class Published(Document):
    """One figure of the source.

    Attributes:
        gpu: The GPU as the source names it.
        workload: Which cell it is of, with the four that follow.
        precision: The precision's name here.
        batch_size: Samples per step on one GPU.
        loss_scale: The loss scale, where the source varies it.
        world_size: Number of GPUs.
        outcome: How it ended.
        seconds: Wall time of the run, where the source gives it.
        memory_bytes: Memory, where the source gives it.
        memory: What that memory is: tensors' peak, the allocator's, or the driver's figure.
        accuracy: Validation accuracy, 0 to 1.
        epoch_accuracy: The same per epoch.
    """

    gpu: str
    workload: str
    precision: str
    batch_size: int = Field(ge=1)
    loss_scale: str | None = None
    world_size: int = Field(default=1, ge=1)
    outcome: Literal["ok", "oom", "diverged"] = "ok"
    seconds: float | None = Field(default=None, gt=0)
    memory_bytes: int | None = Field(default=None, gt=0)
    memory: Literal["allocated", "reserved", "driver"] = "allocated"
    accuracy: float | None = Field(default=None, ge=0, le=1)
    epoch_accuracy: tuple[float, ...] = ()


class Suite(Document):
    """A published benchmark.

    Attributes:
        name: What users call it.
        title: What it measures, in a line.
        source: Repository, commit and date, or the document.
        machine: What the source ran on.
        oddities: What is odd in the source and kept here, a sentence each.
        contradictions: Where the source contradicts itself, a sentence each.
        recipes: The training runs, by name.
        quick: What the quick form changes in each recipe, by the recipe's name.
        cells: The plan.
        published: The source's figures.
    """

    name: str
    title: str
    source: str
    machine: str
    oddities: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()
    recipes: dict[str, Recipe]
    quick: dict[str, dict[str, int]] = Field(default_factory=dict)
    cells: tuple[Cells, ...] = Field(min_length=1)
    published: tuple[Published, ...] = ()

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        for cells in self.cells:
            if cells.recipe not in self.recipes:
                raise ValueError(f"cells name the recipe '{cells.recipe}', which is not among [recipes]")
        unknown = set(self.quick) - set(self.recipes)
        if unknown:
            raise ValueError(f"[quick.{unknown.pop()}] is about no recipe")
        return self


def find_suite(name: str) -> Suite:
    """Return a suite by its name, or from a TOML file where the name is a path.

    Raises:
        UsageError: There is no such suite, or the file is no suite: the message names the key and the line.
    """
    if name.endswith(".toml") or "/" in name:
        return _read_file(Path(name))
    if name not in SUITE_NAMES:
        raise unknown_name("suite", name, SUITE_NAMES, "Or name a TOML file of your own.")
    text = resources.files("castwise").joinpath("suites", f"{name}.toml").read_text(encoding="utf-8")
    return parse_suite(text, name)


def parse_suite(text: str, origin: str) -> Suite:
    """Return the suite a TOML text holds.

    Args:
        text: The TOML.
        origin: Its file's name, for messages.

    Raises:
        UsageError: It is no TOML, or no suite; the message names the key and its line.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"'{origin}' is no TOML: {error}.") from None
    try:
        suite = Suite.model_validate(document)
        _check_names(suite)
        return suite
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        line = _line_of(text, first["loc"])
        raise UsageError(f"'{origin}'{f', line {line}' if line else ''}: {where}: {first['msg']}.") from None
    except UsageError as error:
        raise UsageError(f"'{origin}': {error}") from None


def specs_of(suite: Suite, *, device: str, quick: bool, changes: Mapping[str, int], repeats: int) -> list[TrialSpec]:
    """Return the trials of a suite, in the order of its file.

    Args:
        suite: The suite.
        device: "cpu" or "cuda:N".
        quick: Whether recipes take their quick form.
        changes: Recipe fields that the user set (`epochs`, `max_steps`); they win over both forms.
        repeats: Trials a cell, with seeds 0, 1, …
    """
    recipes = {
        name: Recipe.model_validate({**recipe.model_dump(), **(suite.quick.get(name, {}) if quick else {}), **changes})
        for name, recipe in suite.recipes.items()
    }
    specs: dict[str, TrialSpec] = {}
    for seed in range(repeats):
        for cells in suite.cells:
            for values in _cells(cells):
                spec = TrialSpec(
                    device=device,
                    data_set=cells.data_set,
                    kind="training",
                    recipe=recipes[cells.recipe],
                    seed=seed,
                    **values,
                )
                specs.setdefault(spec.key, spec)
    return list(specs.values())


def _cells(cells: Cells) -> Iterator[dict[str, Any]]:
    for workload, world_size in itertools.product(cells.workloads, cells.world_sizes):
        # One GPU is shared by no one: the ways to share give one trial there.
        parallelisms = cells.parallelisms if world_size > 1 else ("none",)
        for parallelism, batch_size, name in itertools.product(parallelisms, cells.batch_sizes, cells.precisions):
            precision = find_precision(name)
            scales = cells.loss_scales if precision.loss_scale != "none" else ()
            for scale in scales or (precision.loss_scale,):
                yield {
                    "workload": find_workload(workload).name,
                    "precision": precision.name,
                    "batch_size": batch_size,
                    "loss_scale": parse_loss_scale(scale),
                    "world_size": world_size,
                    "parallelism": parallelism,
                }


def _check_names(suite: Suite) -> None:
    for cells in suite.cells:
        for workload in cells.workloads:
            find_workload(workload)
        for precision in cells.precisions:
            find_precision(precision)
        for scale in cells.loss_scales:
            parse_loss_scale(scale)


def _read_file(path: Path) -> Suite:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UsageError(f"The suite '{path}' cannot be read: {reason}.") from None
    return parse_suite(text, str(path))


def _line_of(text: str, location: tuple[int | str, ...]) -> int | None:
    """Return the line of a key in a TOML text, by counting table headers; None where it is not found."""
    names = [part for part in location if isinstance(part, str)]
    index = next((part for part in location if isinstance(part, int)), 0)
    table, seen, in_table, header_line = "", -1, len(names) == 1, None
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("["):
            table = stripped.strip("[] ")
            path = table.split(".")
            matches = path == names[: len(path)]
            seen += matches and stripped.startswith("[[")
            in_table = matches and (not stripped.startswith("[[") or seen == index)
            header_line = number if in_table else header_line
            names_left = names[len(path) :]
            if in_table and not names_left:
                return number
        elif in_table and "=" in stripped:
            key = stripped.partition("=")[0].strip()
            left = names[len(table.split(".")) :] if table else names
            if left and key == left[0]:
                return number
    return header_line
