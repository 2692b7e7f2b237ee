"""Machines side by side: the ratio of each cell's times with its verdict, and what cannot be compared and why.

The first machine is what the others are compared with. No process of one machine ever takes turns with one of
another, so that a ratio is one of two independent means: what the machines did at other times is not in its interval.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from castwise.analysis.result_table import MARGIN
from castwise.analysis.statistics import (
    MIN_PROCESSES,
    Estimate,
    Verdict,
    VerdictKind,
    estimate,
    independent_ratio,
    verdict_of,
)
from castwise.records.store import free_name
from castwise.registry.precisions import BASELINE, precision_sort_key
from castwise.registry.workloads import unit_of
from castwise.report.machines import ASKED, ComparedMachine, Entry
from castwise.spec.trial import TrialSpec

_FAILED = ("oom", "timeout", "crashed", "diverged")
_MOST_LOOKED_AT = 50  # cells of the other machine, for the one that differs least
_MOST_PRECISIONS = 4  # in the headline


@dataclass(frozen=True)
class MachineResult:
    """A cell on one machine.

    Attributes:
        machine: The machine.
        entry: The cell; None where that machine has none.
        throughput: Units per second: of the timed steps, or of the whole run where all are whole runs, and where it is
            published.
        ratio: How many times as fast as on the first machine; None on the first, and where that cannot be said.
        verdict: What that says; None on the first machine and where there is no cell.
        speedup: Over float32 on the same machine; None for float32, and without it.
        broke: Whether it ended well on the first machine and did not here.
    """

    machine: ComparedMachine
    entry: Entry | None
    throughput: Estimate | None = None
    ratio: Estimate | None = None
    verdict: Verdict | None = None
    speedup: Estimate | None = None
    broke: bool = False


@dataclass(frozen=True)
class ComparisonRow:
    """One cell on all machines.

    Attributes:
        spec: What it asks, as the first machine that has it does.
        results: A place a machine, in order.
        baseline_batch: The batch of the float32 run that speed-ups are over.
        is_whole: Whether throughput is that of whole runs, validation included.
    """

    spec: TrialSpec
    results: tuple[MachineResult, ...]
    baseline_batch: int
    is_whole: bool

    @property
    def unit(self) -> str:
        """Return what throughput counts."""
        return unit_of(self.spec.workload)


@dataclass(frozen=True)
class Incomparable:
    """Cells of a machine that are compared with nothing.

    Attributes:
        machine: The machine that has them.
        reason: Why.
        labels: The cells.
    """

    machine: ComparedMachine
    reason: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class MachineComparison:
    """Machines side by side.

    Attributes:
        machines: The machines; the first is what the others are compared with.
        groups: Lines by topic, each under a title: they differ in precision, loss scale and batch size alone.
        incomparable: What is compared with nothing.
        margin: How far from 1 a ratio still is "the same".
    """

    machines: tuple[ComparedMachine, ...]
    groups: dict[str, tuple[ComparisonRow, ...]]
    incomparable: tuple[Incomparable, ...]
    margin: float

    @property
    def rows(self) -> list[ComparisonRow]:
        """Return all lines."""
        return [line for lines in self.groups.values() for line in lines]

    @property
    def verdicts(self) -> list[Verdict]:
        """Return all verdicts."""
        return [place.verdict for line in self.rows for place in line.results if place.verdict is not None]

    @property
    def slower(self) -> list[tuple[ComparisonRow, MachineResult]]:
        """Return the cells that are proven slower than on the first machine, or ended well there and not here."""
        return [
            (line, place)
            for line in self.rows
            for place in line.results
            if place.broke or (place.verdict is not None and place.verdict.kind == "slower")
        ]


def compare_machines(machines: Sequence[ComparedMachine], margin: float = MARGIN) -> MachineComparison:
    """Return machines side by side.

    Args:
        machines: Two at the least; the first is what the others are compared with.
        margin: How far from 1 a ratio still is "the same".
    """
    questions = dict.fromkeys(question for machine in machines for question in machine.entries)
    shared = [q for q in questions if sum(q in machine.entries for machine in machines) > 1]
    topics: dict[tuple[object, ...], list[ComparisonRow]] = {}
    for question in shared:
        entries = [machine.entries.get(question) for machine in machines]
        line = _line(machines, entries, margin)
        topics.setdefault(question[3:], []).append(line)
    titled: dict[str, tuple[ComparisonRow, ...]] = {}
    for lines in topics.values():
        lines.sort(
            key=lambda line: (line.spec.batch_size, precision_sort_key(line.spec.precision), line.spec.loss_scale)
        )
        titled[free_name(_title(lines[0].spec), titled)] = tuple(lines)
    return MachineComparison(tuple(machines), titled, tuple(_refusals(machines, set(shared))), margin)


def _line(machines: Sequence[ComparedMachine], entries: Sequence[Entry | None], margin: float) -> ComparisonRow:
    first = entries[0]
    there = [entry for entry in entries if entry is not None]
    batches = [entry.baseline_batch for entry in there if entry.baseline_batch is not None]
    batch = batches[0] if batches else there[0].spec.batch_size
    timed = [entry for entry in there if entry.is_timed]
    is_whole = bool(timed) and all(entry.run_seconds for entry in timed)
    units = _units(machines, there[0])
    places = []
    for machine, entry in zip(machines, entries, strict=True):
        if entry is None:
            places.append(MachineResult(machine, None))
            continue
        ratio = verdict = None
        if machine is not machines[0]:
            ratio, verdict = _verdict(machines[0], first, machine, entry, margin)
        places.append(
            MachineResult(
                machine=machine,
                entry=entry,
                throughput=_throughput(entry, is_whole, units),
                ratio=ratio,
                verdict=verdict,
                speedup=_speedup(machine, entry, batch),
                broke=first is not None and first.status == "ok" and machine is not machines[0] and _is_broken(entry),
            )
        )
    return ComparisonRow(there[0].spec, tuple(places), batch, is_whole)


def _units(machines: Sequence[ComparedMachine], entry: Entry) -> float | None:
    """Return the units of a whole run like this, from any machine where one was measured, in whatever precision."""
    alike = (
        other.units
        for machine in machines
        for other in machine.entries.values()
        if other.units and other.topic == entry.topic and other.spec.batch_size == entry.spec.batch_size
    )
    return next(alike, None)


def _is_broken(entry: Entry) -> bool:
    return entry.status in _FAILED


def _throughput(entry: Entry, is_whole: bool, units: float | None) -> Estimate | None:
    """Return units a second: of whole runs where all are, and where it is published, as sources have no other."""
    by_run = entry.run_seconds and units and (is_whole or not entry.unit_seconds)
    seconds = [each / units for each in entry.run_seconds] if by_run and units else entry.unit_seconds
    return estimate([1 / each for each in seconds])


def _verdict(
    first: ComparedMachine, base: Entry | None, machine: ComparedMachine, entry: Entry, margin: float
) -> tuple[Estimate | None, Verdict]:
    found = _ratio(first, base, machine, entry)
    if isinstance(found, str):
        return None, Verdict("incomparable", found, None)
    verdict = verdict_of(found, margin)
    if found.n < MIN_PROCESSES:
        alone = [
            each.name
            for each, one in ((first, base), (machine, entry))
            if one is not None and _count(one) < MIN_PROCESSES
        ]
        reason = f"one process on {' and on '.join(alone)}: no interval"
        verdict = Verdict("inconclusive", reason, found)
    return found, verdict


def _count(entry: Entry) -> int:
    return max(len(entry.run_seconds), len(entry.unit_seconds))


def _ratio(first: ComparedMachine, base: Entry | None, machine: ComparedMachine, entry: Entry) -> Estimate | str:
    """Return how many times as fast a cell is as the first machine's, or why that cannot be said."""
    if base is None:
        return f"{first.name} has no such cell"
    for side, one in ((first, base), (machine, entry)):
        if not one.is_timed:
            return f"{one.status} on {side.name}" + (f": {one.message}" if one.message else "")
    if base.run_seconds and entry.run_seconds:
        return independent_ratio(base.run_seconds, entry.run_seconds)
    if base.unit_seconds and entry.unit_seconds and base.spec.recipe == entry.spec.recipe:
        return independent_ratio(base.unit_seconds, entry.unit_seconds)
    return f"{_length(base)} on {first.name}, {_length(entry)} on {machine.name}: these times are of different work"


def _length(entry: Entry) -> str:
    return f"cut short ({entry.cut})" if entry.cut else "a whole run"


def _speedup(machine: ComparedMachine, entry: Entry, batch: int) -> Estimate | None:
    """Return the speed-up over the same machine's float32 at a batch."""
    if entry.spec.precision == BASELINE:
        return None
    if batch == entry.spec.batch_size and entry.speedup is not None:
        return entry.speedup
    base = next(
        (
            other
            for other in machine.entries.values()
            if (other.spec.precision, other.spec.batch_size) == (BASELINE, batch) and other.topic == entry.topic
        ),
        None,
    )
    if base is None or not (base.is_timed and entry.is_timed):
        return None
    if base.run_seconds and entry.run_seconds:
        # Of runs at two batches the work is the same: the same samples, as often.
        return independent_ratio(base.run_seconds, entry.run_seconds)
    if base.unit_seconds and entry.unit_seconds:
        return independent_ratio(base.unit_seconds, entry.unit_seconds)
    return None


def _refusals(machines: Sequence[ComparedMachine], shared: set[tuple[object, ...]]) -> Iterator[Incomparable]:
    by_workload: dict[str, list[tuple[ComparedMachine, Entry]]] = {}
    for machine in machines:
        for entry in machine.entries.values():
            by_workload.setdefault(entry.spec.workload, []).append((machine, entry))
    for machine in machines:
        labels: dict[str, list[str]] = {}
        for question, entry in machine.entries.items():
            if question not in shared:
                others = [each for each in by_workload[entry.spec.workload] if each[0] is not machine]
                labels.setdefault(_why_alone(entry, others[:_MOST_LOOKED_AT]), []).append(entry.spec.label)
        for reason, of_reason in labels.items():
            yield Incomparable(machine, reason, tuple(dict.fromkeys(of_reason)))


def _why_alone(entry: Entry, others: Sequence[tuple[ComparedMachine, Entry]]) -> str:
    """Return what the nearest cell of another machine differs in."""
    if not others:
        return "no other machine has this workload"
    found = [(_differences(entry, other), machine, other) for machine, other in others]
    names, machine, other = min(found, key=lambda each: len(each[0]))
    if "kind" in names:
        kinds = {"steady": "steady-state steps", "training": "a training run"}
        return f"{kinds[entry.spec.kind]} here, {kinds[other.spec.kind]} on {machine.name}"
    return f"the nearest cell of {machine.name} differs in {', '.join(names)}"


def _differences(entry: Entry, other: Entry) -> list[str]:
    pairs = zip(ASKED, entry.question, other.question, strict=True)
    return [name for name, own, theirs in pairs if own != theirs]


def _title(spec: TrialSpec) -> str:
    parts = [spec.workload, "training runs" if spec.kind == "training" else "", *spec.techniques]
    return ", ".join([*filter(None, parts), *([spec.spread] if spec.spread else [])])


def headline(comparison: MachineComparison) -> str:
    """Return what the comparison comes to: how many times as fast each machine is in each precision."""
    first, *others = comparison.machines
    return " ".join(_sentence(first, machine, comparison) for machine in others)


def is_without_intervals(comparison: MachineComparison) -> bool:
    """Return whether no ratio has an interval, as cells were one process each."""
    compared = [verdict.ratio for verdict in comparison.verdicts if verdict.ratio is not None]
    return bool(compared) and all(ratio.n < MIN_PROCESSES for ratio in compared)


def tally(comparison: MachineComparison) -> str:
    """Return how many ratios say what."""
    counts = Counter(verdict.kind for verdict in comparison.verdicts)
    kinds: tuple[VerdictKind, ...] = get_args(VerdictKind)
    words = ", ".join(f"{counts[kind]} {kind}" for kind in kinds if counts[kind])
    if is_without_intervals(comparison):
        words += (
            "; no ratio has an interval, as cells were one process each: `castwise run --within 1%` measures several"
        )
    return f"Verdicts: {words}." if words else "No cell is common to two machines."


def _sentence(first: ComparedMachine, machine: ComparedMachine, comparison: MachineComparison) -> str:
    ratios: dict[str, list[float]] = {}
    workloads: dict[str, None] = {}
    for line in comparison.rows:
        place = next(each for each in line.results if each.machine is machine)
        if place.ratio is not None:
            ratios.setdefault(line.spec.precision, []).append(place.ratio.value)
            workloads[line.spec.workload] = None
    if not ratios:
        return f"Of {machine.name} no time can be compared with {first.name}'s."
    order = sorted(ratios, key=precision_sort_key)
    told = [
        f"{_span(ratios[name])}{'' if number else ' as fast'} in {name}"
        for number, name in enumerate(order[:_MOST_PRECISIONS])
    ]
    left_out = f" ({len(order) - _MOST_PRECISIONS} more precisions below)" if len(order) > _MOST_PRECISIONS else ""
    names = next(iter(workloads)) if len(workloads) == 1 else f"{len(workloads)} workloads"
    words = told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}"
    return f"Beside {first.name}, {machine.name} is {words}{left_out}, in {names}."


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return f"{low}×" if low == high else f"{low} to {high}×"
