# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Mean of tensors on several GPUs: Triton kernels. Imported only if Triton is installed.

Tensors are cut into blocks, and each rank owns a share of the blocks. First every rank copies its blocks to their
owners, which have a slot for each rank; then every owner adds up its slots and writes the means to all ranks. The
kernels only write over the links between GPUs: a read would wait for the round trip.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK_BYTES = 8192
_AT_ONCE = 128  # addresses that one launch takes as arguments


@triton.jit
def address_kernel(table, addresses):
    """Write addresses, which are arguments of the launch, into a table on the device."""
    for place in tl.static_range(len(addresses)):
        tl.store(table + place, addresses[place])


@triton.jit
def scatter_kernel(  # noqa: PLR0913, PLR0917
    table, tensor_of, first_of, numel_of, slots, like, num_blocks, share, rank, ranks: tl.constexpr, block: tl.constexpr
):
    """Copy one block of a rank's tensors to its owner; behind a tensor's end there are zeros."""
    # Each rank starts with another owner, so that no link idles and no owner receives from all ranks at once.
    owner, place = (tl.program_id(0) + rank) % ranks, tl.program_id(0) // ranks
    own = owner * share + place
    if own >= num_blocks:
        return
    tensor = tl.load(tensor_of + own)
    begin = (own - tl.load(first_of + tensor)).to(tl.int64) * block
    left = tl.load(numel_of + tensor) - begin
    source = tl.multiple_of(tl.load(table + tensor).to(like.dtype), 16) + begin
    inside = tl.arange(0, block)
    if left >= block:  # noqa: SIM108  without a mask 16 bytes are read at a time
        values = tl.load(source + inside)
    else:
        values = tl.load(source + inside, mask=inside < left, other=0.0)
    slot = (rank * share + place).to(tl.int64) * block
    tl.store(tl.multiple_of(tl.load(slots + owner).to(like.dtype), 16) + slot + inside, values)


@triton.jit
def mean_kernel(  # noqa: PLR0913, PLR0917
    slots, buffers, like, share, rank, inverse, ranks: tl.constexpr, block: tl.constexpr
):
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


def write_addresses(table: Tensor, addresses: list[int]) -> None:
    """Fill a table of int64 without a copy from the host, which a CUDA graph could not repeat.

    Args:
        table: Shape (n,), int64, on the device.
        addresses: n addresses.
    """
    for begin in range(0, len(addresses), _AT_ONCE):
        part = addresses[begin : begin + _AT_ONCE]
        address_kernel[(1,)](table[begin:], tuple(part), num_warps=1)
