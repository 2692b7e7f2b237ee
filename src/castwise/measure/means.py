"""Buffers that ranks fill, and the mean of all ranks' values in them: by NCCL, or by memory that all of them see."""

from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import accumulate, pairwise

import torch
from torch import distributed

from castwise.measure.parallel import Peers

_SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)
# Where a buffer begins: what kernels read at a time, and rows of a cache.
_ALIGNED_BYTES = 128
Size = tuple[int, torch.dtype]


class CollectiveMean:
    """The mean by collectives, one a buffer.

    Attributes:
        buffers: Filled with zeros, one a size.
        outside_bytes: What of them PyTorch's allocator does not hold.
    """

    outside_bytes = 0

    def __init__(self, sizes: Sequence[Size], device: torch.device, peers: Peers) -> None:
        self.buffers = [torch.zeros(numel, dtype=dtype, device=device) for numel, dtype in sizes]
        self._peers = peers

    def __call__(self) -> None:
        """Give the buffers the means of all ranks' values; all have to ask."""
        for buffer in self.buffers:
            self._peers.average(buffer)


class SymmetricMean:
    """The mean by a kernel that reads and writes all ranks' buffers, each rank a share of the elements.

    It moves the bytes of a ring's all-reduce in two steps, whatever the number of ranks, and wants no memory between.
    Values are added in float32 and rounded once. All ranks have the same bits, since one of them made each element.

    Attributes:
        buffers: Filled with zeros, one a size, in memory that PyTorch's allocator does not know of.
        outside_bytes: As many as they have.
    """

    def __init__(self, sizes: Sequence[Size], device: torch.device, peers: Peers) -> None:
        """Allocate; all ranks have to ask, for the same.

        Raises:
            RuntimeError: The driver, or what confines the process, does not let memory be shared.
        """
        from torch.distributed import _symmetric_memory as symmetric

        group = distributed.group.WORLD
        assert group is not None, "ranks have joined one"
        begins = _begins(sizes)
        self.outside_bytes = begins[-1]
        self._peers, self._whole = peers, symmetric.empty(begins[-1], dtype=torch.uint8, device=device).zero_()
        self._handle = symmetric.rendezvous(self._whole, group.group_name)
        self.buffers = [
            self._whole[begin:end].view(dtype)[:numel]
            for (begin, end), (numel, dtype) in zip(pairwise(begins), sizes, strict=True)
        ]
        self._addresses = [
            torch.tensor([address + begin for address in self._handle.buffer_ptrs], dtype=torch.int64, device=device)
            for begin in begins[:-1]
        ]

    def __call__(self) -> None:
        """Give the buffers the means of all ranks' values; all have to ask."""
        from castwise.measure.mean_kernels import write_means

        self._handle.barrier()  # all are filled, and nobody reads the means of the step before any more
        for buffer, addresses in zip(self.buffers, self._addresses, strict=True):
            write_means(addresses, buffer, self._peers.rank)
        self._handle.barrier()  # all shares are written


def mean_over(peers: Peers, sizes: Sequence[Size], device: torch.device) -> CollectiveMean | SymmetricMean:
    """Return the faster way that there is to average buffers of these sizes, in all ranks the same.

    Args:
        peers: All have to ask.
        sizes: Elements and dtype of each buffer.
        device: Where they lie.
    """
    if all(peers.gather(_can_share(peers, sizes, device))):
        made: SymmetricMean | None = None
        with suppress(RuntimeError):  # NCCL has ways around what is not allowed
            made = SymmetricMean(sizes, device, peers)
        if all(peers.gather(made is not None)) and made is not None:
            return made
    return CollectiveMean(sizes, device, peers)


def _can_share(peers: Peers, sizes: Sequence[Size], device: torch.device) -> bool:
    """Return whether a rank's GPU reaches all others' memory, and there is a kernel for it."""
    others = [other for other in peers.gather(device.index) if other != device.index]
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and find_spec("triton") is not None
        and bool(others)
        and all(dtype in _SUPPORTED for _, dtype in sizes)
        and all(torch.cuda.can_device_access_peer(device, other) for other in others)
    )


def _begins(sizes: Sequence[Size]) -> list[int]:
    """Return where each buffer begins, in bytes, and where the last one ends."""
    rows = (-(-numel * dtype.itemsize // _ALIGNED_BYTES) for numel, dtype in sizes)
    return list(accumulate((_ALIGNED_BYTES * row for row in rows), initial=0))
