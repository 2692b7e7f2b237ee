"""The GPU's clock and power while something ran, watched from outside."""

import time
from dataclasses import dataclass

import clocks
import pytest
from clocks import Busy, busy_of, watched, with_clock

from castwise.telemetry.gpu import GpuUnreadableError, Sample


def sample(watts: float | None, megahertz: float, *reasons: str) -> Sample:
    return Sample(power_watts=watts, sm_clock_hertz=megahertz * 1e6, throttle_reasons=reasons)


def test_it_is_the_middle_of_the_time_in_which_most_is_drawn() -> None:
    samples = [
        sample(80.0, 345.0, "gpu_idle"),
        sample(600.0, 1980.0),
        sample(690.0, 1500.0, "sw_power_cap"),
        sample(700.0, 1400.0, "sw_power_cap"),
        sample(680.0, 1600.0, "sw_power_cap"),
        sample(675.0, 345.0, "gpu_idle"),
        sample(None, 1980.0),
    ]
    assert busy_of(samples) == Busy(clock_hertz=1500e6, power_watts=690.0, num_samples=3)
    assert busy_of([sample(None, 1980.0)]) is None


def test_without_a_gpu_only_the_action_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(uuid: str) -> None:
        raise GpuUnreadableError(uuid)

    monkeypatch.setattr(clocks, "open_monitor", unreadable)
    assert watched(None, lambda: 5) == (5, None)
    assert watched("GPU-0", lambda: 5) == (5, None)
    assert with_clock(None, lambda: Timed(5.0)) == Timed(5.0)


@dataclass(frozen=True)
class Timed:
    seconds: float
    clock_hertz: float | None = None
    power_watts: float | None = None


class Board:
    """A GPU that works at its limit."""

    def __init__(self) -> None:
        self.is_closed = False

    def read(self) -> Sample:
        return sample(690.0, 1500.0, "sw_power_cap")

    def close(self) -> None:
        self.is_closed = True


def test_it_is_watched_until_it_ends_whether_well_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    boards = [Board(), Board()]
    opened = iter(boards)
    monkeypatch.setattr(clocks, "open_monitor", lambda _: next(opened))
    monkeypatch.setattr(clocks, "_PERIOD_SECONDS", 0.01)
    _, busy = watched("GPU-0", lambda: time.sleep(0.1))
    assert busy is not None
    assert busy.clock_hertz == 1500e6
    assert busy.num_samples > 2, "the first, the last, and some between"
    with pytest.raises(ZeroDivisionError):
        watched("GPU-0", lambda: 1 / 0)
    assert all(board.is_closed for board in boards)


def test_what_was_timed_has_the_clock_and_power_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "open_monitor", lambda _: Board())
    assert with_clock("GPU-0", lambda: Timed(5.0)) == Timed(5.0, 1500e6, 690.0)
