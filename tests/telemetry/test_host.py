"""What the kernel reports of the CPUs and of processes' parents, by made-up files."""

from pathlib import Path

import pytest

from castwise.telemetry import host
from castwise.telemetry.host import HostSample, is_descendant, pressure, read_host, steal

PRESSURE = "some avg10=0.00 avg60=1.20 avg300=0.50 total=2500000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=9\n"
STAT = "cpu  10 20 30 40 50 60 70 80 5 5\ncpu0 1 2 3 4 5 6 7 8 0 0\n"
NONE = HostSample(None, None, None, None)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "_PROC", tmp_path)
    monkeypatch.setattr(host, "_PRESSURE_FILES", (str(tmp_path / "cgroup"), str(tmp_path / "pressure")))
    return tmp_path


def test_counters_of_the_machine_and_of_a_container(kernel: Path) -> None:
    (kernel / "pressure").write_text(PRESSURE)
    (kernel / "stat").write_text(STAT)
    sample = read_host()
    assert (sample.pressure_seconds, sample.steal_ticks, sample.total_ticks) == (2.5, 80, 360)
    (kernel / "cgroup").write_text(PRESSURE.replace("2500000", "1000000"))
    assert read_host().pressure_seconds == 1.0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pressure", ""),
        ("pressure", "some"),
        ("pressure", "some avg10=0.00 total=many"),
        ("stat", ""),
        ("stat", "cpu 1 2 3"),
        ("stat", "cpu a b c d e f g h"),
    ],
)
def test_a_kernel_without_counters(name: str, text: str, kernel: Path) -> None:
    (kernel / name).write_text(text)
    sample = read_host()
    assert (sample.pressure_seconds, sample.steal_ticks, sample.total_ticks) == (None, None, None)


def test_shares_lie_between_0_and_1_or_are_unknown() -> None:
    early, late = HostSample(1.0, 5, 10, None), HostSample(9.0, 4, 20, None)
    assert (pressure(early, late, 2.0), pressure(late, early, 2.0), steal(early, late)) == (1.0, 0.0, 0.0)
    assert pressure(NONE, late, 1.0) is pressure(late, NONE, 1.0) is pressure(late, late, 0.0) is None
    assert steal(NONE, late) is steal(late, NONE) is steal(late, late) is None


def test_descendants(kernel: Path) -> None:
    for pid, parent in ((30, 20), (20, 10), (10, 1), (1, 0)):
        (kernel / str(pid)).mkdir()
        (kernel / str(pid) / "stat").write_text(f"{pid} (a) S 99 (b) S {parent} {pid} 0 -1\n")
    assert is_descendant(30, 10)
    assert is_descendant(30, 30)
    assert not is_descendant(10, 30)
    assert not is_descendant(77, 10)
