"""Networks that Adam trains on a GPU in half a minute, to judge the precision of Adam's state and of the weights.

S=fp32,bf16,8-bit,4-bit
castwise accuracy benchmarks/adam_gpu.py:resnet9 --precision fp32,bf16-sr --optimizer-state $S --epochs 5
castwise accuracy benchmarks/adam_gpu.py:lstm --precision fp32,bf16-sr --optimizer-state $S --epochs 2
castwise accuracy benchmarks/adam_gpu.py:transformer --precision fp32,bf16-sr --optimizer-state $S --epochs 3
castwise accuracy benchmarks/adam_gpu.py:transformer --precision fp32,fp16-mixed --techniques fp16-accumulation
    --epochs 3

The data are CIFAR-10 in its binary layout, and WikiText-2 as train.txt and valid.txt. They stay on the GPU.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_FOLDER = Path(os.environ.get("CASTWISE_DATA", "~/.cache/castwise/data")).expanduser()
_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_IMAGES = 512  # in a batch
_EPOCHS = {"resnet9": 5, "lstm": 2, "transformer": 3}


class Batches:
    """Samples on the GPU, in another order each epoch; `prepare` changes a batch of inputs."""

    def __init__(self, inputs: Tensor, targets: Tensor, size: int, prepare: Callable[[Tensor], Tensor]) -> None:
        self._inputs, self._targets, self._size, self._prepare = inputs, targets, size, prepare

    def __len__(self) -> int:
        return len(self._inputs) // self._size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(len(self._inputs)).to(_DEVICE).split(self._size)[: len(self)]:
            yield self._prepare(self._inputs[chosen]), self._targets[chosen]


def _described(name: str, model: nn.Module, batches: Batches, learning_rate: float) -> dict[str, Any]:
    """Return what castwise asks for, but for the loss and the score."""

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, _EPOCHS[name] * len(batches) + 1)

    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    known = {"model": model, "batch": next(iter(batches)), "training_set": batches}
    return {**known, "optimizer": optimizer, "scheduler": scheduler}


def _cifar(part: str) -> tuple[Tensor, Tensor]:
    """Return normalised images and labels; a record is a byte of label and 3,072 of pixels."""
    files = sorted((_FOLDER / "cifar-10-batches-bin").glob(f"{part}*.bin"))
    raw = torch.cat([torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in files])
    records = raw.view(-1, 3073).to(_DEVICE)
    images = records[:, 1:].view(-1, 3, 32, 32).float() / 255
    return (images - images.mean((0, 2, 3), keepdim=True)) / 0.25, records[:, 0].long()


def _moved(images: Tensor) -> Tensor:
    """Return images that are mirrored by chance, each by itself, and shifted by up to 4 pixels, all alike."""
    mirrored = torch.rand(len(images)).lt(0.5).view(-1, 1, 1, 1).to(images.device)
    row, column = torch.randint(9, (2,)).tolist()
    return nn.functional.pad(torch.where(mirrored, images.flip(-1), images), (4,) * 4)[
        ..., row : row + 32, column : column + 32
    ]


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_block(channels, channels), _block(channels, channels))

    def forward(self, images: Tensor) -> Tensor:
        return images + self.body(images)


def _block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


def resnet9() -> dict[str, Any]:
    """Return the ResNet-9 that trains CIFAR-10 fast (6.6 million weights), and CIFAR-10."""
    images, labels = _cifar("test")
    pool = nn.MaxPool2d(2)
    first, second = [_block(3, 64), _block(64, 128), pool, _Residual(128)], [_block(128, 256), pool, _block(256, 512)]
    last = [pool, _Residual(512), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    model = nn.Sequential(*first, *second, *last)

    def validate(model: nn.Module) -> Tensor:
        right = [(model(x).argmax(1) == y).float() for x, y in zip(images.split(1000), labels.split(1000), strict=True)]
        return torch.cat(right).mean()

    batches = Batches(*_cifar("data_batch"), _IMAGES, _moved)
    judged = {"loss": nn.CrossEntropyLoss(label_smoothing=0.1), "validate": validate, "higher_is_better": True}
    return _described("resnet9", model, batches, 3e-3) | judged


def _language(name: str, model: nn.Module, train: Tensor, valid: Tensor, *, length: int, size: int) -> dict[str, Any]:
    """Return a language model and its data: sequences of so many tokens, whose successors are to be told."""

    def cut(tokens: Tensor) -> tuple[Tensor, Tensor]:
        count = (len(tokens) - 1) // length * length
        return tokens[:count].view(-1, length), tokens[1 : count + 1].view(-1, length)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def validate(model: nn.Module) -> Tensor:
        found = [loss(model(x), y) for x, y in zip(*(each.split(size)[:-1] for each in cut(valid)), strict=True)]
        return torch.stack(found).mean().exp()  # the perplexity

    batches = Batches(*cut(train), size, lambda tokens: tokens)
    return _described(name, model, batches, 2e-3) | {"loss": loss, "validate": validate, "higher_is_better": False}


def _texts() -> list[str]:
    return [(_FOLDER / "wikitext-2" / f"{part}.txt").read_text() for part in ("train", "valid")]


class _Lstm(nn.Module):
    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(num_tokens, 256), nn.LSTM(256, 256, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(256, num_tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.tokens(tokens))[0])  # type: ignore[no-any-return]


def lstm() -> dict[str, Any]:
    """Return an LSTM, and WikiText-2 in byte pairs: of all its words, runs of different seeds are too far apart."""
    return _language("lstm", _Lstm(4096), *_byte_pairs(), length=35, size=40)


class _Transformer(nn.Module):
    def __init__(self, num_tokens: int, width: int = 256, length: int = 128) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.tokens, self.places = nn.Embedding(num_tokens, width), nn.Parameter(torch.zeros(length, width))
        self.body, self.head = nn.TransformerEncoder(layer, 4), nn.Linear(width, num_tokens)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.tokens(tokens) + self.places
        return self.head(self.body(states, mask=self.mask, is_causal=True))  # type: ignore[no-any-return]


def _byte_pairs(size: int = 4096) -> tuple[Tensor, Tensor]:
    """Return WikiText-2 in byte pairs; they are found once, and kept in the folder for temporary files."""
    kept = Path(tempfile.gettempdir()) / f"wikitext-2-byte-pairs-{size}.pt"
    if not kept.exists():
        from tokenizers import ByteLevelBPETokenizer

        pairs = ByteLevelBPETokenizer()
        pairs.train(str(_FOLDER / "wikitext-2" / "train.txt"), vocab_size=size, show_progress=False)
        found = [
            torch.tensor([n for part in pairs.encode_batch(text.splitlines()) for n in part.ids]) for text in _texts()
        ]
        torch.save(found, part := kept.with_suffix(f".{os.getpid()}"))
        part.rename(kept)
    train, valid = torch.load(kept)
    return train.to(_DEVICE), valid.to(_DEVICE)


def transformer() -> dict[str, Any]:
    """Return four layers of width 256, and WikiText-2 in byte pairs."""
    return _language("transformer", _Transformer(4096), *_byte_pairs(), length=128, size=64)
