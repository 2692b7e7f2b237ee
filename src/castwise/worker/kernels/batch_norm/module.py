"""Batch norm by kernels of castwise's own, with additions and the activation that are beside it in the same ones."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

NO_ACTIVATION = 0
RELU = 1
SILU = 2
HARDSWISH = 3
BY_INPUT = (SILU, HARDSWISH)  # whose gradient the result does not tell

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # the kernels compute in float32
_MOST_ROWS = 2**30  # pixels of a batch: the kernels count them in 32 bits
_ODDS = 65_536  # of them the kernels drop a whole number out

_COMPUTED: dict[int, Callable[[Tensor], Tensor]] = {
    NO_ACTIVATION: lambda value: value,
    RELU: nn.functional.relu,
    SILU: nn.functional.silu,
    HARDSWISH: nn.functional.hardswish,
}


class Before(NamedTuple):
    """What is done to images before they are normalised, in this order.

    Attributes:
        shift: Shape (C,), added; None adds nothing.
        dropped: The probability of dropping a number out; 0 drops nothing.
        seed: Of the draws, shape (1,), int64; None drops nothing.
        layer: Whose draws they are.
        addend: Of the images' shape, added; None adds nothing.
        keeps_dtype: Whether the sum has the images' dtype, as one in place has.
    """

    shift: Tensor | None = None
    dropped: float = 0.0
    seed: Tensor | None = None
    layer: int = 0
    addend: Tensor | None = None
    keeps_dtype: bool = False

    @property
    def odds(self) -> int:
        """Return how many of 65,536 numbers are dropped out."""
        return round(self.dropped * _ODDS)

    def compute(self, images: Tensor) -> Tensor:
        """Return what is to be normalised, by torch's own operations."""
        if self.shift is not None:
            images = images + self.shift.to(images.dtype)[:, None, None]
        images = nn.functional.dropout(images, self.dropped)
        return _added(images, self.addend, keeps_dtype=self.keeps_dtype)


class After(NamedTuple):
    """What is done to normalised images, in this order.

    Attributes:
        residual: Of the images' shape, added; None adds nothing.
        carrier: What the residual's gradient goes to; None is the residual.
        activation: `NO_ACTIVATION`, `RELU`, or one of `BY_INPUT`.
        is_forked: Whether a carrier of the result is wanted.
        keeps_dtype: Whether the sum has the images' dtype, as one in place has.
    """

    residual: Tensor | None = None
    carrier: Tensor | None = None
    activation: int = NO_ACTIVATION
    is_forked: bool = False
    keeps_dtype: bool = False

    def compute(self, images: Tensor) -> Tensor:
        """Return what comes of it, by torch's own operations."""
        return _COMPUTED[self.activation](_added(images, self.residual, keeps_dtype=self.keeps_dtype))


def _added(images: Tensor, other: Tensor | None, *, keeps_dtype: bool) -> Tensor:
    total = images if other is None else images + other
    return total.to(images.dtype) if keeps_dtype else total


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
    """A batch norm that is told what is beside it, and does that too, by castwise's kernels.

    Attributes:
        plain: What it is in a model without them.
    """

    plain: ClassVar[type[nn.BatchNorm2d]] = nn.BatchNorm2d

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how it is copied and pickled: by its plain class, which a file can name."""
        return _made_of, (self.plain,), dict(vars(self))

    def forward(
        self,
        input: Tensor,  # noqa: A002
        before: tuple[Any, ...] | None = None,
        after: tuple[Any, ...] | None = None,
    ) -> Any:
        """Return the normalised images; told what is beside it, `Normed`.

        The running statistics are left to `move_statistics` then.

        Args:
            input: Shape (N, C, H, W).
            before: `Before`'s fields; None is not told.
            after: `After`'s.
        """
        if before is None or after is None:
            return super().forward(input)
        first, then = Before(*before), After(*after)
        # Without a momentum the statistics are the mean of all batches so far: torch's to move.
        is_moved = self.training and self.track_running_stats and self.momentum is not None
        if not (is_moved and first.odds < _ODDS and _is_for_kernels(self.weight, input, first.addend, then.residual)):
            total = first.compute(input)
            return Normed(then.compute(nn.BatchNorm2d.forward(self, total)), None, None, total, None)
        from castwise.worker.kernels.batch_norm.ops import batch_norm

        residual, carrier = then.residual, then.carrier
        known = residual.detach() if residual is not None and carrier is not None else residual
        seed = first.seed if first.odds else None
        out, own, total, mean, variance, _ = batch_norm(
            input, first.shift, seed, first.layer, first.odds, first.addend, known, carrier, self.weight, self.bias,
            self.eps, then.activation, then.is_forked,
        )  # fmt: skip
        if first.shift is not None and total.numel() == 0:
            mean = mean + first.shift.detach()
        return Normed(out, mean, variance, total, own if then.is_forked else None)


@cache
def kernel_class_of(plain: Any) -> type[KernelBatchNorm]:
    """Return what batch norms of a class become: they are told what is beside them, or else compute as they did.

    Args:
        plain: `nn.BatchNorm2d`, or what is made of it.
    """
    if plain is nn.BatchNorm2d:
        return KernelBatchNorm
    return type(f"Kernel{plain.__name__}", (KernelBatchNorm, plain), {"plain": plain})


def _made_of(plain: Any) -> KernelBatchNorm:
    kind = kernel_class_of(plain)
    return kind.__new__(kind)


def _is_for_kernels(weight: Tensor, images: Tensor, *others: Tensor | None) -> bool:
    """Return whether kernels normalise images by a weight, and add the others; what torch refuses is left to it."""
    on_gpu = images.device.type == "cuda" and weight.device == images.device
    if not on_gpu or images.dtype not in _DTYPES or images.shape[1:2] != weight.shape:
        return False
    return 1 < images.numel() // weight.numel() < _MOST_ROWS and all(
        isinstance(each, Tensor)
        and each.shape == images.shape
        and each.dtype == images.dtype
        and each.is_contiguous(memory_format=torch.channels_last)
        for each in (images, *others)
        if each is not None
    )


@torch.no_grad()
def move_statistics(
    norms: Sequence[nn.BatchNorm2d], means: Sequence[Tensor | None], variances: Sequence[Tensor | None]
) -> None:
    """Move the running statistics of batch norms by their momenta towards these, all at once.

    Args:
        norms: The batch norms.
        means: Of a norm's images, of shape (C,), one for each norm; None where torch has moved its statistics.
        variances: The same, unbiased.
    """
    for momentum in dict.fromkeys(norm.momentum for norm in norms):
        own = [
            (norm, mean, variance)
            for norm, mean, variance in zip(norms, means, variances, strict=True)
            if norm.momentum == momentum and mean is not None and variance is not None
        ]
        if not own:
            continue
        running = [each for norm, _, _ in own for each in (norm.running_mean, norm.running_var)]
        now = [each.to(norm.running_mean.dtype) for norm, *both in own for each in both]  # type: ignore[union-attr]
        torch._foreach_lerp_(running, now, momentum)  # type: ignore[arg-type]
        torch._foreach_add_([norm.num_batches_tracked for norm, _, _ in own], 1)  # type: ignore[misc]


def draw_seed(images: Tensor) -> Tensor:
    """Return the seed of a step's dropout, shape (1,), int64, on the images' device."""
    return torch.randint(2**62, (1,), device=images.device)


class OddsDropout(nn.Dropout):
    """Dropout that can leave itself to others, and tells the probability."""

    def forward(self, input: Tensor | None = None) -> Any:  # noqa: A002
        """Return what is left of the images; without any, the probability of dropping a number out.

        Args:
            input: Of any shape.
        """
        if input is not None:
            return super().forward(input)
        return self.p if self.training else 0.0


class BiasBesideConv2d(nn.Conv2d):
    """A convolution that can leave the addition of its bias to others."""

    def forward(self, input: Tensor, is_beside: bool = False) -> Any:  # noqa: A002
        """Return its result; told to, one without the bias, and the bias.

        Args:
            input: Shape (N, C, H, W).
            is_beside: Whether it is told to.
        """
        return (self._conv_forward(input, self.weight, None), self.bias) if is_beside else super().forward(input)
