"""Steady trials on the CPU: warm-up and blocks by a scripted clock, and one trial by the real one."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_step import cpu_spec, every_row, make_net, make_task, user_spec
from torch import Tensor, nn

from castwise.apply.precision import read_fp32_precision
from castwise.apply.pytree import Batch
from castwise.errors import UsageError
from castwise.registry.precisions import Precision
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.trial import build as build_module
from castwise.trial import steady_run
from castwise.trial.steady_run import SteadyRun, time_works

QUICK = MeasurementProtocol(warm_up_steps=2, warm_up_seconds=1e-6, block_seconds=0.001, num_blocks=3)


@dataclass
class ScriptedClock:
    """Runs the work and says that it took what the script says a step takes."""

    step_seconds: Iterator[float]  # of a step, window after window
    now: float = 0.0
    steps: int = 0  # run so far
    windows: list[int] = field(default_factory=list)  # the steps that were timed together
    rested: list[bool] = field(default_factory=list)  # whether earlier work was done when each window began

    def time(self, _: torch.device, works: Sequence[Callable[[], None]], *, rested: bool) -> list[float]:
        self.rested.append(rested)
        return [self._time(work) for work in works]

    def _time(self, work: Callable[[], None]) -> float:
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

    def refused_allocations(self) -> int:
        return 0

    def check(self) -> None:
        """Allow whatever is taken."""


class Script:
    """Steady runs of a tiny model, on a scripted clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.clock = ScriptedClock(iter(()))
        self.memory = ScriptedMemory(iter(()))
        self.batches: list[int] = []
        self.loss_of_step: Callable[[int], float] = lambda step: 1.0

    def make_run(
        self, spec: TrialSpec, step_seconds: Iterable[float], reserved: Iterable[int] = itertools.repeat(0)
    ) -> SteadyRun:
        """Return a run whose steps take these seconds, each for one window or block."""
        self.clock, self.memory = ScriptedClock(iter(step_seconds)), ScriptedMemory(iter(reserved))
        model = nn.Linear(1, 1)
        task = make_task(model, self._compute_loss)
        task.make_batches = lambda count, *_: [(torch.tensor([[float(index)]]),) for index in range(count)]
        self._monkeypatch.setattr(build_module, "build_task", lambda *_, **__: task)
        self._monkeypatch.setattr(steady_run, "time_works", self.clock.time)
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


ALWAYS_THE_SAME = (0.05,) * 20


@pytest.mark.parametrize(
    ("seconds", "reserved", "known", "windows"),
    [
        pytest.param([9.0, 0.05, 0.05, 0.0505, 1.0], [0] * 9, None, [1, 1, 2, 2], id="three alike, but not the first"),
        pytest.param([0.05] * 3 + [0.0511] + [0.05] * 3, [0] * 9, None, [1] + [2] * 6, id="more than 2 % apart"),
        pytest.param(ALWAYS_THE_SAME, [1, 2, 3, 4, 5, 5, 5, 5], None, [1] + [2] * 6, id="the allocator grows"),
        pytest.param([9.0, 0.0247, 0.0253, 1.0], [0] * 9, 0.025, [1, 2, 2], id="as in earlier processes"),
        pytest.param([0.025, 0.025, 0.026, 0.025, 0.025], [0] * 9, 0.025, [1, 2, 2, 4, 2], id="as known in a row"),
        pytest.param(ALWAYS_THE_SAME, [0] * 9, 0.025, [1, 2, 2, 2], id="never as in earlier processes"),
        pytest.param(ALWAYS_THE_SAME, [1, 2, 3, 4, 4, 4], 0.05, [1] * 5, id="as known, but the allocator grows"),
    ],
)
def test_warm_up_ends_when_windows_agree(
    seconds: Sequence[float], reserved: list[int], known: float | None, windows: list[int], script: Script
) -> None:
    run = script.make_run(cpu_spec(protocol=MeasurementProtocol(warm_up_steps=1)), seconds, reserved)
    facts = run.warm_up(known)
    assert script.clock.windows == windows
    assert facts.settled
    assert facts.warm_up_steps == sum(windows)
    assert facts.first_step_seconds == seconds[0]
    assert facts.warm_up_seconds == pytest.approx(
        sum(each * steps for each, steps in zip(seconds[1:], windows[1:], strict=False))
    )


@pytest.mark.parametrize(("known", "warm_up_steps"), [(None, 13), (0.05, 3)])
def test_warm_up_takes_the_protocol_s_steps(known: float | None, warm_up_steps: int, script: Script) -> None:
    protocol = MeasurementProtocol(warm_up_steps=12, warm_up_seconds=0.001)
    facts = script.make_run(cpu_spec(protocol=protocol), ALWAYS_THE_SAME).warm_up(known)
    assert (facts.warm_up_steps, facts.settled) == (warm_up_steps, True)


def test_warm_up_ends_after_its_time(script: Script) -> None:
    protocol = MeasurementProtocol(warm_up_steps=2, warm_up_seconds=1.0)
    facts = script.make_run(cpu_spec(protocol=protocol), itertools.cycle([0.1, 0.2])).warm_up()
    assert not facts.settled
    assert script.clock.windows == [1] * 8
    assert facts.warm_up_seconds == pytest.approx(1.1), "the first step's time is set-up's"


def test_warm_up_does_not_settle_before_capture(script: Script) -> None:
    run = script.make_run(cpu_spec(protocol=MeasurementProtocol(warm_up_steps=9)), ALWAYS_THE_SAME)
    captures = SimpleNamespace(seconds=0.1, peak_bytes=0, earlier_peak_bytes=0)
    run._step.graph = SimpleNamespace(captures=captures, flush=lambda: None)  # type: ignore[assignment]
    assert run.warm_up(0.05).warm_up_steps >= 9


# Blocks


@pytest.mark.parametrize(("step_seconds", "num_steps"), [(0.01, 20), (0.03, 7), (0.2, 1), (5.0, 1)])
def test_block_has_the_steps_that_fill_its_time(script: Script, step_seconds: float, num_steps: int) -> None:
    run = script.make_run(cpu_spec(protocol=MeasurementProtocol(block_seconds=0.2)), itertools.repeat(step_seconds))
    run.warm_up()
    block = run.run_block()
    assert block.num_steps == script.clock.windows[-1] == num_steps
    assert block.seconds == pytest.approx(step_seconds * num_steps)
    assert run.run_block(3).num_steps == 3 * num_steps


@pytest.mark.parametrize(
    ("lead_in_seconds", "step_seconds", "lead_in_steps"),
    [(0.0, 0.01, 0), (0.02, 0.001, 20), (0.02, 0.009, 3), (0.02, 0.15, 1), (0.02, 0.9, 1), (0.02, 1.1, 0)],
)
def test_lead_in_steps(script: Script, lead_in_seconds: float, step_seconds: float, lead_in_steps: int) -> None:
    script.loss_of_step = float
    protocol = MeasurementProtocol(block_seconds=0.2, lead_in_seconds=lead_in_seconds)
    run = script.make_run(cpu_spec(protocol=protocol), itertools.repeat(step_seconds))
    warm = run.warm_up()
    assert all(script.clock.rested)
    before = script.clock.steps
    run.lead_in()
    assert script.clock.steps == before + lead_in_steps
    blocks = [run.run_block()]
    run.lead_in()
    blocks.append(run.run_block(2))
    assert script.clock.rested[-2:] == [lead_in_steps == 0] * 2
    assert [block.lead_in_steps for block in blocks] == [lead_in_steps] * 2
    assert script.clock.windows[-1] == blocks[1].num_steps
    assert blocks[1].seconds == pytest.approx(step_seconds * blocks[1].num_steps), "its own steps' time"
    assert blocks[1].loss == script.clock.steps == warm.warm_up_steps + sum(block.all_steps for block in blocks)
    assert script.batches == [index % 32 for index in range(len(script.batches))]
    run.run_block()
    assert script.clock.rested[-1], "nothing led to it"
    assert run.finish().blocks[-1].lead_in_steps == 0


def test_skipped_steps_are_those_of_the_block(script: Script) -> None:
    script.loss_of_step = lambda step: math.nan if step in (1, 3, 8, 9, 12) else 1.0
    protocol = MeasurementProtocol(warm_up_steps=1, block_seconds=0.1)
    run = script.make_run(cpu_spec(protocol=protocol, loss_scale="dynamic"), itertools.repeat(0.05))
    assert run.warm_up().warm_up_steps == 7
    blocks = [run.run_block() for _ in range(3)]
    assert [block.skipped_steps for block in blocks] == [2, 0, 1]
    assert [block.loss_scale for block in blocks] == [2.0**12, 2.0**12, 2.0**11]
    assert script.clock.steps == 13


def test_finish_returns_blocks_and_peak_memory(script: Script) -> None:
    protocol = MeasurementProtocol(warm_up_steps=1, block_seconds=0.05)
    run = script.make_run(cpu_spec(protocol=protocol), [0.05] * 4 + [0.06, 0.07, 0.08])
    run.warm_up()
    blocks = [run.run_block() for _ in range(3)]
    samples = run.finish()
    assert samples.blocks == tuple(blocks)
    assert [block.seconds for block in blocks] == pytest.approx([0.06, 0.07, 0.08])
    # One peak from set-up to the end of warm-up, one of the blocks.
    assert samples.warm_up_peak_allocated_bytes == 101
    assert samples.peak_allocated_bytes == 102
    assert samples.peak_reserved_bytes == 202


# A real workload


@every_row
def test_facts_describe_the_precision_that_ran(row: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the real clock; finishing restores the numeric state."""
    net, before = make_net(), read_fp32_precision()
    monkeypatch.setattr(build_module, "build_task", lambda *_, **__: make_task(net))
    run = SteadyRun(cpu_spec(row.name, protocol=QUICK, loss_scale=row.loss_scale), None)
    facts = run.warm_up()
    block = run.run_block()
    samples = run.finish()
    assert read_fp32_precision() == before
    assert samples.blocks == (block,)
    assert samples.peak_allocated_bytes is not None
    assert min(facts.set_up_seconds, facts.warm_up_seconds, block.seconds) > 0
    dtypes = dict.fromkeys((row.param_dtype, row.batch_norm_dtype), 0)
    dtypes[row.param_dtype] += net.conv.weight.numel() + net.linear.weight.numel() + net.linear.bias.numel()
    dtypes[row.batch_norm_dtype] += net.norm.weight.numel() + net.norm.bias.numel()
    assert facts.param_dtypes == dtypes
    assert facts.num_parameters == sum(dtypes.values())
    assert facts.fp32_precision["cuda.matmul"] == (row.float32_matmul or before["cuda.matmul"])
    assert math.isfinite(block.loss)
    assert (block.loss_scale is None) == (row.loss_scale == "none")


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-master"])
def test_losses_follow_the_seed(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, data and dropout come from the seed alone, whatever was drawn before."""
    monkeypatch.setattr(steady_run, "time_works", lambda _, works, **__: [work() or 0.1 for work in works])
    losses = []
    for seed in (0, 0, 1):
        torch.rand(3)
        run = SteadyRun(cpu_spec(precision, protocol=QUICK, seed=seed), None)
        run.warm_up()
        losses.append([run.run_block().loss for _ in range(3)])
        run.finish()
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
    assert len(set(losses[0])) == 3


@pytest.mark.parametrize("error", [UsageError, KeyboardInterrupt])
def test_failed_set_up_restores_numeric_state(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    inside: dict[str, str] = {}

    def fail(*_: object, **__: object) -> None:
        inside.update(read_fp32_precision())
        raise error("no folder")

    before = read_fp32_precision()
    monkeypatch.setattr(build_module, "build_task", fail)
    # The error is held, and by it the run: nothing is restored by being collected.
    with pytest.raises(error) as caught:
        SteadyRun(cpu_spec(protocol=QUICK), None)
    assert set(inside.values()) == {"ieee"}
    assert read_fp32_precision() == before != inside
    assert caught.tb is not None


# The clock


@pytest.mark.parametrize("rested", [True, False])
def test_gpu_time_is_between_events(rested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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
    works = [lambda: events.append("one"), lambda: events.append("two")]
    assert time_works(torch.device("cuda:0"), works, rested=rested) == [1.5, 1.5]
    waits = ["synchronize"] if rested else []
    assert events == [*waits, "event", "one", "event", "two", "event", "synchronize"], "no wait between the two"


def test_stretch(script: Script) -> None:
    script.loss_of_step = lambda step: math.nan if step > 40 else float(step)
    spec = cpu_spec(protocol=MeasurementProtocol(warm_up_steps=1), loss_scale="dynamic")
    run = script.make_run(spec, itertools.repeat(0.05))
    run.warm_up()
    before = script.clock.steps
    first, second, third = run.run_stretch(1.0, 3, 0.25)
    assert [block.num_steps for block in (first, second, third)] == [5, 5, 5]
    assert [block.lead_in_steps for block in (first, second, third)] == [20, 0, 0]
    assert script.clock.rested[-1] is False
    assert script.clock.windows[-3:] == [5, 5, 5], "the lead-in is not timed"
    assert (first.loss, second.loss) == (before + 25, before + 30)
    assert third.skipped_steps == script.clock.steps - 40 > 0, "counted after the last block"
    assert all(block.in_stretch for block in (first, second, third))
    assert run.finish().blocks == (first, second, third)


def test_sustained_steps(script: Script) -> None:
    run = script.make_run(cpu_spec(protocol=MeasurementProtocol(block_seconds=0.2)), itertools.repeat(0.05))
    run.warm_up()
    run.run_block()
    stretch = run.run_sustained(1.1)
    assert (stretch.num_steps, stretch.seconds) == (22, pytest.approx(1.1))
    assert len(run.finish().blocks) == 1


@pytest.mark.parametrize(
    ("windows", "has_settled"),
    [
        ((9.0, 1.0, 1.0, 1.0), True),
        ((1.0, 1.0, 1.0), False),  # the first does not count
        ((9.0, 1.1, 1.0, 1.2, 0.9, 1.1, 1.0, 1.2, 0.9), True),  # they vary, around the same
        ((9.0, 1.1, 1.0, 1.2, 0.9, 1.1, 1.0, 1.2), False),
        ((9.0, 1.4, 1.3, 1.5, 1.2, 1.1, 1.0, 1.2, 0.9), False),  # they still get faster
        ((9.0, 1.0, 1.1, 0.9, 1.0, 1.3, 1.4, 1.2, 1.3), False),  # a loader's first batches were ready
    ],
)
def test_steps_that_vary_settle_when_they_no_longer_change_their_median(
    windows: tuple[float, ...], has_settled: bool
) -> None:
    assert steady_run.settled(windows) is has_settled


def test_losses_of_blocks_hold_no_memory(tmp_path: Path) -> None:
    """A peak would grow with the number of blocks: torch's mean squared error has the storage of all elements."""
    file = tmp_path / "squares.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\ndef build():\n"
        "    return nn.Linear(8, 100), (torch.ones(8, 8), torch.ones(8, 100)), nn.MSELoss()\n"
    )
    run, losses = SteadyRun(user_spec(file), None), list[Tensor]()
    for _ in range(3):
        run._steps_into(losses, 2)()
    assert [loss.untyped_storage().nbytes() for loss in losses] == [4, 4, 4]
    run.finish()
