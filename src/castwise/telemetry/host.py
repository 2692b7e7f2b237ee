"""What the kernel reports of the machine's CPUs and of processes' parents; every answer may be missing."""

import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
# A container's own figure first: it may use up its share of CPUs while the machine has idle ones.
_PRESSURE_FILES = ("/sys/fs/cgroup/cpu.pressure", "/proc/pressure/cpu")
_MAX_ANCESTORS = 64


@dataclass(frozen=True)
class HostSample:
    """The CPUs' counters at one moment; None if the kernel has none.

    Attributes:
        pressure_seconds: Time in which a runnable task waited for a CPU, since boot. Source: Linux,
            Documentation/accounting/psi.rst: "some", total in µs.
        steal_ticks: CPU time that the hypervisor gave to others. Source: proc_stat(5).
        total_ticks: All CPU time without guests', which is part of the user's.
        load: Runnable tasks, averaged over a minute, over the CPUs that this process may use.
    """

    pressure_seconds: float | None
    steal_ticks: int | None
    total_ticks: int | None
    load: float | None


def read_host() -> HostSample:
    """Return the CPUs' counters now."""
    ticks = _ticks()
    return HostSample(
        pressure_seconds=_pressure_seconds(),
        steal_ticks=ticks[7] if ticks else None,
        total_ticks=sum(ticks) if ticks else None,
        load=_load(),
    )


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
        parent = _parent(pid)
        if parent is None:
            return False
        pid = parent
    return False


def _parent(pid: int) -> int | None:
    # The name in brackets may hold anything, brackets too. Source: proc_pid_stat(5).
    text = _text(_PROC / str(pid) / "stat")
    fields = text.rpartition(")")[2].split() if text else []
    return int(fields[1]) if len(fields) > 1 and int(fields[1]) > 0 else None


def _pressure_seconds() -> float | None:
    for name in _PRESSURE_FILES:
        for line in (_text(Path(name)) or "").splitlines():
            kind, _, total = line.partition(" ")[0], *line.partition("total=")[1:]
            if kind == "some" and total.isdecimal():
                return int(total) / 1e6
    return None


def _ticks() -> list[int] | None:
    first = (_text(_PROC / "stat") or "").partition("\n")[0].split()
    if len(first) < 9 or first[0] != "cpu" or not all(word.isdecimal() for word in first[1:9]):
        return None
    return [int(word) for word in first[1:9]]


def _load() -> float | None:
    try:
        return os.getloadavg()[0] / len(os.sched_getaffinity(0))
    except OSError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
