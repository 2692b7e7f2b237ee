"""Batch norm by kernels of castwise's own, with additions and the activation that are beside it in the same ones."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

NO_ACTIVATION = 0
RELU = 1
SILU = 2

_COMPUTED: dict[int, Callable[[Tensor], Tensor]] = {
    NO_ACTIVATION: lambda value: value,
    RELU: nn.functional.relu,
    SILU: nn.functional.silu,
}


class Normed(NamedTuple):
    """What a batch norm that is told what is beside it gives.

    Attributes:
        out: The result.
        mean: Of what was normalised, shape (C,); None where torch has moved the running statistics itself.
        variance: The same, unbiased.
        total: What was normalised, where something was added to the images before; of no elements else.
        carrier: Has the gradient that `out` gets from where it is a residual, if one was asked for; None where torch
            computed it.
    """

    out: Tensor
    mean: Tensor | None
    variance: Tensor | None
    total: Tensor
    carrier: Tensor | None


class KernelBatchNorm(nn.BatchNorm2d):
    """A batch norm that is told what is beside it, and does that too, by castwise's kernels."""

    def forward(
        self,
        input: Tensor,  # noqa: A002
        addend: Tensor | None = None,
        residual: Tensor | None = None,
        carrier: Tensor | None = None,
        activation: int | None = None,
        is_forked: bool = False,
    ) -> Any:
        """Return the normalised images; told what is beside it, `Normed`.

        The running statistics are left to `RunningStatistics` then.

        Args:
            input: Shape (N, C, H, W).
            addend: The same shape, added before normalising; None adds nothing.
            residual: The same, added after.
            carrier: What the residual's gradient goes to; None is the residual.
            activation: `NO_ACTIVATION`, `RELU` or `SILU`; None is not told.
            is_forked: Whether a carrier of the result is wanted.
        """
        if activation is None:
            return super().forward(input)
        if not (self.training and _is_for_kernels(input, addend, residual)):
            total = input if addend is None else input + addend
            value = super().forward(total)
            value = _COMPUTED[activation](value if residual is None else value + residual)
            return Normed(value, None, None, total, None)
        from castwise.measure.techniques.batch_norm_ops import batch_norm

        known = residual.detach() if residual is not None and carrier is not None else residual
        out, own, total, mean, variance, _ = batch_norm(
            input, addend, known, carrier, self.weight, self.bias, self.eps, activation, is_forked
        )
        return Normed(out, mean, variance, total, own if is_forked else None)


def _is_for_kernels(images: Tensor, *others: Tensor | None) -> bool:
    return images.device.type == "cuda" and all(
        each.shape == images.shape
        and each.dtype == images.dtype
        and each.is_contiguous(memory_format=torch.channels_last)
        for each in (images, *others)
        if each is not None
    )


class RunningStatistics(nn.Module):
    """Brings the running statistics of batch norms up to date, all at once."""

    def __init__(self, norms: Sequence[nn.BatchNorm2d]) -> None:
        """Remember whose they are, without making them its own.

        Args:
            norms: The batch norms, all with a momentum.
        """
        super().__init__()
        self.norms = tuple(norms)

    @torch.no_grad()
    def forward(self, means: Sequence[Tensor | None], variances: Sequence[Tensor | None]) -> None:
        """Move each norm's statistics by its momentum towards these; None where torch has done so.

        Args:
            means: Of a norm's images, of shape (C,), one for each norm.
            variances: The same, unbiased.
        """
        for momentum in dict.fromkeys(norm.momentum for norm in self.norms):
            own = [
                (norm, mean, variance)
                for norm, mean, variance in zip(self.norms, means, variances, strict=True)
                if norm.momentum == momentum and mean is not None and variance is not None
            ]
            if not own:
                continue
            running = [each for norm, _, _ in own for each in (norm.running_mean, norm.running_var)]
            now = [each.to(norm.running_mean.dtype) for norm, *both in own for each in both]  # type: ignore[union-attr]
            torch._foreach_lerp_(running, now, momentum)  # type: ignore[arg-type]
            torch._foreach_add_([norm.num_batches_tracked for norm, _, _ in own], 1)  # type: ignore[misc]
