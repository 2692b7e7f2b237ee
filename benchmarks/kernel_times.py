"""The time of one convolution or matrix product alone, as the library's fastest kernel for it.

A product is computed over and over in a CUDA graph, each time on the next of several copies of its tensors, so that
none of them is in the cache when its turn comes; the fastest of several replays counts. The images of a convolution are
half zeros, as behind a ReLU: fewer bits toggle than in numbers that are all different, and the clock stays higher.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from kernel_products import FORWARD, OF_INPUT, OF_WEIGHT, Product, Shape
from torch import Tensor

from castwise.worker.timing import stopwatch_of

CHANNELS_LAST, CONTIGUOUS, MATMUL = "channels-last", "contiguous", "matrix product"
ROTATED_BYTES = 200 * 10**6  # four times the H200's L2 cache
_FORMATS = {CHANNELS_LAST: torch.channels_last, CONTIGUOUS: torch.contiguous_format}
_GRAPH_SECONDS = 0.02
_MOST_CALLS = 256  # of a graph; a call of a few microseconds is timed over a millisecond then
_FEWEST_REPLAYS = 3

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Manner:
    """How products are timed.

    Attributes:
        device: Where.
        dtype: Of the tensors.
        rotated_bytes: What the copies of a product's tensors come to at the least; 0 has one copy, which stays in the
            cache where it fits.
        is_tiny: Whether each is timed once, to try the program itself.
    """

    device: torch.device
    dtype: torch.dtype
    rotated_bytes: int = ROTATED_BYTES
    is_tiny: bool = False


@dataclass(frozen=True)
class Way:
    """One way to have a product computed by the library.

    Attributes:
        name: "channels-last" or "contiguous", of a convolution; "matrix product".
        make: Returns what computes it, over tensors of its own.
    """

    name: str
    make: Callable[[Manner], Call]


def ways_of(product: Product) -> Iterator[Way]:
    """Yield the ways that a product can be computed in, the usual one first.

    A convolution runs in channels-last; with few channels a group, in contiguous tensors too; over single pixels, as a
    matrix product too.
    """
    if product.window is None:
        yield Way(MATMUL, lambda manner: _matmul(product, manner))
        return
    for name in (CHANNELS_LAST, CONTIGUOUS) if product.has_few_channels else (CHANNELS_LAST,):
        yield Way(name, lambda manner, name=name: _convolution(product, manner, _FORMATS[name]))  # type: ignore[misc]
    matmul = product.as_matmul()
    if matmul is not None:
        yield Way(MATMUL, lambda manner: _matmul(matmul, manner))


def time_way(way: Way, product: Product, manner: Manner, seconds: float) -> float:
    """Return the seconds of one computation of a product, of the fastest replay.

    Args:
        way: One of `ways_of` it.
        product: The product.
        manner: How it is timed.
        seconds: Time for the replays; three are made in any case.
    """
    moved = product.elements * torch.finfo(manner.dtype).bits / 8
    num_copies = max(1, min(_MOST_CALLS, math.ceil(manner.rotated_bytes / moved)))
    calls = [way.make(manner) for _ in range(num_copies)]
    stopwatch = stopwatch_of(manner.device)

    def once() -> None:
        for call in calls:
            call()

    once()  # cuDNN searches
    if manner.is_tiny:
        return stopwatch.time(once) / num_copies
    stopwatch.time(once)
    each = stopwatch.time(once) / num_copies
    num_calls = num_copies * max(1, min(_MOST_CALLS, round(_GRAPH_SECONDS / each)) // num_copies)
    replay = _several(calls, num_calls, manner.device)
    best, deadline, num_replays = math.inf, time.monotonic() + seconds, 0
    while num_replays < _FEWEST_REPLAYS or time.monotonic() < deadline:
        best = min(best, stopwatch.time(replay) / num_calls)
        num_replays += 1
    return best


def _several(calls: list[Call], number: int, device: torch.device) -> Callable[[], None]:
    """Return what makes a number of calls in turns; on a GPU, as one graph."""

    def work() -> None:
        results: deque[Tensor] = deque(maxlen=len(calls))  # so that results lie in as many places as their factors
        for index in range(number):
            results.append(calls[index % len(calls)]())

    if device.type != "cuda":
        return work
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _convolution(product: Product, manner: Manner, memory_format: torch.memory_format) -> Call:
    window = product.window
    assert window is not None

    def numbers(shape: Shape) -> Tensor:
        place = torch.empty(shape, dtype=manner.dtype, device=manner.device)
        return place.contiguous(memory_format=memory_format if len(shape) == 4 else torch.contiguous_format).normal_()

    images, weight, gradient = (numbers(shape) for shape in product.shapes)
    images.clamp_(min=0)
    none = (0,) * len(window.stride)  # of output padding
    settings = (window.stride, window.padding, window.dilation, False, none, window.groups)
    if product.part == FORWARD:
        del gradient
        return lambda: torch.ops.aten.convolution(images, weight, None, *settings)
    mask = [product.part == OF_INPUT, product.part == OF_WEIGHT, False]
    wanted = mask.index(True)

    def backward() -> Tensor:
        found = torch.ops.aten.convolution_backward(gradient, images, weight, None, *settings, mask)
        result: Tensor = found[wanted]
        return result

    return backward


def _matmul(product: Product, manner: Manner) -> Call:
    def numbers(shape: Shape, is_transposed: bool) -> Tensor:
        shape = (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape
        found = torch.empty(shape, dtype=manner.dtype, device=manner.device).normal_()
        return found.mT if is_transposed else found

    left, right = (numbers(*each) for each in zip(product.shapes, product.is_transposed, strict=True))
    return lambda: torch.matmul(left, right)
