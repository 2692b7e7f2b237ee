"""Model FLOP/s and MFU: the FLOPs that a step's products need over its time, and that over the GPU's peak.

Source: Chowdhery et al., "PaLM" (2022), appendix B, which defines the model FLOPs utilisation (MFU).
"""

from collections.abc import Sequence

from castwise.records.schema import Float8Facts, StepFlops, Trial
from castwise.registry.gpus import peak
from castwise.registry.precisions import precision_row
from castwise.registry.techniques import step_config_of

# If this share of a step's FLOPs or more is in one format, its peak is the step's: a rotary embedding of Llama's
# multiplies a millionth of them in float32. Source: chosen here.
_ONE_FORMAT = 0.99
_MOST_UNLISTED = 0.05  # of the time, in kernels whose FLOPs are not known; chosen here
# FP8 is taken only if no product of a converted layer has a lower SQNR. Source: the bound of torchao 0.18's own tests,
# test/float8/test_numerics_integration_test.py.
_LEAST_SQNR_DB = 20.0
# Nor if a cast makes more of a factor's values 0: small gradients of a softmax are then lost for all tokens alike, and
# SQNR does not see it. Source: chosen here; on an H200 at most 0.7 % with a scale a tensor, 37 % with a scale a row.
_MOST_UNDERFLOW = 0.1


def flops_of(trials: Sequence[Trial]) -> StepFlops | None:
    """Return the FLOPs of a configuration's step in one process; None if no trial of it has counted any."""
    counted = [trial.ranks[0].flops for trial in trials if trial.ranks]
    counted += [trial.profile.flops for trial in trials if trial.profile is not None]
    return next((flops for flops in counted if flops is not None and flops.total), None)


def unlisted_share(trial: Trial) -> float:
    """Return the share of a script's busy time that may be products of which no FLOPs were counted."""
    profile = trial.profile
    if profile is None or not trial.spec.is_script or not profile.busy_seconds:
        return 0.0
    return min(1.0, sum(profile.unlisted_seconds.values()) / profile.busy_seconds)


def model_flops_per_second(trials: Sequence[Trial], step_seconds: float | None) -> float | None:
    """Return the model FLOPs of a configuration's step in all processes together, over its seconds.

    None if they, or some of them, are not counted.
    """
    flops = flops_of(trials)
    if flops is None or not step_seconds or any(unlisted_share(trial) > _MOST_UNLISTED for trial in trials):
        return None
    return flops.total * trials[0].spec.num_processes / step_seconds


def share_of_peak(trials: Sequence[Trial], step_seconds: float | None) -> float | None:
    """Return model FLOP/s over the GPUs' dense peak in the format that ran, as its vendor states it.

    It is above 1 if a GPU runs above the clock at which the peak holds.

    None if that peak is not known, as of sums in float16, if products run in several formats, and if no FLOPs are
    counted.
    """
    rate, flops = model_flops_per_second(trials, step_seconds), flops_of(trials)
    if rate is None or flops is None or step_config_of(trials[0].spec.techniques).fp16_accumulation:
        return None
    name, most = next(iter(flops.by_format.items()))
    limit = peak(trials[0].environment.gpu_model, name)
    if limit is None or most < _ONE_FORMAT * flops.total:
        return None
    return rate / (limit * trials[0].spec.world_size)


def model_flops_utilization(trials: Sequence[Trial], step_seconds: float | None) -> float | None:
    """Return the MFU, 0 to 1: the share of the peak at the boost clock, whatever the clock was. So do others' figures.

    None if that share is not known, and if it is above 1: the peak is then not this GPU's, and `warnings.py` says so.
    """
    share = share_of_peak(trials, step_seconds)
    return None if share is None or share > 1 else share


def fp8_share(trials: Sequence[Trial]) -> float | None:
    """Return the share of the FLOPs that a precision of FP8 has in FP8; None for others, and if none are counted."""
    flops = flops_of(trials)
    return None if flops is None or float8_of(trials) is None else flops.share_of("fp8")


def float8_of(trials: Sequence[Trial]) -> Float8Facts | None:
    """Return what is known of a configuration's layers in FP8, from the process that compared them; None without."""
    found = [trial.facts.float8 for trial in trials if trial.facts is not None and trial.facts.float8 is not None]
    return next((facts for facts in found if facts.min_sqnr_db is not None), found[0] if found else None)


def why_inexact(trials: Sequence[Trial]) -> str | None:
    """Return why a configuration of FP8 is not to be taken, whatever its speed; None if it may, and for others."""
    if not precision_row(trials[0].spec.precision).float8_recipe:
        return None
    facts = float8_of(trials)
    if facts is None or facts.min_sqnr_db is None:
        return "its products were not compared with bfloat16's"
    if facts.min_sqnr_db < _LEAST_SQNR_DB:
        return f"an SQNR of {facts.min_sqnr_db:.1f} dB in {facts.min_sqnr_product}, under {_LEAST_SQNR_DB:.0f} dB"
    if (lost := facts.max_underflow_share or 0.0) > _MOST_UNDERFLOW:
        return f"casts make {100 * lost:.0f} % of the values 0 in {facts.max_underflow_factor}"
    return None


def model_flops_values(trials: Sequence[Trial], step_seconds: float | None) -> dict[str, float | None]:
    """Return both figures by the names of their fields."""
    functions = (model_flops_per_second, model_flops_utilization)
    return {function.__name__: function(trials, step_seconds) for function in functions}
