import subprocess
import sys
from pathlib import Path

import pytest

from castwise.records.schema import Block
from castwise.worker.memory import CpuMemory
from castwise.worker.user_model import side_effects
from castwise.worker.user_model.side_effects import SideEffectWatch, count_helpers, helper_notes

MIB = 2**20


class FakeMemory(CpuMemory):
    def __init__(self, *held: int | None) -> None:
        super().__init__()
        self._values = iter(held)

    def current_bytes(self) -> int | None:
        return next(self._values)


def watched(*held: int | None, printed: tuple[int, int] = (0, 0), steps: int = 10) -> tuple[str, ...]:
    readings = iter(printed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_effects, "_printed_bytes", lambda: next(readings))
        watch = SideEffectWatch(FakeMemory(*held))
        watch.start()
        for _ in held:
            watch.record_block(Block(seconds=1.0, num_steps=steps, loss=1.0))
        return watch.notes()


def test_a_quiet_trial_has_no_notes() -> None:
    assert watched(100 * MIB, 100 * MIB, 100 * MIB, 100 * MIB) == ()


def test_memory_that_grows_in_every_block_is_a_leak() -> None:
    (note,) = watched(100 * MIB, 120 * MIB, 140 * MIB, 160 * MIB)
    assert note.startswith("memory grew by 2 MiB a step, in every block: something keeps tensors")


@pytest.mark.parametrize(
    "held",
    [
        (100 * MIB, 120 * MIB, 119 * MIB, 160 * MIB),  # not in every block
        (100 * MIB, 100 * MIB + 1, 100 * MIB + 2, 100 * MIB + 3),  # too little
        (100 * MIB, 120 * MIB, 140 * MIB),  # too few blocks to tell
        (None, None, None, None),
    ],
)
def test_other_growth_is_none(held: tuple[int | None, ...]) -> None:
    assert watched(*held) == ()


def test_printing_while_steps_are_timed_is_said() -> None:
    (note,) = watched(MIB, printed=(100, 12_445))
    assert note == "12,345 bytes were printed while steps were timed: printing is part of these step times"


def test_printed_bytes_are_those_of_the_log(tmp_path: Path) -> None:
    code = (
        "from castwise.worker.user_model.side_effects import _printed_bytes; before = _printed_bytes(); "
        "print('x' * 99); after = _printed_bytes(); import sys; sys.exit(after - before)"
    )
    with (tmp_path / "log").open("w") as log:
        assert subprocess.run([sys.executable, "-c", code], stdout=log, check=False).returncode == 100


def test_processes_that_still_run_are_counted() -> None:
    before = count_helpers()
    assert helper_notes(before) == []
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (note,) = helper_notes(before)
        assert note == "your code has started 1 process or thread that runs during the steps"
    finally:
        process.kill()
        process.communicate()
    assert helper_notes(before) == []
