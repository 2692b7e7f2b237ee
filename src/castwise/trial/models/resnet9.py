"""A residual network of nine layers that is made to be trained fast on 32² images."""

from torch import Tensor, nn

_NUM_CLASSES = 10
_WIDTHS = (64, 128, 256, 512)
_LOGIT_SCALE = 0.125


class ConvNormRelu(nn.Sequential):
    """A 3×3 convolution without bias, batch norm, ReLU."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__(
            nn.Conv2d(in_channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
        )


class ResidualPair(nn.Module):
    """Two convolutions, plus the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = ConvNormRelu(channels, channels)
        self.conv2 = ConvNormRelu(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the pair's output, of the input's shape (batch, channels, side, side)."""
        out: Tensor = x + self.conv2(self.conv1(x))
        return out


class ResNet9(nn.Module):
    """Four convolutions with poolings between them, a residual pair after the second and the last.

    Source: davidcpage/cifar10-fast dawn.py at 0be00c95.
    """

    def __init__(self) -> None:
        super().__init__()
        self.prep = ConvNormRelu(3, _WIDTHS[0])
        self.layer1 = nn.Sequential(ConvNormRelu(*_WIDTHS[:2]), nn.MaxPool2d(2), ResidualPair(_WIDTHS[1]))
        self.layer2 = nn.Sequential(ConvNormRelu(*_WIDTHS[1:3]), nn.MaxPool2d(2))
        self.layer3 = nn.Sequential(ConvNormRelu(*_WIDTHS[2:]), nn.MaxPool2d(2), ResidualPair(_WIDTHS[3]))
        self.pool = nn.MaxPool2d(4)
        self.linear = nn.Linear(_WIDTHS[3], _NUM_CLASSES, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, shape (batch, 10), of images, shape (batch, 3, 32, 32)."""
        x = self.pool(self.layer3(self.layer2(self.layer1(self.prep(images)))))
        logits: Tensor = self.linear(x.flatten(1)) * _LOGIT_SCALE
        return logits
