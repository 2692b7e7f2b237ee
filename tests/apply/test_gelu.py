"""GELU by shorter formulas, beside torch's in float64."""

from typing import Any

import pytest
import torch
from torch import nn

from castwise.apply.techniques.gelu import ShortGelu, use_short_gelu
from castwise.errors import TechniqueError


@pytest.mark.parametrize("form", ["none", "tanh"])
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 4e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4), (torch.float64, 1e-6)]
)
def test_short_gelu_is_as_exact_as_torch(form: str, dtype: torch.dtype, error: float) -> None:
    x = torch.cat([torch.linspace(-12, 12, 5001), torch.tensor([-300.0, 300.0])]).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    own, exact = ShortGelu(form)(x), nn.functional.gelu(wide, approximate=form)
    own.sum().backward()
    exact.sum().backward()
    assert own.dtype == x.grad.dtype == dtype
    torch.testing.assert_close(own.double(), exact, rtol=error, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=error, atol=3e-6)


def test_all_modules_of_gelu_are_replaced() -> None:
    activations: Any = pytest.importorskip("transformers.activations")
    makers = [nn.GELU, lambda: nn.GELU("tanh"), activations.NewGELUActivation, activations.GELUActivation]
    for make in makers:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), make(), nn.Sequential(make(), nn.ReLU()))
        x = torch.randn(16, 4)
        expected = model(x)
        use_short_gelu(model)
        assert [type(model[1]), type(model[2][0]), type(model[2][1])] == [ShortGelu, ShortGelu, nn.ReLU]
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("has_gelu", [False, True])
def test_short_gelu_needs_a_module_without_hooks(has_gelu: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU() if has_gelu else nn.ReLU())
    model[1].register_forward_hook(lambda *_: None)
    with pytest.raises(TechniqueError, match="no module of GELU without hooks"):
        use_short_gelu(model)
