"""Models changed in shape, so that what they compute stays and what computes it is faster."""

import torch
from torch import nn

from castwise.errors import UsageError
from castwise.measure.techniques.loop import Loop
from castwise.measure.workloads.task import Task

# The bias of a word that is not one: its probability is 0 in every precision, and it is a number in float16.
_NEVER = -1e4


def change_model(task: Task, loop: Loop) -> None:
    """Change a task's model in place as a loop wants it; in float32, on the CPU, its weights loaded.

    Raises:
        UsageError: The model is not one that can be changed so.
    """
    if loop.num_channels is not None:
        widen_first_convolution(task.model, loop.num_channels)
    if loop.vocabulary_multiple > 1:
        pad_decoder(task.model, loop.vocabulary_multiple)
    if loop.loss_chunks > 1:
        if task.chunk_loss is None:
            raise UsageError("chunked-loss is for language models, and this is none.")
        task.chunk_loss(loop.loss_chunks)


def widen_first_convolution(model: nn.Module, num_channels: int) -> None:
    """Give the convolution that reads the images more input channels; their weights are 0, and stay so.

    The images' further channels are 0 too (`batches.preparation`), so that outputs and the other weights' gradients are
    the same as before.

    Raises:
        UsageError: The model begins with no ordinary convolution, or has as many channels already.
    """
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    # A kind of convolution that computes with its weights' deviation would see the zeros.
    if first is None or type(first) is not nn.Conv2d or first.groups != 1:
        raise UsageError(f"pad-channels-{num_channels} finds no ordinary convolution at the model's beginning.")
    missing = num_channels - first.in_channels
    if missing <= 0:
        raise UsageError(f"pad-channels-{num_channels} finds images of {first.in_channels} channels already.")
    wider = nn.functional.pad(first.weight.detach(), (0, 0, 0, 0, 0, missing))
    first.weight = nn.Parameter(wider, requires_grad=first.weight.requires_grad)
    first.in_channels = num_channels


def pad_decoder(model: nn.Module, multiple: int) -> None:
    """Give a language model's decoder words that never come, up to a multiple.

    Their weights are 0 and their bias is so low that their probability, and with it every gradient of theirs, is 0: the
    loss and the other words' gradients are the same as before.

    Raises:
        UsageError: The model has no linear decoder, or its number of words is such a multiple.
    """
    decoder = getattr(model, "decoder", None)
    if not isinstance(decoder, nn.Linear):
        raise UsageError("pad-vocabulary finds no linear decoder in this model.")
    missing = -decoder.out_features % multiple
    if not missing:
        raise UsageError(f"pad-vocabulary finds {decoder.out_features:,} words, a multiple of {multiple} already.")
    with torch.no_grad():
        decoder.weight = nn.Parameter(nn.functional.pad(decoder.weight, (0, 0, 0, missing)))
        decoder.bias = nn.Parameter(nn.functional.pad(decoder.bias, (0, missing), value=_NEVER))
    decoder.out_features += missing
