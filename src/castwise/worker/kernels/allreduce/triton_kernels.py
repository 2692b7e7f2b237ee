# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""The mean of tensors that lie on several GPUs, in Triton. Imported only where Triton is installed.

Tensors are cut in blocks, and each rank is the owner of a share of the blocks. First every rank brings its blocks to
their owners, which have a slot for every rank's; then every owner adds up what came, and writes the means to all ranks.
Over the links between GPUs nothing is read, which would wait for the way there and back; it is only written.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK_BYTES = 8192
_AT_ONCE = 128  # addresses that a launch takes as arguments


@triton.jit
def address_kernel(table, addresses):
    """Write addresses, which are arguments of the launch, where kernels read them."""
    for place in tl.static_range(len(addresses)):
        tl.store(table + place, addresses[place])


@triton.jit
def scatter_kernel(  # noqa: PLR0913, PLR0917  a kernel has no other way to be told
    table, tensor_of, first_of, numel_of, slots, like, num_blocks, share, rank, ranks: tl.constexpr, block: tl.constexpr
):
    """Bring one block of a rank's tensors to its owner; behind a tensor's end there are zeros."""
    # To all owners in turn, each rank beginning with another: no link waits, and nobody is written to by all at once.
    owner, place = (tl.program_id(0) + rank) % ranks, tl.program_id(0) // ranks
    own = owner * share + place
    if own >= num_blocks:
        return
    tensor = tl.load(tensor_of + own)
    begin = (own - tl.load(first_of + tensor)).to(tl.int64) * block
    left = tl.load(numel_of + tensor) - begin
    source = tl.multiple_of(tl.load(table + tensor).to(like.dtype), 16) + begin
    inside = tl.arange(0, block)
    if left >= block:  # noqa: SIM108  without a mask, whose end may lie anywhere, 16 bytes are read at a time
        values = tl.load(source + inside)
    else:
        values = tl.load(source + inside, mask=inside < left, other=0.0)
    slot = (rank * share + place).to(tl.int64) * block
    tl.store(tl.multiple_of(tl.load(slots + owner).to(like.dtype), 16) + slot + inside, values)


@triton.jit
def mean_kernel(  # noqa: PLR0913, PLR0917  the same
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
    """Give a table of int64 its values without a copy from the host, which a CUDA graph could not repeat.

    Args:
        table: Shape (n,), int64, on the device.
        addresses: As many.
    """
    for begin in range(0, len(addresses), _AT_ONCE):
        part = addresses[begin : begin + _AT_ONCE]
        address_kernel[(1,)](table[begin:], tuple(part), num_warps=1)
