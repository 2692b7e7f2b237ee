"""What the precisions do to real kernels: rounding, batch norm's dtypes, skipped steps, and a setup's memory."""

import math
import time
from collections.abc import Callable

import pytest
import torch
from real_gpu import measured, on_gpus, skip_unsupported
from small_step import (
    CPU,
    MOMENTUM_SGD,
    compute_dtype,
    make_batch,
    make_net,
    make_step,
    make_task,
    stepped_tensors,
)
from torch import Tensor, nn

from castwise.apply.precision import numeric_state, read_fp32_precision
from castwise.registry.precisions import NARROW_PRECISIONS, PRECISIONS, Precision, find_precision
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.trial.steady_run import SteadyRun

pytestmark = on_gpus()

CUDA = torch.device("cuda:0")
# Rounding to TF32's 10 bits of mantissa costs about 2e-4 of a product, float32's own about 1e-7.
IEEE_BOUND = 5e-6
TF32_BOUND = 2e-3
# How many roundings' worth of error a gradient of the small network may have, in its own norm.
ROUNDINGS = 8

every_row = pytest.mark.parametrize("row", PRECISIONS, ids=lambda row: row.name)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def matmul() -> tuple[nn.Module, Tensor]:
    return nn.Linear(512, 512, bias=False), draw(512, 512)


def convolution() -> tuple[nn.Module, Tensor]:
    return nn.Conv2d(64, 64, 3, bias=False), draw(8, 64, 16, 16)


def lstm() -> tuple[nn.Module, Tensor]:
    return nn.LSTM(256, 256), draw(8, 32, 256)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double().cpu() - expected).norm() / expected.norm())


def errors_of(make: Callable[[], tuple[nn.Module, Tensor]]) -> list[float]:
    """Return the errors, against float64 on the CPU, of a layer's output and of its gradients on the GPU."""
    torch.manual_seed(0)
    layer, x = make()
    results = []
    for device, dtype in ((CPU, torch.float64), (CUDA, torch.float32)):
        layer.to(device, dtype)
        layer.zero_grad()
        inputs = x.to(device, dtype).detach().requires_grad_()
        output = layer(inputs)
        output = output[0] if isinstance(output, tuple) else output
        output.backward(draw(1, *output.shape)[0].to(device, dtype))
        gradients = [inputs.grad, *(weight.grad for weight in layer.parameters())]
        # Copies: `layer.to` moves the weights' gradients along.
        results.append([output.detach(), *(gradient.clone() for gradient in gradients if gradient is not None)])
    return [relative_error(got, expected) for expected, got in zip(*results, strict=True)]


@pytest.mark.parametrize("make", [matmul, convolution, lstm], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["fp32", "tf32"])
def test_float32_products_are_rounded_as_the_row_says(name: str, make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    row = find_precision(name)
    skip_unsupported(row)
    with numeric_state(row):
        errors = errors_of(make)
    if name == "fp32":
        assert max(errors) < IEEE_BOUND
    else:
        # The output alone: TF32 is permitted, and for a convolution's gradients cuDNN may choose other algorithms.
        assert errors[0] > 10 * IEEE_BOUND
        assert max(errors) < TF32_BOUND


def test_numeric_state_holds_after_torch_s_default_and_after_the_other() -> None:
    """Torch starts with TF32 in convolutions; what ran before must not show."""
    skip_unsupported(find_precision("tf32"))
    before = read_fp32_precision()
    for name in ("tf32", "fp32", "tf32", "fp32"):
        with numeric_state(find_precision(name)):
            errors = errors_of(convolution)
        assert (max(errors) < IEEE_BOUND) == (name == "fp32")
    assert read_fp32_precision() == before


@every_row
def test_gradients_equal_float64_s_within_the_format_s_rounding(row: Precision) -> None:
    skip_unsupported(row)
    net, twin = make_net(), make_net()
    for weight in twin.parameters():
        weight.data = weight.data.to(getattr(torch, row.param_dtype))
    images, labels = make_batch()
    loss = nn.functional.cross_entropy(twin.double()(images.double()), labels)
    torch.autograd.backward(loss)
    with numeric_state(row):
        step = make_step(row, make_task(net), device=CUDA)
        step(make_batch(CUDA))
    eps = 2.0**-10 if row.float32_matmul != "ieee" else torch.finfo(compute_dtype(row)).eps
    for tensor, weight in zip(stepped_tensors(step), twin.parameters(), strict=True):
        assert tensor.grad is not None
        assert weight.grad is not None
        assert relative_error(tensor.grad, weight.grad) < ROUNDINGS * eps


@every_row
def test_weights_batch_norm_and_optimizer_state_have_the_row_s_dtypes(row: Precision) -> None:
    skip_unsupported(row)
    net = make_net()
    seen: dict[str, torch.dtype] = {}
    for name in ("conv", "norm", "linear"):
        net.get_submodule(name).register_forward_hook(
            lambda _, __, output, name=name: seen.__setitem__(name, output.dtype)
        )
    step = make_step(row, make_task(net), MOMENTUM_SGD, device=CUDA)
    loss = step(make_batch(CUDA))
    assert loss.isfinite()
    assert seen["conv"] == seen["linear"] == compute_dtype(row)
    assert net.conv.weight.dtype == net.linear.weight.dtype == getattr(torch, row.param_dtype)
    assert net.norm.running_mean is not None
    assert net.norm.running_var is not None
    for tensor in (net.norm.weight, net.norm.bias, net.norm.running_mean, net.norm.running_var):
        assert tensor.dtype == getattr(torch, row.batch_norm_dtype)
        assert tensor.isfinite().all()
    for stepped, weight in zip(stepped_tensors(step), net.parameters(), strict=True):
        expected = torch.float32 if row.master_weights else weight.dtype
        assert stepped.dtype == step.optimizer.state[stepped]["momentum_buffer"].dtype == expected


@pytest.mark.parametrize("name", ["fp16-mixed", "fp16-master", "fp16-true"])
def test_a_dynamic_scale_skips_overflow_on_the_gpu(name: str) -> None:
    row = find_precision(name)
    net = make_net()
    step = make_step(row, make_task(net), MOMENTUM_SGD, loss_scale="dynamic", clip_grad_norm=1.0, device=CUDA)
    images, labels = make_batch(CUDA)
    step((images, labels))
    assert step.scaling.skipped_steps == 0
    before = [tensor.detach().clone() for tensor in stepped_tensors(step)]
    scale = step.scaling.read_scale()
    step((images * math.inf, labels))
    assert step.scaling.skipped_steps == 1
    assert scale is not None
    assert step.scaling.read_scale() == scale / 2
    for tensor, old in zip(stepped_tensors(step), before, strict=True):
        assert torch.equal(tensor, old)


def test_a_static_scale_gives_the_unscaled_update() -> None:
    row = find_precision("fp16-master")
    nets = make_net(), make_net()
    steps = [
        make_step(row, make_task(net), loss_scale=scale, device=CUDA)
        for net, scale in zip(nets, ("none", "128"), strict=True)
    ]
    for step in steps:
        step(make_batch(CUDA))
    for scaled, plain in zip(stepped_tensors(steps[1]), stepped_tensors(steps[0]), strict=True):
        assert relative_error(scaled.detach(), plain.detach().double().cpu()) < 2.0**-10


@every_row
def test_a_cell_on_the_gpu(row: Precision) -> None:
    skip_unsupported(row)
    before = read_fp32_precision()
    spec = TrialSpec(
        workload="mnist-cnn",
        precision=row.name,
        loss_scale=row.loss_scale,
        batch_size=64,
        device="cuda:0",
        protocol=MeasurementProtocol(warm_up_steps=2, warm_up_seconds=0.5, block_seconds=0.01),
    )
    setup = SteadyRun(spec, None)
    facts = setup.warm_up()
    blocks = [setup.run_block() for _ in range(3)]
    samples = setup.finish()
    assert facts.param_dtypes == {row.param_dtype: 1_199_882}
    assert facts.fp32_precision["cudnn.rnn"] == (row.float32_matmul or before["cudnn.rnn"])
    assert all(block.seconds > 0 and math.isfinite(block.loss) for block in blocks)
    assert samples.peak_allocated_bytes is not None
    assert samples.peak_reserved_bytes is not None
    assert samples.warm_up_peak_allocated_bytes is not None
    # Weights, gradients and Adadelta's two averages at the least.
    weight_bytes = 1_199_882 * torch.finfo(getattr(torch, row.param_dtype)).bits // 8
    assert 4 * weight_bytes < samples.peak_allocated_bytes <= samples.peak_reserved_bytes
    assert read_fp32_precision() == before


def test_blocks_of_a_stretch_follow_each_other() -> None:
    spec = TrialSpec(workload="mlp-4096", precision="tf32", loss_scale="none", batch_size=512, device="cuda:0")
    run = SteadyRun(spec, None)
    run.warm_up()
    started = time.perf_counter()
    blocks = run.run_stretch(0.2, 4, 0.1)
    wall = time.perf_counter() - started
    run.finish()
    assert [block.lead_in_steps > 0 for block in blocks] == [True, False, False, False]
    timed, steps = sum(block.seconds for block in blocks), sum(block.num_steps for block in blocks)
    lead_in = blocks[0].lead_in_steps * timed / steps
    assert wall == pytest.approx(timed + lead_in, rel=0.2), "no pause between blocks"
    assert all(math.isfinite(block.loss) for block in blocks)


@pytest.mark.parametrize("row", [row for row in NARROW_PRECISIONS if row.float8_recipe], ids=lambda row: row.name)
def test_fp8_runs_in_fp8_and_its_products_are_near_bfloat16(row: Precision) -> None:
    skip_unsupported(row)
    pytest.importorskip("torchao", reason="pip install 'castwise[fp8]'")
    protocol = MeasurementProtocol(num_blocks=3, block_seconds=0.05, warm_up_seconds=1.0)
    spec = TrialSpec(
        workload="gpt-d4096",
        precision=row.name,
        loss_scale="none",
        batch_size=2,
        device="cuda:0",
        techniques=("compile",),
        protocol=protocol,
    )
    trial = measured(spec)
    assert trial.status == "ok", trial.message
    assert trial.facts is not None
    assert trial.facts.float8 is not None
    assert trial.facts.float8.missing == ""
    assert trial.facts.float8.num_converted == 16
    assert trial.facts.float8.min_sqnr_db is not None
    assert trial.facts.float8.min_sqnr_db > 20
    flops = trial.ranks[0].flops
    assert flops is not None
    assert 0.4 < flops.share_of("fp8") < 1
