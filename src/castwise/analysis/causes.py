"""Why a configuration is no faster: the causes that its record shows, each with its evidence and what to try.

A cause takes time that another loop or precision would not need; how much at most is computed from the step's time by
class of kernel (`StepProfile`), or from the GPU's counters alone if there is no profile. Causes of less than 5 % of the
step are left out: they are hard to tell from noise.
"""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from castwise.analysis.beside_one_gpu import BesideOneGpu, beside_one_gpu
from castwise.analysis.ceiling import Ceiling, ceiling, least_bytes
from castwise.analysis.model_flops import unlisted_share
from castwise.analysis.numerics import Finding, findings_of
from castwise.analysis.result_table import Row, group_of
from castwise.analysis.speedup import key_on_one_gpu, was_timed
from castwise.analysis.step_evidence import (
    FUSED,
    ITEM_BYTES,
    LAUNCH_SECONDS,
    LEAST,
    LEAST_IDLE,
    LEAST_MEMORY,
    MEMORY,
    MOSTLY,
    UNPRICED,
    UPDATE,
    WRITES_SCORES,
    StepEvidence,
    convolved,
    is_grouped,
    matrices,
    power_limit_of,
)
from castwise.records.schema import (
    AttentionTime,
    Collectives,
    Communication,
    GpuReading,
    KernelTime,
    RankStep,
    StepProfile,
    Trial,
)
from castwise.registry.gpus import peak
from castwise.registry.kernel_classes import PRODUCTS, VECTOR_BYTES, short_name
from castwise.registry.library_faults import LIBRARY_FAULTS
from castwise.registry.precisions import AS_WRITTEN, BASELINE, DEFAULT, find_precision, is_same_as_fp32, why_emulated
from castwise.registry.techniques import captures_graph, compiles, join
from castwise.spec.loss_scale import is_dynamic
from castwise.spec.quantities import format_bytes, format_share
from castwise.spec.trial import TrialSpec
from castwise.spec.typed import TypedLine, advised_line, measuring_options
from castwise.spec.types import FINDING_UNUSED, IN_PYTHON, NO_CACHE, STARTING_COLLECTIVES, CauseName

CLASS_WORDS = {"elementwise": "element-wise", "layout_conversion": "layout conversion", "other": "other work"}
_NEARLY_ALL = 0.75
_FEW = 0.01
_MOST_MODULES = 3  # that a sentence names
_ONE_BY_ONE = 16  # kernels and copies of a loader for each batch; chosen here
# Of the bandwidth while data is moved, if that sets the time. Source: chosen here; of those on record, 20 % at least.
_LEAST_BANDWIDTH = 0.1
_LEAST_UPDATE = 0.1
# Without a profile: multiprocessors that are busy for less than this share of the time wait for the host.
_BUSY = 0.6
# While a kernel runs, a step that fills the GPU keeps at least this share of the multiprocessors busy.
_FILLED = 0.5
# Misaligned products, and convolutions of few channels, run at less than this share of the other products' rate.
_SLOW = 0.6
# Of the peak, what aligned products reach; for records without a padded one. Source: chosen here; an H200's reach 80 %.
_REACHED = 0.6
# Of the peak in 16 bits, what flash attention reaches. Source: Dao, "FlashAttention-2" (2023): 335 TFLOP/s of an H100,
# forward and backward. Its tiles have at least 128 rows, and its heads at most 256 values.
_FLASH_REACHES = 0.335
_FLASH_TILE, _FLASH_HEAD = 128, 256
_FLASH_CAPABILITY = (8, 0)
_USABLE = 0.9  # of the GPU's memory: the allocator leaves gaps; chosen here
# Of batch norm's time in NCHW, the share that channels-last saves in 16 bits. Source: ResNet-50, batch 256, bf16-mixed,
# on an H100: 61.5 ms and 27.2 ms (docs/evidence/causes.md).
_NORM_GAIN = 0.55
# Of what fusion could save at most, torch.compile saves less: causes are ordered as if it were so much. Source: 0.53 of
# it in ResNet-50, 0.44 in ViT-B/16 (H200, docs/evidence/causes.md).
_FUSION_SAVES = 0.5
# A default that has this share of the logarithm of the gain over fp32 leaves little.
_HAS_MOST = 2 / 3
# Collectives of fewer bytes mostly cost their start, some 20 µs, in which NVLink moves them. Source: chosen here; a
# bucket of DDP's has 25 MiB.
_SMALL_BUCKET, _MANY_BUCKETS = 8e6, 8
_EQUAL_WORK = "as much work for each rank, as by batches of like sizes"
_SLOW_CLOCK = 0.95  # of the others': clocks of GPUs at work differ by less; chosen here
_SAME_BATCH = 0.02  # as a share; means of batches that vary differ by so much; chosen here
_SEVERAL_PASSES = 1.5
_SLOWER = 1.1  # times as long as in another precision; less is noise
# A saving of this share of the step is a stronger reason than a default that is fast already.
_STRONG = 0.25


@dataclass(frozen=True)
class Cause:
    """One reason why a step is no faster."""

    name: CauseName
    evidence: str
    advice: str
    share: float | None = None  # of the step's time that it could save at most; None if it is no time
    technique: str = ""  # castwise's name of what to try; empty if it has none that applies


@dataclass(frozen=True)
class LeftOut:
    """A configuration that was asked for and was not timed."""

    spec: TrialSpec
    status: str  # of its trial; "not measured" without one
    reason: str


def _command(step: StepEvidence, technique: str) -> str:
    """Return the command that measures what a technique brings."""
    spec = step.trial.spec
    loops = ",".join((join(spec.techniques), join((*spec.techniques, technique))))
    return advised_line("run", spec.workload, measuring_options([spec]) | {"techniques": loops}, step.typed)


def _no_hardware(step: StepEvidence) -> Cause | None:
    why = why_emulated(step.precision, step.trial.environment.hardware)
    return Cause("no-hardware", f"it is emulated here, as {why}", "fp32, or another device") if why else None


def _baseline_has_tf32(step: StepEvidence) -> Cause | None:
    """Return that PyTorch's default has most of the gain over fp32 already."""
    over_default, over_fp32 = step.row.default_speedup, step.row.speedup
    if over_default is None or over_fp32 is None or step.row.precision in (DEFAULT, BASELINE):
        return None
    of_default = over_fp32 / over_default
    is_close = abs(over_default - 1) <= 2 * LEAST
    if DEFAULT not in step.others or not is_close or of_default < max(1 + LEAST, over_fp32**_HAS_MOST):
        return None
    evidence = (
        f"PyTorch's default computes in TF32 already and is {of_default:.2f}× as fast as fp32; "
        f"{step.row.precision} is {over_fp32:.2f}×"
    )
    return Cause("baseline-tf32", evidence, "a comparison with PyTorch's default instead of fp32")


def _products_of(step: StepEvidence, name: str, what: str, *, with_lines: bool = False) -> tuple[float, str]:
    """Return the share of products of a format in `plain_seconds`, and a sentence with where they are."""
    modules = step.plain_seconds.get(name, {})
    total = sum(modules.values())
    most = sorted((each for each in modules if modules[each] >= LEAST * total), key=lambda each: -modules[each])
    named = [f"`{module}`" for module in most if module.strip("*.")][:_MOST_MODULES]
    where = f" in {', '.join(named)}" if named else ""
    lines = step.counted.lines.get(name, ()) if with_lines else ()
    at = f" ({', '.join(lines)})" if lines else ""
    return step.scale * total, f"{format_share(step.scale * total)} of the step is {what}{where}{at}"


def _in_float64(step: StepEvidence) -> Cause | None:
    share, seen = _products_of(step, "fp64", "float64 products", with_lines=True)
    return Cause("float64", seen, "float32 there: .float(), as of NumPy's arrays, which are float64", share)


def _in_float32(step: StepEvidence) -> Cause | None:
    """Return which products are IEEE float32's: all of a step, or those that 16 bits leave out."""
    if "tf32" in step.formats and step.formats.get("fp32", 0) < _FEW * sum(step.formats.values()):
        return None  # TF32 is switched on, and the library's kernels do without
    now, is_16_bit = step.precision, step.precision.is_16_bit
    share, seen = _products_of(step, "fp32", "products in IEEE float32, without Tensor Cores", with_lines=is_16_bit)
    has_tf32 = not is_same_as_fp32(find_precision(DEFAULT), step.trial.environment.hardware)
    peaks = [peak(step.gpu, name) for name in ("fp32", "tf32" if has_tf32 else "fp16")]
    saved = share if None in peaks else share * max(0.0, 1 - (peaks[0] or 0.0) / (peaks[1] or 1.0))
    tf32 = ', or TF32 by torch.set_float32_matmul_precision("high")' if has_tf32 else ""
    if is_16_bit:
        by_autocast = "autocast is off there, or leaves the operator in float32"
        seen += f": {by_autocast if now.autocast_dtype else 'a cast makes them float32'}"
        return Cause("float32-units", seen, f"16 bits there, too{tf32}", saved)
    if not has_tf32:
        return Cause("float32-units", seen, "16 bits (--precision fp16-mixed)", saved)
    return Cause("float32-units", seen, f"16 bits, as by autocast{tf32}", saved, "tf32")


def _without_tensor_cores(step: StepEvidence) -> Cause | None:
    """Return which products run without Tensor Cores though their format has them."""
    if "grouped_convolution" in step.counted.products:
        return None  # which have none
    known = ("fp64", "fp32") if _in_float32(step) is not None else ("fp64",)
    found = [
        _products_of(step, name, f"{name.replace('fp32', 'float32')} products without Tensor Cores".lstrip())
        for name in step.plain_seconds
        if name not in known
    ]
    share, advice = sum(share for share, _ in found), "sizes that are multiples of 8, or a newer cuDNN"
    return Cause("no-tensor-cores", max(found)[1], advice, share) if found else None


def _grouped_convolutions(step: StepEvidence) -> Cause | None:
    """Return what grouped and depthwise convolutions take beyond the time of their FLOPs and bytes at the peaks."""
    if "grouped_convolution" not in step.counted.products or step.on_cpu or step.computes_in_float32:
        return None
    products = [kernel for kernel in step.spent.kernels if kernel.kind in PRODUCTS]
    grouped = [kernel for kernel in products if is_grouped(kernel)]
    listed = sum(kernel.seconds for kernel in grouped)
    # The record lists the longest kernels. If none without Tensor Cores is another product, the shorter ones are alike.
    are_all = all(is_grouped(kernel) for kernel in products if kernel.kind == "plain_product")
    seconds = max(listed, step.spent.class_seconds.get("plain_product", 0.0) if are_all else 0.0)
    share = saved = step.scale * seconds
    seen = f"{format_share(share)} of the step is grouped convolutions"
    fastest = peak(step.gpu, next(iter(step.counted.by_format)))
    if grouped and step.gpu is not None and fastest is not None:
        flops = sum(kernel.launches * (_flops_of_kernel(kernel) or 0.0) for kernel in grouped)
        # One reads its images, and writes as much.
        moved = sum(2 * step.item_bytes * kernel.launches * math.prod(convolved(kernel)[0]) for kernel in grouped)
        # cuDNN may launch a kernel for each group: then a launch does a part of what its operator's shapes say.
        part = min(1.0, sum(step.counted.products["grouped_convolution"].values()) / (flops or 1.0))
        flops, moved = flops * part, moved * part
        least = max(flops / fastest, moved / step.gpu.bandwidth_bytes_per_second)
        saved *= max(0.0, 1 - least / listed)
        seen += f", which reach at most {format_share(flops / listed / fastest)} of the peak"
    return Cause("grouped-convolutions", seen, "wider groups, or fused blocks without them", saved)


def _one_slow_kernel(step: StepEvidence) -> Cause | None:
    """Return the one kernel that dominates a step, if it is none that the table of names knows as fast."""
    if step.narrow[0]:
        advice = "timing another order of its dimensions, or another operator: torch.compile does not help"
        return Cause("missing-kernel", step.narrow[1], advice, step.narrow[0])
    for kernel in () if step.on_cpu else step.spent.kernels[:1]:
        share = step.scale * kernel.seconds
        if share >= MOSTLY and kernel.kind in ("unknown_product", "other"):
            evidence = f"one kernel takes {format_share(share)} of the step: {kernel.operator or kernel.name[:40]}"
            return Cause("missing-kernel", evidence, "another version of torch or cuDNN, or other shapes", share)
    return None


def _slower_kernels(step: StepEvidence) -> Cause | None:
    """Return which products take longer than the same ones in another precision that was profiled."""
    if step.on_cpu or not step.precision.is_16_bit:
        return None
    own, found = _product_kernels(step.spent), list[tuple[float, KernelTime, KernelTime, Row]]()
    for row in step.others.values():
        profile = next((trial.profile for trial in row.trials if trial.profile is not None), None)
        others = {} if profile is None or row is step.row else _product_kernels(profile)
        lost = {each: own[each][0] - others[each][0] for each in own.keys() & others.keys()}
        slower = [each for each in lost if own[each][0] > _SLOWER * others[each][0]]
        if slower:
            worst = max(slower, key=lost.__getitem__)
            found.append((step.scale * sum(lost[each] for each in slower), own[worst][1], others[worst][1], row))
    if not found:
        return None
    share, kernel, other, row = max(found, key=lambda each: each[0])
    seen = (
        f"products take {format_share(share)} of the step longer than in {row.precision}, most of all "
        f"{kernel.operator} of {_shapes([shape for shape in kernel.shapes if len(shape) > 1])}: "
        f"{short_name(kernel.name)}, there {short_name(other.name)}"
    )
    return Cause("slower-kernel", seen, _instead_of(step, kernel, row), share)


def _instead_of(step: StepEvidence, kernel: KernelTime, row: Row) -> str:
    """Return what to try instead of a product's kernel, which another precision has a faster one for."""
    faster = (step.row.step_seconds or 0.0) / (row.step_seconds or math.inf)
    if faster > 1 + LEAST:
        return f"{row.precision}, which is {faster:.2f}× as fast here"
    if "conv" in kernel.operator and "cudnn-search" not in step.trial.spec.techniques:
        return f"other algorithms of cuDNN: `{_command(step, 'cudnn-search')}` tells"
    return "another version of cuDNN: a step with it tells"


def _product_kernels(profile: StepProfile) -> dict[tuple[Any, ...], tuple[float, KernelTime]]:
    """Return the seconds of products by what they multiply, with the longest kernel of each."""
    found: dict[tuple[Any, ...], tuple[float, KernelTime]] = {}
    for kernel in profile.kernels:  # the longest first
        if kernel.kind in PRODUCTS and kernel.shapes:
            is_backward, is_convolution = ("backward" in kernel.operator, "conv" in kernel.operator)
            # A convolution's operator may have other names; some have a bias, too.
            name = "" if is_convolution else kernel.operator
            key = (name, is_backward, kernel.shapes[: 2 if is_convolution and not is_backward else 3])
            seconds, longest = found.get(key, (0.0, kernel))
            found[key] = seconds + kernel.seconds, longest
    return found


def _library_fault(step: StepEvidence) -> Cause | None:
    """Return what a version of torch is known to do slowly, if the step spends its time there."""
    numbers = re.match(r"(\d+)\.(\d+)", step.trial.environment.torch)
    if step.on_cpu or numbers is None or not step.precision.is_16_bit:
        return None
    dtypes = () if step.trial.facts is None else step.trial.facts.param_dtypes
    autocasts = bool(step.precision.autocast_dtype) and any(name.endswith("float16") for name in dtypes)
    causes = []
    for row in LIBRARY_FAULTS:
        kernels = [each for each in step.spent.kernels if re.search(row.operator, each.operator)]
        share = step.scale * sum(each.seconds for each in kernels if re.search(row.kernel, each.name))
        if row.since <= (int(numbers[1]), int(numbers[2])) < row.before and (autocasts or not row.autocasts_16_bit):
            seen = f"{row.what} in torch {numbers[0]} ({row.source}): {format_share(share)} of the step"
            causes.append(Cause("library-fault", seen, row.advice, row.saved * share))
    return max(causes, key=lambda each: each.share or 0.0, default=None)


def _misaligned_products(step: StepEvidence) -> Cause | None:
    if (found := _all_misaligned(step)) is not None:
        return found
    if not step.misaligned or step.flops is None:
        return None
    share = step.scale * sum(kernel.seconds for kernel in step.misaligned)
    known = [(kernel, flops) for kernel in step.misaligned if (flops := _flops_of_kernel(kernel)) is not None]
    flops = sum(found * each.launches for each, found in known)
    seconds = sum(each.seconds for each, _ in known)
    others = sum(step.spent.class_seconds.get(name, 0.0) for name in PRODUCTS) - seconds
    # Without another product to compare with, or FLOPs, it is taken to be just slow enough.
    slow = (flops / seconds) * others / (step.flops.total - flops) if seconds and step.flops.total > flops else _SLOW
    if slow > _SLOW:
        return None
    worst = max(step.misaligned, key=lambda kernel: kernel.seconds)
    shown = _shapes([shape for shape in worst.shapes if len(shape) > 1][:2]) or worst.operator or "shapes not known"
    seen = f"{format_share(share)} of the step is products of misaligned rows: {shown}"
    seen += f", at {format_share(slow)} of the others' rate" if seconds else ""
    is_convolution, multiple = "conv" in worst.operator, VECTOR_BYTES // step.item_bytes
    technique = step.technique("alignment", convolutions=is_convolution)
    channels = f"channels that are multiples of {multiple}: zeros beside an image's 3, for example"
    advice = channels if is_convolution else f"sizes that are multiples of {multiple}"
    return Cause("alignment", seen, advice, share * (1 - slow), technique)


def _all_misaligned(step: StepEvidence) -> Cause | None:
    """Return that there is no aligned product to compare with, if they are far from the peak."""
    flops = step.counted.misaligned_flops or 0
    if step.flops is None or step.on_cpu or flops < _NEARLY_ALL * step.flops.total:
        return None
    seconds = sum(step.spent.class_seconds.get(name, 0.0) for name in PRODUCTS if name != "attention")
    name = next(iter(step.flops.by_format))
    limit, item_bytes = peak(step.gpu, name), ITEM_BYTES.get(name, 4)
    reached = None if limit is None or not seconds else flops / seconds / limit
    measured = "" if reached is None else f", at {format_share(reached)} of the peak"
    slow, most = _SLOW if reached is None else reached / _REACHED, _SLOW
    if step.flops.padded_speedup is not None:  # no peak is needed
        slow, most = 1 / step.flops.padded_speedup, 1 / _SLOWER
        measured += f"; padded they take {format_share(slow)} of the time, as measured here"
    if slow > most:
        return None
    shapes, multiple = step.flops.misaligned_shapes, VECTOR_BYTES // item_bytes
    odd = sorted({size for shape in shapes for size in shape if size % multiple})
    pads = ", ".join(f"{size:,} to {size + -size % multiple:,}" for size in odd)
    share, technique = step.scale * seconds, step.technique("alignment", convolutions=False)
    seen = f"{format_share(share)} of the step is products, all of misaligned rows: {_shapes(shapes)}{measured}"
    advice = f"sizes that are multiples of {multiple}: pad {pads}"
    return Cause("alignment", seen, advice, share * (1 - slow), technique)


def _shapes(shapes: Iterable[tuple[int, ...]]) -> str:
    return " and ".join("×".join(map(str, shape)) for shape in shapes)


def _attention(step: StepEvidence) -> Cause | None:
    """Return what attention takes beyond what flash attention would, and what keeps it from that."""
    limit, capability = peak(step.gpu, "bf16"), step.trial.environment.capability
    if limit is None or capability is None or capability < _FLASH_CAPABILITY:
        return None
    is_causal = (step.counted.causal_mask_share or 0.0) >= MOSTLY
    slow = [
        (max(0.0, each.seconds - _fastest_attention(each, _FLASH_REACHES * limit, is_causal=is_causal)), each)
        for each in step.spent.attention
        if each.backend in ("efficient", *WRITES_SCORES) or each.is_masked
    ]
    if not slow:
        return None
    worst = max(slow, key=lambda found: found[0])[1]
    why, advice = _why_not_flash(worst, is_causal=is_causal)
    share = format_share(step.scale * sum(each.seconds for _, each in slow))
    seen = f"{share} of the step is attention over {worst.keys:,} tokens {why}"
    return Cause("attention", seen, advice, step.scale * sum(saved for saved, _ in slow))


def _fastest_attention(found: AttentionTime, flops_per_second: float, *, is_causal: bool) -> float:
    """Return the seconds that attention takes with what `_why_not_flash` advises."""
    is_written, is_causal = found.backend in WRITES_SCORES, is_causal and found.is_masked
    # Flash attention computes the scores a second time in backward: a seventh product.
    flops = found.flops * (7 / 6 if is_written else 1.0) * (0.5 if is_causal else 1.0)
    for size in (found.queries, found.keys):
        flops *= math.ceil(size / _FLASH_TILE) * _FLASH_TILE / size
    least = flops / flops_per_second
    if found.format != "fp32":
        return least
    # Memory-efficient kernels take float32: their products take as long, and a causal mask leaves half of them out.
    return max(least, found.product_seconds if is_written else found.seconds / 2 if is_causal else 0.0)


def _why_not_flash(found: AttentionTime, *, is_causal: bool) -> tuple[str, str]:
    """Return in what kernels attention runs and what keeps it from faster ones, and what to try."""
    warns = "torch.nn.attention.sdpa_kernel with a faster backend: its warnings say why that does not run"
    if found.backend in WRITES_SCORES:
        scores = f"its scores of {found.queries:,}×{found.keys:,} go through memory"
        if found.backend == "math":
            return f"in PyTorch's math backend: {scores}", warns
        advice = "F.scaled_dot_product_attention, or need_weights=False for nn.MultiheadAttention"
        return f"in products and a softmax of their own: {scores}", advice
    why, advice = "", warns
    if found.is_masked and is_causal:
        why, advice = ", with a causal mask as a tensor", "is_causal=True instead of the mask"
    elif found.format == "fp32":
        why, advice = ", as flash attention takes 16 bits only", "16 bits for its inputs"
    elif found.is_masked:
        why = ", with a mask, which flash attention does not take"
        advice = "no mask if it leaves out nothing, is_causal=True if it is causal; else, timing flex_attention"
    elif found.head_size > _FLASH_HEAD:
        why = f", as flash attention takes heads of at most {_FLASH_HEAD}: these have {found.head_size}"
        advice = "more heads, which are smaller"
    return f"in {'memory-efficient' if found.backend == 'efficient' else 'cuDNN'} kernels{why}", advice


def _recomputation(step: StepEvidence) -> Cause | None:
    """Return what backward computes of forward again, if there is memory to keep it."""
    seconds = step.spent.recomputed_seconds or 0.0
    known = [rank.peak_allocated_bytes for trial in step.row.trials for rank in trial.ranks]
    held, memory = max(filter(None, known), default=None), step.trial.environment.gpu_memory_bytes
    needed = step.counted.recomputed_bytes
    if not seconds or held is None or memory is None or step.on_cpu or not needed:
        return None
    share, fits = step.scale * seconds, min(1.0, max(0.0, (_USABLE * memory - held) / needed))
    seen = f"{format_share(share)} of the step computes forward again in backward, as for activation checkpointing; "
    seen += f"tensors take {format_bytes(held)} of {format_bytes(memory)}"
    how = "no checkpoints" if fits == 1 else f"checkpoints in {format_share(1 - fits)} of the blocks"
    return Cause("recomputation", seen, f"{how}: at most {format_bytes(int(fits * needed))} more", share * fits)


def _layout(step: StepEvidence) -> Cause | None:
    if step.on_cpu:
        return None
    technique, converted = step.technique("layout"), step.share_of("layout_conversion")
    seen = f"{format_share(converted)} of the step converts between NCHW and NHWC"
    seen += f"; batch norm takes {format_share(step.slow_norm)}" if step.slow_norm else ""
    saved = converted + _NORM_GAIN * step.slow_norm
    advice = "channels-last for model and batch" if technique else "operators that keep NHWC"
    return Cause("layout", seen, advice, saved, technique)


def _synchronisation(step: StepEvidence) -> Cause | None:
    wait, idle = step.waiting
    technique = step.technique("synchronisation") if is_dynamic(step.trial.spec.loss_scale) else ""
    evidence = f"the GPU is idle {format_share(idle)} of the step, and {'the loss scale' if technique else 'a value'}"
    evidence += f" is read on the host each step{step.reads and ': the host waits for '}{step.reads}"
    advice = "scaling on the device" if technique else "no .item(), .cpu() or print of tensors within a step"
    return Cause("synchronisation", evidence, advice, wait, technique)


def _launches(step: StepEvidence) -> Cause | None:
    if captures_graph(step.trial.spec.techniques) or step.on_cpu:
        return None
    technique = step.technique("launches")
    advice = "a CUDA graph, torch.compile or a larger batch"
    if step.profile is None:
        busy = step.counters.sm_share if step.counters is not None else None
        if busy is None or busy >= _BUSY:
            return None
        evidence = f"the GPU's multiprocessors are busy {format_share(busy)} of the time"
        return Cause("launches", evidence, advice, 1 - busy, technique)
    share, idle = step.idle_parts[0], step.idle_share or 0.0
    if share < LEAST_IDLE:
        return None
    micro = 1e6 * step.seconds / max(1.0, step.profile.num_kernels)
    evidence = (
        f"the GPU is idle {format_share(idle)} of the step: the host launches {step.profile.num_kernels:,.0f} kernels, "
        f"one in {micro:.0f} µs{step.reads and ', and waits for '}{step.reads}"
    )
    if step.reads:
        advice, technique = f"no such waits within a step, then {advice}", ""  # no graph can have them
    return Cause("launches", evidence, advice, share, technique)


def _host_work(step: StepEvidence) -> Cause | None:
    """Return what the host does for longer than launches take, while the GPU is idle."""
    launches, share = step.idle_parts
    if not share or step.profile is None:
        return None
    seconds = step.host_work
    named = sorted((name for name in seconds if seconds[name] >= _FEW), key=lambda name: -seconds[name])
    evidence = f"the GPU is idle {format_share(step.idle_share or 0.0)} of the step"
    evidence += f", and launches explain {format_share(launches)} at most"
    frees = "no torch.cuda.empty_cache() or pin_memory() within a step, and few sizes of batches"
    if step.profile.allocates:
        evidence += "; PyTorch's allocator asks the driver for memory in each step, for which the host waits"
        advice = frees
    elif sum(seconds[name] for name in named) < share / 2 or named[0] == IN_PYTHON:
        evidence += (
            "" if named[:1] == [IN_PYTHON] else "; PyTorch's profiler does not tell what the host does meanwhile"
        )
        advice = "cProfile or py-spy, which tell what Python does"
    elif named[0].startswith("cu"):
        advice = frees
    else:
        advice = f"{named[0].removesuffix(' on the CPU')} on the GPU, or not in each step"
    of_thread = _of_one_thread(step, computes=advice != frees)
    evidence, advice = evidence + of_thread[0], advice + of_thread[1]
    parts = ", ".join(f"{name} {format_share(seconds[name])}" for name in named[:_MOST_MODULES])
    evidence += f"; the host is in {parts}" if named else ""
    copies = step.profile.host_copy_seconds
    back = sum(copies[name] for name in copies if name.startswith("DtoH")) / step.seconds
    evidence += f". Copies to the host take another {format_share(back)}" if back >= LEAST else ""
    return Cause("host-work", evidence, advice, share + back)


def _of_one_thread(step: StepEvidence, *, computes: bool) -> tuple[str, str]:
    """Return what to add to evidence and advice if the host computes, on one thread for each rank."""
    if not computes or step.spent.communication is None or step.spent.communication.threads_per_rank != 1:
        return "", ""
    evidence = "; each rank computes on one thread, as torchrun sets OMP_NUM_THREADS=1"
    return evidence, ", or OMP_NUM_THREADS of the cores for each rank"


def _settings(step: StepEvidence) -> Cause | None:
    """Return that something is on, as for debugging, that keeps the GPU waiting."""
    named, idle = step.slowed_by, step.idle_share or 0.0
    if not named and (looking := step.idle_as(FINDING_UNUSED)):
        seen = f"the GPU is idle {format_share(looking)} of the step, as find_unused_parameters=True looks at its graph"
        advice, technique = "training without find_unused_parameters", step.technique("settings")
        advice += ", or static_graph=True, which looks once" if technique else ""
        return Cause("settings", seen, advice, looking, technique)
    seen = f"{named} slows each step, and the GPU is idle {format_share(idle)} of it"
    return Cause("settings", seen, f"training without {named}", max(0.0, idle - step.copied)) if named else None


def _input(step: StepEvidence) -> Cause | None:
    share = step.input_share
    if share < LEAST_IDLE:
        return None
    evidence = f"the step waits {format_share(share)} of the time for its next batch"
    if (launches := step.spent.loader_kernels or 0.0) >= _ONE_BY_ONE:
        evidence += f": its loader launches {launches:,.0f} kernels or copies"
        advice = "whole batches by index on the GPU, as data[indices]: loader workers do not help with that"
        return Cause("input", evidence, advice, share)
    advice = "more loader workers" + ("" if step.trial.spec.is_script else ", or the data on the GPU")
    return Cause("input", evidence, advice, share, step.technique("input"))


def _host_copies(step: StepEvidence) -> Cause | None:
    """Return what copies between host and device take while no kernel runs."""
    copies = step.spent.host_copy_seconds
    if not copies or step.on_cpu:
        return None
    most, share = max(copies, key=copies.__getitem__), step.copied
    shapes = [each.shapes[0] for each in step.spent.kernels if each.name.startswith("Memcpy") and each.shapes]
    largest = f", most of it {_shapes(shapes[:1])}" if shapes else ""
    if most.startswith("DtoH"):
        if step.idle_parts[1]:
            return None  # `host-work` tells of them
        seen = f"{format_share(share)} of the step copies to the host while no kernel runs{largest}"
        return Cause("host-copies", seen, "results that stay on the GPU until the end of an epoch", share)
    memory, instead = "pageable", "pinned memory and non_blocking=True"
    if most.endswith("Pinned"):
        memory, instead = "pinned", "a copy of the next batch on its own stream"
    seen = f"{format_share(share)} of the step copies from {memory} memory of the host while no kernel runs{largest}"
    return Cause("host-copies", seen, f"{instead}, fewer bytes (uint8, 16 bits), or the data on the GPU", share)


def _gradient_sync(step: StepEvidence) -> Cause | None:
    passes = 0.0 if step.spent.communication is None else step.spent.communication.reduced_passes
    if passes < _SEVERAL_PASSES:
        return None
    seen = f"each update reduces its gradients after {passes:.0f} backward passes, and needs it after the last alone"
    advice = "no_sync() around all passes but the last (FSDP2: set_requires_gradient_sync, which takes memory)"
    return Cause("gradient-sync", seen, advice, _exchanged(step) * (1 - 1 / passes))


def _exchanged(step: StepEvidence) -> float:
    """Return the share of the step that the first rank communicates, without what it waits for a slower one."""
    return max(0.0, step.exposed - next(iter(step.rank_waits), 0.0)) + step.idle_as(STARTING_COLLECTIVES)


def _rank_imbalance(step: StepEvidence) -> Cause | None:
    """Return for which rank the others wait: the one whose collectives end soonest after it begins them."""
    waits = step.rank_waits
    if not waits:
        return None
    slow, why, advice = waits.index(min(waits)), "", _EQUAL_WORK
    ranks = () if step.spent.communication is None else step.spent.communication.rank_steps
    if len(ranks) == len(waits):
        others = [*ranks[:slow], *ranks[slow + 1 :]]
        why, advice = _why_slow(ranks[slow], others, _slower_card(step.gpus, slow), max(waits) * step.seconds)
    seen = f"ranks wait for rank {slow}, at most {format_share(max(waits))} of the step"
    return Cause("rank-imbalance", seen + why, advice, statistics.fmean(waits))  # with equal work all take the mean


def _why_slow(own: RankStep, others: Sequence[RankStep], slower_card: str, lost: float) -> tuple[str, str]:
    """Return what of a rank's step, or of its GPU, makes the others wait for so many seconds, and what to try."""
    usual = statistics.median
    if own.data_seconds - usual(each.data_seconds for each in others) >= lost / 2:
        return ", which waits for its batches", "more loader workers in that rank, or its data where the others' is"
    if slower_card:
        return f", whose GPU's clock is at {slower_card}", "that GPU's cooling and power limit, or another GPU"
    if own.compute_seconds - usual(each.compute_seconds for each in others) >= lost / 2:
        return ", whose kernels take longer", _EQUAL_WORK
    return ", whose kernels take no longer: its host is late", "py-spy on that rank, which tells what its Python does"


def _slower_card(gpus: Sequence[GpuReading], rank: int) -> str:
    """Return the clock of a rank's GPU beside that of the others, and what holds it; empty if it is not lower."""
    if not rank < len(gpus) > 1:
        return ""
    (clock, *others) = (each.sm_clock_hertz or 0.0 for each in (gpus[rank], *gpus[:rank], *gpus[rank + 1 :]))
    usual, watts = statistics.median(others), gpus[rank].power_watts
    limit = f", held by its power limit at {watts:.0f} W" if watts and gpus[rank].throttle_reasons else ""
    slower = f"{clock / 1e6:,.0f} MHz, the others' at {usual / 1e6:,.0f}{limit}"
    return slower if clock < _SLOW_CLOCK * usual else ""


def _communication(step: StepEvidence) -> Cause | None:
    """Return what ranks exchange while nothing else runs, if they wait for none and reduce gradients once an update."""
    found = step.spent.communication
    if found is None:
        return None
    share = _exchanged(step) / max(1.0, found.reduced_passes)
    hidden = 1 - found.exposed_seconds / found.seconds if found.seconds else 0.0
    parts = [
        f"{each.launches:,.0f} {each.kind}{'s' if each.launches >= 2 else ''}"
        + (f" of {format_bytes(each.num_bytes / each.launches)}" if each.num_bytes else "")
        + (
            f" (at most {format_bytes(each.largest_bytes)})"
            if each.largest_bytes * each.launches > 2 * each.num_bytes
            else ""
        )
        + (f" in {each.format.replace('fp32', 'float32')}" if each.format else "")
        for each in found.collectives[:2]
    ]
    seen = (
        f"{format_share(step.exposed)} of the step is communication that no other work hides: {' and '.join(parts)}"
        f"{_over_what(step, found)}"
        f" ({format_share(hidden)} of their time is hidden)"
    )
    if (starting := step.idle_as(STARTING_COLLECTIVES)) >= _FEW:
        seen += f"; {format_share(starting)} more is the host, which starts them while no kernel runs"
    for each in found.collectives[:1]:
        if _has_dense_gradient(found, each):
            of_all = format_share(min(1.0, found.largest_weight_bytes / each.num_bytes))
            seen += f"; {of_all} of it is the gradient of `{found.largest_weight}`"
    advice = _less_communication(step, found)
    technique = advice[0][1] and step.technique("communication", among=[advice[0][1]])
    tries = ", or ".join(text for text, _ in advice[:2])
    return Cause("communication", seen, f"{tries}: a step with it tells", share, technique)


def _has_dense_gradient(found: Communication, each: Collectives) -> bool:
    """Return whether the weight with most of the gradients is reduced whole by such collectives."""
    return each.largest_bytes >= found.largest_weight_bytes > 0


def _less_communication(step: StepEvidence, found: Communication) -> list[tuple[str, str]]:
    """Return what to try against communication, each with the technique that does it."""
    advice, facts = list[tuple[str, str]](), step.trial.facts
    has_ddp = facts is not None and "model DistributedDataParallel" in facts.hooked
    for each in found.collectives[:1]:
        if _has_dense_gradient(found, each) and found.largest_weight_layer == "Embedding":
            advice.append(("gradients of the rows that a batch has alone, or a table that ranks divide", ""))
        if each.kind == "all-reduce" and found.late_share >= MOSTLY and not has_ddp:
            advice.append(("DistributedDataParallel, which reduces while backward runs", ""))
        if 0 < each.num_bytes < each.launches * _SMALL_BUCKET and each.launches >= _MANY_BUCKETS:
            advice.append(("larger buckets, as bucket_cap_mb sets them", "ddp-buckets-100"))
        if each.kind == "all-gather" and step.trial.spec.parallelism == "fsdp":
            advice.append(("weights that stay whole from forward to backward", "fsdp-keep-weights"))
        if each.format == "fp32" and step.precision.is_16_bit:
            halves = "half of the bytes, by bf16_compress_hook of DDP or MixedPrecisionPolicy of FSDP"
            advice.append((halves, "bf16-all-reduce"))
    return [*advice, ("fewer updates: a larger batch, or several passes under no_sync()", "")]


def _over_what(step: StepEvidence, found: Communication) -> str:
    """Return over which links ranks exchange, and how fast: ", over NVLink at 310 GB/s"; what of it is known."""
    others, linked = (
        len(found.rank_seconds) - 1,
        None if step.trial.gpu_facts is None else step.trial.gpu_facts.nvlinked_gpus,
    )
    if others < 1 or linked is None or step.trial.spec.num_nodes > 1:
        return ""
    over = f"NVLink to {linked} of {others} GPUs" if 0 < linked < others else "NVLink" if linked else "PCIe"
    most, least_seconds = found.collectives[0], min(found.rank_seconds)
    # What each rank sends and receives for an all-reduce. Source: NVIDIA/nccl-tests doc/PERFORMANCE.md, "busbw".
    moved = 2 * others / (others + 1) * most.num_bytes
    is_known = most.kind == "all-reduce" and len(found.collectives) == 1 and moved and least_seconds
    return f", over {over}" + (f" at {moved / least_seconds / 1e9:,.0f} GB/s" if is_known else "")


def _recompilation(step: StepEvidence) -> Cause | None:
    ranks = [trial.ranks[0] for trial in step.row.trials if trial.ranks and trial.ranks[0].compiled_steps]
    if not ranks:
        return None
    most = max(ranks, key=lambda rank: rank.compiled_share)
    timed = sum(block.num_steps for block in most.blocks)
    evidence = f"torch.compile compiled in {most.compiled_steps} of {timed} timed steps"
    advice = "few sizes of batches, or mark_dynamic"
    # torchao's compile their update.
    if step.share_of(*UPDATE) > 0.5 or re.match(r"\w*(8bit|4bit|Fp8)\(", step.optimizer):
        advice = "tensors for the optimizer's numbers that a schedule changes; with OneCycleLR cycle_momentum=False"
    return Cause("recompilation", evidence, advice, most.compiled_share)


def _padding(step: StepEvidence) -> Cause | None:
    share = next((trial.facts.padding_share or 0.0 for trial in step.row.trials if trial.facts is not None), 0.0)
    seen = f"{format_share(share)} of the tokens are padding, by the batches' masks or what their rows end with"
    return Cause("padding", seen, "batches of similar lengths, or packed sequences", share)


def _are_fused(step: StepEvidence) -> bool:
    """Return whether casts are the smaller part of what one kernel could do with the rest: `memory` tells of them."""
    is_smaller = step.share_of("cast") < step.share_of(*FUSED)
    return is_smaller and NO_CACHE not in step.settings and compiles([step.technique("casts")])


def _casts(step: StepEvidence) -> Cause | None:
    if _are_fused(step):
        return None
    share = step.share_of("cast")
    technique = step.technique("casts")
    advice = "torch.compile, which casts within other kernels" if technique else "weights in 16 bits with fp32 masters"
    seen = f"{format_share(share)} of the step casts between float32 and 16 bits"
    if NO_CACHE in step.settings:
        seen, technique = f"{seen}, with {NO_CACHE}", ""
        advice = "autocast's cache of cast weights, which is its default"
    return Cause("casts", seen, advice, share, technique)


def _indexing(step: StepEvidence) -> Cause | None:
    """Return what gathers and scatters take beyond the time of their bytes."""
    share = step.share_of("indexing")
    if step.on_cpu:
        return None
    kernels = [each for each in step.spent.kernels if each.kind == "indexing" and each.operator]
    moved = sum(2 * each.launches * 4 * _num_indexed(each.shapes) for each in kernels)
    least = 0.0 if step.gpu is None else step.scale * moved / step.gpu.bandwidth_bytes_per_second
    names = ", ".join([*dict.fromkeys(each.operator.removeprefix("aten::") for each in kernels)][:_MOST_MODULES])
    seen = f"{format_share(share)} of the step reads or writes rows by index{names and f': {names}'}"
    advice = "timing it with sorted indices, wider rows or a sparse product: torch.compile does not fuse it"
    return Cause("indexing", seen, advice, max(0.0, share - least))


def _num_indexed(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return at least how many values an operator reads or writes by index, by the shapes of its tensors."""
    if not shapes:
        return 0
    row, least = shapes[0][-1] if len(shapes[0]) > 1 else 1, min(shapes[1:] or shapes, key=math.prod)
    return math.prod(least) * (1 if len(least) > 1 and least[-1] == row else row)


def _optimizer(step: StepEvidence) -> Cause | None:
    share = step.share_of(*UPDATE)
    if share < _LEAST_UPDATE:
        return None
    scales = " and loss scaling" if step.share_of("loss_scaling") else ""
    seen = f"{format_share(share)} of the step is the optimizer{scales}"
    operators = [each.operator for each in step.spent.kernels if each.kind == "optimizer"]
    is_fused = any(operator.startswith("aten::_fused_") for operator in operators)
    is_torchs = not step.trial.spec.is_script or re.match(r"(Adam|AdamW|SGD|Adagrad)\(lr=", step.optimizer) is not None
    technique = step.technique("optimizer") if is_torchs and "fused=True" not in step.optimizer else ""
    if technique and not is_fused:
        saved = max(0.0, share - step.least_share(2 * step.counted.update_bytes))
        return Cause("optimizer", seen, "a fused optimizer", saved, technique)
    advice = "a larger batch: twice the samples for each update"
    advice += "" if is_torchs else "; or an optimizer of torch.optim with fused=True: time it"
    return Cause("optimizer", seen, advice, share / 2)


def _memory(step: StepEvidence) -> Cause | None:
    classes = (*FUSED, "cast") if _are_fused(step) else FUSED
    share = step.share_of(*classes) - step.scores - step.narrow[0]
    bandwidth = 1.0 if step.counters is None or step.counters.dram_share is None else step.counters.dram_share
    if share < LEAST_MEMORY or step.on_cpu or bandwidth < _LEAST_BANDWIDTH * share:
        return None
    technique = step.technique("memory")
    if not technique and step.precision.is_16_bit:
        return None  # it is what takes the time, and there is nothing to try
    # What batch norm gains by another layout is a saving of `layout`.
    saved = share - _NORM_GAIN * step.slow_norm - step.least_share(least_bytes(step.counted))
    words = CLASS_WORDS | {"cast": "casts"}
    names = [words.get(name, name) for name in step.shares if name in classes]
    seen = f"{format_share(share)} of the step only moves data, most of it {' and '.join(names[:2])}"
    advice = "torch.compile, which fuses it" if compiles([technique]) else "kernels that fuse it"
    return Cause("memory", seen, advice if technique else "16 bits, which move half of it", max(0.0, saved), technique)


def _small_kernels(step: StepEvidence) -> Cause | None:
    if step.busy is None or step.counters is None or step.counters.sm_share is None:
        return None
    # No multiprocessor works for a copy from the host, and few for collectives.
    busy = step.busy - step.copied - step.exposed
    if busy <= LEAST or step.narrow[0]:
        return None
    filled = min(1.0, step.counters.sm_share / busy)
    if filled >= _FILLED:
        return None
    evidence = f"while a kernel runs, {format_share(filled)} of the GPU's multiprocessors work"
    is_long = step.spent.busy_seconds >= LAUNCH_SECONDS * step.spent.num_kernels
    advice = "timing its longest kernels (--kernels) with other shapes" if is_long else "a larger batch"
    return Cause("small-kernels", evidence, advice, busy * (1 - filled))


def _power(step: StepEvidence) -> Cause | None:
    limit = power_limit_of(step.row.trials)
    if limit is None:
        return None
    clock, highest = limit.clock_hertz / 1e6, limit.max_clock_hertz / 1e6
    evidence = f"the power limit held the clock at {clock:,.0f} of {highest:,.0f} MHz ({limit.watts:.0f} W)"
    for rank in range(len(step.gpus)):
        slower = _slower_card(step.gpus, rank)
        evidence += f"; that of rank {rank}'s GPU at {slower}" if slower else ""
    lost = (1 - limit.clock_hertz / limit.max_clock_hertz) * (1.0 if step.busy is None else step.busy)
    return Cause("power-limit", evidence, "a higher power limit: no other loop helps", lost)


_RULES: tuple[Callable[[StepEvidence], Cause | None], ...] = (
    _no_hardware,
    _baseline_has_tf32,
    _in_float64,
    _in_float32,
    _without_tensor_cores,
    _grouped_convolutions,
    _one_slow_kernel,
    _slower_kernels,
    _library_fault,
    _misaligned_products,
    _attention,
    _recomputation,
    _layout,
    _synchronisation,
    _settings,
    _launches,
    _host_work,
    _input,
    _host_copies,
    _gradient_sync,
    _rank_imbalance,
    _communication,
    _recompilation,
    _padding,
    _casts,
    _indexing,
    _optimizer,
    _memory,
    _small_kernels,
    _power,
)


class Diagnosis(StepEvidence):
    """Why a configuration is no faster: the causes that its evidence shows, and what is not known."""

    on_one_gpu: StepEvidence | None = None  # of several GPUs: the same loop on one

    @cached_property
    def beside_one_gpu(self) -> BesideOneGpu | None:
        """Return how the step differs from that on one GPU; None if either is not known, or its batch is another."""
        return None if self.on_one_gpu is None or self._other_batch else beside_one_gpu(self, self.on_one_gpu)

    @cached_property
    def causes(self) -> tuple[Cause, ...]:
        """Return the causes that the evidence shows, those that are likely to save most first."""
        found = [cause for rule in _RULES if (cause := rule(self)) is not None]

        def saved(cause: Cause) -> float:
            if cause.share is not None:
                if cause.name == "power-limit":  # no loop changes what it costs
                    return min(cause.share, _LEAST_UPDATE)
                return cause.share * (_FUSION_SAVES if cause.name == "memory" else 1.0)
            return _STRONG if cause.name == "baseline-tf32" and self.precision.is_16_bit else 1.0

        large = [cause for cause in found if cause.share is None or cause.share >= LEAST]
        return tuple(sorted(large, key=saved, reverse=True))

    @cached_property
    def numeric_findings(self) -> list[Finding]:
        """Return what rounding does; empty if the step was not compared with float32."""
        return [] if self.numerics is None else findings_of(self.numerics, self.precision, self.trial.spec.loss_scale)

    @cached_property
    def ceiling(self) -> Ceiling | None:
        """Return what the fastest 16-bit format could gain at most."""
        if self.profile is None or self.precision.is_16_bit:
            return None
        seconds = self.profile.class_seconds
        return ceiling(
            self.row.precision,
            self.gpu,
            total=sum((*seconds.values(), max(0.0, self.seconds - self.profile.busy_seconds))),
            products=sum(seconds.get(name, 0.0) for name in PRODUCTS),
            moved=sum(seconds.get(name, 0.0) for name in MEMORY),
            flops=self.flops,
        )

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Return what is not known, and what would tell."""
        missing = [trial.profile.missing for trial in self.row.trials if trial.profile is not None][:1]
        if self.counters is None and not self.on_cpu:
            why = self.trial.telemetry_note.removeprefix("not available: ") or "this driver gives none"
            missing.append(f"no counters of the GPU: {why}")
        missing += [*self._unknown_flops, self._unknown_on_one_gpu]
        missing += [f"what {each} costs; a run without it tells" for each in sorted(self.settings & UNPRICED)]
        misaligned = self.scale * sum(kernel.seconds for kernel in self.misaligned)
        if misaligned >= LEAST_MEMORY and "alignment" not in {cause.name for cause in self.causes}:
            on_convolutions = any("conv" in kernel.operator for kernel in self.misaligned)
            if aligned := self.technique("alignment", convolutions=on_convolutions):
                tells = f"`{_command(self, aligned)}` tells"
                missing.append(f"what misaligned rows cost, since most products have them; {tells}")
        is_idle = self.waits is None and (self.idle_share or 0.0) >= LEAST_IDLE
        if is_idle and (found := self.technique("synchronisation")):
            missing.append(f"whether the GPU waits for loss scaling or launches; `{_command(self, found)}` tells")
        return tuple(filter(None, missing))

    @property
    def _unknown_on_one_gpu(self) -> str:
        """Return that the step on several GPUs has no counterpart on one; empty if it has."""
        count, what = self.trial.spec.num_gpus, "what the step takes more than on one GPU"
        if count == 1 or self.profile is None or self.on_cpu:
            return ""
        if self.on_one_gpu is None:
            return f"{what}; `--gpus 1,{count}` tells"
        return f"{what}: {self._other_batch}" if self._other_batch else ""

    @cached_property
    def _other_batch(self) -> str:
        """Return that a rank has another batch than one GPU, as scripts may choose; empty if it has the same."""
        own, alone = self.rank_batch, 0.0 if self.on_one_gpu is None else self.on_one_gpu.rank_batch
        same = math.isclose(own, alone, rel_tol=_SAME_BATCH)
        return "" if same else f"a rank's batch is {own:,.0f}, and that of one GPU {alone:,.0f}"

    @property
    def _unknown_flops(self) -> list[str]:
        """Return which FLOPs of the step are not known; empty if all are, and without a profile."""
        profile = self.profile
        if profile is None:
            return []
        if self.flops is None:
            counted = profile.flops
            why = "no FLOPs were counted" if counted is None else counted.missing or "no operator of PyTorch's is one"
            return [f"how far the matrix products are from the peak: {why}"]
        share, seconds = unlisted_share(self.trial) * (self.busy or 0.0), profile.unlisted_seconds
        names = sorted(filter(None, seconds), key=seconds.__getitem__, reverse=True)[:_MOST_MODULES]
        whose = ", ".join(names) or "kernels of a CUDA graph, or of Python's own"
        said = f"the FLOPs of {format_share(share)} of the step, as they are not PyTorch's: {whose}"
        return [said] if share >= LEAST else []


def diagnose(
    rows: Sequence[Row], among: Sequence[Row] | None = None, typed: TypedLine | None = None
) -> list[Diagnosis]:
    """Return a diagnosis of each row that was timed, compared with those of its group among others, or among them.

    Its commands are built from what the user typed, if that is at hand.
    """
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows if among is None else among:
        groups.setdefault(group_of(row.trial), {}).setdefault(row.precision, row)
    timed = [row for row in rows if row.step_seconds or row.trial.spec.recipe is not None]
    found = [Diagnosis(row, groups[group_of(row.trial)], typed) for row in timed]
    steady = [each for each in found if each.trial.spec.kind == "steady"]
    alone = {key_on_one_gpu(each.trial): each for each in steady if each.trial.spec.num_gpus == 1}
    for each in steady:
        if each.trial.spec.num_gpus > 1:
            each.on_one_gpu = alone.get(key_on_one_gpu(each.trial))
    return found


def left_out_of(specs: Sequence[TrialSpec], trials: Sequence[Trial], asked: Sequence[str] = ()) -> list[LeftOut]:
    """Return what was not timed, of the specs and of the precisions that a user asked for."""
    trial_of = {trial.spec.configuration: trial for trial in trials}
    timed = {trial.spec.configuration for trial in trials if was_timed(trial)}
    found = []
    for spec in {spec.configuration: spec for spec in specs}.values():
        trial = trial_of.get(spec.configuration)
        if trial is None:
            found.append(LeftOut(spec, "not measured", "no time was left for it"))
        elif spec.configuration not in timed:
            found.append(LeftOut(spec, trial.status, trial.message))
    names = dict.fromkeys(find_precision(name).name for name in asked if specs[0].is_script)
    for name in [name for name in names if name not in {each.precision for each in specs}]:
        spec = specs[0].model_copy(update={"precision": name})
        found.append(LeftOut(spec, AS_WRITTEN, "the script computes so as it is"))
    return found


def _flops_of_kernel(kernel: KernelTime) -> float | None:
    """Return the FLOPs of one launch; of a convolution as many as it had with stride 1; None if they are not known."""
    factors = matrices(kernel)
    images, weight = convolved(kernel)
    if images:
        return 2.0 * math.prod((images[0], *images[2:], *weight))
    if "mm" not in kernel.operator or len(factors) != 2 or factors[0][-1] != factors[1][-2]:
        return None
    return 2.0 * math.prod((*factors[0], factors[1][-1]))


def try_line(cause: Cause, techniques: Sequence[str] = ()) -> str:
    """Return what to try against a cause: `torch.compile, which fuses it (--techniques channels-last+compile)`."""
    if not cause.technique:
        return cause.advice
    option = f"--precision {cause.technique}" if cause.technique == "tf32" else ""
    return f"{cause.advice} ({option or '--techniques ' + join((*techniques, cause.technique))})"
