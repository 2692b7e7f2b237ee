"""The mean of all ranks' tensors, such as gradients: by collectives, or by kernels in memory that all GPUs share."""

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor, distributed

from castwise.apply.techniques.compile import check_compiler
from castwise.errors import UsageError
from castwise.trial.distributed import Peers
from castwise.trial.kernels.allreduce.flat_buffer import offsets, views

_SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)
# Alignment of a tensor's view: cache lines, which kernels and Inductor's code read without special edges.
_ALIGNED_BYTES = 128
_READ_BYTES = 16  # that a thread reads at a time
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
Groups = Sequence[Sequence[Tensor]]


class CollectiveMean:
    """The mean by one collective for each group of tensors. The attributes are those of `SymmetricMean`."""

    kind: Literal["collectives"] = "collectives"
    outside_bytes = 0

    def __init__(self, groups: Groups, peers: Peers, earlier_peaks: tuple[int, int]) -> None:
        """Allocate outputs for tensors like these; a group has one dtype and one device."""
        self._peers, self.earlier_peaks = peers, earlier_peaks
        begins = [offsets(group, _ALIGNED_BYTES) for group in groups]
        # The gaps between the views stay zero.
        self.flat = [
            torch.zeros(begin[-1], dtype=group[0].dtype, device=group[0].device)
            for group, begin in zip(groups, begins, strict=True)
        ]
        self.outputs = [views(*parts) for parts in zip(self.flat, groups, begins, strict=True)]

    def __call__(self, groups: Groups) -> None:
        """Compute the means of all ranks' tensors into the outputs; all ranks must call it."""
        for outputs, group in zip(self.outputs, groups, strict=True):
            torch._foreach_copy_(outputs, list(group))
        for flat in self.flat:
            self._peers.all_reduce_mean(flat)


class SymmetricMean:
    """The mean by kernels that write into all ranks' memory, each rank the means of its share of the elements.

    The links carry as much as in a ring all-reduce, in two steps for any number of ranks and without a copy before.
    Values are added in float32 and rounded once. All ranks get the same bits, since one rank computes each mean.

    Attributes:
        kind: Its name in records.
        outputs: The means, one for each tensor. Those of a group are views of one buffer.
        outside_bytes: Memory outside PyTorch's allocator: the outputs, and slots of the same size.
        earlier_peaks: The allocator's peaks, allocated and reserved bytes, before that memory was allocated.
    """

    kind: Literal["shared memory"] = "shared memory"

    def __init__(self, groups: Groups, peers: Peers, allocated: "Allocated") -> None:
        """Allocate outputs for tensors like these, as all ranks must; raise RuntimeError if none can be shared."""
        from torch.distributed import _symmetric_memory as symmetric

        from castwise.trial.kernels.allreduce.triton_kernels import SharedGroup

        process_group = distributed.group.WORLD
        assert process_group is not None, "ranks have joined one"
        memory, self.earlier_peaks = allocated.memory, allocated.earlier_peaks
        self.outside_bytes = memory.numel()
        self._handle = symmetric.rendezvous(memory, process_group.group_name)
        begins = _parts(groups, peers)
        self._groups = [
            SharedGroup(group, memory[begin:], [address + begin for address in self._handle.buffer_ptrs], peers.rank)
            for group, begin in zip(groups, begins[:-1], strict=True)
        ]
        self.outputs = [group.outputs for group in self._groups]

    def __call__(self, groups: Groups) -> None:
        for shared, group in zip(self._groups, groups, strict=True):
            shared.scatter([with_layout(*pair) for pair in zip(shared.outputs, group, strict=True)])
        self._handle.barrier()  # all blocks have arrived, and no rank reads the last step's means any more
        for shared in self._groups:
            shared.average()
        self._handle.barrier()  # all means are written, and no rank reads its slots any more


class Allocated(NamedTuple):
    """Memory that can be shared with other ranks but is not shared yet."""

    memory: Tensor
    earlier_peaks: tuple[int, int]


def make_allreducer(peers: Peers, groups: Groups) -> CollectiveMean | SymmetricMean:
    """Return the fastest way to average tensors like these that all ranks support; all must call this.

    A group has one dtype, and all groups are on one device.
    """
    # All ranks agree before each step that one of them may be unable to take: the next would wait for all ranks.
    allocated = allocate(groups, peers) if all(peers.gather_objects(can_share(peers, groups))) else None
    if all(peers.gather_objects(allocated is not None)) and allocated is not None:
        made: SymmetricMean | None = None
        with suppress(RuntimeError):  # NCCL works without what is not allowed here
            made = SymmetricMean(groups, peers, allocated)
        if all(peers.gather_objects(made is not None)) and made is not None:
            return made
    return CollectiveMean(groups, peers, (0, 0) if allocated is None else allocated.earlier_peaks)


def allocate(groups: Groups, peers: Peers) -> Allocated | None:
    """Return memory for the means of tensors like these, None if there is none left."""
    from torch.distributed import _symmetric_memory as symmetric

    device = groups[0][0].device
    torch.cuda.empty_cache()  # the memory comes from the driver, which cannot give what the allocator keeps
    try:
        memory = symmetric.empty(_parts(groups, peers)[-1], dtype=torch.uint8, device=device)
    except RuntimeError:
        return None
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return Allocated(memory, peaks)


def _parts(groups: Groups, peers: Peers) -> list[int]:
    """Return the first byte of each group's memory, and the end of the last."""
    from castwise.trial.kernels.allreduce.triton_kernels import SharedGroup

    return list(accumulate((SharedGroup.num_bytes(group, peers.world_size) for group in groups), initial=0))


def with_layout(output: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor with an output's strides and dtype, aligned for wide reads; usually the tensor itself."""
    strides = zip(output.shape, output.stride(), tensor.stride(), strict=True)
    is_alike = tensor.dtype == output.dtype and all(own == other for size, own, other in strides if size != 1)
    if is_alike and tensor.data_ptr() % _READ_BYTES == 0:
        return tensor
    return torch.empty_strided(output.shape, output.stride(), dtype=output.dtype, device=output.device).copy_(tensor)


def can_share(peers: Peers, groups: Groups) -> bool:
    """Return whether a rank's GPU can access all others' memory, and kernels for it can be compiled."""
    tensors = [tensor for group in groups for tensor in group]
    if not any(tensor.numel() for tensor in tensors):
        return False
    device = tensors[0].device
    others = [other for other in peers.gather_objects(device.index) if other != device.index]
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and len(others) == peers.world_size - 1 > 0
        and all(tensor.dtype in _SUPPORTED for tensor in tensors)
        and all(has_peer_atomics(device.index, other) for other in others)
        and can_compile_kernels()
    )


def has_peer_atomics(own: int, other: int) -> bool:
    """Return whether a GPU can access another's memory with atomic operations, as over NVLink.

    Over PCIe a peer's memory may be accessible without atomic operations, and a barrier would lose signals then.

    Source: NVIDIA, CUDA Driver API, cuDeviceGetP2PAttribute.
    """
    if not torch.cuda.can_device_access_peer(own, other):
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    devices, value = (ctypes.c_int(), ctypes.c_int()), ctypes.c_int()
    for device, number in zip(devices, (own, other), strict=True):
        if driver.cuDeviceGet(ctypes.byref(device), number):
            return False
    return driver.cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMICS, *devices) == 0 and value.value == 1


def can_compile_kernels() -> bool:
    """Return whether Triton and the compiler that it needs to launch kernels are installed."""
    try:
        check_compiler(torch.device("cuda"))
        import_module("castwise.trial.kernels.allreduce.triton_kernels")
    except (UsageError, ImportError):
        return False
    return True
