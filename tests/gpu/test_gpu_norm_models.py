"""Whole models with the batch norm kernels and with torch's own operations: the same dropout masks and gradients."""

import copy
from typing import Any

import pytest
import torch
from real_gpu import on_gpus
from torch import Tensor, nn

from castwise.registry.workloads import find_workload
from castwise.trial.kernels.batch_norm import fusion
from castwise.trial.kernels.batch_norm.fusion import use_batch_norm_kernel
from castwise.trial.kernels.batch_norm.module import KernelBatchNorm
from castwise.trial.kernels.batch_norm.types import FusedOutput
from castwise.trial.models import build_task

pytestmark = on_gpus()

DEVICE = "cuda:0"


class Masked(nn.Module):
    """Dropout by a mask that is known."""

    def __init__(self, kept: Tensor, probability: float) -> None:
        super().__init__()
        self._kept, self._scale = kept, 65536 / (65536 - round(probability * 65536))

    def forward(self, images: Tensor) -> Tensor:
        return images * (self._kept * self._scale).to(images.dtype)


def gradients_of(model: nn.Module, run: Any, images: Tensor, labels: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        out = run(images)
    (1024 * nn.functional.cross_entropy(out.float(), labels)).backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters() if parameter.grad is not None}


def relative_errors(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Return how far each gradient is from the exact one, relative to its norm."""
    norms = {name: float(gradient.norm()) for name, gradient in exact.items()}
    # A gradient that is all but 0, as a bias's before a norm, has no digits to compare.
    least = 1e-6 * max(norms.values())
    return {name: float((gradients[name] - each).norm()) / max(norms[name], least) for name, each in exact.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("batch_size", [32, 128])
def test_a_model_with_dropout_has_torch_s_gradients(
    dtype: torch.dtype, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(fusion, "draw_seed", lambda images: torch.full((1,), 1234567890123, device=images.device))
    plain = build_task(find_workload("wrn-28-10")).model.to(DEVICE, memory_format=torch.channels_last).train()
    model = copy.deepcopy(plain)
    use_batch_norm_kernel(model)
    images = torch.randn(batch_size, 3, 32, 32, device=DEVICE).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch_size,), device=DEVICE)
    masks = []
    original = KernelBatchNorm.forward

    def watched(self: Any, images: Tensor, before: Any = None, after: Any = None) -> Any:
        found = original(self, images, before, after)
        if isinstance(found, FusedOutput) and before[1] > 0:
            masks.append(found.total != 0)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(KernelBatchNorm, "forward", watched)
        found = {"kernels": gradients_of(model, model, images, labels, dtype)}
    assert len(masks) == 12
    assert all(abs(float(mask.float().mean()) - 0.7) < 0.01 for mask in masks)
    compiled = torch.compile(model, dynamic=False)
    found["compiled"] = gradients_of(model, compiled, images, labels, dtype)
    names = [name for name, module in plain.named_modules() if isinstance(module, nn.Dropout)]
    for name, mask in zip(names, masks, strict=True):
        parent, _, own = name.rpartition(".")
        setattr(plain.get_submodule(parent), own, Masked(mask, 0.3))
    wanted = gradients_of(plain, plain, images, labels, dtype)
    exact = copy.deepcopy(plain).double()
    exact_wanted = gradients_of(exact, exact, images.double(), labels, torch.float32)
    of_torch = relative_errors(wanted, exact_wanted)
    # A pixel whose value rounds to the other side of an activation's kink has another gradient, and its layer too.
    kinks = 1e-2 if dtype == torch.float32 else 0.0
    for way, gradients in found.items():
        errors = relative_errors(gradients, exact_wanted)
        bad = {name: error for name, error in errors.items() if error > 4 * of_torch[name] + kinks + 1e-4}
        assert not bad, way


@pytest.mark.parametrize("name", ["mobilenetv3_large_100", "efficientnet_b0", "densenet121", "repvgg_a0"])
def test_models_of_timm_s_have_torch_s_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    plain = timm.create_model(name, num_classes=10, drop_rate=0.0).to(DEVICE, memory_format=torch.channels_last).train()
    model = copy.deepcopy(plain)
    use_batch_norm_kernel(model)
    images = torch.randn(32, 3, 128, 128, device=DEVICE).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (32,), device=DEVICE)
    wanted = gradients_of(plain, plain, images, labels, torch.float32)
    found = gradients_of(model, model, images, labels, torch.float32)
    exact = copy.deepcopy(plain).double()
    exact_wanted = gradients_of(exact, exact, images.double(), labels, torch.float32)
    assert found.keys() == wanted.keys()
    errors, of_torch = relative_errors(found, exact_wanted), relative_errors(wanted, exact_wanted)
    assert not {key: error for key, error in errors.items() if error > 4 * of_torch[key] + 1e-2}
    for each in (plain, model):
        each.eval()
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(model(images), plain(images))
