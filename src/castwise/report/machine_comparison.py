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
from castwise.report.machine_notes import MachineNote, machine_notes
from castwise.report.machines import KEY_FIELDS, ComparedMachine, Entry
from castwise.spec.trial import TrialSpec

_FAILED = ("oom", "timeout", "crashed", "diverged")
_MAX_CANDIDATES = 50  # entries of other machines that are searched for the one that differs least
_MAX_PRECISIONS = 4  # in the headline


@dataclass(frozen=True)
class MachineResult:
    """A configuration on a machine that has it."""

    machine: ComparedMachine
    entry: Entry
    throughput: Estimate | None = None  # units per second, of whole runs if all are or if it is published
    verdict: Verdict | None = None  # None on the first machine
    speedup: Estimate | None = None  # over float32 on the same machine
    broke: bool = False  # it ended well on the first machine and did not here

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
class MachineComparison:
    """A comparison of machines."""

    machines: tuple[ComparedMachine, ...]  # the others are compared with the first
    groups: dict[str, tuple[ComparisonRow, ...]]  # by title; rows differ in precision, loss scale and batch size only
    incomparable: tuple[Incomparable, ...]
    margin: float  # how far from 1 a ratio still is "the same"

    @property
    def rows(self) -> list[ComparisonRow]:
        """Return the rows of all groups."""
        return [row for rows in self.groups.values() for row in rows]

    @property
    def machine_notes(self) -> list[MachineNote]:
        """Return what must be said of configurations that several machines with the same GPU model measured."""
        return machine_notes(
            [(each.entry.trials[0], each.throughput) for each in row.results if each.entry.trials and each.throughput]
            for row in self.rows
        )

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
    """Compare at least two machines with the first one; a ratio within the margin of 1 is "the same"."""
    counts = Counter(key for machine in machines for key in machine.entries)
    groups: dict[tuple[object, ...], list[ComparisonRow]] = {}
    for key, count in counts.items():
        if count > 1:
            groups.setdefault(key[3:], []).append(_row(machines, key, margin))
    titled: dict[str, tuple[ComparisonRow, ...]] = {}
    for rows in groups.values():
        rows.sort(key=lambda row: (row.spec.batch_size, precision_sort_key(row.spec.precision), row.spec.loss_scale))
        spec = rows[0].spec
        kind = "training runs" if spec.kind == "training" else ""
        title = ", ".join(part for part in (spec.workload, kind, *spec.techniques, spec.world_size_label) if part)
        titled[free_name(title, titled)] = tuple(rows)
    alone = {key for key, count in counts.items() if count == 1}
    return MachineComparison(tuple(machines), titled, tuple(_incomparable(machines, alone)), margin)


def _row(machines: Sequence[ComparedMachine], key: tuple[object, ...], margin: float) -> ComparisonRow:
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
        speedup = _speedup(machine, entry, batch)
        broke = is_other and base is not None and base.status == "ok" and entry.status in _FAILED
        results.append(MachineResult(machine, entry, throughput, verdict, speedup, broke))
    return ComparisonRow(spec, tuple(results), batch, is_whole)


def _verdict(
    first: ComparedMachine, base: Entry | None, machine: ComparedMachine, entry: Entry, margin: float
) -> Verdict:
    if base is None:
        return Verdict("incomparable", f"{first.name} has no such configuration", None)
    sides = ((first, base), (machine, entry))
    for side, one in sides:
        if not one.is_timed:
            reason = f"{one.status} on {side.name}" + (f": {one.message}" if one.message else "")
            return Verdict("incomparable", reason, None)
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
        for reason, names in labels.items():
            yield Incomparable(machine, reason, tuple(dict.fromkeys(names)))


def _why_alone(entry: Entry, others: Sequence[tuple[ComparedMachine, Entry]]) -> str:
    """Return what differs in the nearest configuration of another machine."""
    if not others:
        return "no other machine has this workload"
    candidates = []
    for machine, other in others:
        pairs = zip(KEY_FIELDS, entry.key, other.key, strict=True)
        candidates.append(([name for name, own, theirs in pairs if own != theirs], machine, other))
    differences, machine, other = min(candidates, key=lambda candidate: len(candidate[0]))
    if "kind" in differences:
        kinds = {"steady": "steady-state steps", "training": "a training run"}
        return f"{kinds[entry.spec.kind]} here, {kinds[other.spec.kind]} on {machine.name}"
    return f"the nearest configuration of {machine.name} differs in {', '.join(differences)}"


def headline(comparison: MachineComparison) -> str:
    """Return the result in words: how many times as fast each machine is in each precision."""
    return " ".join(_sentence(machine, comparison) for machine in comparison.machines[1:])


def _sentence(machine: ComparedMachine, comparison: MachineComparison) -> str:
    first = comparison.machines[0]
    ratios: dict[str, list[float]] = {}
    workloads: dict[str, None] = {}
    for row in comparison.rows:
        result = row.result_on(machine)
        if result is not None and result.ratio is not None:
            ratios.setdefault(row.spec.precision, []).append(result.ratio.value)
            workloads[row.spec.workload] = None
    if not ratios:
        return f"No time of {machine.name} can be compared with {first.name}'s."
    spans: list[str] = []
    for precision in sorted(ratios, key=precision_sort_key)[:_MAX_PRECISIONS]:
        ends = dict.fromkeys((f"{min(ratios[precision]):.2f}", f"{max(ratios[precision]):.2f}"))
        spans.append(f"{' to '.join(ends)}×{'' if spans else ' as fast'} in {precision}")
    num_left_out = len(ratios) - len(spans)
    left_out = f" ({num_left_out} more precisions below)" if num_left_out else ""
    words = f"{', '.join(spans[:-1])} and {spans[-1]}" if len(spans) > 1 else spans[0]
    where = next(iter(workloads)) if len(workloads) == 1 else f"{len(workloads)} workloads"
    return f"Compared with {first.name}, {machine.name} is {words}{left_out}, in {where}."


def verdict_counts(comparison: MachineComparison) -> str:
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
