"""Transformers as published: GPT-2, Llama 3, BERT and ViT, of linear layers and torch's own attention."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from castwise.apply.pytree import Batch
from castwise.errors import DataError
from castwise.registry.workloads import Workload
from castwise.trial.data.wikitext import load_tokens
from castwise.trial.models.chunked_loss import NO_TARGET, chunked_loss
from castwise.trial.models.task import Task
from castwise.trial.models.torchvision_timm import image_task

_CLASSES, _PATCH = 1000, 16
_MASKED = 0.15  # of BERT's tokens are predicted. Source: Devlin et al. 2018
# The frequency of a word of rank r is about 1 / (r + 2.7). Source: Mandelbrot 1953, of natural text.
_ZIPF_SHIFT = 2.7
_HIDDEN = 0  # the token in the place of those to predict
_MULTIPLE = 64  # of rows, for Tensor Cores


@dataclass(frozen=True)
class Architecture:
    """What tells the models apart.

    Sources: Radford et al. 2019 and openai/gpt-2; meta-llama/Llama-3.2-1B; google-research/bert; Dosovitskiy et al.
    2021 (ViT-B/16).
    """

    kind: str  # "gpt2", "llama", "bert" or "vit"
    width: int
    depth: int
    heads: int
    length: int  # tokens of a sequence; of an image its patches and one for the class
    vocabulary: int = 0
    key_heads: int = 0  # groups of heads that share keys and values; 0: none do
    hidden: int = 0  # width of the feed-forward layers; 0: 4 times the model's
    positions: int = 0  # that are learned, if more than the sequence has tokens

    @property
    def is_causal(self) -> bool:
        """Return whether a token sees only those before it."""
        return self.kind in ("gpt2", "llama")


class Attention(nn.Module):
    """Self-attention, of Llama with rotated queries and keys, and keys and values that several heads share."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.is_causal, self.heads, self.key_heads = arch.is_causal, arch.heads, arch.key_heads or arch.heads
        self.size = arch.width // arch.heads
        has_bias = arch.kind != "llama"
        self.qkv = nn.Linear(arch.width, (self.heads + 2 * self.key_heads) * self.size, bias=has_bias)
        self.out = nn.Linear(arch.width, arch.width, bias=has_bias)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        """Return a tensor of x's shape (batch, length, width); for `rotation` see `rotation_of`."""
        # Split, rotated and only then transposed: no pass over memory for another layout.
        widths = [count * self.size for count in (self.heads, self.key_heads, self.key_heads)]
        query, key, value = (part.unflatten(-1, (-1, self.size)) for part in self.qkv(x).split(widths, dim=-1))
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        y = functional.scaled_dot_product_attention(
            query, key, value, is_causal=self.is_causal, enable_gqa=self.key_heads != self.heads
        )
        return cast(Tensor, self.out(y.transpose(1, 2).flatten(2)))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair of x's channels, half the head apart, by its token's angle. Source: Su et al. 2021."""
    cosine, sine = rotation.to(x.dtype)
    half, other = x.chunk(2, dim=-1)
    return torch.cat((half * cosine - other * sine, other * cosine + half * sine), dim=-1)


def rotation_of(length: int, size: int) -> Tensor:
    """Return cosines and sines of Llama 3's angles for heads of so many channels, shape (2, length, 1, size / 2)."""
    rates = 500_000.0 ** -(torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(length).float(), rates).unsqueeze(1)
    return torch.stack((angles.cos(), angles.sin()))


class GatedLinear(nn.Module):
    """Llama's feed-forward layers: SwiGLU without biases. Source: Shazeer 2020."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return cast(Tensor, self.down(functional.silu(gate) * value))


class Block(nn.Module):
    """Attention and feed-forward layers, each added to its input; BERT normalizes after the sum, the others before."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.norms_sum = arch.kind == "bert"
        self.norm1, self.norm2 = norm_of(arch), norm_of(arch)
        self.attention = Attention(arch)
        hidden = arch.hidden or 4 * arch.width
        gelu = nn.GELU("tanh" if arch.kind == "gpt2" else "none")
        self.mlp = (
            GatedLinear(arch.width, hidden)
            if arch.kind == "llama"
            else nn.Sequential(nn.Linear(arch.width, hidden), gelu, nn.Linear(hidden, arch.width))
        )
        self.drop = nn.Dropout(0.1 if arch.kind == "bert" else 0.0)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        """Return a tensor of x's shape (batch, length, width)."""
        if self.norms_sum:
            x = self.norm1(x + self.drop(self.attention(x, rotation)))
            return cast(Tensor, self.norm2(x + self.drop(self.mlp(x))))
        x = x + self.attention(self.norm1(x), rotation)
        return cast(Tensor, x + self.mlp(self.norm2(x)))


def norm_of(arch: Architecture) -> nn.Module:
    if arch.kind == "llama":
        return nn.RMSNorm(arch.width, eps=1e-5)
    return nn.LayerNorm(arch.width, eps={"bert": 1e-12, "vit": 1e-6}.get(arch.kind, 1e-5))


class Transformer(nn.Module):
    """A transformer that predicts tokens, or the class of images."""

    takes_infinite_logits = True  # its loss is the cross entropy

    def __init__(self, arch: Architecture) -> None:
        """Build the model with random weights of standard deviation 0.02."""
        super().__init__()
        self.kind, width = arch.kind, arch.width
        if arch.kind == "vit":
            self.patches = nn.Conv2d(3, width, _PATCH, stride=_PATCH)
            self.cls = nn.Parameter(torch.zeros(1, 1, width))
        else:
            self.tokens = nn.Embedding(arch.vocabulary, width)
        if arch.kind == "llama":
            self.rotation: Tensor
            self.register_buffer("rotation", rotation_of(arch.length, width // arch.heads), persistent=False)
        else:
            self.positions = nn.Parameter(torch.zeros(arch.positions or arch.length, width))
        self.blocks = nn.ModuleList(Block(arch) for _ in range(arch.depth))
        if arch.kind == "bert":  # two kinds of sentences, of which one is used
            self.segments = nn.Embedding(2, width)
            self.drop, self.dense = nn.Dropout(0.1), nn.Linear(width, width)
            self.predict_norm = norm_of(arch)
        self.norm = norm_of(arch)
        self.head = nn.Linear(width, arch.vocabulary or _CLASSES, bias=arch.kind in ("bert", "vit"))
        self.apply(_initialize)
        if arch.kind != "vit":
            self.head.weight = self.tokens.weight

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, num_chunks: int = 1, *, is_sparse: bool = False
    ) -> Tensor:
        """Return logits: (batch, length, vocabulary) of tokens (batch, length), (batch, classes) of images.

        With targets, of the tokens' shape, return their mean cross entropy, computed in so many parts; if it is sparse,
        the decoder runs on tokens with a target alone.
        """
        if self.kind == "vit":
            patches = self.patches(inputs).flatten(2).transpose(1, 2)
            x = torch.cat((self.cls.expand(len(inputs), -1, -1), patches), dim=1)
        else:
            x = self.tokens(inputs)
        if self.kind != "llama":
            x = x + self.positions[: x.shape[1]]
        if self.kind == "bert":
            x = self.drop(self.norm(x + self.segments(torch.zeros_like(inputs))))
        rotation = self.rotation[:, : x.shape[1]] if self.kind == "llama" else None
        for block in self.blocks:
            x = block(x, rotation)
        if is_sparse and targets is not None:
            x, targets = gather_targets(x, targets)
        x = self.predict_norm(functional.gelu(self.dense(x))) if self.kind == "bert" else self.norm(x)
        if targets is not None and num_chunks > 1:
            return chunked_loss(x, self.head, targets, num_chunks)
        logits = cast(Tensor, self.head(x[:, 0] if self.kind == "vit" else x))
        return logits if targets is None else mean_loss(logits, targets)


def gather_targets(x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of x, of shape (batch, length, width), whose tokens have a target, and their targets.

    There is room for a number of them that random masks never exceed: shapes stay the same. If more have a target, the
    rows are not numbers. Source: google-research/bert, run_pretraining.py, `gather_indexes`.
    """
    targets, count = targets.flatten(), targets.numel()
    room = min(count, math.ceil((_MASKED * count + 4 * math.sqrt(count)) / _MULTIPLE) * _MULTIPLE)
    has_none = targets == NO_TARGET
    first = has_none.to(torch.uint8).argsort(stable=True)[:room]
    rows = x.flatten(0, 1).index_select(0, first)
    return rows.masked_fill((~has_none).sum() > room, torch.nan), targets[first]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of logits of shape (..., vocabulary), a float32 scalar."""
    return functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build(row: Workload) -> Task:
    """Return the task of predicting the next of random tokens, hidden ones among them, or the class of images."""
    options: dict[str, Any] = dict(row.options)
    arch = Architecture(**options)
    model = Transformer(arch)
    if arch.kind == "vit":
        return image_task(model, row.input_shape, _CLASSES, draw=torch.randn)
    return Task(model, RandomTokens(arch), compute_loss, units_per_sample=arch.length, loss_with=compute_loss)


def text_task(task: Task, row: Workload, data_dir: Path) -> Task:
    """Return the task of predicting WikiText-2 instead."""
    arch = Architecture(**cast(dict[str, Any], dict(row.options)))
    text, note = load_tokens(data_dir, arch.vocabulary)
    return replace(task, make_batches=TextTokens(arch, text), notes=(note,) if note else ())


@dataclass(frozen=True)
class RandomTokens:
    """Random tokens in the frequencies of natural text, and what a model is to predict."""

    arch: Architecture

    def __call__(self, count: int, size: int, device: torch.device, generator: torch.Generator) -> Sequence[Batch]:
        """Return so many batches of a size: tokens and targets, each of shape (size, length)."""
        ranks = torch.arange(self.arch.vocabulary, device=device)
        weights, number = 1 / (ranks + _ZIPF_SHIFT), size * (self.arch.length + self.arch.is_causal)

        def draw() -> Batch:
            tokens = torch.multinomial(weights, number, replacement=True, generator=generator).view(size, -1)
            return to_batch(tokens, generator, is_causal=self.arch.is_causal)

        return [draw() for _ in range(count)]


@dataclass(frozen=True)
class TextTokens:
    """The tokens of a text, int64 of shape (tokens,), and what a model is to predict."""

    arch: Architecture
    text: Tensor

    def __call__(self, _: int, size: int, device: torch.device, generator: torch.Generator) -> Sequence[Batch]:
        """Return all full batches of the text's sequences, shuffled; they are as those of `RandomTokens`."""
        length, is_causal = self.arch.length, self.arch.is_causal
        count = (len(self.text) - is_causal) // length
        if count < size:
            raise DataError(
                f"The text has {count:,} sequences of {length:,} tokens, and a batch {size:,}. Make it less."
            )
        sequences = self.text.to(device).unfold(0, length + is_causal, length)
        order = torch.randperm(count, generator=generator, device=device)[: count // size * size]
        return [to_batch(sequences[part], generator, is_causal=is_causal) for part in torch.split(order, size)]


def to_batch(tokens: Tensor, generator: torch.Generator, *, is_causal: bool) -> Batch:
    """Return tokens of shape (size, length), and those to predict: the next ones, or those that are hidden."""
    if is_causal:
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    is_masked = torch.rand(tokens.shape, generator=generator, device=tokens.device) < _MASKED
    return tokens.masked_fill(is_masked, _HIDDEN), tokens.masked_fill(~is_masked, NO_TARGET)


def compute_loss(model: nn.Module, batch: Batch, num_chunks: int = 1, *, is_sparse: bool = False) -> Tensor:
    """Return the mean cross entropy of the tokens to predict, a float32 scalar; see `Transformer.forward`."""
    tokens, targets = batch
    if (num_chunks > 1 or is_sparse) and torch.is_grad_enabled():
        return cast(Tensor, model(tokens, targets, num_chunks, is_sparse=is_sparse))
    return mean_loss(model(tokens), targets)
