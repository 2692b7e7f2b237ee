"""What a steady trial and a training run are both built from."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from small_step import cpu_spec
from torch import nn

from castwise.apply.precision import numeric_state, read_fp32_precision
from castwise.registry.precisions import find_precision
from castwise.registry.techniques import ATTENTION_KERNELS, TECHNIQUES, step_config_of
from castwise.spec.recipe import Optimizer, Recipe
from castwise.trial import build as build_module
from castwise.trial.build import build_trial
from castwise.trial.distributed import Peers
from castwise.trial.step import layers_of


@pytest.mark.parametrize(
    ("recipe", "wanted"),
    [(None, False), (Recipe(epochs=1), False), (Recipe(epochs=1, cudnn_benchmark=True), True)],
)
@pytest.mark.parametrize("before", [False, True])
def test_numeric_state_is_restored(recipe: Recipe | None, wanted: bool, before: bool) -> None:
    torch.backends.cudnn.benchmark = before
    fp32 = read_fp32_precision()
    try:
        with ExitStack() as stack:
            setup = build_trial(cpu_spec(recipe=recipe), stack, Peers())
            assert torch.backends.cudnn.benchmark == wanted
            assert "convolution" in (setup.facts.layers or ())
        assert torch.backends.cudnn.benchmark == before
        assert read_fp32_precision() == fp32
    finally:
        torch.backends.cudnn.benchmark = False


def test_recipe_replaces_the_optimizer() -> None:
    asked = Optimizer(name="SGD", arguments={"lr": 0.25})
    with ExitStack() as stack:
        own = build_trial(cpu_spec(recipe=Recipe(epochs=1)), stack, Peers()).step.optimizer
        other = build_trial(cpu_spec(recipe=Recipe(epochs=1, optimizer=asked)), stack, Peers()).step.optimizer
    assert isinstance(own, torch.optim.Adadelta)
    assert isinstance(other, torch.optim.SGD)
    assert other.defaults["lr"] == 0.25


class OwnConvolution(nn.Module):
    """Calls the function, as models do that make their weights themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3, 1, 1))


@pytest.mark.parametrize(
    ("parts", "layers"),
    [
        ([nn.Embedding(3, 4), nn.Linear(4, 4)], ("embedding",)),
        ([nn.Linear(4, 4), nn.LayerNorm(4)], ()),
        ([nn.Conv1d(3, 4, 1)], ("convolution",)),
        ([OwnConvolution()], ("convolution",)),
        ([nn.Conv2d(3, 4, 1), nn.MaxPool2d(2), nn.BatchNorm2d(4)], ("convolution", "max pooling", "batch norm")),
    ],
)
def test_facts_name_the_layers_that_techniques_act_on(parts: list[nn.Module], layers: tuple[str, ...]) -> None:
    assert layers_of(nn.Sequential(*parts)) == layers


def test_attention_runs_in_one_kind_of_kernels_and_then_in_all_again() -> None:
    def enabled() -> list[bool]:
        return [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ATTENTION_KERNELS]

    before = enabled()
    with numeric_state(find_precision("fp32"), step_config_of(["cudnn-attention"])):
        assert enabled() == [False, False, False, True]
    assert enabled() == before


def test_every_layer_of_a_technique_is_looked_for() -> None:
    every = nn.Sequential(nn.Conv2d(3, 4, 1), nn.MaxPool2d(2), nn.BatchNorm2d(4), nn.Embedding(3, 4), nn.GELU())
    assert {row.layer for row in TECHNIQUES} - {"", "attention"} == set(layers_of(every))


def test_pretrained_weights_are_loaded_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[Path, torch.dtype]] = []
    real = build_module.build_task

    def build(*arguments: Any, **options: Any) -> Any:
        task = real(*arguments, **options)

        def load(path: Path) -> None:
            loaded.append((path, next(task.model.parameters()).dtype))

        object.__setattr__(task, "load_weights", load)
        return task

    monkeypatch.setattr(build_module, "build_task", build)
    with ExitStack() as stack:
        build_trial(cpu_spec("bf16-true", recipe=Recipe(epochs=1)), stack, Peers())
        assert loaded == []
        build_trial(cpu_spec("bf16-true", recipe=Recipe(epochs=1), weights="/w.pth"), stack, Peers())
    assert loaded == [(Path("/w.pth"), torch.float32)], "before the precision is applied"
