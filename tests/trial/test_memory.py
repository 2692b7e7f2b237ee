"""Peak memory on a CPU, from /proc; the caching allocator's is measured in `tests/gpu`."""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from castwise.trial import memory
from castwise.trial.memory import CpuMemory, MemoryLimitError, memory_meter, without_storage

MIB = 2**20


class FakeProc:
    """A /proc/self whose `status` the test writes."""

    def __init__(self, folder: Path) -> None:
        self.status, self.clear_refs = folder / "status", folder / "clear_refs"

    def write(self, *, resident: int | None = None, peak: int | None = None) -> None:
        lines = ["Name:\tpython", "VmPeak:\t  999999 kB"]
        lines += [f"VmHWM:\t  {peak} kB"] if peak is not None else []
        lines += [f"VmRSS:\t  {resident} kB"] if resident is not None else []
        self.status.write_text("\n".join([*lines, "Threads:\t1", ""]))


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProc:
    fake = FakeProc(tmp_path)
    monkeypatch.setattr(memory, "_STATUS", fake.status)
    monkeypatch.setattr(memory, "_CLEAR_REFS", fake.clear_refs)
    return fake


@pytest.mark.parametrize(("peak", "growth"), [(350, 250), (90, 0)])
def test_peak_is_the_growth_of_the_resident_set(peak: int, growth: int, proc: FakeProc) -> None:
    proc.write(resident=100, peak=500)
    meter = memory_meter(torch.device("cpu"))
    proc.write(resident=80, peak=peak)
    assert meter.peak_allocated() == growth * 1024


@pytest.mark.parametrize("can_reset", [True, False])
def test_reset_peak(can_reset: bool, proc: FakeProc) -> None:
    proc.write(resident=100, peak=100)
    meter = CpuMemory()
    if not can_reset:
        proc.clear_refs.mkdir()  # cannot be written, by root neither
    meter.reset_peak()
    assert not can_reset or proc.clear_refs.read_text() == "5"
    proc.write(resident=100, peak=130)
    assert meter.peak_allocated() == 30 * 1024


@pytest.mark.parametrize("missing", ["file", "resident", "peak"])
def test_without_proc_the_peak_is_unknown(proc: FakeProc, missing: str) -> None:
    if missing != "file":
        proc.write(resident=None if missing == "resident" else 100, peak=None if missing == "peak" else 100)
    meter = CpuMemory()
    meter.reset_peak()
    assert meter.peak_allocated() is None


@contextmanager
def held(num_bytes: int) -> Iterator[None]:
    """Hold this much memory; a map of its own goes back to the system at once."""
    with mmap.mmap(-1, num_bytes) as held:
        for start in range(0, num_bytes, mmap.PAGESIZE):
            held[start] = 1
        yield


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_peak_and_limit_of_real_memory() -> None:
    meter = CpuMemory()
    meter.set_limit(16 * MIB)
    meter.reset_peak()
    meter.check()
    with held(64 * MIB), pytest.raises(MemoryLimitError) as found:
        meter.check()
    peak = meter.peak_allocated()
    meter.reset_peak()
    after = meter.peak_allocated()
    assert peak is not None
    assert after is not None
    assert 56 * MIB < peak < 96 * MIB
    assert after < 24 * MIB
    assert found.value.shortfall.free_bytes == 16 * MIB
    assert found.value.shortfall.needed_bytes > 56 * MIB


def test_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (torch.device("cuda", index) for index in range(2))
    bytes_of = {first: 5, second: 7}
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, bytes_of.__getitem__)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 - bytes_of[device], 10))
    meter = memory_meter(first, second)
    assert (meter.peak_allocated(), meter.peak_reserved(), meter.driver_used()) == (7, 7, 7)
    assert meter.reserved() == 12, "growth on any device tells that warm-up goes on"


@pytest.mark.parametrize("function", ["mse_loss", "smooth_l1_loss", "l1_loss"])
def test_a_loss_that_is_kept_holds_no_memory_of_its_elements(function: str) -> None:
    loss = getattr(torch.nn.functional, function)(torch.ones(1000, requires_grad=True), torch.zeros(1000))
    kept = without_storage(loss)
    assert kept.item() == loss.item()
    assert (kept.untyped_storage().nbytes(), kept.requires_grad) == (4, False)
