"""Trials over several nodes: two castwise processes on this machine stand for two nodes."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import fake_slurm
import pytest
from conftest import CommandLine
from programs import MEETS, PATIENCE_SECONDS, SOURCES, Program

from castwise.cluster.shard import run_shard
from castwise.errors import EngineError, UsageError
from castwise.orchestrator import nodes
from castwise.orchestrator.nodes import Nodes, follow
from castwise.orchestrator.session import ProcessGoneError
from castwise.records.store import load_folder


@pytest.fixture
def rendezvous() -> str:
    with socket.create_server(("localhost", 0)) as server:
        return f"localhost:{server.getsockname()[1]}"


@pytest.mark.slow
def test_two_nodes_train_one_model(program: Program, rendezvous: str) -> None:
    request = ["run", "mnist-cnn", "--device", "cpu", "--precision", "fp32", "--batch-size", "4", "--rounds", "1"]
    request += ["--seconds", "0.05", "--gpus", "2"]
    request += ["--nodes-per-trial", "2", "--rendezvous", rendezvous, "--results", "results", "--node-rank"]
    follower = program.start("-m", "castwise", *request, "1")
    leader = program.start("-m", "castwise", *request, "0")
    out, said = leader.communicate(timeout=PATIENCE_SECONDS)
    assert leader.returncode == 0, said
    assert "2 CPU processes on 2 nodes (ddp)" in out
    assert follower.wait(PATIENCE_SECONDS) == 0
    (trial,), problems = load_folder(program.folder / "results")
    assert (trial.status, trial.spec.num_nodes, problems) == ("ok", 2, [])
    assert [len(rank.blocks) for rank in trial.ranks] == [len(trial.ranks[0].blocks)] * 2
    assert trial.environment.other_hosts == (socket.gethostname(),)
    assert not program.alive()


def test_a_node_without_the_device_waits_for_no_other(program: Program, rendezvous: str) -> None:
    request = ["run", "mnist-cnn", "--device", "cuda:99", "--gpus", "2", "--nodes-per-trial", "2"]
    request += ["--rendezvous", rendezvous, "--results", "results", "--node-rank"]
    leader = program.start("-m", "castwise", *request, "0")
    _, said = leader.communicate(timeout=PATIENCE_SECONDS)
    assert (leader.returncode, "cuda:99" in said.splitlines()[-1]) == (2, True), said
    assert not (program.folder / "results").exists()


def test_nodes_that_have_come_end_with_a_refusal(rendezvous: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_come, connect = threading.Event(), socket.create_connection

    def come(*given: Any, **options: Any) -> Any:
        connection = connect(*given, **options)
        has_come.set()
        return connection

    monkeypatch.setattr(socket, "create_connection", come)

    def refuse() -> None:
        with pytest.raises(UsageError, match="does not take this node: it has ended"):
            follow(rendezvous, lambda _: FakeProcess())

    def check() -> None:
        thread.start()
        assert has_come.wait(PATIENCE_SECONDS)
        raise UsageError("no GPU")

    thread = threading.Thread(target=refuse)
    with pytest.raises(UsageError, match="no GPU"):
        Nodes(rendezvous, 2, check)
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


class FakeProcess:
    """Answers each message with itself in capitals, and ends after "end"."""

    def __init__(self) -> None:
        self.is_busy, self.closed = False, threading.Event()
        self._ours, self._theirs = Pipe()

    @property
    def ends(self) -> list[Any]:
        return [self._ours]

    def send(self, message: bytes) -> None:
        self._theirs.send_bytes(message.upper())

    def receive(self) -> bytes:
        if (message := self._ours.recv_bytes()) == b"END":
            raise ProcessGoneError("crashed", "the process was ended by SIGKILL", "its log")
        return message

    def log_tail(self) -> str:
        return ""

    def kill(self) -> None:
        pass

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def started() -> list[FakeProcess]:
    return []


@pytest.fixture
def leader(rendezvous: str, started: list[FakeProcess]) -> Iterator[Nodes]:
    def start(_: object) -> FakeProcess:
        started.append(FakeProcess())
        return started[-1]

    def join() -> None:
        with socket.create_connection(tuple(rendezvous.split(":")), timeout=PATIENCE_SECONDS) as stray:
            stray.sendall(b"\0\0\0\5hello")
        follow(rendezvous, start)

    thread = threading.Thread(target=join)
    with closing(Nodes(rendezvous, 2, check=thread.start)) as found:
        yield found
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive(), "a follower ends with its leader"
    assert all(process.closed.is_set() for process in started)


def test_messages_pass_and_an_end_is_told(leader: Nodes) -> None:
    leader.ask(2)
    first, second = leader.take(2)
    second.send(b"two")
    first.send(b"one")
    assert (first.receive(), second.receive()) == (b"ONE", b"TWO")
    first.send(b"end")
    with pytest.raises(ProcessGoneError, match="SIGKILL on "):
        first.receive()
    assert first.log_tail() == "its log"
    second.kill()


def test_a_node_that_has_gone_is_an_error(rendezvous: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def join_and_go() -> None:
        nodes._connect(rendezvous, {"host": "node2"}, PATIENCE_SECONDS).close()

    thread = threading.Thread(target=join_and_go)
    thread.start()
    with closing(Nodes(rendezvous, 2)) as leader:
        thread.join()
        with pytest.raises(EngineError, match="The node node2 has gone"):
            leader.take(1)
    monkeypatch.setattr(nodes, "_PATIENCE_SECONDS", 0.1)
    with pytest.raises(EngineError, match="1 of 2 nodes are there"):
        Nodes(rendezvous, 2)
    with pytest.raises(EngineError, match="No leader answers"):
        follow(rendezvous, lambda _: FakeProcess())


def test_another_castwise_is_refused(rendezvous: str) -> None:
    def join() -> None:
        nodes._connect(rendezvous, {"host": "node2", "castwise": "0.0"}, PATIENCE_SECONDS)

    thread = threading.Thread(target=join)
    thread.start()
    with pytest.raises(UsageError, match="node2 has another castwise"):
        Nodes(rendezvous, 2)
    thread.join()


def test_a_node_with_another_secret_is_refused(rendezvous: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals: list[str] = []

    def join() -> None:
        for secret in ("theirs", "ours"):
            monkeypatch.setenv(nodes.SECRET, secret)
            try:
                follow(rendezvous, lambda _: FakeProcess())
            except UsageError as error:
                refusals.append(str(error))

    monkeypatch.setenv(nodes.SECRET, "ours")
    thread = threading.Thread(target=join)
    with closing(Nodes(rendezvous, 2, check=thread.start)) as leader:
        assert leader.hosts == (socket.gethostname(),)
    thread.join(PATIENCE_SECONDS)
    assert refusals == [
        f"The leader at {rendezvous} has another secret: set CASTWISE_SECRET to the same text on each node."
    ]


def test_the_secret_is_a_file_of_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "cache_dir", lambda: tmp_path / "cache")
    secret = nodes.read_secret()
    assert len(secret) == 64
    assert nodes.read_secret() == secret
    (file,) = (tmp_path / "cache").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_nodes_of_a_slurm_job_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_slurm.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    (tmp_path / "node.py").write_text(MEETS.format(count=3))
    result = run_shard([str(tmp_path / "node.py")], str(tmp_path), 3)
    assert (result.code, result.said) == (0, "3 nodes")


@pytest.mark.slow
def test_records_of_packed_trials_and_of_other_nodes_are_of_another_machine(program: Program) -> None:
    code = """
from castwise.orchestrator.processes import ForkserverEngine
from castwise.report.machine_names import names_by_fingerprint
from types import SimpleNamespace
if __name__ == "__main__":
    environments = []
    for nodes, packed in ((None, False), (None, True), (SimpleNamespace(hosts=("node2",)), False)):
        session = ForkserverEngine(nodes=nodes, packed=packed).start(900.0)
        environments.append(session.open("cpu"))
        session.close()
    first, second, third = names_by_fingerprint(environments).values()
    assert second == first + ", packed" and third.endswith("+node2"), (first, second, third)
    assert len({each.machine for each in environments}) == 3
"""
    process = program.start_script(code)
    assert (process.communicate(timeout=PATIENCE_SECONDS)[1], process.returncode) == ("", 0)


def test_a_plan_keeps_how_many_nodes_share_a_trial(command: CommandLine, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    found = command.run(
        "resnet50", "--precision", "fp32", "--gpus", "1,16", "--nodes-per-trial", "2", "--plan-only", plan
    )
    assert found.code == 0
    assert [spec.get("num_nodes", 1) for spec in json.loads(plan.read_text())["specs"]] == [1, 2]
