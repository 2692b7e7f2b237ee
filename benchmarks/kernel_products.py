"""The convolutions and matrix products of a step, each with all that its library's kernel is chosen by. Pure.

`work_counter.py` collects them from torch's operations. A convolution's backward is two products, as in cuDNN: the
gradient of its input, where one is asked for, and that of its weight.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

FORWARD, OF_INPUT, OF_WEIGHT = "forward", "input gradient", "weight gradient"
PARTS = (FORWARD, OF_INPUT, OF_WEIGHT)
_MATMULS = {"mm": 0, "bmm": 0, "addmm": 1}  # the place of the first factor
# A Tensor Core's instruction takes 8 numbers of 16 bits at once.
_FEW_CHANNELS = 8

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """How a convolution's weight goes over its images."""

    stride: Shape
    padding: Shape
    dilation: Shape
    groups: int


@dataclass(frozen=True)
class Product:
    """One convolution or matrix product; equal ones are the same work for a kernel.

    Attributes:
        name: "convolution", "mm" or "bmm".
        part: Of the step: one of `PARTS`.
        shapes: A convolution's images, weight and outputs, whichever of them the product makes; else both factors.
        window: Of a convolution; None else.
        is_transposed: Whether each factor lies in memory column by column; () of a convolution.
    """

    name: str
    part: str
    shapes: tuple[Shape, ...]
    window: Window | None = None
    is_transposed: tuple[bool, ...] = ()

    @property
    def flops(self) -> float:
        """Return its multiplications and additions."""
        if self.window is not None:
            _, weight, outputs = self.shapes
            return 2.0 * math.prod(outputs) * math.prod(weight[1:])
        return 2.0 * math.prod(self.shapes[0]) * self.shapes[1][-1]

    @property
    def elements(self) -> float:
        """Return the numbers that it reads and writes, each once."""
        result = () if self.window is not None else ((*self.shapes[0][:-1], self.shapes[1][-1]),)
        return float(sum(math.prod(shape) for shape in (*self.shapes, *result)))

    @property
    def has_few_channels(self) -> bool:
        """Return whether a convolution has too few channels a group for Tensor Cores: depthwise, or of pictures."""
        return self.window is not None and self.shapes[1][1] < _FEW_CHANNELS

    @property
    def label(self) -> str:
        """Return it in words: "3×3, 64 → 128 channels, 256×56×56, stride 2"."""
        if self.window is None:
            return " by ".join(_times(shape) for shape in self.shapes)
        (batch, channels, *sides), (filters, _, *kernel), _ = self.shapes
        said = f"{_times(kernel)}, {channels} → {filters} channels, {_times((batch, *sides))}"
        if any(stride != 1 for stride in self.window.stride):
            said += f", stride {_times(tuple(dict.fromkeys(self.window.stride)))}"
        if self.window.groups > 1:
            said += ", depthwise" if self.window.groups == channels else f", {self.window.groups} groups"
        return said

    def as_matmul(self) -> "Product | None":
        """Return the matrix product that a convolution of single pixels is in channels-last; None of any other.

        Images are of shape (pixels, channels), the weight (filters, channels), outputs (pixels, filters).
        """
        window = self.window
        if window is None or window.groups > 1 or any(window.padding) or any(side > 1 for side in window.stride):
            return None
        (batch, channels, *sides), (filters, _, *kernel), _ = self.shapes
        if any(side > 1 for side in kernel):
            return None
        pixels = batch * math.prod(sides)
        factors: dict[str, tuple[tuple[Shape, Shape], tuple[bool, bool]]] = {
            FORWARD: (((pixels, channels), (channels, filters)), (False, True)),
            OF_INPUT: (((pixels, filters), (filters, channels)), (False, False)),
            OF_WEIGHT: (((filters, pixels), (pixels, channels)), (True, False)),
        }
        shapes, is_transposed = factors[self.part]
        return Product("mm", self.part, shapes, is_transposed=is_transposed)


def products_of(name: str, args: Sequence[Any], out: Any, is_backward: bool) -> Iterator[Product]:
    """Yield the products of one of torch's operations.

    Args:
        name: The operation's.
        args: What it took.
        out: What it gave.
        is_backward: Whether it belongs to the backward pass.
    """
    if name == "convolution":
        yield _convolution(FORWARD, args[0], args[1], out, args[3:])
    elif name == "convolution_backward":
        gradient, images, weight = args[:3]
        for part, result in zip((OF_INPUT, OF_WEIGHT), out[:2], strict=True):
            if result is not None:
                yield _convolution(part, images, weight, gradient, args[4:])
    elif name in _MATMULS:
        left, right = args[_MATMULS[name] :][:2]
        is_transposed = (_is_transposed(left), _is_transposed(right))
        # torch takes a weight's gradient as the transposed gradient of the outputs times the inputs.
        backward = OF_WEIGHT if is_transposed[0] else OF_INPUT
        part = backward if is_backward else FORWARD
        shapes = (tuple(left.shape), tuple(right.shape))
        yield Product("bmm" if name == "bmm" else "mm", part, shapes, is_transposed=is_transposed)


def _convolution(part: str, images: Any, weight: Any, outputs: Any, settings: Sequence[Any]) -> Product:
    stride, padding, dilation, is_transposed, _, groups = settings[:6]
    assert not is_transposed, "no workload has transposed convolutions"
    sides = images.dim() - 2
    window = Window(_each(stride, sides), _each(padding, sides), _each(dilation, sides), groups)
    return Product("convolution", part, (tuple(images.shape), tuple(weight.shape), tuple(outputs.shape)), window)


def _each(values: Sequence[int], sides: int) -> Shape:
    return tuple(values) * (sides if len(values) == 1 else 1)


def _is_transposed(factor: Any) -> bool:
    rows, columns = factor.stride()[-2:]
    return bool(rows < columns)


def _times(values: Sequence[int]) -> str:
    return "×".join(map(str, values))
