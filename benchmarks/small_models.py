"""Two small models as a user's own, for a CPU: `castwise run benchmarks/small_models.py:unet` and `:gpt`."""

import torch
from torch import nn
from torch.nn import functional


class UNet(nn.Module):
    """A U-Net of two levels for images of 64 by 64 pixels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = block(3, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return two scores for each pixel."""
        one = self.down1(x)
        two = self.down2(functional.max_pool2d(one, 2))
        y = self.middle(functional.max_pool2d(two, 2))
        y = self.up2(torch.cat([functional.interpolate(y, scale_factor=2), two], dim=1))
        y = self.up1(torch.cat([functional.interpolate(y, scale_factor=2), one], dim=1))
        return self.out(y)


def block(before: int, after: int) -> nn.Module:
    """Return two convolutions with batch normalisation."""
    layers = [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())


def unet() -> tuple[nn.Module, tuple[torch.Tensor, ...], nn.Module]:
    """Return the U-Net, random images with a class for each pixel, and a loss."""
    return UNet(), (torch.randn(8, 3, 64, 64), torch.randint(2, (8, 64, 64))), nn.CrossEntropyLoss()


class GPT(nn.Module):
    """A transformer of four layers of width 128 that predicts the next of 256 bytes."""

    def __init__(self, width: int = 128, length: int = 128) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next byte at each place, classes second."""
        x = self.layers(self.token(tokens) + self.place, mask=self.mask, is_causal=True)
        return self.head(x).transpose(1, 2)


def gpt() -> tuple[nn.Module, tuple[torch.Tensor, ...], nn.Module]:
    """Return the transformer, random bytes, and a loss."""
    bytes_ = torch.randint(256, (8, 129))
    return GPT(), (bytes_[:, :-1], bytes_[:, 1:]), nn.CrossEntropyLoss()
