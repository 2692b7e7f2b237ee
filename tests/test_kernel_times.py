"""Products timed alone: what is run, in turns over how many copies. No time is asked of it."""

import kernel_times
import pytest
import torch
from kernel_products import FORWARD, OF_INPUT, OF_WEIGHT, PARTS, Product, Window
from kernel_times import CHANNELS_LAST, CONTIGUOUS, MATMUL, Manner, Way, time_way, ways_of
from torch import Tensor

CPU = Manner(torch.device("cpu"), torch.float32, rotated_bytes=0)
WINDOW = Window((2, 2), (1, 1), (1, 1), 1)
SHAPES = ((2, 8, 8, 8), (16, 8, 3, 3), (2, 16, 4, 4))


def convolution(part: str = FORWARD) -> Product:
    return Product("convolution", part, SHAPES, WINDOW)


@pytest.mark.parametrize(("part", "shape"), [(FORWARD, SHAPES[2]), (OF_INPUT, SHAPES[0]), (OF_WEIGHT, SHAPES[1])])
def test_a_convolution_runs_in_channels_last(part: str, shape: tuple[int, ...]) -> None:
    (way,) = ways_of(convolution(part))
    result = way.make(CPU)()
    assert way.name == CHANNELS_LAST
    assert result.shape == shape
    assert result.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("part", PARTS)
def test_one_of_single_pixels_is_a_matrix_product_too(part: str) -> None:
    product = Product(
        "convolution", part, ((2, 8, 4, 4), (16, 8, 1, 1), (2, 16, 4, 4)), Window((1, 1), (0, 0), (1, 1), 1)
    )
    as_images, as_matmul = ways_of(product)
    assert (as_images.name, as_matmul.name) == (CHANNELS_LAST, MATMUL)
    assert as_images.make(CPU)().numel() == as_matmul.make(CPU)().numel()


@pytest.mark.parametrize("part", PARTS)
def test_a_depthwise_one_runs_in_contiguous_tensors_too(part: str) -> None:
    window = Window((1, 1), (1, 1), (1, 1), 8)
    product = Product("convolution", part, ((2, 8, 4, 4), (8, 1, 3, 3), (2, 8, 4, 4)), window)
    found = {way.name: way.make(CPU)() for way in ways_of(product)}
    assert list(found) == [CHANNELS_LAST, CONTIGUOUS]
    assert found[CONTIGUOUS].is_contiguous()


def test_factors_of_a_matrix_product_lie_as_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[tuple[int, ...], ...]] = []

    def matmul(left: Tensor, right: Tensor) -> Tensor:
        seen.append((tuple(left.shape), left.stride(), tuple(right.shape), right.stride()))
        return left

    monkeypatch.setattr(torch, "matmul", matmul)
    (way,) = ways_of(Product("mm", OF_WEIGHT, ((10, 4), (4, 512)), is_transposed=(True, False)))
    way.make(CPU)()
    assert seen == [((10, 4), (1, 10), (4, 512), (512, 1))]


@pytest.mark.parametrize(("rotated", "num_copies"), [(0, 1), (1, 1), (2.5, 3), (1e9, 256)])
def test_copies_take_turns(rotated: float, num_copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    product = convolution()
    order: list[int] = []
    made: list[int] = []

    def make(manner: Manner) -> kernel_times.Call:
        index = len(made)
        made.append(index)
        return lambda: order.append(index) or torch.empty(0)  # type: ignore[func-returns-value]

    monkeypatch.setattr(kernel_times, "_GRAPH_SECONDS", 0.0)
    manner = Manner(CPU.device, CPU.dtype, rotated_bytes=round(rotated * 4 * product.elements))
    assert time_way(Way("any", make), product, manner, 0.0) > 0
    assert len(made) == num_copies
    # Twice to warm up, once to learn how long it takes, and three replays.
    assert order == list(range(num_copies)) * 6


def test_the_smallest_form_times_a_product_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    way = Way("any", lambda manner: lambda: calls.append(0) or torch.empty(0))  # type: ignore[func-returns-value]
    time_way(way, convolution(), Manner(CPU.device, CPU.dtype, rotated_bytes=0, is_tiny=True), 1.0)
    assert len(calls) == 2
