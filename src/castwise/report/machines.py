"""Machines to compare: measured ones, and those of published figures."""

from collections.abc import Collection as Names
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any

from castwise.analysis import training_metrics
from castwise.analysis.energy import joules_per_unit
from castwise.analysis.result_table import Row
from castwise.analysis.speedup import was_timed
from castwise.analysis.statistics import Estimate
from castwise.records.schema import Trial
from castwise.registry.datasets import imitated_data_set
from castwise.registry.published import PublishedMachine
from castwise.report.collection import Collection, collect, machine_traits, throughput_of
from castwise.report.machine_names import machine_names, short_name
from castwise.spec.trial import TrialSpec

Key = tuple[tuple[str, object], ...]  # values with their names


@dataclass(frozen=True)
class Entry:
    """One configuration on one machine."""

    spec: TrialSpec
    status: str
    message: str = ""
    unit_seconds: tuple[float, ...] = ()  # for each unit of throughput, a value a process; empty for published runs
    run_seconds: tuple[float, ...] = ()  # wall time of whole training runs, a value a run
    units: float | None = None  # of throughput, in a whole run
    speedup: Estimate | None = None  # over float32 at the same batch, as measured in rounds
    baseline_batch: int | None = None  # of the float32 run that a source compares with, if it is another
    trials: tuple[Trial, ...] = ()  # empty if it is published
    unit_joules: tuple[float, ...] = ()  # GPU energy of each unit of throughput, a value a process that has it
    cut: str = ""  # how a training run was cut short, in words

    @property
    def is_timed(self) -> bool:
        """Return whether it has a time."""
        return bool(self.unit_seconds or self.run_seconds)

    @cached_property
    def key(self) -> Key:
        """Return what entries share that can be compared, each with its name in words.

        The rest of a spec may differ: the device of the machine, the weights, the memory limit, the protocol; and the
        code of a user's model, as its versions are what one compares.
        """
        spec, recipe = self.spec, None
        if spec.recipe is not None:
            # Runs that differ only in how much of them is done and counted are of one configuration.
            length = ("stop_after", "max_steps", "skip_batches", "skip_epochs")
            exclude: dict[str, Any] = {**training_metrics.NO_TIME, **dict.fromkeys(length, True)}
            recipe = repr(spec.recipe.model_dump(exclude=exclude))
        return (
            ("precision", spec.precision),
            ("loss scale", spec.loss_scale),
            ("batch size", spec.batch_size),
            ("workload", spec.workload),
            ("kind", spec.kind),
            ("data set", imitated_data_set(spec.data_set) or spec.data_set),
            ("techniques", spec.techniques),
            ("number of GPUs", spec.world_size),
            ("number of nodes", spec.num_nodes),
            ("parallelism", spec.parallelism),
            ("seed", spec.seed if spec.kind == "steady" else None),  # training runs of several seeds are repetitions
            ("recipe", recipe),
        )

    @property
    def group_key(self) -> Key:
        """Return the key without precision, loss scale and batch size."""
        return self.key[3:]


@dataclass(frozen=True)
class ComparedMachine:
    """One side of a comparison."""

    name: str  # no two sides share one
    entries: dict[Key, Entry]  # by their keys
    traits: dict[str, str]  # hardware, software and how it was measured, in words, by name
    is_published: bool = False
    notes: tuple[str, ...] = ()  # what was left out, a line each


@dataclass(frozen=True)
class Origin:
    """Records that a user named together."""

    name: str  # what the user called them
    trials: Sequence[Trial]  # of one machine or of several, each once
    notes: Sequence[str] = ()  # what was left out of them, a line each


def measured_machines(origins: Sequence[Origin]) -> list[list[ComparedMachine]]:
    """Return the machines of each origin: one, or several if its trials are of several.

    Machines with one GPU model that share no workload are one side: each figure still is of one machine.
    """
    sides: list[list[list[Trial]]] = []  # of each origin, the trials of each
    for origin in origins:
        by_machine: dict[str, list[Trial]] = {}
        for trial in origin.trials:
            by_machine.setdefault(trial.environment.fingerprint, []).append(trial)
        own: list[list[Trial]] = []
        for trials in by_machine.values():
            device, workloads = trials[0].environment.device_name, {trial.spec.workload for trial in trials}
            partners = (side for side in own if side[0].environment.device_name == device)
            partner = next((s for s in partners if workloads.isdisjoint(t.spec.workload for t in s)), None)
            if partner is None:
                own.append(list(trials))
            else:
                partner.extend(trials)
        sides.append(own)
    environments = [[trial.environment for trial in trials] for own in sides for trials in own]
    folders = [origin.name for origin, own in zip(origins, sides, strict=True) for _ in own]
    names = iter(machine_names(environments, folders))
    return [
        [_measured(next(names), origin, collect(trials)) for trials in own]
        for origin, own in zip(origins, sides, strict=True)
    ]


def published_machine(
    published: PublishedMachine,
    workloads: Names[str] | None = None,
    precisions: Names[str] | None = None,
) -> ComparedMachine:
    """Return a GPU's published figures as a machine: of these workloads and precisions only; None takes all."""
    entries: dict[Key, Entry] = {}
    notes = list(published.notes)
    for figure in published.figures:
        source, baseline = figure.published, figure.baseline
        wanted = ((workloads, source.workload), (precisions, source.precision))
        if any(names is not None and name not in names for names, name in wanted):
            continue
        if figure.spec is None:
            label = f"{source.workload} {source.precision} batch {source.batch_size}"
            notes.append(f"{label}: the suite {figure.suite.name} plans no such run")
            continue
        has_other_baseline = baseline is not None and baseline.batch_size != source.batch_size
        entry = Entry(
            spec=figure.spec,
            status=source.outcome,
            run_seconds=(source.seconds,) if source.seconds is not None else (),
            baseline_batch=baseline.batch_size if baseline is not None and has_other_baseline else None,
        )
        entries.setdefault(entry.key, entry)
    traits = {
        "device": published.gpu,
        "published in": "; ".join(f"{suite.name}: {suite.source}" for suite in published.suites),
        "source's machine": "; ".join(f"{suite.name}: {suite.machine}" for suite in published.suites),
    }
    return ComparedMachine(
        f"{short_name(published.gpu)} (published)", entries, traits, is_published=True, notes=tuple(notes)
    )


def _measured(name: str, origin: Origin, collection: Collection) -> ComparedMachine:
    by_key: dict[Key, dict[str, list[Row]]] = {}
    for config in collection.configurations:
        spec = config.trial.spec
        # Seeds of one training run are repetitions; other protocols and lengths are other measurements.
        way = f"{spec.without_extras.protocol} {spec.recipe}"
        by_key.setdefault(Entry(spec, "ok").key, {}).setdefault(way, []).append(config)
    entries, num_left_out = {}, 0
    for key, ways in by_key.items():
        candidates = [_measured_entry(configurations) for configurations in ways.values()]
        entries[key] = max(candidates, key=lambda e: (e.is_timed, len(e.run_seconds), len(e.unit_seconds)))
        num_left_out += len(candidates) - 1
    notes = [*origin.notes, *collection.notes]
    if num_left_out:
        count = "1 configuration was" if num_left_out == 1 else f"{num_left_out} configurations were"
        notes.append(f"{count} measured in several ways: the one with the most processes, or the whole run, counts")
    traits = {"records": PurePath(origin.name).name or origin.name} | _traits(collection)
    return ComparedMachine(name, entries, traits, notes=tuple(notes))


def _measured_entry(configurations: Sequence[Row]) -> Entry:
    trials = [trial for config in configurations for trial in config.trials]
    shown = next((trial for trial in trials if trial.status != "ok"), trials[0])
    is_training = shown.spec.kind == "training"
    rates = [throughput_of(trial) for trial in trials if is_training or was_timed(trial)]
    whole = [trial for trial in trials if is_training and training_metrics.is_whole(trial)]
    splits = [training_metrics.split(trial) for trial in whole]
    totals = [split.total for split in splits if split is not None and split.total > 0]
    units, cut = None, ""
    if whole and whole[0].facts is not None:
        samples = sum(epoch.num_samples for rank in whole[0].ranks for epoch in rank.epochs)
        units = samples * whole[0].facts.units_per_sample
    if is_training and len(whole) < len(trials):
        cut = training_metrics.length_in_words(shown) + ("" if shown.status == "ok" else f", {shown.status}")
    return Entry(
        spec=shown.spec,
        status=shown.status,
        message=shown.message,
        unit_seconds=tuple(1 / rate for rate in rates if rate is not None),
        run_seconds=tuple(totals) if len(totals) == len(trials) else (),
        units=units,
        speedup=None if is_training else configurations[0].speedup_estimate,
        trials=tuple(trials),
        unit_joules=tuple(joules for trial in trials if (joules := joules_per_unit(trial))),
        cut=cut,
    )


def _traits(collection: Collection) -> dict[str, str]:
    """Return what a reader of two machines' figures wants to know of each machine, in order."""
    trials = collection.trials
    environments = {(e.fingerprint, e.commit): machine_traits(e) for e in (trial.environment for trial in trials)}
    facts = [trial.gpu_facts for trial in trials if trial.gpu_facts is not None]
    dates = sorted(trial.started_at[:10] for trial in trials)
    processes = sorted(len(config.trials) for config in collection.configurations)
    is_in_rounds = {trial.session_id is not None for trial in trials if trial.spec.kind == "steady"}
    rounds = {(True,): "in rounds", (False,): "each alone", (False, True): "some in rounds, some alone"}

    def joined(values: Iterable[object], form: str = "{}", separator: str = " / ") -> str:
        return separator.join(dict.fromkeys(form.format(value) for value in values if value and value != "–"))

    traits = {
        **{
            name: joined(each[name] for each in environments.values()) for name in machine_traits(trials[0].environment)
        },
        "power limit": joined((fact.power_limit_watts for fact in facts), "{:.0f} W"),
        "highest SM clock": joined(((fact.max_sm_clock_hertz or 0) / 1e6 for fact in facts), "{:.0f} MHz"),
        "measured": joined((dates[0], dates[-1]), separator=" to "),
        "processes": joined((processes[0], processes[-1]), separator=" to "),
        "steady state": rounds.get(tuple(sorted(is_in_rounds)), ""),
    }
    return {name: value for name, value in traits.items() if value and name != "fingerprint"}
