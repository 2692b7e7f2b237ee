"""Profiles of real steps on the CPU, and of a made-up GPU's events; what is missing is said, and nothing fails."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import fake_spec
from small_step import cpu_spec, make_batch, make_net, make_step, make_task
from torch import nn
from torch.profiler import ProfilerActivity

from castwise.records.schema import RankStep, StepProfile
from castwise.registry.kernel_classes import Classified
from castwise.registry.precisions import find_precision
from castwise.spec.trial import MeasurementProtocol
from castwise.spec.user_model import UserModel
from castwise.trial import kernel_profile
from castwise.trial.distributed import Peers
from castwise.trial.kernel_profile import profile_step
from castwise.trial.script.ranks import SECONDS, SharedFolder
from castwise.trial.steady_run import SteadyRun

QUICK = MeasurementProtocol(
    warm_up_steps=1, warm_up_seconds=1e-6, block_seconds=0.001, num_blocks=3, min_blocks=1, profile_steps=2
)

GPT = """\
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(1, 2)

def build():
    batch = (torch.randint(50, (4, 16)), torch.randint(50, (4, 16)))
    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)
    return {"model": GPT(), "batch": batch, "loss": nn.CrossEntropyLoss(), "optimizer": optimizer}
"""


def profile_of(precision: str, trace: Path | None = None, **changes: object) -> StepProfile:
    run = SteadyRun(cpu_spec(precision, protocol=QUICK, **changes), None)
    run.warm_up()
    run.run_block()
    run.finish()
    return run.profile(2, trace)


def test_a_cnn_on_a_cpu(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    profile = profile_of("bf16-mixed", trace)
    assert (profile.device_type, profile.num_steps, profile.missing, profile.idle_seconds) == ("cpu", 2, "", None)
    seconds = profile.class_seconds
    assert {"plain_product", "cast", "elementwise", "optimizer", "reduction"} <= set(seconds)
    assert "loss_scaling" not in seconds
    assert not {"tensor_core_product", "layout_conversion"} & set(seconds)
    assert 0 < sum(seconds.values()) <= profile.seconds
    assert {"conv1", "fc1"} <= set(profile.module_seconds)
    assert profile.module_seconds["conv2"].forward_seconds > 0
    assert profile.module_seconds["conv2"].backward_seconds > 0
    assert profile.module_seconds[""].forward_seconds > 0, "loss and optimizer"
    assert len(profile.kernels) == 10
    assert trace.stat().st_size > 1000


def test_a_gpt_of_the_user_s_own_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "gpt.py").write_text(GPT)
    own = UserModel(kind="file", path=str(tmp_path / "gpt.py"), name="build")
    profile = profile_of("fp32", workload="gpt.py:build", user_model=own)
    assert {"attention", "plain_product", "normalisation", "optimizer"} <= set(profile.class_seconds)
    assert set(profile.module_seconds) == {
        *("embedding", "head", ""),
        *(f"blocks.{index}{part}" for index in (0, 1) for part in ("", ".norm", ".qkv", ".out")),
    }
    assert profile.module_seconds["blocks.1"].backward_seconds > 0, "attention"


@pytest.mark.slow
def test_loss_scaling_is_told_from_the_optimizer() -> None:
    profile = profile_of("fp16-mixed", loss_scale="dynamic")
    assert profile.class_seconds["loss_scaling"] > 0
    assert profile.class_seconds["optimizer"] > 0


def test_the_step_is_as_before() -> None:
    step = make_step(find_precision("fp32"), make_task(make_net()), loss_scale="128.0")
    with kernel_profile._annotated(step, {}, has_modules=True):
        assert "step" in vars(step.scaling)
        assert step.model.conv._forward_hooks
        step(make_batch())
    assert "step" not in vars(step.scaling)
    assert not step.model.conv._forward_hooks
    assert not step.model.conv._forward_pre_hooks


def test_what_slows_steps_is_read_within_them(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(find_precision("fp32"), make_task(make_net()))
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
    seen = dict.fromkeys(kernel_profile._read_settings())
    regions = torch.autograd.detect_anomaly(check_nan=False), torch.autocast("cpu", cache_enabled=False)
    with kernel_profile._annotated(step, seen, has_modules=True), regions[0], regions[1]:
        step(make_batch())
    assert [*seen] == [
        "CUDA_LAUNCH_BLOCKING=1",
        "torch.autograd.set_detect_anomaly(True)",
        "autocast(cache_enabled=False)",
    ]
    found = profile_of("fp32")
    assert found.settings == ("CUDA_LAUNCH_BLOCKING=1",)


def test_a_trace_that_cannot_be_written_costs_the_trace_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    profile = profile_of("fp32", tmp_path / "file" / "trace.json")
    assert profile.class_seconds
    assert profile.missing.startswith("no trace at '")


# A GPU, made up


class FakeEvent:
    """One of the profiler's events."""

    def __init__(self, name: str, start: int, end: int, kind: str, event_id: int = 0, launched_by: int = 0) -> None:
        self._name, self._start, self._end, self._kind = name, start, end, kind
        self._id, self._launched_by = event_id, launched_by

    def __getattr__(self, name: str) -> Any:
        on_device = self._kind in ("kernel", "gpu_memcpy", "gpu_user_annotation")
        values = {
            "name": self._name,
            "start_ns": self._start,
            "end_ns": self._end,
            "device_type": torch.autograd.DeviceType.CUDA if on_device else torch.autograd.DeviceType.CPU,
            "device_index": 0,
            "correlation_id": self._id,
            "linked_correlation_id": self._launched_by,
            "is_user_annotation": self._kind.endswith("user_annotation"),
            "activity_type": self._kind,
            "start_thread_id": 1,
            "end_thread_id": 1,
            "sequence_nr": -1,
            "fwd_thread_id": 0,
            "shapes": [[4, 4], [], ["x"]],
            "dtypes": [],
        }
        if name not in values:
            raise AttributeError(name)
        return lambda: values[name]


EVENTS = (
    FakeEvent("castwise module: a", 0, 50, "user_annotation", 1),
    FakeEvent("aten::mm", 1, 40, "cpu_op", 2),
    FakeEvent("cudaLaunchKernel", 2, 4, "cuda_runtime", 99, 2),
    FakeEvent("Activity Buffer Request", 3, 4, "", 2),
    FakeEvent("cudaStreamSynchronize", 4, 9, "cuda_runtime", 99, 2),
    FakeEvent("cudaFree", 70, 90, "cuda_runtime", 99),
    FakeEvent("cuCtxGetCurrent", 91, 92, "cuda_driver", 99),
    FakeEvent("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", 10, 60, "kernel", 99, 2),
    FakeEvent("castwise module: a", 10, 60, "gpu_user_annotation", 99, 1),
    FakeEvent("Memcpy DtoH (Device -> Pageable)", 100, 110, "gpu_memcpy", 99, 0),
)


class Gpu:
    """Stands in for the profiler; notes how many steps each record had, and may break."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, events: Sequence[FakeEvent] = EVENTS) -> None:
        self.events, self.records, self.breaks = events, list[tuple[bool, int]](), False
        self._num_steps, self.at_once = 0, 1
        monkeypatch.setattr(torch.profiler, "profile", self._record)
        monkeypatch.setattr(kernel_profile, "_events", lambda _: self._seen())

    def _seen(self) -> list[FakeEvent]:
        """Return the events of the last record: without the host's if it was not recorded."""
        has_host, _ = self.records[-1]
        return [each for each in self.events if has_host or each.device_type() == torch.autograd.DeviceType.CUDA]

    @contextmanager
    def _record(self, activities: Sequence[ProfilerActivity], record_shapes: bool) -> Iterator[None]:
        has_host = ProfilerActivity.CPU in activities
        assert record_shapes == has_host
        if has_host and self.breaks:
            raise RuntimeError("the model does not like it\nmore")
        yield
        self.records.append((has_host, self._num_steps))

    def profile(self, **spec: Any) -> StepProfile:
        def run(count: int, recorded: AbstractContextManager[Any]) -> int:
            with recorded:
                self._num_steps = self.at_once * -(-count // self.at_once)
            return self._num_steps

        step = make_step(find_precision("fp32"), make_task(nn.Sequential(make_net())))
        return profile_step(fake_spec(**spec), step, run, 2, None, Peers())


def test_a_gpu_is_first_recorded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    profile = gpu.profile()
    assert gpu.records == [(False, 1), (False, 2), (True, 2)]
    assert (profile.device_type, profile.num_steps, profile.missing) == ("cuda", 2, "")
    assert profile.seconds == pytest.approx(50e-9)
    assert profile.idle_seconds == pytest.approx(20e-9)
    assert profile.class_seconds == {"tensor_core_product": pytest.approx(25e-9), "host_copy": pytest.approx(5e-9)}
    assert profile.module_seconds["a"].forward_seconds == pytest.approx(25e-9)
    assert profile.waits == {"aten::mm": 0.5}
    assert profile.host_seconds == {"cudaFree": pytest.approx(10e-9)}
    assert profile.loader_kernels == 0
    assert (profile.kernels[0].operator, profile.kernels[0].shapes) == ("aten::mm", ((4, 4),))


def test_without_a_kernel_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = Gpu(monkeypatch, EVENTS[:3]).profile()
    assert profile.num_steps == 0
    assert "saw no kernel" in profile.missing


def test_a_model_that_the_profiler_breaks_keeps_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    gpu.breaks = True
    profile = gpu.profile()
    assert profile.missing == "no operators, shapes and modules: the model does not like it"
    assert profile.idle_seconds is not None
    assert profile.class_seconds
    assert profile.module_seconds == {}


def test_steps_that_are_launched_together_count_all(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    gpu.at_once = 8
    profile = gpu.profile()
    assert (gpu.records, profile.num_steps) == ([(False, 8), (False, 8), (True, 8)], 8)
    assert profile.seconds == pytest.approx(100e-9 / 8)


def test_a_captured_step_has_no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = Gpu(monkeypatch, EVENTS[5:]).profile(techniques=("cuda-graph",))
    assert profile.missing == "modules are not told apart in a step with cuda-graph"
    assert profile.module_seconds == {}
    assert profile.class_seconds


def test_of_many_events_operators_are_read_in_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_profile, "_MANY_EVENTS", 10)  # a kernel and a copy count as ten
    gpu = Gpu(monkeypatch)
    profile = gpu.profile()
    assert gpu.records == [(False, 1), (False, 2), (True, 1)], "idle time is still that of all steps"
    assert (profile.num_steps, profile.missing) == (1, "")
    assert profile.seconds == pytest.approx(50e-9)
    assert profile.class_seconds["tensor_core_product"] == pytest.approx(50e-9)


def test_a_huge_step_is_read_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [FakeEvent("my_kernel", 10 * index, 10 * index + 5, "kernel") for index in range(50)]
    monkeypatch.setattr(kernel_profile, "_MOST_EVENTS", 20)
    gpu = Gpu(monkeypatch, kernels)
    profile = gpu.profile()
    assert {count for _, count in gpu.records} == {1}, "fewer steps"
    assert (profile.num_kernels, profile.missing) == (20.0, "30 events of the profiler were not counted")


def test_ptx_of_a_triton_kernel_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for folder, name, ptx in (
        ("a", "my_matmul", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1};"),
        ("a", "my_mixture", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1};"),
        ("b", "my_mixture", "fma.rn.f32 %f1, %f2, %f3, %f4;"),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{name}.ptx").write_text(ptx)
    assert kernel_profile._classify("my_matmul") == Classified("tensor_core_product", "bf16")
    assert kernel_profile._classify("my_mixture") == Classified("other"), "two kernels of one name differ"
    assert kernel_profile._classify("triton_tem_fused_mm_of_another_process") == Classified("unknown_product")


def test_only_reading_values_counts_as_waiting() -> None:
    values, methods = torch.ones(3), [getattr(torch.Tensor, name) for name in kernel_profile._WAITING]

    def run(num_steps: int, _: AbstractContextManager[Any], *, reads: bool) -> int:
        for _ in range(num_steps):
            assert not reads or (values[0].item(), bool(values[1]), values.tolist()) == (1.0, True, [1.0] * 3)
            values.add(1.0)
        return num_steps

    assert kernel_profile._measure_waits(partial(run, reads=False), 2) == 0.0
    assert kernel_profile._measure_waits(partial(run, reads=True), 2) > 0.0
    assert methods == [getattr(torch.Tensor, name) for name in kernel_profile._WAITING]


def test_ranks_of_a_script_tell_what_their_steps_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "steps").write_bytes(bytes(8))
    monkeypatch.setenv("WORLD_SIZE", "3")
    told = {1: (0.25, RankStep(compute_seconds=0.1, data_seconds=0.2, clock_hertz=1.2e9)), 2: (0.5, RankStep())}
    shared = SharedFolder(tmp_path)
    for rank, (seconds, own) in told.items():
        assert shared.communication_of_others() == ()
        shared.tell(f"{SECONDS}{rank}", f"{seconds} {own.model_dump_json()}")
    assert shared.communication_of_others() == tuple(told.values())
