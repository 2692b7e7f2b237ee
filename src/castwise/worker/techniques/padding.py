"""Models padded with zeros to sizes that Tensor Cores take; what they compute stays the same."""

from collections.abc import Callable

import torch
from torch import nn

from castwise.errors import TechniqueError

# The bias of a word that is not one: its probability is 0 in every precision, and it is a number in float16.
_NEVER = -1e4
# Rows of 8 numbers of 16 bits are 16 bytes, what Tensor Cores' kernels read at a time.
_ALIGNED = 8


def pad_first_conv(model: nn.Module, num_channels: int) -> None:
    """Give the convolution that reads the images more input channels; their weights are 0, and stay so.

    The other channels of the images are 0 too (`batch_layout`), so that outputs and the other weights' gradients
    are the same as before.

    Raises:
        TechniqueError: The model begins with no ordinary convolution, or has as many channels already.
    """
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    # A kind of convolution that computes with its weights' deviation would see the zeros.
    if first is None or type(first) is not nn.Conv2d or first.groups != 1:
        raise TechniqueError(f"pad-channels-{num_channels} finds no ordinary convolution at the model's beginning.")
    missing = num_channels - first.in_channels
    if missing <= 0:
        raise TechniqueError(f"pad-channels-{num_channels} finds images of {first.in_channels} channels already.")
    wider = nn.functional.pad(first.weight.detach(), (0, 0, 0, 0, 0, missing))
    first.weight = nn.Parameter(wider, requires_grad=first.weight.requires_grad)
    first.in_channels = num_channels


def pad_hidden(model: nn.Module, multiple: int) -> None:
    """Make a recurrent language model's embedding and state as wide as a multiple; further units are 0, and stay so.

    A further unit's weights and biases are 0, so that its state is: an LSTM's new cell value is tanh(0), a GRU's and an
    RNN's too. Nothing reads it but by weights of 0, and its gradient is 0. Outputs and the other weights' gradients are
    the same as before.

    Raises:
        TechniqueError: The model is no such model, or its width is a multiple of 8 already, which kernels take.
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


def pad_decoder(model: nn.Module, multiple: int) -> None:
    """Give a language model's decoder words that never come, up to a multiple.

    Their weights are 0 and their bias is so low that their probability, and with it every gradient of theirs, is 0: the
    loss and the other words' gradients are the same as before.

    Raises:
        TechniqueError: The model has no linear decoder, or its number of words is such a multiple.
    """
    decoder = getattr(model, "decoder", None)
    if not isinstance(decoder, nn.Linear):
        raise TechniqueError("pad-vocabulary finds no linear decoder in this model.")
    missing = -decoder.out_features % multiple
    if not missing:
        raise TechniqueError(f"pad-vocabulary finds {decoder.out_features:,} words, a multiple of {multiple} already.")
    with torch.no_grad():
        decoder.weight = nn.Parameter(nn.functional.pad(decoder.weight, (0, 0, 0, missing)))
        decoder.bias = nn.Parameter(nn.functional.pad(decoder.bias, (0, missing), value=_NEVER))
    decoder.out_features += missing
