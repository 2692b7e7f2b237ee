"""What NVML says of a GPU, on a stand-in for its library, and what is said where it does not answer."""

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from castwise.nvml import GpuProcess, NvmlUnavailableError, compute_processes, driver_version

UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
NO_SUCH_PID = 2**22 + 1  # over the kernel's greatest (PID_MAX_LIMIT)


class FakeNvml(ModuleType):
    """A `pynvml` that counts its openings and fails where it is told to."""

    class NVMLError(Exception):
        pass

    class NotFoundError(NVMLError):
        pass

    def __init__(self, processes: list[tuple[int, int | None]] | None = None, fail_in: str = "") -> None:
        super().__init__("pynvml")
        self.num_open = 0
        self._processes = processes or []
        self._fail_in = fail_in

    def _called(self, name: str) -> None:
        if name == self._fail_in:
            raise self.NotFoundError(f"{name} failed")

    def nvmlInit(self) -> None:
        self._called("nvmlInit")
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self._called("nvmlShutdown")
        self.num_open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._called("nvmlSystemGetDriverVersion")
        return "570.00"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._called("nvmlDeviceGetHandleByUUID")
        assert uuid == UUID
        return "handle"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        self._called("nvmlDeviceGetComputeRunningProcesses")
        assert handle == "handle"
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in self._processes]


def install(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> FakeNvml:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


def test_the_driver_s_version(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, FakeNvml())
    assert driver_version() == "570.00"
    assert nvml.num_open == 0


def test_processes_with_their_memory_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, FakeNvml([(os.getpid(), 7 * 2**30), (NO_SUCH_PID, None)]))
    own, other = compute_processes(UUID)
    assert (own.pid, own.memory_bytes) == (os.getpid(), 7 * 2**30)
    assert own.name not in ("", "?")
    assert other == GpuProcess(pid=NO_SUCH_PID, name="?", memory_bytes=None)
    assert nvml.num_open == 0


def test_an_idle_gpu_has_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml())
    assert compute_processes(UUID) == ()


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlSystemGetDriverVersion"])
def test_no_version_where_nvml_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, FakeNvml(fail_in=name))
    assert driver_version() is None
    assert nvml.num_open == 0


@pytest.mark.parametrize(
    "name", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetComputeRunningProcesses", "nvmlShutdown"]
)
def test_what_nvml_says_when_it_fails_is_passed_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, FakeNvml(fail_in=name))
    with pytest.raises(NvmlUnavailableError, match=f"^{name} failed$"):
        compute_processes(UUID)
    assert nvml.num_open == (1 if name == "nvmlShutdown" else 0)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert driver_version() is None
    with pytest.raises(NvmlUnavailableError, match=r"pip install nvidia-ml-py"):
        compute_processes(UUID)


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert driver_version() is None
        with pytest.raises(NvmlUnavailableError, match=r"."):
            compute_processes(UUID)
    else:
        pynvml.nvmlShutdown()
        pytest.skip("this machine has a driver")
