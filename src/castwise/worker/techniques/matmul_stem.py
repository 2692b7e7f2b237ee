"""A first convolution over few channels as one matrix product over its windows.

With 1 or 3 channels and windows of 3 by 3, a window is 9 or 27 numbers: convolution kernels, made for tens of channels,
spend their time on bringing such images into their layout. Written out, the windows are small beside the output; its
layout is channels last, and the images need no gradient, so that backward is one product, too.
"""

from torch import Tensor, nn

from castwise.errors import TechniqueError
from castwise.worker.techniques.first_conv import find_stem, take_place

# What products on Tensor Cores read at a time, in numbers of 16 bits.
_ALIGNED = 8
# A longer window would be many times its image.
_MOST_NUMBERS = 64


class MatmulConv(nn.Conv2d):
    """A convolution of stride 1 as the product of its windows with its weights, which stay as they are."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as nn.Conv2d names it
        """Return the convolution of images, with channels innermost.

        Args:
            input: Shape (N, C, H, W); a single image, of shape (C, H, W), is torch's.
        """
        if input.dim() == 3:
            return super().forward(input)
        down, across = self.kernel_size[0], self.kernel_size[1]
        above, left = int(self.padding[0]), int(self.padding[1])
        windows = nn.functional.pad(input, (left, left, above, above)).unfold(2, down, 1).unfold(3, across, 1)
        count, _, height, width = windows.shape[:4]
        missing = -self.in_channels * down * across % _ALIGNED
        rows = windows.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(0, 2)
        rows = nn.functional.pad(rows, (0, missing))
        weight = nn.functional.pad(self.weight.flatten(1), (0, missing))
        out = nn.functional.linear(rows, weight, self.bias)
        return out.view(count, height, width, self.out_channels).permute(0, 3, 1, 2)


def use_matmul_stem(model: nn.Module) -> None:
    """Compute a model's first convolution as a matrix product.

    Raises:
        TechniqueError: It is no ordinary one of stride 1 with short windows.
    """
    name, first = find_stem(model)
    if first is None or not _is_short(first):
        raise TechniqueError(
            "matmul-stem finds no ordinary convolution of stride 1 with windows of at most "
            f"{_MOST_NUMBERS} numbers at the model's beginning."
        )
    take_place(model, name, first, MatmulConv)


def _is_short(conv: nn.Conv2d) -> bool:
    strides = conv.stride == (1, 1) and conv.dilation == (1, 1)
    return strides and conv.weight[0].numel() <= _MOST_NUMBERS
