"""The batch norm kernels beside torch's, in Triton's interpreter, and models whose norms are told what follows them."""

import copy
import os
import subprocess
import sys
import textwrap
from types import ModuleType

import pytest
import torch
from fake_engine import fake_spec
from torch import Tensor, nn

from castwise.errors import UsageError
from castwise.measure.techniques import batch_norm
from castwise.measure.techniques.batch_norm import KernelBatchNorm, RunningStatistics, use_batch_norm_kernel
from castwise.measure.workloads import build_task
from castwise.technique_rules import why_unsupported
from castwise.workloads import find_workload

# Triton decides at import whether it interprets: a process of its own. The expected values are float64's.
BESIDE_TORCH = """
    import torch
    from torch.nn import functional as F
    from castwise.measure.techniques import batch_norm_kernels as kernels

    torch.manual_seed(0)
    innermost = torch.channels_last
    near = lambda found, wanted: (found.double() - wanted).abs().max() < 1e-4 * wanted.abs().max()
    for shape in ((2, 5, 8, 8), (4, 64, 9, 7), (2, 70, 3, 3), (8, 16, 64, 64), (1, 300, 2, 3)):
        for activation, compute in enumerate((lambda value: value, F.relu, F.silu)):
            for adds in (False, True):
                if adds and activation == 2:
                    continue
                channels, count = shape[1], shape[0] * shape[2] * shape[3]
                images = (3 * torch.randn(shape) + 50).contiguous(memory_format=innermost)
                residual = torch.randn(shape).contiguous(memory_format=innermost) if adds else None
                weight, bias = torch.randn(2, channels)
                gradients = torch.randn(shape).contiguous(memory_format=innermost)
                leaves = [each.double().requires_grad_() for each in (images, weight, bias)]
                addend = None if residual is None else residual.double().requires_grad_()
                running = torch.zeros(2, channels).double()
                value = F.batch_norm(leaves[0], *running, *leaves[1:], True, 1.0, 1e-5)
                expected = compute(value if addend is None else value + addend)
                expected.backward(gradients.double())
                same = lambda kernel: kernel
                out, mean, variance, inverse = kernels.launch_norm(
                    same, images, residual, weight, bias, 1e-5, activation
                )
                found = (shape, activation, adds)
                assert near(out, expected), found
                assert near(mean, running[0]) and near(variance, running[1]), found
                kept = None if residual is None else (out if activation else gradients)
                own, before, by_weight, by_bias = kernels.launch_norm_backward(
                    same, gradients, images, kept, weight, bias, mean, inverse, activation
                )
                for each, leaf in zip((own, by_weight, by_bias), leaves):
                    assert near(each, leaf.grad), found
                if adds and activation:
                    assert near(before, addend.grad), found
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


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Let torch compute what the kernels would, and note what was asked: whether something is added, what activates."""
    asked: list[tuple[bool, int]] = []

    def compute(
        images: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, epsilon: float, activation: int
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        asked.append((residual is not None, activation))
        variance, mean = torch.var_mean(images, (0, 2, 3))
        value = nn.functional.batch_norm(images, None, None, weight, bias, True, 0.0, epsilon)
        value = value if residual is None else value + residual
        return batch_norm._COMPUTED[activation](value), mean.detach(), variance.detach(), None

    kernels = ModuleType("kernels")
    kernels.batch_norm = compute  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "castwise.measure.techniques.batch_norm_kernels", kernels)
    monkeypatch.setattr(batch_norm, "_is_for_kernels", lambda images, residual: True)
    return asked


def alike(one: nn.Module, other: nn.Module) -> None:
    for (name, ours), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5), name


def test_norms_are_told_what_follows_them_and_compute_the_same(told: list[tuple[bool, int]]) -> None:
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
    assert told[:5] == [(False, 1), (True, 1), (True, 0), (False, 2), (False, 0)]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)
    alike(model, plain)
    assert int(model.norms[0].num_batches_tracked) == 2  # type: ignore[union-attr, arg-type]
    told.clear()
    assert torch.equal(model.eval()(images), copy.deepcopy(model)(images))
    assert not told, "validation is the model's own forward"


def test_what_moves_and_changes_dtype_stays_one_model(told: list[tuple[bool, int]]) -> None:
    model = Block()
    use_batch_norm_kernel(model)
    model.double()
    assert model(torch.randn(2, 4, 3, 3).double()).dtype == torch.float64
    assert told
    assert model.norms[1].running_mean.dtype == torch.float64  # type: ignore[union-attr]
    assert model.norms[1].running_mean.abs().sum() > 0  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(("name", "count"), [("resnet18", 20), ("efficientnet_b0", 49)])
def test_a_workload_s_norms_are_all_told(name: str, count: int, told: list[tuple[bool, int]]) -> None:
    task = build_task(find_workload(name))
    use_batch_norm_kernel(task.model)
    (batch,) = task.make_batches(1, 2, torch.device("cpu"), torch.Generator())
    task.compute_loss(task.model.train(), batch).backward()
    assert len(told) == count
    assert (True, batch_norm.RELU) in told or (False, batch_norm.SILU) in told


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
