"""The batch norm kernels beside torch's, in Triton's interpreter, and models whose norms are told what follows them."""

import copy
import os
import subprocess
import sys
import textwrap
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_engine import fake_spec
from torch import Tensor, nn

from castwise.errors import UsageError
from castwise.measure.techniques import batch_norm
from castwise.measure.techniques.batch_norm import KernelBatchNorm, RunningStatistics
from castwise.measure.techniques.batch_norm_fusion import use_batch_norm_kernel
from castwise.measure.workloads import build_task
from castwise.technique_rules import why_unsupported
from castwise.workloads import find_workload

# Triton decides at import whether it interprets: a process of its own. The expected values are float64's.
BESIDE_TORCH = """
    import itertools
    import torch
    from torch.nn import functional as F
    from castwise.measure.techniques import batch_norm_ops as ops

    torch.manual_seed(0)
    same = lambda kernel: kernel
    ops._SUMMED, ops._PROGRAMS = 512, 6  # so that a program sums several blocks
    # A number whose value rounds to the other side of the activation's kink has another gradient.
    near = lambda found, wanted: ((found.double() - wanted).abs() < 1e-4 * wanted.abs().max()).double().mean() > 0.999
    for shape in ((2, 5, 8, 8), (4, 64, 9, 7), (2, 72, 3, 3), (1, 300, 2, 3)):
        for case in itertools.product(range(3), *[(False, True)] * 4):
            activation, adds_before, adds, has_second, skips = case
            if (adds and activation == 2) or (skips and not adds_before):
                continue
            channels = shape[1]
            make = lambda: torch.randn(shape).contiguous(memory_format=torch.channels_last)
            images = 3 * make() + 50
            addend, residual = make() if adds_before else None, make() if adds else None
            weight, bias = torch.randn(2, channels)
            gradients, second, skip = make(), make() if has_second else None, make() if skips else None
            leaf = lambda each: None if each is None else each.double().requires_grad_()
            leaves = [leaf(each) for each in (images, addend, residual, weight, bias)]
            running = torch.zeros(2, channels).double()
            total = leaves[0] if addend is None else leaves[0] + leaves[1]
            value = F.batch_norm(total, *running, *leaves[3:], True, 1.0, 1e-5)
            value = value if residual is None else value + leaves[2]
            expected = (lambda value: value, F.relu, F.silu)[activation](value)
            of_out = gradients.double() if second is None else gradients.double() + second.double()
            loss = (expected * of_out).sum()
            (loss if skip is None else loss + (total * skip.double()).sum()).backward()
            out, summed, mean, variance, inverse = ops.launch_norm(
                same, images, addend, residual, weight, bias, 1e-5, activation
            )
            found = (shape, case)
            assert near(out, expected), found
            assert near(mean, running[0]) and near(variance, running[1]), found
            assert addend is None or near(summed, total), found
            normalised = images if addend is None else summed
            kept = out if adds else None
            own, before, by_weight, by_bias = ops.launch_norm_backward(
                same, gradients, second, skip, normalised, kept, weight, bias, mean, inverse, activation
            )
            for each, wanted in zip((own, by_weight, by_bias), (leaves[0], *leaves[3:])):
                assert near(each, wanted.grad), found
            if adds:
                assert near(before if before.numel() else gradients, leaves[2].grad), found
            assert before.numel() or not (has_second or (adds and activation)), found
    print("same")
"""


def test_the_kernels_compute_what_torch_s_do() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", textwrap.dedent(BESIDE_TORCH)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.stdout == "same\n", done.stderr


class Block(nn.Module):
    """A norm of each kind: before an activation, before an addition and an activation, before an addition, alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(4, momentum=0.1 if index else 0.9) for index in range(5))
        self.relu = nn.ReLU(inplace=True)
        self.convolution = nn.Conv2d(4, 4, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.relu(self.norms[0](images))
        second = self.norms[1](self.convolution(first))
        second += first
        second = torch.relu(second)
        third = self.norms[2](self.convolution(second)) + second
        fourth = nn.functional.silu(self.norms[3](third))
        fifth = self.norms[4](fourth)
        return fifth * fourth + fifth


class Fork(torch.autograd.Function):
    """A result, and a carrier of its gradient from where it is a residual."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return value.clone(), torch.zeros(()).expand(value.shape).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # type: ignore[override]
        return sum(gradients)  # type: ignore[return-value]


class Carried(torch.autograd.Function):
    """A residual whose gradient goes to its carrier."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, carrier: Tensor) -> Tensor:  # type: ignore[override]
        return residual.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, gradient


Asked = tuple[bool, bool, bool, int, bool]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """Let torch compute what the kernels would, and note what was asked.

    Whether something is added before and after, and to a carrier, what activates, and whether a carrier is wanted.
    """
    asked: list[Asked] = []

    def compute(
        images: Tensor, addend: Tensor | None, residual: Tensor | None, carrier: Tensor | None, weight: Tensor,
        bias: Tensor, epsilon: float, activation: int, is_forked: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, None]:  # fmt: skip
        asked.append((addend is not None, residual is not None, carrier is not None, activation, is_forked))
        if residual is not None and carrier is not None:
            assert not residual.requires_grad
            residual = Carried.apply(residual, carrier)
        total = images.clone() if addend is None else images + addend
        variance, mean = torch.var_mean(total, (0, 2, 3))
        value = nn.functional.batch_norm(total, None, None, weight, bias, True, 0.0, epsilon)
        value = batch_norm._COMPUTED[activation](value if residual is None else value + residual)
        out, own = Fork.apply(value) if is_forked else (value, value.new_empty(0))
        return out, own, total, mean.detach(), variance.detach(), None

    kernels = ModuleType("kernels")
    kernels.batch_norm = compute  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "castwise.measure.techniques.batch_norm_ops", kernels)
    monkeypatch.setattr(batch_norm, "_is_for_kernels", lambda *tensors: True)
    return asked


def alike(one: nn.Module, other: nn.Module) -> None:
    for (name, ours), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5), name


def test_norms_are_told_what_follows_them_and_compute_the_same(told: list[Asked]) -> None:
    torch.manual_seed(0)
    plain = Block()
    model = copy.deepcopy(plain)
    use_batch_norm_kernel(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    for _ in range(2):
        images = torch.randn(3, 4, 5, 5) + 2
        found, expected = model(images), plain(images)
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
        found.sum().backward()
        expected.sum().backward()
    assert told[:5] == [
        (False, False, False, 1, True),  # read by a convolution, and added behind the next norm
        (False, True, True, 1, True),
        (False, True, True, 0, False),
        (False, False, False, 2, False),  # multiplied by what is no norm's
        (False, False, False, 0, False),
    ]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)
    alike(model, plain)
    assert int(model.norms[0].num_batches_tracked) == 2  # type: ignore[union-attr, arg-type]
    told.clear()
    assert torch.equal(model.eval()(images), copy.deepcopy(model)(images))
    assert not told, "validation is the model's own forward"


def test_what_moves_and_changes_dtype_stays_one_model(told: list[Asked]) -> None:
    model = Block()
    use_batch_norm_kernel(model)
    model.double()
    assert model(torch.randn(2, 4, 3, 3).double()).dtype == torch.float64
    assert told
    assert model.norms[1].running_mean.dtype == torch.float64  # type: ignore[union-attr]
    assert model.norms[1].running_mean.abs().sum() > 0  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(
    ("name", "count", "wanted"),
    [
        ("resnet18", 20, {(False, True, False, 1, True), (False, True, True, 1, False)}),
        ("efficientnet_b0", 49, {(False, False, False, 2, False), (False, False, False, 0, False)}),
        ("wrn-28-10", 25, {(True, False, False, 1, False), (False, False, False, 1, False)}),
    ],
)
def test_a_workload_s_norms_are_all_told(name: str, count: int, wanted: set[Asked], told: list[Asked]) -> None:
    task = build_task(find_workload(name))
    use_batch_norm_kernel(task.model)
    (batch,) = task.make_batches(1, 2, torch.device("cpu"), torch.Generator())
    task.compute_loss(task.model.train(), batch).backward()
    assert len(told) == count
    assert wanted <= set(told)


def test_where_kernels_do_not_fit_torch_computes() -> None:
    plain = Block()
    model = copy.deepcopy(plain)
    use_batch_norm_kernel(model)
    images = torch.randn(2, 4, 3, 3)
    assert torch.equal(model(images), plain(images)), "a CPU's"
    alike(model, plain)
    model.norms[0].eval()
    plain.norms[0].eval()
    assert torch.equal(model(images), plain(images)), "one that is frozen"


def test_running_statistics_of_other_dtypes_are_moved_in_theirs() -> None:
    norm = nn.BatchNorm2d(2, momentum=0.5).half()
    RunningStatistics([norm])([torch.tensor([2.0, 4.0])], [torch.tensor([3.0, 5.0])])
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [1.0, 2.0]
    assert norm.running_var is not None
    assert norm.running_var.tolist() == [2.0, 3.0]


def test_models_without_what_it_needs_are_refused() -> None:
    class Choosing(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images if images.sum() > 0 else -images

    class Holding(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) * self.scale

    with pytest.raises(UsageError, match=r"torch\.fx can trace: symbolically traced variables"):
        use_batch_norm_kernel(Choosing())
    with pytest.raises(UsageError, match="weights are all its modules'"):
        use_batch_norm_kernel(Holding())
    with pytest.raises(UsageError, match="finds no batch norm"):
        use_batch_norm_kernel(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, affine=False)))


def test_a_norm_that_is_applied_twice_stays_torch_s() -> None:
    shared = nn.BatchNorm2d(3)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.BatchNorm2d(3))
    use_batch_norm_kernel(model)
    assert [type(module) is KernelBatchNorm for module in model] == [False, False, False, True]


@pytest.mark.parametrize(
    ("workload", "techniques", "device", "reason"),
    [
        ("resnet50", ("channels-last", "batch-norm-kernel"), "cuda:0", "None"),
        ("resnet50", ("batch-norm-kernel",), "cuda:0", "needs channels-last"),
        ("mnist-cnn", ("channels-last", "batch-norm-kernel"), "cuda:0", "mnist-cnn has no batch norm"),
        ("lstm-lm", ("batch-norm-kernel",), "cuda:0", "is for images"),
        ("resnet50", ("channels-last", "batch-norm-kernel"), "cpu", "needs a CUDA device"),
    ],
)
def test_it_is_for_images_with_channels_innermost_on_a_gpu(
    workload: str, techniques: tuple[str, ...], device: str, reason: str
) -> None:
    spec = fake_spec("fp32", workload=workload, techniques=techniques, device=device)
    assert reason in str(why_unsupported(spec))
