"""Summaries of profiles: synthetic events with overlaps and gaps, nesting, modules, the optimizer and its scaling."""

import time

import pytest

from castwise.registry.kernel_classes import classify_kernel
from castwise.spec.types import FINDING_UNUSED, IN_PYTHON, STARTING_COLLECTIVES
from castwise.trial.trace_summary import (
    CLOSURE_RANGE,
    MODULE_RANGE,
    SCALING_RANGE,
    UNUSED_RANGE,
    UPDATE_RANGE,
    DeviceEvent,
    HostEvent,
    busy_nanoseconds,
    measure_idle,
    summarize_communication,
    summarize_kernels,
    summarize_operators,
)

GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"
NORM = "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>(int)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)"
MATH = "aten::_scaled_dot_product_attention_math"
COPY_BACK = "Memcpy DtoH (Device -> Pageable)"


@pytest.mark.parametrize(
    ("intervals", "busy"),
    [
        ([], 0),
        ([(0, 10)], 10),
        ([(0, 10), (5, 15)], 15),  # they overlap
        ([(0, 10), (2, 5)], 10),  # one lies in the other
        ([(20, 30), (0, 10)], 20),  # a gap, not in order
        ([(0, 10), (10, 12), (11, 12), (40, 50)], 22),
    ],
)
def test_busy_time_is_the_union(intervals: list[tuple[int, int]], busy: int) -> None:
    assert busy_nanoseconds(intervals) == busy


def test_idle_time_is_the_gaps_of_the_device_over_all_streams() -> None:
    events = [DeviceEvent(GEMM, 100, 200), DeviceEvent(NORM, 150, 260), DeviceEvent(ADD, 300, 400)]
    times = measure_idle(events, num_steps=2)
    assert times["seconds"] == pytest.approx(150e-9)
    assert times["busy_seconds"] == pytest.approx(130e-9)
    assert times["idle_seconds"] == pytest.approx(20e-9)
    assert times["num_kernels"] == 1.5
    assert measure_idle([], 2) == {}


# A step: a convolution in module a.0 and one in b, their backward nodes on another thread, the scaled optimizer.
HOST = (
    HostEvent(f"{MODULE_RANGE}a", 0, 50, 1, 1),
    HostEvent(f"{MODULE_RANGE}a.0", 1, 40, 1, 2),
    HostEvent("aten::conv2d", 2, 30, 1, 3, sequence=7, shapes=((8, 3, 4, 4), (2, 3, 1, 1))),
    HostEvent("aten::cudnn_convolution", 3, 20, 1, 4, sequence=7, shapes=((8, 3, 4, 4), (2, 3, 1, 1))),
    HostEvent("aten::add", 42, 48, 1, 5, sequence=8),
    HostEvent(f"{MODULE_RANGE}b", 50, 60, 1, 6),
    HostEvent("aten::linear", 51, 59, 1, 7, sequence=9),
    HostEvent("autograd::engine::evaluate_function: ConvolutionBackward0", 70, 90, 2, 8, sequence=7, forward_thread=1),
    HostEvent("aten::convolution_backward", 72, 88, 2, 9, shapes=((8, 2, 4, 4),)),
    HostEvent("autograd::engine::evaluate_function: AddBackward0", 60, 69, 2, 10, sequence=8, forward_thread=1),
    HostEvent(SCALING_RANGE, 100, 150, 1, 11),
    HostEvent("aten::_amp_foreach_non_finite_check_and_unscale_", 101, 105, 1, 12),
    HostEvent("aten::item", 106, 110, 1, 13),
    HostEvent("Optimizer.step#SGD.step", 111, 140, 1, 14),
    HostEvent("aten::_foreach_add_", 112, 130, 1, 15),
)


def kernel(name: str, launched_by: int, duration: int = 10) -> DeviceEvent:
    return DeviceEvent(name, 1000, 1000 + duration, launched_by)


def test_kernels_belong_to_modules_forward_and_backward() -> None:
    events = [kernel(GEMM, 4), kernel(ADD, 5, 3), kernel(GEMM, 7, 4), kernel(GEMM, 9, 20), kernel(ADD, 10, 6)]
    profile = summarize_kernels(HOST, events, 1, classify_kernel)
    found = {
        name: (round(each.forward_seconds * 1e9), round(each.backward_seconds * 1e9))
        for name, each in profile.module_seconds.items()
    }
    assert found == {"a.0": (10, 20), "a": (3, 6), "b": (4, 0)}


def test_the_optimizer_and_loss_scaling_are_told_by_where_they_were_launched() -> None:
    events = [kernel(ADD, 12, 1), kernel(COPY_BACK, 13, 2), kernel(ADD, 15, 4), kernel(ADD, 5, 8), kernel(NORM, 0, 16)]
    profile = summarize_kernels(HOST, events, 1, classify_kernel)
    found = {kind: round(seconds * 1e9) for kind, seconds in profile.class_seconds.items()}
    assert found == {"loss_scaling": 3, "optimizer": 4, "elementwise": 8, "normalisation": 16}


def test_a_compiled_update_is_the_optimizer_but_its_communication_is_not() -> None:
    host = (HostEvent(UPDATE_RANGE, 0, 10, 1, 1), HostEvent("CompiledFunction", 1, 9, 1, 2))
    events = [kernel("triton_poi_fused_add_0", 2), kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(Args)", 2)]
    profile = summarize_kernels(host, events, 1, classify_kernel)
    assert set(profile.class_seconds) == {"optimizer", "communication"}


@pytest.mark.parametrize(
    ("name", "operators", "kind"),
    [
        ("a_kernel_of_tomorrow", ["aten::conv2d", "aten::cudnn_convolution"], "unknown_product"),
        ("a_kernel_of_tomorrow", ["aten::native_layer_norm"], "normalisation"),
        ("a_kernel_of_tomorrow", ["aten::max_pool2d_with_indices"], "reduction"),
        ("a_kernel_of_tomorrow", ["aten::embedding_dense_backward"], "indexing"),
        ("elementwise_kernel<direct_copy_kernel_cuda>", ["aten::linear", "aten::to", "aten::copy_"], "cast"),
        ("elementwise_kernel<direct_copy_kernel_cuda>", ["aten::copy_"], "elementwise"),
        ("elementwise_kernel<CUDAFunctor_add>", ["aten::linear"], "elementwise"),
    ],
)
def test_operators_tell_what_names_do_not(name: str, operators: list[str], kind: str) -> None:
    host = [HostEvent(each, index, 100 - index, 1, index + 1) for index, each in enumerate(operators)]
    profile = summarize_kernels(host, [kernel(name, len(operators))], 1, classify_kernel)
    assert set(profile.class_seconds) == {kind}


def test_the_largest_kernels_have_shapes_and_figures_of_a_step() -> None:
    events = [kernel(GEMM, 4), kernel(GEMM, 4), kernel(GEMM, 9), *(kernel(f"other {i}", 0, 1) for i in range(20))]
    profile = summarize_kernels(HOST, events, 2, classify_kernel)
    assert len(profile.kernels) == 10
    first = profile.kernels[0]
    assert (first.name, first.kind, first.format) == (GEMM, "tensor_core_product", "bf16")
    assert (first.operator, first.shapes) == ("aten::cudnn_convolution", ((8, 3, 4, 4), (2, 3, 1, 1)))
    assert (first.launches, first.seconds) == (1.0, pytest.approx(10e-9))
    assert profile.kernels[1].operator == "aten::convolution_backward"
    assert profile.format_seconds == {"bf16": pytest.approx(15e-9)}


def test_kernels_of_a_graph_have_no_operator_and_no_module() -> None:
    profile = summarize_kernels((), [kernel(GEMM, 0), kernel(NORM, 99)], 1, classify_kernel)
    assert profile.module_seconds == {}
    assert {each.operator for each in profile.kernels} == {""}
    assert sum(profile.class_seconds.values()) == pytest.approx(20e-9)


@pytest.mark.parametrize(
    ("name", "dtype", "kind", "format"),
    [
        ("ampere_sgemm_128x64_tn", "float", "plain_product", "fp32"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "c10::BFloat16", "plain_product", "bf16"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "", "plain_product", "bf16"),
        ("void gemv2T_kernel_val<int, int, double>", "double", "plain_product", "fp64"),
        ("sm80_xmma_gemm_f64f64_f64f64_f64_nn_n_tilesize32x32x16", "double", "tensor_core_product", "fp64"),
        ("a_gemm_of_tomorrow", "c10::Half", "unknown_product", "fp16"),
        ("a_gemm_of_tomorrow", "float", "unknown_product", ""),
        ("nvjet_sss_128x256_64x4_1x2_h_bz_coopA_NTT", "float", "tensor_core_product", "tf32"),
    ],
)
def test_a_product_s_format_is_that_of_its_operator(name: str, dtype: str, kind: str, format: str) -> None:  # noqa: A002
    host = (
        HostEvent(f"{MODULE_RANGE}blocks.7.mlp", 0, 9, 1, 1),
        HostEvent("aten::linear", 1, 8, 1, 2, dtypes=("float", "float")),
        HostEvent("aten::addmm", 2, 7, 1, 3, dtypes=("Scalar", dtype) if dtype else ()),
    )
    host = host if dtype else host[:1]
    profile = summarize_kernels(host, [kernel(name, len(host), 4), kernel(name, len(host), 6)], 1, classify_kernel)
    (found,) = profile.products
    assert (found.kind, found.format, found.module) == (kind, format, "blocks.*.mlp")
    assert found.seconds == pytest.approx(10e-9)


def test_what_others_operators_launch_is_listed_apart() -> None:
    host = (
        HostEvent("aten::mm", 0, 9, 1, 1),
        HostEvent("theirs::mix", 10, 19, 1, 2),
        HostEvent("triton_tem_fused_mm_0", 20, 29, 1, 3),
    )
    events = [
        kernel(GEMM, 1),
        kernel("a_kernel_of_theirs", 2, 20),
        kernel("triton_tem_fused_mm_0", 3),
        kernel(GEMM, 0, 7),
    ]
    found = {
        name: round(each * 1e9)
        for name, each in summarize_kernels(host, events, 1, classify_kernel).unlisted_seconds.items()
    }
    assert found == {"theirs::mix": 20, "": 7}
    assert summarize_kernels((), events, 1, classify_kernel).unlisted_seconds == {}


QUERY, MASK = (2, 4, 256, 64), (1, 1, 256, 256)


def backward(name: str, start: int, id: int, sequence: int) -> HostEvent:  # noqa: A002
    return HostEvent(name, start, start + 20, 2, id, sequence=sequence, forward_thread=1)


def test_fused_attention_has_its_backend_size_mask_and_flops() -> None:
    half = ("c10::BFloat16",)
    host = (
        HostEvent(
            "aten::_scaled_dot_product_efficient_attention", 0, 9, 1, 1, shapes=(QUERY, QUERY, QUERY, MASK), dtypes=half
        ),
        HostEvent("aten::_efficient_attention_forward", 1, 8, 1, 2, shapes=((2, 256, 4, 64),) * 3, dtypes=half),
        HostEvent(
            "aten::_scaled_dot_product_efficient_attention_backward", 10, 19, 1, 3, shapes=(QUERY,) * 5, dtypes=half
        ),
    )
    events = [kernel("fmha_cutlassF_bf16_aligned", 2, 10), kernel("fmha_cutlassB_bf16_aligned", 3, 30)]
    (found,) = summarize_kernels(host, events, 1, classify_kernel).attention
    assert (found.backend, found.format, found.is_masked) == ("efficient", "bf16", True)
    assert (found.queries, found.keys, found.head_size) == (256, 256, 64)
    assert (found.seconds, found.product_seconds) == (pytest.approx(40e-9), pytest.approx(40e-9))
    assert found.flops == 14 * 2 * 4 * 256 * 256 * 64


@pytest.mark.parametrize(("around", "backend"), [("aten::matmul", "written"), (MATH, "math")])
def test_attention_that_is_written_out_is_all_that_reads_or_writes_its_scores(around: str, backend: str) -> None:
    rows, scores = (8, 256, 64), (8, 256, 256)
    host = (
        HostEvent(around, 0, 9, 1, 1, shapes=(QUERY, (2, 4, 64, 256))),
        HostEvent("aten::bmm", 1, 8, 1, 2, shapes=(rows, (8, 64, 256)), dtypes=("c10::Half",)),
        HostEvent("aten::masked_fill_", 10, 19, 1, 3, shapes=((2, 4, 256, 256), (256, 256))),
        HostEvent("aten::_softmax", 20, 29, 1, 4, shapes=((2, 4, 256, 256),)),
        HostEvent("aten::bmm", 30, 39, 1, 5, shapes=(scores, rows)),
        HostEvent("aten::bmm", 40, 49, 1, 6, shapes=((8, 64, 256), scores)),  # of the gradient of the keys
        HostEvent("aten::native_layer_norm", 50, 59, 1, 7, shapes=((2, 256, 256),)),  # whose width is that of scores
        HostEvent("aten::bmm", 60, 69, 1, 8, shapes=((8, 64, 64), (8, 64, 64))),
    )
    events = [kernel(GEMM if i in (2, 5, 6, 8) else ADD, i, i) for i in range(2, 9)]
    (found,) = summarize_kernels(host, events, 1, classify_kernel).attention
    assert (found.backend, found.format, found.queries, found.head_size) == (backend, "fp16", 256, 64)
    assert (found.seconds, found.product_seconds) == (pytest.approx(20e-9), pytest.approx(13e-9))
    assert found.flops == 3 * 2 * 8 * 256 * 256 * 64
    assert summarize_kernels(host[4:], events, 1, classify_kernel).attention == ()
    linear = (
        HostEvent("aten::_softmax", 0, 9, 1, 1, shapes=(QUERY,)),
        HostEvent("aten::bmm", 10, 19, 1, 2, shapes=(rows, (8, 64, 64))),
    )
    assert summarize_kernels(linear, [kernel(GEMM, 2)], 1, classify_kernel).attention == ()


@pytest.mark.parametrize(("has_graph", "recomputed"), [(False, 4), (True, 0)])
def test_forward_within_backward_is_recomputed_but_not_gradients_of_gradients(has_graph: bool, recomputed: int) -> None:
    host = (
        HostEvent("aten::linear", 0, 9, 1, 1, sequence=3, shapes=((4, 4),)),
        backward("AddmmBackward0", 20, 2, 3),
        HostEvent(f"{MODULE_RANGE}a", 21, 29, 2, 3),
        HostEvent("aten::linear", 22, 28, 2, 4, sequence=7, shapes=((4, 4),)),
        HostEvent("aten::addmm", 23, 27, 2, 5, shapes=((4, 4),)),
        HostEvent("aten::mm", 30, 35, 2, 6, sequence=8 if has_graph else -1, shapes=((4, 4),)),
    )
    profile = summarize_kernels(host, [kernel(GEMM, 5, 4), kernel(GEMM, 6, 8), kernel(GEMM, 1)], 1, classify_kernel)
    assert profile.recomputed_seconds == pytest.approx(recomputed * 1e-9)


def test_a_backward_node_that_runs_a_backward_pass_has_recomputed_what_it_passes() -> None:
    """As custom functions do, whose operators all have nodes."""
    host = (
        backward("autograd::engine::evaluate_function: MineBackward", 20, 2, 3),
        HostEvent("MineBackward", 21, 39, 2, 3, sequence=3, forward_thread=1),
        HostEvent("aten::mm", 22, 28, 2, 4, sequence=7, shapes=((4, 4),)),
        HostEvent("autograd::engine::evaluate_function: MmBackward0", 29, 35, 2, 5, sequence=7, forward_thread=2),
        HostEvent("aten::mm", 30, 34, 2, 6, shapes=((4, 4),)),
    )
    profile = summarize_kernels(host, [kernel(GEMM, 4, 4), kernel(GEMM, 6, 8)], 1, classify_kernel)
    assert profile.recomputed_seconds == pytest.approx(4e-9)


def test_copies_cost_what_no_kernel_hides() -> None:
    to_device, pinned = "Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pinned -> Device)"
    events = [
        DeviceEvent(GEMM, 0, 100),
        DeviceEvent(pinned, 20, 80),  # behind the kernel
        DeviceEvent(to_device, 110, 150),
        DeviceEvent(ADD, 155, 200),  # which was launched after it
        DeviceEvent(COPY_BACK, 200, 207),
        DeviceEvent(pinned, 207, 208),
        DeviceEvent("Memcpy DtoD (Device -> Device)", 210, 290),
    ]
    found = measure_idle(events, 1)["host_copy_seconds"]
    assert found == {
        "HtoD Pinned": pytest.approx(1e-9),
        "HtoD Pageable": pytest.approx(45e-9),
        "DtoH Pageable": pytest.approx(7e-9),
    }


def test_waits_are_counted_by_the_operator_around_them() -> None:
    host = (HostEvent("aten::item", 0, 9, 1, 1), HostEvent("aten::_local_scalar_dense", 1, 8, 1, 2))
    calls = [HostEvent("cudaStreamSynchronize", 2, 7, 1, around) for around in (2, 2, 0)]
    profile = summarize_kernels(host, [], 2, classify_kernel, [*calls, HostEvent("cudaLaunchKernel", 2, 3, 1, 1)])
    assert profile.waits == {"aten::_local_scalar_dense": 1.0, "": 0.5}


LOADING = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def test_what_the_host_does_while_no_kernel_runs_is_listed() -> None:
    micro = 1000
    host = (
        HostEvent("aten::mm", 0, 10 * micro, 1, 1),
        HostEvent("aten::lerp_", 20 * micro, 220 * micro, 1, 2),
        HostEvent("aten::lerp_", 220 * micro, 260 * micro, 1, 3),  # no longer than a launch
        HostEvent("aten::_foreach_norm", 300 * micro, 400 * micro, 1, 4),  # launches from within
        HostEvent("aten::linalg_vector_norm", 310 * micro, 320 * micro, 1, 5),
        HostEvent("Optimizer.step#SGD.step", 400 * micro, 500 * micro, 1, 6),
        HostEvent("aten::stack", 0, 300 * micro, 2, 7),  # of a thread that launches nothing
        HostEvent("autograd::engine::evaluate_function: MmBackward0", 520 * micro, 620 * micro, 1, 8),
        HostEvent("aten::empty", 700 * micro, 900 * micro, 1, 9),
    )
    device = [DeviceEvent(GEMM, 0, 120 * micro, 1), DeviceEvent(ADD, 320 * micro, 330 * micro, 5)]
    calls = [
        HostEvent("cudaLaunchKernel", micro, 2 * micro, 1, 1),
        HostEvent("cudaMalloc", 710 * micro, 890 * micro, 1, 9),
        HostEvent("cudaFree", 100 * micro, 140 * micro, 1),  # which waits for a kernel first
        HostEvent("cudaDeviceSynchronize", 900 * micro, 999 * micro, 1),
    ]
    found = summarize_kernels(host, device, 2, classify_kernel, calls).host_seconds
    assert found == {
        "aten::lerp_ on the CPU": pytest.approx(50e-6),
        "cudaMalloc": pytest.approx(90e-6),
        "cudaFree": pytest.approx(10e-6),
    }


def test_long_gaps_between_operators_of_threads_that_launch_are_python_s() -> None:
    micro = 1000
    host = (
        HostEvent("castwise module: head", 0, 9000 * micro, 1),  # a range around it all
        HostEvent("aten::mm", 0, 100 * micro, 1, 1),
        HostEvent("aten::stack", 1700 * micro, 1740 * micro, 1, 2),  # after 1.6 ms
        HostEvent("aten::stack", 2200 * micro, 2240 * micro, 1, 3),  # after 0.4 ms
        HostEvent("enumerate(DataLoader)#_Iter.__next__", 2240 * micro, 8000 * micro, 1, 4),
        HostEvent("aten::add", 8100 * micro, 8140 * micro, 1, 5),
        HostEvent("aten::cat", 100 * micro, 8000 * micro, 2, 6),  # of a thread that launches nothing
    )
    device = [DeviceEvent(GEMM, 0, 700 * micro, 1), DeviceEvent(ADD, 8200 * micro, 8300 * micro, 5)]
    found = summarize_kernels(host, device, 1, classify_kernel).host_seconds
    assert found == {IN_PYTHON: pytest.approx(1000e-6)}


def test_the_host_s_start_of_a_collective_is_known_where_no_kernel_runs() -> None:
    host = (HostEvent("c10d::allreduce_", 0, 9000, 1, 1), HostEvent("nccl:all_reduce", 5000, 9000, 1, 2))
    found = summarize_kernels(host, [DeviceEvent("ncclDevKernel_AllReduce", 6000, 20000, 2)], 1, classify_kernel)
    assert found.host_seconds == {STARTING_COLLECTIVES: pytest.approx(6e-6)}


def test_what_a_loader_launches_is_counted() -> None:
    host = (
        HostEvent(LOADING, 0, 500_000, 1, 1),
        HostEvent("aten::add", 3, 4, 1, 3),
        HostEvent("aten::stack", 9, 400_000, 1, 4),
    )
    profile = summarize_kernels(host, [kernel(ADD, 3), kernel(GEMM, 0), kernel(ADD, 3)], 1, classify_kernel)
    assert (profile.loader_kernels, profile.host_seconds) == (2, {})


def test_a_copy_is_no_conversion_of_layouts_if_no_operator_has_images() -> None:
    copy = "elementwise_kernel<direct_copy_kernel_cuda>"
    host = [HostEvent("aten::contiguous", 0, 9, 1, 1), HostEvent("aten::clone", 1, 8, 1, 2)]
    for other, kind in (
        ("aten::mm", "elementwise"),
        ("aten::_convert_indices_from_csr_to_coo", "elementwise"),
        ("aten::cudnn_convolution", "layout_conversion"),
        ("aten::max_pool2d_with_indices", "layout_conversion"),
        ("aten::native_batch_norm", "layout_conversion"),
    ):
        profile = summarize_kernels([*host, HostEvent(other, 20, 30, 1, 3)], [kernel(copy, 2)], 1, classify_kernel)
        assert set(profile.class_seconds) == {kind}, other


def test_long_names_are_cut() -> None:
    profile = summarize_kernels((), [kernel("k" * 5000, 0)], 1, classify_kernel)
    assert len(profile.kernels[0].name) == 200


def test_operators_of_a_cpu_count_without_those_that_they_call() -> None:
    host = (
        HostEvent("aten::linear", 0, 100, 1, 1, shapes=((4, 4),)),
        HostEvent("aten::addmm", 10, 90, 1, 2),
        HostEvent("aten::copy_", 20, 30, 1, 3),  # of the product
        HostEvent("aten::to", 40, 60, 1, 9),  # autocast's
        HostEvent("aten::relu", 100, 120, 1, 4),
        HostEvent("aten::to", 130, 150, 1, 5),
        HostEvent("aten::copy_", 131, 149, 1, 6),
        HostEvent("aten::copy_", 150, 157, 1, 7),
        HostEvent("aten::empty", 160, 163, 1, 8),
    )
    profile = summarize_operators(host, 1)
    found = {kind: round(seconds * 1e9) for kind, seconds in profile.class_seconds.items()}
    assert found == {"plain_product": 80, "elementwise": 20, "cast": 40, "copy": 7, "other": 3}
    assert profile.device_type == "cpu"
    assert profile.idle_seconds is None
    assert (profile.seconds, profile.busy_seconds) == (pytest.approx(163e-9), pytest.approx(150e-9))


@pytest.mark.parametrize(
    ("dtypes", "kind"),
    [(("c10::BFloat16", "float"), "cast"), (("float", "c10::Half"), "cast"), (("float", "float"), "copy")],
)
def test_a_conversion_is_a_cast_if_it_changes_the_type_to_or_from_16_bits(dtypes: tuple[str, ...], kind: str) -> None:
    host = (
        HostEvent("aten::to", 0, 100, 1, 1, dtypes=("float", "Scalar")),
        HostEvent("aten::_to_copy", 10, 90, 1, 2, dtypes=("float", "Scalar")),
        HostEvent("aten::copy_", 20, 80, 1, 3, dtypes=(*dtypes, "Scalar")),
        HostEvent("aten::to", 100, 110, 1, 4, dtypes=("float", "Scalar")),  # to the type that it has
    )
    found = {name: round(each * 1e9) for name, each in summarize_operators(host, 1).class_seconds.items()}
    assert found == {"cast": 100, "copy": 10} if kind == "cast" else {"copy": 110}


def test_what_a_closure_computes_is_not_the_optimizer_s() -> None:
    host = (
        HostEvent("Optimizer.step#Adam.step", 0, 200, 1, 1),
        HostEvent(UPDATE_RANGE, 1, 190, 1, 2),
        HostEvent(CLOSURE_RANGE, 10, 100, 1, 3),
        HostEvent("aten::addmm", 20, 90, 1, 4),
        HostEvent("aten::add_", 110, 130, 1, 5),
    )
    found = {name: round(each * 1e9) for name, each in summarize_operators(host, 1).class_seconds.items()}
    assert (found["plain_product"], found["optimizer"]) == (70, 31)


@pytest.mark.slow
def test_a_million_kernels_take_seconds_not_minutes() -> None:
    names = [GEMM, NORM, ADD]
    events = [DeviceEvent(names[i % 3], 10 * i, 10 * i + 7, 4) for i in range(1_000_000)]
    started = time.process_time()
    profile = summarize_kernels(HOST, events, 1, classify_kernel)
    times = measure_idle(events, 1)
    assert time.process_time() - started < 30
    assert sum(profile.class_seconds.values()) == pytest.approx(7e-3)
    assert times["idle_seconds"] == pytest.approx(3e-3, rel=1e-3)


REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
BACKWARD = "autograd::engine::evaluate_function: AddmmBackward0"


def passes(*names: str) -> list[HostEvent]:
    """Return events of the host, one after another; a forward operator has a sequence number."""
    fields = {"aten::linear": {"sequence": 1}, "nccl:all_reduce": {"shapes": ((1000,),), "dtypes": ("float",)}}
    return [HostEvent(name, 10 * n, 10 * n + 5, 1, **fields.get(name, {})) for n, name in enumerate(names)]


ONE_PASS = ("aten::linear", BACKWARD, "nccl:all_reduce", BACKWARD, "nccl:all_reduce")
NO_SYNC = ("aten::linear", BACKWARD)
STEPPED = ("Optimizer.step#SGD.step",)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (ONE_PASS + STEPPED, 1),
        (ONE_PASS * 4 + STEPPED, 4),
        (NO_SYNC * 3 + ONE_PASS + STEPPED, 1),
        ((ONE_PASS + STEPPED) * 2, 1),  # two models, each with an optimizer
        (("aten::linear", "nccl:all_reduce", *ONE_PASS, *STEPPED), 1),  # batch norm's in forward
        (NO_SYNC + STEPPED, 0),
    ],
)
def test_backward_passes_after_which_gradients_are_reduced(names: tuple[str, ...], found: int) -> None:
    communication = summarize_communication(passes(*names), 1, [DeviceEvent(REDUCE, 0, 1)], 1, classify_kernel)
    assert communication is not None
    assert communication.reduced_passes == found
    assert communication.late_share == bool(found)


def test_gradients_that_hooks_reduce_are_not_late() -> None:
    pass_ = passes("aten::linear", BACKWARD)
    hooked = HostEvent("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 20, 50, 1)
    events = [*pass_, hooked, HostEvent("nccl:all_reduce", 30, 35, 1, shapes=((3000,),), dtypes=("float",))]
    events.append(HostEvent("nccl:all_reduce", 60, 65, 1, shapes=((1000,),), dtypes=("float",)))
    found = summarize_communication(events, 1, [DeviceEvent(REDUCE, 0, 1)], 1, classify_kernel)
    assert found is not None
    assert (found.reduced_passes, found.late_share) == (1, 0.25)


def test_communication_is_exposed_while_nothing_else_runs() -> None:
    device = [DeviceEvent(GEMM, 0, 100), DeviceEvent(REDUCE, 50, 150), DeviceEvent(REDUCE, 160, 200)]
    found = summarize_communication(passes(*ONE_PASS, *ONE_PASS), 2, device, 1, classify_kernel)
    assert found is not None
    assert found.seconds == pytest.approx(140e-9)
    assert found.exposed_seconds == pytest.approx(90e-9)
    (reduced,) = found.collectives
    assert (reduced.kind, reduced.format, reduced.launches, reduced.num_bytes) == ("all-reduce", "fp32", 2, 8000)
    assert reduced.largest_bytes <= reduced.num_bytes == 2 * reduced.largest_bytes
    own = found.rank_steps[0]
    assert own.compute_seconds == pytest.approx(100e-9)
    assert (own.exposed_seconds, own.idle_seconds) == pytest.approx((90e-9, 10e-9))
    assert summarize_communication([], 1, [DeviceEvent(GEMM, 0, 100)], 1, classify_kernel) is None


def test_looking_for_unused_parameters_is_work_of_the_host_while_no_kernel_runs() -> None:
    host = [HostEvent("aten::mm", 0, 10, 1, id=1), HostEvent(UNUSED_RANGE, 10, 90, 1)]
    profile = summarize_kernels(host, [DeviceEvent(GEMM, 5, 50, 1)], 1, classify_kernel)
    assert profile.host_seconds == {FINDING_UNUSED: pytest.approx(40e-9)}


def test_the_first_step_of_several_waits_for_ranks_to_begin() -> None:
    device = [DeviceEvent(REDUCE, 0, 900), *(DeviceEvent(REDUCE, 1000 * n, 1000 * n + 100) for n in (1, 2))]
    found = summarize_communication([], 3, device, 3, classify_kernel)
    assert found is not None
    assert (found.seconds, found.exposed_seconds) == (pytest.approx(100e-9), pytest.approx(100e-9))
    assert found.collectives[0].launches == 1


def test_kernels_tell_collectives_that_no_operator_launched() -> None:
    names = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "ncclDevKernel_AllGather_RING_LL(x)", REDUCE
    device = [DeviceEvent(name, 0, 1) for name in names]
    found = summarize_communication([], 1, device, 1, classify_kernel)
    assert found is not None
    assert {(each.kind, each.format) for each in found.collectives} == {
        ("reduce-scatter", "bf16"),
        ("all-gather", ""),
        ("all-reduce", "fp32"),
    }
