"""What torch's caching allocator makes of the tensors of a few steps: the largest batch that fits between its gaps.

Source: pytorch c10/cuda/CUDACachingAllocator.cpp (2.11), without expandable segments.
"""

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

# The number of a storage and its bytes; the number is negative when it is freed.
Event = tuple[int, int]

_MIB = 2**20
_ROUNDING, _SMALL, _LEAST_OF_ITS_SIZE = 512, _MIB, 10 * _MIB
_SMALL_SEGMENT, _LARGE_SEGMENT, _SEGMENT_ROUNDING = 2 * _MIB, 20 * _MIB, 2 * _MIB
_MOST = 2**24  # samples
_SCAN = 32  # Batches are tried one by one that differ by 3 %.


class _OutOfMemoryError(Exception):
    pass


class _Block:
    def __init__(self, size: int, place: int, *, is_small: bool) -> None:
        self.size, self.place, self.is_small, self.is_free = size, place, is_small, False
        self.before: _Block | None = None  # in its segment
        self.after: _Block | None = None


class _Allocator:
    """Gives out the smallest free block that is large enough, the first of those; else asks for a segment."""

    def __init__(self, room_bytes: int) -> None:
        self._room, self._reserved, self._num_segments = room_bytes, 0, 0
        self._used: dict[int, _Block] = {}
        # By whether they are small: their size, their place, and themselves, in order.
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}

    def allocate(self, number: int, num_bytes: int) -> None:
        size = max(1, -(-num_bytes // _ROUNDING)) * _ROUNDING
        is_small = size <= _SMALL
        free = self._free[is_small]
        at = bisect.bisect_left(free, (size, -1))
        block = free.pop(at)[2] if at < len(free) else self._new_segment(size, is_small=is_small)
        rest = block.size - size
        if rest >= _ROUNDING if is_small else rest > _SMALL:
            other = _Block(rest, block.place + size, is_small=is_small)
            other.before, other.after, block.size = block, block.after, size
            if block.after is not None:
                block.after.before = other
            block.after = other
            self._put(other)
        block.is_free, self._used[number] = False, block

    def free(self, number: int) -> None:
        block = self._used.pop(number, None)
        if block is None:
            return
        if block.before is not None and block.before.is_free:
            self._take(block.before)
            block = self._joined(block.before, block)
        if block.after is not None and block.after.is_free:
            self._take(block.after)
            block = self._joined(block, block.after)
        self._put(block)

    def _new_segment(self, size: int, *, is_small: bool) -> _Block:
        whole = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT
        if size >= _LEAST_OF_ITS_SIZE:
            whole = -(-size // _SEGMENT_ROUNDING) * _SEGMENT_ROUNDING
        if self._reserved + whole > self._room:
            for free in self._free.values():  # segments without any tensor go back to the driver
                unused = {place: size for size, place, block in free if block.before is None and block.after is None}
                self._reserved -= sum(unused.values())
                free[:] = [each for each in free if each[1] not in unused]
        if self._reserved + whole > self._room:
            raise _OutOfMemoryError
        self._reserved += whole
        self._num_segments += 1
        return _Block(whole, self._num_segments << 50, is_small=is_small)

    def _put(self, block: _Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.is_small], (block.size, block.place, block))

    def _take(self, block: _Block) -> None:
        free = self._free[block.is_small]
        del free[bisect.bisect_left(free, (block.size, block.place))]

    def _joined(self, block: _Block, after: _Block) -> _Block:
        block.size, block.after = block.size + after.size, after.after
        if block.after is not None:
            block.after.before = block
        return block


class StepEvents:
    """What becomes of the storages of the same steps at two batch sizes, and at others: each size is on a line."""

    def __init__(self, steps: Mapping[int, Sequence[Event]], workspace_bytes: int) -> None:
        """Take the events by batch size; the workspace is there from the beginning.

        Raises:
            ValueError: The steps have other operations at the other size.
        """
        (self._few, first), (many, second) = ((size, _ordered(events)) for size, events in sorted(steps.items()))
        self._workspace = workspace_bytes
        self._lines = [
            (number, small, (large - small) / (many - self._few))
            for (number, small), (other, large) in zip(first, second, strict=True)
            if number == other
        ]
        if len(self._lines) < len(first):
            raise ValueError("the steps differ")

    def at(self, batch_size: int) -> Iterator[Event]:
        for number, num_bytes, each in self._lines:
            yield number, math.ceil(num_bytes + each * (batch_size - self._few))

    def peak_bytes(self, batch_size: int) -> int:
        """Return the most that is alive at a time, the workspace included."""
        alive, now, most = dict[int, int](), self._workspace, 0
        for number, num_bytes in self.at(batch_size):
            if number > 0:
                alive[number] = num_bytes
                now += num_bytes
                most = max(most, now)
            else:
                now -= alive.pop(-number, 0)
        return most

    def fits(self, batch_size: int, room_bytes: int) -> bool:
        allocator = _Allocator(room_bytes)
        try:
            allocator.allocate(0, self._workspace)
            for number, num_bytes in self.at(batch_size):
                if number > 0:
                    allocator.allocate(number, num_bytes)
                else:
                    allocator.free(-number)
        except _OutOfMemoryError:
            return False
        return True

    def largest(self, room_bytes: int) -> int | None:
        """Return the largest batch that fits with all smaller ones; None if none is too large.

        Beyond it another may fit by chance, whose tensors fill what others have left.
        """
        beyond = 1
        while beyond <= _MOST and self.fits(beyond, room_bytes):
            beyond *= 2
        if beyond > _MOST:
            return None
        largest, beyond = 0, max(1, 3 * beyond // 8)
        while self.fits(beyond, room_bytes):
            largest, beyond = beyond, beyond + max(1, beyond // _SCAN)
        while beyond - largest > 1:
            middle = (largest + beyond) // 2
            largest, beyond = (middle, beyond) if self.fits(middle, room_bytes) else (largest, middle)
        return largest


def _ordered(events: Sequence[Event]) -> list[Event]:
    """Return events in which storages that are freed at once are so in the order of their numbers: it is arbitrary."""
    runs = itertools.groupby(events, lambda event: event[0] < 0)
    return [event for is_end, run in runs for event in (sorted(run) if is_end else run)]
