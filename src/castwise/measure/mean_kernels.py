# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""The mean of buffers that lie on several GPUs, in Triton. Imported only where Triton is installed."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # 16 bytes a thread, of 16-bit values


@triton.jit
def mean_kernel(  # noqa: PLR0913, PLR0917  a kernel has no other way to be told
    addresses, like, begin, end, inverse, first, ranks: tl.constexpr, block: tl.constexpr
):
    """Write, into all ranks' buffers, the mean of a part of the elements from begin to end."""
    element = begin + tl.program_id(0) * block + tl.arange(0, block)
    inside = element < end
    total = tl.zeros((block,), tl.float32)
    for step in tl.static_range(ranks):
        # Each rank begins with its own: no GPU is read by all others at once.
        buffer = tl.load(addresses + (first + step) % ranks).to(like.dtype)
        total += tl.load(tl.multiple_of(buffer, 16) + element, mask=inside, other=0.0).to(tl.float32)
    mean = (total * inverse).to(like.dtype.element_ty)
    for step in tl.static_range(ranks):
        buffer = tl.load(addresses + (first + step) % ranks).to(like.dtype)
        tl.store(tl.multiple_of(buffer, 16) + element, mean, mask=inside)


def write_means(addresses: Tensor, own: Tensor, rank: int) -> None:
    """Give a share of the elements of all ranks' buffers their mean: each rank's is another, and together all.

    Args:
        addresses: Shape (ranks,), int64: where each rank's buffer begins.
        own: Shape (n,): this rank's.
        rank: This rank's number.
    """
    ranks, numel = len(addresses), own.numel()
    share = triton.cdiv(triton.cdiv(numel, ranks), _BLOCK) * _BLOCK
    begin = rank * share
    end = min(begin + share, numel)
    if begin < end:
        grid = (triton.cdiv(end - begin, _BLOCK),)
        mean_kernel[grid](addresses, own, begin, end, 1 / ranks, rank, ranks, block=_BLOCK, num_warps=8)
