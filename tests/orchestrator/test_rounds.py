"""Rounds on the fake engine: what is interleaved, when it ends, what follows a failure."""

import math
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeSession, Fault, fake_environment, fake_spec, step_time_of

from castwise.analysis.speedup import speedup_estimate, strays_among
from castwise.analysis.statistics import Estimate, noise_of
from castwise.analysis.steady_metrics import step_times
from castwise.errors import UsageError
from castwise.orchestrator.rounds import Rounds, StopRule, group_by_memory, prior_stats_of
from castwise.orchestrator.runner import InterleavedSession, NullListener, TrialRunner
from castwise.orchestrator.session import TrialFailedError
from castwise.records.schema import Block, Facts, Trial
from castwise.records.store import Store, load_folder
from castwise.spec.options import DurationOptions
from castwise.spec.trial import MeasurementProtocol, TrialSpec
from castwise.spec.user_model import UserModel

PROTOCOL = MeasurementProtocol(num_blocks=6, min_blocks=4)
NAMES = ("fp32", "bf16-mixed", "fp16-mixed")
SIX = (*NAMES, "bf16-master", "fp16-master", "tf32")
GIB = 2**30


def configurations(*names: str) -> list[TrialSpec]:
    return [fake_spec(name, protocol=PROTOCOL) for name in names or NAMES]


class NoisySession(FakeSession):
    _engine: "Noisy"

    def __init__(self, engine: "Noisy", num_processes: int = 1) -> None:
        super().__init__(engine, num_processes)
        self.has_memory = False
        self.effect = 1 + engine.process_noise * random.Random(len(engine.sessions)).gauss(0, 1)

    @property
    def needs(self) -> float:
        return 8.0 if self.spec.precision == "fp32" else 5.0

    def warm_up(self, step_seconds: float | None = None) -> Facts:
        facts = super().warm_up(step_seconds)
        if self._engine.held + self.needs > self._engine.memory:
            raise TrialFailedError("oom", "CUDA out of memory (fake)")
        self.has_memory = True
        return facts

    def run_block(self, length: int = 1) -> Block:
        block = super().run_block(length)
        self._engine.order.append(self.spec.precision)
        slower = self.effect * (1 + self._engine.drift * len(self._engine.order))
        self._blocks[-1] = block.model_copy(update={"seconds": block.seconds * slower})
        return self._blocks[-1]


@dataclass
class Noisy(FakeEngine):
    """A fake engine whose processes differ, and whose clock drifts; residents share the machine and its memory."""

    exclusive: bool = False
    session_class: Any = NoisySession
    process_noise: float = 0.0
    drift: float = 0.0
    memory: float = math.inf
    order: list[str] = field(default_factory=list)  # of what is timed
    led: list[float] = field(default_factory=list)  # seconds that lead in, of each stretch

    @property
    def held(self) -> float:
        return sum(s.needs for s in self.sessions if isinstance(s, NoisySession) and s.has_memory and not s.closed)


class Notes(NullListener):
    """Keeps the remarks."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def remark(self, line: str) -> None:
        self.lines.append(line)


def compare(
    made: FakeEngine,
    specs: Sequence[TrialSpec] = (),
    store: Store | None = None,
    recorded: Sequence[Trial] = (),
    listener: NullListener | None = None,
    **rule: object,
) -> Rounds:
    runner = TrialRunner(made, store, made.environment, listener or NullListener())
    rounds = Rounds(runner, specs or configurations(), StopRule(**rule), recorded)  # type: ignore[arg-type]
    assert rounds.run() == rounds.trials
    return rounds


def of(compared: Rounds, precision: str) -> list[Trial]:
    return [trial for trial in compared.trials if trial.spec.precision == precision]


def speedup_of(compared: Rounds, precision: str) -> Estimate | None:
    return speedup_estimate(of(compared, "fp32"), of(compared, precision))


def test_rounds_have_fresh_processes_and_random_order() -> None:
    made = Noisy()
    compared = compare(made)
    assert compared.ending == "narrow"
    assert [len(of(compared, name)) for name in NAMES] == [3, 3, 3]
    assert len(made.sessions) == 9
    assert made.num_open == 0
    for precision in NAMES:
        assert [trial.spec.repeat for trial in of(compared, precision)] == [0, 1, 2]
    order = [set(made.order[start : start + 3]) for start in range(0, len(made.order), 3)]
    assert all(turn == set(NAMES) for turn in order), "the blocks of all configurations are interleaved"
    orders = {tuple(made.order[start : start + 3]) for start in range(0, len(made.order), 3)}
    assert len(orders) > 1, "in a random order"
    session_ids = [
        {trial.session_id for trial in compared.trials if trial.spec.repeat == number} for number in range(3)
    ]
    assert all(len(session_id) == 1 and None not in session_id for session_id in session_ids)
    assert len(set().union(*session_ids)) == 3


@pytest.mark.parametrize(
    ("message", "status"),
    [("RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", "ok"), ("RuntimeError: shapes differ", "crashed")],
)
def test_what_may_lack_memory_next_to_others_is_tried_alone(message: str, status: str) -> None:
    class Library(NoisySession):
        def warm_up(self, step_seconds: float | None = None) -> Facts:
            if self.spec.precision == "fp16-mixed" and sum(not each.closed for each in made.sessions) > 1:
                raise TrialFailedError("crashed", message)
            return super().warm_up(step_seconds)

    made = Noisy(session_class=Library)
    assert {trial.status for trial in of(compare(made), "fp16-mixed")} == {status}


class WatchedSession(NoisySession):
    """Counts how many are set up at once."""

    at_once = 0
    most_at_once = 0

    def set_up(self, spec: TrialSpec, checkpoint: Path | None = None) -> None:
        WatchedSession.at_once += 1
        WatchedSession.most_at_once = max(WatchedSession.most_at_once, WatchedSession.at_once)
        time.sleep(0.05)
        super().set_up(spec, checkpoint)
        WatchedSession.at_once -= 1


@pytest.mark.parametrize(
    ("techniques", "num_nodes", "alone"),
    [
        ("cudnn-search", 1, False),
        ("cudnn-search", 2, True),
        ("compile", 1, False),
        ("compile-max-autotune", 1, True),
        ("channels-last", 1, False),
        ("channels-last", 2, False),
    ],
)
def test_set_up_alone_if_kernels_are_timed_without_the_devices_lock(
    techniques: str, num_nodes: int, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WatchedSession, "most_at_once", 0)
    update = {"techniques": (techniques,), "world_size": 2, "num_nodes": num_nodes}
    compare(Noisy(session_class=WatchedSession), [spec.model_copy(update=update) for spec in configurations()])
    assert (WatchedSession.most_at_once == 1) is alone


def test_any_configuration_may_be_the_baseline() -> None:
    made, specs = Noisy(), configurations("bf16-mixed", "fp16-mixed")
    specs.append(specs[0].model_copy(update={"techniques": ("channels-last",)}))
    made.gain = lambda spec: 1.5 if spec.techniques else 1.0
    runner = TrialRunner(made, None, made.environment, NullListener())
    compared = Rounds(runner, specs, StopRule(), baseline=specs[0])
    compared.run()
    assert compared.ending == "narrow"
    by_configuration = {
        spec.configuration: [t for t in compared.trials if t.spec.configuration == spec.configuration] for spec in specs
    }
    ratio = speedup_estimate(by_configuration[specs[0].configuration], by_configuration[specs[2].configuration])
    assert ratio is not None
    assert ratio.value == pytest.approx(1.5, rel=0.01)
    assert made.measured[0].configuration == specs[0].configuration, "it is set up first"


@pytest.mark.parametrize(
    ("names", "baseline"),
    [
        (("bf16-mixed", "fp32"), "fp32"),
        (("fp32", "default", "bf16-mixed"), "default"),
        (("fp32", "default", "as-written"), "as-written"),
        (("fp8-tensorwise", "bf16-mixed"), "bf16-mixed"),
    ],
)
def test_the_baseline_is_set_up_first(names: tuple[str, ...], baseline: str) -> None:
    made = Noisy()
    compared = compare(made, configurations(*names))
    assert made.measured_precisions[0] == baseline
    assert {len(of(compared, name)) for name in names} == {3}


def test_16_bit_precisions_alone_have_no_baseline() -> None:
    assert compare(Noisy(), configurations("bf16-mixed", "bf16-true"))._baseline is None


@pytest.mark.parametrize(
    ("capability", "order"),
    [
        ((9, 0), ["default", "bf16-master", "bf16-mixed", "fp16-mixed", "fp32"]),
        ((7, 5), ["default", "fp16-mixed", "fp32", "bf16-mixed", "bf16-master"]),
    ],
)
def test_emulated_precisions_come_last_in_a_session(capability: tuple[int, int], order: list[str]) -> None:
    made = Noisy(environment=fake_environment(capability))
    names = ("bf16-master", "bf16-mixed", "fp16-mixed", "fp32", "default")
    # Its set-ups are one by one.
    specs = [spec.model_copy(update={"techniques": ("compile-max-autotune",)}) for spec in configurations(*names)]
    compare(made, specs, min_rounds=1, max_rounds=1)
    assert made.measured_precisions == order


def test_the_order_of_blocks_is_another_in_each_command() -> None:
    orders = set()
    for _ in range(3):
        made = Noisy()
        compare(made, min_rounds=1, max_rounds=1)
        orders.add(tuple(made.order))
    assert len(orders) > 1


def test_stretches_have_the_opposite_order_in_every_second_round() -> None:
    script = UserModel(kind="script", path="train.py", name="", digest="")
    names = ("as-written", "fp32", "bf16-mixed", "fp16-mixed")
    specs = [spec.model_copy(update={"user_model": script}) for spec in configurations(*names)]
    firsts = set()
    for _ in range(10):
        made = Noisy(session_class=StretchSession)
        compare(made, specs, min_rounds=4, max_rounds=4)
        rounds = [made.order[start : start + 4] for start in range(0, 16, 4)]
        assert rounds[1] == rounds[0][::-1]
        assert rounds[3] == rounds[2][::-1]
        firsts |= {each[0] for each in rounds}
    assert len(firsts) > 1, "the baseline is not always the first"


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 0.1), ("cuda:0", 1.0)])
def test_a_second_of_steps_leads_a_script_to_the_steady_clock_of_a_gpu(device: str, seconds: float) -> None:
    script = UserModel(kind="script", path="train.py", name="", digest="")
    specs = configurations("as-written", "bf16-mixed")
    made = Noisy(session_class=StretchSession)
    compare(
        made,
        [spec.model_copy(update={"user_model": script, "device": device}) for spec in specs],
        min_rounds=1,
        max_rounds=1,
    )
    assert set(made.led) == {seconds}


class StretchSession(NoisySession):
    def run_stretch(self, lead_in_seconds: float, num_blocks: int, block_seconds: float) -> tuple[Block, ...]:
        self._engine.order.append(self.spec.precision)
        self._engine.led.append(lead_in_seconds)
        return super().run_stretch(lead_in_seconds, num_blocks, block_seconds)


def test_drift_does_not_change_the_ratio() -> None:
    compared = compare(Noisy(drift=0.01), max_rounds=3)
    ratio = speedup_of(compared, "bf16-mixed")
    assert ratio is not None
    assert ratio.value == pytest.approx(2.5, rel=0.01), "although the last block took twice as long as the first"
    seconds = [second for trial in of(compared, "fp32") for second in step_times(trial)]
    assert max(seconds) > 1.3 * min(seconds)


def test_configuration_with_a_narrow_ratio_stops() -> None:
    made = Noisy()
    unsteady = {"fp16-mixed": 0.02}
    made.gain = lambda spec: 1 + unsteady.get(spec.precision, 0.0) * (len(made.sessions) // 3 % 3 - 1)
    compared = compare(made, max_rounds=6)
    assert len(of(compared, "bf16-mixed")) == 3
    assert len(of(compared, "fp16-mixed")) == len(of(compared, "fp32")) == 6


@pytest.mark.parametrize(
    ("gains", "one_look", "num_processes"),
    [
        # As fast as fp32 to 2 %, which is in doubt: but bf16-mixed is faster.
        ({"fp16-mixed": (0.41, 0.42, 0.43), "bf16-mixed": (0.75, 0.75, 0.75)}, True, [3, 3, 3]),
        ({"fp16-mixed": (0.41, 0.42, 0.43), "bf16-mixed": (0.75, 0.75, 0.75)}, False, [5, 3, 5]),
        # The same, and one process shows that bf16-mixed is faster than both.
        ({"fp16-mixed": (0.41, 0.42, 0.43), "bf16-mixed": (1.0, 1.0, 1.0)}, True, [3, 1, 3]),
        # 1.8 times as fast within 6 %; 1.07 times within 6 %.
        ({"fp16-mixed": (0.1, 0.1, 0.1), "bf16-mixed": (0.74, 0.75, 0.76)}, True, [3, 3, 1]),
        ({"fp16-mixed": (0.1, 0.1, 0.1), "bf16-mixed": (0.44, 0.45, 0.46)}, True, [5, 5, 1]),
    ],
)
def test_without_a_width_asked_for_rounds_end_when_the_fastest_is_known(
    gains: dict[str, tuple[float, ...]], one_look: bool, num_processes: list[int]
) -> None:
    made = Noisy()

    def gain(spec: TrialSpec) -> float:
        return gains[spec.precision][spec.repeat % 3] if spec.precision in gains else 1.0

    made.gain = gain
    compared = compare(made, max_rounds=5, one_look=one_look)
    assert [len(of(compared, name)) for name in NAMES] == num_processes, speedup_of(compared, "fp16-mixed")


def test_rows_of_a_script_that_one_process_shows_to_be_half_as_fast_as_another_need_no_second_one() -> None:
    """In doubt is how they compare with each other, which changes nothing."""
    made = Noisy()
    made.gain = lambda spec: {"fp16-mixed": 0.41, "bf16-mixed": 1.0}.get(spec.precision, 1.0)
    own = {"user_model": UserModel(kind="script", path="train.py", name="", digest="")}
    specs = [spec.model_copy(update=own) for spec in configurations()]
    compared = compare(made, specs, max_rounds=5, one_look=True)
    assert [len(of(compared, name)) for name in NAMES] == [1, 1, 1]


def test_a_width_ends_rounds_whatever_the_verdict() -> None:
    """Who goes on while 1 is in the interval ends when it is outside by chance."""
    for ratio in (Estimate(1.004, 0.995, 1.013, 3), Estimate(1.02, 1.011, 1.029, 3), Estimate(1.0, 0.991, 1.009, 3)):
        assert StopRule().is_answered(ratio)
    assert not StopRule().is_answered(Estimate(1.02, 1.009, 1.031, 3))
    assert not StopRule().is_answered(Estimate(1.004, 0.995, 1.013, 2))


def test_a_margin_below_the_width_is_the_width() -> None:
    """Or else no interval lies within the margin."""
    widths = {margin: StopRule.of(DurationOptions(margin=margin)).half_width for margin in (0.005, None, 0.03)}
    assert widths == {0.005: 0.005, None: 0.01, 0.03: 0.01}
    assert StopRule.of(DurationOptions(margin=0.005, within=0.02)).half_width == 0.02


@pytest.mark.parametrize(
    ("name", "slower", "num_rounds"), [("fp32", 1.14, 5), ("fp16-mixed", 1.14, 5), ("fp32", 1.02, 3)]
)
def test_rounds_go_on_if_a_process_is_in_another_mode(name: str, slower: float, num_rounds: int) -> None:
    made = Noisy()
    made.gain = lambda spec: 1 / slower if spec.precision == name and spec.repeat == 1 else 1.0
    notes = Notes()
    compared = compare(made, listener=notes, max_rounds=5, half_width=1.0)
    assert [len(of(compared, each)) for each in NAMES] == [num_rounds] * 3
    assert notes.lines[-1].endswith("5 rounds, the limit: a process stands out") == (num_rounds == 5), notes.lines
    strays = [trial for trial, _ in strays_among(of(compared, name))]
    assert strays == [of(compared, name)[1]] * (num_rounds == 5)


class ClockedSession(FakeSession):
    _engine: "Clocked"

    def set_up(self, spec: TrialSpec, checkpoint: Path | None = None) -> None:
        is_later = len(self._engine.measured) >= 3
        self._engine.now += self._engine.set_up_seconds + is_later * self._engine.later_seconds
        super().set_up(spec, checkpoint)
        if len(self._engine.measured) <= self._engine.num_short:
            raise TrialFailedError("oom", "CUDA out of memory (fake)")

    def warm_up(self, step_seconds: float | None = None) -> Facts:
        self._engine.now += self._engine.warm_up_seconds
        return super().warm_up(step_seconds)

    def run_block(self, length: int = 1) -> Block:
        block = super().run_block(length)
        self._engine.now += block.seconds
        return block


@dataclass
class Clocked(FakeEngine):
    """A fake engine whose set-ups, warm-ups and blocks move a clock of its own."""

    set_up_seconds: float = 0.0
    warm_up_seconds: float = 0.0
    later_seconds: float = 0.0  # that set-ups take longer from the fourth on
    num_short: int = 0  # so many set-ups, the first ones, find no memory
    now: float = 0.0
    exclusive: bool = False
    session_class: Any = ClockedSession


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    """Return an engine whose clock is that of the program."""
    made = Clocked()
    monkeypatch.setattr("castwise.orchestrator.rounds.time.perf_counter", lambda: made.now)
    return made


def on(device: str) -> list[TrialSpec]:
    """Return specs of a device: those of a CPU are set up one by one."""
    return [spec.model_copy(update={"device": device}) for spec in configurations()]


@pytest.mark.parametrize(
    ("device", "set_up_seconds", "warm_up_seconds", "num_measured"),
    [
        ("cpu", 1.0, 0.0, 3),
        ("cpu", 20.0, 0.0, 2),
        ("cpu", 100.0, 0.0, 1),
        ("cuda:0", 0.0, 1.0, 3),
        ("cuda:0", 0.0, 30.0, 2),
        ("cuda:0", 0.0, 100.0, 1),
    ],
)
def test_a_budget_that_ends_before_all_are_timed_leaves_out_the_last(
    clocked: Clocked, device: str, set_up_seconds: float, warm_up_seconds: float, num_measured: int
) -> None:
    clocked.set_up_seconds, clocked.warm_up_seconds, notes = set_up_seconds, warm_up_seconds, Notes()
    compared = compare(clocked, on(device), listener=notes, budget_seconds=60.0)
    assert compared.ending == ("narrow" if num_measured == 3 else "budget")
    assert {trial.spec.precision for trial in compared.trials} == set(NAMES[:num_measured])
    assert all(trial.status == "ok" and trial.ranks[0].blocks for trial in compared.trials)
    (line,) = notes.lines
    assert [name for name in NAMES if name in line] == list(NAMES[num_measured:])
    assert clocked.num_open == 0


class StuckSession(FakeSession):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.has_closed = threading.Event()

    def set_up(self, spec: TrialSpec, checkpoint: Path | None = None) -> None:
        super().set_up(spec, checkpoint)
        if spec.precision == "fp16-mixed":
            self.has_closed.wait()
            raise TrialFailedError("crashed", "its process has ended (fake)")

    def close(self) -> None:
        super().close()
        self.has_closed.set()


def test_a_set_up_that_lasts_beyond_the_budget_is_given_up() -> None:
    made = Noisy(session_class=StuckSession)
    compared = compare(made, budget_seconds=1.0)
    assert compared.ending == "budget"
    assert {trial.spec.precision for trial in compared.trials} == {"fp32"}, "it took the time of the other, too"
    assert made.num_open == 0


def test_what_is_looked_at_and_takes_long_to_set_up_is_given_up_long_before_the_deadline() -> None:
    made, specs = Noisy(session_class=StuckSession), on("cpu")
    session = InterleavedSession(
        TrialRunner(made, None, made.environment, NullListener()),
        specs,
        round_number=1,
        setup_order="one by one",
        deadline=time.perf_counter() + 1e6,
        looked_at={spec.configuration for spec in specs if spec.precision == "fp16-mixed"},
    )
    assert {trial.spec.precision for trial in session.run()} == {"fp32", "bf16-mixed"}
    session.runner.closer.wait()
    assert made.num_open == 0


def test_an_emulated_precision_that_no_time_was_left_for_has_the_reason() -> None:
    made, notes = Noisy(session_class=StuckSession), Notes()
    made.environment = fake_environment(None, cpu_features=("avx512_bf16",))
    compare(made, on("cpu"), listener=notes, one_look=True, budget_seconds=1.0)
    assert notes.lines[-1].endswith("Not measured: fp16-mixed (emulated here, and too slow to set up)")


@pytest.mark.parametrize(
    ("budget_seconds", "ends", "ending"),
    [
        # The baseline's memory is short at 40 s, and no time is left to see whether it would fit alone.
        (60.0, {"bf16-mixed": "ok"}, "budget"),
        (600.0, {"fp32": "oom", "bf16-mixed": "ok", "fp16-mixed": "ok"}, "narrow"),
    ],
)
def test_without_memory_for_the_baseline_a_budget_goes_to_the_next(
    clocked: Clocked, budget_seconds: float, ends: dict[str, str], ending: str
) -> None:
    clocked.faults, clocked.set_up_seconds, notes = {"fp32": Fault("oom")}, 40.0, Notes()
    compared = compare(clocked, on("cpu"), listener=notes, budget_seconds=budget_seconds)
    assert {trial.spec.precision: trial.status for trial in compared.trials} == ends
    assert compared.ending == ending
    assert [name for name in NAMES if name in notes.lines[0]] == [name for name in NAMES if name not in ends]
    assert clocked.num_open == 0


@pytest.mark.parametrize(
    ("gain", "rule", "emulated", "is_short"),
    [
        (0.3, {}, 1, False),  # 0.73 of fp32's speed
        (0.1, {}, 1, True),  # 0.24: one block shows it
        (0.1, {"one_look": False}, 3, False),
        (0.8, {}, 3, False),  # faster than fp32, although emulated
    ],
)
def test_an_emulated_precision_that_is_slower_needs_one_look(
    gain: float, rule: dict[str, Any], emulated: int, is_short: bool
) -> None:
    made = Noisy(environment=fake_environment(None, cpu_features=("avx512_bf16", "avx512_fp16")))
    made.gain = lambda spec: gain if spec.precision == "fp16-mixed" else 0.6 if spec.precision == "bf16-mixed" else 1
    compared = compare(made, on("cpu"), **({"one_look": True} | rule))
    assert [len(of(compared, name)) for name in NAMES[1:]] == [3, emulated]
    assert {trial.spec.precision for trial in compared.trials[:3]} == set(NAMES), "each has a process first"
    assert compared.ending == "narrow"
    assert (len(step_times(of(compared, "fp16-mixed")[0])) == 1) == is_short


def test_with_a_budget_an_emulated_precision_has_its_process_before_any_other_has_a_second() -> None:
    made = Noisy(environment=fake_environment(None, cpu_features=("avx512_bf16", "avx512_fp16")))
    made.gain = lambda spec: 0.1 if spec.precision == "fp16-mixed" else 0.6 if spec.precision == "bf16-mixed" else 1
    compared = compare(made, on("cpu"), one_look=True, budget_seconds=1e6)
    order = [trial.spec.precision for trial in compared.trials]
    assert order[:6] == ["fp32", "bf16-mixed", "fp32", "fp16-mixed", "fp32", "bf16-mixed"]
    assert [len(of(compared, name)) for name in NAMES[1:]] == [3, 1]


@pytest.mark.parametrize(
    ("gain", "rule", "num_processes"),
    [
        (1.0, {}, 1),  # 2.4 times as fast
        (0.2, {}, 1),  # at 0.49 of fp32's speed
        (0.8, {}, 3),
        (1.0, {"one_look": False}, 3),
    ],
)
def test_twice_the_speed_or_half_of_it_needs_no_second_process(
    gain: float, rule: dict[str, Any], num_processes: int
) -> None:
    made, notes = Noisy(), Notes()
    made.gain = lambda spec: gain if spec.precision == "fp16-mixed" else 0.6 if spec.precision == "bf16-mixed" else 1
    compared = compare(made, listener=notes, **({"one_look": True} | rule))
    assert [len(of(compared, name)) for name in NAMES] == [3, 3, num_processes]
    assert compared.ending == "narrow"
    assert ("one run is enough for fp16-mixed" in notes.lines[-1]) == (num_processes == 1)


def test_beside_fp8_twice_the_speed_needs_more_processes() -> None:
    made = Noisy()
    compared = compare(made, configurations("fp32", "bf16-mixed", "fp8-rowwise"), one_look=True)
    assert len(of(compared, "bf16-mixed")) == 3


def test_an_emulated_precision_that_was_given_up_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    run, sessions = InterleavedSession.run, list[list[str]]()

    def give_up_once(session: InterleavedSession) -> list[Trial]:
        sessions.append([spec.precision for spec in session.specs])
        return [each for each in run(session) if len(sessions) > 1 or each.spec.precision != "fp16-mixed"]

    monkeypatch.setattr(InterleavedSession, "run", give_up_once)
    made = Noisy(environment=fake_environment(None, cpu_features=("avx512_bf16", "avx512_fp16")))
    made.gain = lambda spec: 1 if spec.precision == "fp32" else 0.6
    compared = compare(made, on("cpu"), one_look=True)
    assert sessions[:3] == [[*NAMES], ["fp32", "bf16-mixed"], ["fp32", "bf16-mixed"]]
    assert {"fp32", "fp16-mixed"} == set(sessions[3])
    assert compared.ending == "narrow"


def test_trials_beyond_the_fewest_have_no_count() -> None:
    counts: dict[int, int] = {}
    listener, made = NullListener(), Noisy()
    listener.started = lambda spec, index, count: counts.update({index: count})  # type: ignore[method-assign]
    made.process_noise = 0.5
    compare(made, listener=listener, min_rounds=2, max_rounds=3)
    fewest = 2 * len(NAMES)
    assert counts == {index: fewest if index <= fewest else 0 for index in range(1, 3 * len(NAMES) + 1)}


@pytest.mark.parametrize("budget_seconds", [30.0, 35.0, 60.0])
def test_no_session_of_a_round_begins_that_would_end_after_its_budget(clocked: Clocked, budget_seconds: float) -> None:
    """Only two fit into memory at once: the third is for another session, together with the baseline."""
    clocked.warm_up_seconds = 15.0
    clocked.faults = {"fp16-mixed": Fault("oom")}
    compared = compare(clocked, on("cuda:0"), budget_seconds=budget_seconds)
    assert {trial.spec.precision for trial in compared.trials} == {"fp32", "bf16-mixed"}
    assert len(of(compared, "fp32")) == 1


@pytest.mark.parametrize(
    ("names", "budget_seconds"), [(SIX, 110.0), (SIX, 130.0), (SIX, 200.0), (SIX[1:4], 90.0), (SIX[1:4], 110.0)]
)
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_budget_never_leaves_one_alone_in_a_session(
    clocked: Clocked, device: str, names: Sequence[str], budget_seconds: float
) -> None:
    clocked.set_up_seconds = 10.0  # most of a session
    specs = [spec.model_copy(update={"device": device}) for spec in configurations(*names)]
    compared = compare(clocked, specs, budget_seconds=budget_seconds)
    assert len(compared.trials) > len(names), "there was time for more than one session"
    assert all(trial.session_id for trial in compared.trials)
    assert clocked.now < budget_seconds + clocked.set_up_seconds


def test_no_block_begins_that_would_end_after_the_budget(clocked: Clocked) -> None:
    clocked.gain = lambda spec: 0.003 if spec.precision == "bf16-mixed" else 1.0  # one step is a block
    compared = compare(clocked, on("cpu"), budget_seconds=10.0)
    (slow,) = of(compared, "bf16-mixed")
    assert 10.0 - slow.ranks[0].blocks[0].seconds < clocked.now <= 10.0
    assert all(trial.ranks[0].blocks for trial in compared.trials)


def test_a_comparison_begins_only_if_a_session_may_end_within_its_budget(clocked: Clocked) -> None:
    clocked.set_up_seconds, notes = 5.0, Notes()
    runner = TrialRunner(clocked, None, clocked.environment, notes)
    compared = Rounds(runner, on("cpu"), StopRule(budget_seconds=15.0), session_seconds=16.0)
    assert compared.run() == []
    assert compared.ending == "budget"
    assert clocked.sessions == []
    assert "no time was left" in notes.lines[0]


@pytest.mark.parametrize("techniques", [(), ("compile-max-autotune",)])  # the latter's set-ups are one by one
def test_a_baseline_is_not_timed_again_if_no_time_is_left_for_the_others(
    clocked: Clocked, techniques: tuple[str, ...]
) -> None:
    clocked.set_up_seconds, clocked.later_seconds = 10.0, 60.0
    specs = [spec.model_copy(update={"techniques": techniques}) for spec in configurations()]
    compared = compare(clocked, specs, budget_seconds=120.0)
    assert len(clocked.measured) > 3, "a second session began"
    assert [len(of(compared, name)) for name in NAMES] == [1, 1, 1]
    assert clocked.num_open == 0


@pytest.mark.parametrize(
    ("techniques", "num_nodes", "expected"),
    [
        (("compile",), 2, ["one by one", "together"]),
        (("compile",), 1, ["together", "together"]),
        (("cudnn-search",), 2, ["one by one", "one by one"]),
        (("compile-max-autotune",), 1, ["one by one", "one by one"]),
        ((), 2, ["together", "together"]),
    ],
)
def test_what_a_compiler_chose_in_the_first_round_is_not_timed_in_the_next(
    monkeypatch: pytest.MonkeyPatch, techniques: tuple[str, ...], num_nodes: int, expected: list[str]
) -> None:
    orders: list[str] = []

    def session(*arguments: Any, **known: Any) -> InterleavedSession:
        orders.append(known["setup_order"])
        return InterleavedSession(*arguments, **known)

    monkeypatch.setattr("castwise.orchestrator.rounds.InterleavedSession", session)
    on_gpus = {"techniques": techniques, "world_size": 2, "parallelism": "ddp", "num_nodes": num_nodes}
    made = FakeEngine(exclusive=False, environment=fake_environment(num_gpus=2))
    compare(made, [spec.model_copy(update=on_gpus) for spec in configurations()])
    assert orders[:2] == expected


def test_each_has_a_process_before_any_has_a_second(clocked: Clocked) -> None:
    clocked.set_up_seconds = 10.0
    specs = [spec.model_copy(update={"device": "cpu"}) for spec in configurations(*SIX)]
    compared = compare(clocked, specs, budget_seconds=90.0)
    assert len({trial.session_id for trial in compared.trials}) > 1, "the first session has no time for all"
    others = [trial.spec.precision for trial in compared.trials if trial.spec.precision != "fp32"]
    assert set(others[:5]) == set(SIX[1:])
    assert others[5:]


def test_one_is_timed_although_the_budget_ended_while_none_fitted_next_to_the_others(clocked: Clocked) -> None:
    clocked.set_up_seconds, clocked.num_short = 40.0, 6  # all three together, and again with the first alone
    compared = compare(clocked, on("cuda:0"), budget_seconds=60.0)
    assert [(trial.spec.precision, trial.status) for trial in compared.trials] == [("fp32", "ok")]
    assert compared.ending == "budget"


@pytest.mark.parametrize("memory", [14.0, 9.0])  # fp32 takes 8, the others 5 each
def test_lack_of_memory_splits_the_session(memory: float) -> None:
    compared = compare(Noisy(memory=memory))
    assert [len(of(compared, name)) for name in NAMES[1:]] == [3, 3]
    assert {trial.status for trial in compared.trials} == {"ok"}
    for name in NAMES[1:]:
        ratio = speedup_of(compared, name)
        assert ratio is not None
        assert ratio.value == pytest.approx(step_time_of("fp32") / step_time_of(name), rel=0.01)
        assert ratio.n == 3


def test_only_what_does_not_fit_alone_is_out_of_memory() -> None:
    compared = compare(Noisy(memory=6.0))
    assert [trial.status for trial in of(compared, "fp32")] == ["oom"]
    assert {trial.status for trial in of(compared, "bf16-mixed")} == {"ok"}
    assert speedup_of(compared, "bf16-mixed") is None


@pytest.mark.parametrize(("kind", "status"), [("crash", "crashed"), ("nan", "diverged")])
def test_what_failed_or_diverged_is_not_measured_again(kind: str, status: str) -> None:
    made = Noisy(faults={"bf16-mixed": Fault(kind)})
    compared = compare(made)
    assert [trial.status for trial in of(compared, "bf16-mixed")] == [status]
    assert [len(of(compared, name)) for name in ("fp32", "fp16-mixed")] == [3, 3]
    assert made.num_open == 0


@pytest.mark.parametrize(
    ("kind", "fails", "words"),
    [
        ("unsupported", NAMES, "every precision failed"),
        ("unsupported", NAMES[1:], "every other precision failed"),
        ("nan", NAMES[1:], "every other precision failed"),
    ],
)
def test_without_another_precision_nothing_is_left_to_compare(kind: str, fails: Sequence[str], words: str) -> None:
    notes = Notes()
    compared = compare(Noisy(faults=dict.fromkeys(fails, Fault(kind))), listener=notes)
    assert compared.ending == "failed"
    assert [len(of(compared, name)) for name in fails] == [1] * len(fails)
    assert words in notes.lines[-1]


def test_the_rounds_of_the_baseline_count_if_all_else_failed_later() -> None:
    notes = Notes()
    specs = configurations("fp32", "bf16-mixed")
    recorded = [trial for trial in compare(Noisy(), specs).trials if trial.spec.precision == "fp32"]
    compare(Noisy(faults={"bf16-mixed": Fault("crash")}), specs, recorded=recorded, listener=notes)
    assert "4 rounds: every other precision failed" in notes.lines[-1]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_two_precisions_with_the_same_error_end_it(device: str) -> None:
    notes, made = Notes(), Noisy(faults={name: Fault("crash") for name in NAMES})
    compared = compare(made, on(device), listener=notes, budget_seconds=60.0)
    assert compared.ending == "failed"
    assert [trial.spec.precision for trial in compared.trials] == ["fp32", "bf16-mixed"]
    assert "every precision failed. Not measured: fp16-mixed, as the error has nothing to do with" in notes.lines[-1]


def test_an_interrupt_leaves_no_process_and_keeps_whole_rounds(tmp_path: Path) -> None:
    made, store = Noisy(faults={"#5": Fault("interrupt", "run_block", block=1)}), Store(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        compare(made, store=store)
    assert made.num_open == 0
    kept, problems = load_folder(tmp_path)
    assert (len(kept), problems) == (3, [])
    fresh = Noisy()
    compared = compare(fresh, store=store, recorded=kept)
    assert len(fresh.sessions) == 6, "the first round is not measured again"
    assert [len(of(compared, name)) for name in NAMES] == [3, 3, 3]


def test_what_earlier_rounds_measured_stays_if_a_script_is_too_short_in_a_later_one() -> None:
    own = UserModel(kind="script", path="train.py", name="")
    script = {"workload": "python train.py", "user_model": own}
    specs = [spec.model_copy(update=script) for spec in configurations("as-written", "bf16-mixed")]
    fault, notes = Fault("refused", "warm_up"), Notes()
    compared = compare(Noisy(faults={"#3": fault}), specs, listener=notes)
    assert [trial.spec.precision for trial in compared.trials] == ["as-written", "bf16-mixed"]
    assert notes.lines[-1].endswith(": 1 round: The loss has shape (4,): it must be a scalar (fake)")
    with pytest.raises(UsageError, match="must be a scalar"):
        compare(Noisy(faults={"#1": fault}), specs)


def test_prior_stats_of_earlier_rounds() -> None:
    trials = compare(Noisy(process_noise=0.001)).trials
    own = [trial for trial in trials if trial.spec.precision == "fp32"]
    found = prior_stats_of(own)
    assert found is not None
    assert found.step_seconds == pytest.approx(step_times(own[0])[0], rel=0.02)
    assert found.noise == max(noise_of(step_times(trial)) for trial in own)
    few = [trial.model_copy(update={"ranks": trial.ranks[:0]}) for trial in own]
    assert prior_stats_of(few) is prior_stats_of([]) is None


def test_configuration_added_later_gets_all_rounds() -> None:
    known = compare(Noisy(), configurations("fp32", "bf16-mixed"), max_rounds=3).trials
    made = Noisy()
    compared = compare(made, recorded=known, max_rounds=3)
    assert compared.ending == "narrow"
    assert [len(of(compared, name)) for name in NAMES] == [6, 3, 3]
    assert len(made.sessions) == 6, "the baseline is measured again together with the new one"
    ratio = speedup_of(compared, "fp16-mixed")
    assert ratio is not None
    assert ratio.n == 3


def test_extra_baseline_rounds_do_not_count() -> None:
    compared = compare(Noisy(memory=14.0, process_noise=0.1), max_rounds=4)
    assert compared.ending == "rounds"
    assert [len(of(compared, name)) for name in NAMES[1:]] == [4, 4]
    assert len(of(compared, "fp32")) >= 8
    assert len({trial.spec.key for trial in compared.trials}) == len(compared.trials)


def test_no_rounds_without_a_baseline() -> None:
    made = Noisy(process_noise=0.1, faults={"#4": Fault("crash")})
    compared = compare(made)
    assert [trial.status for trial in of(compared, "fp32")] == ["ok", "crashed"]
    assert [len(of(compared, name)) for name in NAMES[1:]] == [3, 3]


def test_failed_baseline_is_not_measured_again() -> None:
    made = Noisy(memory=14.0)
    known = compare(Noisy(memory=14.0), max_rounds=1, min_rounds=1).trials
    made.faults = {"fp32": Fault("crash")}
    compared = compare(made, recorded=known)
    assert [trial.status for trial in of(compared, "fp32")].count("crashed") == 1


def test_free_repeat_numbers_are_used() -> None:
    known = [trial for trial in compare(Noisy()).trials if (trial.spec.precision, trial.spec.repeat) != ("fp32", 1)]
    compared = compare(Noisy(), recorded=known)
    assert sorted(trial.spec.repeat for trial in of(compared, "fp32")) == [0, 1, 2]


@pytest.mark.parametrize(("noise", "num_rounds"), [(0.0, 3), (0.1, 4)])
def test_remark_on_the_ending(noise: float, num_rounds: int) -> None:
    notes = Notes()
    compare(Noisy(process_noise=noise), listener=notes, max_rounds=4)
    (line,) = notes.lines
    assert line.startswith(f"resnet50 batch 256: {num_rounds} rounds")


@pytest.mark.parametrize(
    ("usable", "groups"),
    [
        (20.0, ["fp32 a b c d"]),
        (8.0, ["fp32 a b", "fp32 c", "fp32 d"]),
        (5.0, ["fp32 a", "fp32 b", "c", "fp32 d"]),
    ],
)
def test_sessions_fit_into_memory(usable: float, groups: list[str]) -> None:
    """The baseline needs 2; what does not fit next to it is measured alone."""
    needed = {"fp32": 2.0, "a": 3.0, "b": 3.0, "c": 4.0, "d": 3.0}
    baseline, *others = (fake_spec(workload=name) for name in needed)
    bytes_of = {spec.key: needed[spec.workload] for spec in (baseline, *others)}
    found = group_by_memory([baseline], others, bytes_of, usable)
    assert [" ".join(spec.workload for spec in group) for group in found] == groups
