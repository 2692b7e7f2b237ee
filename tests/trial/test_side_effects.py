import subprocess
import sys
from pathlib import Path

import pytest

from castwise.records.schema import Block
from castwise.trial.memory import CpuMemory
from castwise.trial.user_model.side_effects import SideEffectWatch

MIB = 2**20


class FakeMemory(CpuMemory):
    def __init__(self, *held: int | None) -> None:
        super().__init__()
        self._values = iter(held)

    def current_bytes(self) -> int | None:
        return next(self._values)


def watched(*held: int | None) -> tuple[str, ...]:
    """Return the notes on blocks of 10 steps after which so much memory was in use."""
    watch = SideEffectWatch(FakeMemory(*held))
    watch.start()
    for _ in held:
        watch.record_block(Block(seconds=1.0, num_steps=10, loss=1.0))
    return watch.notes()


def test_memory_growth_in_every_block_is_a_leak() -> None:
    (note,) = watched(100 * MIB, 120 * MIB, 140 * MIB, 160 * MIB)
    assert note.startswith("memory grew by 2 MiB a step, in every block: something keeps tensors")


@pytest.mark.parametrize(
    "held",
    [
        (100 * MIB, 100 * MIB, 100 * MIB, 100 * MIB),
        (100 * MIB, 120 * MIB, 119 * MIB, 160 * MIB),  # not in every block
        (100 * MIB, 100 * MIB + 1, 100 * MIB + 2, 100 * MIB + 3),  # too little
        (100 * MIB, 120 * MIB, 140 * MIB),  # too few blocks to tell
        (None, None, None, None),
    ],
)
def test_other_memory_growth_is_no_leak(held: tuple[int | None, ...]) -> None:
    assert watched(*held) == ()


PRINTING = """
import sys
from castwise.trial.memory import CpuMemory
from castwise.trial.user_model.side_effects import SideEffectWatch
print("before")
watch = SideEffectWatch(CpuMemory())
watch.start()
print("x" * 12_344)
print(*watch.notes(), file=sys.stderr)
"""


def test_printing_is_noted(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-c", PRINTING]
        done = subprocess.run(command, stdout=log, stderr=subprocess.PIPE, text=True, check=True)
    assert "12,345 bytes were printed while steps were timed" in done.stderr


STARTING = """
import subprocess, sys
from castwise.trial.user_model.side_effects import count_helpers, helper_notes
before = count_helpers()
assert helper_notes(before) == []
process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(*helper_notes(before))
process.communicate()
assert helper_notes(before) == []
"""


def test_running_processes_are_counted() -> None:
    # In a process of its own: in this one, a process or thread of another test could end meanwhile.
    done = subprocess.run([sys.executable, "-c", STARTING], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "your code has started 1 process or thread that runs during the steps\n"
