"""Compare machines: the ratio of each configuration's times with its verdict, and what cannot be compared and why.

Energy per unit of throughput and, if prices are known, work per money are compared next to it. Machines are measured
ones, and those of published figures.

The other machines are compared with the first one. Processes of two machines are never measured in one session, so
that a ratio is one of two independent means: its interval does not include other times, nor other cards of a model.
"""

from collections import Counter
from collections.abc import Collection as Names
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePath
from statistics import fmean, geometric_mean
from typing import Any

from castwise.analysis import training_metrics
from castwise.analysis.energy import JOULES_PER_KWH, SECONDS_PER_HOUR, joules_per_unit
from castwise.analysis.result_table import MARGIN, Row
from castwise.analysis.speedup import was_timed
from castwise.analysis.statistics import MIN_PROCESSES, Estimate, Verdict, estimate, independent_ratio, verdict_of
from castwise.records.schema import Trial
from castwise.records.store import free_name
from castwise.registry.datasets import imitated_data_set
from castwise.registry.gpus import short_device_name
from castwise.registry.precisions import BASELINE, precision_row, precision_sort_key
from castwise.registry.published import PublishedMachine
from castwise.registry.workloads import unit_of
from castwise.report.collection import Collection, collect, machine_traits, throughput_of
from castwise.report.machine_names import machine_names
from castwise.report.machine_notes import MachineNote, machine_notes
from castwise.spec.grouping import grouped
from castwise.spec.quantities import format_share
from castwise.spec.trial import TrialSpec

Key = tuple[tuple[str, object], ...]  # values with their names
_FAILED = ("oom", "timeout", "crashed", "diverged")
# How far from 1 a ratio between cards still is "the same". Source: ResNet-50 on four H200s, batch 256, in
# benchmarks/records: their speeds have standard deviations of 0.4 % in fp32, 1.1 % in bf16-mixed, 1.4 % in fp16-mixed,
# some on other days and with other versions of castwise.
MARGIN_OF_CARDS = 0.03
THIS_CARD = ", this card"  # a verdict is on, if the first machine has another


@dataclass(frozen=True)
class MachinePrices:
    """Prices in one currency."""

    per_hour: Mapping[str, float] = field(default_factory=dict[str, float])  # of a whole machine, by the machine's name
    per_kwh: float | None = None


@dataclass(frozen=True)
class MachineResult:
    """One configuration on one machine, and how it compares with the first machine."""

    machine: str  # its name
    spec: TrialSpec
    status: str
    message: str = ""
    unit_seconds: tuple[float, ...] = ()  # for each unit of throughput, a value a process; empty for published runs
    run_seconds: tuple[float, ...] = ()  # wall time of whole training runs, a value a run
    units: float | None = None  # of throughput, in a whole run
    speedup: Estimate | None = None  # over float32 on the same machine; first at the same batch, as measured in rounds
    baseline_batch: int | None = None  # of the float32 run that a source compares with, if it is another
    trials: tuple[Trial, ...] = ()  # empty if it is published
    unit_joules: tuple[float, ...] = ()  # GPU energy of each unit of throughput, a value a process that has it
    cut: str = ""  # how a training run was cut short, in words
    # Of a comparison:
    throughput: Estimate | None = None  # units per second, of whole runs if all are or if it is published
    verdict: Verdict | None = None  # None on the first machine
    words: str = ""  # the verdict in words; empty on the first machine
    broke: bool = False  # it ended well on the first machine and did not here
    energy_ratio: Estimate | None = None  # relative to the first machine, < 1 takes less
    units_per_price: float | None = None  # of throughput, for one of the currency, by the machine's hourly price
    units_per_energy_price: float | None = None  # the same by the price of the GPUs' energy; None if unknown

    @property
    def ratio(self) -> Estimate | None:
        """Return the speed relative to the first machine, > 1 is faster; None if the times cannot be compared."""
        return None if self.verdict is None else self.verdict.ratio

    @property
    def joules(self) -> Estimate | None:
        """Return GPU energy per unit of throughput; None if unknown, or if it did not end well."""
        return estimate(self.unit_joules) if self.status == "ok" else None

    @property
    def cards(self) -> set[tuple[str | None, ...]]:
        """Return the GPUs or CPUs that measured it, whatever their software; empty if it is published."""
        environments = [trial.environment for trial in self.trials]
        return {(e.device_name, *([e.gpu_uuid] if e.gpu_uuid else [e.hosts, e.cpu])) for e in environments}

    @property
    def is_timed(self) -> bool:
        return bool(self.unit_seconds or self.run_seconds)

    @cached_property
    def key(self) -> Key:
        """Return what results share that can be compared, each with its name in words.

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
    name: str  # no two sides share one
    results: dict[Key, MachineResult]  # by their keys
    traits: dict[str, str]  # hardware, software and how it was measured, in words, by name
    is_published: bool = False
    notes: tuple[str, ...] = ()  # what was left out, a line each


@dataclass(frozen=True)
class Origin:
    """Records that a user named together."""

    name: str  # what the user called them
    trials: Sequence[Trial]  # of one machine or of several, each once
    notes: Sequence[str] = ()  # what was left out of them, a line each


@dataclass(frozen=True)
class ComparisonRow:
    spec: TrialSpec  # from the first machine that has it
    results: tuple[MachineResult, ...]  # one for each machine that has the configuration, in order
    baseline_batch: int  # of the float32 run that speed-ups are over
    is_whole: bool  # throughput is that of whole runs, validation included

    @property
    def unit(self) -> str:
        return unit_of(self.spec.workload)

    def result_on(self, machine: ComparedMachine) -> MachineResult | None:
        return next((result for result in self.results if result.machine == machine.name), None)


@dataclass(frozen=True)
class Incomparable:
    """Configurations of a machine that no other machine has."""

    machine: ComparedMachine
    reason: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class GeometricMeans:
    """Geometric means over configurations of a machine's figures relative to those of the first."""

    machine: ComparedMachine
    speed: float | None = None  # > 1 is faster; None, as are the others, if no configuration has a figure
    num_speeds: int = 0  # configurations in it
    energy: float | None = None  # < 1 takes less
    num_energies: int = 0
    work_per_price: float | None = None  # > 1 does more for one of the currency, by the hourly prices
    best: float | None = None  # each machine's fastest configuration over the first machine's fastest


@dataclass(frozen=True)
class MachineComparison:
    machines: tuple[ComparedMachine, ...]  # the others are compared with the first
    groups: dict[str, tuple[ComparisonRow, ...]]  # by title; rows differ in precision, loss scale and batch size only
    incomparable: tuple[Incomparable, ...]
    margin: float  # how far from 1 a ratio still is "the same"
    prices: MachinePrices = MachinePrices()

    @property
    def rows(self) -> list[ComparisonRow]:
        return [row for rows in self.groups.values() for row in rows]

    @property
    def results(self) -> list[tuple[ComparisonRow, MachineResult]]:
        return [(row, result) for row in self.rows for result in row.results]

    @property
    def machine_notes(self) -> list[MachineNote]:
        """Return what must be said of configurations that several machines with the same GPU model measured."""
        return machine_notes(
            [(each.trials[0], each.throughput) for each in row.results if each.trials and each.throughput]
            for row in self.rows
        )

    def best_of(self, machine: ComparedMachine) -> dict[str, tuple[MachineResult, MachineResult, float]]:
        """Return the fastest results with float32 weights of the first and another machine, and their ratio, by title.

        They may differ in precision and batch size.
        """
        found = dict[str, tuple[MachineResult, MachineResult, float]]()
        for title, rows in self.groups.items():
            sides = [
                [
                    each
                    for each in side.results.values()
                    if each.group_key == rows[0].results[0].group_key
                    and (each.status, each.is_timed) == ("ok", True)
                    and precision_row(each.spec.precision).keeps_float32_weights
                ]
                for side in (self.machines[0], machine)
            ]
            sides = [
                [each for each in side if each.run_seconds] or side for side in sides
            ]  # whole runs, if there are any
            if all(sides):
                here, there = (
                    min(side, key=lambda each: fmean(each.run_seconds or each.unit_seconds)) for side in sides
                )
                ratio = _verdict(self.machines[0].name, here, there, self.margin).ratio
                found |= {title: (here, there, ratio.value)} if ratio is not None else {}
        return found

    def means_of(self, machine: ComparedMachine) -> GeometricMeans:
        """Return the geometric means of another machine's figures relative to the first machine's."""
        pairs = [(row.result_on(self.machines[0]), row.result_on(machine)) for row in self.rows]
        results = [result for _, result in pairs if result is not None]
        speeds = [result.ratio.value for result in results if result.ratio is not None]
        energies = [result.energy_ratio.value for result in results if result.energy_ratio is not None]
        works = [
            result.units_per_price / base.units_per_price
            for base, result in pairs
            if base and result and result.ratio and result.units_per_price and base.units_per_price
        ]
        best = [ratio for *_, ratio in self.best_of(machine).values()]
        means = [geometric_mean(each) if each else None for each in (speeds, energies, works, best)]
        return GeometricMeans(machine, means[0], len(speeds), means[1], len(energies), *means[2:])

    @property
    def is_without_intervals(self) -> bool:
        """Return whether no ratio has an interval, as each configuration was measured in one process."""
        ratios = [result.ratio for _, result in self.results if result.ratio is not None]
        return bool(ratios) and all(ratio.n < MIN_PROCESSES for ratio in ratios)


def measured_machines(origins: Sequence[Origin]) -> list[list[ComparedMachine]]:
    """Return the machines of each origin: one, or several if its trials are of several.

    Machines with one GPU model that share no workload are one side: each figure still is of one machine.
    """
    sides: list[list[list[Trial]]] = []  # of each origin, the trials of each
    for origin in origins:
        own: list[list[Trial]] = []
        for trials in grouped(origin.trials, lambda trial: trial.environment.fingerprint).values():
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
    published: PublishedMachine, workloads: Names[str] | None = None, precisions: Names[str] | None = None
) -> ComparedMachine:
    """Return a GPU's published figures as a machine: of these workloads and precisions only; None takes all."""
    name = f"{short_device_name(published.gpu)} (published)"
    results: dict[Key, MachineResult] = {}
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
        result = MachineResult(
            machine=name,
            spec=figure.spec,
            status=source.outcome,
            run_seconds=(source.seconds,) if source.seconds is not None else (),
            baseline_batch=baseline.batch_size if baseline is not None and has_other_baseline else None,
        )
        results.setdefault(result.key, result)
    traits = {
        "device": published.gpu,
        "published in": "; ".join(f"{suite.name}: {suite.source}" for suite in published.suites),
        "source's machine": "; ".join(f"{suite.name}: {suite.machine}" for suite in published.suites),
    }
    return ComparedMachine(name, results, traits, is_published=True, notes=tuple(notes))


def _measured(name: str, origin: Origin, collection: Collection) -> ComparedMachine:
    by_key: dict[Key, dict[str, list[Row]]] = {}
    for config in collection.configurations:
        spec = config.trial.spec
        # Seeds of one training run are repetitions; other protocols and lengths are other measurements.
        way = f"{spec.without_extras.protocol} {spec.recipe}"
        by_key.setdefault(MachineResult(name, spec, "ok").key, {}).setdefault(way, []).append(config)
    results, num_left_out = {}, 0
    for key, ways in by_key.items():
        candidates = [_measured_result(name, rows) for rows in ways.values()]
        results[key] = max(candidates, key=lambda e: (e.is_timed, len(e.run_seconds), len(e.unit_seconds)))
        num_left_out += len(candidates) - 1
    notes = [*origin.notes, *collection.notes]
    if num_left_out:
        count = "1 configuration was" if num_left_out == 1 else f"{num_left_out} configurations were"
        notes.append(f"{count} measured in several ways: the one with the most processes, or the whole run, counts")
    traits = {"records": PurePath(origin.name).name or origin.name} | _traits(collection)
    return ComparedMachine(name, results, traits, notes=tuple(notes))


def _measured_result(name: str, rows: Sequence[Row]) -> MachineResult:
    trials = [trial for row in rows for trial in row.trials]
    shown = next((trial for trial in trials if trial.status != "ok"), trials[0])
    is_training = shown.spec.kind == "training"
    rates = [throughput_of(trial) for trial in trials if is_training or was_timed(trial)]
    result = MachineResult(
        machine=name,
        spec=shown.spec,
        status=shown.status,
        message=shown.message,
        unit_seconds=tuple(1 / rate for rate in rates if rate),
        speedup=None if is_training else rows[0].speedup_estimate,
        trials=tuple(trials),
        unit_joules=tuple(joules for trial in trials if (joules := joules_per_unit(trial))),
    )
    return _with_wall_time(result, shown) if is_training else result


def _with_wall_time(result: MachineResult, shown: Trial) -> MachineResult:
    """Return the result of training runs with the wall times and the units of whole ones."""
    whole = [trial for trial in result.trials if training_metrics.is_whole(trial)]
    totals = [split.total for trial in whole if (split := training_metrics.split(trial)) and split.total > 0]
    units, cut = None, ""
    if whole and whole[0].facts is not None:
        samples = sum(epoch.num_samples for rank in whole[0].ranks for epoch in rank.epochs)
        units = samples * whole[0].facts.units_per_sample
    if len(whole) < len(result.trials):
        cut = training_metrics.length_in_words(shown) + ("" if shown.status == "ok" else f", {shown.status}")
    return replace(result, run_seconds=tuple(totals) if len(totals) == len(result.trials) else (), units=units, cut=cut)


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


def compare_machines(
    machines: Sequence[ComparedMachine], margin: float | None = None, prices: MachinePrices = MachinePrices()
) -> MachineComparison:
    """Compare at least two machines with the first one; a ratio within the margin of 1 is "the same"."""
    cards = set[tuple[str | None, ...]]().union(*(each.cards for m in machines for each in m.results.values()))
    margin = margin or (MARGIN_OF_CARDS if len(cards) > 1 else MARGIN)
    counts = Counter(key for machine in machines for key in machine.results)
    groups: dict[Key, list[ComparisonRow]] = {}
    for key, count in counts.items():
        if count > 1:
            groups.setdefault(key[3:], []).append(_row(machines, key, margin, prices))
    titled: dict[str, tuple[ComparisonRow, ...]] = {}
    kinds = {row.spec.kind for rows in groups.values() for row in rows}
    for rows in groups.values():
        rows.sort(key=lambda row: (row.spec.batch_size, precision_sort_key(row.spec.precision), row.spec.loss_scale))
        spec = rows[0].spec
        kind = "training runs" if spec.kind == "training" and len(kinds) > 1 else ""
        title = ", ".join(part for part in (spec.workload, kind, *spec.techniques, spec.world_size_label) if part)
        titled[free_name(title, titled)] = tuple(rows)
    alone = {key for key, count in counts.items() if count == 1}
    return MachineComparison(tuple(machines), titled, tuple(_incomparable(machines, alone)), margin, prices)


def _row(machines: Sequence[ComparedMachine], key: Key, margin: float, prices: MachinePrices) -> ComparisonRow:
    present = [machine for machine in machines if key in machine.results]
    first, base, spec = machines[0], machines[0].results.get(key), present[0].results[key].spec
    timed = [each for machine in present if (each := machine.results[key]).is_timed]
    is_whole = bool(timed) and all(each.run_seconds for each in timed)
    source_batches = (machine.results[key].baseline_batch for machine in present)
    batch = next(filter(None, source_batches), spec.batch_size)
    units = _units_of(machines, key)
    results = []
    for machine in present:
        result = machine.results[key]
        if units and result.run_seconds and (is_whole or not result.unit_seconds):
            rates = [units / seconds for seconds in result.run_seconds]
        else:
            rates = [1 / seconds for seconds in result.unit_seconds]
        result = replace(result, throughput=estimate(rates), speedup=_speedup(machine, result, batch))
        if machine is not first:
            result = _beside(base, result, _verdict(first.name, base, result, margin))
        results.append(_priced(result, prices))
    return ComparisonRow(spec, tuple(results), batch, is_whole)


def _units_of(machines: Sequence[ComparedMachine], key: Key) -> float | None:
    """Return the units of a whole run: the same on every machine and in every precision."""
    known = (each for machine in machines for each in machine.results.values() if each.units)
    return next((each.units for each in known if each.key[2:] == key[2:]), None)


def _beside(base: MachineResult | None, result: MachineResult, verdict: Verdict) -> MachineResult:
    """Return a result with what is said of it beside the first machine's."""
    energy_ratio = None
    if base is not None and base.unit_joules and result.joules and verdict.ratio is not None:
        energy_ratio = independent_ratio(result.unit_joules, base.unit_joules)
    broke = base is not None and base.status == "ok" and result.status in _FAILED
    words = _words(verdict, base, result)
    return replace(result, verdict=verdict, words=words, broke=broke, energy_ratio=energy_ratio)


def _priced(result: MachineResult, prices: MachinePrices) -> MachineResult:
    per_hour, per_kwh, work, per_energy = prices.per_hour.get(result.machine), prices.per_kwh, None, None
    if per_hour and result.throughput and result.status == "ok":
        work = SECONDS_PER_HOUR * result.throughput.value / per_hour
    if per_kwh and result.joules:
        per_energy = JOULES_PER_KWH / result.joules.value / per_kwh
    return replace(result, units_per_price=work, units_per_energy_price=per_energy)


def _verdict(first: str, base: MachineResult | None, result: MachineResult, margin: float) -> Verdict:
    if base is None:
        return Verdict("incomparable", f"{first} has no such configuration", None)
    sides = (base, result)
    failures = [each for each in sides if each.status == "diverged" or not each.is_timed]
    if failures:
        parts = [
            f"{each.status} on {each.machine}" + (f": {each.message}" if each.message else "") for each in failures
        ]
        if len(failures) == len(sides) and (base.status, base.message) == (result.status, result.message):
            parts = [f"{result.status} on both" + (f": {result.message}" if result.message else "")]
        return Verdict("incomparable", "; ".join(parts), None)
    ratio = _times_as_fast(base, result)
    if ratio is None or (base.spec.recipe != result.spec.recipe and not (base.run_seconds and result.run_seconds)):
        lengths = [f"{f'cut short ({each.cut})' if each.cut else 'a whole run'} on {each.machine}" for each in sides]
        return Verdict("incomparable", f"{', '.join(lengths)}: these times are of different work", None)
    if ratio.n < MIN_PROCESSES:
        few = [each.machine for each in sides if max(len(each.run_seconds), len(each.unit_seconds)) < MIN_PROCESSES]
        return Verdict("inconclusive", f"one process on {' and on '.join(few)}: no interval", ratio)
    return _verdict_on(ratio, margin, is_one_card=base.cards == result.cards)


def _verdict_on(ratio: Estimate, margin: float, *, is_one_card: bool) -> Verdict:
    found = verdict_of(ratio, margin)
    is_beyond = ratio.low > 1 + margin or ratio.high < 1 - margin
    if is_one_card or is_beyond or found.kind not in ("faster", "slower"):
        return found
    reason = f"{found.reason}, and reaches into the ±{format_share(margin)} by which cards may differ"
    return Verdict("inconclusive", reason, ratio)


def _times_as_fast(base: MachineResult, result: MachineResult) -> Estimate | None:
    """Return how many times as fast a result is; whole runs at two batches do the same work, the same samples."""
    if base.run_seconds and result.run_seconds:
        return independent_ratio(base.run_seconds, result.run_seconds)
    if base.unit_seconds and result.unit_seconds:
        return independent_ratio(base.unit_seconds, result.unit_seconds)
    return None


def _words(verdict: Verdict, base: MachineResult | None, result: MachineResult) -> str:
    """Return a verdict in words: which side failed if that is why there is none, and that one run gives none."""
    if verdict.ratio is not None and verdict.ratio.n < MIN_PROCESSES:
        is_each = base is not None and max(len(base.trials), len(result.trials)) < MIN_PROCESSES
        return "one run each" if is_each else "one run on a side"
    if verdict.kind != "incomparable":
        is_of_card = verdict.kind in ("faster", "slower") and base is not None and base.cards != result.cards
        return f"{verdict.kind}{THIS_CARD if is_of_card else ''}"
    if base is None or (base.status, result.status) == ("ok", "ok"):
        return "not comparable"
    if base.status == result.status:
        return f"both {result.status}"
    return f"{base.status} on the first" if result.status == "ok" else result.status


def _speedup(machine: ComparedMachine, result: MachineResult, batch: int) -> Estimate | None:
    """Return the speed-up over the same machine's float32 at a batch."""
    if result.spec.precision == BASELINE:
        return None
    if batch == result.spec.batch_size and result.speedup is not None:
        return result.speedup
    baselines = (each for each in machine.results.values() if each.spec.precision == BASELINE)
    same_group = (each for each in baselines if each.group_key == result.group_key)
    base = next((each for each in same_group if each.spec.batch_size == batch), None)
    return None if base is None else _times_as_fast(base, result)


def _incomparable(machines: Sequence[ComparedMachine], alone: set[Key]) -> Iterator[Incomparable]:
    results = (result for machine in machines for result in machine.results.values())
    by_workload = grouped(results, lambda result: result.spec.workload)
    for machine in machines:
        labels: dict[str, dict[str, None]] = {}
        for key, result in machine.results.items():
            if key in alone:
                others = [each for each in by_workload[result.spec.workload] if each.machine != machine.name]
                reason = _why_alone(result, others[:50])  # of many, the first are near enough
                labels.setdefault(reason, {})[result.spec.label] = None
        for reason, names in labels.items():
            yield Incomparable(machine, reason, tuple(names))


def _why_alone(result: MachineResult, others: Sequence[MachineResult]) -> str:
    """Return what differs in the nearest configuration of another machine."""

    def differences(other: MachineResult) -> list[str]:
        return [own[0] for own, theirs in zip(result.key, other.key, strict=True) if own != theirs]

    if not others:
        return "no other machine has this workload"
    nearest = min(others, key=lambda other: len(differences(other)))
    if "kind" in differences(nearest):
        kinds = {"steady": "steady-state steps", "training": "a training run"}
        return f"{kinds[result.spec.kind]} here, {kinds[nearest.spec.kind]} on {nearest.machine}"
    return f"the nearest configuration of {nearest.machine} differs in {', '.join(differences(nearest))}"
