"""Max pooling kernels compared with torch in Triton's interpreter, and models that use them."""

import pytest
import torch
from interpreted import interpreted, run_interpreted
from torch import nn

from castwise.errors import UsageError
from castwise.trial.kernels.max_pool import module as module_module
from castwise.trial.kernels.max_pool.module import KernelMaxPool, use_max_pool_kernel

COMPARED_WITH_TORCH = """
    import torch
    from castwise.trial.kernels.max_pool.triton_kernels import max_pool

    torch.manual_seed(0)
    for shape in ((2, 5, 8, 8), (1, 3, 9, 7), (2, 4, 7, 10), (1, 2, 3, 4), (1, 70, 7, 32)):  # longer than a block
        for padding in (0, 1):
            images = torch.randn(shape).relu().contiguous(memory_format=torch.channels_last).requires_grad_()
            expected = torch.nn.functional.max_pool2d(images, 3, 2, padding)
            gradients = torch.randn(expected.shape).contiguous(memory_format=torch.channels_last)
            expected.backward(gradients)
            wanted, images.grad = images.grad, None
            found, positions = max_pool(images, padding)
            assert torch.equal(found, expected), (shape, padding)
            found.backward(gradients)
            assert torch.allclose(images.grad, wanted, rtol=1e-5, atol=1e-6), (shape, padding)
    images = torch.full((1, 1, 4, 4), float("-inf"))
    images[0, 0, 1, 1] = float("nan")
    found, positions = max_pool(images, 1)
    assert found.isnan().all() and positions.flatten().tolist() == [8, 6, 2, 0]
    print("same")
"""


@interpreted
def test_kernels_match_torch() -> None:
    out, err = run_interpreted(COMPARED_WITH_TORCH)
    assert out == "same\n", err


def test_fitting_poolings_are_replaced() -> None:
    stays = [nn.MaxPool2d(2), nn.MaxPool2d(3, 1), nn.MaxPool2d(3, 2, ceil_mode=True), nn.MaxPool2d(3, 2, dilation=2)]
    model = nn.Sequential(nn.Sequential(nn.MaxPool2d(3, 2, 1)), *stays, nn.MaxPool2d(3, stride=2))
    use_max_pool_kernel(model)
    assert [type(module) is KernelMaxPool for module in (model[0][0], *model[1:])] == [True, *[False] * 4, True]
    assert (model[0][0].padding, model[5].padding) == (1, 0)
    images = torch.randn(1, 2, 32, 32)
    assert torch.equal(model[0](images), nn.functional.max_pool2d(images, 3, 2, 1)), "torch pools on a CPU"
    with pytest.raises(UsageError, match="finds no max pooling of 3 by 3"):
        use_max_pool_kernel(nn.Sequential(*stays))


def test_without_triton_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_module, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="needs Triton"):
        use_max_pool_kernel(nn.Sequential(nn.MaxPool2d(3, 2)))
