"""Compare machines: the ratio of each configuration's times with its verdict, and what cannot be compared and why.

The other machines are compared with the first one. Processes of two machines are never measured in one session, so
that a ratio is one of two independent means: its interval does not include what a machine did at another time.
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
from castwise.report.machines import KEY_FIELDS, ComparedMachine, Entry
from castwise.spec.trial import TrialSpec

_FAILED = ("oom", "timeout", "crashed", "diverged")
_MAX_CANDIDATES = 50  # entries of other machines that are searched for the one that differs least
_MAX_PRECISIONS = 4  # in the headline


@dataclass(frozen=True)
class MachineResult:
    """A configuration on one machine.

    Attributes:
        machine: The machine.
        entry: Its entry; None if the machine has none.
        throughput: Units per second: of the timed steps; of the whole run if all are whole runs, or if it is published.
        ratio: Speed relative to the first machine, > 1 is faster; None on the first, and if it cannot be compared.
        verdict: What the ratio says; None on the first machine and without an entry.
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
    """One configuration on all machines.

    Attributes:
        spec: The configuration, from the first machine that has it.
        results: A result for each machine, in order.
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
    """Configurations of a machine that no other machine has.

    Attributes:
        machine: The machine that has them.
        reason: Why they cannot be compared.
        labels: The configurations.
    """

    machine: ComparedMachine
    reason: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class MachineComparison:
    """A comparison of machines.

    Attributes:
        machines: The machines; the others are compared with the first.
        groups: Rows by the title of their group: they differ in precision, loss scale and batch size only.
        incomparable: What could not be compared.
        margin: How far from 1 a ratio still is "the same".
    """

    machines: tuple[ComparedMachine, ...]
    groups: dict[str, tuple[ComparisonRow, ...]]
    incomparable: tuple[Incomparable, ...]
    margin: float

    @property
    def rows(self) -> list[ComparisonRow]:
        """Return the rows of all groups."""
        return [row for rows in self.groups.values() for row in rows]

    @property
    def verdicts(self) -> list[Verdict]:
        """Return all verdicts."""
        return [result.verdict for row in self.rows for result in row.results if result.verdict is not None]

    @property
    def slower(self) -> list[tuple[ComparisonRow, MachineResult]]:
        """Return the results that are proven slower than on the first machine, or that ended well only there."""
        return [
            (row, result)
            for row in self.rows
            for result in row.results
            if result.broke or (result.verdict is not None and result.verdict.kind == "slower")
        ]

    @property
    def is_without_intervals(self) -> bool:
        """Return whether no ratio has an interval, as each configuration was measured in one process."""
        ratios = [verdict.ratio for verdict in self.verdicts if verdict.ratio is not None]
        return bool(ratios) and all(ratio.n < MIN_PROCESSES for ratio in ratios)


def compare_machines(machines: Sequence[ComparedMachine], margin: float = MARGIN) -> MachineComparison:
    """Compare machines with the first one.

    Args:
        machines: At least two.
        margin: How far from 1 a ratio still is "the same".
    """
    counts = Counter(key for machine in machines for key in machine.entries)
    groups: dict[tuple[object, ...], list[ComparisonRow]] = {}
    for key, count in counts.items():
        if count > 1:
            entries = [machine.entries.get(key) for machine in machines]
            row = _row(machines, entries, margin)
            groups.setdefault(key[3:], []).append(row)
    titled: dict[str, tuple[ComparisonRow, ...]] = {}
    for rows in groups.values():
        rows.sort(key=lambda row: (row.spec.batch_size, precision_sort_key(row.spec.precision), row.spec.loss_scale))
        titled[free_name(_title(rows[0].spec), titled)] = tuple(rows)
    alone = {key for key, count in counts.items() if count == 1}
    return MachineComparison(tuple(machines), titled, tuple(_incomparable(machines, alone)), margin)


def _row(machines: Sequence[ComparedMachine], entries: Sequence[Entry | None], margin: float) -> ComparisonRow:
    base = entries[0]
    present = [entry for entry in entries if entry is not None]
    timed = [entry for entry in present if entry.is_timed]
    is_whole = bool(timed) and all(entry.run_seconds for entry in timed)
    spec = present[0].spec
    source_batches = [entry.baseline_batch for entry in present if entry.baseline_batch is not None]
    batch = source_batches[0] if source_batches else spec.batch_size
    # The units of a whole run are the same on every machine and in every precision.
    units = next(
        (
            other.units
            for machine in machines
            for other in machine.entries.values()
            if other.units and other.group_key == present[0].group_key and other.spec.batch_size == spec.batch_size
        ),
        None,
    )
    results = []
    for machine, entry in zip(machines, entries, strict=True):
        if entry is None:
            results.append(MachineResult(machine, None))
            continue
        ratio = verdict = None
        if machine is not machines[0]:
            ratio, verdict = _verdict(machines[0], base, machine, entry, margin)
        results.append(
            MachineResult(
                machine=machine,
                entry=entry,
                throughput=_throughput(entry, is_whole, units),
                ratio=ratio,
                verdict=verdict,
                speedup=_speedup(machine, entry, batch),
                broke=machine is not machines[0]
                and base is not None
                and base.status == "ok"
                and entry.status in _FAILED,
            )
        )
    return ComparisonRow(spec, tuple(results), batch, is_whole)


def _throughput(entry: Entry, is_whole: bool, units: float | None) -> Estimate | None:
    """Return units per second, of whole runs if all are, or if there is nothing else, as of published ones."""
    if units and entry.run_seconds and (is_whole or not entry.unit_seconds):
        return estimate([units / seconds for seconds in entry.run_seconds])
    return estimate([1 / seconds for seconds in entry.unit_seconds])


def _verdict(
    first: ComparedMachine, base: Entry | None, machine: ComparedMachine, entry: Entry, margin: float
) -> tuple[Estimate | None, Verdict]:
    if base is None:
        return None, Verdict("incomparable", f"{first.name} has no such configuration", None)
    sides = ((first, base), (machine, entry))
    for side, one in sides:
        if not one.is_timed:
            reason = f"{one.status} on {side.name}" + (f": {one.message}" if one.message else "")
            return None, Verdict("incomparable", reason, None)
    if base.run_seconds and entry.run_seconds:
        ratio = independent_ratio(base.run_seconds, entry.run_seconds)
    elif base.unit_seconds and entry.unit_seconds and base.spec.recipe == entry.spec.recipe:
        ratio = independent_ratio(base.unit_seconds, entry.unit_seconds)
    else:
        lengths = [f"{f'cut short ({one.cut})' if one.cut else 'a whole run'} on {side.name}" for side, one in sides]
        return None, Verdict("incomparable", f"{', '.join(lengths)}: these times are of different work", None)
    if ratio.n < MIN_PROCESSES:
        alone = " and on ".join(side.name for side, one in sides if one.num_processes < MIN_PROCESSES)
        return ratio, Verdict("inconclusive", f"one process on {alone}: no interval", ratio)
    return ratio, verdict_of(ratio, margin)


def _speedup(machine: ComparedMachine, entry: Entry, batch: int) -> Estimate | None:
    """Return the speed-up over the same machine's float32 at a batch."""
    if entry.spec.precision == BASELINE:
        return None
    if batch == entry.spec.batch_size and entry.speedup is not None:
        return entry.speedup
    for base in machine.entries.values():
        is_baseline = base.spec.precision == BASELINE and base.spec.batch_size == batch
        if not is_baseline or base.group_key != entry.group_key:
            continue
        if base.run_seconds and entry.run_seconds:
            # Runs at two batches do the same work: the same samples, as often.
            return independent_ratio(base.run_seconds, entry.run_seconds)
        if base.unit_seconds and entry.unit_seconds:
            return independent_ratio(base.unit_seconds, entry.unit_seconds)
        return None
    return None


def _incomparable(machines: Sequence[ComparedMachine], alone: set[tuple[object, ...]]) -> Iterator[Incomparable]:
    by_workload: dict[str, list[tuple[ComparedMachine, Entry]]] = {}
    for machine in machines:
        for entry in machine.entries.values():
            by_workload.setdefault(entry.spec.workload, []).append((machine, entry))
    for machine in machines:
        labels: dict[str, list[str]] = {}
        for key, entry in machine.entries.items():
            if key in alone:
                others = [each for each in by_workload[entry.spec.workload] if each[0] is not machine]
                labels.setdefault(_why_alone(entry, others[:_MAX_CANDIDATES]), []).append(entry.spec.label)
        for reason, of_reason in labels.items():
            yield Incomparable(machine, reason, tuple(dict.fromkeys(of_reason)))


def _why_alone(entry: Entry, others: Sequence[tuple[ComparedMachine, Entry]]) -> str:
    """Return what differs in the nearest configuration of another machine."""
    if not others:
        return "no other machine has this workload"
    differences = [
        [name for name, own, other_value in zip(KEY_FIELDS, entry.key, other.key, strict=True) if own != other_value]
        for _, other in others
    ]
    nearest = min(range(len(others)), key=lambda index: len(differences[index]))
    machine, other = others[nearest]
    if "kind" in differences[nearest]:
        kinds = {"steady": "steady-state steps", "training": "a training run"}
        return f"{kinds[entry.spec.kind]} here, {kinds[other.spec.kind]} on {machine.name}"
    return f"the nearest configuration of {machine.name} differs in {', '.join(differences[nearest])}"


def _title(spec: TrialSpec) -> str:
    kind = "training runs" if spec.kind == "training" else ""
    return ", ".join(part for part in (spec.workload, kind, *spec.techniques, spec.world_size_label) if part)


def headline(comparison: MachineComparison) -> str:
    """Return the result in words: how many times as fast each machine is in each precision."""
    first, *others = comparison.machines
    return " ".join(_sentence(first, machine, comparison) for machine in others)


def _sentence(first: ComparedMachine, machine: ComparedMachine, comparison: MachineComparison) -> str:
    ratios: dict[str, list[float]] = {}
    workloads: dict[str, None] = {}
    for row in comparison.rows:
        for result in row.results:
            if result.machine is machine and result.ratio is not None:
                ratios.setdefault(row.spec.precision, []).append(result.ratio.value)
                workloads[row.spec.workload] = None
    if not ratios:
        return f"No time of {machine.name} can be compared with {first.name}'s."
    spans: list[str] = []
    for precision in sorted(ratios, key=precision_sort_key)[:_MAX_PRECISIONS]:
        low, high = f"{min(ratios[precision]):.2f}", f"{max(ratios[precision]):.2f}"
        span = f"{low}×" if low == high else f"{low} to {high}×"
        spans.append(f"{span}{'' if spans else ' as fast'} in {precision}")
    num_left_out = len(ratios) - len(spans)
    left_out = f" ({num_left_out} more precisions below)" if num_left_out else ""
    words = f"{', '.join(spans[:-1])} and {spans[-1]}" if len(spans) > 1 else spans[0]
    where = next(iter(workloads)) if len(workloads) == 1 else f"{len(workloads)} workloads"
    return f"Compared with {first.name}, {machine.name} is {words}{left_out}, in {where}."


def tally(comparison: MachineComparison) -> str:
    """Return how many ratios have which verdict."""
    counts = Counter(verdict.kind for verdict in comparison.verdicts)
    kinds: tuple[VerdictKind, ...] = get_args(VerdictKind)
    words = ", ".join(f"{counts[kind]} {kind}" for kind in kinds if counts[kind])
    if not words:
        return "No configuration is common to two machines."
    if comparison.is_without_intervals:
        words += (
            "; no ratio has an interval, as each configuration was measured in one process: "
            "`castwise run --within 1%` measures several"
        )
    return f"Verdicts: {words}."
