"""Views for tensors, one behind the other in one buffer."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def offsets(group: Sequence[Tensor], aligned_bytes: int) -> list[int]:
    """Return the first element of each tensor's view in the buffer, and the end of the last; all have one dtype."""
    step = aligned_bytes // group[0].element_size()
    return list(accumulate((-(-each.numel() // step) * step for each in group), initial=0))


def views(flat: Tensor, group: Sequence[Tensor], begins: Sequence[int]) -> list[Tensor]:
    """Return each tensor's part of a buffer, in the tensor's shape.

    A view has its tensor's order of dimensions, which for a weight is the same in all ranks and which autograd gives
    its gradient: channels last stays channels last. A tensor with gaps or overlaps gets a dense view.

    Args:
        flat: Shape (n,), of the tensors' dtype.
        group: The tensors.
        begins: From `offsets`; the last is at most n.
    """
    strides = [torch.empty_like(tensor, device="meta").stride() for tensor in group]
    return [
        flat.as_strided(tensor.shape, stride, flat.storage_offset() + begin)
        for tensor, stride, begin in zip(group, strides, begins[:-1], strict=True)
    ]
