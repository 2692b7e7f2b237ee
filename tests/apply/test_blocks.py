"""The repeated blocks of a model."""

import torch
import torchvision
from torch import nn

from castwise.apply.techniques.blocks import repeated_blocks
from castwise.trial.models.transformer import Architecture, Transformer


def test_a_transformers_layers_are_its_blocks() -> None:
    model = Transformer(Architecture("gpt2", width=16, depth=3, heads=2, length=8, vocabulary=32))
    assert repeated_blocks(model) == list(model.blocks)


def test_blocks_are_those_within_stages_also_if_the_first_of_each_has_another_shape() -> None:
    with torch.device("meta"):
        resnet, swin = torchvision.models.resnet50(), torchvision.models.swin_t()
    assert [type(block).__name__ for block in repeated_blocks(resnet)] == ["Bottleneck"] * 16
    assert [type(block).__name__ for block in repeated_blocks(swin)] == ["SwinTransformerBlock"] * 12


def test_the_class_alone_counts_if_no_shapes_are_repeated() -> None:
    with torch.device("meta"):
        squeezenet = torchvision.models.squeezenet1_1()
    assert [type(block).__name__ for block in repeated_blocks(squeezenet)] == ["Fire"] * 8


def test_a_plain_sequential_is_a_block_if_it_is_repeated_and_holds_none() -> None:
    def layers(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.Tanh())

    model = nn.Sequential(layers(2), nn.Sequential(layers(2), layers(2)), layers(3))
    assert repeated_blocks(model) == [model[0], *model[1]]


def test_single_layers_and_a_block_in_a_block_are_no_blocks_and_a_shared_one_counts_once() -> None:
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=8)
    encoders = nn.ModuleList(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False) for _ in range(2))
    assert repeated_blocks(nn.ModuleDict({"all": encoders, "again": encoders})) == list(encoders)
