"""The processes of one trial as one: what each is sent, which answers count, how the first failure ends all."""

import json
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faulty_worker
import pytest
from faulty_worker import ANSWERS, BLOCK, ENVIRONMENT, FACTS
from programs import LIGHT, PATIENCE_SECONDS, Program, wait_until

from castwise.orchestrator import ddp_processes
from castwise.orchestrator.ddp_processes import GroupSession
from castwise.orchestrator.processes import ForkserverEngine, Target
from castwise.orchestrator.session import OnProgress, ProcessGoneError, TrialFailedError
from castwise.records.schema import Epoch, RankSamples
from castwise.spec.trial import TrialSpec

SPEC = TrialSpec(
    workload="mnist-cnn",
    precision="fp32",
    loss_scale="none",
    batch_size=8,
    device="cuda:0",
    world_size=2,
    parallelism="ddp",
)
EPOCH = Epoch(
    seconds=1, data_seconds=0, num_steps=1, num_samples=8, counted_seconds=1, counted_samples=8, losses=((0, 1.0),),
    learning_rate=0.1,
)  # fmt: skip
PROGRESS = {"event": "progress", "done": 0.5}


class FakeMember:
    """A rank without a process: the events that it is given come when it is sent a command."""

    def __init__(self) -> None:
        self.is_busy = self.killed = self.closed = False
        self.commands: list[dict[str, Any]] = []
        self.events: dict[str, list[Any]] = {}
        self._come: list[Any] = []
        self._ours, self._theirs = Pipe()

    @property
    def ends(self) -> list[Any]:
        return [self._ours]

    def send(self, command: dict[str, Any]) -> None:
        self.is_busy = True
        self.commands.append(command)
        for event in self.events.get(command["command"], [ANSWERS.get(command["command"])]):
            self.come(event)

    def come(self, event: Any) -> None:
        self._come.append(event)
        self._theirs.send(None)  # only to be waited for

    def take(self, command: dict[str, Any], on_progress: OnProgress) -> dict[str, Any] | None:
        self._ours.recv()
        event = self._come.pop(0)
        if isinstance(event, TrialFailedError):
            raise event
        if event["event"] == "progress":
            on_progress(event["done"])
            return None
        self.is_busy = False
        return dict(event)

    def too_slow(self, command: dict[str, Any], limit: float) -> TrialFailedError:
        return TrialFailedError("timeout", f"{command['command']} took longer than {limit:g} s")

    def no_answer(self, command: dict[str, Any]) -> TrialFailedError:
        return TrialFailedError("crashed", "no answer")

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self.closed = True


class Ranks:
    """A group of two members without processes."""

    def __init__(self, timeout_seconds: float = PATIENCE_SECONDS) -> None:
        self.members: list[FakeMember] = []
        self.session = GroupSession(self._start, 2, timeout_seconds, Path("/data"), "0123456789ab")

    def _start(self) -> FakeMember:
        self.members.append(FakeMember())
        return self.members[-1]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.session.close()


def test_each_rank_has_its_own_device_and_all_meet_in_one_place(ranks: Ranks) -> None:
    assert ranks.session.open("cuda:1") == ENVIRONMENT
    assert ranks.session.ready_seconds > 0
    ranks.session.set_up(SPEC, Path("/checkpoint"))
    opened, set_up = zip(*(member.commands for member in ranks.members), strict=True)
    assert [command["device"] for command in opened] == ["cuda:1", "cuda:2"]
    assert [command["spec"]["device"] for command in set_up] == ["cuda:0", "cuda:1"]
    assert [command["rank"] for command in set_up] == [0, 1]
    assert [command["checkpoint"] for command in set_up] == ["/checkpoint"] * 2
    (rendezvous,) = {command["rendezvous"] for command in set_up}
    path = Path(rendezvous.removeprefix("file://"))
    assert path.parent.is_dir()
    assert not path.exists(), "the ranks make it"
    ranks.session.close()
    assert not path.parent.exists()


def test_a_cpu_has_one_device_for_all(ranks: Ranks) -> None:
    ranks.session.open("cpu")
    assert [member.commands[0]["device"] for member in ranks.members] == ["cpu", "cpu"]


def test_gpus_of_two_kinds_are_not_measured_together(ranks: Ranks) -> None:
    other = ENVIRONMENT.model_copy(update={"cpu": "Other CPU"}).model_dump(mode="json")
    ranks.members[1].events["open"] = [{"event": "opened", "environment": other}]
    with pytest.raises(TrialFailedError, match="the ranks' devices differ: Fake CPU, Other CPU") as caught:
        ranks.session.open("cpu")
    assert caught.value.status == "unsupported"


def test_rank_0_speaks_for_all_and_each_has_its_samples(ranks: Ranks) -> None:
    facts = FACTS.model_copy(update={"num_parameters": 2}).model_dump(mode="json")
    ranks.members[1].events["warm_up"] = [{"event": "warm", "facts": facts}]
    ranks.members[1].events["finish"] = [{"event": "finished", "samples": RankSamples().model_dump(mode="json")}]
    assert ranks.session.warm_up() == FACTS
    assert ranks.session.run_block() == BLOCK
    assert ranks.session.finish() == (RankSamples(blocks=(BLOCK,)), RankSamples())


def test_progress_of_any_rank_is_a_sign_of_life_and_rank_0_s_is_told() -> None:
    epoch = {"event": "epoch", "epoch": json.loads(EPOCH.model_dump_json())}
    made, told = Ranks(), list[float]()
    made.members[0].events["run_epoch"] = [PROGRESS, epoch]
    made.members[1].events["run_epoch"] = [PROGRESS, PROGRESS, epoch]
    assert made.session.run_epoch(told.append) == EPOCH
    assert told == [0.5]
    made.session.close()


def test_a_sign_of_life_puts_the_deadline_off(monkeypatch: pytest.MonkeyPatch) -> None:
    made, now = Ranks(timeout_seconds=10.0), [0.0]
    monkeypatch.setattr(ddp_processes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    waits: list[float] = []
    epoch = {"event": "epoch", "epoch": json.loads(EPOCH.model_dump_json())}

    def wait(ends: list[Any], timeout: float) -> list[Any]:
        """Let four seconds pass before each event; rank 1's sign of life comes after rank 0's answer."""
        waits.append(timeout)
        now[0] += 4
        made.members[(0, 1, 1)[len(waits) - 1]].come((epoch, PROGRESS, epoch)[len(waits) - 1])
        return [end for end in ends if end.poll()]

    monkeypatch.setattr(ddp_processes, "wait", wait)
    for member in made.members:
        member.events["run_epoch"] = []
    assert made.session.run_epoch() == EPOCH
    assert waits == [10.0, 6.0, 10.0]
    made.session.close()


@pytest.mark.parametrize(("silent", "who"), [([1], "rank 1"), ([0, 1], "ranks 0, 1")])
def test_who_does_not_answer_is_named(silent: list[int], who: str) -> None:
    made = Ranks(timeout_seconds=0.05)
    for rank in silent:
        made.members[rank].events["run_block"] = []
    with pytest.raises(TrialFailedError, match=rf"^{who}: run_block took longer than 0\.05 s$") as caught:
        made.session.run_block()
    assert caught.value.status == "timeout"
    made.session.close()
    assert all(member.killed and member.closed for member in made.members), "the others have nothing left to do"


def test_the_first_failure_is_the_trial_s(ranks: Ranks) -> None:
    ranks.members[0].events["warm_up"] = []
    ranks.members[1].events["warm_up"] = [TrialFailedError("oom", "no memory", "its log")]
    with pytest.raises(TrialFailedError) as caught:
        ranks.session.warm_up()
    failure = caught.value
    assert (failure.status, failure.message, failure.log) == ("oom", "rank 1: no memory", "its log")


def test_a_silent_end_is_the_cause_of_what_others_say_first(ranks: Ranks) -> None:
    ranks.members[0].events["warm_up"] = [TrialFailedError("crashed", "connection closed by peer")]
    ranks.members[1].events["warm_up"] = [PROGRESS, ProcessGoneError("crashed", "ended by SIGSEGV")]
    with pytest.raises(TrialFailedError, match=r"^rank 1: ended by SIGSEGV$"):
        ranks.session.warm_up()


def test_what_castwise_refuses_is_no_rank_s_failure(ranks: Ranks) -> None:
    for member in ranks.members:
        member.events["set_up"] = [TrialFailedError("unsupported", "Impossible.", refused=True)]
    with pytest.raises(TrialFailedError, match=r"^Impossible\.$") as caught:
        ranks.session.set_up(SPEC)
    assert caught.value.refused


def test_an_answer_that_is_none_is_its_rank_s(ranks: Ranks) -> None:
    ranks.members[1].events["run_block"] = [{"event": "block"}]
    with pytest.raises(TrialFailedError, match=r"^rank 1: no answer$"):
        ranks.session.run_block()


def test_a_second_process_that_cannot_be_started_leaves_no_first(logs: Path) -> None:
    made: list[FakeMember] = []

    def start() -> FakeMember:
        if made:
            raise OSError("no more of them")
        made.append(FakeMember())
        return made[-1]

    with pytest.raises(OSError, match="no more of them"):
        GroupSession(start, 2, 1.0, None, None)
    assert made[0].closed
    assert not list(logs.iterdir())


# With real processes


def failure_of(target: Target, timeout_seconds: float = PATIENCE_SECONDS) -> TrialFailedError:
    """Return how a trial of two ranks failed, after seeing that its processes have ended."""
    session = ForkserverEngine(target=target).start(timeout_seconds, 2)
    assert isinstance(session, GroupSession)
    try:
        session.open("cpu")
        session.set_up(SPEC.model_copy(update={"device": "cpu"}))
        with pytest.raises(TrialFailedError) as caught:
            session.warm_up()
    finally:
        session.close()
    assert all(member._process.exitcode is not None for member in session._members)  # type: ignore[attr-defined]
    assert not list(Path(tempfile.gettempdir()).glob("castwise-*"))
    return caught.value


def test_two_ranks_that_behave(logs: Path) -> None:
    session = ForkserverEngine(target=faulty_worker.behave).start(PATIENCE_SECONDS, 2)
    session.open("cpu")
    session.set_up(SPEC)
    session.warm_up()
    session.run_block()
    assert session.finish() == (RankSamples(blocks=(BLOCK,)),) * 2
    session.close()
    session.close()
    assert not list(logs.iterdir())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [("die", "crashed", "the process was ended by SIGSEGV"), ("raise", "oom", "CUDA out of memory")],
)
def test_a_rank_that_ends_ends_the_others(rank: int, fault: str, status: str, message: str, logs: Path) -> None:
    failure = failure_of(partial(faulty_worker.err_in_rank, rank, fault))
    assert (failure.status, failure.message) == (status, f"rank {rank}: {message}")


def test_ranks_that_hang(logs: Path) -> None:
    failure = failure_of(partial(faulty_worker.err_in_rank, 1, "hang"), timeout_seconds=2.0)
    assert (failure.status, failure.message) == ("timeout", "ranks 0, 1: 'warm up' took longer than 2 s")


HANGING = """\
from castwise.orchestrator.runner import TrialRunner
from castwise.orchestrator.trial import NullListener

class Speaking(NullListener):
    def phase(self, name, done):
        print(name, flush=True)

SPEC = SPEC.model_copy(update={"world_size": 2, "parallelism": "ddp"})
engine = processes.ForkserverEngine(target=partial(faulty_worker.err_in_rank, 1, "hang"))
TrialRunner(engine, None, faulty_worker.ENVIRONMENT, Speaking()).run([SPEC])
"""


@pytest.mark.parametrize(
    ("number", "to_group"), [(signal.SIGKILL, False), (signal.SIGTERM, False), (signal.SIGINT, True)]
)
def test_no_rank_outlives_the_program(number: signal.Signals, to_group: bool, program: Program) -> None:
    program.start_script(LIGHT + HANGING)
    program.wait_for_line("warming up")
    wait_until(lambda: len(program.alive()) == 5, "program, tracker, server and two ranks")
    program.signal(number, to_group)
    wait_until(lambda: not program.alive(), "the end of every process")


# Two ranks that have met through gloo; one is stopped, so that the other waits for it in a collective for ever.
MET = """\
import os, signal, sys
from castwise.spec.plan import MeasurementProtocol, TrialSpec
from castwise.orchestrator import processes
protocol = MeasurementProtocol(warm_up_seconds=1000.0, warm_up_steps=10**9)
SPEC = TrialSpec(workload="mnist-cnn", precision="fp32", loss_scale="none", batch_size=2, device="cpu",
                 world_size=2, parallelism="ddp", protocol=protocol)
processes._PRELOAD = ["castwise.worker.server"]
session = processes.ForkserverEngine().start(1000.0, 2)
session.open("cpu")
session.set_up(SPEC)
os.kill(session._members[1]._process.pid, signal.SIGSTOP)
print("met", flush=True)
session.warm_up()
"""


def test_no_gloo_rank_outlives_a_killed_program(program: Program) -> None:
    program.start_script(MET)
    program.wait_for_line("met")
    assert len(program.alive()) == 5
    program.signal(signal.SIGKILL, to_group=False)
    wait_until(lambda: not program.alive(), "the end of every process")
