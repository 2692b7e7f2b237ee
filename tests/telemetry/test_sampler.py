"""Telemetry of a job: what is watched when, what becomes of failures, and that no thread is left over."""

import os
import threading
import time
from collections.abc import Iterator

import fake_engine
import pytest
from fake_engine import FakeEngine, FakeSession, Fault, fake_environment, fake_spec
from fake_gpu import SECOND_UUID, UUID, FakeMonitor, fake_sample

from castwise.analysis.energy import energy_of
from castwise.analysis.warnings import warnings_of
from castwise.orchestrator.block_schedule import PriorStats
from castwise.orchestrator.runner import TrialRunner, run_interleaved
from castwise.orchestrator.session import TrialFailedError
from castwise.orchestrator.trial import NullListener
from castwise.records.schema import Block, Environment, Trial
from castwise.spec.recipe import Recipe
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.telemetry.gpu import GpuUnreadableError, Monitor, Sample
from castwise.telemetry.sampler import BlockWatch, Telemetry

ON_GPU = fake_environment(gpu_uuid=UUID)
GPUS = {"cuda:0": UUID}
TWO_GPUS = {"cuda:0": UUID, "cuda:1": SECOND_UUID}
ON_TWO = fake_environment(gpu_uuid=UUID, gpu_uuids=(UUID, SECOND_UUID), num_gpus=2)
LOST = Sample(missing=dict.fromkeys(("power_watts", "energy_joules", "processes"), "GPU is lost"))


def watching(monitor: FakeMonitor, patience_seconds: float = 30.0, period_seconds: float = 30.0) -> Telemetry:
    return Telemetry(lambda uuid: monitor, period_seconds, patience_seconds)


def runner_with(telemetry: Telemetry, engine: FakeEngine) -> TrialRunner:
    return TrialRunner(engine, None, engine.environment, NullListener(), telemetry=telemetry)


def run(
    telemetry: Telemetry, fault: Fault | None = None, environment: Environment = ON_GPU, spec: TrialSpec | None = None
) -> Trial:
    engine = FakeEngine(environment=environment, faults={} if fault is None else {"fp32": fault})
    (trial,) = runner_with(telemetry, engine).run([spec or fake_spec(protocol=MeasurementProtocol(num_blocks=4))])
    return trial


def samplers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "castwise telemetry"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert samplers() == []


def test_even_the_shortest_block_has_a_sample_before_and_one_after() -> None:
    monitor = FakeMonitor()
    with watching(monitor).watch(GPUS) as watch:
        before = monitor.num_reads
    assert (before, monitor.num_reads) == (1, 2)
    assert watch.reading.num_samples == 2
    assert watch.reading.energy_joules == 100.0
    assert watch.reading.missing.keys() == {"foreign_processes"}


def test_a_long_block_is_sampled_all_the_time() -> None:
    enough = threading.Event()

    def sample(index: int) -> Sample:
        if index == 5:
            enough.set()
        return fake_sample(power_watts=100.0 if index == 0 else 300.0)

    with watching(FakeMonitor(sample), period_seconds=0.001).watch(GPUS) as watch:
        assert enough.wait(30)
    assert watch.reading.num_samples >= 7
    assert watch.reading.power_watts == 300.0


@pytest.mark.parametrize("error", [TrialFailedError("crashed", "no (fake)"), KeyboardInterrupt(), ValueError()])
def test_the_thread_ends_however_the_block_does(error: BaseException) -> None:
    monitor = FakeMonitor()

    def fail() -> None:
        with watching(monitor, period_seconds=0.001).watch(GPUS):
            assert len(samplers()) == 1
            raise error

    with pytest.raises(type(error)):
        fail()
    assert samplers() == []
    reads = monitor.num_reads
    assert reads >= 2
    assert monitor.num_reads == reads


def test_no_thread_runs_between_blocks() -> None:
    telemetry = watching(FakeMonitor())
    for _ in range(3):
        with telemetry.watch(GPUS):
            assert len(samplers()) == 1
        assert samplers() == []


def test_a_cpu_has_a_reading_of_the_host_and_no_thread() -> None:
    def never(uuid: str) -> Monitor:
        raise AssertionError("opened on a CPU")

    telemetry = Telemetry(never)
    telemetry.note_processes({})
    with telemetry.watch({}) as watch:
        assert samplers() == []
    assert telemetry.gpu_facts({}) is None
    assert (watch.reading.num_samples, watch.reading.missing) == (0, {})
    assert watch.reading.cpu_load is not None
    assert watch.reading.seconds >= 0


def test_library_is_opened_once_and_closed() -> None:
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


@pytest.mark.parametrize("error", [GpuUnreadableError("no NVML"), OSError("no NVML"), ValueError("no NVML")])
def test_without_a_library_there_are_figures_and_why_there_is_no_more(error: Exception) -> None:
    def refuse(uuid: str) -> Monitor:
        raise error

    trial = run(Telemetry(refuse))
    assert (trial.status, len(trial.ranks[0].blocks), len(trial.readings)) == ("ok", 4, 4)
    assert trial.telemetry_note == "not available: gpu (no NVML)"
    assert trial.gpu_facts is None
    assert all(reading.missing == {"gpu": "no NVML"} for reading in trial.readings)
    assert all(reading.cpu_load is not None for reading in trial.readings)


def test_a_gpu_without_a_uuid_is_not_looked_for() -> None:
    trial = run(watching(FakeMonitor()), environment=fake_environment())
    assert trial.telemetry_note == "not available: gpu (the GPU's UUID is not known)"


def _raising(index: int) -> Sample:
    raise RuntimeError("a bug in the library")


def test_raising_library_does_not_end_the_run() -> None:
    trial = run(watching(FakeMonitor(_raising)))
    assert (trial.status, len(trial.readings)) == ("ok", 4)
    assert trial.telemetry_note == "not available: gpu (a bug in the library)"


def test_a_library_that_raises_when_asked_for_facts_is_given_up() -> None:
    def refuse() -> None:
        raise RuntimeError("no facts")

    trial = run(watching(FakeMonitor(on_facts=refuse)))
    assert (trial.status, trial.gpu_facts) == ("ok", None)
    assert trial.telemetry_note == "not available: gpu (no facts)"


def test_hanging_driver_does_not_hang_the_run() -> None:
    let_go = threading.Event()

    def hang(index: int) -> Sample:
        if index == 3:
            let_go.wait(60)
        return fake_sample()

    monitor = FakeMonitor(hang)
    try:
        trial = run(watching(monitor, patience_seconds=0.05))
        assert (trial.status, len(trial.readings)) == ("ok", 4)
        assert "gpu (the driver did not answer" in trial.telemetry_note
        assert monitor.num_reads <= 4
    finally:
        let_go.set()
        for thread in samplers():
            thread.join()


def test_a_gpu_that_disappears_mid_run_costs_no_figure() -> None:
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
def test_readings_line_up_with_blocks_where_one_fails(block: int) -> None:
    trial = run(watching(FakeMonitor()), Fault("crash", block=block))
    assert trial.status == "crashed"
    assert len(trial.readings) == block == (len(trial.ranks[0].blocks) if trial.ranks else 0)


def test_an_interrupt_leaves_no_thread() -> None:
    monitor = FakeMonitor()
    with pytest.raises(KeyboardInterrupt):
        run(watching(monitor), Fault("interrupt", "run_block", block=1))
    assert monitor.was_closed


def training_spec() -> TrialSpec:
    return TrialSpec(**(dict(fake_spec()) | {"kind": "training", "recipe": Recipe(epochs=3)}))


def test_each_epoch_has_a_reading_also_where_an_earlier_process_ran_it() -> None:
    engine = FakeEngine(environment=ON_GPU, faults={"#1": Fault("interrupt", "run_epoch", block=2)})
    telemetry = watching(FakeMonitor())
    with pytest.raises(KeyboardInterrupt):
        runner_with(telemetry, engine).run([training_spec()])
    (trial,) = runner_with(telemetry, engine).run([training_spec()])
    assert [reading.energy_joules for reading in trial.readings] == [None, None, 100.0]
    assert "gpu (an earlier process ran this epoch)" in trial.telemetry_note


def test_who_was_there_before_is_seen_before_the_first_process_starts() -> None:
    engine, seen = FakeEngine(environment=ON_GPU), list[int]()

    def sample(index: int) -> Sample:
        seen.append(len(engine.sessions))
        return fake_sample(processes=frozenset({2**22 + 1}))

    (trial,) = runner_with(watching(FakeMonitor(sample)), engine).run([fake_spec()])
    assert seen[0] == 0
    assert {reading.foreign_processes for reading in trial.readings} == {1}


def test_sampling_threads() -> None:
    monitor = FakeMonitor()
    run(watching(monitor))
    assert threading.main_thread() not in monitor.readers


def test_a_block_that_fails_has_been_watched_all_the_same() -> None:
    watches: list[BlockWatch] = []

    def fail() -> None:
        with watching(FakeMonitor()).watch(GPUS) as watch:
            watches.append(watch)
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        fail()
    assert watches[0].reading.num_samples == 2


class Stretching(FakeSession):
    """Runs its stretch until the driver has been asked often enough."""

    monitor: FakeMonitor

    def run_sustained(self, seconds: float) -> Block:
        block, enough = super().run_sustained(seconds), self.monitor.num_reads + 8
        deadline = time.monotonic() + 20.0
        while self.monitor.num_reads < enough and time.monotonic() < deadline:
            time.sleep(0.001)
        return block


def test_energy_of_sustained_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = FakeMonitor(sample=lambda index: fake_sample(energy_joules=1000.0 + 50.0 * index))
    monkeypatch.setattr(Stretching, "monitor", monitor, raising=False)
    monkeypatch.setattr(fake_engine, "FakeSession", Stretching)
    trial = run(watching(monitor, period_seconds=0.001))
    assert trial.energy_measurement is not None
    assert trial.energy_measurement.num_ticks >= 3
    assert trial.energy_measurement.joules == 50.0 * trial.energy_measurement.num_ticks
    assert trial.energy_measurement.seconds > 0
    assert trial.energy_measurement.step_seconds > 0
    assert not trial.energy_measurement.missing


@pytest.mark.parametrize(("number", "metered"), [(1, {"fp32", "tf32"}), (2, {"tf32"})])
def test_energy_is_measured_once_a_configuration(
    number: int, metered: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = FakeMonitor(sample=lambda index: fake_sample(energy_joules=1000.0 + 50.0 * index))
    monkeypatch.setattr(Stretching, "monitor", monitor, raising=False)
    monkeypatch.setattr(fake_engine, "FakeSession", Stretching)
    specs = [fake_spec(name, protocol=MeasurementProtocol(num_blocks=4)) for name in ("fp32", "tf32")]
    engine = FakeEngine(environment=ON_GPU, exclusive=False)
    runner = runner_with(watching(monitor, period_seconds=0.001), engine)
    session = run_interleaved(runner, specs, number=number, earlier={specs[0].configuration: PriorStats(0.001, 0.1)})
    runner.closer.wait()
    assert {trial.spec.precision for trial in session.trials if trial.energy_measurement is not None} == metered


@pytest.mark.parametrize("environment", [fake_environment(None), ON_GPU])
def test_no_sustained_steps_without_a_counter(environment: Environment) -> None:
    monitor = FakeMonitor(sample=lambda _: fake_sample(energy_joules=None))
    engine = FakeEngine(environment=environment)
    (trial,) = runner_with(watching(monitor), engine).run([fake_spec(protocol=MeasurementProtocol(num_blocks=4))])
    assert trial.energy_measurement is None
    assert "run_sustained" not in engine.sessions[0].calls


def watching_two(first: FakeMonitor, second: FakeMonitor, **seconds: float) -> Telemetry:
    times = {"period_seconds": 30.0, "patience_seconds": 30.0} | seconds
    return Telemetry(lambda uuid: {UUID: first, SECOND_UUID: second}[uuid], **times)


def run_on_two(telemetry: Telemetry, parallelism: str = "ddp", precision: str = "fp32") -> Trial:
    spec = fake_spec(precision, protocol=MeasurementProtocol(num_blocks=4), world_size=2, parallelism=parallelism)
    return run(telemetry, environment=ON_TWO, spec=spec)


def counting(start: float, step: float, **changes: object) -> FakeMonitor:
    return FakeMonitor(lambda index: fake_sample(energy_joules=start + step * index, **changes))


@pytest.mark.parametrize("parallelism", ["ddp", "dp"])
def test_all_gpus_of_a_trial_are_watched(parallelism: str) -> None:
    held = ("hw_thermal_slowdown",)
    slow = counting(7.0, 30.0, sm_clock_hertz=1.1e9, throttle_reasons=held, temperature_celsius=91.0, power_watts=200.0)
    trial = run_on_two(watching_two(counting(1000.0, 100.0), slow), parallelism)
    assert (trial.status, len(trial.readings)) == ("ok", 4)
    for reading in trial.readings:
        assert (reading.num_gpus, reading.energy_joules, reading.power_watts) == (2, 130.0, 700.0)
        assert (reading.sm_clock_hertz, reading.max_temperature_celsius) == (1.1e9, 91.0)
        assert (reading.throttle_reasons, reading.affected_gpus) == (held, {held[0]: ("cuda:1",)})
    (throttled,) = [warning for warning in warnings_of(trial) if warning.name == "throttled"]
    assert throttled.seen.startswith("hw_thermal_slowdown in 4 of 4 blocks on cuda:1, at 350 of 700 W")


def test_of_a_trial_on_the_second_gpu_that_one_is_watched() -> None:
    second = fake_environment(gpu_uuid=SECOND_UUID, gpu_uuids=(UUID, SECOND_UUID), num_gpus=2)
    first, own = FakeMonitor(), FakeMonitor()
    telemetry = watching_two(first, own)
    engine = FakeEngine(environment=second, devices=("cuda:1",))
    (trial,) = runner_with(telemetry, engine).run(
        [fake_spec(device="cuda:1", protocol=MeasurementProtocol(num_blocks=3))]
    )
    assert (trial.status, first.num_reads) == ("ok", 0)
    assert [reading.num_gpus for reading in trial.readings] == [1, 1, 1]


def test_another_s_process_on_any_gpu_is_seen_and_counted_once() -> None:
    own, other, third = os.getpid(), 2**22 + 1, 2**22 + 2
    present = [frozenset({own, other}), frozenset({own, other, third})]
    trial = run_on_two(watching_two(*(FakeMonitor(lambda _, p=pids: fake_sample(processes=p)) for pids in present)))  # type: ignore[misc]
    assert {reading.foreign_processes for reading in trial.readings} == {2}
    alone = [frozenset({own}), frozenset({own, other})]
    trial = run_on_two(watching_two(*(FakeMonitor(lambda _, p=pids: fake_sample(processes=p)) for pids in alone)))  # type: ignore[misc]
    assert {reading.foreign_processes for reading in trial.readings} == {1}
    (shared,) = [warning for warning in warnings_of(trial) if warning.name == "foreign-process"]
    assert shared.seen == "up to 1 other process on cuda:1 in 4 of 4 blocks"


def test_who_was_on_any_gpu_before_is_seen_before_the_first_process_starts() -> None:
    engine, seen = FakeEngine(environment=ON_TWO), list[int]()

    def sample(index: int) -> Sample:
        seen.append(len(engine.sessions))
        return fake_sample(processes=frozenset({2**22 + 1}))

    telemetry = watching_two(FakeMonitor(lambda _: fake_sample(processes=frozenset())), FakeMonitor(sample))
    specs = [fake_spec(), fake_spec(world_size=2, parallelism="ddp")]
    one, two = runner_with(telemetry, engine).run(specs)
    assert seen[0] == 0
    assert {reading.foreign_processes for reading in one.readings} == {None}
    assert {reading.foreign_processes for reading in two.readings} == {1}


def test_without_one_gpu_s_counter_there_is_no_energy_and_it_says_whose() -> None:
    bare = FakeMonitor(lambda _: fake_sample(energy_joules=None, missing={"energy_joules": "Not Supported"}))
    trial = run_on_two(watching_two(counting(1000.0, 100.0), bare))
    assert [reading.energy_joules for reading in trial.readings] == [None] * 4
    assert trial.energy_measurement is None
    assert "energy_joules (cuda:1: Not Supported)" in trial.telemetry_note
    energy = energy_of(trial)
    assert energy is not None
    assert energy.source == "power × time", "which both GPUs tell"


@pytest.mark.parametrize("why", ["never opened", "raises", "hangs"])
def test_a_gpu_that_cannot_be_read_costs_the_others_nothing(why: str) -> None:
    let_go, good = threading.Event(), counting(1000.0, 100.0)

    def fail(index: int) -> Sample:
        if why == "hangs":
            let_go.wait(60)
        raise RuntimeError("GPU is lost")

    def open_one(uuid: str) -> Monitor:
        if uuid == SECOND_UUID and why == "never opened":
            raise GpuUnreadableError("no such GPU")
        return good if uuid == UUID else FakeMonitor(fail)

    try:
        trial = run_on_two(Telemetry(open_one, period_seconds=30.0, patience_seconds=0.5))
        said = {"never opened": "no such GPU", "raises": "GPU is lost", "hangs": "the driver did not answer for 5 s"}
        assert (trial.status, len(trial.readings)) == ("ok", 4)
        for reading in trial.readings:
            assert (reading.num_gpus, reading.sm_clock_hertz, reading.energy_joules) == (1, 1.98e9, None)
            assert reading.missing["gpu"] == f"cuda:1: {said[why]}"
        assert energy_of(trial) is None, "half of the GPUs' is not the trial's"
        assert trial.energy_measurement is None
        assert trial.telemetry_note.startswith(f"not available: gpu (cuda:1: {said[why]})")
    finally:
        let_go.set()
        for thread in samplers():
            thread.join()


def test_a_gpu_that_is_lost_in_a_block_is_no_part_of_its_reading() -> None:
    def lost(index: int) -> Sample:
        if index == 4:
            raise RuntimeError("GPU is lost")
        return fake_sample(energy_joules=50.0 * index)

    telemetry = watching_two(counting(1000.0, 100.0), FakeMonitor(lost))
    trial = run_on_two(telemetry)  # a look before, two samples a block
    assert [reading.num_gpus for reading in trial.readings] == [2, 1, 1, 1]
    assert [reading.energy_joules for reading in trial.readings] == [150.0, None, None, None]


def test_gpus_whose_uuids_are_not_known_are_said_to_be_missing() -> None:
    monitor = FakeMonitor()
    trial = run(
        watching(monitor),
        environment=fake_environment(gpu_uuid=UUID, num_gpus=2),
        spec=fake_spec(protocol=MeasurementProtocol(num_blocks=3), world_size=2, parallelism="ddp"),
    )
    assert [reading.missing["gpu"] for reading in trial.readings] == ["cuda:1: the GPU's UUID is not known"] * 3


def test_one_sampling_thread_a_gpu() -> None:
    first, second = FakeMonitor(), FakeMonitor()
    with watching_two(first, second).watch(TWO_GPUS) as watch:
        assert len(samplers()) == 2
        assert (first.num_reads, second.num_reads) == (1, 1)
    assert (first.num_reads, second.num_reads) == (2, 2)
    assert watch.reading.num_samples == 2


def test_the_energy_of_all_gpus_is_metered() -> None:
    first, second = counting(1000.0, 50.0), counting(0.0, 10.0)
    with watching_two(first, second, period_seconds=0.001).meter(TWO_GPUS) as meter:
        deadline = time.monotonic() + 20.0
        while min(first.num_reads, second.num_reads) < 8 and time.monotonic() < deadline:
            time.sleep(0.001)
    found = meter.energy
    assert (found.missing, found.num_gpus) == ("", 2)
    assert found.num_ticks >= 3
    assert found.joules > 0
