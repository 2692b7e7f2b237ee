"""Dual path network 92, in its variant for 32² images."""

import torch
from torch import Tensor, nn
from torch.nn import functional

_NUM_CLASSES = 10
_STEM_CHANNELS = 64
_CONV_GROUPS = 32
# One row a stage: channels inside a block, channels of the residual path, blocks, channels that each block
# adds to the dense path, stride of the first block.
_DPN92_STAGES = ((96, 256, 3, 16, 1), (192, 512, 4, 32, 2), (384, 1024, 20, 24, 2), (768, 2048, 3, 128, 2))


class DualPathBlock(nn.Module):
    """1x1, grouped 3x3 and 1x1 convolutions; the first channels are added to the input, the last appended."""

    def __init__(
        self, in_channels: int, channels: int, residual: int, dense: int, *, stride: int = 1, first: bool = False
    ) -> None:
        """Build one block with `residual` channels that are added and `dense` channels that are appended.

        The shortcut of a stage's first block is a 1x1 convolution; the stride is its and the 3x3 convolution's.
        """
        super().__init__()
        self.residual = residual
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, groups=_CONV_GROUPS, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, residual + dense, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(residual + dense)
        self.shortcut: nn.Module = nn.Identity()
        if first:
            projection = nn.Conv2d(in_channels, residual + dense, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(residual + dense))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, with `dense` channels more than its shortcut has."""
        out = functional.relu(self.bn1(self.conv1(x)))
        out = functional.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        x = self.shortcut(x)
        split = self.residual
        added = x[:, :split] + out[:, :split]
        return functional.relu(torch.cat([added, x[:, split:], out[:, split:]], dim=1))


class DualPathNetwork(nn.Module):
    """DPN-92 with a 3x3 stem of stride 1 and no pooling before the stages.

    Source: kuangliu/pytorch-cifar models/dpn.py at 34075118 (`DPN92`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, _STEM_CHANNELS, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(_STEM_CHANNELS)
        blocks: list[nn.Module] = []
        width = _STEM_CHANNELS
        for channels, residual, num_blocks, dense, stride in _DPN92_STAGES:
            blocks.append(DualPathBlock(width, channels, residual, dense, stride=stride, first=True))
            width = residual + 2 * dense
            for _ in range(num_blocks - 1):
                blocks.append(DualPathBlock(width, channels, residual, dense))
                width += dense
        self.blocks = nn.Sequential(*blocks)
        self.linear = nn.Linear(width, _NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, shape (batch, 10), of images, shape (batch, 3, 32, 32)."""
        x = self.blocks(functional.relu(self.bn1(self.conv1(images))))
        logits: Tensor = self.linear(functional.avg_pool2d(x, 4).flatten(1))
        return logits
