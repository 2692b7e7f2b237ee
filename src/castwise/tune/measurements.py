"""What was measured of each configuration, and how one compares with another."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from castwise.analysis import steady_metrics
from castwise.analysis.causes import diagnose
from castwise.analysis.decide import one_process_shows
from castwise.analysis.model_flops import flops_of, why_inexact
from castwise.analysis.result_table import rows_of_steps
from castwise.analysis.speedup import rate_estimate, speedup_estimate, step_estimate
from castwise.analysis.statistics import Estimate, verdict_of
from castwise.analysis.step_evidence import power_limit_of
from castwise.records.schema import Trial
from castwise.registry.techniques import Technique
from castwise.spec.quantities import format_share
from castwise.spec.trial import TrialSpec
from castwise.spec.types import CauseName

Key = tuple[str, str, tuple[str, ...], int]
Outcome = Literal[
    "accepted", "second best", "same", "slower", "unproven", "too large", "failed", "not tried", "unsupported"
]

# A candidate that is this much faster in its first session is worth a closer look. Source: none of 18
# searches on an H200 proved a gain below 1 %, and each try took them up to half a minute.
PROMISING = 1.01
# What one session shows beyond this needs no second one before the final session, unless something disturbed the
# machine. Source: 1,423 pairs of processes of one configuration on one GPU in benchmarks/records: 0.1 % differ by more,
# one pair by 39 %. By more than 10 % differ 21 % of the pairs with steps below 10 ms, 2.6 % of the others, and none of
# 41 in CUDA graphs.
_BEYOND_PROCESSES = 1.30
# The repeats of a final session's trials begin with this number; what led the search has lower ones.
FIRST_FINAL_REPEAT = 1000
FINAL_ROUNDS = 3  # the fewest of a final session, as of `castwise run`
# A technique that can save less of the step than what is worth a closer look is not tried.
LEAST_GAIN = PROMISING - 1
# Of a step's FLOPs: FP8 is up to twice as fast in linear layers, and compiling it takes a minute. Source: chosen here.
_LINEAR_SHARE = 0.5
ONE_PROCESS = "one process: no interval"
DRIFTED = "speeds differed too much from session to session"


def key_of(spec: TrialSpec) -> Key:
    """Return the fields in which the configurations of one search differ."""
    return spec.precision, spec.loss_scale, spec.techniques, spec.batch_size


def unique(specs: Iterable[TrialSpec]) -> list[TrialSpec]:
    """Return each configuration once, in order."""
    return list({key_of(spec): spec for spec in specs}.values())


@dataclass(frozen=True)
class Measurements:
    """The trials of one search by configuration; immutable."""

    by_key: Mapping[Key, tuple[Trial, ...]] = field(default_factory=dict)  # each configuration's, by repeat
    sessions: tuple[frozenset[Key], ...] = ()  # what was measured together in this run of the search

    @classmethod
    def from_records(cls, trials: Iterable[Trial], start: TrialSpec) -> "Measurements":
        """Return the trials that differ from a start in nothing but what a search changes."""
        changed = ("precision", "loss_scale", "techniques", "batch_size", "repeat")
        fixed = start.without_extras.model_dump(exclude=set(changed))
        return cls().plus(
            trial for trial in trials if trial.spec.without_extras.model_dump(exclude=set(changed)) == fixed
        )

    def plus(self, trials: Iterable[Trial], session: Sequence[TrialSpec] = ()) -> "Measurements":
        """Return these and further trials, measured in a session of these configurations."""
        by_key = dict(self.by_key)
        for trial in trials:
            key = key_of(trial.spec)
            by_key[key] = tuple(sorted((*by_key.get(key, ()), trial), key=lambda trial: trial.spec.repeat))
        sessions = (*self.sessions, frozenset(map(key_of, session))) if session else self.sessions
        return Measurements(by_key, sessions)

    def of(self, spec: TrialSpec) -> tuple[Trial, ...]:
        return self.by_key.get(key_of(spec), ())

    def is_ok(self, spec: TrialSpec) -> bool:
        """Return whether a configuration was measured, none of its processes failed, and FP8 is near bfloat16."""
        trials = self.of(spec)
        return bool(trials) and all(trial.status == "ok" for trial in trials) and why_inexact(trials) is None

    def failure(self, spec: TrialSpec) -> Trial | None:
        """Return the first trial of a configuration that failed."""
        return next((trial for trial in self.of(spec) if trial.status != "ok"), None)

    def layers(self, spec: TrialSpec) -> tuple[str, ...] | None:
        """Return the kinds of layers in a configuration's model, as its trials found them; None if it is not known."""
        return next((trial.layers for trial in self.of(spec) if trial.layers is not None), None)

    def held_bytes(self, spec: TrialSpec) -> float:
        """Return the most memory that a configuration's processes held; infinite if it is not known.

        It is what the caching allocator reserved; on a CPU what the process grew by.
        """
        reserved = steady_metrics.largest(map(steady_metrics.peak_reserved_bytes, self.of(spec)))
        allocated = steady_metrics.largest(map(steady_metrics.peak_allocated_bytes, self.of(spec)))
        return float(reserved or allocated or math.inf)

    def rate(self, spec: TrialSpec) -> float | None:
        """Return units per second, in the final session if there was one; None if nothing was timed."""
        trials = [trial for trial in self.final.of(spec) or self.of(spec) if trial.status == "ok"]
        rate = rate_estimate(trials, step_estimate(trials))
        return None if rate is None else rate.value

    def can_gain(self, row: Technique, spec: TrialSpec) -> bool:
        """Return whether a technique may be worth a try on a configuration, by the most that it can save of a step."""
        trial = next((trial for trial in self.of(spec) if trial.status == "ok" and trial.facts is not None), None)
        seconds = None if trial is None else steady_metrics.step_seconds(trial)
        if trial is None or trial.facts is None or seconds is None:
            return True
        gpu = trial.environment.gpu_model
        bandwidth = 0.0 if gpu is None else gpu.bandwidth_bytes_per_second
        copied = row.saves_bytes * trial.facts.num_parameters / bandwidth if bandwidth else math.inf
        return min(row.saves_seconds, copied) >= LEAST_GAIN * seconds

    def may_pay_in_fp8(self, spec: TrialSpec) -> bool:
        """Return whether enough of a configuration's FLOPs are in large linear layers to try FP8."""
        flops = flops_of(self.of(spec))
        if flops is None:
            return False
        large = flops.large_linear_flops
        return (flops.share_of("linear") if large is None else large / flops.total) >= _LINEAR_SHARE

    def causes(self, spec: TrialSpec) -> set[CauseName]:
        """Return why a configuration is no faster, as far as its records show it."""
        return {cause.name for found in diagnose(rows_of_steps(self.of(spec))) for cause in found.causes}

    def what_bounds(self, spec: TrialSpec) -> str:
        """Return in words what bounds a configuration; empty if neither a profile nor readings show it."""
        found: list[str] = []
        for diagnosis in diagnose(rows_of_steps(self.of(spec))):
            found += [diagnosis.bound] if diagnosis.profile is not None else []
            found += [cause.evidence for cause in diagnosis.causes]
        power = power_limit_of(self.of(spec))
        if power is not None and power.slowdown is not None:
            found.append(
                f"steps of sustained training take up to {format_share(power.slowdown)} longer than timed ones"
            )
        return "; ".join(found)

    def ratio(self, below: TrialSpec, spec: TrialSpec) -> Estimate | None:
        """Return a configuration's speed-up over another by units per second.

        It is that of the final session; else of the sessions that measured both; of all their processes if none did.
        """
        if not self.is_ok(spec):
            return None
        if (final := self.final_ratio(below, spec)) is not None:
            return final
        shared = self._shared_sessions([below, spec])
        sides = (
            [trial for trial in self.of(side) if not shared or trial.session_id in shared] for side in (below, spec)
        )
        return _per_unit(speedup_estimate(*sides), below, spec)

    @cached_property
    def final(self) -> "Measurements":
        return self.part(is_final=True)

    def part(self, *, is_final: bool) -> "Measurements":
        """Return the trials of final sessions alone, or the others: those led the search."""
        trials = (trial for own in self.by_key.values() for trial in own)
        kept = (trial for trial in trials if (trial.spec.repeat >= FIRST_FINAL_REPEAT) == is_final)
        return replace(Measurements().plus(kept), sessions=self.sessions)

    def final_ratio(self, below: TrialSpec, spec: TrialSpec) -> Estimate | None:
        """Return the speed-up in final sessions; None if they have not measured both in enough processes."""
        ratio = _per_unit(speedup_estimate(self.final.of(below), self.final.of(spec)), below, spec)
        is_known = ratio is not None and ratio.n >= FINAL_ROUNDS and self.is_ok(below) and self.is_ok(spec)
        return ratio if is_known else None

    def is_final_done(self, specs: Sequence[TrialSpec]) -> bool:
        """Return whether final sessions compared the first of these with all others, or one of them failed there."""
        return any(map(self.final.failure, specs)) or all(self.final_ratio(spec, specs[0]) for spec in specs[1:])

    def first_ratio(self, below: TrialSpec, spec: TrialSpec, others: Sequence[TrialSpec] = ()) -> Estimate | None:
        """Return the speed-up as it was known after the first session that measured both, with others if one did.

        It stays the same when more is measured.
        """
        sessions = self._shared_sessions([below, spec, *others]) or self._shared_sessions([below, spec])
        first = next((trial.session_id for trial in self.of(spec) if trial.session_id in sessions), None)
        known = {}
        for side in (below, spec):
            trials = self.of(side)
            ids = [trial.session_id for trial in trials]
            known[key_of(side)] = trials[: ids.index(first) + 1] if first is not None and first in ids else trials
        return Measurements(known).ratio(below, spec)

    def is_clear(self, below: TrialSpec, spec: TrialSpec) -> bool:
        """Return whether one session, on a machine at rest, shows more than what processes of one configuration do."""
        units = spec.batch_size / below.batch_size
        shown = one_process_shows(self.of(below), self.of(spec), _BEYOND_PROCESSES, units)
        return shown == "faster" and self.agrees(below, spec)

    def agrees(self, below: TrialSpec, spec: TrialSpec) -> bool:
        """Return whether the speeds over all sessions agree with the speed-up in those that measured both.

        If they do not, the machine changed from session to session by more than processes differ.
        """
        ratio, rates = self.ratio(below, spec), (self.rate(below), self.rate(spec))
        if ratio is None or not rates[0] or not rates[1]:
            return True
        over_all = rates[1] / rates[0]
        low, high = (ratio.low, ratio.high) if math.isfinite(ratio.half_width) else (ratio.value, ratio.value)
        slower, faster = sorted([ratio.value, over_all])
        is_opposite = slower <= 1 and faster > PROMISING
        return not is_opposite and low / _BEYOND_PROCESSES <= over_all <= high * _BEYOND_PROCESSES

    def is_answered(self, below: TrialSpec, spec: TrialSpec) -> bool:
        """Return whether the difference of two configurations needs no further processes."""
        ratio = self.ratio(below, spec)
        if ratio is None or not self.is_ok(below) or self.is_clear(below, spec):
            return True
        return ratio.n > 1 and verdict_of(ratio).kind != "inconclusive" and self.agrees(below, spec)

    def is_accepted(self, below: TrialSpec, spec: TrialSpec, limit_bytes: float) -> bool:
        """Return whether a configuration is to be accepted over another: it is faster, or it alone fits a limit."""
        if not self.is_ok(spec):
            return False
        if not self.is_ok(below):
            return self.is_out_of_memory(below)
        if self.held_bytes(spec) <= limit_bytes < self.held_bytes(below):
            return True
        ratio = self.ratio(below, spec)
        if ratio is None or not self.agrees(below, spec):
            return False
        return verdict_of(ratio).kind == "faster" or (ratio.n == 1 and self.is_clear(below, spec))

    def is_out_of_memory(self, spec: TrialSpec) -> bool:
        failure = self.failure(spec)
        return failure is not None and failure.status == "oom"

    def times_together(self, specs: Sequence[TrialSpec]) -> int:
        """Return how many sessions measured all of these configurations."""
        return max(len(self._shared_sessions(specs)), self.times_asked(specs))

    def times_asked(self, specs: Sequence[TrialSpec]) -> int:
        """Return how many sessions of this run of the search were to measure all of these configurations."""
        keys = frozenset(map(key_of, specs))
        return sum(keys <= session for session in self.sessions)

    def outcome(self, spec: TrialSpec, ratio: Estimate | None, limit_bytes: float) -> tuple[Outcome, str]:
        """Return what came of a configuration that was not accepted, by its speed-up over another, and why."""
        failed = self.failure(spec)
        if failed is not None:
            if failed.status == "unsupported":
                return "unsupported", failed.message
            more = "; --timeout gives it longer" if failed.status == "timeout" else ""
            return "failed", f"{failed.status}: {failed.message}{more}"
        if not self.of(spec):
            return "not tried", "no time was left for it"
        inexact = why_inexact(self.of(spec))
        if inexact is not None or self.held_bytes(spec) > limit_bytes:
            return ("failed", inexact) if inexact else ("too large", "it holds more memory than --memory allows")
        if ratio is None:
            return "unproven", "there is nothing that it could be compared with"
        if ratio.n == 1:
            kind = "faster" if ratio.value > PROMISING else "slower" if ratio.value < 1 / PROMISING else "same"
            reason = ONE_PROCESS
        else:
            verdict = verdict_of(ratio)
            kind, reason = verdict.kind, verdict.reason
        named: dict[str, Outcome] = {"faster": "second best", "same": "same", "slower": "slower"}
        return named.get(kind, "unproven"), reason

    def _shared_sessions(self, specs: Sequence[TrialSpec]) -> set[str | None]:
        return set.intersection(*({trial.session_id for trial in self.of(spec)} - {None} for spec in specs))


def _per_unit(ratio: Estimate | None, below: TrialSpec, spec: TrialSpec) -> Estimate | None:
    """Return a ratio of step times as one of units per second: a step on a larger batch has more of them."""
    factor = spec.batch_size / below.batch_size
    if ratio is None or factor == 1:
        return ratio
    return replace(ratio, value=ratio.value * factor, low=ratio.low * factor, high=ratio.high * factor)
