"""Interleaved sessions: set-up order, blocks, failures, processes."""

import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeSession, Fault, fake_spec, fake_training, step_seconds
from noting import NotingEngine
from programs import wait_until

from castwise.analysis.steady_metrics import block_means
from castwise.orchestrator.block_schedule import PriorStats
from castwise.orchestrator.runner import InterleavedSession, NullListener, SetupOrder, TrialRunner
from castwise.orchestrator.session import TrialFailedError
from castwise.records.schema import Block, Environment, Facts, Trial
from castwise.spec.trial import MeasurementProtocol, TrialSpec


def run(engine: FakeEngine, specs: Sequence[TrialSpec] = (), **options: Any) -> list[Trial]:
    """Run a session whose baseline is the first of the specs."""
    runner = TrialRunner(engine, None, engine.environment, NullListener())
    specs = specs or [fake_spec("fp32"), fake_spec("bf16-mixed")]
    try:
        return InterleavedSession(
            runner, specs, **({"round_number": 1, "baseline": specs[0].configuration} | options)
        ).run()
    finally:
        runner.closer.wait()


def test_the_stages_of_a_session_add_up_to_its_time() -> None:
    trials = run(FakeEngine(exclusive=False))
    stages = trials[0].stage_seconds
    assert all(trial.stage_seconds == stages for trial in trials)
    assert set(stages) == {"starting", "setting up", "warming up", "timing", "ending"}
    assert 0 < sum(stages.values()) <= max(trial.duration_seconds for trial in trials)


class Slow(FakeSession):
    """Interrupts the program while it warms up, which lasts until it is closed."""

    def warm_up(self, step_seconds: float | None = None) -> Facts:
        if self is self._engine.sessions[0]:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)
        wait_until(lambda: self.closed, "its end")
        raise TrialFailedError("crashed", "the process was ended by SIGKILL (fake)")


def test_interrupt_during_parallel_set_up() -> None:
    engine = FakeEngine(exclusive=False)
    engine.session_class = Slow
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    assert engine.num_open == 0


class Uneven(FakeSession):
    """Has even step times, but bf16-mixed only after its eighth block, and the baseline only if the engine says so."""

    def run_block(self, length: int = 1) -> Block:
        block, number = super().run_block(length), len(self._blocks)
        restless = self.spec.precision == "bf16-mixed" and number <= 8
        restless |= self.spec.precision == "fp32" and getattr(self._engine, "restless_baseline", False)
        seconds = 0.1 * (1.2 if restless and number % 2 else 1.0)
        return block.model_copy(update={"seconds": seconds, "num_steps": 1})


def num_blocks(trials: list[Trial]) -> list[int]:
    return [len(trial.ranks[0].blocks) for trial in trials]


def run_unevenly(*, restless_baseline: bool = False, **options: Any) -> list[Trial]:
    engine = FakeEngine(exclusive=False)
    engine.session_class = Uneven
    engine.restless_baseline = restless_baseline  # type: ignore[attr-defined]
    protocol = MeasurementProtocol(num_blocks=20, min_blocks=4)
    specs = [fake_spec(name, protocol=protocol) for name in ("fp32", "tf32", "bf16-mixed")]
    return run(engine, specs, **options)


def test_settled_configuration_stops_before_the_baseline() -> None:
    baseline, settled, restless = num_blocks(run_unevenly())
    assert settled == 4
    assert baseline == restless > 8


def test_all_continue_until_the_baseline_has_settled() -> None:
    assert num_blocks(run_unevenly(restless_baseline=True)) == [20, 20, 20]


def test_without_a_baseline_each_stops_once_it_has_settled() -> None:
    first, second, restless = num_blocks(run_unevenly(baseline=None))
    assert first == second == 4
    assert restless > 8


@pytest.mark.parametrize(("setup_order", "order"), [("first alone", [0, 1, 1]), ("one by one", [0, 1, 2])])
def test_setup_order(setup_order: SetupOrder, order: list[int]) -> None:
    """Those that are set up at once are all being set up before any of them is ready."""
    engine, ready = FakeEngine(exclusive=False), list[int]()

    class Counted(FakeSession):
        def set_up(self, spec: TrialSpec, checkpoint: Path | None = None) -> None:
            super().set_up(spec, checkpoint)
            engine.seen.append(found := len(ready))  # type: ignore[attr-defined]
            wait_until(lambda: len(engine.seen) >= sum(each <= found for each in order), "the others")  # type: ignore[attr-defined]
            ready.append(1)

    engine.session_class, engine.seen = Counted, []  # type: ignore[attr-defined]
    specs = [fake_spec(name) for name in ("fp32", "tf32", "bf16-mixed")]
    run(engine, specs, setup_order=setup_order)
    assert engine.seen == order  # type: ignore[attr-defined]


@pytest.mark.parametrize(("seconds", "figures"), [(1.0, ["1,000 images/s", "1,000 images/s"]), (0.01, [])])
def test_each_says_how_fast_it_is_about_once_it_is_warm(seconds: float, figures: list[str]) -> None:
    engine, lines = FakeEngine(exclusive=False), list[str]()

    class Told(FakeSession):
        def warm_up(self, step_seconds: float | None = None) -> Facts:
            facts = super().warm_up(step_seconds)
            return facts.model_copy(update={"warm_up_seconds": seconds, "warm_up_steps": 5})

        def run_block(self, length: int = 1) -> Block:
            assert len(lines) == len(figures), "before anything is timed"
            return super().run_block(length)

    engine.session_class = Told
    listener = NullListener()
    listener.remark = lines.append  # type: ignore[method-assign]
    specs = [fake_spec(name) for name in ("fp32", "bf16-mixed")]
    InterleavedSession(
        TrialRunner(engine, None, engine.environment, listener), specs, round_number=1, setup_order="one by one"
    ).run()
    assert [line.partition("about ")[2] for line in lines] == figures


def test_first_that_does_not_fit_is_set_up_alone() -> None:
    """Which of them fit is chance: all start again, with the first one alone."""
    engine = FakeEngine(exclusive=False)

    class Greedy(FakeSession):
        holds = False

        def set_up(self, spec: TrialSpec, checkpoint: Path | None = None) -> None:
            super().set_up(spec, checkpoint)
            if spec.precision == "fp32" and len(engine.sessions) == len(specs):
                wait_until(lambda: num_holding() == 2, "the two others")
            if num_holding() == 2:
                raise TrialFailedError("oom", "CUDA out of memory (fake)")
            self.holds = True

    def num_holding() -> int:
        return sum(session.holds and not session.closed for session in engine.sessions)  # type: ignore[attr-defined]

    engine.session_class = Greedy
    specs = [fake_spec(name) for name in ("fp32", "tf32", "bf16-mixed")]
    trials = run(engine, specs)
    assert len(engine.sessions) == 6
    assert engine.num_open == 0
    assert [trial.status for trial in trials].count("oom") == 1
    assert trials[0].status == "ok"


class Crowded(FakeSession):
    """cuDNN found too little memory for its workspace, and took other kernels without a word."""

    def warm_up(self, step_seconds: float | None = None) -> Facts:
        crowded = self.spec.precision == "bf16-mixed"
        return super().warm_up(step_seconds).model_copy(update={"refused_allocations": int(crowded)})


def test_one_that_has_other_kernels_than_alone_is_not_timed_next_to_others() -> None:
    """Source: of 21 loops of mnist-cnn in float32 on an H200, the last was 18 % slower from first to last step."""
    engine = FakeEngine(exclusive=False, session_class=Crowded)
    assert [trial.status for trial in run(engine)] == ["ok", "oom"]
    assert [trial.status for trial in run(engine, [fake_spec("bf16-mixed")])] == ["ok"]


def test_processes_of_one_session_end_while_the_next_starts() -> None:
    engine, seen = FakeEngine(exclusive=False), list[tuple[str, int]]()

    class Slowly(FakeSession):
        def open(self, device: str) -> Environment:
            seen.append(("open", sum(session.closed for session in engine.sessions)))
            return super().open(device)

        def set_up(self, spec: TrialSpec, checkpoint: Path | None = None) -> None:
            seen.append(("set up", sum(session.closed for session in engine.sessions)))
            super().set_up(spec, checkpoint)

        def close(self) -> None:
            wait_until(lambda: len(seen) >= 6, "the start of the next")
            super().close()

    engine.session_class = Slowly
    runner = TrialRunner(engine, None, engine.environment, NullListener())
    for number in (1, 2):
        InterleavedSession(runner, [fake_spec("fp32"), fake_spec("tf32")], round_number=number).run()
    runner.closer.wait()
    assert seen[4:] == [("open", 0), ("open", 0), ("set up", 2), ("set up", 2)]
    assert engine.num_open == 0


def test_prior_stats_shorten_warm_up_and_blocks() -> None:
    engine, noted = FakeEngine(exclusive=False), dict[str, float | None]()

    class Noted(FakeSession):
        def warm_up(self, step_seconds: float | None = None) -> Facts:
            noted[self.spec.precision] = step_seconds
            return super().warm_up(step_seconds)

    engine.session_class = Noted
    protocol = MeasurementProtocol(num_blocks=12, min_blocks=4)
    specs = [fake_spec(name, protocol=protocol) for name in ("fp32", "tf32", "bf16-mixed")]
    earlier = {specs[0].configuration: PriorStats(0.0001, 0.3), specs[1].configuration: PriorStats(0.02, 0.2)}
    trials = run(engine, specs, round_number=2, earlier=earlier)
    assert noted == {"fp32": 0.3, "tf32": 0.2, "bf16-mixed": None}
    first = {trial.spec.precision: trial.ranks[0].blocks[0].num_steps for trial in trials}
    usual = {spec.precision: round(protocol.block_seconds / step_seconds(spec)) for spec in specs}
    assert {name: first[name] / usual[name] for name in usual} == {"fp32": 1, "tf32": 3, "bf16-mixed": 1}


def train(engine: FakeEngine, num_blocks: int = 4) -> list[Trial]:
    protocol = MeasurementProtocol(num_blocks=num_blocks, min_blocks=2)
    recipe = {"epochs": 9, "skip_epochs": 1}
    specs = [fake_training(name, recipe, protocol=protocol) for name in ("fp32", "bf16-mixed")]
    return run(engine, specs)


def test_training_epochs_are_interleaved_without_skipped_ones() -> None:
    trials = train(FakeEngine(exclusive=False))
    assert {trial.status for trial in trials} == {"ok"}
    assert len({trial.session_id for trial in trials}) == 1
    for trial in trials:
        epochs = trial.ranks[0].epochs
        assert 3 <= len(epochs) <= 5
        assert epochs[0].first_step_seconds
        assert block_means(trial) == [epoch.seconds / epoch.num_steps for epoch in epochs[1:]]
        assert len(trial.readings) == len(epochs)


def test_diverged_training_run_stops() -> None:
    first, second = train(FakeEngine(exclusive=False, faults={"bf16-mixed": Fault("nan")}))
    assert first.status == "ok"
    assert second.status == "diverged"
    assert len(second.ranks[0].epochs) == 1


def run_with_lead_in(engine: NotingEngine) -> list[Trial]:
    protocol = MeasurementProtocol(num_blocks=4, min_blocks=4, lead_in_seconds=0.02)
    specs = [fake_spec(name, protocol=protocol) for name in ("fp32", "tf32", "fp16-true")]
    return InterleavedSession(engine.runner(), specs, round_number=1).run()


def test_lead_in_before_each_block_of_a_session() -> None:
    engine = NotingEngine()
    trials = run_with_lead_in(engine)
    assert [trial.status for trial in trials] == ["ok"] * 3
    start = [each.split()[0] for each in engine.order].index("lead")
    order = engine.order[start : start + 4 * 12]
    turns = [order[at : at + 4] for at in range(0, len(order), 4)]
    assert all(turn == [f"lead {name}", "look", f"block {name}", "look"] for turn in turns for name in [turn[0][5:]])
    assert all(block.lead_in_steps == 1 for trial in trials for block in trial.ranks[0].blocks)


def test_lead_in_after_another_configuration_failed() -> None:
    engine = NotingEngine(tf32=Fault("crash", "run_block", block=1))
    trials = run_with_lead_in(engine)
    assert [trial.status for trial in trials] == ["ok", "crashed", "ok"]
    assert [len(trial.ranks[0].blocks) for trial in trials] == [4, 1, 4]
