"""The batch norm kernels beside torch's, in Triton's interpreter, and models whose norms are told what follows them."""

import copy

import pytest
import torch
from fake_engine import fake_spec
from fake_norm import Asked, let_torch_compute
from interpreted import run_interpreted
from torch import Tensor, nn

from castwise.errors import UsageError
from castwise.registry.technique_constraints import why_unsupported
from castwise.registry.workloads import find_workload
from castwise.worker.kernels.batch_norm.fusion import use_batch_norm_kernel
from castwise.worker.kernels.batch_norm.module import KernelBatchNorm, move_statistics
from castwise.worker.models import build_task

# The expected values are float64's.
BESIDE_TORCH = """
    import itertools
    import torch
    from torch.nn import functional as F
    from castwise.worker.kernels.batch_norm import ops

    torch.manual_seed(0)
    same = lambda kernel: kernel
    ops._SUMMED, ops._PROGRAMS = 512, 6  # so that a program sums several blocks
    # A number whose value rounds to the other side of the activation's kink has another gradient.
    near = lambda found, wanted: ((found.double() - wanted).abs() < 1e-4 * wanted.abs().max()).double().mean() > 0.999
    for index, shape in enumerate(((2, 5, 8, 8), (2, 64, 7, 5), (2, 72, 3, 3), (1, 304, 2, 3))):
        cases = itertools.product(range(4), ("", "add", "drop"), *[(False, True)] * 4)
        for case in list(cases)[index :: 5 if index == 3 else 11]:  # each value beside each other one
            activation, before, adds, has_second, skips, shifts = case
            channels = shape[1]
            if (adds and activation > 1) or (skips and not before) or (before == "drop" and channels % 8):
                continue
            make = lambda: torch.randn(shape).contiguous(memory_format=torch.channels_last)
            images = 3 * make() + 50
            addend, residual = make() if before == "add" else None, make() if adds else None
            shift = torch.randn(channels) if shifts else None
            draws = ops.Draws(torch.tensor([1234567890123]) if before == "drop" else None, 3, 19661)
            weight, bias = torch.randn(2, channels)
            gradients, second, skip = make(), make() if has_second else None, make() if skips else None
            out, summed, mean, variance, inverse = ops.launch_norm(
                same, images, shift, draws, addend, residual, weight, bias, 1e-5, activation
            )
            leaf = lambda each: None if each is None else each.double().requires_grad_()
            leaves = [leaf(each) for each in (images, shift, addend, residual, weight, bias)]
            total = leaves[0] if shift is None else leaves[0] + leaves[1][:, None, None]
            if draws.seed is not None:
                kept = summed != 0
                assert abs(kept.double().mean() - 0.7) < 4 * (0.21 / kept.numel()) ** 0.5, case
                total = total * kept * (65536 / (65536 - 19661))
            total = total if addend is None else total + leaves[2]
            running = torch.zeros(2, channels).double()
            value = F.batch_norm(total, *running, *leaves[4:], True, 1.0, 1e-5)
            value = value if residual is None else value + leaves[3]
            expected = (lambda value: value, F.relu, F.silu, F.hardswish)[activation](value)
            of_out = gradients.double() if second is None else gradients.double() + second.double()
            loss = (expected * of_out).sum()
            (loss if skip is None else loss + (total * skip.double()).sum()).backward()
            found = (shape, case)
            assert near(out, expected), found
            mean = mean if before or shift is None else mean + shift
            assert near(mean, running[0]) and near(variance, running[1]), found
            assert not before or near(summed, total), found
            mean = mean if before or shift is None else mean - shift
            own, masked, by_weight, by_bias, by_shift = ops.launch_norm_backward(
                same, gradients, second, skip, summed if before else images, out if adds else None, draws, weight, bias,
                mean, inverse, activation, shifts
            )
            for each, wanted in zip((own, by_weight, by_bias), (leaves[0], *leaves[4:])):
                assert near(each, wanted.grad), found
            if shifts:
                assert (by_shift - leaves[1].grad).abs().max() < 1e-3 * own.abs().sum((0, 2, 3)).max(), found
            if adds:
                assert near(masked if masked.numel() else gradients, leaves[3].grad), found
            assert masked.numel() or not (has_second or (adds and activation)), found

    # What is no number stays none: the loss has to tell of it.
    images, residual, gradients = (torch.randn(2, 8, 3, 3).contiguous(memory_format=torch.channels_last) for _ in "123")
    images[1, 0, 0, 0], residual[0, 1, 0, 0] = torch.inf, torch.nan
    weight, bias = torch.ones(8), torch.zeros(8)
    rest = (weight, bias, 1e-5, 1)
    draws = ops.Draws(None, 0, 0)
    out, _, mean, variance, inverse = ops.launch_norm(same, images, None, draws, None, residual, *rest)
    leaf = residual.clone().requires_grad_()
    expected = F.relu(F.batch_norm(images, None, None, weight, bias, True, 0.0, 1e-5) + leaf)
    expected.backward(gradients)
    assert expected.isnan().sum() == 2 * 9 + 1 and torch.equal(out.isnan(), expected.isnan()) and variance[0].isnan()
    _, masked, *_ = ops.launch_norm_backward(
        same, gradients, None, None, images, out, draws, weight, bias, mean, inverse, 1, False
    )
    assert torch.equal(masked, leaf.grad)

    # A gradient of a gradient is refused, not wrong.
    images = torch.randn(2, 8, 3, 3).contiguous(memory_format=torch.channels_last).requires_grad_()
    out = ops.batch_norm(images, None, None, 0, 0, None, None, None, *rest, False)[0]
    (gradient,) = torch.autograd.grad(out.square().sum(), images, create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        assert "no autograd formula" in str(error)
        print("same")
"""


def test_the_kernels_compute_what_torch_s_do() -> None:
    done = run_interpreted(BESIDE_TORCH)
    assert done.stdout == "same\n", done.stderr


class Block(nn.Module):
    """A norm of each kind: before an activation, an addition, both, none; behind a convolution, an addition of two."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(4, momentum=0.1 if index else 0.9) for index in range(6))
        self.relu = nn.ReLU(inplace=True)
        self.convolution = nn.Conv2d(4, 4, 1)
        self.others = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        first = self.relu(self.norms[0](images))
        second = self.norms[1](self.convolution(first))
        second += first
        second = torch.relu(second)
        third = self.norms[2](self.convolution(second)) + second
        fourth = nn.functional.silu(self.norms[3](third))
        fifth = self.norms[4](self.others[0](fourth))
        sum_before = self.others[1](fifth)
        sum_before += self.others[2](fourth)
        return self.norms[5](sum_before) * sum_before + fifth


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    return let_torch_compute(monkeypatch)


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
    assert told[:6] == [
        Asked(activation=1, is_forked=True),  # read by a convolution, and added behind the next norm
        Asked(adds=True, carries=True, activation=1, is_forked=True),
        Asked(adds=True, carries=True),
        Asked(activation=2),  # read by two convolutions
        Asked(shifts=True),
        Asked(shifts=True, adds_before=True),
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
        (
            "resnet18",
            20,
            {Asked(adds=True, activation=1, is_forked=True), Asked(adds=True, carries=True, activation=1)},
        ),
        ("efficientnet_b0", 49, {Asked(activation=2), Asked()}),
        (
            "wrn-28-10",
            25,
            {Asked(shifts=True, drops=True, activation=1), Asked(shifts=True, adds_before=True, activation=1)},
        ),
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
    assert torch.allclose(model(images), plain(images), atol=1e-5), "a CPU's"
    alike(model, plain)
    model.norms[0].eval()
    plain.norms[0].eval()
    assert torch.allclose(model(images), plain(images), atol=1e-5), "one that is frozen"


def test_running_statistics_of_other_dtypes_are_moved_in_theirs() -> None:
    norm = nn.BatchNorm2d(2, momentum=0.5).half()
    move_statistics([norm], [torch.tensor([2.0, 4.0])], [torch.tensor([3.0, 5.0])])
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
            self.scale = torch.ones(1)  # neither moves with the model nor is saved with it

        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) * self.scale

    with pytest.raises(UsageError, match=r"torch\.fx can trace: symbolically traced variables"):
        use_batch_norm_kernel(Choosing())
    with pytest.raises(UsageError, match="tensors are parameters or buffers"):
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


@pytest.mark.parametrize(("parallelism", "reason"), [("ddp", "None"), ("dp", "needs a process a GPU")])
def test_replicas_are_processes(parallelism: str, reason: str) -> None:
    names = ("channels-last", "batch-norm-kernel")
    spec = fake_spec("fp32", workload="resnet50", techniques=names, world_size=2, parallelism=parallelism)
    assert reason in str(why_unsupported(spec))
