"""A plan on Ray: a cluster of several nodes in this machine; on each castwise runs on its fake engine."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fake_cli
import pytest
from conftest import CommandLine, Outcome
from programs import MEETS, SOURCES, Program, wait_until

from castwise.cluster import ray_nodes, shard
from castwise.records.store import load_folder

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]  # one process starts the cluster
REQUEST = ("resnet50", "--precision", "fp32,bf16-mixed", "--rounds", "1")

# The first process of a shard hangs, and says which it is; the others measure.
HANGS_ONCE = """
import os, sys, time
try:
    with open(os.environ["CASTWISE_TEST_HANG"], "x") as file:
        file.write(str(os.getpid()))
except FileExistsError:
    os.execv(sys.executable, [sys.executable, {fake_cli!r}, *sys.argv[1:]])
time.sleep(3600)
"""


@dataclass
class Nodes:
    """A cluster with a head that measures nothing, and two nodes of different GPU models."""

    cluster: Any
    hang: Path  # the file that the first process writes to
    by_model: dict[str, Any] = field(default_factory=dict)

    def add_missing(self) -> None:
        """Add the nodes that are not there, or that an earlier test has removed."""
        for model in ("A100", "H200"):
            if self.by_model.get(model) not in self.cluster.worker_nodes:
                resources = {f"accelerator_type:{model}": 1}
                self.by_model[model] = self.cluster.add_node(num_cpus=1, num_gpus=1, resources=resources)

    @property
    def pid(self) -> int:
        """Return the process that hangs, when there is one; 0 before."""
        return int((self.hang.exists() and self.hang.read_text()) or 0)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    hang = tmp_path_factory.mktemp("ray") / "hang"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCES), str(Path(fake_cli.__file__).parent)]))
        patch.setenv("CASTWISE_TEST_HANG", str(hang))
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield Nodes(cluster, hang)
        cluster.shutdown()


@pytest.fixture
def on_ray(nodes: Nodes, command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    nodes.add_missing()
    monkeypatch.setattr(shard, "PROGRAM", (fake_cli.__file__,))
    monkeypatch.setattr(ray_nodes, "_LOOK_SECONDS", 0.5)
    return lambda *arguments: command.run(*REQUEST, "--on", "ray", *arguments)


@pytest.fixture
def hangs_once(on_ray: object, nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the first process hang, and return the program that does."""
    nodes.hang.unlink(missing_ok=True)
    file = tmp_path / "hangs_once.py"
    file.write_text(HANGS_ONCE.format(fake_cli=fake_cli.__file__))
    monkeypatch.setattr(shard, "PROGRAM", (str(file),))
    return file


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]


def sizes(command: CommandLine) -> Counter[int]:
    """Return how many records there are of each batch size."""
    trials, problems = load_folder(command.results)
    assert problems == []
    return Counter(trial.spec.batch_size for trial in trials)


def test_the_plan_is_measured_once_on_each_gpu_model(on_ray: Callable[..., Outcome], command: CommandLine) -> None:
    found = on_ray("--batch-size", "8,16", "--per", "gpu-model")
    assert found.code == 0, found.err
    assert found.engine.measured == [], "not here"
    assert sizes(command) == {8: 4, 16: 4}
    done = [entry["task"] for entry in journal_of(command) if entry["event"] == "done"]
    assert sorted(done) == [[1, "A100"], [1, "H200"], [2, "A100"], [2, "H200"]]
    assert "4 of 4 shards have ended already" in on_ray("--batch-size", "8,16", "--per", "gpu-model").err


def test_nodes_of_one_kind_share_a_trial(
    nodes: Nodes, on_ray: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: CommandLine
) -> None:
    found = on_ray("--gpus", "3", "--nodes-per-trial", "3")
    assert "No 3 nodes of Ray have 1 GPUs" in found.err
    assert not command.results.exists()
    (tmp_path / "meets.py").write_text(MEETS.format(count=2))
    monkeypatch.setattr(shard, "PROGRAM", (str(tmp_path / "meets.py"),))
    third = nodes.cluster.add_node(num_cpus=1, num_gpus=1, resources={"accelerator_type:H200": 1})
    found = on_ray("--batch-size", "8", "--gpus", "2", "--nodes-per-trial", "2")
    nodes.cluster.remove_node(third)
    assert "1 done" in found.err
    assert [entry["event"] for entry in journal_of(command)] == ["started", "done"]


def test_packed_a_node_is_one_for_each_gpu(
    nodes: Nodes, on_ray: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: CommandLine
) -> None:
    """The processes on the three nodes, four of them, wait for each other; each says which GPU it has."""
    code = f"""
import os, pathlib, sys, time
here = pathlib.Path({str(tmp_path)!r})
(here / f"gpu{{os.environ['CUDA_VISIBLE_DEVICES']}}-{{os.getpid()}}").touch()
while len(list(here.glob("gpu*"))) < 4: time.sleep(0.05)
print("--pack" in sys.argv)
"""
    (tmp_path / "waits.py").write_text(code)
    monkeypatch.setattr(shard, "PROGRAM", (str(tmp_path / "waits.py"),))
    third = nodes.cluster.add_node(num_cpus=2, num_gpus=2, resources={"accelerator_type:H200": 1})
    found = on_ray("--batch-size", "8,16,32,64", "--pack")
    nodes.cluster.remove_node(third)
    assert "4 done" in found.err
    assert sorted(file.name[:4] for file in tmp_path.glob("gpu*")) == ["gpu0", "gpu0", "gpu0", "gpu1"]


@pytest.mark.parametrize("seen", ["", "0,1"])
def test_no_process_on_a_node_sees_rays_empty_list_of_gpus(
    seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    actor, result = ray_nodes.NodeActor(), None
    code = "import os, sys; print(os.environ.get('CUDA_VISIBLE_DEVICES'), file=sys.stderr)"
    actor.start(b"", {}, ["-c", code], [], str(tmp_path))
    while result is None:
        _, result = actor.news()
    assert result.said == (seen or "None")


def journal_of(command: CommandLine) -> list[dict[str, Any]]:
    (file,) = command.results.rglob("journal")
    return [json.loads(line) for line in file.read_text().split("\n") if line]


@pytest.mark.usefixtures("hangs_once")
def test_the_submitter_and_then_a_node_are_killed(
    nodes: Nodes, on_ray: Callable[..., Outcome], command: CommandLine, hangs_once: Path, program: Program
) -> None:
    """Nothing is left running, and the same command goes on; then on the node that is left."""
    start = "from castwise.cluster import shard; from castwise.cli.app import main; "
    start += f"shard.PROGRAM = ({str(hangs_once)!r},); main()"
    arguments = [*REQUEST, "--batch-size", "8", "--on", "ray", "--results", str(command.results)]
    submitter = program.start("-c", start, "run", *arguments)
    wait_until(lambda: nodes.pid, "a process that hangs")
    pid = nodes.pid
    submitter.kill()
    wait_until(lambda: not is_alive(pid), "the end of what was started on the node")
    assert sizes(command) == {}

    nodes.hang.unlink()

    def lose_node() -> None:
        wait_until(lambda: nodes.pid, "a process that hangs")
        there = journal_of(command)[-1]["detail"]
        nodes.cluster.remove_node(next(node for node in nodes.cluster.worker_nodes if node.node_id == there))

    with ThreadPoolExecutor(1) as pool:
        losing = pool.submit(lose_node)
        found = on_ray("--batch-size", "8")
        losing.result()
    assert found.code == 0, found.err
    assert "shard 1 was lost and is tried again" in found.err
    assert sizes(command) == {8: 2}
    assert [entry["event"] for entry in journal_of(command)] == [
        "started",
        "cancelled",
        "started",
        "lost",
        "started",
        "done",
    ]
    pid = nodes.pid
    wait_until(lambda: not is_alive(pid), "the end of what ran on the lost node")
