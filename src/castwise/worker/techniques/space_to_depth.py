"""A first convolution of stride 2 that reads squares of 2 by 2 pixels as channels, and computes the same.

Images have 3 channels, and Tensor Cores take 8 or 16 at a time: most of such a convolution's time goes into zeros. With
4 pixels side by side as channels there are 12 (16 with zeros), and the kernel is half as large and of stride 1.

Source of the idea: MLPerf's ResNet submissions (MLPerf Training v0.6, Google's and NVIDIA's); the arithmetic is below.
"""

import torch
from torch import Tensor, nn

from castwise.errors import TechniqueError
from castwise.worker.techniques.first_conv import find_stem, take_place

_STRIDE = 2
_MOST_CHANNELS = 4
_CHANNEL_MULTIPLE = 16


class SpaceToDepthConv(nn.Conv2d):
    """A convolution of stride 2 by way of one of stride 1 over 2 by 2 pixels; its weight and bias stay as they are.

    Output row i reads input rows 2i + u - p for u in 0 … k - 1. With q = ⌈p / 2⌉ and u + 2q - p = 2a + r, r in {0, 1},
    that is row r of the pair of rows i + a - q: a kernel of ⌈(k + 2q - p) / 2⌉ pairs, begun q pairs before.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as nn.Conv2d names it
        """Return the convolution of images.

        Args:
            input: Shape (N, C, H, W); a single image, of shape (C, H, W), is torch's.
        """
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
        """Return the pairs to be added before and behind the image, and the zeros before and behind the kernel."""
        kernel, padding = self.kernel_size[axis], int(self.padding[axis])
        pairs_before = -(-padding // 2)
        before = 2 * pairs_before - padding
        taps = -(-(kernel + before) // 2)
        outputs = (size + 2 * padding - kernel) // _STRIDE + 1
        behind = outputs + taps - 1 - pairs_before - -(-size // 2)
        return pairs_before, behind, before, 2 * taps - kernel - before


def use_space_to_depth(model: nn.Module) -> None:
    """Compute a model's first convolution over 2 by 2 pixels.

    Raises:
        TechniqueError: It is no ordinary one of stride 2 over images.
    """
    name, first = find_stem(model)
    if first is None or not _is_strided(first):
        raise TechniqueError(
            "space-to-depth finds no ordinary convolution of stride 2 over images at the model's beginning."
        )
    take_place(model, name, first, SpaceToDepthConv)


def _is_strided(conv: nn.Conv2d) -> bool:
    strided = conv.stride == (_STRIDE, _STRIDE) and conv.dilation == (1, 1)
    return strided and conv.in_channels <= _MOST_CHANNELS
