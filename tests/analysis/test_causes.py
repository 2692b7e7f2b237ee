"""Each cause by the smallest record that shows it and the nearest that does not; and by an H100's records."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from fake_engine import (
    fake_environment,
    fake_epoch,
    fake_facts,
    fake_profile,
    fake_run,
    fake_spec,
    fake_training,
    fake_trial,
)
from fake_gpu import fake_gpu_facts, fake_reading
from rich.console import Console

from castwise.analysis.causes import Cause, Diagnosis, diagnose, left_out_of, try_line
from castwise.analysis.model_flops import model_flops_per_second
from castwise.analysis.result_table import rows_of_steps
from castwise.analysis.step_evidence import StepEvidence
from castwise.records.schema import GpuCounters, GpuReading, StepFlops, Trial
from castwise.show import why_report
from castwise.show.presentation import print_parts
from castwise.spec.typed import TypedLine
from castwise.spec.types import FINDING_UNUSED, IN_PYTHON, STARTING_COLLECTIVES, CauseName
from castwise.spec.user_model import UserModel

STEP = 0.1  # seconds
H100 = "NVIDIA H100 80GB HBM3"
RECORDS = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "records" / "why"
PRECISIONS = ("default", "fp32", "tf32", "fp16-mixed", "bf16-mixed")
BF16 = {"linear": {"bf16": 10**12}}
WORDS = (8192, 768), (768, 30522)  # no multiple of 8
FLOPS = 2 * 8192 * 768 * 30522


def step(
    precision: str = "bf16-mixed",
    classes: Mapping[str, float] | None = None,
    *,
    seconds: float = STEP,
    products: dict[str, Any] = BF16,
    sm_share: float | None = None,
    machine: dict[str, Any] | None = None,
    throttled: float = 0.0,
    profile: dict[str, Any] | None = None,
    counted: dict[str, Any] | None = None,
    **spec: object,
) -> Trial:
    """Return a trial whose profile spends so many per cent of the step in each class; the rest is idle."""
    on_cpu = spec.get("device") == "cpu"
    readings = (fake_reading(throttle_reasons=("sw_power_cap",), sm_clock_hertz=1.98e9 * throttled),)
    trial = fake_trial(
        fake_spec(precision, **spec),
        step_seconds=(seconds,),
        environment=fake_environment(None) if on_cpu else fake_environment(**{"gpu": H100, **(machine or {})}),
        readings=readings if throttled else (),
        gpu_facts=fake_gpu_facts() if throttled else None,
    )
    flops = StepFlops(products=products, **(counted or {}))
    update: dict[str, Any] = {"ranks": (trial.ranks[0].model_copy(update={"flops": flops}),)}
    if classes is not None:
        times = {name: STEP * share / 100 for name, share in classes.items()}
        busy = sum(times.values())
        update["profile"] = fake_profile(
            device_type="cpu" if on_cpu else "cuda",
            class_seconds=times,
            **{
                "busy_seconds": busy,
                "idle_seconds": None if on_cpu else max(0.0, STEP - busy),
                "seconds": STEP,
                "num_kernels": 1000,
                "kernels": (),
                **(profile or {}),
            },
        )
    if sm_share is not None:
        update["counters"] = GpuCounters(num_blocks=1, sm_share=sm_share)
    return trial.model_copy(update=update)


def script_with(padding_share: float | None = None, **samples: float) -> Trial:
    """Return a trial of a script with these facts and samples."""
    trial = fake_trial(
        fake_spec("as-written", user_model=UserModel(kind="script", path="train.py", name="")),
        facts=fake_facts(padding_share=padding_share),
    )
    return trial.model_copy(update={"ranks": (trial.ranks[0].model_copy(update=samples),)})


def kernel(kind: str, share: float, name: str = "kernel", operator: str = "", *shapes: tuple[int, ...]) -> Any:
    """Return a profile's fields with one kernel that takes so many per cent of the step."""
    fields = {"name": name, "kind": kind, "operator": operator, "shapes": shapes, "launches": 1}
    return {"kernels": [{**fields, "seconds": STEP * share / 100}]}


def last(*trials: Trial) -> Diagnosis:
    return diagnose(rows_of_steps(trials))[-1]


def names(found: Diagnosis) -> list[str]:
    return [cause.name for cause in found.causes]


def compared(default: float, mixed: float) -> tuple[Trial, ...]:
    """Return fp32 with a step of 100 ms, and two others."""
    times = {"fp32": 0.1, "default": default, "bf16-mixed": mixed}
    return tuple(step(name, seconds=seconds) for name, seconds in times.items())


def product(share: float, name: str = "cutlass_tensorop", *shapes: tuple[int, ...], operator: str = "aten::mm") -> Any:
    return kernel("tensor_core_product", share, name, operator, *(shapes or WORDS))


def stem(channels: int, operator: str = "aten::cudnn_convolution") -> Any:
    return product(40, "sm90_xmma_fprop", (32, channels, 448, 448), (64, channels, 7, 7), operator=operator)


def parts(*found: tuple[str, float, str, str]) -> Any:
    """Return a profile's products, each with its kind, per cent of the step, format and module."""
    fields = ("kind", "seconds", "format", "module")
    return {"products": [dict(zip(fields, (kind, STEP * n / 100, *rest), strict=True)) for kind, n, *rest in found]}


TENSOR, PLAIN = "tensor_core_product", "plain_product"
FULL = {TENSOR: 100.0}
HALF_MM: dict[str, Any] = {"products": {"linear": {"bf16": 2 * FLOPS}}}  # of a kernel with the shapes of WORDS
NHWC = kernel("normalisation", 40, "batch_norm_backward_reduce_channels_last")
NCHW = kernel("normalisation", 40, "batch_norm_collect_statistics")
NORMS = {"layout_conversion": 10.0, "normalisation": 40.0, TENSOR: 50.0}
WAITS = {"wait_seconds": 0.2 * STEP}
FFT = kernel("elementwise", 60, "pointwise_mult", "aten::cudnn_convolution", (128, 160, 32, 32), (160, 160, 3, 3))
FP32: dict[str, Any] = {"products": {"linear": {"fp32": 1}}}
TF32: dict[str, Any] = {"products": {"linear": {"tf32": 1}}}
GROUPS: dict[str, Any] = {"products": {"grouped_convolution": {"bf16": 7_398_752_256 * 2}}}
GROUP = (64, 256, 56, 56), (64, 256, 56, 56), (256, 8, 3, 3)  # of a backward pass
TRAINING = fake_training("bf16-mixed")
REGION: dict[str, Any] = {
    "classes": {PLAIN: 80, TENSOR: 20},
    "products": {"linear": {"fp32": 4, "bf16": 16}},
    "profile": parts((PLAIN, 80, "fp32", "blocks.*.mlp"), (TENSOR, 20, "bf16", "blocks.*.qkv")),
    "counted": {"lines": {"fp32": ["train.py:41"]}},
}
DOUBLE: dict[str, Any] = {
    "classes": {"unknown_product": 50, TENSOR: 50},
    "products": {"linear": {"fp64": 1, "bf16": 9}},
    "profile": parts(("unknown_product", 40, "fp64", "head"), (TENSOR, 10, "fp64", ""), (TENSOR, 50, "bf16", "")),
}
PEAK = 989.4e12


def odd(of_peak: float, share: float = 1.0, classes: Mapping[str, float] = FULL, name: str = "bf16") -> Trial:
    """Return a step of products at a share of the peak in bf16, of which a share is misaligned."""
    flops = int(of_peak * PEAK * STEP)
    shapes = ((8192, 2045), (2045, 2045))
    counted = {"misaligned_flops": int(share * flops), "misaligned_shapes": shapes}
    return step(classes=classes, products={"linear": {name: flops}}, counted=counted)


FLASH = 0.335 * PEAK  # FLOP/s


def attends(backend: str, share: float, of_flash: float, *, causal: float | None = None, **changes: Any) -> Any:
    """Return a step that spends so many per cent in attention, for whose FLOPs flash attention would take others."""
    fields = {"backend": backend, "format": "bf16", "queries": 4096, "keys": 4096, "head_size": 64, **changes}
    fields |= {"seconds": share / 100 * STEP, "flops": int(of_flash / 100 * STEP * FLASH)}
    own = {"attention": [{"product_seconds": 0.2 * fields["seconds"], **fields}]}
    return step(classes=FULL, profile=own, counted={"causal_mask_share": causal})


def recomputes(share: float, needed_bytes: int) -> Trial:
    counted = {"recomputed_bytes": needed_bytes}
    return step(classes=FULL, profile={"recomputed_seconds": share / 100 * STEP}, counted=counted)


def copies(classes: Mapping[str, float], kind: str = "HtoD Pageable", **changes: Any) -> Trial:
    """Return a step that spends in copies of the host's what its classes say."""
    own = {"host_copy_seconds": {kind: classes["host_copy"] / 100 * STEP}}
    return step(classes=classes, profile=own, **changes)


def waits_for_host(idle: float, host: Mapping[str, float] | None, **fields: Any) -> Trial:
    """Return a step with 200 kernels, so of 10 % in launches at most, and of so many per cent in work of the host."""
    seconds = None if host is None else {name: share / 100 * STEP for name, share in host.items()}
    return step(classes={TENSOR: 100 - idle}, profile={"num_kernels": 200, "host_seconds": seconds, **fields})


def scans(share: float, *shape: int, launches: int = 1, dram_share: float = 0.5, sm_share: float = 0.9) -> Trial:
    """Return a step that spends so many per cent of it in one operator."""
    own = kernel("reduction", share, "tensor_kernel_scan_outer_dim", "aten::cumsum", shape)
    own["kernels"][0]["launches"] = launches
    trial = step(classes={"reduction": share, TENSOR: 100 - share}, profile=own)
    counters = GpuCounters(num_blocks=1, sm_share=sm_share, dram_share=dram_share)
    return trial.model_copy(update={"counters": counters})


def reads_rows(*shapes: tuple[int, ...], seconds: float = 0.3) -> Trial:
    return step(
        classes={"indexing": 100 * seconds, TENSOR: 70},
        profile=kernel("indexing", 30, "k", "aten::index_add_", *shapes),
    )


def measured(padded_speedup: float) -> Trial:
    """Return misaligned products at a rate that is no reason by itself, and how much faster a padded one was."""
    trial = odd(0.4)
    flops = trial.ranks[0].flops
    assert flops is not None
    ranks = (trial.ranks[0].model_copy(update={"flops": flops.model_copy(update={"padded_speedup": padded_speedup})}),)
    return trial.model_copy(update={"ranks": ranks})


def exchanges(exposed: float, **changes: Any) -> Any:
    """Return a profile's fields with all-reduces that nothing hides for so many per cent of the step."""
    reduced = {"kind": "all-reduce", "format": "fp32", "launches": 4, "num_bytes": 1e8}
    fields = {"seconds": 0.3 * STEP, "exposed_seconds": exposed * STEP / 100, "collectives": [reduced]}
    return {"communication": {**fields, **changes}}


REDUCED = {TENSOR: 70.0, "communication": 30.0}
EACH_PASS = exchanges(30, reduced_passes=4)
UNEQUAL = exchanges(30, rank_seconds=[0.3 * STEP, 0.1 * STEP])
VOLUMES = (2, 32, 64, 64, 64), (32, 32, 3, 3, 3)


def convolved(precision: str, share: float, seconds: float = STEP, operator: str = "aten::cudnn_convolution") -> Trial:
    """Return a step with a convolution that takes so many per cent of 100 ms."""
    return step(
        precision, FULL, seconds=seconds, profile=product(share, f"{precision}_fprop", *VOLUMES, operator=operator)
    )


def norms(torch: str = "2.12.1", dtype: str = "bfloat16", kernel_of: str = "float, float") -> Trial:
    """Return a step under autocast, 40 % of which is rms_norm, by torch's version and the weights' type."""
    run = kernel("normalisation", 40, f"vectorized_layer_norm_kernel<{kernel_of}, true>", "aten::_fused_rms_norm")
    trial = step(classes={"normalisation": 40, TENSOR: 60}, profile=run, machine={"torch": torch})
    return trial.model_copy(update={"facts": fake_facts(param_dtypes={dtype: 1})})


def grouped(share: float, *shapes: tuple[int, ...], launches: int = 1) -> Any:
    """Return a profile's fields with a product of a convolution's backward pass, of 32 groups."""
    found = product(share, "sm90_xmma_dgrad", *(shapes or GROUP), operator="aten::convolution_backward")
    found["kernels"][0]["launches"] = launches
    return found


@pytest.mark.parametrize(
    ("expected", "share", "technique", "trials"),
    [
        ("no-hardware", None, "", [step(machine={"capability": (7, 5)})]),
        ("baseline-tf32", None, "", compared(0.05, 0.048)),
        ("float32-units", 0.6 * (1 - 66.9 / 494.7), "tf32", [step("fp32", {PLAIN: 60, TENSOR: 40}, **FP32)]),
        ("grouped-convolutions", 0.1, "", [step(classes={PLAIN: 10, TENSOR: 90}, **GROUPS)]),
        # At the peak it takes 61 us for its 205 MB, and for its 14.8 GFLOP less: 0.06 % of the step.
        ("grouped-convolutions", 0.4 - 0.00061, "", [step(classes=FULL, profile=grouped(40), **GROUPS)]),
        # A launch for each of 32 groups: all together do no more than was counted.
        ("grouped-convolutions", 0.4 - 0.00061, "", [step(classes=FULL, profile=grouped(40, launches=32), **GROUPS)]),
        ("no-tensor-cores", 0.1, "", [step(classes={PLAIN: 10, TENSOR: 90})]),
        ("no-tensor-cores", 0.8, "", [step(**REGION | {"profile": parts((PLAIN, 80, "bf16", "fc"))})]),
        ("float32-units", 0.8 * (1 - 66.9 / 494.7), "", [step(**REGION)]),
        ("float32-units", None, "", [step(**REGION | {"products": {"linear": {"fp32": 2, "bf16": 98}}})]),  # but slow
        ("float64", 0.5, "", [step(**DOUBLE)]),
        ("alignment", 1 - 0.15 / 0.6, "", [odd(0.15)]),
        ("missing-kernel", 0.6, "", [step(classes={"other": 100}, profile=kernel("other", 60))]),
        # The misaligned product has half of the FLOPs and 4/5 of the time: a quarter of the other's rate.
        ("alignment", 0.4 * 0.75, "", [step(classes={TENSOR: 50, "other": 50}, profile=product(40), **HALF_MM)]),
        ("alignment", 0.4 * 0.4, "", [step(classes=FULL, profile=product(40, "tensorop_align1", (1,), operator=""))]),
        ("alignment", None, "space-to-depth", [step(classes=FULL, profile=stem(3), products=BF16)]),
        ("attention", 0.5, "", [attends("written", 60, 10 * 6 / 7)]),
        ("attention", 0.5, "", [attends("math", 60, 10 * 6 / 7)]),
        ("attention", 0.4, "", [attends("written", 50, 1, format="fp32")]),  # whose products stay as they are
        ("attention", 0.4, "", [attends("efficient", 60, 20, is_masked=True)]),
        ("attention", 0.5, "", [attends("cudnn", 60, 20, causal=1.0, is_masked=True)]),
        ("attention", 0.5, "", [attends("efficient", 60, 10, format="fp32")]),
        ("attention", 0.4, "", [attends("efficient", 60, 5, queries=32)]),  # of tiles of 128
        ("attention", 0.3, "", [attends("efficient", 60, 5, causal=1.0, is_masked=True, format="fp32")]),
        ("recomputation", 0.24, "", [recomputes(24, 2**30)]),
        ("recomputation", 0.12, "", [recomputes(24, int(26.8 * 2**30))]),
        ("host-copies", 0.3, "", [copies({"host_copy": 30, TENSOR: 70})]),
        ("host-copies", 0.3, "", [copies({"host_copy": 30, TENSOR: 70}, "DtoH Pageable")]),
        ("indexing", 0.3, "", [reads_rows()]),
        # It reads and writes 2 million rows of 64 values once: 1.02 GB of 3.35 TB/s.
        ("indexing", 0.3 - 0.00306, "", [reads_rows((200_000, 64), (2_000_000,), (2_000_000, 64))]),
        ("layout", 0.1 + 0.55 * 0.4, "channels-last", [step(classes=NORMS, profile=NCHW)]),
        ("layout", 0.1, "channels-last", [step(classes=NORMS, profile=NHWC)]),
        ("layout", 0.1, "channels-last", [step("tf32", NORMS, profile=NCHW, **TF32)]),
        ("layout", 0.1, "", [step(classes=NORMS, profile=NCHW, techniques=("channels-last",))]),
        ("synchronisation", 0.2, "no-step-sync", [step("fp16-mixed", {TENSOR: 75}, profile=WAITS)]),
        ("synchronisation", 0.15, "", [step(classes={TENSOR: 85}, profile=WAITS)]),
        ("launches", 0.3, "cuda-graph", [step(classes={TENSOR: 70})]),
        ("launches", 0.2, "cuda-graph", [step(classes={TENSOR: 60}, profile=WAITS)]),
        ("launches", 0.6, "cuda-graph", [step(sm_share=0.4)]),
        ("host-work", 0.5, "", [waits_for_host(60, {"cudaFree": 30})]),
        ("host-work", 0.56, "", [waits_for_host(60, {"cudaFree": 56})]),  # longer than launches would leave
        ("host-work", 0.5, "", [waits_for_host(60, None)]),
        ("settings", 0.6, "", [waits_for_host(60, {"cudaFree": 30}, settings=("CUDA_LAUNCH_BLOCKING=1",))]),
        ("missing-kernel", 0.8, "", [scans(80, 131_072, 8, sm_share=0.3)]),
        ("missing-kernel", 0.4, "", [scans(40, 131_072, 8)]),  # of which other kernels fill the GPU
        ("input", None, "resident-data", [fake_run(TRAINING, fake_epoch(TRAINING, load_seconds=0.01))]),
        ("recompilation", 0.5, "", [script_with(compiled_steps=2, compiled_share=0.5)]),
        ("padding", 0.31, "", [script_with(padding_share=0.31)]),
        ("gradient-sync", 0.3 * 3 / 4, "", [step(classes=REDUCED, profile=EACH_PASS)]),
        ("communication", 0.3 / 4, "", [step(classes=REDUCED, profile=EACH_PASS)]),
        # Of two ranks, one waits for a fifth of the step: with equal work both would take a tenth more and less.
        ("rank-imbalance", 0.1, "", [step(classes=REDUCED, profile=UNEQUAL)]),
        ("communication", 0.1, "", [step(classes=REDUCED, profile=UNEQUAL)]),
        ("communication", 0.3, "", [step(classes=REDUCED, profile=exchanges(30))]),
        (
            "communication",
            0.3,
            "",
            [step(classes=REDUCED, profile=exchanges(30, rank_seconds=[0.3 * STEP, 0.21 * STEP]))],
        ),
        (
            "small-kernels",
            0.6 * 2 / 3,
            "",
            [step(classes={**REDUCED, TENSOR: 60}, profile=exchanges(30), sm_share=0.2)],
        ),
        ("slower-kernel", 0.2, "", [convolved("fp16-mixed", 30), convolved("bf16-mixed", 50)]),
        (
            "slower-kernel",
            0.2,
            "",
            [convolved("tf32", 30, operator="aten::slow_conv_dilated3d"), convolved("bf16-mixed", 50)],
        ),
        ("library-fault", 0.2, "", [norms()]),
        ("alignment", 0.6, "", [measured(2.5)]),
        ("casts", 0.06, "compile", [step(classes={"cast": 6, TENSOR: 94})]),
        ("optimizer", 0.15, "fused-optimizer", [step(classes={"optimizer": 12, "loss_scaling": 3, TENSOR: 85})]),
        ("optimizer", 0.06, "", [step(classes={"optimizer": 12, TENSOR: 88}, techniques=("fused-optimizer",))]),
        ("memory", 0.4, "compile", [step(classes={"elementwise": 40, TENSOR: 60})]),
        ("small-kernels", 0.9 * 2 / 3, "", [step(classes={TENSOR: 90}, sm_share=0.3)]),
        ("power-limit", 0.2, "", [step(throttled=0.8)]),
    ],
)
def test_a_cause_has_its_evidence(expected: str, share: float | None, technique: str, trials: list[Trial]) -> None:
    found = last(*trials)
    (cause,) = [cause for cause in found.causes if cause.name == expected]
    assert cause.technique == technique
    assert cause.evidence
    assert cause.advice
    if share is not None:
        assert cause.share == pytest.approx(share, rel=0.01)


@pytest.mark.parametrize(
    ("absent", "trials"),
    [
        ("no-hardware", [step(machine={"capability": (8, 0)})]),
        ("baseline-tf32", compared(0.05, 0.03)),  # bf16-mixed is faster than the default, too
        ("baseline-tf32", compared(0.1, 0.1)),  # the default is as slow as fp32
        ("baseline-tf32", compared(0.08, 0.073)[:2]),  # the default itself
        ("float32-units", [step("fp32", {PLAIN: 4, TENSOR: 96}, **FP32)]),
        ("float32-units", [step("tf32", {PLAIN: 60, TENSOR: 40}, **TF32)]),
        ("float32-units", [step("fp32", {PLAIN: 60, TENSOR: 40}, device="cpu", **FP32)]),
        ("grouped-convolutions", [step(classes={PLAIN: 4, TENSOR: 96}, **GROUPS)]),
        ("grouped-convolutions", [step(classes=FULL, profile=grouped(4), **GROUPS)]),
        ("grouped-convolutions", [step(classes=FULL, profile=grouped(40, *GROUP[:2], (256, 256, 3, 3)), **GROUPS)]),
        ("grouped-convolutions", [step(classes=FULL, profile=grouped(40, *GROUP[:2], (256, 256, 3, 3)))]),
        ("alignment", [step(classes=FULL, profile=grouped(40, *GROUP[:2], (256, 4, 3, 3)), **GROUPS)]),
        ("no-tensor-cores", [step(classes={PLAIN: 4, TENSOR: 96})]),
        ("no-tensor-cores", [step(**REGION)]),
        ("no-tensor-cores", [step(**DOUBLE)]),
        ("float32-units", [step(**REGION | {"products": TF32["products"]})]),
        ("float32-units", [step(**DOUBLE)]),
        ("float64", [step(**REGION)]),
        ("float64", [step(**DOUBLE | {"profile": parts((TENSOR, 4, "fp64", "head"))})]),
        ("alignment", [odd(0.5)]),  # as fast as they can be
        ("alignment", [odd(0.15, 0.5)]),
        ("alignment", [odd(0.15, name="fp32")]),
        ("alignment", [odd(0.001, classes={TENSOR: 4, "elementwise": 96})]),
        ("no-tensor-cores", [step("fp32", {PLAIN: 60, TENSOR: 40}, **FP32)]),
        ("missing-kernel", [step(classes={"other": 100}, profile=kernel("other", 40))]),
        ("missing-kernel", [step(classes=FULL, profile=product(60))]),
        ("alignment", [step(classes={TENSOR: 80, "other": 20}, profile=product(40), **HALF_MM)]),  # as fast
        ("alignment", [step(classes=FULL, profile=product(40, "tensorop", WORDS[0], (768, 30528)))]),
        ("alignment", [step(classes=FULL, profile=product(40, "nvjet_tst_128x256"))]),
        ("alignment", [step("tf32", FULL, profile=product(40, "tensorop", (8192, 768), (768, 30524)), **TF32)]),
        ("alignment", [step(classes=FULL, profile=product(40, "tensorop_align8", (1,), operator=""))]),
        ("alignment", [step(classes=FULL, profile=stem(8))]),
        ("alignment", [step(classes=FULL, profile=stem(1))]),  # depthwise
        ("layout", [step(classes={"layout_conversion": 4, "normalisation": 40, TENSOR: 56}, profile=NCHW)]),
        ("layout", [step(classes=NORMS, device="cpu")]),
        ("synchronisation", [step("fp16-mixed", FULL, profile=WAITS)]),  # the device computes meanwhile
        ("synchronisation", [step("fp16-mixed", {TENSOR: 75}, profile={"wait_seconds": 0.04 * STEP})]),
        ("synchronisation", [step("fp16-mixed", {TENSOR: 75})]),  # older records do not have it
        ("launches", [step(classes={TENSOR: 91})]),
        ("launches", [step(classes={TENSOR: 75}, profile=WAITS)]),  # it waits for something else
        ("launches", [step(classes={TENSOR: 70}, techniques=("cuda-graph",))]),
        ("launches", [step(classes={TENSOR: 70}, device="cpu")]),
        ("launches", [step(classes=FULL, sm_share=0.4)]),  # the profile knows better
        ("launches", [step(sm_share=0.7)]),
        ("launches", [copies({"host_copy": 60, TENSOR: 15})]),  # during which the host launches nothing
        ("launches", [waits_for_host(60, {"cudaFree": 56})]),
        ("launches", [waits_for_host(60, {}, settings=("CUDA_LAUNCH_BLOCKING=1",))]),
        ("host-work", [waits_for_host(60, {}, settings=("CUDA_LAUNCH_BLOCKING=1",))]),
        ("host-work", [waits_for_host(60, {"cudaFree": 5}, num_kernels=1200)]),
        ("host-work", [waits_for_host(19, {})]),  # no more than launches may take
        ("settings", [waits_for_host(4, {}, settings=("CUDA_LAUNCH_BLOCKING=1",))]),
        ("settings", [waits_for_host(60, {}, settings=("autocast(cache_enabled=False)",))]),
        ("small-kernels", [scans(80, 131_072, 8, sm_share=0.3)]),
        ("memory", [scans(80, 131_072, 8, sm_share=0.3)]),
        ("memory", [scans(80, 2**31, launches=2000, dram_share=0.02)]),
        ("missing-kernel", [scans(80, 2**32)]),  # which are many bytes
        ("missing-kernel", [scans(80, 131_072, 8, launches=2000, sm_share=0.3)]),  # small kernels
        ("missing-kernel", [scans(29, 131_072, 8)]),
        ("missing-kernel", [step(classes={"elementwise": 60, TENSOR: 40}, profile=FFT)]),
        ("attention", [attends("flash", 60, 10)]),
        ("attention", [attends("cudnn", 60, 10)]),
        ("attention", [attends("efficient", 60, 58, is_masked=True)]),
        ("attention", [step(classes={"attention": 60, TENSOR: 40})]),
        ("recomputation", [recomputes(4, 2**30)]),
        ("recomputation", [recomputes(24, 2**50)]),  # for which there is no memory
        ("host-copies", [copies({"host_copy": 4, TENSOR: 96})]),
        ("host-copies", [step(classes={"host_copy": 30, TENSOR: 100})]),  # beside kernels
        ("small-kernels", [copies({"host_copy": 60, TENSOR: 30}, sm_share=0.2)]),
        ("memory", [step(classes={"host_copy": 60, TENSOR: 40})]),
        ("memory", [step(classes={"indexing": 60, TENSOR: 40})]),
        ("indexing", [step(classes={"indexing": 4, TENSOR: 96})]),
        ("indexing", [reads_rows((9, 64), (200_000_000,), (200_000_000, 64))]),  # as fast as it can be
        ("input", [fake_run(TRAINING, fake_epoch(TRAINING))]),
        ("recompilation", [script_with(compiled_steps=1, compiled_share=0.04)]),
        ("padding", [script_with(padding_share=0.04)]),
        ("communication", [step(classes=REDUCED, profile=exchanges(4))]),  # the rest is hidden
        ("communication", [step(classes=REDUCED)]),  # older records do not have it
        ("gradient-sync", [step(classes=REDUCED, profile=exchanges(30, reduced_passes=1))]),
        ("gradient-sync", [step(classes=REDUCED, profile=exchanges(4, reduced_passes=4))]),
        ("rank-imbalance", [step(classes=REDUCED, profile=exchanges(30, rank_seconds=[0.03, 0.024]))]),
        ("rank-imbalance", [step(classes=REDUCED, profile=exchanges(30))]),
        # Two measurements of equal ranks may differ by so much.
        ("rank-imbalance", [step(classes=REDUCED, profile=exchanges(30, rank_seconds=[0.3 * STEP, 0.21 * STEP]))]),
        ("small-kernels", [step(classes={**REDUCED, TENSOR: 60}, profile=exchanges(30), sm_share=0.35)]),
        ("slower-kernel", [convolved("fp16-mixed", 48), convolved("bf16-mixed", 50)]),
        ("slower-kernel", [convolved("bf16-mixed", 30), convolved("tf32", 50)]),  # which is no reason for 16 bits
        ("slower-kernel", [convolved("bf16-mixed", 50)]),
        ("library-fault", [norms("2.11.0+cu130")]),
        ("library-fault", [norms(dtype="float32")]),  # whose norms are no faster otherwise
        ("library-fault", [norms(kernel_of="c10::BFloat16, float")]),
        ("alignment", [measured(1.05)]),
        ("casts", [step(classes={"cast": 4, TENSOR: 96})]),
        ("optimizer", [step(classes={"optimizer": 9, TENSOR: 91})]),
        ("memory", [step(classes={"elementwise": 29, TENSOR: 71})]),
        ("memory", [step(classes={"elementwise": 60, TENSOR: 40}, techniques=("compile",))]),
        ("memory", [step(classes={"elementwise": 60, TENSOR: 40}, device="cpu")]),
        ("small-kernels", [step(classes={TENSOR: 90}, sm_share=0.5)]),
        ("power-limit", [step(throttled=0.99)]),
        ("power-limit", [step()]),
    ],
)
def test_a_near_miss_does_not_have_the_cause(absent: CauseName, trials: list[Trial]) -> None:
    assert absent in get_args(CauseName)
    assert absent not in names(last(*trials))


@pytest.mark.parametrize("precision", ["bf16-true", "fp16-mixed"])
def test_the_optimizer_s_cause_claims_no_format(precision: str) -> None:
    found = last(
        step(precision, {"optimizer": 15.0, "loss_scaling": 5.0, TENSOR: 80.0}, techniques=("fused-optimizer",))
    )
    (cause,) = (each for each in found.causes if each.name == "optimizer")
    assert "float32" not in cause.evidence
    assert "loss scaling" in cause.evidence


@pytest.mark.parametrize(
    ("name", "cause", "machine"),
    [
        ("ampere_sgemm_128x64_tn", "float32-units", (9, 0)),
        ("volta_sgemm_128x64_tn", "float32-units", (7, 0)),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "no-tensor-cores", (9, 0)),
    ],
)
def test_the_kernels_of_a_script_as_written_tell_its_format(name: str, cause: str, machine: tuple[int, int]) -> None:
    """Of a script no FLOPs are counted."""
    found = last(
        step(
            "as-written",
            {PLAIN: 60, TENSOR: 10, "elementwise": 10},
            products={},
            profile=kernel(PLAIN, 60, name, "aten::mm"),
            machine={"capability": machine},
            user_model=UserModel(kind="script", path="train.py", name=""),
        )
    )
    assert cause in names(found)
    assert len({"float32-units", "no-tensor-cores"} & {*names(found)}) == 1
    tried = next(each.advice for each in found.causes if each.name == cause)
    assert ("TF32" in tried) == (cause == "float32-units" and machine >= (8, 0))


def test_float32_products_are_named_with_their_modules_and_lines() -> None:
    (cause,) = last(step(**REGION)).causes
    assert cause.evidence.startswith("80 % of the step is products in IEEE float32, without Tensor Cores in ")
    assert "`blocks.*.mlp` (train.py:41): autocast is off there" in cause.evidence
    assert "qkv" not in cause.evidence
    (true,) = last(step("bf16-true", **REGION)).causes
    assert true.evidence.endswith(": a cast makes them float32")
    found = last(step(**DOUBLE)).causes[0]
    assert found.evidence == "50 % of the step is float64 products in `head`"


def test_what_keeps_attention_from_flash_is_named() -> None:
    for trial, why, tried in (
        (
            attends("written", 60, 1),
            "a softmax of their own: its scores of 4,096×4,096",
            "scaled_dot_product_attention",
        ),
        (attends("efficient", 60, 1, is_masked=True), "in memory-efficient kernels, with a mask", "flex_attention"),
        (attends("cudnn", 60, 1, is_masked=True, causal=1.0), "in cuDNN kernels, with a causal mask", "is_causal=True"),
        (attends("efficient", 60, 1, format="fp32"), "flash attention takes 16 bits only", "16 bits"),
        (attends("efficient", 60, 1, head_size=320), "these have 320", "more heads"),
        (attends("efficient", 60, 1), "in memory-efficient kernels", "its warnings say why"),
    ):
        (cause,) = last(trial).causes
        assert why in cause.evidence
        assert tried in cause.advice


def test_scores_that_a_fused_kernel_keeps_are_no_work_for_compile() -> None:
    own = attends("written", 60, 1).profile
    assert own is not None
    shares = {"reduction": 48.0, TENSOR: 52.0}
    assert names(last(step(classes=shares))) == ["memory"]
    assert names(last(step(classes=shares, profile={"attention": own.attention}))) == ["attention"]


def test_a_read_costs_the_launch_of_its_copy_too() -> None:
    """Of 120 ms without waits, in which 300 kernels are launched, 100 are copies that the script reads."""
    waits = WAITS | {"waits": {"aten::_local_scalar_dense": 100.0}, "num_kernels": 300}
    (cause, *_) = last(step(classes={TENSOR: 40}, profile=waits)).causes
    assert (cause.name, cause.share) == ("synchronisation", pytest.approx(0.2 + 0.8 / 3))


def test_reads_beside_launches_are_named_first() -> None:
    waits = {"waits": {"aten::_local_scalar_dense": 5.0, "aten::copy_": 2.0, "": 2 / 3}}
    (cause,) = last(step(classes={TENSOR: 60}, profile=waits)).causes
    assert cause.evidence.endswith("and waits for `.item()` 5 times")
    assert cause.advice.startswith("no such waits within a step, then a CUDA graph")
    assert not cause.technique
    (scaled,) = last(
        step(classes={TENSOR: 60, "loss_scaling": 1}, profile={"waits": {"aten::_local_scalar_dense": 1}})
    ).causes
    assert (scaled.technique, "item" in scaled.evidence) == ("cuda-graph", False), "which reads a value itself"
    (found,) = last(step(classes={TENSOR: 80}, profile=WAITS | {"waits": {"": 1 + 2 / 3, "aten::nonzero": 2}})).causes
    assert found.name == "synchronisation"
    assert found.evidence.endswith("waits for nonzero 2 times and a synchronize() once")


def test_what_the_host_does_is_named_with_what_to_do() -> None:
    for host, seen, tried in (
        ({"cudaFree": 30, "cudaMalloc": 20}, "; the host is in cudaFree 30 %, cudaMalloc 20 %", "empty_cache()"),
        ({"aten::lerp_ on the CPU": 40}, "10 % at most; the host is in aten::lerp_ on the CPU 40 %", "aten::lerp_ on"),
        (
            {"cudaFree": 2},
            "does not tell what the host does meanwhile; the host is in cudaFree 2 %",
            "py-spy",
        ),
        (None, "does not tell what the host does meanwhile", "py-spy"),
        ({IN_PYTHON: 40}, "10 % at most; the host is in Python between operators 40 %", "py-spy"),
    ):
        first = last(waits_for_host(60, host)).causes[0]
        assert (first.name, first.evidence.endswith(seen), tried in first.advice) == ("host-work", True, True), seen
    asks = last(waits_for_host(60, {"cudaMalloc": 6}, allocates=True)).causes[0]
    assert "asks the driver for memory in each step" in asks.evidence
    assert asks.advice.startswith("no torch.cuda.empty_cache()")
    back = last(waits_for_host(60, {"aten::lerp_ on the CPU": 35}, host_copy_seconds={"DtoH Pageable": 0.1 * STEP}))
    assert names(back)[0] == "host-work"
    assert "host-copies" not in names(back)
    assert back.causes[0].evidence.endswith("Copies to the host take another 10 %")
    assert back.causes[0].share == pytest.approx(0.5)


def test_settings_that_slow_steps_are_named() -> None:
    anomaly = "torch.autograd.set_detect_anomaly(True)"
    (first, *_) = last(waits_for_host(80, {}, settings=(anomaly,), wait_seconds=0.5 * STEP)).causes
    assert (first.name, first.advice) == ("settings", f"training without {anomaly}")
    assert first.evidence == f"{anomaly} slows each step, and the GPU is idle 80 % of it"
    casts = step(classes={"cast": 40, TENSOR: 60}, profile={"settings": ("autocast(cache_enabled=False)",)})
    (cause,) = last(casts).causes
    assert (cause.name, cause.technique, "autocast's cache" in cause.advice) == ("casts", "", True)
    exact = last(step(classes=FULL, profile={"settings": ("torch.use_deterministic_algorithms(True)",)}))
    assert not exact.causes
    assert "what torch.use_deterministic_algorithms(True) costs; a run without it tells" in exact.missing


def test_advice_fits_what_leaves_the_gpu_empty() -> None:
    scan = last(scans(80, 131_072, 8, sm_share=0.3)).causes[0]
    assert scan.evidence.startswith(
        "aten::cumsum of 131,072×8 takes 80 % of the step, with less than 2 % of the memory"
    )
    assert "another order of its dimensions" in scan.advice
    outer = step(
        classes={"elementwise": 60, TENSOR: 40},
        profile=kernel("elementwise", 60, "k", "aten::sub", (2**15, 1, 64), (2**15, 64)),
    )
    assert names(last(outer)) == ["memory"], "its output is large"
    for num_kernels, advice in ((2000, "a larger batch"), (100, "timing its longest kernels")):
        narrow = step(classes={TENSOR: 90}, sm_share=0.3, profile={"num_kernels": num_kernels})
        found = next(cause for cause in last(narrow).causes if cause.name == "small-kernels")
        assert found.advice.startswith(advice)


def test_samples_that_are_taken_one_by_one_on_the_gpu_need_no_workers() -> None:
    trial = fake_run(TRAINING, fake_epoch(TRAINING, load_seconds=0.01))
    for launched, advice in ((4, "more loader workers"), (2048, "whole batches by index on the GPU")):
        profile = step(classes=FULL, profile={"loader_kernels": launched}).profile
        found = last(trial.model_copy(update={"profile": profile}))
        assert next(cause.advice for cause in found.causes if cause.name == "input").startswith(advice)


def test_an_optimizer_that_is_fused_is_not_to_be_fused() -> None:
    fused = kernel("optimizer", 30, "multi_tensor_apply_kernel", "aten::_fused_adamw_")
    (cause,) = last(step(classes={"optimizer": 30, TENSOR: 70}, profile=fused)).causes
    assert (cause.technique, cause.share) == ("", pytest.approx(0.15))


@pytest.mark.parametrize(
    ("written", "technique", "advice"),
    [
        ("AdamW(lr=0.1)", "fused-optimizer", "a fused optimizer"),
        ("AdamW(lr=0.1, fused=True)", "", "a larger batch: twice the samples for each update"),
        ("Adam()", "", "an optimizer of torch.optim with fused=True: time it"),  # Keras'
        ("AdamW8bit(lr=0.1)", "", "an optimizer of torch.optim with fused=True: time it"),
    ],
)
def test_a_script_s_optimizer_is_to_be_fused_if_torch_can(written: str, technique: str, advice: str) -> None:
    script = script_with()
    profile = step(classes={"optimizer": 30, TENSOR: 70}).profile
    facts = fake_facts(optimizer=written)
    (cause,) = last(script.model_copy(update={"profile": profile, "facts": facts})).causes
    assert (cause.name, cause.technique) == ("optimizer", technique)
    assert cause.advice.endswith(advice)


def test_misaligned_widths_are_named_with_what_to_pad_them_to() -> None:
    (cause,) = last(odd(0.15)).causes
    assert cause.evidence.endswith("all of misaligned rows: 8192×2045 and 2045×2045, at 15 % of the peak")
    assert cause.advice == "sizes that are multiples of 8: pad 2,045 to 2,048"


def test_what_a_script_computes_with_others_operators_is_named_with_its_share() -> None:
    script = UserModel(kind="script", path="train.py", name="")
    counted = StepFlops(products={"linear": {"bf16": 10**12}})
    own = {"flops": counted, "unlisted_seconds": {"flash_attn::_flash_attn_forward": 0.3 * STEP, "": 0.1 * STEP}}
    found = last(step(classes=FULL, products={}, profile=own, sm_share=0.9, user_model=script))
    assert found.flops == counted
    assert found.missing == (
        "the FLOPs of 40 % of the step, as they are not PyTorch's: flash_attn::_flash_attn_forward",
    )
    assert model_flops_per_second([found.trial], STEP) is None
    graph = {"unlisted_seconds": {"": 0.9 * STEP}, "flops": StepFlops()}
    (line,) = last(step(classes=FULL, products={}, profile=graph, sm_share=0.9, user_model=script)).missing
    assert line.endswith("from the peak: no operator of PyTorch's is one")
    (line,) = last(
        step(classes=FULL, products={}, profile={"flops": StepFlops(missing="too odd")}, sm_share=0.9)
    ).missing
    assert line.endswith("from the peak: too odd")


def test_a_precision_that_is_the_script_as_written_is_listed() -> None:
    written = step("as-written", FULL, user_model=UserModel(kind="script", path="train.py", name=""))
    (found,) = left_out_of([written.spec], [written], ["default", "as-written"])
    assert (found.spec.precision, found.status) == ("default", "as-written")
    assert found.reason == "the script computes so as it is"
    assert left_out_of([step().spec], [step()], ["bf16-mixed", "default"]) == []


def test_a_script_with_autocast_that_the_device_emulates_is_told() -> None:
    trial = fake_trial(
        fake_spec("as-written", device="cpu", user_model=UserModel(kind="script", path="train.py", name="")),
        facts=fake_facts(own_precision={"autocast bfloat16": ("train.py:25",)}),
        environment=fake_environment(None),
    )
    assert names(last(trial)) == ["no-hardware"]


def test_the_cause_that_saves_most_is_first() -> None:
    default, fp32 = step("default", seconds=0.102), step("fp32", seconds=0.4)
    shares = {"layout_conversion": 30, "cast": 6, "optimizer": 20, TENSOR: 24}
    found = last(fp32, default, step(classes=shares))
    assert names(found) == ["layout", "baseline-tf32", "launches", "optimizer", "casts"]
    emulated = last(step(classes=shares, machine={"capability": (7, 5)}))
    assert names(emulated)[0] == "no-hardware"


def test_fusion_comes_after_what_saves_nearly_as_much() -> None:
    """It saves about half of what it could at most."""
    shares = {"elementwise": 40, "optimizer": 25, TENSOR: 35}
    assert names(last(step(classes=shares))) == ["optimizer", "memory"]
    assert names(last(step(classes=shares | {"elementwise": 55, TENSOR: 20}))) == ["memory", "optimizer"]


def test_casts_that_fusion_does_with_the_rest_are_no_cause_of_their_own() -> None:
    (found,) = last(step(classes={"elementwise": 30, "cast": 20, TENSOR: 50})).causes
    assert found.name == "memory"
    assert found.evidence == "50 % of the step only moves data, most of it element-wise and casts"
    assert names(last(step(classes={"elementwise": 20, "cast": 30, TENSOR: 50})))[0] == "casts"


def test_short_depthwise_kernels_count_with_the_longest() -> None:
    for name, share in ((PLAIN, "60 %"), (TENSOR, "20 %")):
        listed = kernel(name, 20, "conv_depthwise3d", "aten::convolution_backward", *GROUP)
        others = kernel(PLAIN, 10, "sgemm", "aten::mm", *WORDS)
        both = {"kernels": [*listed["kernels"], *([] if name == PLAIN else others["kernels"])]}
        found = last(step(classes={PLAIN: 60, TENSOR: 40}, profile=both, **GROUPS))
        assert [each.evidence[:4] for each in found.causes if each.name == "grouped-convolutions"] == [share]


def test_what_a_loop_can_change_comes_before_the_power_limit() -> None:
    assert names(last(step(classes={"cast": 14, TENSOR: 86}, throttled=0.8))) == ["casts", "power-limit"]
    assert names(last(step(classes={"cast": 8, TENSOR: 92}, throttled=0.8))) == ["power-limit", "casts"]


def test_shares_are_of_the_timed_step_whatever_the_profiler_costs() -> None:
    shares = {TENSOR: 40, "elementwise": 20}
    slower = last(step(classes=shares, profile={"seconds": 2 * STEP}))
    assert slower.shares == pytest.approx({TENSOR: 0.4, "elementwise": 0.2})
    assert slower.idle_share == pytest.approx(0.4)
    overlapping = last(step(classes={TENSOR: 90, "communication": 90}, profile={"busy_seconds": 0.9 * STEP}))
    assert sum(overlapping.shares.values()) == pytest.approx(0.9)
    on_cpu = last(step("fp32", {"plain_product": 150}, device="cpu", profile={"seconds": 2 * STEP}))
    assert (on_cpu.shares["plain_product"], on_cpu.idle_share) == (pytest.approx(0.75), None)


def test_what_is_not_known_is_said() -> None:
    nothing = last(step(products={}))
    assert (nothing.causes, nothing.shares, nothing.idle_share, nothing.ceiling) == ((), {}, None, None)
    assert nothing.bound == "what takes its time is not known"
    assert nothing.missing == ("no counters of the GPU: this driver gives none",)
    refused = step(classes={}, profile={"missing": "the profiler may not"}, products={}, sm_share=0.9)
    assert last(refused).missing == ("the profiler may not",)
    assert last(step(classes=FULL, products={}, sm_share=0.9)).missing[0].endswith("no FLOPs were counted")
    assert last(step(device="cpu")).missing == ()
    failed = fake_trial(fake_spec("fp16-true"), status="oom", step_seconds=())
    assert diagnose(rows_of_steps([failed])) == []


def test_the_fastest_16_bit_format_has_a_ceiling() -> None:
    shares = {TENSOR: 50, "elementwise": 50}
    found = last(step("tf32", shares, **TF32))
    assert found.ceiling is not None
    assert found.ceiling.gain == pytest.approx(2, rel=0.01), "half the bytes, and twice the FLOP/s"
    assert last(step("bf16-mixed", shares)).ceiling is None


def test_what_to_try_is_a_command_with_the_loop_s_own_techniques() -> None:
    loop = ("channels-last",)
    (cause,) = last(step(classes={"elementwise": 40, TENSOR: 60}, techniques=loop)).causes
    assert try_line(cause, loop).endswith("(--techniques channels-last+compile)")
    (cause,) = last(step("fp32", {PLAIN: 60, TENSOR: 40}, **FP32)).causes
    assert try_line(cause).endswith("(--precision tf32)")


def recorded(workload: str) -> dict[str, Diagnosis]:
    """Return the diagnoses of an H100's records by precision and techniques."""
    paths = [path for name in PRECISIONS for path in sorted(RECORDS.glob(f"{workload}-{name}*.json"))]
    found = diagnose(rows_of_steps([Trial.model_validate_json(path.read_text()) for path in paths]))
    return {"+".join((each.row.precision, *each.row.techniques)): each for each in found}


@pytest.mark.parametrize(
    ("workload", "configuration", "first", "others"),
    [
        ("resnet50", "bf16-mixed", "layout", ["memory"]),
        ("resnet50", "bf16-mixed+channels-last", "memory", []),
        ("resnet50", "tf32", "baseline-tf32", ["memory", "layout"]),
        ("resnet50", "fp32", "float32-units", []),
        ("resnet18", "fp16-mixed", "layout", ["memory"]),
        ("wrn-28-10", "tf32", "baseline-tf32", ["layout"]),
        ("gpt2", "default", "float32-units", []),
        ("gpt2", "bf16-mixed", "memory", ["alignment"]),
        ("lstm-lm", "bf16-mixed", "launches", []),
        ("gru-lm", "fp16-mixed", "launches", ["small-kernels"]),
        ("mnist-cnn", "bf16-mixed", "launches", ["layout"]),
        ("efficientnet_b0", "bf16-mixed", "grouped-convolutions", ["memory"]),
        ("efficientnet_b0", "default", "grouped-convolutions", ["memory"]),
    ],
)
def test_records_of_an_h100_have_their_known_causes(
    workload: str, configuration: str, first: str, others: list[str]
) -> None:
    found = recorded(workload)[configuration]
    assert names(found)[0] == first
    assert set(others) <= set(names(found))
    assert all("no-step-sync" in line for line in found.missing)  # when the host waited was not recorded yet


def test_every_record_s_shares_are_of_one_step() -> None:
    trials = [Trial.model_validate_json(path.read_text()) for path in RECORDS.glob("*.json")]
    found = diagnose(rows_of_steps(trials))
    assert len(found) == len(trials)
    for each in found:
        assert sum(each.shares.values()) + (each.idle_share or 0.0) == pytest.approx(1, abs=0.01)
        assert all(0.05 <= cause.share <= 1 for cause in each.causes if cause.share is not None)


def test_what_the_evidence_does_not_tell_is_named_with_the_command_that_does() -> None:
    trial = Trial.model_validate_json((RECORDS / "lstm-lm-1500-tf32.json").read_text())
    facts = trial.facts.model_copy(update={"layers": ("embedding",)})  # which it is too old to have
    found = last(trial.model_copy(update={"facts": facts}))
    assert any("--techniques none,pad-vocabulary" in line for line in found.missing)
    assert not any("pad-" in line for line in recorded("lstm-lm-1500")["fp32"].missing)  # it uses no Tensor Cores
    older = recorded("mlp-4096")["fp16-mixed"]  # whose profile does not tell when the host waited
    assert any("--techniques none,no-step-sync" in line for line in older.missing)
    own = last(step("fp16-mixed", {TENSOR: 75}, workload="own:Net", batch_size=16))
    call = 'castwise.compare(..., precision="fp16-mixed", batch_size=16, techniques="none,no-step-sync")'
    assert any(call in line for line in own.missing)
    named = diagnose(
        rows_of_steps([step("fp16-mixed", {TENSOR: 75}, workload="m.py:build")]), typed=TypedLine(("sub/m.py",))
    )
    assert any("`castwise run sub/m.py --precision fp16-mixed --batch" in line for line in named[-1].missing)
    two = last(step("fp16-mixed", {TENSOR: 75}, world_size=2, parallelism="fsdp"))
    assert any("--gpus 2 --parallelism fsdp --techniques none,no-step-sync" in line for line in two.missing)
    by_products = last(step(classes=FULL, profile=product(40, "align1", WORDS[0], (768, 30522)), products={}))
    assert not any("space-to-depth" in line for line in by_products.missing)  # which changes a convolution


def test_what_starts_collectives_while_the_gpu_idles_is_communication_not_launches() -> None:
    fields = exchanges(20) | {"num_kernels": 10_000, "host_seconds": {STARTING_COLLECTIVES: 0.25 * STEP}}
    found = last(step(classes={TENSOR: 40, "communication": 20}, profile=fields))
    shares = {cause.name: cause.share for cause in found.causes}
    assert (shares["communication"], shares["launches"]) == (pytest.approx(0.45), pytest.approx(0.15))
    assert "; 25 % more is the host, which starts them while no kernel runs" in found.causes[0].evidence


def test_waits_of_ranks_while_operators_are_recorded_are_no_share_of_the_step() -> None:
    fields = exchanges(5) | {"busy_seconds": 0.65 * STEP}
    (row,) = rows_of_steps([step(classes={TENSOR: 60, "communication": 60}, profile=fields)])
    shares = StepEvidence(row, {}).shares
    assert shares == {TENSOR: pytest.approx(0.6), "communication": pytest.approx(0.05)}


def test_communication_is_told_with_its_format_and_size() -> None:
    trial = step(classes=REDUCED, profile=exchanges(30))
    (cause,) = (each for each in last(trial).causes if each.name == "communication")
    assert cause.evidence.startswith(
        "30 % of the step is communication that no other work hides: 4 all-reduces of 23.8 "
    )
    assert "in float32" in cause.evidence
    assert "bf16_compress_hook" in cause.advice
    assert "DistributedDataParallel" not in cause.advice
    (cause,) = last(step(classes=REDUCED, profile=exchanges(30, late_share=1))).causes
    assert cause.advice.startswith("DistributedDataParallel, which reduces while backward runs, or half of the bytes")
    late = step(classes=REDUCED, profile=exchanges(30, late_share=1))
    facts = fake_facts(hooked=("model DistributedDataParallel",))
    (cause,) = last(late.model_copy(update={"facts": facts})).causes
    assert cause.advice.startswith("half of the bytes"), "it has DDP"
    small = {"kind": "all-reduce", "format": "bf16", "launches": 100, "num_bytes": 1e6}
    trial = step(classes=REDUCED, profile=exchanges(10, collectives=[small]))
    (cause,) = (each for each in last(trial).causes if each.name == "communication")
    assert "larger buckets" in cause.advice
    assert "compress" not in cause.advice


def ranked(*steps: Mapping[str, float], compute: float = 0.05) -> Trial:
    """Return a step of as many ranks, of which the second is the slowest, with what their steps take besides."""
    seconds = [0.3 * STEP, 0.1 * STEP, *[0.3 * STEP] * (len(steps) - 2)]
    own = [{"compute_seconds": compute, **each} for each in steps]
    return step(classes=REDUCED, profile=exchanges(30, rank_seconds=seconds, rank_steps=own))


@pytest.mark.parametrize(
    ("slow", "evidence", "advice"),
    [
        ({"data_seconds": 0.2 * STEP}, "which waits for its batches", "more loader workers in that rank"),
        ({"clock_hertz": 1.2e9}, "whose GPU's clock is at 1,200 MHz, the others' at 1,980", "power limit"),
        ({"compute_seconds": 0.05 + 0.2 * STEP}, "whose kernels take longer", "as much work for each rank"),
        ({"data_seconds": 0.01 * STEP}, "whose kernels take no longer: its host is late", "py-spy on that rank"),
    ],
)
def test_it_is_said_why_a_rank_is_slow(slow: Mapping[str, float], evidence: str, advice: str) -> None:
    usual = {"clock_hertz": 1.98e9}
    (cause,) = (each for each in last(ranked(usual, usual | slow, usual, usual)).causes if "rank" in each.name)
    assert cause.evidence == f"ranks wait for rank 1, at most 20 % of the step, {evidence}"
    assert advice in cause.advice


def on_gpus(count: int, seconds: float, *ranks: Mapping[str, float], clocks: Sequence[float], **profile: Any) -> Trial:
    """Return a step on so many GPUs with what each of its ranks does, and the clock of each GPU in its blocks."""
    spec = {"world_size": count, "parallelism": "ddp"} if count > 1 else {}
    own = exchanges(12, rank_seconds=[0.03 if each is ranks[0] else 0.05 for each in ranks], rank_steps=ranks)
    classes = (
        {TENSOR: 65.0, "elementwise": 22.0, "communication": 30.0} if ranks else {TENSOR: 60.0, "elementwise": 20.0}
    )
    trial = step(classes=classes, seconds=seconds, profile={**(own if ranks else {}), **profile}, **spec)
    each = [
        GpuReading(device=f"cuda:{rank}", sm_clock_hertz=clock, power_watts=650, throttle_reasons=("sw_power_cap",))
        for rank, clock in enumerate(clocks)
    ]
    reading = fake_reading(sm_clock_hertz=clocks[0]).model_copy(update={"each_gpu": tuple(each) if count > 1 else ()})
    return trial.model_copy(update={"readings": (reading,)})


ALONE = on_gpus(1, 0.1, clocks=[1.9e9])  # 80 ms of kernels
RANKS = [
    {"compute_seconds": 0.095, "exposed_seconds": 0.012, "idle_seconds": 0.021, "clock_hertz": 1.9e9},
    {"compute_seconds": 0.08, "exposed_seconds": 0.03, "idle_seconds": 0.015, "clock_hertz": 1.9e9},
]


def test_the_step_on_several_gpus_is_told_beside_the_one_on_one_gpu() -> None:
    two = on_gpus(2, 0.13, *RANKS, clocks=[1.6e9, 1.9e9])
    beside = diagnose(rows_of_steps([ALONE, two]))[1].beside_one_gpu
    assert beside is not None
    parts = {name: each for name, each in vars(beside).items() if name.endswith("_seconds")}
    assert parts == pytest.approx(
        {
            "one_seconds": 0.1,
            "step_seconds": 0.13,
            "communication_seconds": 0.012,
            "clock_seconds": 0.015,  # all of what kernels take longer: their clock is 16 % lower
            "kernel_seconds": 0.0,
            "idle_seconds": 0.001,
            "rest_seconds": 0.002,
            "waited_seconds": 0.02,
        }
    )
    assert beside.rank == 0
    assert [*beside.slower_classes] == [TENSOR, "elementwise"]
    fast = diagnose(rows_of_steps([ALONE, on_gpus(2, 0.13, *RANKS, clocks=[1.9e9, 1.9e9])]))[1].beside_one_gpu
    assert fast is not None
    assert (fast.clock_seconds, fast.kernel_seconds) == pytest.approx((0.0, 0.015))


def test_what_the_profiler_adds_to_the_host_s_time_is_not_the_host_s() -> None:
    slowed = [{**each, "idle_seconds": 0.2} for each in RANKS]
    beside = diagnose(rows_of_steps([ALONE, on_gpus(2, 0.13, *slowed, clocks=[1.9e9, 1.9e9])]))[1].beside_one_gpu
    assert beside is not None
    # Of 130 ms, kernels and collectives take 107; on one GPU the host takes 20.
    assert (beside.idle_seconds, beside.rest_seconds) == pytest.approx((0.003, 0.0))


def test_ranks_that_compute_while_a_collective_waits_for_another_do_not_wait() -> None:
    hidden = [{**each, "exposed_seconds": 0.004} for each in RANKS]
    two = on_gpus(2, 0.13, *hidden, clocks=[1.9e9, 1.9e9])  # the second one's collectives take 20 ms longer
    assert last(two).rank_waits == pytest.approx([0.0, 0.004 / 0.13])
    assert last(on_gpus(2, 0.13, *RANKS, clocks=[1.9e9, 1.9e9])).rank_waits == pytest.approx([0.0, 0.02 / 0.13])


def test_a_rank_waits_no_longer_than_a_timed_step_leaves_beside_what_it_computes() -> None:
    two = on_gpus(2, 0.085, *RANKS, clocks=[1.9e9, 1.9e9])  # profiled, the second one waits for 20 ms
    assert last(two).rank_waits == pytest.approx([0.0, 0.005 / 0.085])


def test_without_a_step_on_one_gpu_it_is_said_how_to_get_it() -> None:
    two = on_gpus(2, 0.13, *RANKS, clocks=[1.9e9, 1.9e9])
    assert last(two).beside_one_gpu is None
    assert any("`--gpus 1,2` tells" in line for line in last(two).missing)
    assert not any("`--gpus" in line for line in last(ALONE, two).missing)
    other = ALONE.model_copy(update={"spec": ALONE.spec.model_copy(update={"batch_size": 8})})
    assert last(other, two).beside_one_gpu is None
    older = [{"compute_seconds": each["compute_seconds"]} for each in RANKS]
    assert last(ALONE, on_gpus(2, 0.13, *older, clocks=[1.9e9, 1.9e9])).beside_one_gpu is None


@pytest.mark.parametrize(("samples", "same"), [(128, True), (64, False)])
def test_a_script_on_two_ranks_is_told_beside_it_on_one(samples: int, same: bool) -> None:
    """Some scripts divide their batch among ranks: then steps take less, and are not compared."""
    two = on_gpus(2, 0.13, *RANKS, clocks=[1.9e9, 1.9e9])
    trials = []
    for trial, count, all_samples in ((ALONE, 1, 64), (two, 2, samples)):
        model = UserModel(
            kind="script", path="train.py", name="", launcher=("torchrun", "--nproc-per-node", str(count))
        )
        changes = {"workload": f"torchrun {count}", "world_size": 1, "parallelism": "none", "batch_size": all_samples}
        spec = trial.spec.model_copy(update={**changes, "precision": "as-written", "user_model": model})
        trials.append(trial.model_copy(update={"spec": spec}))
    rows = rows_of_steps(trials)
    assert rows[1].scaling_efficiency == pytest.approx(samples / 64 / 1.3 / 2)
    found = diagnose(rows)[1]
    assert (found.beside_one_gpu is not None) == same
    other = "what the step takes more than on one GPU: a rank's batch is 32, and that of one GPU 64"
    assert (other in found.missing) != same
    assert any("`--gpus 1,2` tells" in line for line in last(trials[1]).missing)


def test_the_table_of_several_gpus_fits_a_terminal_and_adds_up() -> None:
    text = io.StringIO()
    found = diagnose(rows_of_steps([ALONE, on_gpus(2, 0.13, *RANKS, clocks=[1.6e9, 1.9e9])]))
    print_parts(why_report.present(found).parts, Console(file=text, width=80, emoji=False))
    lines = text.getvalue().splitlines()
    at = lines.index(why_report.GPUS_TITLE)
    assert lines[at + 1].split() == [
        "precision",
        "one",
        "GPU",
        "collectives",
        "clock",
        "kernels",
        "host",
        "rest",
        "step",
    ]
    one, *added, total = map(float, lines[at + 2].split()[1:])
    assert one + sum(added) == pytest.approx(total)
    assert "others wait for rank 0, up to 20.0 ms" in " ".join(lines[at + 3 :])
    assert max(map(len, lines[at : at + 3])) <= 80
    document = why_report.document(found)["diagnoses"]
    assert document[0]["beside_one_gpu"] is None
    assert document[1]["beside_one_gpu"]["communication_seconds"] == pytest.approx(0.012)


@pytest.mark.parametrize(
    ("techniques", "is_cut"), [((), False), (("compile",), True), (("coalesced-reduce", "compile"), False)]
)
def test_kernels_of_a_compiled_step_that_is_cut_into_graphs_are_explained(
    techniques: tuple[str, ...], is_cut: bool
) -> None:
    trials = [ALONE, on_gpus(2, 0.13, *RANKS, clocks=[1.9e9, 1.9e9])]
    found = diagnose(
        rows_of_steps(
            [
                each.model_copy(update={"spec": each.spec.model_copy(update={"techniques": techniques})})
                for each in trials
            ]
        )
    )
    (line,) = why_report.gpus_lines(found)
    assert ("cuts a compiled step into a graph for each bucket" in line) is is_cut


def test_a_slower_card_is_named_with_what_holds_it() -> None:
    two = on_gpus(2, 0.13, *RANKS, clocks=[1.6e9, 1.9e9])
    (cause,) = (each for each in last(ALONE, two).causes if each.name == "rank-imbalance")
    held = "clock is at 1,600 MHz, the others' at 1,900, held by its power limit at 650 W"
    assert cause.evidence.endswith(held)
    capped = step(throttled=0.8, classes=FULL)
    several = capped.model_copy(
        update={
            "readings": tuple(
                each.model_copy(update={"each_gpu": two.readings[0].each_gpu}) for each in capped.readings
            ),
            "spec": two.spec,
        }
    )
    (cause,) = (each for each in last(several).causes if each.name == "power-limit")
    assert "that of rank 0's GPU at 1,600 MHz, the others' at 1,900" in cause.evidence


def communicates(*, of_spec: Mapping[str, Any] | None = None, linked: int | None = None, **changes: Any) -> Cause:
    """Return the cause of a step on two GPUs whose collectives nothing hides."""
    on_two = {"world_size": 2, "parallelism": "ddp", **(of_spec or {})}
    trial = step(classes=REDUCED, profile=exchanges(30, **changes), **on_two)
    facts = None if linked is None else fake_gpu_facts(nvlinked_gpus=linked)
    (cause,) = (each for each in last(trial.model_copy(update={"gpu_facts": facts})).causes if "comm" in each.name)
    return cause


def test_techniques_against_communication_are_named() -> None:
    megabytes = {"kind": "all-reduce", "format": "fp32", "launches": 200, "num_bytes": 200 * 2**20}
    small = communicates(collectives=[megabytes])
    assert small.advice.startswith("larger buckets, as bucket_cap_mb sets them, or half of the bytes")
    assert try_line(small).endswith(": a step with it tells (--techniques ddp-buckets-100)")
    assert communicates().technique == "bf16-all-reduce"
    assert communicates(of_spec={"techniques": ("bf16-all-reduce",)}).technique == ""
    gathered = {"kind": "all-gather", "format": "fp32", "launches": 4, "num_bytes": 1e8}
    assert communicates(of_spec={"parallelism": "fsdp"}, collectives=[gathered]).technique == "fsdp-keep-weights"


def test_links_and_their_rate_are_told() -> None:
    seconds = [0.01, 0.012]
    assert "over NVLink at 10 GB/s" in communicates(linked=1, rank_seconds=seconds).evidence
    assert "over PCIe at 10 GB/s" in communicates(linked=0, rank_seconds=seconds).evidence
    assert "over NVLink to 1 of 2 GPUs" in communicates(linked=1, rank_seconds=[*seconds, 0.01]).evidence
    assert "over" not in communicates(rank_seconds=seconds).evidence


def test_the_gradient_of_an_embedding_is_named() -> None:
    weight = {"largest_weight": "table.weight", "largest_weight_layer": "Embedding", "largest_weight_bytes": 9e7}
    reduced = {"kind": "all-reduce", "format": "fp32", "launches": 4, "num_bytes": 1e8, "largest_bytes": 9e7}
    cause = communicates(collectives=[reduced], **weight)
    assert "; 90 % of it is the gradient of `table.weight`" in cause.evidence
    assert "(at most 85.8 MiB)" in cause.evidence
    assert cause.advice.startswith(
        "gradients of the rows that a batch has alone, or a table that ranks divide, or half"
    )
    sparse = communicates(collectives=[reduced | {"largest_bytes": 1e6}], **weight)
    assert "table" not in sparse.evidence + sparse.advice, "its gradient has the rows of a batch alone"


def test_looking_for_unused_parameters_is_a_setting_by_the_time_it_takes() -> None:
    found = last(waits_for_host(40, {FINDING_UNUSED: 25}))
    shares = {cause.name: cause.share for cause in found.causes}
    assert shares["settings"] == pytest.approx(0.25)
    assert shares["launches"] == pytest.approx(0.15)
    assert found.causes[0].advice == "training without find_unused_parameters"
    assert "settings" not in {each.name for each in last(waits_for_host(40, {FINDING_UNUSED: 1})).causes}


def test_one_thread_in_each_rank_is_told_beside_work_of_the_host() -> None:
    trial = waits_for_host(60, {"aten::sort on the CPU": 50}, **exchanges(0, threads_per_rank=1))
    (cause,) = (each for each in last(trial).causes if each.name == "host-work")
    assert "each rank computes on one thread, as torchrun sets OMP_NUM_THREADS=1" in cause.evidence
    assert cause.advice.endswith(", or OMP_NUM_THREADS of the cores for each rank")
    others = waits_for_host(60, {"aten::sort on the CPU": 50}, **exchanges(0, threads_per_rank=8))
    assert "OMP" not in next(each for each in last(others).causes if each.name == "host-work").evidence


def test_a_slower_kernel_is_named_beside_the_faster_one() -> None:
    found = last(convolved("fp16-mixed", 30), convolved("bf16-mixed", 50, seconds=1.2 * STEP))
    (cause,) = (each for each in found.causes if each.name == "slower-kernel")
    assert "aten::cudnn_convolution of 2×32×64×64×64 and 32×32×3×3×3" in cause.evidence
    assert "bf16-mixed_fprop, there fp16-mixed_fprop" in cause.evidence
    assert cause.advice == "fp16-mixed, which is 1.20× as fast here"


def test_where_the_optimizer_is_compiled_anew_its_numbers_are_named() -> None:
    trial = script_with(compiled_steps=2, compiled_share=0.5)
    for optimizer, advice in (("AdamW(lr=0.001)", "few sizes of batches"), ("AdamW8bit(lr=0.001)", "cycle_momentum")):
        facts = fake_facts(optimizer=optimizer)
        (found,) = diagnose(rows_of_steps([trial.model_copy(update={"facts": facts})]))
        assert advice in next(cause.advice for cause in found.causes if cause.name == "recompilation")
