"""Telemetry of a job: what is watched when, what failures cost, and that no thread is left over."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from fake_engine import FakeEngine, FakeSession, Fault, fake_environment, fake_spec
from fake_gpu import SECOND_UUID, UUID, FakeMonitor, fake_sample
from programs import PATIENCE_SECONDS, wait_until

from castwise.analysis.energy import energy_of
from castwise.analysis.steady_metrics import was_at_power_limit
from castwise.analysis.warnings import warnings_of
from castwise.orchestrator.block_schedule import PriorStats
from castwise.orchestrator.runner import InterleavedSession, NullListener, TrialRunner
from castwise.orchestrator.session import TrialFailedError
from castwise.records.schema import Block, Environment, Facts, Trial
from castwise.spec.recipe import Recipe
from castwise.spec.trial import CUDA_ROUND, MeasurementProtocol, TrialSpec
from castwise.telemetry import gpu
from castwise.telemetry.gpu import CounterReading, GpuUnreadableError, Monitor, Query, Sample
from castwise.telemetry.sampler import Telemetry

ON_GPU = fake_environment(gpu_uuid=UUID)
ON_TWO = fake_environment(gpu_uuid=UUID, gpu_uuids=(UUID, SECOND_UUID), num_gpus=2)
GPUS = {"cuda:0": UUID}
TWO_GPUS = {"cuda:0": UUID, "cuda:1": SECOND_UUID}
LOST = Sample(missing=dict.fromkeys(("power_watts", "energy_joules", "processes"), "GPU is lost"))
STRANGER = 2**22 + 1  # over the kernel's greatest process id (PID_MAX_LIMIT)


def watching(*monitors: FakeMonitor, patience_seconds: float = 30.0, period_seconds: float = 30.0) -> Telemetry:
    """Return telemetry of one GPU or two."""
    by_uuid = dict(zip((UUID, SECOND_UUID), monitors, strict=False))
    return Telemetry(lambda uuid: by_uuid[uuid], period_seconds, patience_seconds)


def counting(start: float, step: float, **changes: object) -> FakeMonitor:
    return FakeMonitor(lambda index: fake_sample(energy_joules=start + step * index, **changes))


def listing(*processes: int) -> FakeMonitor:
    return FakeMonitor(lambda _: fake_sample(processes=frozenset(processes)))


def run_all(telemetry: Telemetry, engine: FakeEngine, *specs: TrialSpec) -> list[Trial]:
    return TrialRunner(engine, None, engine.environment, NullListener(), telemetry=telemetry).run(list(specs))


def run(telemetry: Telemetry, fault: Fault | None = None, environment: Environment = ON_GPU, **changes: Any) -> Trial:
    engine = FakeEngine(environment=environment, faults={} if fault is None else {"fp32": fault})
    (trial,) = run_all(telemetry, engine, fake_spec(protocol=MeasurementProtocol(num_blocks=4), **changes))
    return trial


def run_on_two(telemetry: Telemetry, parallelism: str = "ddp") -> Trial:
    return run(telemetry, environment=ON_TWO, world_size=2, parallelism=parallelism)


def samplers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "castwise telemetry"]


def wait_for_reads(*monitors: FakeMonitor, count: int = 8) -> None:
    wait_until(lambda: min(monitor.num_reads for monitor in monitors) >= count, "reads")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert samplers() == []


# A block's samples and threads


def test_the_shortest_block_has_a_sample_before_and_one_after() -> None:
    first, second = FakeMonitor(), FakeMonitor()
    with watching(first, second).watch(TWO_GPUS) as watch:
        assert len(samplers()) == 2, "a thread a GPU"
        assert (first.num_reads, second.num_reads) == (1, 1)
    assert (first.num_reads, second.num_reads) == (2, 2)
    assert watch.reading.num_samples == 2
    assert watch.reading.energy_joules == 200.0
    assert watch.reading.missing.keys() == {"foreign_processes"}
    assert threading.main_thread() not in first.readers


def test_a_long_block_is_sampled_all_the_time() -> None:
    monitor = FakeMonitor(lambda index: fake_sample(power_watts=100.0 if index == 0 else 300.0))
    with watching(monitor, period_seconds=0.001).watch(GPUS) as watch:
        wait_for_reads(monitor)
    assert watch.reading.num_samples >= 7
    assert watch.reading.power_watts == 300.0


@pytest.mark.parametrize("error", [TrialFailedError("crashed", "no (fake)"), KeyboardInterrupt(), ValueError()])
def test_a_block_that_fails_has_a_reading_and_leaves_no_thread(error: BaseException) -> None:
    watches = []

    def fail() -> None:
        with watching(FakeMonitor()).watch(GPUS) as watch:
            watches.append(watch)
            assert len(samplers()) == 1
            raise error

    with pytest.raises(type(error)):
        fail()
    assert samplers() == []
    assert watches[0].reading.num_samples == 2


def test_a_cpu_has_a_reading_of_the_host_and_no_thread() -> None:
    telemetry = watching()
    telemetry.note_processes({})
    with telemetry.watch({}) as watch:
        assert samplers() == []
    assert telemetry.gpu_facts({}) is None
    assert (watch.reading.num_samples, watch.reading.missing) == (0, {})
    assert watch.reading.cpu_load is not None
    assert watch.reading.seconds >= 0


def test_library_is_opened_once_a_job_and_closed() -> None:
    opened: list[FakeMonitor] = []

    def open_one(uuid: str) -> FakeMonitor:
        assert uuid == UUID
        opened.append(FakeMonitor())
        return opened[-1]

    telemetry = Telemetry(open_one)
    for count in (1, 2):
        run(telemetry)
        assert len(opened) == count
        assert opened[-1].was_closed


# Failures


def refusing(error: Exception) -> Telemetry:
    def refuse(uuid: str) -> Monitor:
        raise error

    return Telemetry(refuse)


def raising(message: str) -> Callable[..., Sample]:
    def fail(*_: int) -> Sample:
        raise RuntimeError(message)

    return fail


@pytest.mark.parametrize(
    ("telemetry", "why"),
    [
        (refusing(GpuUnreadableError("no NVML")), "no NVML"),
        (refusing(OSError("no NVML")), "no NVML"),
        (watching(FakeMonitor(raising("a bug in the library"))), "a bug in the library"),
        (watching(FakeMonitor(on_facts=raising("no facts"))), "no facts"),  # type: ignore[arg-type]
    ],
)
def test_a_library_that_fails_costs_no_figure(telemetry: Telemetry, why: str) -> None:
    trial = run(telemetry)
    assert (trial.status, len(trial.ranks[0].blocks), len(trial.readings)) == ("ok", 4, 4)
    assert trial.telemetry_note == f"not available: gpu ({why})"
    assert trial.gpu_facts is None
    assert all(reading.missing == {"gpu": why} for reading in trial.readings)
    assert all(reading.cpu_load is not None for reading in trial.readings)


def test_a_gpu_without_a_uuid_is_not_opened() -> None:
    trial = run(watching(), environment=fake_environment())
    assert trial.telemetry_note == "not available: gpu (the GPU's UUID is not known)"
    environment = fake_environment(gpu_uuid=UUID, num_gpus=2)
    trial = run(watching(FakeMonitor()), environment=environment, world_size=2, parallelism="ddp")
    assert {reading.missing["gpu"] for reading in trial.readings} == {"cuda:1: the GPU's UUID is not known"}


def test_a_gpu_that_disappears_costs_no_figure() -> None:
    # One sample before the first process, two a block: the GPU is lost in the second block.
    monitor = FakeMonitor(lambda index: fake_sample(energy_joules=100.0 * index) if index < 4 else LOST)
    trial = run(watching(monitor))
    assert (trial.status, len(trial.ranks[0].blocks)) == ("ok", 4)
    assert [reading.energy_joules for reading in trial.readings] == [100.0, None, None, None]
    assert [reading.power_watts for reading in trial.readings] == [500.0, 500.0, None, None]
    assert "energy_joules" in trial.telemetry_note
    assert "(GPU is lost)" in trial.telemetry_note
    assert trial.gpu_facts is not None


@pytest.mark.parametrize("block", [0, 1, 3])
def test_readings_match_blocks_if_one_fails(block: int) -> None:
    trial = run(watching(FakeMonitor()), Fault("crash", block=block))
    assert trial.status == "crashed"
    assert len(trial.readings) == block == (len(trial.ranks[0].blocks) if trial.ranks else 0)


def test_an_interrupt_closes_the_library() -> None:
    monitor = FakeMonitor()
    with pytest.raises(KeyboardInterrupt):
        run(watching(monitor), Fault("interrupt", "run_block", block=1))
    assert monitor.was_closed


@pytest.mark.parametrize("failure", ["never opened", "raises", "hangs"])
def test_a_gpu_that_cannot_be_read_costs_the_others_nothing(failure: str) -> None:
    let_go, good = threading.Event(), counting(1000.0, 100.0)

    def fail(index: int) -> Sample:
        if failure == "hangs":
            let_go.wait(PATIENCE_SECONDS)
        raise RuntimeError("GPU is lost")

    def open_one(uuid: str) -> Monitor:
        if uuid == SECOND_UUID and failure == "never opened":
            raise GpuUnreadableError("no such GPU")
        return good if uuid == UUID else FakeMonitor(fail)

    patience_seconds = 2.0 if failure == "hangs" else PATIENCE_SECONDS
    try:
        trial = run_on_two(Telemetry(open_one, period_seconds=30.0, patience_seconds=patience_seconds))
    finally:
        let_go.set()
        for thread in samplers():
            thread.join()
    why = {"never opened": "no such GPU", "raises": "GPU is lost", "hangs": "the driver did not answer for 5 s"}
    assert (trial.status, len(trial.readings)) == ("ok", 4)
    for reading in trial.readings:
        assert (reading.num_gpus, reading.sm_clock_hertz, reading.energy_joules) == (1, 1.98e9, None)
        assert reading.missing["gpu"] == f"cuda:1: {why[failure]}"
    assert energy_of([trial]) is None, "half of the GPUs' is not the trial's"
    assert trial.energy_measurement is None
    assert trial.telemetry_note.startswith(f"not available: gpu (cuda:1: {why[failure]})")


def test_a_driver_that_hangs_in_a_block_does_not_hang_the_run() -> None:
    let_go = threading.Event()

    def hang(index: int) -> Sample:
        if index == 3:
            let_go.wait(PATIENCE_SECONDS)
        return fake_sample()

    monitor = FakeMonitor(hang)
    try:
        trial = run(watching(monitor, patience_seconds=0.05))
        assert monitor.num_reads <= 4, "it is not asked again"
    finally:
        let_go.set()
        for thread in samplers():
            thread.join()
    assert (trial.status, len(trial.readings)) == ("ok", 4)
    assert "gpu (the driver did not answer" in trial.telemetry_note


# Training runs, several GPUs, others' processes


def test_each_epoch_has_a_reading_also_if_an_earlier_process_ran_it() -> None:
    spec = TrialSpec(**(dict(fake_spec()) | {"kind": "training", "recipe": Recipe(epochs=3)}))
    engine = FakeEngine(environment=ON_GPU, faults={"#1": Fault("interrupt", "run_epoch", block=2)})
    telemetry = watching(FakeMonitor())
    with pytest.raises(KeyboardInterrupt):
        run_all(telemetry, engine, spec)
    (trial,) = run_all(telemetry, engine, spec)
    assert [reading.energy_joules for reading in trial.readings] == [None, None, 100.0]
    assert "gpu (an earlier process ran this epoch)" in trial.telemetry_note


@pytest.mark.parametrize("parallelism", ["ddp", "dp"])
def test_all_gpus_of_a_trial_are_watched(parallelism: str) -> None:
    held = ("hw_thermal_slowdown",)
    slow = counting(7.0, 30.0, sm_clock_hertz=1.1e9, throttle_reasons=held, temperature_celsius=91.0, power_watts=200.0)
    trial = run_on_two(watching(counting(1000.0, 100.0), slow), parallelism)
    assert (trial.status, len(trial.readings)) == ("ok", 4)
    for reading in trial.readings:
        assert (reading.num_gpus, reading.energy_joules, reading.power_watts) == (2, 130.0, 700.0)
        assert (reading.sm_clock_hertz, reading.max_temperature_celsius) == (1.1e9, 91.0)
        assert (reading.throttle_reasons, reading.affected_gpus) == (held, {held[0]: ("cuda:1",)})


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [([STRANGER], [STRANGER, STRANGER + 1], 2), ([], [STRANGER], 1)],
)
def test_foreign_processes_on_any_gpu_are_counted_once(first: list[int], second: list[int], count: int) -> None:
    trial = run_on_two(watching(listing(os.getpid(), *first), listing(os.getpid(), *second)))
    assert {reading.foreign_processes for reading in trial.readings} == {count}
    assert "foreign-process" in {warning.name for warning in warnings_of(trial)}


def test_processes_are_noted_before_the_first_trial_starts() -> None:
    engine, seen = FakeEngine(environment=ON_TWO), list[int]()

    def sample(index: int) -> Sample:
        seen.append(len(engine.sessions))
        return fake_sample(processes=frozenset({STRANGER}))

    specs = fake_spec(), fake_spec(world_size=2, parallelism="ddp")
    one, two = run_all(watching(listing(), FakeMonitor(sample)), engine, *specs)
    assert seen[0] == 0
    assert {reading.foreign_processes for reading in one.readings} == {None}
    assert {reading.foreign_processes for reading in two.readings} == {1}


# Hardware counters


def test_a_trial_has_the_mean_counters_over_its_blocks() -> None:
    monitor = FakeMonitor(counters=lambda index: CounterReading(1.0 + index, {"tensor_share": 0.1 * index}))
    trial = run(watching(monitor))
    assert trial.counters is not None
    assert (trial.counters.num_blocks, monitor.num_counted) == (4, 4)
    assert trial.counters.tensor_share == pytest.approx((0 * 1 + 0.1 * 2 + 0.2 * 3 + 0.3 * 4) / 10)
    assert "counters" not in trial.telemetry_note
    assert Trial.model_validate_json(trial.model_dump_json()) == trial


def test_counters_that_fail_in_the_middle_cost_that_block_alone() -> None:
    def counters(index: int) -> CounterReading:
        return CounterReading(missing="Unknown Error") if index == 1 else CounterReading(1.0, {"tensor_share": 0.5})

    trial = run(watching(FakeMonitor(counters=counters)))
    assert trial.status == "ok"
    assert trial.counters is not None
    assert trial.counters.num_blocks == 3
    assert "hardware counters (Unknown Error)" in trial.telemetry_note


def test_counters_of_two_gpus_are_averaged_and_a_cpu_has_none() -> None:
    monitors = [FakeMonitor(counters=lambda _, s=share: CounterReading(1.0, {"sm_share": s})) for share in (0.2, 0.4)]  # type: ignore[misc]
    trial = run_on_two(watching(*monitors))
    assert trial.counters is not None
    assert trial.counters.sm_share == pytest.approx(0.3)
    on_cpu = run(watching(), environment=fake_environment(None), device="cpu")
    assert (on_cpu.counters, on_cpu.telemetry_note) == (None, "")


# Energy of sustained steps


class SustainedSession(FakeSession):
    """Runs sustained steps until the driver was asked often enough."""

    _engine: "MonitoredEngine"

    def run_sustained(self, seconds: float) -> Block:
        monitor = self._engine.monitor
        wait_for_reads(monitor, count=monitor.num_reads + 8)
        return super().run_sustained(seconds)


class MonitoredEngine(FakeEngine):
    monitor: FakeMonitor


def sustained_engine() -> MonitoredEngine:
    engine = MonitoredEngine(environment=ON_GPU, exclusive=False, session_class=SustainedSession)
    engine.monitor = counting(1000.0, 50.0)
    return engine


def test_energy_of_sustained_steps() -> None:
    engine = sustained_engine()
    (trial,) = run_all(watching(engine.monitor, period_seconds=0.001), engine, fake_spec())
    energy = trial.energy_measurement
    assert energy is not None
    assert energy.num_ticks >= 3
    assert energy.joules == 50.0 * energy.num_ticks
    assert energy.seconds > 0
    assert energy.step_seconds > 0
    assert not energy.missing


def test_energy_is_measured_once_a_configuration() -> None:
    engine = sustained_engine()
    specs = [fake_spec(name, protocol=MeasurementProtocol(num_blocks=4)) for name in ("fp32", "tf32")]
    telemetry = watching(engine.monitor, period_seconds=0.001)
    runner = TrialRunner(engine, None, ON_GPU, NullListener(), telemetry=telemetry)
    earlier = {specs[0].configuration: PriorStats(0.001, 0.1)}
    trials = InterleavedSession(runner, specs, round_number=1, earlier=earlier).run()
    runner.closer.wait()
    assert {trial.spec.precision for trial in trials if trial.energy_measurement is not None} == {"tf32"}


@pytest.mark.parametrize("environment", [fake_environment(None), ON_GPU])
def test_no_sustained_steps_without_a_counter(environment: Environment) -> None:
    engine = FakeEngine(environment=environment)
    telemetry = watching(FakeMonitor(lambda _: fake_sample(energy_joules=None)))
    (trial,) = run_all(telemetry, engine, fake_spec())
    assert trial.energy_measurement is None
    assert "run_sustained" not in engine.sessions[0].calls


def test_no_energy_if_one_gpu_has_no_counter() -> None:
    bare = FakeMonitor(lambda _: fake_sample(energy_joules=None, missing={"energy_joules": "Not Supported"}))
    trial = run_on_two(watching(counting(1000.0, 100.0), bare))
    assert [reading.energy_joules for reading in trial.readings] == [None] * 4
    assert trial.energy_measurement is None
    assert "energy_joules (cuda:1: Not Supported)" in trial.telemetry_note
    energy = energy_of([trial])
    assert energy is not None
    assert energy[1] == "power × time", "both GPUs report their power"


# At the power limit


class CappedSession(SustainedSession):
    """The GPU reports its power limit while fp32 warms up or is timed."""

    def warm_up(self, step_seconds: float | None = None) -> Facts:
        with self._capped():
            return super().warm_up(step_seconds)

    def run_stretch(self, lead_in_seconds: float, num_blocks: int, block_seconds: float) -> tuple[Block, ...]:
        with self._capped():
            return super().run_stretch(lead_in_seconds, num_blocks, block_seconds)

    @contextmanager
    def _capped(self) -> Iterator[None]:
        monitor, sample = self._engine.monitor, self._engine.monitor.sample
        if self.spec.precision == "fp32":
            monitor.sample = lambda index: replace(sample(index), throttle_reasons=("sw_power_cap",))
        wait_for_reads(monitor, count=monitor.num_reads + 8)
        yield
        monitor.sample = sample


def run_capped(number: int | None, *names: str, **options: Any) -> tuple[FakeEngine, list[Trial]]:
    engine = MonitoredEngine(environment=ON_GPU, exclusive=False, session_class=CappedSession)
    engine.monitor = counting(1000.0, 50.0)
    runner = TrialRunner(engine, None, ON_GPU, NullListener(), telemetry=watching(engine.monitor, period_seconds=0.001))
    specs = [fake_spec(name, protocol=CUDA_ROUND) for name in names]
    trials = InterleavedSession(runner, specs, round_number=number, **options).run()
    runner.closer.wait()
    runner.telemetry.close()
    return engine, trials


def test_a_loop_at_the_power_limit_is_timed_in_a_stretch_after_the_others() -> None:
    engine, (capped, other) = run_capped(1, "fp32", "tf32")
    assert "run_block" not in engine.sessions[0].calls
    assert "run_stretch" not in engine.sessions[1].calls
    blocks = capped.ranks[0].blocks
    assert len(blocks) == len(capped.readings) == 4
    assert all(block.in_stretch for block in blocks)
    assert sum(block.seconds for block in blocks) == pytest.approx(1.0, rel=0.1)
    assert blocks[0].lead_in_steps * blocks[0].seconds / blocks[0].num_steps == pytest.approx(1.0, rel=0.1)
    assert was_at_power_limit(capped)
    assert not was_at_power_limit(other)
    assert not any(block.in_stretch for block in other.ranks[0].blocks)
    energy = capped.energy_measurement
    assert energy is not None
    assert energy.step_seconds == pytest.approx(sum(b.seconds for b in blocks) / sum(b.num_steps for b in blocks))
    assert "run_sustained" not in engine.sessions[0].calls, "the stretch has the energy already"


def test_the_power_limit_is_known_from_earlier_processes() -> None:
    spec = fake_spec("bf16-mixed", protocol=CUDA_ROUND)
    earlier = {spec.configuration: PriorStats(0.001, 0.1, is_at_power_limit=True)}
    engine, (trial,) = run_capped(2, "bf16-mixed", earlier=earlier)
    assert all(block.in_stretch for block in trial.ranks[0].blocks)
    assert trial.energy_measurement is not None, "a stretch takes no time for it"
    assert engine.num_open == 0


def test_a_lone_loop_at_the_power_limit_takes_its_whole_time() -> None:
    _, (trial,) = run_capped(None, "fp32")
    assert sum(block.seconds for block in trial.ranks[0].blocks) == pytest.approx(1.2, rel=0.1)


def test_the_energy_of_a_stretch_is_that_of_its_last_seconds() -> None:
    monitor = counting(1000.0, 50.0)
    telemetry = watching(monitor, period_seconds=0.001)
    with telemetry.meter(GPUS) as meter:
        wait_for_reads(monitor, count=20)
        started = time.perf_counter()
        wait_for_reads(monitor, count=monitor.num_reads + 20)
        meter.seconds = time.perf_counter() - started
    assert 0 < meter.energy.seconds <= meter.seconds
    telemetry.close()


class Asked(Monitor):
    """A GPU whose library notes how many of its calls run at once."""

    package = "none"
    sample_queries: ClassVar[Mapping[str, Query]] = {
        name: lambda library, _: library() for name in ("power_watts", "ecc_errors")
    }
    running: ClassVar[list[int]] = []
    most: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__(self._call, (), start=int, find=int, stop=int)

    def _call(self) -> int:
        self.running.append(1)
        self.most.append(len(self.running))
        time.sleep(0.002)
        self.running.pop()
        return 1


def test_libraries_are_called_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML is supposed to have crashed as four threads called it, each for its GPU."""
    monkeypatch.setattr(Asked, "most", [])
    telemetry = Telemetry(lambda _: Asked(), period_seconds=0.001)
    with telemetry.watch({f"cuda:{number}": f"GPU-{number}" for number in range(4)}) as watch:
        time.sleep(0.05)
    telemetry.close()
    assert len(watch.reading.each_gpu) == 4
    assert set(Asked.most) == {1}


def test_a_call_that_never_returns_keeps_no_other_gpu_from_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_MOST_SECONDS", 0.01)
    with gpu.one_at_a_time():
        assert Asked().read().power_watts == 1
    assert Asked().read().power_watts == 1
    assert not gpu._LOCK.locked()
