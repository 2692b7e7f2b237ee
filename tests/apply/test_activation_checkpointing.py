"""Activation checkpointing: the same losses, bit for bit, the same names and statistics, and fewer saved bytes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_step import CPU, SmallNet, make_step, make_task
from torch import Tensor, nn

from castwise.apply.pytree import Batch
from castwise.apply.techniques.activation_checkpointing import checkpoint_blocks
from castwise.errors import TechniqueError
from castwise.registry.precisions import find_precision
from castwise.registry.workloads import OptimizerSpec
from castwise.trial.flops import ProductCounter
from castwise.trial.models.transformer import Architecture, Transformer
from castwise.trial.models.wide_resnet import WideResNet

TOKENS = torch.arange(64).view(4, 16) % 50
IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)


def bert() -> nn.Module:  # it has dropout
    return Transformer(Architecture("bert", width=32, depth=3, heads=4, length=16, vocabulary=50))


def resnet() -> nn.Module:  # it has running statistics
    return WideResNet(depth=16, widen=1, dropout=0.0)


def densenet() -> nn.Module:  # its blocks share a list
    from torchvision.models import DenseNet

    return DenseNet(growth_rate=16, block_config=(3, 3), num_init_features=8, num_classes=10)


def timm_swin() -> nn.Module:  # its blocks are in stages
    import timm

    return timm.create_model("swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=24)


def gpt2_of_transformers() -> nn.Module:  # it has a cache of keys and values
    import transformers

    config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=50, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def squares(model: nn.Module, batch: Batch) -> Tensor:
    output: Any = model(*batch)
    return (getattr(output, "logits", output)).float().square().mean()


def losses_and_step(model: nn.Module, precision: str, data: Tensor) -> tuple[list[float], Any]:
    torch.manual_seed(1)
    task, row = make_task(model, squares), find_precision(precision)
    step = make_step(row, task, OptimizerSpec("SGD", (("lr", 0.01),)))
    losses = [step((data,)).item() for _ in range(3)]
    counter = ProductCounter(CPU, [*step.model.parameters(), *step.model.buffers(), data])
    with counter:
        step.run_backward((data,))
    return losses, (step.model, counter)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-master"])
@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        bert,
        resnet,
        densenet,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (timm_swin, gpt2_of_transformers)),
    ],
)
def test_losses_and_state_are_those_of_the_plain_loop(
    make: Callable[[], nn.Module], selective: bool, precision: str
) -> None:
    torch.manual_seed(0)
    plain = make()
    data = TOKENS if make in (bert, gpt2_of_transformers) else IMAGES
    checkpointed = copy.deepcopy(plain)
    if selective and make in (resnet, densenet):
        with pytest.raises(TechniqueError, match="finds no linear layers in blocks"):
            checkpoint_blocks(checkpointed, selective)
        return
    checkpoint_blocks(checkpointed, selective)
    assert [name for name, _ in checkpointed.named_parameters()] == [name for name, _ in plain.named_parameters()]
    checkpointed = copy.deepcopy(checkpointed)  # a copy runs its own weights
    (expected, (model, counter)), (found, (other, fewer)) = (
        losses_and_step(each, precision, data) for each in (plain, checkpointed)
    )
    assert found == expected
    assert expected[-1] != expected[0]
    # Without its cache, transformers computes attention by another mask, which may round the last bit otherwise.
    bound = 1e-8 if make is gpt2_of_transformers else 0.0
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0.0, atol=bound)
    assert fewer.saved_bytes < 0.6 * counter.saved_bytes
    assert (counter.recomputed_flops, fewer.products) == (0, counter.products)
    # What is kept by the selective form is not computed again.
    assert (fewer.recomputed_flops == 0) == selective


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.slow
def test_compiled_losses(selective: bool) -> None:
    plain, losses = bert(), list[list[float]]()
    for module in plain.modules():  # compiled dropout draws other numbers
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    checkpointed = copy.deepcopy(plain)
    checkpoint_blocks(checkpointed, selective)
    for model in (plain, checkpointed):
        optimizer, compiled = torch.optim.SGD(model.parameters(), lr=0.1), torch.compile(squares, dynamic=False)
        losses.append([])
        for _ in range(3):
            loss = compiled(model, (TOKENS,))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_block_of_two_layers_in_a_list_is_one() -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
    checkpoint_blocks(blocks)
    assert all("forward" in vars(block) for block in blocks)


@pytest.mark.parametrize("make", [SmallNet, lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))])
def test_a_model_without_repeated_blocks_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(TechniqueError, match="finds no modules of one class"):
        checkpoint_blocks(make())
