"""The products of a step, against ones that are reckoned by hand."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from kernel_products import FORWARD, OF_INPUT, OF_WEIGHT, Product, Window
from torch import nn
from work_counter import count_step, record_step

from castwise.registry.workloads import find_workload

BATCH = 4
POINT = Window((1, 1), (0, 0), (1, 1), 1)


def task_of(model: nn.Module, *shape: int) -> SimpleNamespace:
    """Return the task of a model whose loss is the sum of its outputs."""

    def make_batches(count: int, batch_size: int, device: torch.device, generator: object) -> list[tuple[torch.Tensor]]:
        return [(torch.zeros(batch_size, *shape, device=device),)] * count

    return SimpleNamespace(
        model=model, make_batches=make_batches, compute_loss=lambda model, batch: model(batch[0]).square().sum()
    )


def products_of_net() -> Counter[Product]:
    with torch.device("meta"):
        same = [nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2)]
        depthwise = nn.Conv2d(8, 8, 5, stride=2, padding=2, groups=8)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            *same,
            depthwise,
            nn.Flatten(),
            nn.Linear(512, 10),
        )
    _, products = record_step(task_of(model, 3, 16, 16), BATCH)  # type: ignore[arg-type]
    return Counter(products)


def test_products_of_a_small_net() -> None:
    window, strided = Window((1, 1), (1, 1), (1, 1), 1), Window((2, 2), (2, 2), (1, 1), 8)
    images, wide, half = (BATCH, 3, 16, 16), (BATCH, 8, 16, 16), (BATCH, 8, 8, 8)

    def convolution(part: str, inputs: tuple[int, ...], weight: tuple[int, ...]) -> Product:
        own, outputs = (strided, half) if weight[1] == 1 else (window, wide)
        return Product("convolution", part, (inputs, weight, outputs), own)

    expected: Counter[Product] = Counter()
    for part in (FORWARD, OF_INPUT, OF_WEIGHT):
        expected[convolution(part, wide, (8, 8, 3, 3))] = 2
        expected[convolution(part, wide, (8, 1, 5, 5))] = 1
        if part != OF_INPUT:  # nobody asks for that of the images
            expected[convolution(part, images, (8, 3, 3, 3))] = 1
    expected[Product("mm", FORWARD, ((BATCH, 512), (512, 10)), is_transposed=(False, True))] = 1
    expected[Product("mm", OF_INPUT, ((BATCH, 10), (10, 512)), is_transposed=(False, False))] = 1
    expected[Product("mm", OF_WEIGHT, ((10, BATCH), (BATCH, 512)), is_transposed=(True, False))] = 1
    assert products_of_net() == expected


def test_operations_and_numbers_of_a_product() -> None:
    by_label = {product.label: product for product in products_of_net() if product.part == FORWARD}
    same = by_label["3×3, 8 → 8 channels, 4×16×16"]
    assert (same.flops, same.elements) == (2 * BATCH * 256 * 8 * 8 * 9, 2 * BATCH * 256 * 8 + 8 * 8 * 9)
    depthwise = by_label["5×5, 8 → 8 channels, 4×16×16, stride 2, depthwise"]
    assert (depthwise.flops, depthwise.elements) == (2 * BATCH * 64 * 8 * 25, BATCH * 8 * (256 + 64) + 8 * 25)
    linear = by_label["4×512 by 512×10"]
    assert (linear.flops, linear.elements) == (2 * BATCH * 512 * 10, BATCH * 512 + 512 * 10 + BATCH * 10)
    assert [label for label, product in by_label.items() if product.has_few_channels] == [
        "3×3, 3 → 8 channels, 4×16×16",
        depthwise.label,
    ]


@pytest.mark.parametrize("name", ["resnet50", "efficientnet_b0", "wrn-28-10", "mnist-cnn", "mlp-4096"])
def test_products_and_the_rest_are_the_whole_step(name: str) -> None:
    work, products = count_step(find_workload(name), BATCH)
    assert sum(product.flops for product in products) == work.flops
    of_operations = sum(each.elements for each in work.operations if each.flops)
    # The bias of linear layers is read by the operations, and is none of the products.
    assert sum(product.elements for product in products) == pytest.approx(of_operations, rel=1e-3)
    assert work.rest_bytes(2) == work.bytes(2) - 2 * of_operations


def test_products_of_resnet50() -> None:
    _, products = count_step(find_workload("resnet50"), BATCH)
    parts = Counter(product.part for product in products)
    assert parts == {FORWARD: 54, OF_INPUT: 53, OF_WEIGHT: 54}  # 53 convolutions and a linear layer
    counts = Counter(products)
    (middle,) = (each for each in counts if each.part == FORWARD and each.label == "3×3, 256 → 256 channels, 4×14×14")
    assert counts[middle] == 5


def test_recurrent_layers_are_no_products() -> None:
    work, products = count_step(find_workload("lstm-lm"), BATCH)
    assert {product.name for product in products} == {"mm"}  # the decoder's
    assert any(operation.name == "recurrent" for operation in work.operations)


def test_a_convolution_of_single_pixels_is_a_matrix_product() -> None:
    torch.manual_seed(0)
    images, weight = torch.randn(2, 3, 5, 5, requires_grad=True), torch.randn(4, 3, 1, 1, requires_grad=True)
    outputs = nn.functional.conv2d(images, weight)
    gradient = torch.randn_like(outputs)
    outputs.backward(gradient)
    pixels = {
        name: each.movedim(1, -1).flatten(0, -2) for name, each in (("x", images), ("y", outputs), ("g", gradient))
    }
    flat = weight.flatten(1)
    assert images.grad is not None
    assert weight.grad is not None
    wanted = {
        FORWARD: ((pixels["x"], flat.T), pixels["y"]),
        OF_INPUT: ((pixels["g"], flat), images.grad.movedim(1, -1).flatten(0, -2)),
        OF_WEIGHT: ((pixels["g"].T, pixels["x"]), weight.grad.flatten(1)),
    }
    for part, ((left, right), result) in wanted.items():
        product = Product("convolution", part, ((2, 3, 5, 5), (4, 3, 1, 1), (2, 4, 5, 5)), POINT)
        matmul = product.as_matmul()
        assert matmul is not None
        assert matmul.shapes == (left.shape, right.shape)
        torch.testing.assert_close(left @ right, result)
        assert matmul.is_transposed == (part == OF_WEIGHT, part == FORWARD)
        assert (matmul.flops, matmul.elements, matmul.part) == (product.flops, product.elements, part)


@pytest.mark.parametrize(
    ("kernel", "window"),
    [
        (3, POINT),
        (1, Window((2, 2), (0, 0), (1, 1), 1)),
        (1, Window((1, 1), (1, 1), (1, 1), 1)),
        (1, Window((1, 1), (0, 0), (1, 1), 4)),
    ],
)
def test_other_convolutions_are_none(kernel: int, window: Window) -> None:
    shapes = ((2, 16, 8, 8), (16, 16 // window.groups, kernel, kernel), (2, 16, 8, 8))
    assert Product("convolution", FORWARD, shapes, window).as_matmul() is None
