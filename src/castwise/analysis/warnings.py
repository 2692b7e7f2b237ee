"""Warnings about a trial's figures: one closed list, from the trial's record alone. They change no figure.

A record that lacks what a warning needs gives none.
"""

import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from castwise.analysis import steady_metrics
from castwise.analysis.model_flops import share_of_peak
from castwise.records.schema import Trial
from castwise.spec.quantities import format_share

# The interquartile range of the blocks over their median. A speed-up of 1.05 is enough to choose a precision.
NOISE = 0.05
# Boost clocks change with temperature in steps of 15 MHz, 1 % of 1.5 GHz; a few steps are normal.
CLOCK_SHORTFALL = 0.05
# The fewest values whose range contains the median in 95 % of cases: 1 - 2 (1/2)^6 = 0.97; for five it is 0.94.
FEWEST_BLOCKS = 6
# On any machine some task waits now and then; from a fifth of the time on it is likely the training loop.
PRESSURE = 0.2
# If the kernel does not count pressure: 1.5 runnable tasks for each CPU.
LOAD = 1.5
# The share of the CPUs' time that a hypervisor takes away slows the host by as much.
STEAL = 0.05
# A GPU that warms up by this drops one clock step.
TEMPERATURE_RISE_CELSIUS = 5.0
# With less of the FLOPs in FP8 a figure is more bfloat16's than FP8's.
FP8_SHARE = 0.5
# Warm-up ends when step times agree within 2 % (docs/method.md).
DRIFT = 0.02

# The reasons that hold a clock down; the others are idleness and settings. Source: nvml.h.
POWER_LIMIT = "the power limit sets the clock, which is normal for a big GPU under full load"
_THROTTLING = ("sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
# The cause and the advice for the first of these groups that has one of a trial's reasons.
_WHY_THROTTLED = (
    (
        ("sw_thermal_slowdown", "hw_thermal_slowdown"),
        "the GPU is too hot for its clock",
        "better cooling, or pauses between trials",
    ),
    (
        ("hw_power_brake_slowdown",),
        "the machine's power supply asked for less",
        "fewer GPUs at work in this machine, or another supply",
    ),
    (
        ("sw_power_cap",),
        POWER_LIMIT,
        "nothing if the limit is the board's own; else raise it (nvidia-smi -pl)",
    ),
    (
        ("hw_slowdown",),
        "the hardware halved its clock, for heat or power",
        "look at nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
    ),
)
_WHY_BELOW_BOOST = (
    (_THROTTLING, "the throttling above", "see there"),
    (
        ("applications_clocks_setting", "sync_boost", "display_clock_setting"),
        "the clocks were set by hand",
        "nvidia-smi -rgc -rac resets them",
    ),
    (("gpu_idle",), "the GPU waits for the host, and saves power", "larger batches, torch.compile or CUDA graphs"),
)


@dataclass(frozen=True)
class TrialWarning:
    """A reason to doubt a trial's figures: what was seen, its likely cause, and what to try."""

    name: str
    seen: str
    cause: str
    advice: str

    @property
    def brief(self) -> str:
        """Return the first part of what was seen, for a line."""
        return re.split("[,;] ", self.seen)[0]


_Found = tuple[str, str, str] | None  # what was seen, its likely cause, what to try


def warnings_of_all(trials: Sequence[Trial]) -> list[TrialWarning]:
    """Return the warnings of a configuration's processes, the most serious first.

    Each kind comes once, from the noisiest process that has it.
    """
    found: dict[str, TrialWarning] = {}
    if len(trials) > 1:
        trials = sorted(trials, key=lambda trial: steady_metrics.spread(trial) or 0.0, reverse=True)
    for trial in trials:
        for warning in warnings_of(trial):
            found.setdefault(warning.name, warning)
    return [found[name] for name in _CHECKS if name in found]


def warnings_of(trial: Trial) -> list[TrialWarning]:
    """Return a trial's warnings, the most serious first."""
    return [TrialWarning(name, *found) for name, check in _CHECKS.items() if (found := check(trial)) is not None]


def _throttled(trial: Trial) -> _Found:
    counts = Counter(reason for reading in trial.readings for reason in reading.throttle_reasons or ())
    held = {reason: counts[reason] for reason in _THROTTLING if counts[reason]}
    if not held:
        return None
    blocks = sum(reading.throttle_reasons is not None for reading in trial.readings)
    seen = ", ".join(
        f"{reason} in {count} of {blocks} blocks{_on_gpus(trial, reason)}" for reason, count in held.items()
    )
    limit = trial.gpu_facts.power_limit_watts if trial.gpu_facts is not None else None
    power = mean_reading(trial, "gpu_power_watts")
    if limit and power is not None:
        seen += f", at {power:.0f} of {limit:.0f} W"
    slowdown = steady_metrics.sustained_slowdown(trial)
    if slowdown is not None:
        seen += f"; sustained steps took {format_share(slowdown)} longer than those in the blocks"
    return next((seen, cause, advice) for reasons, cause, advice in _WHY_THROTTLED if held.keys() & set(reasons))


def mean_reading(trial: Trial, field: str) -> float | None:
    """Return the mean of a field of a trial's readings; None if it was never read."""
    known = [value for reading in trial.readings if (value := getattr(reading, field)) is not None]
    return statistics.fmean(known) if known else None


def _on_gpus(trial: Trial, name: str) -> str:
    """Return which of several GPUs a throttle reason or a field of readings is about; empty if all of them."""
    affected = [
        reading.affected_gpus.get(name, ())
        for reading in trial.readings
        if getattr(reading, name, None) or name in (reading.throttle_reasons or ())
    ]
    if not affected or () in affected:
        return ""
    return f" on {', '.join(sorted({device for devices in affected for device in devices}))}"


def _clock_below_boost(trial: Trial) -> _Found:
    most = trial.gpu_facts.max_sm_clock_hertz if trial.gpu_facts is not None else None
    clock = mean_reading(trial, "sm_clock_hertz")
    if not most or clock is None or clock >= (1 - CLOCK_SHORTFALL) * most:
        return None
    slowest = ", of the slowest GPU" if any(reading.num_gpus > 1 for reading in trial.readings) else ""
    seen = f"SM clock {clock / 1e6:.0f} of at most {most / 1e6:.0f} MHz{slowest}"
    reasons = {reason for reading in trial.readings for reason in reading.throttle_reasons or ()}
    for names, cause, advice in _WHY_BELOW_BOOST:
        if reasons & set(names):
            return seen, cause, advice
    return seen, "the driver gives no reason", "look at nvidia-smi -q -d CLOCK"


def _foreign_process(trial: Trial) -> _Found:
    counts = [reading.foreign_processes for reading in trial.readings if reading.foreign_processes is not None]
    shared = [count for count in counts if count]
    if not shared:
        return None
    several = any(reading.num_gpus > 1 for reading in trial.readings)
    where = _on_gpus(trial, "foreign_processes") or (" on the GPUs" if several else " on the GPU")
    others = f"{max(shared)} other process{'es' if max(shared) > 1 else ''}"
    return (
        f"up to {others}{where}, in {len(shared)} of {len(counts)} blocks",
        "they take time, memory and power from it",
        "end them (castwise doctor names them), or take another GPU",
    )


def _noisy(trial: Trial) -> _Found:
    spread = steady_metrics.spread(trial)
    if spread is None or spread <= NOISE:
        return None
    settled = "" if trial.facts is None or trial.facts.settled else ", and the step time never settled"
    return (
        f"blocks spread by {format_share(spread)}{settled}",
        "either the host sets the pace, or the machine is busy with something else",
        "a quiet machine, or a larger batch",
    )


def _first_block_slow(trial: Trial) -> _Found:
    first, *others = steady_metrics.step_times(trial) or (0.0,)
    if len(others) < 2 or first <= max(others) or first <= (1 + NOISE) * statistics.median(others):
        return None
    excess = first / statistics.median(others) - 1
    return (
        f"the first block took {100 * excess:.0f} % longer, a step against the median of the others",
        "warm-up ended too early: algorithms, memory or clocks were still settling",
        "measure longer (--seconds); one block hardly changes the figure",
    )


def _persistence_off(trial: Trial) -> _Found:
    if trial.gpu_facts is None or trial.gpu_facts.persistence_mode is not False:
        return None
    return (
        "persistence mode is off",
        "the driver unloads between processes: each start takes longer, and clocks start anew",
        "nvidia-smi -pm 1, or nvidia-persistenced",
    )


def _ecc_errors(trial: Trial) -> _Found:
    before = trial.gpu_facts.ecc_errors if trial.gpu_facts is not None else None
    counts = [count for count in (before, *(reading.ecc_errors for reading in trial.readings)) if count is not None]
    if not counts or max(counts) == 0:
        return None
    known = trial.gpu_facts is not None and not {"gpu", "ecc_errors"} & set(trial.gpu_facts.missing)
    more = max(counts) - (before or 0)
    during = f", {more} of them in this trial" if before is not None and known and more else ""
    return (
        f"{max(counts)} uncorrected memory errors, since the driver was loaded{during}{_on_gpus(trial, 'ecc_errors')}",
        "the GPU's memory is failing",
        "trust no figure; nvidia-smi -q -d ECC,ROW_REMAPPER, then reset or replace the GPU",
    )


def _too_few_blocks(trial: Trial) -> _Found:
    count = len(steady_metrics.blocks_of(trial))
    if trial.status != "ok" or trial.session_id or not 0 < count < FEWEST_BLOCKS:
        return None  # in a session the interval comes from several processes, and each ends once it is precise enough
    return (
        f"{count} timed block{'s' if count > 1 else ''}",
        "the steps are long for the time given",
        f"a longer --seconds; a median needs at least {FEWEST_BLOCKS} blocks",
    )


def _untimed_work(trial: Trial) -> _Found:
    work = trial.ranks[0].between_steps if trial.ranks else None
    if work is None:
        return None
    num_steps, period = sum(block.num_steps for block in steady_metrics.blocks_of(trial)), work.period_steps
    steps = period * max(1, round(num_steps / period)) if period else 0
    what, again = f"every {period} steps" if period else "now and then", ""
    if work.times_seen == 1:
        what, again = f"once in {period} steps" if period else "before the first step", " if it repeats"
    seen = (
        f"{what} the script does other work for {work.seconds:.2g} s: {format_share(work.share)} of the time{again}, "
    )
    seen += f"{format_share(work.timed_share)} of the {num_steps} timed step{'s' * (num_steps > 1)}"
    times = f"--steps {steps} covers whole periods" if period else "more --steps show whether it does"
    return (
        f"{seen}: {times}",
        "rollouts, evaluation, logging or saving between steps",
        f"{times}; else the figures are those of other steps than the script's",
    )


def _cpu_starved(trial: Trial) -> _Found:
    pressure, steal, load = (mean_reading(trial, field) for field in ("cpu_pressure", "cpu_steal", "cpu_load"))
    if pressure is not None and pressure > PRESSURE:
        seen = f"tasks waited for a CPU {100 * pressure:.0f} % of the time"
    elif steal is not None and steal > STEAL:
        seen = f"the hypervisor kept {100 * steal:.0f} % of the CPUs' time"
    elif pressure is None and load is not None and load > LOAD:
        seen = f"{load:.1f} runnable tasks a CPU"
    else:
        return None
    return seen, "other work on the machine, or more threads than CPUs", "a quiet machine, or more CPUs"


def _thermal_drift(trial: Trial) -> _Found:
    pairs = list(zip(trial.readings, steady_metrics.step_times(trial), strict=False))
    if len(pairs) < 2:
        return None
    (first, before), (last, after) = pairs[0], pairs[-1]
    cold, hot = first.max_temperature_celsius, last.max_temperature_celsius
    if cold is None or hot is None or hot - cold < TEMPERATURE_RISE_CELSIUS:
        return None
    slower, drop = after / before - 1, 0.0
    if first.sm_clock_hertz and last.sm_clock_hertz is not None:
        drop = 1 - last.sm_clock_hertz / first.sm_clock_hertz
    if slower < DRIFT and drop < DRIFT:
        return None
    return (
        f"{cold:.0f} to {hot:.0f} °C, from first to last block; clock {-100 * drop:+z.1f} %, step time "
        f"{100 * slower:+z.1f} %",
        "the GPU was still warming up",
        "measure longer, or after another job has warmed it",
    )


def _little_fp8(trial: Trial) -> _Found:
    float8 = None if trial.facts is None else trial.facts.float8
    flops = trial.ranks[0].flops if trial.ranks else None
    if float8 is None or flops is None or not flops.total or flops.share_of("fp8") >= FP8_SHARE:
        return None
    left = [f"{count} {why}" for why, count in float8.left.items()]
    left += ["attention's own products"] if "attention" in flops.products else []
    return (
        f"{format_share(flops.share_of('fp8'))} of the FLOPs in FP8, in {float8.num_converted} layers",
        f"layers and products that stay in bfloat16: {', '.join(left) or 'unknown ones'}",
        "take the figure for bfloat16's; dimensions that are multiples of 16 let more layers run in FP8",
    )


def _above_peak(trial: Trial) -> _Found:
    share = share_of_peak([trial], steady_metrics.step_seconds(trial))
    if share is None or share <= 1:
        return None
    return (
        f"the model's FLOP/s are {share:.2f} times the datasheet's peak, so castwise prints no MFU",
        "a clock above the boost clock of the datasheet, as of GeForce cards; else FLOPs that are not computed",
        "compare step times, which hold",
    )


# The one list, the most serious first.
_CHECKS: dict[str, Callable[[Trial], _Found]] = {
    "ecc-errors": _ecc_errors,
    "foreign-process": _foreign_process,
    "untimed-work": _untimed_work,
    "little-fp8": _little_fp8,
    "noisy": _noisy,
    "cpu-starved": _cpu_starved,
    "thermal-drift": _thermal_drift,
    "first-block-slow": _first_block_slow,
    "too-few-blocks": _too_few_blocks,
    "above-peak": _above_peak,
    "throttled": _throttled,
    "clock-below-boost": _clock_below_boost,
    "persistence-off": _persistence_off,
}
WARNING_NAMES = tuple(_CHECKS)
