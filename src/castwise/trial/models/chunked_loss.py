"""The cross entropy of a linear decoder, for some words of the batch at a time: the logits are never all in memory."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

NO_TARGET = -100  # that cross entropy leaves out


def chunked_loss(x: Tensor, decoder: nn.Linear, targets: Tensor, num_chunks: int) -> Tensor:
    """Return the mean cross entropy of a decoder's logits, a float32 scalar, computed in so many parts.

    Forward computes the gradients, too, so that no product is computed twice. They can be used once.

    Args:
        x: What the decoder takes, of shape (..., width).
        decoder: The last layer; if it has `num_words`, only so many of its outputs are words.
        targets: int64, of x's shape without the width; -100 is left out.
        num_chunks: The number of parts.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    x, targets = x.flatten(0, -2), targets.flatten()
    num_words = getattr(decoder, "num_words", decoder.out_features)
    loss: Tensor = _SummedLoss.apply(x, decoder.weight, decoder.bias, targets, num_words, num_chunks)
    return loss / (targets != NO_TARGET).sum()


class _SummedLoss(torch.autograd.Function):
    """Cross entropy summed over the targets, with its gradients. The division comes after: float16 would lose them.

    torch.nn.functional.linear_cross_entropy of newer versions of torch does so, too.
    Source: Hsu et al. 2024, Liger Kernel (fused linear cross entropy).
    """

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917  tensors are to be arguments of their own
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, num_words: int, num_chunks: int
    ) -> Tensor:
        low, low_bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        loss = torch.zeros((), device=x.device)
        grads_x = []
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for part, target in zip(x.chunk(num_chunks), targets.chunk(num_chunks), strict=True):
            losses, grad = _cross_entropy(functional.linear(part, low, low_bias), target, num_words)
            loss = loss + losses.sum()
            grads_x.append(grad @ low)
            grad_weight += grad.T @ part
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0, dtype=torch.float32)
        ctx.save_for_backward(torch.cat(grads_x), grad_weight, grad_bias)
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight, grad_bias = ctx.saved_tensors
        # Of one dimension, float32 is kept: a scalar would be rounded to the other factor's 16 bits.
        grad_x = (grad_x * grad_loss.view(1)).to(grad_x.dtype)
        # In place: autograd raises if they are used again.
        grad_weight = grad_weight.mul_(grad_loss).to(ctx.dtype)
        grad_bias = None if grad_bias is None else grad_bias.mul_(grad_loss).to(ctx.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def _cross_entropy(logits: Tensor, targets: Tensor, num_words: int) -> tuple[Tensor, Tensor]:
    """Return each row's loss and the gradient of their sum: a kernel writes it in place of the logits."""
    if logits.is_cuda:
        from castwise.trial.kernels.cross_entropy import cross_entropy_

        return cross_entropy_(logits, targets, num_words), logits
    log_shares = functional.log_softmax(logits[:, :num_words].float(), dim=1)
    losses = functional.nll_loss(log_shares, targets, ignore_index=NO_TARGET, reduction="none")
    shares = functional.pad(log_shares.exp(), (0, logits.shape[1] - num_words))
    is_word = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return losses, ((shares - is_word.float()) * (targets != NO_TARGET)[:, None]).to(logits.dtype)
