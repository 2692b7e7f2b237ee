"""Rounds of interleaved sessions, each with fresh processes, until every ratio is known well enough."""

import itertools
import math
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from castwise.analysis.decide import one_process_shows
from castwise.analysis.speedup import process_stds, speedup_estimate, step_estimate, strays_among
from castwise.analysis.statistics import FEW_ROUNDS, FEWEST_BLOCKS, MOST_ROUNDS, Estimate, noise_of, student_quantile
from castwise.analysis.steady_metrics import block_lengths, block_means, was_at_power_limit
from castwise.errors import UsageError
from castwise.orchestrator.block_schedule import PriorStats
from castwise.orchestrator.runner import InterleavedSession, TrialRunner, fails_alike
from castwise.records.schema import Trial
from castwise.registry.precisions import AS_WRITTEN, BASELINE, BESIDE_FP8, DEFAULT, precision_row, why_emulated
from castwise.registry.techniques import join, searches_kernels, times_kernels, times_kernels_while_compiling
from castwise.spec.options import DurationOptions
from castwise.spec.trial import TrialSpec

# What a process holds on the device besides its tensors: its CUDA context and libraries' workspaces.
_CONTEXT_BYTES = 2**30
_USABLE = 0.95  # of the device's memory
# Without a width asked for, an interval need not be narrower than this share of the logarithm of a speed-up.
_SHARE_OF_GAIN = 0.1
# Of a budget: what is not warm so long after its end is not waited for. Source: chosen here.
_GRACE_SHARE = 0.03

# Why no further round starts: every interval is narrow, the budget or the allowed rounds are spent, or all that could
# be compared failed or diverged.
Ending = Literal["narrow", "budget", "rounds", "failed"]


@dataclass(frozen=True)
class StopRule:
    half_width: float = 0.01  # of every speed-up's interval, as a share of it: narrow enough
    margin: float = 0.01  # how far from 1 a speed-up still is "the same"
    min_rounds: int = 3  # before an interval counts
    max_rounds: int = MOST_ROUNDS
    budget_seconds: float | None = None  # wall time that the rounds may take; None for no such limit
    # Nobody asked for a width or a number of rounds: enough is what decides which precision to take. One process is if
    # it shows which is faster.
    one_look: bool = False

    @classmethod
    def of(cls, options: DurationOptions) -> "StopRule":
        """Return the rule that a user asks for; without any of `within`, `budget` and `rounds` a few rounds."""
        is_open = options.within is None and options.budget_seconds is None
        max_rounds = options.rounds or (FEW_ROUNDS if is_open else cls.max_rounds)
        return cls(
            half_width=options.within or min(cls.half_width, options.margin or cls.margin),
            margin=options.margin or cls.margin,
            min_rounds=min(cls.min_rounds, max_rounds),
            max_rounds=max_rounds,
            budget_seconds=options.budget_seconds,
            one_look=options.within is None and options.rounds is None,
        )

    def is_answered(self, ratio: Estimate) -> bool:
        """Return whether a speed-up is known well enough.

        Its width alone decides: who goes on until 1 is outside of the interval finds differences where there are none.
        """
        share_of_gain = _SHARE_OF_GAIN * abs(math.log(ratio.value)) if self.one_look else 0.0
        return ratio.n >= self.min_rounds and ratio.half_width <= max(self.half_width, share_of_gain)


class Rounds:
    """The rounds of one comparison: of configurations with one of them, the baseline.

    Args:
        runner: Measures, saves the records and reports progress.
        specs: The configurations. The repeat of the first is the lowest number that a process gets; trials with lower
                numbers do not count.
        rule: When to end.
        recorded: Trials of these configurations that need not be measured again.
        baseline: The configuration that the others are compared with; None takes a script as it is written, or else
                PyTorch's default, or fp32, or bf16-mixed beside FP8.
        session_seconds: What the shortest session of the job's earlier comparisons took: none begins in less time.
    """

    def __init__(
        self,
        runner: TrialRunner,
        specs: Sequence[TrialSpec],
        rule: StopRule,
        recorded: Sequence[Trial] = (),
        baseline: TrialSpec | None = None,
        session_seconds: float = 0.0,
    ) -> None:
        self._runner, self._rule = runner, rule
        by_precision = {spec.precision: spec for spec in reversed(specs)}
        usual = (by_precision[name] for name in (AS_WRITTEN, DEFAULT, BASELINE) if name in by_precision)
        self._baseline = baseline or next(usual, None)
        if self._baseline is None and any(precision_row(name).float8_recipe for name in by_precision):
            self._baseline = by_precision.get(BESIDE_FP8)
        # The baseline is set up first: without it nothing can be compared.
        self._specs = sorted(specs, key=lambda spec: (not self._is_baseline(spec), self._emulation_rank(spec)))
        self._first_repeat = specs[0].repeat
        self._seed = secrets.token_hex(6)  # of the order of blocks, which is another in each command
        self.trials = list(recorded)  # one for each configuration and round
        self.ending: Ending | None = None
        self._given_up: set[str] = set()  # emulated ones that took too long to set up
        self._compiled: set[str] = set()  # configurations whose compiled code and kernels this command has found
        self._mistake = ""  # for which a later process did not measure what earlier ones did
        self._deadline: float | None = None  # of the rounds, once they have begun
        self._seconds_per_cost = 0.0  # of the longest session
        self._least_seconds = session_seconds
        self.session_seconds = session_seconds  # of the shortest one so far, those of earlier comparisons included

    def run(self) -> list[Trial]:
        """Run rounds until the rule ends them; return all trials, those of earlier jobs first."""
        if self._unfinished():  # else there is nothing to wait for
            with self._prepared():
                # Intervals need scipy, which takes half a second to import: meanwhile the first processes start.
                threading.Thread(target=student_quantile, args=(1,), daemon=True).start()
                try:
                    while specs := self._affordable(self._unfinished()):
                        self._run_round(specs)
                except UsageError as mistake:  # a script may be too short by a few steps, in one round of several
                    if not (self._specs[0].is_script and any(trial.status == "ok" for trial in self.trials)):
                        raise
                    self._mistake = str(mistake)
        self.ending = self._find_ending()
        self._report_ending(self.ending)
        return self.trials

    def run_once(self) -> list[Trial]:
        """Measure all configurations once more, however many rounds they had; return all trials as `run` does."""
        with self._prepared() as found:
            specs = self._not_failed()
            # What another command has just measured together is as good.
            if not {spec.configuration for spec in specs} <= {trial.spec.configuration for trial in found}:
                self._run_round(specs)
        return self.trials

    @contextmanager
    def _prepared(self) -> Iterator[list[Trial]]:
        """Keep other commands from measuring the same, and yield what they have measured, which is adopted."""
        with self._runner.claim(self._specs) as found:
            known = {trial.spec.key for trial in self.trials}
            new = [t for t in found if t.spec.key not in known and t.spec.repeat >= self._first_repeat]
            self.trials += new
            if self._rule.budget_seconds is not None:
                self._deadline = time.perf_counter() + self._rule.budget_seconds
            self._runner.note_gpu_processes(self._specs)
            try:
                yield new
            finally:
                self._runner.closer.wait()
                self._runner.telemetry.close()

    def _find_ending(self) -> Ending:
        well = self._not_failed()
        left = [spec for spec in well if not self._has_diverged(spec)]
        if len(left) < min(2, len(self._specs)) or _fail_alike(self.trials):
            return "failed"
        if self._unfinished():
            return "budget"
        return "narrow" if all(self._is_narrow(spec) for spec in well) else "rounds"

    def _report_ending(self, ending: Ending) -> None:
        spec = self._specs[0]
        where = f"{spec.workload} batch {spec.batch_size}"
        where += f" on {spec.world_size_label}" if spec.world_size_label else ""
        where += f" {join(spec.techniques)}" if spec.techniques else ""
        slow = " (emulated here, and too slow to set up)"
        unmeasured = [
            spec.precision + slow * (spec.configuration in self._given_up) for spec in self._specs if not self._of(spec)
        ]
        lacking = f". Not measured: {', '.join(unmeasured)}" if unmeasured and self.trials else ""
        if lacking and _fail_alike(self.trials):
            lacking += ", as the error has nothing to do with precision"
        self._runner.listener.remark(f"{where}: {self._why_ended(ending)}{lacking}")

    def _why_ended(self, ending: Ending) -> str:
        counted = [spec for spec in self._specs if ending == "failed" or not self._is_baseline(spec)]
        rounds = max(map(self._num_trials, counted), default=0)
        rounds = rounds or self._num_trials(self._specs[0])
        number = f"{rounds} round{'' if rounds == 1 else 's'}"
        if self._mistake:
            return f"{number}: {self._mistake}"
        if ending == "budget":
            return f"time for {number} only" if rounds else "no time was left"
        if ending == "failed":
            some_are_left = any(self._of(spec) and not self._has_diverged(spec) for spec in self._not_failed())
            return f"{number}: every {'other ' if some_are_left else ''}precision failed"
        share = f"{100 * self._rule.half_width:.3g} %"
        if len(self._specs) == 1:
            known = doubt = "nothing to compare"
        else:
            doubt = "a process stands out" if self._has_strays() else f"not every speed-up is clear within {share}"
            known = "the fastest is known" if self._rule.one_look else f"every speed-up is known within {share}"
            if looked := [spec.precision for spec in self._specs if self._is_settled_by_a_look(spec)]:
                known = f"one run is enough for {', '.join(looked)}"
        return f"{number}: {known}" if ending == "narrow" else f"{number}, the limit: {doubt}"

    def _affordable(self, specs: list[TrialSpec]) -> list[TrialSpec]:
        """Return those whose next session would end within the budget: the baseline, and those with fewest processes.

        Of those with as many the fastest come first. One that was never measured counts as the mean of the others.
        Empty if no time is left for any comparison.
        """
        if self._deadline is None:
            return specs
        left = self._deadline - time.perf_counter()
        if not self._seconds_per_cost:
            return specs if not self._least_seconds or left >= self._least_seconds else []
        known = list(filter(math.isfinite, map(self._cost, self._specs)))
        mean = sum(known) / max(1, len(known))
        costs = {spec.key: cost if math.isfinite(cost := self._cost(spec)) else mean for spec in specs}
        kept: list[TrialSpec] = []
        for spec in sorted(specs, key=lambda s: (not self._is_baseline(s), self._num_trials(s), costs[s.key])):
            if sum(costs[other.key] for other in (*kept, spec)) * self._seconds_per_cost <= left:
                kept.append(spec)
            elif self._is_baseline(spec):
                return []
        return kept if len(kept) >= min(2, len(specs)) else []

    def _cost(self, spec: TrialSpec) -> float:
        """Return the seconds that a configuration's last process took by itself; infinite if it was never measured."""
        trials = self._of(spec)
        facts = trials[-1].facts if trials else None
        if facts is None:
            return math.inf
        phases = (facts.set_up_seconds, facts.first_step_seconds, facts.warm_up_seconds)
        blocks = [block for rank in trials[-1].ranks for block in rank.blocks]
        return sum(filter(None, phases)) + sum(block.seconds * block.all_steps / block.num_steps for block in blocks)

    def _unfinished(self) -> list[TrialSpec]:
        """Return what another round measures: the baseline, and those whose ratio is not known well enough.

        Each configuration counts its own rounds: one that was added later begins with its first. The baseline, which is
        in every group of a round, has had more of them than the others. It comes first, then those with the fewest.
        Whatever was never measured has a process before any other has a second. After that, emulated precisions, which
        are slow and hardly ever taken, wait until the others are known. With a budget their first process comes after
        the others': a step of theirs may take as long as all of these.
        """
        well = [] if _fail_alike(self.trials) else self._not_failed()
        wide = [spec for spec in well if not self._is_narrow(spec) and self._num_trials(spec) < self._rule.max_rounds]
        wide = self._first_of([spec for spec in wide if not self._is_baseline(spec)]) or wide
        baseline = [spec for spec in well if self._is_baseline(spec)] if wide else []
        return [*baseline, *sorted((spec for spec in wide if spec not in baseline), key=self._num_trials)]

    def _first_of(self, others: Sequence[TrialSpec]) -> list[TrialSpec]:
        """Return what `_unfinished` measures first of these; empty if all are emulated and were tried."""
        of_hardware = [spec for spec in others if not self._emulation_rank(spec)]
        never = [s for s in others if not self._num_trials(s) and s.configuration not in self._given_up]
        if self._rule.budget_seconds is not None:
            first = [spec for spec in never if spec in of_hardware]
            never = first or (never if self._rule.one_look else of_hardware or never)
        return never or of_hardware

    def _is_narrow(self, spec: TrialSpec) -> bool:
        trials, is_script = self._of(spec), spec.is_script
        if self._has_diverged(spec) or self._is_settled_by_a_look(spec):
            return True  # nobody takes it, so its time needs no interval
        # A script takes long to set up. Its baseline is measured again only beside others that need it.
        is_enough = len(trials) >= self._rule.min_rounds
        is_beside = self._is_baseline(spec) and any(not self._is_baseline(other) for other in self._not_failed())
        if (is_script and is_beside) or ((is_script or is_enough) and self._is_behind(spec)):
            return True
        if not is_enough:
            return False
        # The baseline's own interval is not needed; without a baseline there is no ratio.
        if self._is_baseline(spec) or any(
            self._is_baseline(other) and self._has_failed(other) for other in self._specs
        ):
            return True
        ratio = speedup_estimate(self._of(self._baseline), trials) if self._baseline is not None else None
        return ratio is None or (self._rule.is_answered(ratio) and not self._has_strays())

    def _has_strays(self) -> bool:
        """Return whether a process is in another mode than most: more of them show how often any is."""
        return any(strays_among(self._of(spec)) for spec in self._specs)

    def _is_behind(self, spec: TrialSpec) -> bool:
        """Return whether another is proven faster that is as good to take: nothing depends on by how much."""
        if not self._rule.one_look:
            return False
        for other in self._not_failed():
            if precision_row(other.precision).keeps_float32_weights or self._is_baseline(other):
                slower, faster = self._of(spec), self._of(other)
                ratio = speedup_estimate(slower, faster) if len(slower) >= self._rule.min_rounds else None
                is_proven = ratio is not None and ratio.low > 1
                if (is_proven or one_process_shows(slower, faster) == "faster") and not self._has_diverged(other):
                    return True
        return False

    def _is_settled_by_a_look(self, spec: TrialSpec) -> bool:
        if not self._rule.one_look or self._baseline is None or self._is_baseline(spec):
            return False
        shown = one_process_shows(self._of(self._baseline), self._of(spec))
        # FP8 is compared with bf16-mixed, too.
        has_fp8 = any(precision_row(other.precision).float8_recipe for other in self._specs)
        return shown == "slower" or (shown == "faster" and not has_fp8)

    def _run_round(self, specs: list[TrialSpec]) -> None:
        number = 1 + max(map(self._num_trials, [s for s in specs if not self._is_baseline(s)] or specs))
        is_first = not all(map(self._num_trials, specs))
        waiting = [specs] if is_first else self._groups_that_fit(specs)
        # On a CPU they would slow each other down, and the set-up time would be of none.
        is_slowed = is_first and self._specs[0].device_type == "cpu"
        while waiting:
            # The baseline may just have failed, and an earlier session of the round taken the time.
            group = self._affordable([spec for spec in waiting.pop(0) if not self._has_failed(spec)])
            if group:
                waiting += self._run_group(group, number, one_by_one=is_slowed)

    def _run_group(self, group: list[TrialSpec], number: int, *, one_by_one: bool) -> list[list[TrialSpec]]:
        """Measure configurations in a session; return those of configurations that may fit with fewer others."""
        started = time.perf_counter()
        fresh = [spec.model_copy(update={"repeat": self._free_repeat(spec)}) for spec in group]
        self._announce(fresh[0])
        emulated = {spec.configuration for spec in group if self._emulation_rank(spec)}
        session = InterleavedSession(
            self._runner,
            fresh,
            round_number=number,
            setup_order="one by one" if one_by_one or any(map(self._times_kernels, group)) else "together",
            earlier={spec.configuration: prior_stats_of(self._of(spec)) for spec in group},
            baseline=None if self._baseline is None else self._baseline.configuration,
            deadline=self._deadline,
            fits_deadline=self._seconds_per_cost > 0,
            grace_seconds=_GRACE_SHARE * (self._rule.budget_seconds or 0.0),
            looked_at=emulated - self._given_up if self._rule.one_look else (),
            seed=self._seed,
        )
        trials = session.run()
        measured = {trial.spec.configuration for trial in trials}
        self._compiled |= measured
        self._given_up |= emulated - measured
        if _fail_alike(trials):  # the fewest trials that show it are enough
            trials = next(few for few in itertools.accumulate([trial] for trial in trials) if _fail_alike(few))
        postponed: list[str] = []
        for trial in trials:
            if _may_lack_memory(trial) and len(group) > 1:  # no record yet
                postponed.append(trial.spec.configuration)
            else:
                self._keep(trial)
        self._note_seconds(group, time.perf_counter() - started - session.seconds_given_up)
        return self._less_crowded([spec for spec in group if spec.configuration in postponed], group)

    def _times_kernels(self, spec: TrialSpec) -> bool:
        """Return whether a configuration's set-up times kernels without holding the devices' lock.

        One that times kernels takes the lock by itself, unless it does so within a compilation, or on several machines.
        What Inductor has chosen, later processes load.
        """
        names = spec.techniques
        if times_kernels_while_compiling(names):
            return True
        chooses = searches_kernels(names) or (times_kernels(names) and spec.configuration not in self._compiled)
        return chooses and not spec.may_hold_devices_alone

    def _note_seconds(self, group: list[TrialSpec], seconds: float) -> None:
        self.session_seconds = min(self.session_seconds or seconds, seconds)
        if cost := sum(filter(math.isfinite, map(self._cost, group))):
            self._seconds_per_cost = max(self._seconds_per_cost, seconds / cost)

    def _keep(self, trial: Trial) -> None:
        if self._runner.store is not None:
            self._runner.store.save(trial)
        self._announce(trial.spec)
        self.trials.append(trial)
        self._runner.listener.ended(trial)

    def _groups_that_fit(self, specs: list[TrialSpec]) -> list[list[TrialSpec]]:
        """Return sessions that fit into the device's memory, by what each configuration needed in earlier rounds."""
        memory_bytes = self._runner.environment.gpu_memory_bytes
        if memory_bytes is None:
            return [specs]
        bytes_of: dict[str, float] = {}
        for spec in specs:
            ranks = [rank for trial in self._of(spec) for rank in trial.ranks]
            peaks = [max(rank.peak_reserved_bytes or 0, rank.warm_up_peak_allocated_bytes or 0) for rank in ranks]
            bytes_of[spec.key] = max(peaks, default=0) + _CONTEXT_BYTES
        baseline = [spec for spec in specs if self._is_baseline(spec)]
        others = [spec for spec in specs if not self._is_baseline(spec)]
        return group_by_memory(baseline, others, bytes_of, memory_bytes * _USABLE)

    def _free_repeat(self, spec: TrialSpec) -> int:
        taken = {trial.spec.repeat for trial in self._of(spec)}
        return next(number for number in itertools.count(self._first_repeat) if number not in taken)

    def _less_crowded(self, postponed: list[TrialSpec], group: list[TrialSpec]) -> list[list[TrialSpec]]:
        """Return the next sessions of those that did not fit into a group: with the baseline while that may work."""
        baseline = [spec for spec in group if self._is_baseline(spec) and spec not in postponed]
        if baseline and 0 < len(postponed) < len(group) - 1:
            return [[*baseline, *postponed]]
        if baseline and len(postponed) > 1:
            return [[*baseline, spec] for spec in postponed]
        return [[spec] for spec in postponed]

    def _announce(self, spec: TrialSpec) -> None:
        """Report which trial this is, of as many as there will be at least; beyond those the number is unknown."""
        index, fewest = len(self.trials) + 1, len(self._specs) * self._rule.min_rounds
        self._runner.listener.started(spec, index, fewest if index <= fewest else 0)

    def _of(self, spec: TrialSpec) -> list[Trial]:
        return [trial for trial in self.trials if trial.spec.configuration == spec.configuration]

    def _num_trials(self, spec: TrialSpec) -> int:
        return len(self._of(spec))

    def _has_failed(self, spec: TrialSpec) -> bool:
        return any(trial.status not in ("ok", "diverged") for trial in self._of(spec))

    def _has_diverged(self, spec: TrialSpec) -> bool:
        return any(trial.status == "diverged" and trial.spec.recipe is None for trial in self._of(spec))

    def _not_failed(self) -> list[TrialSpec]:
        return [spec for spec in self._specs if not self._has_failed(spec)]

    def _emulation_rank(self, spec: TrialSpec) -> int:
        """Return 0 for a precision that the device has, else more the more it changes the loop."""
        row = precision_row(spec.precision)
        return 0 if why_emulated(row, self._runner.environment.hardware) is None else 1 + row.loop_changes

    def _is_baseline(self, spec: TrialSpec) -> bool:
        return self._baseline is not None and spec.configuration == self._baseline.configuration


def group_by_memory(
    baseline: list[TrialSpec], others: Sequence[TrialSpec], bytes_of: Mapping[str, float], usable_bytes: float
) -> list[list[TrialSpec]]:
    """Return sessions that fit into memory, each with the baseline; what does not fit next to it is alone.

    `bytes_of` is what each needs, by the key of its spec.
    """
    room = usable_bytes - sum(bytes_of[spec.key] for spec in baseline)
    groups: list[list[TrialSpec]] = []
    left = 0.0
    for spec in others:
        needed = bytes_of[spec.key]
        if not groups or needed > left:
            groups.append([*baseline, spec] if needed <= room else [spec])
            left = room - needed
        else:
            groups[-1].append(spec)
            left -= needed
    return groups or [baseline]


def _fail_alike(trials: Sequence[Trial]) -> bool:
    """Return whether trials of full and of 16-bit precision crashed with the same error, and no trial ended well."""
    return fails_alike((trial.spec.precision, trial.message if trial.status == "crashed" else None) for trial in trials)


def _may_lack_memory(trial: Trial) -> bool:
    """Return whether a trial may succeed with fewer others; cuDNN and cuBLAS have other words for lack of memory."""
    return trial.status == "oom" or (trial.status == "crashed" and "_STATUS_" in trial.message)


def prior_stats_of(trials: Sequence[Trial]) -> PriorStats | None:
    """Return what a configuration's processes measured; None if none was timed for long enough."""
    timed = [trial for trial in trials if len(block_means(trial)) >= FEWEST_BLOCKS]
    found = step_estimate(timed)
    if found is None:
        return None
    noise = max(noise_of(block_means(trial), block_lengths(trial)) for trial in timed)
    return PriorStats(noise, found.value, process_stds(timed), any(map(was_at_power_limit, timed)))
