"""Batch norm modules that run castwise's kernels, with the additions, dropout and activation next to the norm."""

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from castwise.trial.kernels.batch_norm.types import DROP_LEVELS, Epilogue, FusedOutput, Prologue

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # the kernels compute in float32
_MAX_ROWS = 2**30  # pixels of a batch: the kernels count them in 32 bits


class KernelBatchNorm(nn.BatchNorm2d):
    """A batch norm that can compute its prologue and epilogue too, in castwise's kernels."""

    plain: ClassVar[type[nn.BatchNorm2d]] = nn.BatchNorm2d  # the class of the same norm without kernels

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by the plain class, which a file can name."""
        return _restore, (self.plain,), dict(vars(self))

    def forward(
        self,
        input: Tensor,  # noqa: A002
        prologue: tuple[Any, ...] | None = None,
        epilogue: tuple[Any, ...] | None = None,
    ) -> Any:
        """Return the normalised images; with prologue and epilogue `FusedOutput`, without updating running statistics.

        The arguments are the fields of a `Prologue` and of an `Epilogue`, because a traced graph holds plain tuples.
        """
        if prologue is None or epilogue is None:
            return super().forward(input)
        before, after = Prologue(*prologue), Epilogue(*epilogue)
        # Without a momentum the running statistics are the mean of all batches so far, which torch updates itself.
        has_momentum = self.training and self.track_running_stats and self.momentum is not None
        fits = before.drop_level < DROP_LEVELS and fits_kernels(self.weight, input, before.addend, after.residual)
        if not (has_momentum and fits):
            total = before.reference(input)
            return FusedOutput(after.reference(nn.BatchNorm2d.forward(self, total)), None, None, total, None)
        from castwise.trial.kernels.batch_norm.ops import batch_norm

        residual = after.residual
        if residual is not None and after.carrier is not None:
            residual = residual.detach()
        seed = before.seed if before.drop_level else None
        out, carrier, total, mean, variance, _ = batch_norm(
            input, before.conv_bias, seed, before.layer, before.drop_level, before.addend, residual, after.carrier,
            self.weight, self.bias, self.eps, after.activation, after.makes_carrier,
        )  # fmt: skip
        if before.conv_bias is not None and total.numel() == 0:
            mean = mean + before.conv_bias.detach()
        return FusedOutput(out, mean, variance, total, carrier if after.makes_carrier else None)


@cache
def kernel_class(plain: Any) -> type[KernelBatchNorm]:
    """Return the kernel version of `nn.BatchNorm2d` or of a subclass, which otherwise computes as its plain class."""
    if plain is nn.BatchNorm2d:
        return KernelBatchNorm
    return type(f"Kernel{plain.__name__}", (KernelBatchNorm, plain), {"plain": plain})


def _restore(plain: Any) -> KernelBatchNorm:
    norm_class = kernel_class(plain)
    return norm_class.__new__(norm_class)


def fits_kernels(weight: Tensor, images: Tensor, *others: Tensor | None) -> bool:
    """Return whether the kernels can normalise images by a weight and add the others; torch does what they cannot."""
    on_gpu = images.device.type == "cuda" and weight.device == images.device
    if not on_gpu or images.dtype not in _DTYPES or images.shape[1:2] != weight.shape:
        return False
    return 1 < images.numel() // weight.numel() < _MAX_ROWS and all(
        isinstance(tensor, Tensor)
        and tensor.shape == images.shape
        and tensor.dtype == images.dtype
        and tensor.is_contiguous(memory_format=torch.channels_last)
        for tensor in (images, *others)
        if tensor is not None
    )


@torch.no_grad()
def update_running_statistics(
    norms: Sequence[nn.BatchNorm2d], means: Sequence[Tensor | None], variances: Sequence[Tensor | None]
) -> None:
    """Update the running statistics of all batch norms at once; None if torch has updated a norm's."""
    for momentum in dict.fromkeys(norm.momentum for norm in norms):
        updates = [
            (norm, mean, variance)
            for norm, mean, variance in zip(norms, means, variances, strict=True)
            if norm.momentum == momentum and mean is not None and variance is not None
        ]
        if not updates:
            continue
        running = [tensor for norm, _, _ in updates for tensor in (norm.running_mean, norm.running_var)]
        now = [tensor.to(norm.running_mean.dtype) for norm, *both in updates for tensor in both]  # type: ignore[union-attr]
        torch._foreach_lerp_(running, now, momentum)  # type: ignore[arg-type]
        torch._foreach_add_([norm.num_batches_tracked for norm, _, _ in updates], 1)  # type: ignore[misc]


def draw_seed(images: Tensor) -> Tensor:
    """Return the seed of a step's dropout, shape (1,), int64, on the images' device."""
    return torch.randint(2**62, (1,), device=images.device)


class FusableDropout(nn.Dropout):
    """Dropout that returns its probability when it is called without input, so that a kernel can apply it."""

    def forward(self, input: Tensor | None = None) -> Any:  # noqa: A002
        """Return the input after dropout; without input the current probability of dropping an element."""
        if input is not None:
            return super().forward(input)
        return self.p if self.training else 0.0


class FusableBiasConv2d(nn.Conv2d):
    """A convolution that can leave the addition of its bias to a kernel."""

    def forward(self, input: Tensor, splits_bias: bool = False) -> Any:  # noqa: A002
        """Return the result; with `splits_bias` the result without the bias, and the bias."""
        if splits_bias:
            return self._conv_forward(input, self.weight, None), self.bias
        return super().forward(input)
