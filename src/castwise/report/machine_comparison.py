"""Compare machines: the ratio of each configuration's times with its verdict, and what cannot be compared and why.

Energy per unit of throughput and, if prices are known, work per money are compared next to it.

The other machines are compared with the first one. Processes of two machines are never measured in one session, so
that a ratio is one of two independent means: its interval does not include what a machine did at another time.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean

from castwise.analysis.energy import JOULES_PER_KWH, SECONDS_PER_HOUR
from castwise.analysis.result_table import MARGIN
from castwise.analysis.statistics import MIN_PROCESSES, Estimate, Verdict, estimate, independent_ratio, verdict_of
from castwise.records.store import free_name
from castwise.registry.precisions import BASELINE, precision_sort_key
from castwise.registry.workloads import unit_of
from castwise.report.machine_notes import MachineNote, machine_notes
from castwise.report.machines import ComparedMachine, Entry, Key
from castwise.spec.trial import TrialSpec

_FAILED = ("oom", "timeout", "crashed", "diverged")


@dataclass(frozen=True)
class MachinePrices:
    """Prices in one currency."""

    per_hour: Mapping[str, float] = field(default_factory=dict[str, float])  # of a whole machine, by the machine's name
    per_kwh: float | None = None


@dataclass(frozen=True)
class MachineResult:
    """A configuration on a machine that has it."""

    machine: ComparedMachine
    entry: Entry
    throughput: Estimate | None = None  # units per second, of whole runs if all are or if it is published
    verdict: Verdict | None = None  # None on the first machine
    words: str = ""  # the verdict in words; empty on the first machine
    speedup: Estimate | None = None  # over float32 on the same machine
    broke: bool = False  # it ended well on the first machine and did not here
    joules: Estimate | None = None  # GPU energy per unit of throughput; None if unknown, or if it did not end well
    energy_ratio: Estimate | None = None  # relative to the first machine, < 1 takes less
    units_per_price: float | None = None  # of throughput, for one of the currency, by the machine's hourly price
    units_per_energy_price: float | None = None  # the same by the price of the GPUs' energy; None if unknown

    @property
    def ratio(self) -> Estimate | None:
        """Return the speed relative to the first machine, > 1 is faster; None if the times cannot be compared."""
        return None if self.verdict is None else self.verdict.ratio


@dataclass(frozen=True)
class ComparisonRow:
    """One configuration on several machines."""

    spec: TrialSpec  # from the first machine that has it
    results: tuple[MachineResult, ...]  # one for each machine that has the configuration, in order
    baseline_batch: int  # of the float32 run that speed-ups are over
    is_whole: bool  # throughput is that of whole runs, validation included

    @property
    def unit(self) -> str:
        """Return what throughput counts."""
        return unit_of(self.spec.workload)

    def result_on(self, machine: ComparedMachine) -> MachineResult | None:
        """Return the result on a machine, None if it does not have the configuration."""
        return next((result for result in self.results if result.machine is machine), None)


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


@dataclass(frozen=True)
class MachineComparison:
    """A comparison of machines."""

    machines: tuple[ComparedMachine, ...]  # the others are compared with the first
    groups: dict[str, tuple[ComparisonRow, ...]]  # by title; rows differ in precision, loss scale and batch size only
    incomparable: tuple[Incomparable, ...]
    margin: float  # how far from 1 a ratio still is "the same"
    prices: MachinePrices = MachinePrices()

    @property
    def rows(self) -> list[ComparisonRow]:
        """Return the rows of all groups."""
        return [row for rows in self.groups.values() for row in rows]

    @property
    def results(self) -> list[tuple[ComparisonRow, MachineResult]]:
        """Return the results of all rows."""
        return [(row, result) for row in self.rows for result in row.results]

    @property
    def machine_notes(self) -> list[MachineNote]:
        """Return what must be said of configurations that several machines with the same GPU model measured."""
        return machine_notes(
            [(each.entry.trials[0], each.throughput) for each in row.results if each.entry.trials and each.throughput]
            for row in self.rows
        )

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
        speed, energy, work = (geometric_mean(each) if each else None for each in (speeds, energies, works))
        return GeometricMeans(machine, speed, len(speeds), energy, len(energies), work)

    @property
    def is_without_intervals(self) -> bool:
        """Return whether no ratio has an interval, as each configuration was measured in one process."""
        ratios = [result.ratio for _, result in self.results if result.ratio is not None]
        return bool(ratios) and all(ratio.n < MIN_PROCESSES for ratio in ratios)


def compare_machines(
    machines: Sequence[ComparedMachine], margin: float = MARGIN, prices: MachinePrices = MachinePrices()
) -> MachineComparison:
    """Compare at least two machines with the first one; a ratio within the margin of 1 is "the same"."""
    counts = Counter(key for machine in machines for key in machine.entries)
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
    present = [(machine, machine.entries[key]) for machine in machines if key in machine.entries]
    first, base, spec = machines[0], machines[0].entries.get(key), present[0][1].spec
    timed = [entry for _, entry in present if entry.is_timed]
    is_whole = bool(timed) and all(entry.run_seconds for entry in timed)
    source_batches = (entry.baseline_batch for _, entry in present if entry.baseline_batch is not None)
    batch = next(source_batches, spec.batch_size)
    # The units of a whole run are the same on every machine and in every precision.
    entries = (entry for machine in machines for entry in machine.entries.values() if entry.units)
    alike = (entry for entry in entries if entry.group_key == key[3:] and entry.spec.batch_size == spec.batch_size)
    units = next((entry.units for entry in alike), None)
    results = []
    for machine, entry in present:
        is_other = machine is not first
        verdict = _verdict(first, base, machine, entry, margin) if is_other else None
        if units and entry.run_seconds and (is_whole or not entry.unit_seconds):
            throughput = estimate([units / seconds for seconds in entry.run_seconds])
        else:
            throughput = estimate([1 / seconds for seconds in entry.unit_seconds])
        is_ok, per_hour, per_kwh = entry.status == "ok", prices.per_hour.get(machine.name), prices.per_kwh
        joules, energy_ratio = estimate(entry.unit_joules) if is_ok else None, None
        if joules and verdict is not None and verdict.ratio is not None and base is not None and base.unit_joules:
            energy_ratio = independent_ratio(entry.unit_joules, base.unit_joules)
        per_price = SECONDS_PER_HOUR * throughput.value / per_hour if throughput and per_hour and is_ok else None
        results.append(
            MachineResult(
                machine=machine,
                entry=entry,
                throughput=throughput,
                verdict=verdict,
                words="" if verdict is None else _words(verdict, base, entry),
                speedup=_speedup(machine, entry, batch),
                broke=is_other and base is not None and base.status == "ok" and entry.status in _FAILED,
                joules=joules,
                energy_ratio=energy_ratio,
                units_per_price=per_price,
                units_per_energy_price=JOULES_PER_KWH / joules.value / per_kwh if joules and per_kwh else None,
            )
        )
    return ComparisonRow(spec, tuple(results), batch, is_whole)


def _verdict(
    first: ComparedMachine, base: Entry | None, machine: ComparedMachine, entry: Entry, margin: float
) -> Verdict:
    if base is None:
        return Verdict("incomparable", f"{first.name} has no such configuration", None)
    sides = ((first, base), (machine, entry))
    failures = [(side, one) for side, one in sides if one.status == "diverged" or not one.is_timed]
    if failures:
        parts = [f"{one.status} on {side.name}" + (f": {one.message}" if one.message else "") for side, one in failures]
        if len(failures) == len(sides) and (base.status, base.message) == (entry.status, entry.message):
            parts = [f"{entry.status} on both" + (f": {entry.message}" if entry.message else "")]
        return Verdict("incomparable", "; ".join(parts), None)
    if base.run_seconds and entry.run_seconds:
        ratio = independent_ratio(base.run_seconds, entry.run_seconds)
    elif base.unit_seconds and entry.unit_seconds and base.spec.recipe == entry.spec.recipe:
        ratio = independent_ratio(base.unit_seconds, entry.unit_seconds)
    else:
        lengths = [f"{f'cut short ({one.cut})' if one.cut else 'a whole run'} on {side.name}" for side, one in sides]
        return Verdict("incomparable", f"{', '.join(lengths)}: these times are of different work", None)
    if ratio.n < MIN_PROCESSES:
        few = [side.name for side, one in sides if max(len(one.run_seconds), len(one.unit_seconds)) < MIN_PROCESSES]
        return Verdict("inconclusive", f"one process on {' and on '.join(few)}: no interval", ratio)
    return verdict_of(ratio, margin)


def _words(verdict: Verdict, base: Entry | None, entry: Entry) -> str:
    """Return a verdict in words: which side failed if that is why there is none, and that one run gives none."""
    if verdict.ratio is not None and verdict.ratio.n < MIN_PROCESSES:
        is_each = base is not None and max(len(base.trials), len(entry.trials)) < MIN_PROCESSES
        return "one run each" if is_each else "one run on a side"
    if verdict.kind != "incomparable":
        return verdict.kind
    if base is None or (base.status, entry.status) == ("ok", "ok"):
        return "not comparable"
    if base.status == entry.status:
        return f"both {entry.status}"
    return f"{base.status} on the first" if entry.status == "ok" else entry.status


def _speedup(machine: ComparedMachine, entry: Entry, batch: int) -> Estimate | None:
    """Return the speed-up over the same machine's float32 at a batch."""
    if entry.spec.precision == BASELINE:
        return None
    if batch == entry.spec.batch_size and entry.speedup is not None:
        return entry.speedup
    baselines = (each for each in machine.entries.values() if each.spec.precision == BASELINE)
    same_group = (each for each in baselines if each.group_key == entry.group_key)
    base = next((each for each in same_group if each.spec.batch_size == batch), None)
    if base is not None and base.run_seconds and entry.run_seconds:
        # Runs at two batches do the same work: the same samples, as often.
        return independent_ratio(base.run_seconds, entry.run_seconds)
    if base is not None and base.unit_seconds and entry.unit_seconds:
        return independent_ratio(base.unit_seconds, entry.unit_seconds)
    return None


def _incomparable(machines: Sequence[ComparedMachine], alone: set[Key]) -> Iterator[Incomparable]:
    by_workload: dict[str, list[tuple[ComparedMachine, Entry]]] = {}
    for machine in machines:
        for entry in machine.entries.values():
            by_workload.setdefault(entry.spec.workload, []).append((machine, entry))
    for machine in machines:
        labels: dict[str, list[str]] = {}
        for key, entry in machine.entries.items():
            if key in alone:
                others = [each for each in by_workload[entry.spec.workload] if each[0] is not machine]
                reason = _why_alone(entry, others[:50])  # of many, the first are near enough
                labels.setdefault(reason, []).append(entry.spec.label)
        for reason, names in labels.items():
            yield Incomparable(machine, reason, tuple(dict.fromkeys(names)))


def _why_alone(entry: Entry, others: Sequence[tuple[ComparedMachine, Entry]]) -> str:
    """Return what differs in the nearest configuration of another machine."""
    if not others:
        return "no other machine has this workload"
    candidates = []
    for machine, other in others:
        pairs = zip(entry.key, other.key, strict=True)
        candidates.append(([own[0] for own, theirs in pairs if own != theirs], machine, other))
    differences, machine, other = min(candidates, key=lambda candidate: len(candidate[0]))
    if "kind" in differences:
        kinds = {"steady": "steady-state steps", "training": "a training run"}
        return f"{kinds[entry.spec.kind]} here, {kinds[other.spec.kind]} on {machine.name}"
    return f"the nearest configuration of {machine.name} differs in {', '.join(differences)}"
