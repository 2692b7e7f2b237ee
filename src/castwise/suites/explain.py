"""Why a measured speed-up differs from a published one: one sentence from what was measured, never more.

What set the pace on the source's machine cannot be measured here. What is known of it is its datasheet.
"""

from dataclasses import dataclass

from castwise.analysis import training_metrics
from castwise.analysis.steady_metrics import unit_of
from castwise.records.schema import Trial
from castwise.registry.gpus import GpuModel, find_gpu_model, peak
from castwise.registry.precisions import find_precision
from castwise.registry.workloads import find_workload
from castwise.spec.quantities import format_share
from castwise.suites.same_loader import Fellow

# Choices, not measurements: from which share of the time on a cause is named.
_ALIKE = 0.10  # speed-ups that differ by less
_WAITS = 0.25  # of the training time, waiting for data
_MOSTLY_WAITS = 0.5  # beyond it the loader ends a gain, whatever datasheets promise
_IDLE = 0.10  # of the peak rate, below which arithmetic does not set the pace
_GAIN = 1.3  # below it precision hardly matters to the loop

_UNEXPLAINED = "not explained by what was measured: "
_TENSOR_CORES = (7, 0)
_FLOPS_PER_MAC = 6  # two in the forward pass, four in the backward pass


@dataclass(frozen=True)
class Pair:
    """A published speed-up and the measured one.

    Attributes:
        published_gpu: The source's GPU as it names it.
        published_device: The same as its driver names it.
        published_outcome: How the source's run ended.
        published_speedup: Over the source's float32 run.
        speedup: Measured, between the same two cells.
        equal_batch_speedup: Measured, at equal batch.
        trial: The measured run; None where there is none.
        baseline: The measured float32 run; None where there is none.
        fellow: A run that shows that the loader sets the measured run's pace; None where none does.
    """

    published_gpu: str
    published_device: str
    published_outcome: str
    published_speedup: float | None
    speedup: float | None
    equal_batch_speedup: float | None
    trial: Trial | None
    baseline: Trial | None
    fellow: Fellow | None = None


def explain(pair: Pair) -> str:
    """Return the sentence; empty where there is nothing to say."""
    if pair.trial is None:
        return ""
    if pair.published_outcome != "ok" or pair.trial.status != "ok":
        return _outcomes(pair, pair.trial)
    if pair.speedup is None or pair.published_speedup is None or pair.baseline is None:
        return ""
    if abs(pair.speedup / pair.published_speedup - 1) < _ALIKE:
        cause = f"the two speed-ups agree within {format_share(_ALIKE)}"
    else:
        cause = _cause(pair, pair.trial, pair.baseline)
    return "; ".join(part for part in (cause, _batch(pair.trial, pair.baseline, pair.equal_batch_speedup)) if part)


def _cause(pair: Pair, trial: Trial, baseline: Trial) -> str:
    """Return what the difference comes from; what holds a loop back explains no larger gain than the source's.

    But where the loop mostly waits for its loader, as its own record or another model's run shows, a larger gain ends
    there; and where the float32 loop mostly waits, too, no datasheet explains it.
    """
    beside = _beside_fellow(pair, trial)
    if (pair.speedup or 0.0) < (pair.published_speedup or 0.0):
        held_back = _start(trial, baseline) or _loader(trial, baseline) or beside or _idle(pair, trial)
        if held_back:
            return held_back
    ends = _loader(trial, baseline) if _mostly_waits(trial) else beside
    if not ends:
        return _peaks(pair, trial, _waits(trial, "here the loop waits"))
    if _mostly_waits(baseline):
        return ends
    peaks = _peaks(pair, trial, "")
    return f"{peaks}; the gain goes no further, for {ends}" if peaks else _UNEXPLAINED + ends


def _mostly_waits(trial: Trial) -> bool:
    return (training_metrics.data_share(trial) or 0.0) > _MOSTLY_WAITS


def _outcomes(pair: Pair, trial: Trial) -> str:
    here = {"ok": "ends well", "oom": "runs out of memory", "diverged": "diverges"}.get(trial.status, trial.status)
    there = {"ok": "ended well", "oom": "ran out of memory", "diverged": "diverged"}[pair.published_outcome]
    words = f"{there} on the source's {pair.published_gpu}, {here} here"
    if trial.status != "ok":
        return f"{words}: {trial.message}" if trial.message else words
    if pair.published_outcome == "diverged" and not training_metrics.is_whole(trial):
        return f"{there} on the source's {pair.published_gpu}, had not here by the end of a run cut short"
    if pair.published_outcome == "oom":
        published, memory = find_gpu_model(pair.published_device), trial.environment.gpu_memory_bytes
        reserved = max((rank.peak_reserved_bytes or 0 for rank in trial.ranks), default=0)
        if published is not None and memory is not None and reserved:
            taken = f"{reserved / 2**30:.1f} of {memory / 2**30:.0f} GiB"
            return f"{words}: it takes {taken}, and the {pair.published_gpu} has {published.memory_gigabytes} GB"
    return words


def _start(trial: Trial, baseline: Trial) -> str:
    """Return the sentence where whole runs are so short that their first step weighs, else nothing."""
    own, before = training_metrics.split(trial), training_metrics.split(baseline)
    if own is None or before is None or not (training_metrics.is_whole(trial) and training_metrics.is_whole(baseline)):
        return ""
    if own.start < _WAITS * own.total:
        return ""
    without = (before.total - before.start) / (own.total - own.start)
    return (
        f"here the first step, in which libraries are loaded, is {format_share(own.start / own.total)} of the run in "
        f"{trial.spec.precision} and {format_share(before.start / before.total)} in fp32; without it the speed-up is "
        f"{without:.2f}×"
    )


def _loader(trial: Trial, baseline: Trial) -> str:
    """Return the sentence where waiting for data sets the pace, else nothing."""
    share, before = training_metrics.data_share(trial), training_metrics.data_share(baseline)
    if share is None or before is None or share < _WAITS or trial.spec.recipe is None:
        return ""
    workers = trial.spec.recipe.loader.num_workers
    source = {0: "data", 1: "its loader worker"}.get(workers, f"its {workers} loader workers")
    return (
        f"here the loop waits for {source} {format_share(share)} of the time in {trial.spec.precision} "
        f"and {format_share(before)} in fp32: data, not arithmetic, sets the pace"
    )


def _beside_fellow(pair: Pair, trial: Trial) -> str:
    """Return the sentence where another model's run shows that the loader sets the pace, and no record tells it."""
    fellow, rate = pair.fellow, training_metrics.throughput(trial)
    if fellow is None or rate is None or training_metrics.data_share(trial) is not None:
        return ""
    times, theirs = fellow.times_as_long, training_metrics.throughput(fellow.trial) or 0.0
    took = f"took {times:.1f} times as long" if times > 1 else f"took 1/{1 / times:.1f} of the time"
    return (
        f"here the loader sets the pace in {trial.spec.precision}: {rate:,.0f} {unit_of(trial)}/s, and behind the same "
        f"one {theirs:,.0f} of {fellow.trial.spec.workload}, for which the source's {fellow.gpu} {took}"
    )


def _idle(pair: Pair, trial: Trial) -> str:
    """Return the sentence where the GPU is far from its limits and precision hardly matters, else nothing."""
    share = _share_of_peak(trial)
    if share is None or share > _IDLE or (pair.speedup or 0.0) > _GAIN:
        return ""
    return (
        f"here {trial.spec.precision} runs at {format_share(share)} of the {trial.environment.device_name}'s peak"
        f"{_waits(trial, ' and waits')}: launching and synchronising the steps sets the pace"
    )


def _waits(trial: Trial, verb: str) -> str:
    """Return how much of the time a run waits for data, in words; nothing where that is not known."""
    share = training_metrics.data_share(trial)
    return "" if share is None else f"{verb} for data {format_share(share)} of the time"


def _share_of_peak(trial: Trial) -> float | None:
    """Return the arithmetic done over what the datasheet allows in the precision's format."""
    macs = find_workload(trial.spec.workload).macs_per_sample
    device = find_gpu_model(trial.environment.device_name)
    limit = peak(device, find_precision(trial.spec.precision).peak_dtype)
    rate = training_metrics.throughput(trial)
    if macs is None or limit is None or rate is None:
        return None
    return _FLOPS_PER_MAC * macs * rate / (limit * trial.spec.world_size)


def _peaks(pair: Pair, trial: Trial, waits: str) -> str:
    """Return what both GPUs' datasheets promise of the precision; with it, or alone, how much the loop waits here."""
    dtype = find_precision(trial.spec.precision).peak_dtype
    there, here = find_gpu_model(pair.published_device), find_gpu_model(trial.environment.device_name)
    name = trial.environment.device_name
    larger = (pair.speedup or 0.0) > (pair.published_speedup or 0.0)
    if _has_tensor_cores(there) is False:
        gain = _peak_gain(there, dtype)
        peaks = f"no {dtype} rate in its datasheet" if gain is None else f"{dtype} at {gain:.1f} times its fp32 peak"
        words = f"the {pair.published_gpu} has no Tensor Cores, and {peaks}"
        own = _peak_gain(here, dtype)
        if not (own and _has_tensor_cores(here)):
            return words
        return f"{'' if larger else _UNEXPLAINED}{words}; the {name} has them, at {own:.1f} times"
    gains = _peak_gain(there, dtype), _peak_gain(here, dtype)
    if gains[0] is None or gains[1] is None:
        return waits
    peaks = f"{dtype}'s peak over fp32's is {gains[0]:.1f} on the {pair.published_gpu} and {gains[1]:.1f} on the {name}"
    if larger != (gains[1] > gains[0]):
        peaks = _UNEXPLAINED + peaks
    return f"{peaks}, and {waits}" if waits else peaks


def _has_tensor_cores(device: GpuModel | None) -> bool | None:
    """Return whether an NVIDIA GPU has Tensor Cores; None where its datasheet is not known, and for other GPUs."""
    return None if device is None or device.capability is None else device.capability >= _TENSOR_CORES


def _peak_gain(device: GpuModel | None, dtype: str) -> float | None:
    above, below = peak(device, dtype), peak(device, "fp32")
    return above / below if above and below else None


def _batch(trial: Trial, baseline: Trial, equal_batch_speedup: float | None) -> str:
    """Return what part the larger batch has, where the source's two runs differ in it."""
    if trial.spec.batch_size == baseline.spec.batch_size or equal_batch_speedup is None:
        return ""
    return f"at equal batch the measured one is {equal_batch_speedup:.2f}×"
