"""Wide residual networks with dropout, for 32² images."""

from torch import Tensor, nn
from torch.nn import functional

_NUM_CLASSES = 10
_STEM_CHANNELS = 16
# The momentum of the last batch norm alone, in torch's sense: the running mean is nearly the last batch's.
_LAST_MOMENTUM = 0.9


class WideBlock(nn.Module):
    """Batch norm, ReLU, convolution, dropout; batch norm, ReLU, strided convolution; plus the input."""

    def __init__(self, in_channels: int, channels: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.dropout = nn.Dropout(dropout)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Conv2d(in_channels, channels, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, shape (batch, channels, side / stride, side / stride)."""
        out: Tensor = self.dropout(self.conv1(functional.relu(self.bn1(x))))
        out = self.conv2(functional.relu(self.bn2(out)))
        out += self.shortcut(x)
        return out


class WideResNet(nn.Module):
    """A wide residual network; every convolution has a bias, and weights have torch's own initialisation.

    Source: ceshine/apex_pytorch_cifar_experiment wide_resnet.py at 05e587d7 (meliketoy/wide-resnet.pytorch).
    """

    def __init__(self, depth: int, widen: int, dropout: float) -> None:
        """Build the network of 6n + 4 layers, n blocks in each of three stages, `widen` times as wide as a ResNet."""
        super().__init__()
        if depth % 6 != 4:
            raise ValueError(f"the depth of a wide ResNet must be 6n + 4, not {depth}")
        num_blocks = depth // 6
        widths = [_STEM_CHANNELS, 16 * widen, 32 * widen, 64 * widen]
        self.conv1 = nn.Conv2d(3, widths[0], 3, padding=1)
        self.layer1 = _make_stage(widths[0], widths[1], num_blocks, 1, dropout)
        self.layer2 = _make_stage(widths[1], widths[2], num_blocks, 2, dropout)
        self.layer3 = _make_stage(widths[2], widths[3], num_blocks, 2, dropout)
        self.bn1 = nn.BatchNorm2d(widths[3], momentum=_LAST_MOMENTUM)
        self.linear = nn.Linear(widths[3], _NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, shape (batch, 10), of images, shape (batch, 3, 32, 32)."""
        x = self.layer3(self.layer2(self.layer1(self.conv1(images))))
        x = functional.avg_pool2d(functional.relu(self.bn1(x)), 8)
        logits: Tensor = self.linear(x.flatten(1))
        return logits


def _make_stage(in_channels: int, channels: int, num_blocks: int, stride: int, dropout: float) -> nn.Sequential:
    blocks = [WideBlock(in_channels, channels, stride, dropout)]
    blocks += [WideBlock(channels, channels, 1, dropout) for _ in range(num_blocks - 1)]
    return nn.Sequential(*blocks)
