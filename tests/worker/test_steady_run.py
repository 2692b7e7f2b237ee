"""Steady-state cells on the CPU: warm-up and blocks by a scripted clock, and one cell by the real one."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_step import make_net, make_task
from torch import Tensor, nn

from castwise.errors import UsageError
from castwise.registry.precisions import PRECISIONS, Precision
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.worker import build as cell_module
from castwise.worker import steady_run
from castwise.worker.models.task import Batch
from castwise.worker.precision import read_fp32_precision
from castwise.worker.steady_run import SteadyRun
from castwise.worker.timing import CudaStopwatch, HostStopwatch, stopwatch_of

QUICK = MeasurementProtocol(warm_up_steps=2, warm_up_seconds=1e-6, block_seconds=0.001, num_blocks=3)

every_row = pytest.mark.parametrize("row", [row for row in PRECISIONS if row.on_cpu], ids=lambda row: row.name)


def spec_of(
    precision: str = "fp32", *, protocol: MeasurementProtocol = QUICK, loss_scale: str = "none", seed: int = 0
) -> TrialSpec:
    return TrialSpec(
        workload="mnist-cnn",
        precision=precision,
        loss_scale=loss_scale,
        batch_size=2,
        device="cpu",
        protocol=protocol,
        seed=seed,
    )


@dataclass
class ScriptedClock:
    """A stopwatch that runs the work and says it took what the script says a step takes.

    Attributes:
        step_seconds: The seconds of a step, window after window.
        now: The scripted time.
        steps: Steps run so far.
        windows: Steps in each stretch that was timed.
        rested: Whether all that came before was done when each of them began.
    """

    step_seconds: Iterator[float]
    now: float = 0.0
    steps: int = 0
    windows: list[int] = field(default_factory=list)
    rested: list[bool] = field(default_factory=list)

    def time(self, work: Callable[[], None], *, rested: bool = True) -> float:
        self.rested.append(rested)
        before = self.steps
        work()
        self.windows.append(self.steps - before)
        seconds = next(self.step_seconds) * self.windows[-1]
        self.now += seconds
        return seconds


@dataclass
class ScriptedMemory:
    """A meter whose allocator grows as the script says."""

    reserved_bytes: Iterator[int]
    restarts: int = 0

    def reset_peak(self) -> None:
        self.restarts += 1

    def peak_allocated(self) -> int:
        return 100 + self.restarts

    def peak_reserved(self) -> int:
        return 200 + self.restarts

    def reserved(self) -> int:
        return next(self.reserved_bytes)

    def check(self) -> None:
        """Allow whatever is taken."""


class Script:
    """Cells of a tiny model, on a scripted clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.clock = ScriptedClock(iter(()))
        self.memory = ScriptedMemory(iter(()))
        self.batches: list[int] = []
        self.loss_of_step: Callable[[int], float] = lambda step: 1.0

    def make_cell(
        self, spec: TrialSpec, step_seconds: Iterable[float], reserved: Iterable[int] = itertools.repeat(0)
    ) -> SteadyRun:
        """Return a cell whose steps take these seconds, each for one window or block."""
        self.clock, self.memory = ScriptedClock(iter(step_seconds)), ScriptedMemory(iter(reserved))
        model = nn.Linear(1, 1)
        task = make_task(model, self._compute_loss)
        task.make_batches = lambda count, *_: [(torch.tensor([[float(index)]]),) for index in range(count)]
        self._monkeypatch.setattr(cell_module, "build_task", lambda *_, **__: task)
        self._monkeypatch.setattr(steady_run, "stopwatch_of", lambda _: self.clock)
        self._monkeypatch.setattr(steady_run, "memory_meter", lambda _: self.memory)
        self._monkeypatch.setattr(steady_run, "time", SimpleNamespace(perf_counter=lambda: self.clock.now))
        return SteadyRun(spec, None)

    def _compute_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.batches.append(int(batch[0]))
        self.clock.steps += 1
        value = self.loss_of_step(self.clock.steps)
        loss: Tensor = model(batch[0]).float().sum() * 0 * value + value  # one that is not finite has such gradients
        return loss


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


# Warm-up


def test_warm_up_ends_when_three_windows_agree(script: Script) -> None:
    """The first window is one step, and never counts; the others last a tenth of a second."""
    cell = script.make_cell(spec_of(protocol=MeasurementProtocol(warm_up_steps=1)), [9.0, 0.05, 0.05, 0.0505, 1.0])
    facts = cell.warm_up()
    assert script.clock.windows == [1, 1, 2, 2]
    assert facts.settled
    assert facts.warm_up_steps == 6
    assert facts.first_step_seconds == 9.0
    assert facts.warm_up_seconds == pytest.approx(0.05 + 0.1 + 0.101)
    cell.finish()


def test_warm_up_goes_on_while_windows_differ(script: Script) -> None:
    """By more than 2 %: 0.05 is not 0.0511."""
    seconds = [0.05, 0.05, 0.05, 0.0511, 0.05, 0.05, 0.05, 9.0]
    facts = script.make_cell(spec_of(protocol=MeasurementProtocol(warm_up_steps=1)), seconds).warm_up()
    assert len(script.clock.windows) == 7
    assert facts.settled


def test_the_first_window_is_never_one_of_the_three(script: Script) -> None:
    facts = script.make_cell(spec_of(protocol=MeasurementProtocol(warm_up_steps=1)), itertools.repeat(0.05)).warm_up()
    assert len(script.clock.windows) == 4
    assert facts.warm_up_steps == 1 + 2 + 2 + 2


def test_warm_up_goes_on_while_the_allocator_grows(script: Script) -> None:
    reserved = [1, 2, 3, 4, 5, 5, 5, 5]
    script.make_cell(spec_of(protocol=MeasurementProtocol(warm_up_steps=1)), itertools.repeat(0.05), reserved).warm_up()
    assert len(script.clock.windows) == 7


def test_warm_up_takes_the_protocol_s_steps_at_the_least(script: Script) -> None:
    protocol = MeasurementProtocol(warm_up_steps=12, warm_up_seconds=0.001)
    facts = script.make_cell(spec_of(protocol=protocol), itertools.repeat(0.05)).warm_up()
    assert facts.warm_up_steps == 1 + 2 * 6  # whole windows
    assert facts.settled


def test_warm_up_that_does_not_settle_ends_when_its_time_is_up(script: Script) -> None:
    protocol = MeasurementProtocol(warm_up_steps=2, warm_up_seconds=1.0)
    facts = script.make_cell(spec_of(protocol=protocol), itertools.cycle([0.1, 0.2])).warm_up()
    assert not facts.settled
    assert script.clock.windows == [1] * 8
    assert facts.warm_up_seconds == pytest.approx(1.1), "the first step's time is set-up's"


def test_steps_that_take_what_earlier_processes_took_have_settled(script: Script) -> None:
    """Two windows of half the length do, and no least number of steps is left to take."""
    cell = script.make_cell(spec_of(protocol=MeasurementProtocol(warm_up_steps=9)), [9.0, 0.0247, 0.0253, 1.0])
    facts = cell.warm_up(0.025)
    assert script.clock.windows == [1, 2, 2]
    assert facts.settled
    assert facts.warm_up_steps == 5


def test_two_windows_in_a_row_must_take_what_earlier_processes_took(script: Script) -> None:
    seconds = [0.025, 0.025, 0.026, 0.025, 0.025, 1.0]
    assert script.make_cell(spec_of(protocol=MeasurementProtocol(warm_up_steps=1)), seconds).warm_up(0.025).settled
    assert len(script.clock.windows) == 5


def test_steps_that_never_take_what_earlier_processes_took_settle_by_themselves(script: Script) -> None:
    cell = script.make_cell(spec_of(protocol=MeasurementProtocol(warm_up_steps=1)), itertools.repeat(0.05))
    assert cell.warm_up(0.025).settled
    assert script.clock.windows == [1, 2, 2, 2], "by windows of the usual length, but the first"


def test_steps_before_a_graph_is_captured_have_not_settled_however_long_they_take(script: Script) -> None:
    cell = script.make_cell(spec_of(protocol=MeasurementProtocol(warm_up_steps=9)), itertools.repeat(0.05))
    captures = SimpleNamespace(seconds=0.1, peak_bytes=0, earlier_peak_bytes=0)
    cell._step.graph = SimpleNamespace(captures=captures, flush=lambda: None)  # type: ignore[assignment]
    assert cell.warm_up(0.05).warm_up_steps >= 9


def test_steps_as_known_go_on_while_the_allocator_grows(script: Script) -> None:
    reserved = [1, 2, 3, 4, 4, 4]
    script.make_cell(spec_of(protocol=MeasurementProtocol(warm_up_steps=1)), itertools.repeat(0.05), reserved).warm_up(
        0.05
    )
    assert len(script.clock.windows) == 5


# Blocks


def test_a_longer_block_is_so_many_usual_ones(script: Script) -> None:
    cell = script.make_cell(spec_of(protocol=MeasurementProtocol(block_seconds=0.2)), itertools.repeat(0.05))
    cell.warm_up()
    assert [cell.run_block().num_steps, cell.run_block(3).num_steps] == [4, 12]


@pytest.mark.parametrize(("step_seconds", "num_steps"), [(0.01, 20), (0.03, 7), (0.2, 1), (5.0, 1)])
def test_a_block_has_the_steps_that_fill_its_time(script: Script, step_seconds: float, num_steps: int) -> None:
    cell = script.make_cell(spec_of(protocol=MeasurementProtocol(block_seconds=0.2)), itertools.repeat(step_seconds))
    cell.warm_up()
    block = cell.run_block()
    assert block.num_steps == script.clock.windows[-1] == num_steps
    assert block.seconds == pytest.approx(step_seconds * num_steps)


@pytest.mark.parametrize(
    ("lead_in_seconds", "step_seconds", "lead_in_steps"),
    [(0.0, 0.01, 0), (0.02, 0.001, 20), (0.02, 0.009, 3), (0.02, 0.15, 1), (0.02, 0.9, 1), (0.02, 1.1, 0)],
)
def test_steps_lead_to_a_block(script: Script, lead_in_seconds: float, step_seconds: float, lead_in_steps: int) -> None:
    script.loss_of_step = float
    protocol = MeasurementProtocol(block_seconds=0.2, lead_in_seconds=lead_in_seconds)
    cell = script.make_cell(spec_of(protocol=protocol), itertools.repeat(step_seconds))
    warm = cell.warm_up()
    assert all(script.clock.rested)
    before = script.clock.steps
    cell.lead_in()
    assert script.clock.steps == before + lead_in_steps
    blocks = [cell.run_block()]
    cell.lead_in()
    blocks.append(cell.run_block(2))
    assert script.clock.rested[-2:] == [lead_in_steps == 0] * 2
    assert [block.lead_in_steps for block in blocks] == [lead_in_steps] * 2
    assert script.clock.windows[-1] == blocks[1].num_steps
    assert blocks[1].seconds == pytest.approx(step_seconds * blocks[1].num_steps), "its own steps' time"
    assert blocks[1].loss == script.clock.steps == warm.warm_up_steps + sum(block.all_steps for block in blocks)
    assert script.batches == [index % 32 for index in range(len(script.batches))]
    cell.run_block()
    assert script.clock.rested[-1], "nothing led to it"
    assert cell.finish().blocks[-1].lead_in_steps == 0


def test_batches_are_taken_in_turn_over_warm_up_and_blocks(script: Script) -> None:
    cell = script.make_cell(spec_of(protocol=MeasurementProtocol(block_seconds=0.15)), itertools.repeat(0.05))
    cell.warm_up()
    for _ in range(20):
        cell.run_block()
    assert len(script.batches) > 64
    assert script.batches == [index % 32 for index in range(len(script.batches))]


def test_a_block_s_loss_is_its_last_step_s(script: Script) -> None:
    script.loss_of_step = float
    cell = script.make_cell(spec_of(protocol=MeasurementProtocol(block_seconds=0.15)), itertools.repeat(0.05))
    cell.warm_up()
    for _ in range(3):
        assert cell.run_block().loss == script.clock.steps


def test_a_loss_that_is_not_finite_stands_in_its_block(script: Script) -> None:
    script.loss_of_step = lambda _: math.nan
    cell = script.make_cell(spec_of(), itertools.repeat(0.05))
    cell.warm_up()
    assert math.isnan(cell.run_block().loss)


def test_skipped_steps_are_those_of_the_block(script: Script) -> None:
    script.loss_of_step = lambda step: math.nan if step in (1, 3, 8, 9, 12) else 1.0
    protocol = MeasurementProtocol(warm_up_steps=1, block_seconds=0.1)
    cell = script.make_cell(spec_of(protocol=protocol, loss_scale="dynamic"), itertools.repeat(0.05))
    assert cell.warm_up().warm_up_steps == 7
    blocks = [cell.run_block() for _ in range(3)]
    assert [block.skipped_steps for block in blocks] == [2, 0, 1]
    assert [block.loss_scale for block in blocks] == [2.0**12, 2.0**12, 2.0**11]
    assert script.clock.steps == 13


@pytest.mark.parametrize(("loss_scale", "recorded"), [("none", None), ("128", 128.0)])
def test_a_block_has_the_loss_scale(script: Script, loss_scale: str, recorded: float | None) -> None:
    cell = script.make_cell(spec_of(loss_scale=loss_scale), itertools.repeat(0.05))
    cell.warm_up()
    block = cell.run_block()
    assert block.loss_scale == recorded
    assert block.skipped_steps == 0


def test_finish_returns_the_blocks_in_order_and_each_stretch_s_memory(script: Script) -> None:
    protocol = MeasurementProtocol(warm_up_steps=1, block_seconds=0.05)
    cell = script.make_cell(spec_of(protocol=protocol), [0.05] * 4 + [0.06, 0.07, 0.08])
    cell.warm_up()
    blocks = [cell.run_block() for _ in range(3)]
    samples = cell.finish()
    assert samples.blocks == tuple(blocks)
    assert [block.seconds for block in blocks] == pytest.approx([0.06, 0.07, 0.08])
    # One stretch from set-up to the end of warm-up, one for the blocks.
    assert samples.warm_up_peak_allocated_bytes == 101
    assert samples.peak_allocated_bytes == 102
    assert samples.peak_reserved_bytes == 202


# A real workload


def losses_of(spec: TrialSpec) -> list[float]:
    """Run a cell to its end and return its blocks' losses."""
    cell = SteadyRun(spec, None)
    cell.warm_up()
    losses = [cell.run_block().loss for _ in range(3)]
    cell.finish()
    return losses


def test_steady_run_on_the_real_clock() -> None:
    before = read_fp32_precision()
    cell = SteadyRun(spec_of(), None)
    assert {read_fp32_precision()[path] for path in ("cuda.matmul", "cudnn.conv", "cudnn.rnn")} == {"ieee"}
    facts = cell.warm_up()
    blocks = [cell.run_block() for _ in range(3)]
    samples = cell.finish()
    assert read_fp32_precision() == before
    assert facts.num_parameters == 1_199_882
    assert facts.param_dtypes == {"float32": 1_199_882}
    assert facts.units_per_sample == 1
    assert facts.optimizer == "Adadelta(lr=0.001)"
    assert set(facts.fp32_precision.values()) == {"ieee"}
    assert facts.set_up_seconds > 0
    assert facts.warm_up_seconds > 0
    assert facts.warm_up_steps >= QUICK.warm_up_steps
    assert samples.blocks == tuple(blocks)
    for block in blocks:
        assert block.seconds > 0
        assert block.num_steps >= 1
        assert math.isfinite(block.loss)
    assert samples.peak_reserved_bytes is None
    is_known = Path("/proc/self/status").exists()
    assert (samples.peak_allocated_bytes is not None) == is_known
    assert (samples.warm_up_peak_allocated_bytes is not None) == is_known


@every_row
def test_the_facts_say_what_really_ran(row: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    net = make_net()
    monkeypatch.setattr(cell_module, "build_task", lambda *_, **__: make_task(net))
    cell = SteadyRun(spec_of(row.name, loss_scale=row.loss_scale), None)
    facts = cell.warm_up()
    block = cell.run_block()
    cell.finish()
    dtypes = dict.fromkeys((row.param_dtype, row.batch_norm_dtype), 0)
    dtypes[row.param_dtype] += net.conv.weight.numel() + net.linear.weight.numel() + net.linear.bias.numel()
    dtypes[row.batch_norm_dtype] += net.norm.weight.numel() + net.norm.bias.numel()
    assert facts.param_dtypes == dtypes
    assert facts.num_parameters == sum(dtypes.values())
    assert facts.fp32_precision["cuda.matmul"] == row.float32_matmul
    assert math.isfinite(block.loss)
    assert (block.loss_scale is None) == (row.loss_scale == "none")


class FixedStopwatch:
    """Says the same of every stretch, so that every cell runs the same steps."""

    def time(self, work: Callable[[], None], *, rested: bool = True) -> float:
        del rested
        work()
        return 0.1


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-master"])
def test_the_same_seed_gives_the_same_losses(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, data and dropout come from the seed alone, whatever was drawn before."""
    monkeypatch.setattr(steady_run, "stopwatch_of", lambda _: FixedStopwatch())
    losses = []
    for seed in (0, 0, 1):
        torch.rand(3)
        losses.append(losses_of(spec_of(precision, seed=seed)))
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
    assert len(set(losses[0])) == 3


def test_data_comes_from_the_seed_on_the_spec_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, str, int]] = []
    task = make_task(make_net())
    make_batches = task.make_batches

    def spy(count: int, size: int, device: torch.device, generator: torch.Generator) -> Sequence[Batch]:
        asked.append((count, size, str(device), generator.initial_seed()))
        return make_batches(count, size, device, generator)

    task.make_batches = spy
    monkeypatch.setattr(cell_module, "build_task", lambda *_, **__: task)
    SteadyRun(spec_of(seed=5), None).finish()
    assert asked == [(32, 2, "cpu", 5)]


# When set-up fails


def test_a_set_up_that_fails_restores_the_numeric_state() -> None:
    before = read_fp32_precision()
    spec = spec_of().model_copy(update={"data_set": "mnist"})
    # The error is held, and by it the cell: nothing is restored by being collected.
    with pytest.raises(UsageError, match="folder") as caught:
        SteadyRun(spec, None)
    assert read_fp32_precision() == before
    assert caught.tb is not None


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_so_does_one_that_is_broken_off(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    inside: dict[str, str] = {}

    def break_off(*_: object, **__: object) -> None:
        inside.update(read_fp32_precision())
        raise error

    before = read_fp32_precision()
    monkeypatch.setattr(cell_module, "TrainingStep", break_off)
    with pytest.raises(error) as caught:
        SteadyRun(spec_of(), None)
    assert set(inside.values()) == {"ieee"}
    assert read_fp32_precision() == before != inside
    assert caught.tb is not None


# The stopwatch


def test_the_host_s_stopwatch_times_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    ticks = iter([10.0, 12.5])

    def tick() -> float:
        events.append("tick")
        return next(ticks)

    with monkeypatch.context() as patch:
        patch.setattr("time.perf_counter", tick)
        seconds = HostStopwatch().time(lambda: events.append("work"))
    assert seconds == 2.5
    assert events == ["tick", "work", "tick"]


@pytest.mark.parametrize("rested", [True, False])
def test_on_a_gpu_the_time_begins_when_all_that_came_before_is_done(
    rested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            events.append("event")

        def elapsed_time(self, other: object) -> float:
            return 1500.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: events.append("synchronize"))
    seconds = CudaStopwatch(torch.device("cuda:0")).time(lambda: events.append("work"), rested=rested)
    assert seconds == 1.5
    assert events == [*(["synchronize"] if rested else []), "event", "work", "event", "synchronize"]


@pytest.mark.parametrize(("device", "kind"), [("cpu", HostStopwatch), ("cuda:0", CudaStopwatch)])
def test_each_device_has_its_stopwatch(device: str, kind: type) -> None:
    assert type(stopwatch_of(torch.device(device))) is kind


def test_sustained_steps(script: Script) -> None:
    cell = script.make_cell(spec_of(protocol=MeasurementProtocol(block_seconds=0.2)), itertools.repeat(0.05))
    cell.warm_up()
    cell.run_block()
    stretch = cell.run_sustained(1.1)
    assert (stretch.num_steps, stretch.seconds) == (22, pytest.approx(1.1))
    assert len(cell.finish().blocks) == 1
