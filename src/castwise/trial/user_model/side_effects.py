"""Side effects of the user's code during training: printing, kept tensors, running processes and threads."""

import contextlib
import itertools
import os
import sys
import threading
import time
from pathlib import Path

from castwise.records.schema import Block
from castwise.trial.memory import CpuMemory, DeviceMemory, MpsMemory
from castwise.trial.user_model.global_state import changes_while_training, read_process_state

_STDOUT = 1

# Growth over all blocks that counts as a leak: allocators round, and lists of losses grow.
_LEAK_BYTES = 4 * 2**20
_LEAVE_SECONDS = 1.0  # that a helper may take to end
_FEWEST_BLOCKS = 4


class SideEffectWatch:
    """Watches the user's code after set-up for side effects that make its measurements doubtful."""

    def __init__(self, memory: DeviceMemory | MpsMemory | CpuMemory) -> None:
        self._memory = memory
        self._state = read_process_state()
        self._printed = 0
        self._held: list[int | None] = []  # bytes in use after each block; None if unknown
        self._num_steps = 0  # of all blocks except the first

    def start(self) -> None:
        self._printed = _printed_bytes()

    def record_block(self, block: Block) -> None:
        self._num_steps += block.all_steps if self._held else 0
        self._held.append(self._memory.current_bytes())

    def notes(self) -> tuple[str, ...]:
        notes = changes_while_training(self._state)
        printed = _printed_bytes() - self._printed
        if printed > 0:
            notes.append(f"{printed:,} bytes were printed while steps were timed: printing is part of these step times")
        held = [value for value in self._held if value is not None]
        grows = all(earlier < later for earlier, later in itertools.pairwise(held))
        if grows and len(held) >= _FEWEST_BLOCKS and held[-1] - held[0] >= _LEAK_BYTES:
            mebibytes = (held[-1] - held[0]) / max(1, self._num_steps) / 2**20
            notes.append(
                f"memory grew by {mebibytes:.2g} MiB a step, in every block: something keeps tensors of past steps, "
                "and the peak is not that of a step"
            )
        return tuple(notes)


def _printed_bytes() -> int:
    """Return the bytes that this process has printed so far, if its output goes to a file; else 0."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    try:
        return os.fstat(_STDOUT).st_size
    except OSError:
        return 0


def count_helpers() -> int:
    """Return the number of running processes and Python threads that this process has started."""
    processes = 0
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            processes += len((task / "children").read_text().split())
    return processes + threading.active_count()


def helper_notes(before: int) -> list[str]:
    """Return a sentence if there are more processes and threads than before."""
    deadline = time.monotonic() + _LEAVE_SECONDS
    while (count := count_helpers() - before) > 0 and time.monotonic() < deadline:
        time.sleep(0.01)  # a data loader's queue thread ends some time after its workers
    if count <= 0:
        return []
    what = "processes or threads" if count > 1 else "process or thread"
    return [f"your code has started {count} {what} that run{'s' if count == 1 else ''} during the steps"]
