"""The compiled update: the same losses and weights, one graph, skipped steps and clipping included."""

from typing import Any

import pytest
import torch
from loops import ADADELTA, IMAGES, losses_of, setup_of, spec_of
from torch import Tensor, nn

from castwise.apply.loss_scaling import NoScaling, make_loss_scaling
from castwise.apply.precision import convert_weights, make_weights
from castwise.apply.techniques.compiled_update import CompiledUpdate
from castwise.errors import UsageError
from castwise.registry.precisions import find_precision

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.5, "decoupled_weight_decay": True}),
    ("AdamW", {"lr": 0.01, "amsgrad": True}),
    ("Adadelta", {"lr": 1.0, "weight_decay": 0.01}),
]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the function uncompiled: compiling takes seconds a case."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def trained(
    name: str, arguments: dict[str, Any], precision: str, scaling: str, clip: float | None, *, ours: bool
) -> tuple[list[Tensor], int]:
    """Return the weights after six steps, one of which overflows, and how many were skipped."""
    torch.manual_seed(0)
    row = find_precision(precision)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 1))
    convert_weights(model, row)
    unused = model[1].bias
    weights = make_weights(model, row)
    optimizer = getattr(torch.optim, name)(weights.stepped, foreach=True, **arguments)
    scale = make_loss_scaling(scaling, torch.device("cpu"), optimizer, decides_on_device=True)
    compiled = CompiledUpdate(optimizer, weights, scale, clip) if ours else None
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        model.zero_grad()
        inputs = torch.randn(8, 6, generator=generator).to(model[0].weight.dtype)
        loss = model(inputs).float().square().mean()
        scale.backward(loss * (float("inf") if step == 3 and scaling == "dynamic" else 1.0))
        unused.grad = None
        if compiled is not None:
            compiled()
        else:
            weights.collect_gradients()
            scale.step(optimizer, clip)
            weights.publish()
    return [p.detach().clone() for p in (*model.parameters(), *weights.stepped)], scale.skipped_steps


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("name", "arguments"), OPTIMIZERS, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "fp16-master", "bf16-master"])
@pytest.mark.parametrize(("scaling", "clip"), [("none", None), ("none", 0.01), ("128", None), ("dynamic", 0.01)])
def test_compiled_update_equals_the_plain_update(
    name: str, arguments: dict[str, Any], precision: str, scaling: str, clip: float | None
) -> None:
    found, skipped = trained(name, arguments, precision, scaling, clip, ours=True)
    expected, plainly_skipped = trained(name, arguments, precision, scaling, clip, ours=False)
    assert skipped == plainly_skipped == (1 if scaling == "dynamic" else 0)
    for tensor, other in zip(found, expected, strict=True):
        assert tensor.isfinite().all()
        assert torch.allclose(tensor, other, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("traced")
@pytest.mark.slow
def test_losses_of_20_compiled_updates() -> None:
    found = losses_of(spec_of(ADADELTA, "fp32", "compiled-update", loss_scale="dynamic"))
    expected = losses_of(spec_of(ADADELTA, "fp32", loss_scale="dynamic"))
    assert ((found - expected) / expected).abs().max() < 500 * 2.0**-23


@pytest.mark.parametrize("number", [1, 3], ids=["SGD", "AdamW"])
@pytest.mark.slow
def test_compiled_optimizers_on_a_cpu(number: int, request: pytest.FixtureRequest) -> None:
    """AdamW is compiled for real: torch's foreach Adam needs `capturable` there, which it has on a GPU."""
    name, arguments = OPTIMIZERS[number]
    if name == "SGD":
        request.getfixturevalue("traced")
    found, skipped = trained(name, arguments, "bf16-master", "dynamic", 0.01, ours=True)
    expected, _ = trained(name, arguments, "bf16-master", "dynamic", 0.01, ours=False)
    assert skipped == 1
    for tensor, other in zip(found, expected, strict=True):
        assert torch.allclose(tensor, other, rtol=1e-3, atol=1e-5)


def test_steps_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *args: compiled.append(function(*args)))
    with setup_of(spec_of(IMAGES, "fp32", "compiled-update")) as (setup, batches):
        for _ in range(setup.step.steps_to_compile):
            assert not compiled
            setup.step(batches[0])
        assert len(compiled) == 1
    with setup_of(spec_of(IMAGES, "fp32")) as (setup, _):
        assert setup.step.steps_to_compile == 1


def test_other_optimizers_are_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Rprop(model.parameters())
    weights = make_weights(model, find_precision("fp32"))
    with pytest.raises(UsageError, match="fits SGD, Adam, AdamW, Adadelta; this is Rprop"):
        CompiledUpdate(optimizer, weights, NoScaling(), None)
