"""What a precision's rounding does to gradients and updates, in sentences, and which static loss scales fit."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from castwise.records.schema import GradientHistogram, ModuleNumerics, PrecisionFall, StepNumerics
from castwise.registry.precisions import Dtype, Precision
from castwise.spec.loss_scale import is_dynamic
from castwise.spec.quantities import format_share

FindingName = Literal["underflow", "overflow", "static-scale", "first-loss", "rounding", "lost-updates", "limit"]

# Below this share, lost gradients of a module are not worth a larger scale. Source: chosen here.
_LEAST = 1e-3
_LARGEST_FLOAT16 = 65520.0  # what is smaller is rounded to a finite number
_SCALES = range(25)  # powers of two. Source: 2^24 is the largest scale of Apex's dynamic scaling.
_EXACT_DB = 150.0  # float32 itself has less
# Precision is lost where the SQNR of outputs falls by so much at once, and below so much. Source: chosen here; in eight
# of castwise's workloads in bf16-mixed and bf16-true (CPU, 2026-11-29) no module has both: they fall by up to 9 dB, to
# 40, or by up to 4 where less than 30 are left.
_SHARP_DB, _GOOD_DB = 10.0, 30.0
# Of the smallest subnormal number. Source: IEEE 754-2019, table 3.5; bfloat16 is binary32 with 7 bits of mantissa.
_LOWEST_EXPONENTS: dict[Dtype, int] = {"float16": -24, "bfloat16": -133, "float32": -149}


@dataclass(frozen=True)
class Finding:
    name: FindingName
    sentence: str
    module: str = ""  # the one that has most of it


def underflow_share(gradients: GradientHistogram, dtype: Dtype, scale: float = 1.0) -> float:
    """Return the share of nonzero gradients that a format rounds to zero after scaling.

    They are below half of the smallest subnormal number. A scale counts as the power of two below it.
    """
    counts = gradients.by_exponent
    limit = _LOWEST_EXPONENTS[dtype] - 1 - math.floor(math.log2(scale)) if scale > 0 else math.inf
    return sum(count for exponent, count in counts.items() if exponent < limit) / max(1, sum(counts.values()))


def lost_here(module: ModuleNumerics, numerics: StepNumerics, precision: Precision) -> float:
    """Return `lost_share` in a precision's own format, with the loss scale of the step."""
    return lost_share(module, precision.autocast_dtype or precision.param_dtype, numerics.loss_scale or 1.0)


def lost_share(module: ModuleNumerics, dtype: Dtype, scale: float = 1.0) -> float:
    """Return the share of a module's gradients that underflow, of its weights' or its outputs' the larger one."""
    return max(underflow_share(gradients, dtype, scale) for gradients in (module.weights, module.outputs))


def has_gradients(module: ModuleNumerics) -> bool:
    """Return whether the exponents of a module's gradients are known, as they are not of scripts."""
    return bool(module.weights.counts or module.outputs.counts)


def least_sqnr_db(module: ModuleNumerics) -> float:
    """Return the lower SQNR of a module's outputs and gradients; infinite if neither is known."""
    known = (module.output_sqnr_db, module.gradient_sqnr_db)
    return min((decibels for decibels in known if decibels is not None), default=math.inf)


def worst_first(numerics: StepNumerics, precision: Precision) -> list[ModuleNumerics]:
    """Return the modules, first those that lose most gradients or updates, then those of the lowest SQNR."""

    def rank(module: ModuleNumerics) -> tuple[float, float]:
        lost = max(lost_here(module, numerics, precision), module.overflow_share, module.lost_update_share or 0.0)
        return -round(lost, 2), least_sqnr_db(module)

    return sorted(numerics.modules, key=rank)


def first_loss(numerics: StepNumerics) -> PrecisionFall | None:
    """Return where in the forward pass precision is lost first; None if it is nowhere, or by and by."""
    falls = (fall for fall in numerics.falls if fall.before_db - fall.after_db >= _SHARP_DB)
    return next((fall for fall in falls if fall.after_db < _GOOD_DB), None)


def static_scales(numerics: StepNumerics) -> tuple[int, int] | None:
    """Return the least and the largest power of two that fits float16 as a loss scale, as exponents; None if none does.

    With it less than 0.1 % of the gradients of every module underflow, and none overflows.
    """
    powers = _finite_scales(numerics)
    fitting = [power for power in powers if _most_lost(numerics.modules, 2.0**power)[1] < _LEAST]
    return (fitting[0], fitting[-1]) if fitting else None


def _finite_scales(numerics: StepNumerics) -> list[int]:
    """Return the powers of two with which no gradient overflows in float16; none if all gradients are zero."""
    largest = max((side.largest for module in numerics.modules for side in (module.weights, module.outputs)), default=0)
    return [power for power in _SCALES if 0 < largest * 2.0**power < _LARGEST_FLOAT16]


def _most_lost(modules: Sequence[ModuleNumerics], scale: float) -> tuple[ModuleNumerics, float, str]:
    """Return the module that loses most gradients in float16 with a loss scale, the share, and what they are of."""
    worst = max(modules, key=lambda module: lost_share(module, "float16", scale))
    lost = lost_share(worst, "float16", scale)
    of_outputs = lost > underflow_share(worst.weights, "float16", scale)
    return worst, lost, f"the gradients of {_in_words(worst)}'s {'outputs' if of_outputs else 'weights'}"


def _in_words(module: ModuleNumerics) -> str:
    return "the model" if module.name == "(model)" else module.name


def findings_of(numerics: StepNumerics, precision: Precision, loss_scale: str) -> list[Finding]:
    """Return what rounding does in a precision with a loss scale of this name, and what is not known of it."""
    found = _findings(numerics, precision, is_dynamic(loss_scale)) if numerics.modules else ()
    limits = filter(None, (numerics.note, numerics.missing))
    return [*found, *(Finding("limit", f"{text.removesuffix('.')}.") for text in limits)]


def _findings(numerics: StepNumerics, precision: Precision, moves: bool) -> Iterator[Finding]:
    scale, modules = numerics.loss_scale, numerics.modules
    if precision.has_float16 and any(has_gradients(module) for module in modules):
        worst, lost, whose = _most_lost(modules, 1.0)
        if lost < _LEAST:
            words = f"float16 needs no loss scale on this batch: it rounds {format_share(lost)} of {whose} to zero"
        else:
            words = f"float16 without scaling loses {format_share(lost)} of {whose}"
            if scale is not None:
                named = f"the {'dynamic' if moves else 'static'} scale of {scale:,.6g}"
                _, still, which = _most_lost(modules, scale)
                kept = f"keeps {100 * (1 - lost_share(worst, 'float16', scale)):.1f} %"
                words += f"; {named} {kept if still < _LEAST else f'still loses {format_share(still)} of {which}'}"
        yield Finding("underflow", f"{words}.", worst.name)
        fitting, finite = static_scales(numerics), _finite_scales(numerics)
        if fitting is not None:
            which = f"static loss scales that fit: {2 ** fitting[0]:,} to {2 ** fitting[1]:,}"
        elif finite:
            _, still, whose = _most_lost(modules, 2.0 ** finite[-1])
            which = f"no static loss scale keeps all: {2 ** finite[-1]:,}, the largest without overflow, loses "
            which += f"{format_share(still)} of {whose}"
        else:
            which = "no static loss scale fits: with each, gradients underflow or overflow"
        yield Finding("static-scale", f"{which}.")
    worst = max(modules, key=lambda module: module.overflow_share)
    if worst.overflow_share:
        words = f"{format_share(worst.overflow_share)} of the gradients of {_in_words(worst)} overflow"
        words += "" if scale is None else f" with a loss scale of {scale:,.6g}"
        yield Finding("overflow", f"{words}{'; such a step is skipped' if moves else ''}.", worst.name)
    yield from _rounding(numerics)
    if stepped := [(each.lost_update_share, each) for each in modules if each.lost_update_share is not None]:
        total = sum(share * module.num_weights for share, module in stepped)
        all_lost = total / max(1, sum(module.num_weights for _, module in stepped))
        most, worst = max(stepped, key=lambda each: each[0])
        words = f"{format_share(all_lost)} of the weight updates round to nothing, in {_in_words(worst)} "
        whole = numerics.kept_update_share
        mean = "" if whole is None else f"; in the mean {format_share(max(0.0, whole))} of an update is kept"
        yield Finding("lost-updates", f"{words}{format_share(most)}{mean}.", worst.name)


def _rounding(numerics: StepNumerics) -> Iterator[Finding]:
    """Yield where precision is lost first, or else what is furthest from float32."""
    worst = min(numerics.modules, key=least_sqnr_db)
    decibels = least_sqnr_db(worst)
    if (fall := first_loss(numerics)) is not None:
        where = f"`{fall.module}`" if fall.module else "the model's own code"
        where = f"{where}, before it calls `{fall.before}`" if fall.before else where
        before = f"{fall.before_db:.0f} dB" if fall.before_db < _EXACT_DB else "exact"
        computes = f"; it computes in {fall.dtype}" if fall.dtype not in ("", "float32") else ""
        words = f"precision is lost first in {where}: {before} before it, {fall.after_db:.0f} dB after it{computes}"
        yield Finding("first-loss", f"{words}.", fall.module)
    elif decibels < _EXACT_DB:
        what = "outputs" if decibels == worst.output_sqnr_db else "weight gradients"
        words = f"furthest from float32 are the {what} of {_in_words(worst)}: {decibels:.0f} dB, an error of "
        yield Finding("rounding", f"{words}{format_share(10 ** (-decibels / 20))}.", worst.name)
