"""Intel's XPU and Apple's MPS, by fake modules of torch: what castwise asks them for, and what it says they lack."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import CommandLine
from fake_engine import FakeEngine, fake_environment, fake_spec

from castwise.apply import hardware
from castwise.apply.hardware import find_device, read_hardware
from castwise.apply.precision import autocast_maker
from castwise.errors import UsageError
from castwise.orchestrator.machine import check_device_name, detect_machine
from castwise.orchestrator.runner import unsupported_reason
from castwise.registry.precisions import find_precision, why_emulated, why_unsupported
from castwise.registry.technique_fit import why_unsupported as why_technique_unsupported
from castwise.trial import environment as environment_module
from castwise.trial.environment import read_environment
from castwise.trial.memory import memory_meter
from castwise.trial.steady_run import time_works

MPS, XPU = torch.device("mps", 0), torch.device("xpu", 0)
GIB = 2**30


class Event:
    """A moment of a clock that `advance` sets."""

    now = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.now

    def elapsed_time(self, other: "Event") -> float:
        return 1e3 * (other.at - self.at)


class FakeModule(SimpleNamespace):
    """What torch.xpu and torch.mps have in common; `calls` has the names of what was called."""

    def __init__(self, **functions: Any) -> None:
        super().__init__(**functions, Event=Event, calls=[], device_count=lambda: 1)

    def synchronize(self, *device: torch.device) -> None:
        self.calls.append(("synchronize", *device))


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    """Let torch have an Apple GPU."""
    fake = FakeModule(
        recommended_max_memory=lambda: 16 * GIB,
        driver_allocated_memory=lambda: 3 * GIB,
        current_allocated_memory=lambda: GIB,
        empty_cache=lambda: fake.calls.append("empty_cache"),
        set_per_process_memory_fraction=lambda share: fake.calls.append(("limit", share)),
    )
    monkeypatch.setattr(torch, "mps", fake)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M4", raising=False)
    _let_torch_have(monkeypatch, "mps", fake)
    return fake


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    """Let torch have an Intel GPU."""
    name = "Intel(R) Arc(TM) B580 Graphics"
    fake = FakeModule(
        get_device_name=lambda _: name,
        get_device_properties=lambda _: SimpleNamespace(total_memory=12 * GIB),
        max_memory_allocated=lambda _: 2 * GIB,
        max_memory_reserved=lambda _: 3 * GIB,
        memory_allocated=lambda _: GIB,
        memory_reserved=lambda _: 3 * GIB,
        mem_get_info=lambda _: (8 * GIB, 12 * GIB),
        reset_peak_memory_stats=lambda _: fake.calls.append("reset"),
        memory_stats=lambda _: {},
        set_device=lambda device: fake.calls.append(("set_device", device)),
        init=lambda: None,
    )
    _let_torch_have(monkeypatch, "xpu", fake)
    return fake


def _let_torch_have(monkeypatch: pytest.MonkeyPatch, kind: str, module: FakeModule) -> None:
    opened: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
    monkeypatch.setattr(hardware, "module_of", lambda device: module)
    monkeypatch.setattr("castwise.trial.memory.module_of", lambda device: module)
    monkeypatch.setattr(environment_module, "module_of", lambda device: module)
    monkeypatch.setattr(torch, "empty", lambda *_, device: opened.append(device))


@pytest.mark.usefixtures("mps")
def test_the_device_is_the_one_that_torch_has() -> None:
    assert [str(find_device(name)) for name in ("auto", "mps", "mps:0", "cpu")] == ["mps:0", "mps:0", "mps:0", "cpu"]
    with pytest.raises(UsageError, match="no device 'cuda:1': torch sees mps only"):
        find_device("cuda:1")


def test_without_an_accelerator_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert str(find_device("auto")) == "cpu"
    with pytest.raises(UsageError, match="no device 'xpu': torch sees no GPU"):
        find_device("xpu")


def test_apple_s_gpu(mps: FakeModule) -> None:
    found = read_environment(MPS, None)
    assert (found.gpu, found.device_type, found.gpu_memory_bytes, found.num_gpus) == ("Apple M4", "mps", 16 * GIB, 1)
    assert found.gpu_model is not None
    assert (found.capability, found.cuda, found.gpu_uuid) == (None, None, None)
    meter = memory_meter(MPS)
    meter.reset_peak()
    assert (meter.peak_allocated(), meter.peak_reserved(), meter.current_bytes()) == (3 * GIB, 3 * GIB, GIB)
    meter.set_limit(4 * GIB)
    assert mps.calls == ["empty_cache", ("limit", 0.25)]


def test_intel_s_gpu(xpu: FakeModule) -> None:
    found = read_environment(XPU, None)
    assert (found.gpu, found.device_type) == ("Intel(R) Arc(TM) B580 Graphics", "xpu")
    assert (found.gpu_memory_bytes, found.num_gpus) == (12 * GIB, 1)
    meter = memory_meter(XPU)
    meter.reset_peak()
    assert (meter.peak_allocated(), meter.peak_reserved(), meter.driver_used()) == (2 * GIB, 3 * GIB, 4 * GIB)
    assert xpu.calls == [("set_device", XPU), "reset"]


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_works_are_timed_by_the_device_s_events(kind: str, request: pytest.FixtureRequest) -> None:
    module, device = request.getfixturevalue(kind), torch.device(kind, 0)

    def work(seconds: float) -> None:
        Event.now += seconds

    assert time_works(device, [lambda: work(1.0), lambda: work(0.5)], rested=True) == [1.0, 0.5]
    synchronized = ("synchronize",) if kind == "mps" else ("synchronize", device)
    assert module.calls == [synchronized, synchronized]


@pytest.mark.parametrize("name", ["fp16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_autocast_s_types(kind: str, name: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(kind)
    row, device = find_precision(name), read_hardware(torch.device(kind, 0))
    assert why_unsupported(row, device) is why_emulated(row, device) is None
    tag = torch.compiler.config.cache_key_tag
    try:
        region: Any = autocast_maker(row, kind).func(kind, dtype=getattr(torch, row.autocast_dtype or ""))  # type: ignore[attr-defined]
    finally:
        torch.compiler.config.cache_key_tag = tag
    assert (region.device, region.fast_dtype) == (kind, getattr(torch, row.autocast_dtype or ""))


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_what_they_lack_is_unsupported_with_a_reason(kind: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(kind)
    device = read_hardware(torch.device(kind, 0))
    for name in ("tf32", "fp8-tensorwise", "mxfp8"):
        assert (why_unsupported(find_precision(name), device) or "").endswith(f"has {kind}")
    machine = fake_environment(gpu=device.name, capability=None, architecture=kind)

    def why(*techniques: str, **changes: object) -> str | None:
        return unsupported_reason(fake_spec(device=f"{kind}:0", techniques=techniques, **changes), machine)

    assert why("cuda-graph") == f"cuda-graph needs a CUDA device; this is {kind}:0"
    assert why("fused-optimizer") is None
    prototype = f"compile is compiled, and torch.compile for mps is a prototype; this is {kind}:0"
    assert why("compile") == (prototype if kind == "mps" else None)
    assert why(world_size=2, parallelism="ddp") == (
        f"castwise spreads a step over GPUs of CUDA and over CPUs, not over {kind}"
    )
    assert why_technique_unsupported(fake_spec(device="cpu", techniques=("cuda-graph",))) is not None


def test_a_command_takes_the_accelerator_that_the_process_finds() -> None:
    environment = fake_environment(gpu="Apple M4", capability=None, architecture="mps")
    machine = detect_machine(None, None, make_engine=lambda *_: FakeEngine(environment=environment))
    assert machine.device == "mps:0"
    for name in ("mps", "xpu:1", "cuda:0", "cpu", None):
        check_device_name(name)
    with pytest.raises(UsageError, match="No device 'tpu'"):
        check_device_name("tpu")


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_commands_measure_what_the_device_has(command: CommandLine, kind: str) -> None:
    environment = fake_environment(gpu="A GPU", capability=None, architecture=kind)
    engine = FakeEngine(environment=environment, devices=(f"{kind}:0",), exclusive=False)
    done = command.run("resnet50", "--precision", "fp32,bf16-mixed,fp16-mixed", "--format", "json", engine=engine)
    assert {row["precision"]: row["status"] for row in json.loads(done.out)["rows"]} == dict.fromkeys(
        ("fp32", "fp16-mixed", "bf16-mixed"), "ok"
    )
    refused = command.run("resnet50", "--precision", "tf32", engine=engine)
    assert (refused.code, f"A GPU has {kind}" in refused.err) == (2, True)
    lines = {line.split()[0]: line for line in command("doctor", engine=engine).out.splitlines() if line.strip()}
    assert lines["capability"].split()[-1] == kind
    assert ("no faster" if kind == "mps" else "native") in lines["bf16-mixed"]
