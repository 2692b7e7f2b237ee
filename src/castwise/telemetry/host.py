"""What the kernel reports of the machine's CPUs and of processes' parents; every answer may be missing."""

import os
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
# A container's own figure first: it may use up its share of CPUs while the machine has idle ones.
_PRESSURE_FILES = ("/sys/fs/cgroup/cpu.pressure", "/proc/pressure/cpu")
_MAX_ANCESTORS = 64


class HostSample(NamedTuple):
    """The CPUs' counters at one moment; None if the kernel has none."""

    # Time in which a runnable task waited for a CPU, since boot: "some", total in µs.
    # Source: Linux, Documentation/accounting/psi.rst.
    pressure_seconds: float | None
    steal_ticks: int | None  # CPU time that the hypervisor gave to others. Source: proc_stat(5)
    total_ticks: int | None  # without guests', which is part of the user's
    load: float | None  # runnable tasks, averaged over a minute, over the CPUs that this process may use


def read_host() -> HostSample:
    words = text_of(_PROC / "stat").partition("\n")[0].split()
    is_counted = len(words) >= 9 and words[0] == "cpu" and all(word.isdecimal() for word in words[1:9])
    ticks = [int(word) for word in words[1:9]] if is_counted else None
    try:
        load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    except OSError:
        load = None
    return HostSample(
        pressure_seconds=_pressure_seconds(),
        steal_ticks=ticks[7] if ticks else None,
        total_ticks=sum(ticks) if ticks else None,
        load=load,
    )


def _pressure_seconds() -> float | None:
    for name in _PRESSURE_FILES:
        for line in text_of(Path(name)).splitlines():
            total = line.partition("total=")[2]
            if line.startswith("some ") and total.isdecimal():
                return int(total) / 1e6
    return None


def pressure(before: HostSample, after: HostSample, seconds: float) -> float | None:
    """Return the share of the time in which a runnable task waited for a CPU; None if it is not counted."""
    if before.pressure_seconds is None or after.pressure_seconds is None or seconds <= 0:
        return None
    return min(1.0, max(0.0, after.pressure_seconds - before.pressure_seconds) / seconds)


def steal(before: HostSample, after: HostSample) -> float | None:
    """Return the share of the CPUs' time that the hypervisor gave to others; None if it is not counted."""
    if before.steal_ticks is None or after.steal_ticks is None:
        return None
    passed = (after.total_ticks or 0) - (before.total_ticks or 0)
    return max(0.0, (after.steal_ticks - before.steal_ticks) / passed) if passed > 0 else None


def is_descendant(pid: int, ancestor: int) -> bool:
    """Return whether a process is another one, or a child of it, or a child's child, and so on."""
    for _ in range(_MAX_ANCESTORS):
        if pid == ancestor:
            return True
        # The name in brackets may hold anything, brackets too. Source: proc_pid_stat(5).
        fields = text_of(_PROC / str(pid) / "stat").rpartition(")")[2].split()
        if len(fields) < 2 or int(fields[1]) <= 0:
            return False
        pid = int(fields[1])
    return False


def text_of(path: Path) -> str:
    """Return what is in a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
