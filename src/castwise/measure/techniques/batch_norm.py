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


class Before(NamedTuple):
    """What is done to images before they are normalised, in this order.

    Attributes:
        shift: Shape (C,), added; None adds nothing.
        dropped: The probability of dropping a number out; 0 drops nothing.
        seed: Of the draws, shape (1,), int64; None drops nothing.
        layer: Whose draws they are.
        addend: Of the images' shape, added; None adds nothing.
    """

    shift: Tensor | None = None
    dropped: float = 0.0
    seed: Tensor | None = None
    layer: int = 0
    addend: Tensor | None = None

    def compute(self, images: Tensor) -> Tensor:
        """Return what is to be normalised, by torch's own operations."""
        if self.shift is not None:
            images = images + self.shift.to(images.dtype)[:, None, None]
        images = nn.functional.dropout(images, self.dropped)
        return images if self.addend is None else images + self.addend


class After(NamedTuple):
    """What is done to normalised images, in this order.

    Attributes:
        residual: Of the images' shape, added; None adds nothing.
        carrier: What the residual's gradient goes to; None is the residual.
        activation: `NO_ACTIVATION`, `RELU` or `SILU`.
        is_forked: Whether a carrier of the result is wanted.
    """

    residual: Tensor | None = None
    carrier: Tensor | None = None
    activation: int = NO_ACTIVATION
    is_forked: bool = False

    def compute(self, images: Tensor) -> Tensor:
        """Return what comes of it, by torch's own operations."""
        return _COMPUTED[self.activation](images if self.residual is None else images + self.residual)


class Normed(NamedTuple):
    """What a batch norm that is told what is beside it gives.

    Attributes:
        out: The result.
        mean: Of what was normalised, shape (C,); None where torch has moved the running statistics itself.
        variance: The same, unbiased.
        total: What was normalised, where anything was done before; of no elements else.
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
        before: tuple[Any, ...] | None = None,
        after: tuple[Any, ...] | None = None,
    ) -> Any:
        """Return the normalised images; told what is beside it, `Normed`.

        The running statistics are left to `RunningStatistics` then.

        Args:
            input: Shape (N, C, H, W).
            before: `Before`'s fields; None is not told.
            after: `After`'s.
        """
        if before is None or after is None:
            return super().forward(input)
        first, then = Before(*before), After(*after)
        if not (self.training and _is_for_kernels(input, first.addend, then.residual)):
            total = first.compute(input)
            return Normed(then.compute(super().forward(total)), None, None, total, None)
        from castwise.measure.techniques.batch_norm_ops import batch_norm

        residual, carrier = then.residual, then.carrier
        known = residual.detach() if residual is not None and carrier is not None else residual
        out, own, total, mean, variance, _ = batch_norm(
            input, first.shift, first.seed, first.layer, round(first.dropped * 65536), first.addend, known, carrier,
            self.weight, self.bias, self.eps, then.activation, then.is_forked,
        )  # fmt: skip
        if first.shift is not None and total.numel() == 0:
            mean = mean + first.shift.detach()
        return Normed(out, mean, variance, total, own if then.is_forked else None)


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


class DropoutSeed(nn.Module):
    """Draws the seed of a step's dropout."""

    def forward(self, images: Tensor) -> Tensor:
        """Return it, shape (1,), int64, on the images' device."""
        return torch.randint(2**62, (1,), device=images.device)


class BiasBesideConv2d(nn.Conv2d):
    """A convolution that can leave the addition of its bias to others."""

    def forward(self, input: Tensor, is_beside: bool = False) -> Any:  # noqa: A002
        """Return its result; told to, one without the bias, and the bias.

        Args:
            input: Shape (N, C, H, W).
            is_beside: Whether it is told to.
        """
        return (self._conv_forward(input, self.weight, None), self.bias) if is_beside else super().forward(input)
