"""Model FLOP/s and MFU: the FLOPs that a step's products need over its time, and that over the GPU's peak.

Source: Chowdhery et al., "PaLM" (2022), appendix B, which defines the model FLOPs utilisation (MFU).
"""

import statistics
from collections.abc import Sequence

from castwise.records.schema import StepFlops, Trial
from castwise.registry.gpus import find_gpu_model, peak

# If this share of a step's FLOPs or more is in one format, its peak is the step's: a rotary embedding of Llama's
# multiplies a millionth of them in float32. Source: chosen here.
_ONE_FORMAT = 0.99


def flops_of(trials: Sequence[Trial]) -> StepFlops | None:
    """Return the FLOPs of a configuration's step in one process; None if no trial of it has counted any."""
    counted = (trial.ranks[0].flops for trial in trials if trial.ranks)
    return next((each for each in counted if each is not None and each.total), None)


def model_flops_per_second(trials: Sequence[Trial], step_seconds: float | None) -> float | None:
    """Return the model FLOPs of a configuration's step in all processes together, over its seconds."""
    flops = flops_of(trials)
    if flops is None or not step_seconds:
        return None
    return flops.total * trials[0].spec.num_processes / step_seconds


def format_of(flops: StepFlops) -> str | None:
    """Return the format that a step's products are computed in; None if they are mixed."""
    most = next(iter(flops.by_format), None)
    return most if most is not None and flops.by_format[most] >= _ONE_FORMAT * flops.total else None


def sm_clock_hertz(trials: Sequence[Trial]) -> float | None:
    """Return the mean clock of the multiprocessors while steps were timed; None if it was not read."""
    read = [
        (reading.sm_clock_hertz, reading.seconds)
        for trial in trials
        for reading in trial.readings
        if reading.sm_clock_hertz and reading.seconds > 0
    ]
    return statistics.fmean([clock for clock, _ in read], [seconds for _, seconds in read]) if read else None


def model_flops_utilization(trials: Sequence[Trial], step_seconds: float | None) -> float | None:
    """Return the MFU, 0 to 1: model FLOP/s over the GPUs' dense peak in the format that ran, at the clock as read.

    None if that peak is not known, if products run in several formats, and if no FLOPs are counted.
    """
    rate, flops = model_flops_per_second(trials, step_seconds), flops_of(trials)
    name = None if flops is None else format_of(flops)
    if rate is None or name is None:
        return None
    gpu = find_gpu_model(trials[0].environment.gpu or "")
    limit = peak(gpu, name, sm_clock_hertz(trials))
    return None if limit is None else rate / (limit * trials[0].spec.world_size)


def model_flops_values(trials: Sequence[Trial], step_seconds: float | None) -> dict[str, float | None]:
    """Return both figures by the names of their fields."""
    functions = (model_flops_per_second, model_flops_utilization)
    return {function.__name__: function(trials, step_seconds) for function in functions}
