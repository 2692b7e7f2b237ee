# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Mean of tensors in memory that several GPUs share: Triton kernels, only imported if Triton is installed."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from castwise.trial.kernels.allreduce.flat_buffer import offsets, views

# Tensors are cut into blocks, and each rank owns a share of the blocks. First every rank copies its blocks to their
# owners, which have a slot for each rank; then every owner adds up its slots and writes the means to all ranks. The
# kernels only write over the links between GPUs: a read would wait for the round trip.

_BLOCK_BYTES = 8192
_WARPS = 8
_ADDRESSES_A_LAUNCH = 128  # that one launch takes as arguments


@triton.jit
def address_kernel(table, addresses):
    """Write addresses, which are arguments of the launch, into a table on the device."""
    for place in tl.static_range(len(addresses)):
        tl.store(table + place, addresses[place])


@triton.jit
def scatter_kernel(
    table,
    tensor_of_block,
    first_blocks,
    numels,
    slots,
    like,
    num_blocks,
    share,
    rank,
    ranks: tl.constexpr,
    block: tl.constexpr,
):
    """Copy one block of a rank's tensors to its owner; behind a tensor's end there are zeros."""
    # Each rank starts with another owner, so that no link idles and no owner receives from all ranks at once.
    owner, place = (tl.program_id(0) + rank) % ranks, tl.program_id(0) // ranks
    own = owner * share + place
    if own >= num_blocks:
        return
    tensor = tl.load(tensor_of_block + own)
    begin = (own - tl.load(first_blocks + tensor)).to(tl.int64) * block
    left = tl.load(numels + tensor) - begin
    source = tl.multiple_of(tl.load(table + tensor).to(like.dtype), 16) + begin
    inside = tl.arange(0, block)
    if left >= block:  # noqa: SIM108  without a mask 16 bytes are read at a time
        values = tl.load(source + inside)
    else:
        values = tl.load(source + inside, mask=inside < left, other=0.0)
    slot = (rank * share + place).to(tl.int64) * block
    tl.store(tl.multiple_of(tl.load(slots + owner).to(like.dtype), 16) + slot + inside, values)


@triton.jit
def mean_kernel(slots, buffers, like, share, rank, inverse, ranks: tl.constexpr, block: tl.constexpr):
    """Write the mean of one block of this rank's share into all ranks' buffers."""
    own = tl.program_id(0)
    inside = tl.arange(0, block)
    mine = tl.multiple_of(tl.load(slots + rank).to(like.dtype), 16)
    total = tl.zeros((block,), tl.float32)
    for other in tl.static_range(ranks):
        total += tl.load(mine + (other * share + own).to(tl.int64) * block + inside).to(tl.float32)
    mean = (total * inverse).to(like.dtype.element_ty)
    place = (rank * share + own).to(tl.int64) * block + inside
    for step in tl.static_range(ranks):
        buffer = tl.load(buffers + (rank + 1 + step) % ranks).to(like.dtype)
        tl.store(tl.multiple_of(buffer, 16) + place, mean)


class SharedGroup:
    """Means of tensors of one dtype, and slots for all ranks' values of the blocks that this rank averages."""

    def __init__(self, group: Sequence[Tensor], memory: Tensor, addresses: Sequence[int], rank: int) -> None:
        """Divide the shared memory.

        Args:
            group: Tensors of one dtype on one device.
            memory: Shape (n,), uint8, n at least `num_bytes`: this rank's.
            addresses: Of each rank's memory, as seen from this one.
            rank: This rank's number.
        """
        device, self._rank, self._ranks = memory.device, rank, len(addresses)
        self._block = _BLOCK_BYTES // group[0].element_size()
        begins = offsets(group, _BLOCK_BYTES)
        self._num_blocks = begins[-1] // self._block
        self._share = triton.cdiv(self._num_blocks, self._ranks)
        output_bytes = self._num_blocks * _BLOCK_BYTES
        self._flat = memory[:output_bytes].view(group[0].dtype)
        self.outputs = views(self._flat, group, begins)  # the means, in the tensors' shapes
        first_blocks = torch.tensor([begin // self._block for begin in begins], dtype=torch.int32)
        numbers = torch.arange(len(group), dtype=torch.int32)
        self._tensor_of_block = numbers.repeat_interleave(first_blocks.diff()).to(device)
        self._first_blocks = first_blocks.to(device)
        self._numels = torch.tensor([tensor.numel() for tensor in group], dtype=torch.int64, device=device)
        self._buffers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._slots = self._buffers + output_bytes
        self._table = torch.zeros(len(group), dtype=torch.int64, device=device)
        self._in_table: list[int] = []
        self._is_captured = False

    @staticmethod
    def num_bytes(group: Sequence[Tensor], ranks: int) -> int:
        """Return the shared memory that tensors like these need in each rank."""
        num_blocks = offsets(group, _BLOCK_BYTES)[-1] * group[0].element_size() // _BLOCK_BYTES
        return int(num_blocks + ranks * triton.cdiv(num_blocks, ranks)) * _BLOCK_BYTES

    def scatter(self, group: Sequence[Tensor]) -> None:
        """Copy every block of the tensors to the rank that averages it.

        Args:
            group: With the strides of their outputs; they must exist until the step has ended.
        """
        if not self._num_blocks:
            return
        addresses = [tensor.data_ptr() for tensor in group]
        # A CUDA graph has its own addresses, and writes them when it is replayed.
        self._is_captured |= self._flat.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._is_captured or addresses != self._in_table:
            # Arguments of launches, not a copy from the host, which a CUDA graph could not repeat.
            for begin in range(0, len(addresses), _ADDRESSES_A_LAUNCH):
                part = tuple(addresses[begin : begin + _ADDRESSES_A_LAUNCH])
                address_kernel[(1,)](self._table[begin:], part, num_warps=1)
            self._in_table = addresses
        scatter_kernel[(self._ranks * self._share,)](
            self._table, self._tensor_of_block, self._first_blocks, self._numels, self._slots, self._flat,
            self._num_blocks, self._share, self._rank, ranks=self._ranks, block=self._block, num_warps=_WARPS,
        )  # fmt: skip

    def average(self) -> None:
        """Write the means of this rank's blocks into all ranks' outputs; all ranks must have scattered theirs."""
        own = min(self._share, self._num_blocks - self._rank * self._share)
        if own > 0:
            mean_kernel[(own,)](
                self._slots, self._buffers, self._flat, self._share, self._rank, 1 / self._ranks,
                ranks=self._ranks, block=self._block, num_warps=_WARPS,
            )  # fmt: skip
