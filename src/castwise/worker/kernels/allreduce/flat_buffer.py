"""Places for tensors, one behind the other in one piece of memory."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def offsets(group: Sequence[Tensor], aligned_bytes: int) -> list[int]:
    """Return the element where each one's place begins, and where the last one ends.

    Args:
        group: Tensors of one dtype.
        aligned_bytes: What a place begins at a multiple of.
    """
    step = aligned_bytes // group[0].element_size()
    return list(accumulate((-(-each.numel() // step) * step for each in group), initial=0))


def views(flat: Tensor, group: Sequence[Tensor], begins: Sequence[int]) -> list[Tensor]:
    """Return the part of a piece of memory that belongs to each tensor, in the tensor's shape.

    Each lies in its tensor's own order, which for a weight is the same in all ranks and which autograd gives its
    gradient: channels last stays so. What has gaps or overlaps lies without.

    Args:
        flat: Shape (n,), of the tensors' dtype.
        group: The tensors.
        begins: As `offsets` has them; the last is at most n.
    """
    strides = [torch.empty_like(tensor, device="meta").stride() for tensor in group]
    return [
        flat.as_strided(tensor.shape, stride, flat.storage_offset() + begin)
        for tensor, stride, begin in zip(group, strides, begins[:-1], strict=True)
    ]
