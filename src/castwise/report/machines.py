"""Machines whose cells are to be set side by side: measured ones, and those of published figures."""

from collections.abc import Collection as Names
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from castwise.analysis import steady_metrics, training_metrics
from castwise.analysis.speedup import was_timed
from castwise.analysis.statistics import Estimate
from castwise.records.schema import Environment, Trial
from castwise.registry.datasets import imitated_data_set
from castwise.registry.published import PublishedFigure, PublishedMachine
from castwise.report.collection import Collection, Configuration, collect
from castwise.spec.trial import TrialSpec

# What of a recipe says how much of a run is done and counted, and leaves the question as it is.
_LENGTH = ("stop_after", "max_steps", "skip_batches", "skip_epochs")
# What a question is made of, in the order of `Entry.question`. The rest of a spec says which of a machine's devices
# answers, from which weights, within how much memory, and for how long it is timed; and what the code of a user's own
# model was, as that code before and after a change is what one compares.
ASKED = (
    *("precision", "loss scale", "batch size"),
    *("workload", "kind", "data set", "techniques", "number of GPUs", "parallelism", "seed", "recipe"),
)


@dataclass(frozen=True)
class Entry:
    """One cell on one machine.

    Attributes:
        spec: What it asks.
        status: How it ended.
        message: What happened, where it did not end well.
        unit_seconds: Seconds a unit of throughput, one a process; empty where nothing was timed, and of published runs.
        run_seconds: Wall time of whole training runs, one a run; empty for all else.
        units: Units of throughput in a whole run; None where that is not known.
        speedup: Over float32 at the same batch, from turns where cells took turns; None without such a cell.
        baseline_batch: The batch of the float32 run that a source set beside it, where that is another; else None.
        trials: Its trials; empty where it is published.
        cut: How a training run was cut short, in words; empty for whole ones and for steady state.
    """

    spec: TrialSpec
    status: str
    message: str = ""
    unit_seconds: tuple[float, ...] = ()
    run_seconds: tuple[float, ...] = ()
    units: float | None = None
    speedup: Estimate | None = None
    baseline_batch: int | None = None
    trials: tuple[Trial, ...] = ()
    cut: str = ""

    @property
    def is_timed(self) -> bool:
        """Return whether it has a time."""
        return bool(self.unit_seconds or self.run_seconds)

    @cached_property
    def question(self) -> tuple[object, ...]:
        """Return what cells share that ask the same: a value for each of `ASKED`."""
        return (self.spec.precision, self.spec.loss_scale, self.spec.batch_size, *self.topic)

    @cached_property
    def topic(self) -> tuple[object, ...]:
        """Return the same without precision, loss scale and batch size."""
        spec = self.spec
        recipe = None
        if spec.recipe is not None:
            exclude: dict[str, Any] = {**training_metrics.NO_TIME, **dict.fromkeys(_LENGTH, True)}
            recipe = repr(spec.recipe.model_dump(exclude=exclude))
        seed = spec.seed if spec.kind == "steady" else None  # of training runs seeds are repetitions
        return (
            *(spec.workload, spec.kind, imitated_data_set(spec.data_set) or spec.data_set, spec.techniques),
            *(spec.world_size, spec.parallelism, seed, recipe),
        )


@dataclass(frozen=True)
class ComparedMachine:
    """One side of a comparison.

    Attributes:
        name: What it is called; no two sides share theirs.
        entries: Its cells, by their questions.
        traits: Hardware, software and how it was measured, in words, by name.
        is_published: Whether its figures are a source's.
        notes: What was left out, a line each.
    """

    name: str
    entries: dict[tuple[object, ...], Entry]
    traits: dict[str, str]
    is_published: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Origin:
    """Records that a user named together.

    Attributes:
        name: What the user called them.
        trials: Their trials, of one machine or of several, each once.
        notes: What was left out of them, a line each.
    """

    name: str
    trials: Sequence[Trial]
    notes: Sequence[str] = ()


def measured_machines(origins: Sequence[Origin]) -> list[list[ComparedMachine]]:
    """Return for each origin its machine, or several where its trials are of several: those are never mixed."""
    found: list[list[tuple[Origin, Collection, Environment]]] = []
    for origin in origins:
        by_machine: dict[str, list[Trial]] = {}
        for trial in origin.trials:
            by_machine.setdefault(trial.environment.fingerprint, []).append(trial)
        found.append([(origin, collect(trials), trials[0].environment) for trials in by_machine.values()])
    names = iter(_names([(origin.name, environment) for each in found for origin, _, environment in each]))
    return [[_measured(next(names), collection, origin.notes) for origin, collection, _ in each] for each in found]


def published_machine(
    published: PublishedMachine,
    workloads: Names[str] | None = None,
    precisions: Names[str] | None = None,
) -> ComparedMachine:
    """Return a GPU's published figures as a machine.

    Args:
        published: The figures.
        workloads: Only these workloads; None takes all.
        precisions: Only these precisions; None takes all.
    """
    entries: dict[tuple[object, ...], Entry] = {}
    notes = list(published.notes)
    for figure in published.figures:
        asked = figure.published
        if (workloads is not None and asked.workload not in workloads) or (
            precisions is not None and asked.precision not in precisions
        ):
            continue
        if figure.spec is None:
            notes.append(f"{_label(figure)}: the suite {figure.suite.name} plans no such run")
            continue
        entry = _published(figure)
        entries.setdefault(entry.question, entry)
    suites = published.suites
    traits = {
        "device": published.gpu,
        "published in": "; ".join(f"{suite.name}: {suite.source}" for suite in suites),
        "source's machine": "; ".join(f"{suite.name}: {suite.machine}" for suite in suites),
    }
    return ComparedMachine(f"{published.gpu} (published)", entries, traits, is_published=True, notes=tuple(notes))


def _names(sides: Sequence[tuple[str, Environment]]) -> list[str]:
    """Return a name a side, as short as tells them apart: the device, the folder, or both and the fingerprint."""
    tails = [Path(name).name or name for name, _ in sides]
    ways = (
        [environment.device_name for _, environment in sides],
        [f"{environment.device_name} ({tail})" for tail, (_, environment) in zip(tails, sides, strict=True)],
        [f"{environment.device_name} ({name})" for name, environment in sides],
        [f"{environment.device_name} ({name}, {environment.fingerprint})" for name, environment in sides],
    )
    alike = next((names for names in ways if len(set(names)) == len(names)), None)
    return alike or [f"{name} #{number}" for number, name in enumerate(ways[-1], start=1)]


def _measured(name: str, collection: Collection, notes_of_origin: Sequence[str]) -> ComparedMachine:
    groups: dict[tuple[object, ...], dict[str, list[Configuration]]] = {}
    for cell in collection.configurations:
        spec = cell.trial.spec
        # Seeds of one training run are its repetitions; other protocols and lengths are other measurements.
        way = f"{spec.without_timeout.protocol} {spec.recipe}"
        question = Entry(spec, "ok").question
        groups.setdefault(question, {}).setdefault(way, []).append(cell)
    entries, left_out = {}, 0
    for question, ways in groups.items():
        candidates = [_entry(cells) for cells in ways.values()]
        entries[question] = max(candidates, key=_weight)
        left_out += len(candidates) - 1
    notes = [*notes_of_origin, *collection.notes]
    if left_out:
        cells = "1 cell was" if left_out == 1 else f"{left_out} cells were"
        notes.append(f"{cells} measured in several ways: the one with the most processes, or the whole run, counts")
    return ComparedMachine(name, entries, _traits(collection), notes=tuple(notes))


def _weight(entry: Entry) -> tuple[bool, int, int]:
    return (entry.is_timed, len(entry.run_seconds), len(entry.unit_seconds))


def _entry(cells: Sequence[Configuration]) -> Entry:
    trials = [trial for cell in cells for trial in cell.trials]
    shown = next((trial for trial in trials if trial.status != "ok"), trials[0])
    training = shown.spec.kind == "training"
    rates = [rate for trial in trials if (rate := _rate(trial)) is not None]
    whole = [trial for trial in trials if training and training_metrics.is_whole(trial)]
    totals = [
        split.total for trial in whole if (split := training_metrics.split(trial)) is not None and split.total > 0
    ]
    return Entry(
        spec=shown.spec,
        status=shown.status,
        message=shown.message,
        unit_seconds=tuple(1 / rate for rate in rates),
        run_seconds=tuple(totals) if len(totals) == len(trials) else (),
        units=_units(whole[0]) if whole else None,
        speedup=None if training else cells[0].speedup,
        trials=tuple(trials),
        cut=_cut(shown) if training and len(whole) < len(trials) else "",
    )


def _rate(trial: Trial) -> float | None:
    """Return units a second, None where nothing was timed well enough to be compared."""
    if trial.spec.kind == "training":
        return training_metrics.throughput(trial)
    return steady_metrics.throughput(trial) if was_timed(trial) else None


def _units(trial: Trial) -> float | None:
    samples = sum(epoch.num_samples for rank in trial.ranks for epoch in rank.epochs)
    return None if trial.facts is None else samples * trial.facts.units_per_sample


def _cut(trial: Trial) -> str:
    ending = "" if trial.status == "ok" else f", {trial.status}"
    return training_metrics.length_in_words(trial) + ending


def _published(figure: PublishedFigure) -> Entry:
    assert figure.spec is not None, "figures without a run are left out before"
    published, before = figure.published, figure.baseline
    other_batch = before is not None and before.batch_size != published.batch_size
    return Entry(
        spec=figure.spec,
        status=published.outcome,
        run_seconds=(published.seconds,) if published.seconds is not None else (),
        baseline_batch=before.batch_size if before is not None and other_batch else None,
    )


def _label(figure: PublishedFigure) -> str:
    published = figure.published
    return f"{published.workload} {published.precision} batch {published.batch_size}"


def _traits(collection: Collection) -> dict[str, str]:
    """Return what a reader of two machines' figures wants to know of each, in order."""
    trials = collection.trials
    machines = [trial.environment for trial in trials]

    def words(name: str) -> str:
        return " / ".join(dict.fromkeys(str(getattr(each, name) or "–") for each in machines))

    names = ("memory", "driver", "cuda", "cudnn", "torch", "torchvision", "python", "castwise", "commit")
    facts = [trial.gpu_facts for trial in trials if trial.gpu_facts is not None]
    limits = dict.fromkeys(f"{f.power_limit_watts:.0f} W" for f in facts if f.power_limit_watts is not None)
    clocks = dict.fromkeys(f"{f.max_sm_clock_hertz / 1e6:.0f} MHz" for f in facts if f.max_sm_clock_hertz is not None)
    dates = sorted({trial.started_at[:10] for trial in trials})
    processes = sorted({len(cell.trials) for cell in collection.configurations})
    in_turns = {trial.session_id is not None for trial in trials if trial.spec.kind == "steady"}
    ways = {frozenset({True}): "in turns", frozenset({False}): "each alone"}
    values = {
        "device": words("device_name"),
        "memory": " / ".join(
            dict.fromkeys(f"{each.gpu_memory_bytes / 2**30:.0f} GiB" for each in machines if each.gpu_memory_bytes)
        ),
        "power limit": " / ".join(limits),
        "highest SM clock": " / ".join(clocks),
        **{name: words(name) for name in names[1:]},
        "host": words("host"),
        "CPU": words("cpu"),
        "threads": words("num_threads"),
        "system": words("system"),
        "measured": dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}",
        "processes a cell": " to ".join(dict.fromkeys((str(processes[0]), str(processes[-1])))),
        "steady cells": ways.get(frozenset(in_turns), "some in turns, some alone" if in_turns else ""),
    }
    return {name: value for name, value in values.items() if value.strip(" –/")}
