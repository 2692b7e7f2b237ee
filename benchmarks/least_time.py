"""The least time of a training step, from the operations and the bytes that it cannot do without. No torch.

By arithmetic: all multiplications and additions of products at the peak of the format. By memory traffic: all bytes at
the peak of the memory. Neither alone can be beaten, and the larger is the bound. Operation by operation is what kernels
that run one after another need, each at whichever peak it meets first: a loop that fuses no more than is assumed in
`work_counter.py` cannot be faster; one that fuses more, or keeps tensors in the cache, can.
"""

from collections.abc import Iterable
from dataclasses import dataclass

_MASTER_BYTES = 4  # of weights and optimizer states, which are float32 in every loop that is measured


@dataclass(frozen=True)
class Operation:
    """One operation of a step.

    Attributes:
        name: torch's.
        flops: Multiplications and additions of products.
        elements: Numbers read from memory and written to it, in the format of the step.
    """

    name: str
    flops: float
    elements: float


@dataclass(frozen=True)
class Work:
    """What a step does.

    Attributes:
        operations: Forward, loss and backward.
        num_parameters: Weights that are trained.
        num_states: Numbers that the optimizer keeps for each.
        clips: Whether the gradients' norm is taken before the update, for which they are read once more.
    """

    operations: tuple[Operation, ...]
    num_parameters: int
    num_states: int
    clips: bool

    @property
    def flops(self) -> float:
        """Return the operations of all products."""
        return sum(operation.flops for operation in self.operations)

    def bytes(self, element_bytes: int) -> float:
        """Return all that is moved, the update's too.

        Args:
            element_bytes: Of a number in the format that products are computed in: 2 or 4.
        """
        moved = sum(operation.elements for operation in self.operations) * element_bytes
        return moved + self.update_bytes(element_bytes)

    def rest_bytes(self, element_bytes: int) -> float:
        """Return all that is moved by what is no product, the update's too.

        Args:
            element_bytes: Of a number in the format that products are computed in: 2 or 4.
        """
        moved = sum(operation.elements for operation in self.operations if not operation.flops) * element_bytes
        return moved + self.update_bytes(element_bytes)

    def update_bytes(self, element_bytes: int) -> float:
        """Return what the optimizer's step moves.

        A gradient is read once, and once more for its norm; weight and states are read and written in float32; where
        the format is another, the weight's copy in it is written.
        """
        gradients = element_bytes * (2 if self.clips else 1)
        copy = element_bytes if element_bytes != _MASTER_BYTES else 0
        return self.num_parameters * (gradients + copy + 2 * _MASTER_BYTES * (1 + self.num_states))


@dataclass(frozen=True)
class Ceilings:
    """What a device can do at the most.

    Attributes:
        flops_per_second: Of products in the format.
        bytes_per_second: Of its memory, reads and writes together.
    """

    flops_per_second: float
    bytes_per_second: float


@dataclass(frozen=True)
class LeastTime:
    """The least seconds of a step.

    Attributes:
        arithmetic: By the operations alone.
        memory: By the bytes alone.
        by_operation: Operation by operation, and then the update.
    """

    arithmetic: float
    memory: float
    by_operation: float

    @property
    def bound(self) -> float:
        """Return what no step of this traffic can go below."""
        return max(self.arithmetic, self.memory)


def least_time(work: Work, element_bytes: int, ceilings: Ceilings) -> LeastTime:
    """Return the least time of a step.

    Args:
        work: What it does.
        element_bytes: Of a number in the format that products are computed in.
        ceilings: Of the device, in that format.
    """
    rate, bandwidth = ceilings.flops_per_second, ceilings.bytes_per_second
    update = work.update_bytes(element_bytes) / bandwidth
    return LeastTime(
        arithmetic=work.flops / rate,
        memory=work.bytes(element_bytes) / bandwidth,
        by_operation=update + _one_by_one(work.operations, element_bytes, ceilings),
    )


def _one_by_one(operations: Iterable[Operation], element_bytes: int, ceilings: Ceilings) -> float:
    return sum(
        max(each.flops / ceilings.flops_per_second, each.elements * element_bytes / ceilings.bytes_per_second)
        for each in operations
    )
