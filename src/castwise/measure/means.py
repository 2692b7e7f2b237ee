"""The mean of all ranks' tensors, such as gradients: by collectives, or by kernels in memory that all GPUs see."""

from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import accumulate

import torch
from torch import Tensor, distributed

from castwise.measure.parallel import Peers
from castwise.measure.places import begins_of, places_of

_SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)
# Where a tensor's place begins: rows of a cache, which kernels and Inductor's code read without looking for edges.
_ALIGNED_BYTES = 128
_READ_BYTES = 16  # that a thread reads at a time
Groups = Sequence[Sequence[Tensor]]


class CollectiveMean:
    """The mean by collectives, one a group of tensors.

    Attributes:
        places: Where the means are found, a tensor for each that was told of. All of a group are one piece of memory.
        outside_bytes: What of that PyTorch's allocator does not hold.
    """

    outside_bytes = 0

    def __init__(self, groups: Groups, peers: Peers) -> None:
        """Make places for tensors like these; a group's are of one dtype and on one device."""
        self._peers = peers
        begins = [begins_of(group, _ALIGNED_BYTES) for group in groups]
        # Zeros lie between the places, and stay.
        self.flat = [
            torch.zeros(begin[-1], dtype=group[0].dtype, device=group[0].device)
            for group, begin in zip(groups, begins, strict=True)
        ]
        self.places = [places_of(*each) for each in zip(self.flat, groups, begins, strict=True)]

    def __call__(self, groups: Groups) -> None:
        """Bring the means of all ranks' tensors to their places; all have to ask."""
        self.copy(groups)
        self.average()

    def copy(self, groups: Groups) -> None:
        """Bring a rank's own tensors to their places."""
        for places, group in zip(self.places, groups, strict=True):
            torch._foreach_copy_(places, list(group))

    def average(self) -> None:
        """Average what lies in the places."""
        for flat in self.flat:
            self._peers.average(flat)


class SymmetricMean:
    """The mean by kernels that write into all ranks' memory, each rank that of a share of the elements.

    Over the links goes what a ring's all-reduce sends, in two steps whatever the number of ranks, and no copy precedes
    it. Values are added in float32 and rounded once. All ranks have the same bits, since one of them made each.

    Attributes:
        places: As of `CollectiveMean`.
        outside_bytes: The places and as much again, in memory that PyTorch's allocator does not know of.
    """

    def __init__(self, groups: Groups, peers: Peers) -> None:
        """Make places for tensors like these; all ranks have to, for the same.

        Raises:
            RuntimeError: The driver, or what confines the process, does not let memory be shared.
        """
        from torch.distributed import _symmetric_memory as symmetric

        from castwise.measure.mean_groups import SharedGroup

        process_group = distributed.group.WORLD
        assert process_group is not None, "ranks have joined one"
        sizes = [SharedGroup.num_bytes(group, peers.world_size) for group in groups]
        begins = list(accumulate(sizes, initial=0))
        self.outside_bytes = begins[-1]
        memory = symmetric.empty(begins[-1], dtype=torch.uint8, device=groups[0][0].device)
        self._handle = symmetric.rendezvous(memory, process_group.group_name)
        self._groups = [
            SharedGroup(group, memory[begin:], [address + begin for address in self._handle.buffer_ptrs], peers.rank)
            for group, begin in zip(groups, begins[:-1], strict=True)
        ]
        self.places = [group.places for group in self._groups]

    def __call__(self, groups: Groups) -> None:
        """Bring the means of all ranks' tensors to their places; all have to ask."""
        for own, group in zip(self._groups, groups, strict=True):
            own.bring([lying_as(place, tensor) for place, tensor in zip(own.places, group, strict=True)])
        self._handle.barrier()  # all has come, and nobody reads the means of the step before any more
        for own in self._groups:
            own.average()
        self._handle.barrier()  # all means are there, and no rank reads what was brought to it any more


def mean_over(peers: Peers, groups: Groups) -> CollectiveMean | SymmetricMean:
    """Return the faster way that there is to average tensors like these, in all ranks the same.

    Args:
        peers: All have to ask.
        groups: Each of one dtype, all on one device.
    """
    if all(peers.gather(_can_share(peers, groups))):
        made: SymmetricMean | None = None
        with suppress(RuntimeError):  # NCCL has ways around what is not allowed
            made = SymmetricMean(groups, peers)
        if all(peers.gather(made is not None)) and made is not None:
            return made
    return CollectiveMean(groups, peers)


def lying_as(place: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor whose elements lie as a place's do, where a thread can read several at a time; mostly itself."""
    strides = zip(place.shape, place.stride(), tensor.stride(), strict=True)
    if (
        all(own == other for size, own, other in strides if size != 1)
        and tensor.dtype == place.dtype
        and tensor.data_ptr() % _READ_BYTES == 0
    ):
        return tensor
    made = torch.empty_strided(place.shape, place.stride(), dtype=place.dtype, device=place.device)
    return made.copy_(tensor)


def _can_share(peers: Peers, groups: Groups) -> bool:
    """Return whether a rank's GPU reaches all others' memory, and there is a kernel for it."""
    tensors = [tensor for group in groups for tensor in group]
    device = tensors[0].device
    others = [other for other in peers.gather(device.index) if other != device.index]
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and find_spec("triton") is not None
        and len(others) == peers.world_size - 1 > 0
        and all(tensor.dtype in _SUPPORTED for tensor in tensors)
        and any(tensor.numel() for tensor in tensors)
        and all(torch.cuda.can_device_access_peer(device, other) for other in others)
    )
