"""The result of a search: what was tried, as rows, and which of it to take."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from castwise.analysis import steady_metrics
from castwise.analysis.decide import changes_of
from castwise.analysis.statistics import verdict_of
from castwise.records.schema import Trial
from castwise.registry.precisions import BASELINE
from castwise.registry.techniques import join
from castwise.show.fields import FlatRow, estimate_values, interval_values
from castwise.spec.trial import TrialSpec
from castwise.tune.candidates import TriedChange
from castwise.tune.decide import Ending
from castwise.tune.measurements import Measurements, key_of, unique
from castwise.tune.time_budget import first_step_seconds

_FASTER = (None, "accepted", "second best")  # the outcomes of the plain loops and of what was faster than one before
# A loop this fast beside the fastest may be named for being simpler. Source: chosen here.
SIMPLE = 0.75


@dataclass(frozen=True)
class TuningResult:
    start: TrialSpec  # the plain loop
    tried: tuple[TriedChange, ...]  # stage by stage; what was tried for a memory limit alone comes last
    trials: tuple[Trial, ...]
    ending: Ending
    seconds: float  # wall time
    num_recorded: int = 0  # trials that were on record before, and are not in the wall time
    budget_seconds: float | None = None
    memory_bytes: float | None = None  # the limit that was asked for
    fp32: TrialSpec | None = None  # the plain loop in fp32, if the start is PyTorch's default
    accuracy: str = ""  # what is known of the chosen loop's, if it has numbers in fewer bits
    without_layers: Mapping[str, Sequence[str]] = field(default_factory=dict)  # techniques, by the lacking layer

    @property
    def path(self) -> list[TrialSpec]:
        return [self.start, *(attempt.spec for attempt in self.tried if attempt.is_accepted and not attempt.limited)]

    @property
    def winner(self) -> TrialSpec:
        return self.path[-1]

    @property
    def final_specs(self) -> list[TrialSpec]:
        """Return what the final session measures, the winner first; empty if there is nothing to compare."""
        if len(self.path) == 1 or not self.measured.is_ok(self.start) or not self.measured.is_ok(self.winner):
            return []
        return unique(filter(None, [self.winner, self.start, self.path[-2], self.chosen]))

    @property
    def confirmed(self) -> "TuningResult":
        """Return the result without the last change, or without all, if the final session does not show a gain."""
        path, final_ratio = self.path, self.measured.final_ratio

        def is_refuted(below: TrialSpec, spec: TrialSpec) -> bool:
            ratio, has_failed = final_ratio(below, spec), self.measured.final.failure(spec) is not None
            return has_failed or (ratio is not None and verdict_of(ratio).kind != "faster")

        if len(path) > 1 and is_refuted(path[-2], path[-1]):
            path.pop()
        if is_refuted(path[0], path[-1]):
            del path[1:]

        def settled(attempt: TriedChange) -> TriedChange:
            if not attempt.is_accepted or attempt.limited:
                return attempt
            known = replace(attempt, ratio=final_ratio(attempt.below, attempt.spec) or attempt.ratio)
            refuted = replace(known, outcome="unproven", reason="not confirmed in the final session")
            return known if attempt.spec in path else refuted

        return replace(self, tried=tuple(map(settled, self.tried)))

    @property
    def was_compared(self) -> bool:
        """Return whether any change was compared with the plain loop, or made it run."""
        return any(attempt.ratio is not None or attempt.is_accepted for attempt in self.tried)

    @cached_property
    def measured(self) -> Measurements:
        return Measurements().plus(self.trials)

    @cached_property
    def rows(self) -> list[FlatRow]:
        """Return the plain loops and all that was tried, in order; an unsupported change comes once, without pairs.

        The stage is 0 for a plain loop, 1 for what was tried on it, and one more for each change accepted before.
        """
        rows = [self.row_of(self.start)]
        if self.fp32 is not None and self.measured.of(self.fp32):
            rows.append(self.row_of(self.fp32))
        named = {attempt.change for attempt in self.tried if self.measured.of(attempt.spec)}
        for attempt in self.tried:
            if attempt.outcome == "unsupported" and not self.measured.of(attempt.spec):
                if len(attempt.change.parts) > 1 or attempt.change in named:
                    continue
                named.add(attempt.change)
            rows.append(self.row_of(attempt.spec, attempt))
        return rows

    def row_of(self, spec: TrialSpec, tried: TriedChange | None = None) -> FlatRow:
        """Return the values of a tried change, or of a plain loop, by field name, with its spec and name."""
        start, measured = self.start, self.measured
        trials, rate, held = measured.of(spec), measured.rate(spec), measured.held_bytes(spec)
        fp32 = start if start.precision == BASELINE else self.fp32
        within = " (within the limit)" if tried is not None and tried.limited else ""
        ratio = None if tried is None or not measured.agrees(tried.below, spec) else tried.ratio
        return {
            "spec": spec,
            "name": spec.loop_name + ("" if spec.batch_size == start.batch_size else f", batch {spec.batch_size}"),
            "stage": 0 if tried is None else tried.stage + 1,
            "tried": spec.loop_name if tried is None else tried.change.name + within,
            **estimate_values("speedup", ratio),
            "num_processes": None if ratio is None else ratio.n,
            "total_speedup": self._speedup_over(start, spec),
            **interval_values("total_speedup", measured.final_ratio(start, spec)),
            "fp32_speedup": None if fp32 is None else self._speedup_over(fp32, spec),
            "throughput_per_second": rate,
            "unit": None if rate is None else steady_metrics.unit_of(trials[0]),
            "first_step_seconds": max(filter(None, map(first_step_seconds, trials)), default=None),
            "peak_allocated_bytes": steady_metrics.largest(map(steady_metrics.peak_allocated_bytes, trials)),
            # What a memory limit counts: what the allocator reserved; on a CPU what tensors held.
            "peak_reserved_bytes": int(held) if math.isfinite(held) else None,
            "outcome": None if tried is None else tried.outcome,
            "reason": "" if tried is None else tried.reason,
            "precision": spec.precision,
            "techniques": join(spec.techniques),
            "batch_size": spec.batch_size,
        }

    def _speedup_over(self, base: TrialSpec, spec: TrialSpec) -> float | None:
        """Return a speed-up; None if the speeds over all sessions contradict it."""
        ratio = self.measured.ratio(base, spec) if self.measured.agrees(base, spec) else None
        return None if ratio is None else 1.0 if key_of(base) == key_of(spec) else ratio.value

    def _fitting(self, batch_size: int | None) -> list[FlatRow]:
        """Return the rows whose loop may be recommended: all of its processes ended well, and it fits into the limit.

        On this batch alone if one is named.
        """
        limit = math.inf if self.memory_bytes is None else self.memory_bytes
        return [
            row
            for row in self.rows
            if row["throughput_per_second"] and self.measured.is_ok(row["spec"])
            if self.measured.held_bytes(row["spec"]) <= limit
            if batch_size in (None, row["batch_size"])
        ]

    def fastest_within_memory(self, batch_size: int | None = None) -> FlatRow | None:
        """Return the row of the fastest configuration that fits into the limit, on this batch if one is named.

        One that was not proven faster comes last, however fast it looked.
        """
        rows = self._fitting(batch_size)
        best = max(rows, key=lambda row: (row["outcome"] in _FASTER, row["throughput_per_second"]), default=None)
        return next((row for row in rows if key_of(row["spec"]) == key_of(self.winner)), best)

    @property
    def chosen(self) -> TrialSpec | None:
        """Return the fastest configuration, within the memory limit if there is one; None if none fits."""
        if self.memory_bytes is None:
            return self.winner
        within = self.fastest_within_memory()
        return None if within is None else within["spec"]

    @property
    def simplest(self) -> TrialSpec | None:
        """Return the configuration that complicates the loop least, of those not much slower than the one chosen.

        It has the same batch, and fits into the memory limit if there is one. None if nothing was chosen.
        """
        best = self.chosen
        if best is None:
            return None
        least = (self.measured.rate(best) or 0.0) * SIMPLE
        near = [row for row in self._fitting(best.batch_size) if row["throughput_per_second"] >= least]
        found = min(near, key=lambda row: (changes_of(row["spec"]), -row["throughput_per_second"]), default=None)
        return best if found is None else found["spec"]
