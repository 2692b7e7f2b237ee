"""Models padded with zeros to sizes that Tensor Cores take. The results stay the same."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from castwise.errors import TechniqueError

# 8 numbers of 16 bits are 16 bytes, which kernels for Tensor Cores read at a time.
_ALIGNED = 8


def pad_first_conv(model: nn.Module, num_channels: int) -> None:
    """Give the convolution that reads the images more input channels, whose weights are and stay 0.

    The additional channels of the images are 0 too (`batch_layout`): outputs and the gradients of the other weights do
    not change.
    """
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    # A subclass that computes with the deviation of its weights would see the zeros.
    if first is None or type(first) is not nn.Conv2d or first.groups != 1:
        raise TechniqueError(f"pad-channels-{num_channels} finds no ordinary convolution at the model's beginning.")
    missing = num_channels - first.in_channels
    if missing <= 0:
        raise TechniqueError(f"pad-channels-{num_channels} finds images of {first.in_channels} channels already.")
    wider = nn.functional.pad(first.weight.detach(), (0, 0, 0, 0, 0, missing))
    first.weight = nn.Parameter(wider, requires_grad=first.weight.requires_grad)
    first.in_channels = num_channels


def pad_hidden(model: nn.Module, multiple: int) -> None:
    """Widen a recurrent language model's embedding and state to a multiple; the additional units are and stay 0.

    The weights and biases of an additional unit are 0, and so is its state: the new cell value of an LSTM, a GRU and an
    RNN is tanh(0). It is read through weights of 0 only, so its gradient is 0. Outputs and the gradients of the other
    weights do not change.
    """
    encoder, rnn, decoder = (getattr(model, name, None) for name in ("encoder", "rnn", "decoder"))
    if not (isinstance(encoder, nn.Embedding) and isinstance(rnn, nn.RNNBase) and isinstance(decoder, nn.Linear)):
        raise TechniqueError("pad-hidden finds no embedding, recurrent layers and decoder in this model.")
    width = rnn.hidden_size
    if width % _ALIGNED == 0 or rnn.input_size != width:
        raise TechniqueError(f"pad-hidden finds a width of {width:,}, a multiple of {_ALIGNED} already.")
    missing = -width % multiple
    kind: Callable[..., nn.RNNBase] = type(rnn)
    arguments = {"num_layers": rnn.num_layers, "dropout": rnn.dropout, "batch_first": rnn.batch_first}
    wider = kind(width + missing, width + missing, **arguments)
    with torch.no_grad():
        for name, weight in rnn.named_parameters():
            gates = weight.reshape(-1, width, *weight.shape[1:])  # an LSTM has 4 in one tensor, a GRU 3
            sides = (0, missing) if weight.dim() == 1 else (0, missing, 0, missing)
            getattr(wider, name).copy_(nn.functional.pad(gates, sides).flatten(0, 1))
        encoder.weight = nn.Parameter(nn.functional.pad(encoder.weight, (0, missing)))
        decoder.weight = nn.Parameter(nn.functional.pad(decoder.weight, (0, missing)))
    encoder.embedding_dim += missing
    decoder.in_features += missing
    model.rnn = wider


class PaddedDecoder(nn.Linear):
    """A language model's last layer with words that never occur; their gradients are 0."""

    keeps_width = False  # whether those words are in the output, too

    def __init__(self, decoder: nn.Linear, missing: int) -> None:
        """Take a decoder's weights, and so many words more."""
        has_bias = decoder.bias is not None
        super().__init__(decoder.in_features, decoder.out_features + missing, bias=has_bias, device="meta")
        self.num_words = decoder.out_features
        with torch.no_grad():
            self.weight = nn.Parameter(nn.functional.pad(decoder.weight, (0, 0, 0, missing)))
            if has_bias:
                self.bias = nn.Parameter(nn.functional.pad(decoder.bias, (0, missing)))

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's own name
        return hide_words(super().forward(input), self)


def hide_words(logits: torch.Tensor, decoder: Any) -> torch.Tensor:
    """Return a padded decoder's logits without the words that never occur, or with a logit of -inf for them.

    A loss of compiled kernels reads rows of a multiple of 64 words about twice as fast.
    """
    if not decoder.keeps_width:
        return logits[..., : decoder.num_words]
    is_padding = torch.arange(logits.shape[-1], device=logits.device) >= decoder.num_words
    return logits.masked_fill(is_padding, -torch.inf)


def find_decoder(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """Return a language model's decoder: the last linear layer with as many outputs as an embedding has entries."""
    sizes = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    linear = [(name, module) for name, module in model.named_modules() if type(module) in (nn.Linear, PaddedDecoder)]
    return next(((name, layer) for name, layer in reversed(linear) if layer.out_features in sizes), None)


def pad_decoder(model: nn.Module, multiple: int) -> None:
    """Pad a language model's vocabulary to a multiple, with words that never occur: results do not change."""
    found = find_decoder(model)
    if found is None:
        raise TechniqueError("pad-vocabulary finds no linear decoder in this model.")
    name, decoder = found
    missing = -decoder.out_features % multiple
    if not missing:
        raise TechniqueError(f"pad-vocabulary finds {decoder.out_features:,} words, a multiple of {multiple} already.")
    padded = PaddedDecoder(decoder, missing)
    padded.keeps_width = getattr(model, "takes_infinite_logits", False)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight is decoder.weight:
            module.weight, module.num_embeddings = padded.weight, module.num_embeddings + missing
    model.set_submodule(name, padded)
