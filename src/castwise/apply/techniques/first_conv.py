"""A model's first convolution (the stem), computed in another way: `space-to-depth` and `matmul-stem`.

It reads images of 3 channels, or 1, and Tensor Cores take 8 or 16 at a time. Convolution kernels, made for tens of
channels, spend most of their time on zeros and on converting the layout of the images.
"""

from typing import Any

import torch
from torch import Tensor, nn

from castwise.apply.techniques.blocks import has_hooks
from castwise.errors import TechniqueError

_STRIDE = 2
_MOST_CHANNELS = 4
_CHANNEL_MULTIPLE = 16
# Numbers of 16 bits that matrix products on Tensor Cores read at a time.
_ALIGNED = 8
# A longer window would be many times its image.
_MOST_NUMBERS = 64


def find_stem(model: nn.Module) -> tuple[str, nn.Conv2d | None]:
    """Return the name and the module of a model's first convolution; None for the module if it cannot be replaced.

    A subclass may compute something else, a convolution with groups has no channels to put together, and hooks would be
    lost with the module.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            is_plain = type(module) is nn.Conv2d and module.groups == 1 and module.dilation == (1, 1)
            is_padded_with_zeros = module.padding_mode == "zeros" and not isinstance(module.padding, str)
            return name, module if is_plain and is_padded_with_zeros and not has_hooks(module) else None
    return "", None


def replace_stem(model: nn.Module, name: str, conv: nn.Conv2d, kind: type[nn.Conv2d]) -> None:
    """Replace a convolution by one of another class with the same settings and the same weights."""
    arguments: dict[str, Any] = {"stride": conv.stride, "padding": conv.padding, "bias": conv.bias is not None}
    kernel = (conv.kernel_size[0], conv.kernel_size[1])
    made = kind(conv.in_channels, conv.out_channels, kernel, device="meta", **arguments)
    made.weight, made.bias = conv.weight, conv.bias
    model.set_submodule(name, made)


class SpaceToDepthConv(nn.Conv2d):
    """A convolution of stride 2, computed as one of stride 1 over blocks of 2 by 2 pixels; weight and bias stay.

    With 4 pixels as channels there are 12 (16 with zeros), and the kernel is half as large and of stride 1.

    Output row i reads input rows 2i + u - p for u in 0 … k - 1. With q = ⌈p / 2⌉ and u + 2q - p = 2a + r, r in {0, 1},
    that is row r of the pair of rows i + a - q: a kernel of ⌈(k + 2q - p) / 2⌉ pairs that begins q pairs before.

    Source of the idea: MLPerf's ResNet submissions (MLPerf Training v0.6, Google's and NVIDIA's).
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as nn.Conv2d names it
        """Return the convolution of images, shape (N, C, H, W); a single one, of shape (C, H, W), is torch's."""
        if input.dim() == 3:
            return super().forward(input)
        rows, columns = (self._of_side(axis, input.shape[2 + axis]) for axis in (0, 1))
        missing = -_STRIDE * _STRIDE * self.in_channels % _CHANNEL_MULTIPLE
        even = nn.functional.pad(input, (0, input.shape[3] % 2, 0, input.shape[2] % 2))
        pairs = nn.functional.pixel_unshuffle(even, _STRIDE)
        pairs = nn.functional.pad(pairs, (columns[0], columns[1], rows[0], rows[1], 0, missing))
        if input.is_contiguous(memory_format=torch.channels_last):
            pairs = pairs.contiguous(memory_format=torch.channels_last)
        weight = nn.functional.pad(self.weight, (columns[2], columns[3], rows[2], rows[3]))
        weight = nn.functional.pad(nn.functional.pixel_unshuffle(weight, _STRIDE), (0, 0, 0, 0, 0, missing))
        return nn.functional.conv2d(pairs, weight, self.bias)

    def _of_side(self, axis: int, size: int) -> tuple[int, int, int, int]:
        """Return the pairs to add before and after the image, and the zeros to add before and after the kernel."""
        kernel, padding = self.kernel_size[axis], int(self.padding[axis])
        pairs_before = -(-padding // 2)
        before = 2 * pairs_before - padding
        taps = -(-(kernel + before) // 2)
        outputs = (size + 2 * padding - kernel) // _STRIDE + 1
        behind = outputs + taps - 1 - pairs_before - -(-size // 2)
        return pairs_before, behind, before, 2 * taps - kernel - before


def use_space_to_depth(model: nn.Module) -> None:
    name, first = find_stem(model)
    if first is None or first.stride != (_STRIDE, _STRIDE) or first.in_channels > _MOST_CHANNELS:
        raise TechniqueError(
            "space-to-depth finds no ordinary convolution of stride 2 over images at the model's beginning."
        )
    replace_stem(model, name, first, SpaceToDepthConv)


class MatmulConv(nn.Conv2d):
    """A convolution as a matrix product of its windows and its weights, which stay as they are.

    Windows that are short, or lie side by side, take little memory compared with the output, whose layout is channels
    last. The images need no gradient, so backward is one product too.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as nn.Conv2d names it
        """Return the convolution, channels last, of images, shape (N, C, H, W); a single one is torch's."""
        if input.dim() == 3:
            return super().forward(input)
        down, across = self.kernel_size[0], self.kernel_size[1]
        above, left = int(self.padding[0]), int(self.padding[1])
        windows = nn.functional.pad(input, (left, left, above, above)).unfold(2, down, self.stride[0])
        windows = windows.unfold(3, across, self.stride[1])
        count, _, height, width = windows.shape[:4]
        missing = -self.in_channels * down * across % _ALIGNED
        rows = windows.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(0, 2)
        rows = nn.functional.pad(rows, (0, missing))
        weight = nn.functional.pad(self.weight.flatten(1), (0, missing))
        out = nn.functional.linear(rows, weight, self.bias)
        return out.view(count, height, width, self.out_channels).permute(0, 3, 1, 2)


def use_matmul_stem(model: nn.Module) -> None:
    name, first = find_stem(model)
    is_short = first is not None and first.stride == (1, 1) and first.weight[0].numel() <= _MOST_NUMBERS
    if first is None or not (is_short or first.stride == first.kernel_size):
        raise TechniqueError(
            "matmul-stem finds no ordinary convolution of stride 1 with windows of at most "
            f"{_MOST_NUMBERS} numbers, or of patches, at the model's beginning."
        )
    replace_stem(model, name, first, MatmulConv)
