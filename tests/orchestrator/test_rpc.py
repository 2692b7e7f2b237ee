"""A session of several ranks: what each is sent, which answers count, how the first failure ends all."""

import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faulty_trial
import pytest
from faulty_trial import BLOCK, ENVIRONMENT, EPOCH, FACTS, failed, returned
from programs import PATIENCE_SECONDS, Program, wait_until

from castwise.orchestrator import processes
from castwise.orchestrator.processes import ForkserverEngine, RpcSession, Target
from castwise.orchestrator.session import ProcessGoneError, TrialFailedError
from castwise.records.schema import RankSamples
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
PROGRESS = b'{"event": "progress", "done": 0.5}'


class FakeProcess:
    """A rank without a process: the events in `events` come when a method is called, those of a good trial if none."""

    def __init__(self) -> None:
        self.is_busy = self.killed = self.closed = False
        self.calls: list[dict[str, Any]] = []
        self.events: dict[str, list[bytes | ProcessGoneError]] = {}
        self._come: list[bytes | ProcessGoneError] = []
        self._ours, self._theirs = Pipe()

    @property
    def ends(self) -> list[Any]:
        return [self._ours]

    def send(self, message: bytes) -> None:
        call = json.loads(message)
        self.calls.append(call["arguments"])
        for event in self.events.get(call["method"], [returned(call["method"])]):
            self.come(event)

    def come(self, event: bytes | ProcessGoneError) -> None:
        self._come.append(event)
        self._theirs.send(None)  # only to be waited for

    def receive(self) -> bytes:
        self._ours.recv()
        event = self._come.pop(0)
        if isinstance(event, ProcessGoneError):
            raise event
        return event

    def log_tail(self) -> str:
        return "its log"

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self.closed = True


def starting(start_process: Callable[[Path], FakeProcess]) -> Any:
    """Return an engine that starts such processes."""
    return SimpleNamespace(
        start_process=start_process, data_dir=Path("/data"), commit="0123456789ab", nodes=None, packed=False
    )


class Ranks:
    """A session of two ranks without processes."""

    def __init__(self, timeout_seconds: float = PATIENCE_SECONDS) -> None:
        self.processes: list[FakeProcess] = []
        self.session = RpcSession(starting(self._start), 2, timeout_seconds)

    def _start(self, log: Path) -> FakeProcess:
        self.processes.append(FakeProcess())
        return self.processes[-1]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.session.close()


def test_each_rank_has_its_own_device_and_all_meet_in_one_place(ranks: Ranks) -> None:
    assert ranks.session.open("cuda:1") == ENVIRONMENT
    assert ranks.session.ready_seconds > 0
    ranks.session.set_up(SPEC, Path("/checkpoint"))
    opened, set_up = zip(*(process.calls for process in ranks.processes), strict=True)
    assert [call["device"] for call in opened] == ["cuda:1", "cuda:2"]
    assert [call["spec"]["device"] for call in set_up] == ["cuda:0", "cuda:1"]
    assert [call["rank"] for call in set_up] == [0, 1]
    assert [(call["checkpoint"], call["data_dir"]) for call in set_up] == [("/checkpoint", "/data")] * 2
    (rendezvous,) = {call["rendezvous"] for call in set_up}
    path = Path(rendezvous.removeprefix("file://"))
    assert path.parent.is_dir()
    assert not path.exists(), "the ranks make it"
    ranks.session.close()
    assert not path.parent.exists()


def test_cpu_is_one_device_for_all_ranks(ranks: Ranks) -> None:
    ranks.session.open("cpu")
    assert [process.calls[0]["device"] for process in ranks.processes] == ["cpu", "cpu"]


def test_lone_process_has_no_rendezvous_and_no_rank_in_its_failures() -> None:
    process = FakeProcess()
    process.events["warm_up"] = [failed("oom", "no memory")]
    session = RpcSession(starting(lambda log: process), 1, PATIENCE_SECONDS)
    session.set_up(SPEC)
    assert process.calls[0]["rendezvous"] is None
    with pytest.raises(TrialFailedError, match=r"^no memory$"):
        session.warm_up(step_seconds=0.5)
    assert process.calls[1] == {"step_seconds": 0.5}
    assert not process.is_busy, "it ends by itself"
    session.close()


def test_a_name_that_is_not_in_utf8_is_refused(ranks: Ranks) -> None:
    with pytest.raises(TrialFailedError, match=r"not in UTF-8: '/results/\\udcff/checkpoint'\. Rename it") as caught:
        ranks.session.set_up(SPEC, Path("/results/\udcff/checkpoint"))
    assert caught.value.refused


@pytest.mark.parametrize(
    ("field", "message"),
    [("cpu", "the ranks' devices differ: Fake CPU, other"), ("torch", "the nodes differ in torch: .*, other")],
)
def test_different_gpus_or_software_are_not_measured_together(ranks: Ranks, field: str, message: str) -> None:
    other = ENVIRONMENT.model_copy(update={field: "other"})
    ranks.processes[1].events["open"] = [returned("open", other)]
    with pytest.raises(TrialFailedError, match=message) as caught:
        ranks.session.open("cpu")
    assert caught.value.status == "unsupported"


def test_rank_0_answers_for_all_and_each_has_its_samples(ranks: Ranks) -> None:
    facts = FACTS.model_copy(update={"num_parameters": 2})
    ranks.processes[1].events["warm_up"] = [returned("warm_up", facts)]
    ranks.processes[1].events["finish"] = [returned("finish", RankSamples())]
    assert ranks.session.warm_up() == FACTS
    assert ranks.session.run_block() == BLOCK
    assert ranks.session.finish() == (RankSamples(blocks=(BLOCK,)), RankSamples())


def test_progress_of_rank_0_is_reported() -> None:
    made, shares = Ranks(), list[float]()
    made.processes[0].events["run_epoch"] = [PROGRESS, returned("run_epoch")]
    made.processes[1].events["run_epoch"] = [PROGRESS, PROGRESS, returned("run_epoch")]
    assert made.session.run_epoch(shares.append) == EPOCH
    assert shares == [0.5]
    made.session.close()


@pytest.mark.parametrize(("silent", "who"), [([1], "rank 1"), ([0, 1], "ranks 0, 1")])
def test_ranks_that_do_not_answer_are_named(silent: list[int], who: str) -> None:
    made = Ranks(timeout_seconds=0.05)
    for rank in silent:
        made.processes[rank].events["run_block"] = []
    with pytest.raises(TrialFailedError, match=rf"^{who}: 'run block' took longer than 0\.05 s$") as caught:
        made.session.run_block()
    assert caught.value.status == "timeout"
    made.session.close()
    assert all(process.killed and process.closed for process in made.processes), "the others have nothing left to do"


def test_first_failure_is_the_trials(ranks: Ranks) -> None:
    ranks.processes[0].events["warm_up"] = []
    ranks.processes[1].events["warm_up"] = [failed("oom", "no memory")]
    with pytest.raises(TrialFailedError) as caught:
        ranks.session.warm_up()
    failure = caught.value
    assert (failure.status, failure.message, failure.log) == ("oom", "rank 1: no memory", "its log")


def test_silent_end_is_the_cause_of_what_others_report_first(ranks: Ranks) -> None:
    ranks.processes[0].events["warm_up"] = [failed("crashed", "connection closed by peer")]
    ranks.processes[1].events["warm_up"] = [PROGRESS, ProcessGoneError("crashed", "ended by SIGSEGV")]
    with pytest.raises(TrialFailedError, match=r"^rank 1: ended by SIGSEGV$"):
        ranks.session.warm_up()


def test_refusal_names_no_rank(ranks: Ranks) -> None:
    for process in ranks.processes:
        process.events["set_up"] = [failed("unsupported", "Impossible.", refused=True)]
    with pytest.raises(TrialFailedError, match=r"^Impossible\.$") as caught:
        ranks.session.set_up(SPEC)
    assert caught.value.refused


@pytest.mark.parametrize(
    "event",
    [
        b"",
        b"\xff\xfe not text",
        b"{}",
        b'{"event": "dance"}',
        b'{"event": "progress", "done": "half"}',
        b'{"event": "failed", "status": "sad", "message": "", "refused": false}',
        b'{"event": "returned", "method": "run_block", "result": {"host": 7}}',
        returned("warm_up", FACTS),
        returned("finish", BLOCK),
    ],
)
def test_message_that_is_not_an_answer(event: bytes, ranks: Ranks) -> None:
    ranks.processes[1].events["run_block"] = [event]
    with pytest.raises(TrialFailedError, match=r"^rank 1: 'run block' .* cannot be read$") as caught:
        ranks.session.run_block()
    assert caught.value.status == "crashed"
    assert ranks.processes[1].is_busy, "what it is doing is not known"


def test_second_process_that_cannot_be_started_leaves_no_first(logs: Path) -> None:
    made: list[FakeProcess] = []

    def start(log: Path) -> FakeProcess:
        if made:
            raise OSError("no more of them")
        made.append(FakeProcess())
        return made[-1]

    with pytest.raises(OSError, match="no more of them"):
        RpcSession(starting(start), 2, 1.0)
    assert made[0].closed
    assert not list(logs.iterdir())


# With real processes


def failure_of(target: Target, warm_up_seconds: float = PATIENCE_SECONDS) -> TrialFailedError:
    """Return how a trial of two ranks failed, after seeing that its processes have ended."""
    session = ForkserverEngine(target=target).start(PATIENCE_SECONDS, 2)
    try:
        session.open("cpu")
        session.set_up(SPEC.model_copy(update={"device": "cpu"}))
        session.timeout_seconds = warm_up_seconds
        with pytest.raises(TrialFailedError) as caught:
            session.warm_up()
    finally:
        session.close()
    assert all(process.process.exitcode is not None for process in session.processes)
    assert not list(Path(tempfile.gettempdir()).glob("castwise-*"))
    return caught.value


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [("die", "crashed", "the process was ended by SIGSEGV"), ("raise", "oom", "CUDA out of memory")],
)
def test_a_rank_that_ends_ends_the_others(
    rank: int, fault: str, status: str, message: str, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "die":  # the other rank reports a lost connection first, and the end may come late
        monkeypatch.setattr(processes, "_CAUSE_SECONDS", PATIENCE_SECONDS)
    failure = failure_of(partial(faulty_trial.err_in_rank, rank, fault))
    assert (failure.status, failure.message) == (status, f"rank {rank}: {message}")


def test_ranks_that_hang(logs: Path) -> None:
    failure = failure_of(partial(faulty_trial.err_in_rank, 1, "hang"), warm_up_seconds=0.5)
    assert (failure.status, failure.message) == ("timeout", "ranks 0, 1: 'warm up' took longer than 0.5 s")


# Two ranks that have met through gloo; one is stopped, so that the other waits for it in a collective for ever.
MET = """\
import os, signal, sys
from castwise.spec.plan import MeasurementProtocol, TrialSpec
from castwise.orchestrator import processes
protocol = MeasurementProtocol(warm_up_seconds=1000.0, warm_up_steps=10**9)
SPEC = TrialSpec(workload="mnist-cnn", precision="fp32", loss_scale="none", batch_size=2, device="cpu",
                 world_size=2, parallelism="ddp", protocol=protocol)
processes._PRELOAD.append("castwise.trial.server")
session = processes.ForkserverEngine().start(1000.0, 2)
session.open("cpu")
session.set_up(SPEC)
os.kill(session.processes[1].process.pid, signal.SIGSTOP)
print("met", flush=True)
session.warm_up()
"""


@pytest.mark.slow
def test_no_gloo_rank_outlives_a_killed_program(program: Program) -> None:
    process = program.start_script(MET)
    program.wait_for_line("met")
    assert len(program.alive()) == 5
    process.kill()
    wait_until(lambda: not program.alive(), "the end of every process")
