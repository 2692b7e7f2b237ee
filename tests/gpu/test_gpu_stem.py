"""Kernels of pooling and batch norm, and first convolutions, compared with torch's own operations."""

import pytest
import torch
from loops import losses_of, spec_of
from real_gpu import on_gpus
from torch import nn

from castwise.registry.technique_fit import why_unsupported
from castwise.registry.techniques import join
from castwise.trial.kernels.batch_norm.module import KernelBatchNorm
from castwise.trial.kernels.batch_norm.types import RELU, Epilogue, Prologue
from castwise.trial.kernels.max_pool.module import KernelMaxPool

pytestmark = on_gpus()

DEVICE = "cuda:0"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("side", "padding"), [(112, 1), (147, 0), (56, 0), (31, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_pooling_kernels_compute_what_torch_s_do(
    dtype: torch.dtype, side: int, padding: int, compiled: bool
) -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 64, side, side, device=DEVICE, dtype=dtype).relu()
    images = images.contiguous(memory_format=torch.channels_last).requires_grad_()
    expected = nn.functional.max_pool2d(images, 3, 2, padding)
    gradients = torch.randn_like(expected)
    expected.backward(gradients)
    wanted, images.grad = images.grad, None
    assert wanted is not None
    pool = KernelMaxPool(3, 2, padding)
    found = (torch.compile(pool) if compiled else pool)(images)
    assert torch.equal(found, expected)
    found.backward(gradients)
    assert images.grad is not None
    assert torch.allclose(images.grad.float(), wanted.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("before", "adds", "activation"),
    [
        ("", False, 0),
        ("", False, 2),
        ("", False, 3),
        ("", True, 0),
        ("", True, 1),
        ("add", False, 1),
        ("drop", False, 1),
    ],
)
@pytest.mark.parametrize(("channels", "side"), [(64, 56), (2048, 7), (24, 31), (160, 32), (5, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_batch_norm_kernels_compute_what_torch_s_do(  # noqa: PLR0917
    dtype: torch.dtype, channels: int, side: int, before: str, adds: bool, activation: int, compiled: bool
) -> None:
    if before == "drop" and channels % 8:
        pytest.skip("is left to torch")
    torch.manual_seed(0)
    shape, layout = (8, channels, side, side), torch.channels_last
    images, addend, residual, gradients, second, skip = (
        torch.randn(shape, device=DEVICE).to(dtype).contiguous(memory_format=layout) for _ in range(6)
    )
    norm = KernelBatchNorm(channels, device=DEVICE)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.uniform_(-1, 1)
    shift = torch.randn(channels, device=DEVICE, requires_grad=True)
    seed = torch.randint(2**62, (1,), device=DEVICE)
    carrier = torch.zeros((), device=DEVICE, dtype=dtype).expand(shape).detach().requires_grad_()
    for each in (images, addend):
        each.requires_grad_()
    apply = torch.compile(norm) if compiled else norm
    first = (
        shift,
        0.3 * (before == "drop"),
        seed if before == "drop" else None,
        1,
        addend if before == "add" else None,
    )
    then = (residual if adds else None, carrier if adds else None, activation, True)
    found = apply(images, first, then)
    leaves = [
        each.detach().double().requires_grad_() for each in (images, shift, addend, residual, norm.weight, norm.bias)
    ]
    total = leaves[0] + leaves[1][:, None, None] + (before == "add") * leaves[2]
    if before == "drop":
        total = total * (found.total != 0) * (65536 / (65536 - round(0.3 * 65536)))
    value = nn.functional.batch_norm(total, None, None, leaves[4], leaves[5], True, 0.0, norm.eps)
    functional = nn.functional
    activations = (lambda value: value, functional.relu, functional.silu, functional.hardswish)
    expected = activations[activation](value + adds * leaves[3])
    expected.backward(gradients.double() + second.double(), retain_graph=True)
    if before:
        total.backward(skip.double())
    assert found.carrier is not None
    torch.autograd.backward(
        [found.out, found.carrier, *([found.total] if before else [])],
        [gradients, second, *([skip] if before else [])],
    )
    bound = 8 * torch.finfo(dtype).eps
    assert ((found.out.double() - expected).abs().max() / expected.abs().max()) < bound
    digits = 1e-4 if dtype == torch.float32 or not before else 1e-2
    assert torch.allclose(found.mean.double(), total.mean((0, 2, 3)), atol=digits)
    assert torch.allclose(found.variance.double(), total.var((0, 2, 3)), rtol=digits)
    assert residual.grad is None
    assert shift.grad is not None
    assert (shift.grad - leaves[1].grad).abs().max() < bound * leaves[0].grad.abs().sum((0, 2, 3)).max()
    wanted = {0: images.grad, 4: norm.weight.grad, 5: norm.bias.grad}
    wanted |= ({2: addend.grad} if before == "add" else {}) | ({3: carrier.grad} if adds else {})
    for place, grad in wanted.items():
        assert grad is not None
        theirs = leaves[place].grad
        assert theirs is not None
        # A pixel whose value rounds to the other side of the activation's kink has another gradient.
        apart = (grad.double() - theirs).abs() / theirs.abs().max()
        assert apart.mean() < bound
        assert (apart < 4 * bound).double().mean() > 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_no_number_stays_none(dtype: torch.dtype) -> None:
    """An overflow is known by it."""
    torch.manual_seed(0)
    images, residual, gradients = (
        torch.randn(8, 64, 7, 7, device=DEVICE).to(dtype).contiguous(memory_format=torch.channels_last)
        for _ in range(3)
    )
    images[3, 5, 2, 2], residual[2, 7, 1, 1] = torch.inf, torch.nan
    norm = KernelBatchNorm(64, device=DEVICE)
    leaves = [each.clone().requires_grad_() for each in (images, residual, images, residual)]
    found = norm(leaves[0], tuple(Prologue()), tuple(Epilogue(leaves[1], activation=RELU))).out
    expected = (nn.functional.batch_norm(leaves[2], None, None, norm.weight, norm.bias, True) + leaves[3]).relu()
    assert expected.isnan().sum() == 8 * 49 + 1
    assert torch.equal(found.isnan(), expected.isnan())
    found.backward(gradients)
    expected.backward(gradients)
    for ours, theirs in zip(leaves[:2], leaves[2:], strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad.isnan(), theirs.grad.isnan())


def test_float64_is_torch_s_to_normalise() -> None:
    images = torch.randn(8, 64, 7, 7, device=DEVICE, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    norm = KernelBatchNorm(64, device=DEVICE, dtype=torch.float64)
    found = norm(images, tuple(Prologue()), tuple(Epilogue(activation=RELU)))
    assert found.mean is None
    assert torch.equal(found.out, nn.functional.batch_norm(images, None, None, norm.weight, norm.bias, True).relu())


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master"])
@pytest.mark.parametrize(
    "techniques",
    [
        ("channels-last", "space-to-depth"),
        ("channels-last", "max-pool-kernel"),
        ("channels-last", "batch-norm-kernel"),
        ("channels-last", "batch-norm-kernel", "compile"),
        ("channels-last", "compiled-update", "batch-norm-kernel", "compile", "cuda-graph"),
        ("channels-last", "compiled-update", "space-to-depth", "max-pool-kernel", "compile", "cuda-graph"),
    ],
    ids=join,
)
def test_the_losses_are_the_plain_loop_s(precision: str, techniques: tuple[str, ...]) -> None:
    """The first ones, before batch norm and Adam have amplified another order's rounding."""
    spec = spec_of("resnet18", precision, *techniques, device=DEVICE)
    assert why_unsupported(spec) is None
    found, expected = losses_of(spec, 4), losses_of(spec_of("resnet18", precision, device=DEVICE), 4)
    bound = 2.5e-4 if precision == "fp32" else 2.0**-6  # as in test_gpu_techniques.py
    assert ((found - expected) / expected).abs().max() < bound
