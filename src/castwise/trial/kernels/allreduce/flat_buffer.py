"""Views of one buffer, one after the other, for several tensors."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def offsets(group: Sequence[Tensor], aligned_bytes: int) -> list[int]:
    """Return the first element of each tensor's view in the buffer, and the end of the last; all have one dtype."""
    step = aligned_bytes // group[0].element_size()
    return list(accumulate((-(-tensor.numel() // step) * step for tensor in group), initial=0))


def views(flat: Tensor, group: Sequence[Tensor], begins: Sequence[int]) -> list[Tensor]:
    """Return each tensor's part of a buffer, in the tensor's shape.

    `flat` has shape (n,) and the tensors' dtype; `begins` come from `offsets`, and the last is at most n.

    A view has its tensor's order of dimensions: channels last stays channels last. For a weight the order is the same
    in all ranks, and autograd uses it for the gradient. A tensor with gaps or overlaps gets a dense view.
    """
    strides = [torch.empty_like(tensor, device="meta").stride() for tensor in group]
    return [
        flat.as_strided(tensor.shape, stride, flat.storage_offset() + begin)
        for tensor, stride, begin in zip(group, strides, begins[:-1], strict=True)
    ]
