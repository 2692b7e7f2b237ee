"""What a climb's trials say of its loops, and of one loop beside another."""

from collections.abc import Sequence

from castwise.analysis.speedup import session_speedup_estimate, speedup_estimate
from castwise.analysis.statistics import Estimate, verdict_of
from castwise.orchestrator.reuse import matches_configuration
from castwise.records.schema import Trial
from castwise.spec.trial import TrialSpec
from castwise.tune.candidates import Outcome, by_units, needs_of, said_of

# Two processes of a cell were seen to differ by up to 8 % where the host sets the pace: what the turns of one sitting
# show beyond that needs no further process.
_BEYOND_PROCESSES = 1.10


class LoopResults:
    """Loops by the trials that a climb knows of, which its own add to."""

    known: list[Trial]

    def _outcome(self, current: TrialSpec, spec: TrialSpec, limit: float | None) -> tuple[Outcome, str]:
        """Return what is said of a loop that is no rung."""
        failed = next((trial for trial in self._of(spec) if trial.status != "ok"), None)
        if failed is not None and failed.status == "unsupported":
            return "unsupported", failed.message  # which names what the model does not allow
        if failed is not None:
            more = "; --timeout gives it longer" if failed.status == "timeout" else ""
            return "failed", f"{failed.status}: {failed.message}{more}"
        if not self._of(spec):
            return "not tried", "no time was left for it"
        ratio = self._ratio(current, spec)
        if ratio is None:
            return "failed", "the loop below could not be timed beside it"
        if limit is not None and self._needs(spec) > limit:
            return "too large", "it holds more memory than --memory says"
        return said_of(ratio)

    def _rungs(self, loops: Sequence[TrialSpec], limit: float | None) -> list[TrialSpec]:
        """Return the first loop, and each that is proven over the one before it here."""
        rungs = [loops[0]]
        for loop in loops[1:]:
            rungs += [loop] if self._is_rung(rungs[-1], loop, limit) else []
        return rungs

    def _is_answered(self, below: TrialSpec, spec: TrialSpec) -> bool:
        if not (self._is_well(below) and self._is_well(spec)):
            return True
        ratio = self._ratio(below, spec)
        return (
            ratio is None or self._is_clear(below, spec) or (ratio.n > 1 and verdict_of(ratio).kind != "inconclusive")
        )

    def _is_rung(self, below: TrialSpec, spec: TrialSpec, limit: float | None) -> bool:
        ratio = self._ratio(below, spec)
        if ratio is None or not self._is_well(spec):
            return False
        if limit is not None and self._needs(spec) <= limit < self._needs(below):
            return True
        return verdict_of(ratio).kind == "faster" or (ratio.n == 1 and self._is_clear(below, spec))

    def _is_clear(self, below: TrialSpec, spec: TrialSpec) -> bool:
        """Return whether one sitting shows more than processes of a cell differ by."""
        found = self._of_turns(below, spec)
        return found is not None and found.low > _BEYOND_PROCESSES

    def _shown(self, below: TrialSpec, spec: TrialSpec) -> Estimate | None:
        ratio = self._ratio(below, spec)
        return (self._of_turns(below, spec) or ratio) if ratio is not None and ratio.n == 1 else ratio

    def _ratio(self, below: TrialSpec, spec: TrialSpec) -> Estimate | None:
        """Return a loop's speed-up over another by units a second; None where it was not measured well."""
        if not self._is_well(spec):
            return None
        return by_units(speedup_estimate(self._of(below), self._of(spec)), below, spec)

    def _of_turns(self, below: TrialSpec, spec: TrialSpec) -> Estimate | None:
        return by_units(session_speedup_estimate(self._of(below), self._of(spec)), below, spec)

    def _needs(self, spec: TrialSpec) -> float:
        """Return the most memory that a loop's processes held: what the allocator reserved, on a CPU tensors."""
        return needs_of(self._of(spec))

    def _is_well(self, spec: TrialSpec) -> bool:
        own = self._of(spec)
        return bool(own) and all(trial.status == "ok" for trial in own)

    def _of(self, spec: TrialSpec) -> list[Trial]:
        return [trial for trial in self.known if matches_configuration(trial, spec)]
