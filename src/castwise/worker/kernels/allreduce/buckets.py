"""Mean of one dtype's tensors in memory that all ranks share. Imported only if Triton is installed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from castwise.worker.kernels.allreduce.flat_buffer import offsets, views
from castwise.worker.kernels.allreduce.triton_kernels import BLOCK_BYTES, mean_kernel, scatter_kernel, write_addresses

_WARPS = 8


class SharedGroup:
    """Outputs for the means of tensors, and slots for all ranks' values of the blocks that this rank averages.

    Attributes:
        outputs: The means, in the tensors' shapes.
    """

    def __init__(self, group: Sequence[Tensor], memory: Tensor, addresses: Sequence[int], rank: int) -> None:
        """Divide the shared memory.

        Args:
            group: Tensors of one dtype on one device.
            memory: Shape (n,), uint8, n at least `num_bytes`: this rank's.
            addresses: Of each rank's memory, as seen from this one.
            rank: This rank's number.
        """
        device, self._rank, self._ranks = memory.device, rank, len(addresses)
        self._block = BLOCK_BYTES // group[0].element_size()
        begins = offsets(group, BLOCK_BYTES)
        self._num_blocks = begins[-1] // self._block
        self._share = _share(self._num_blocks, self._ranks)
        output_bytes = self._num_blocks * BLOCK_BYTES
        self._flat = memory[:output_bytes].view(group[0].dtype)
        self.outputs = views(self._flat, group, begins)
        firsts = torch.tensor([begin // self._block for begin in begins], dtype=torch.int32)
        tensors = torch.arange(len(group), dtype=torch.int32)
        self._tensor_of = tensors.repeat_interleave(firsts.diff()).to(device)
        self._first_of = firsts.to(device)
        self._numel_of = torch.tensor([tensor.numel() for tensor in group], dtype=torch.int64, device=device)
        self._buffers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._slots = self._buffers + output_bytes
        self._table = torch.zeros(len(group), dtype=torch.int64, device=device)
        self._in_table: list[int] = []
        self._is_captured = False

    @staticmethod
    def num_bytes(group: Sequence[Tensor], ranks: int) -> int:
        """Return the shared memory that tensors like these need in each rank."""
        num_blocks = offsets(group, BLOCK_BYTES)[-1] * group[0].element_size() // BLOCK_BYTES
        return (num_blocks + ranks * _share(num_blocks, ranks)) * BLOCK_BYTES

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
            write_addresses(self._table, addresses)
            self._in_table = addresses
        scatter_kernel[(self._ranks * self._share,)](
            self._table,
            self._tensor_of,
            self._first_of,
            self._numel_of,
            self._slots,
            self._flat,
            self._num_blocks,
            self._share,
            self._rank,
            ranks=self._ranks,
            block=self._block,
            num_warps=_WARPS,
        )

    def average(self) -> None:
        """Write the means of this rank's blocks into all ranks' outputs; all ranks must have scattered theirs."""
        own = min(self._share, self._num_blocks - self._rank * self._share)
        if own > 0:
            mean_kernel[(own,)](
                self._slots,
                self._buffers,
                self._flat,
                self._share,
                self._rank,
                1 / self._ranks,
                ranks=self._ranks,
                block=self._block,
                num_warps=_WARPS,
            )


def _share(num_blocks: int, ranks: int) -> int:
    return -(-num_blocks // ranks)
