"""Shards on the nodes of a Ray cluster: an actor on each node holds all of it, and starts castwise as a process.

No process of Ray measures, and each trial sees the node's GPUs. Records come back to this machine as they appear, so
that no file system is shared.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from castwise.cluster.dispatch import Ended, Task
from castwise.cluster.shard import ShardProcess, ShardResult, free_port, rendezvous_arguments
from castwise.errors import EngineError, UsageError, shortened
from castwise.orchestrator.temporary_files import TemporaryFolder, make_folder

_LOOK_SECONDS = 5.0  # from one look at the nodes to the next
_REPLY_SECONDS = 2.0  # after which a node says what is new
_PATIENCE_SECONDS = 300.0  # in which a node must come if there is none


class ShardFiles(NamedTuple):
    """What a node needs to measure a shard, and to go on with one that was begun."""

    plan: bytes
    records: Mapping[str, bytes]  # by their paths in the results folder
    arguments: Callable[[str, str], list[str]]  # from the names of the plan and of the results folder
    folder: str  # where it runs, if the node has it


class NodeActor:
    """What runs on a node."""

    def __init__(self) -> None:
        self._folder: TemporaryFolder | None = None
        self._process: ShardProcess | None = None
        self._sent: set[str] = set()

    def free_port(self) -> int:
        """Return a port at which other nodes can meet this one."""
        return free_port()

    def start(self, files: ShardFiles, extra: Sequence[str] = ()) -> None:
        """Start castwise on a shard, with extra arguments."""
        self._folder = make_folder()
        plan, results = self._folder.path / "plan", self._folder.path / "results"
        plan.write_bytes(files.plan)
        for name, content in files.records.items():
            (results / name).parent.mkdir(parents=True, exist_ok=True)
            (results / name).write_bytes(content)
        self._sent = set(files.records)
        self._process = ShardProcess([*files.arguments(str(plan), str(results)), *extra], files.folder)

    def news(self) -> tuple[list[bytes], ShardResult | None]:
        """Wait a moment; return the records that are new, and how castwise ended if it has."""
        assert self._process is not None
        assert self._folder is not None
        deadline = time.monotonic() + _REPLY_SECONDS
        while (result := self._process.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        results = self._folder.path / "results"
        new = sorted({str(path.relative_to(results)) for path in results.rglob("*.json")} - self._sent)
        self._sent.update(new)
        contents = [(results / name).read_bytes() for name in new]
        if result is not None:
            self._folder.remove()
            self._folder = self._process = None
        return contents, result

    def end(self) -> None:
        """End castwise, and what it started."""
        if self._process is not None:
            self._process.end()
        if self._folder is not None:
            self._folder.remove()


class _Node:
    """A node, its actor, and what is waited for: that the actor starts, or news of a shard."""

    def __init__(self, actor: Any, name: str, kind: str, address: str) -> None:
        self.actor, self.name, self.kind, self.address = actor, name, kind, address
        self.task: Task | None = None
        self.leads = True  # of the nodes that share the task: its castwise keeps the records
        self.reply: Any = actor.__ray_ready__.remote()


class RayBackend:
    """The nodes of a Ray cluster.

    Args:
        address: The cluster's; None takes RAY_ADDRESS, or else this machine's cluster, or starts one.
        files_of: Returns what a node needs for a task.
        save: Keeps records, as they were written.
        num_gpus: Of a node at least; 0 for a plan of the CPU.
        nodes: How many are taken at the most; None takes all.
        per: Whether a task's kind is the model of a node's GPUs, or the node itself.
        num_nodes: How many nodes of one kind share a task.
        pack: Whether a node counts as several, each with as many GPUs as a task needs.
    """

    def __init__(  # noqa: PLR0913
        self,
        address: str | None,
        files_of: Callable[[Task], ShardFiles],
        save: Callable[[Sequence[bytes]], None],
        num_gpus: int,
        nodes: int | None = None,
        *,
        per: Literal["gpu-model", "node"] = "gpu-model",
        num_nodes: int = 1,
        pack: bool = False,
    ) -> None:
        try:
            import ray
        except ImportError:
            raise UsageError("--on ray needs Ray: pip install 'castwise[ray]'.") from None
        self._ray: Any = ray
        self._files_of, self._save, self._num_gpus, self._most, self._per = files_of, save, num_gpus, nodes, per
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise EngineError(
                f"The Ray cluster '{address or 'auto'}' cannot be reached: {shortened(str(error))}"
            ) from None
        self._nodes: dict[str, _Node] = {}
        self._num_nodes, self._pack = num_nodes, pack
        self._next_look, self._last_seen = 0.0, time.monotonic()
        self._look()
        if len(self._nodes) < num_nodes:
            self.close()
            what = f"{num_gpus} GPUs" if num_gpus else "a CPU"
            which = "No node of the Ray cluster has" if num_nodes == 1 else f"No {num_nodes} nodes of Ray have"
            raise UsageError(f"{which} {what}, as the plan needs. `ray status` shows the nodes.")

    @property
    def kinds(self) -> list[str]:
        """Return the models of the nodes' GPUs, as Ray calls them, or the nodes."""
        return sorted({node.kind for node in self._nodes.values()})

    def _look(self) -> None:
        """Take nodes that have come: all of their CPUs and GPUs, so that nothing of Ray's runs beside a trial."""
        self._next_look = time.monotonic() + _LOOK_SECONDS
        for found in self._ray.nodes():
            resources, name = found["Resources"], found["NodeID"]
            has = resources.get("GPU", 0) >= self._num_gpus if self._num_gpus else resources.get("CPU", 0) >= 1
            others = {key.partition("/")[0] for key in self._nodes if self._most is not None} - {name}
            is_full = self._most is not None and len(others) >= self._most
            if not found["Alive"] or not has or is_full:
                continue
            host = found.get("NodeManagerHostname", name)
            models = (key.partition(":")[2] for key in resources if key.startswith("accelerator_type:"))
            kind = host if self._per == "node" else next(models, "CPU")
            strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(name, soft=False)
            gpus = resources.get("GPU", 0) if self._num_gpus else 0
            parts = int(gpus // self._num_gpus) if self._pack else 1
            for part in range(parts):
                key = f"{name}/{part}" if part else name
                if key not in self._nodes:
                    actor = self._ray.remote(NodeActor).options(
                        num_cpus=resources.get("CPU", 0) // parts,
                        num_gpus=self._num_gpus if self._pack else gpus,
                        scheduling_strategy=strategy,
                    )
                    self._nodes[key] = _Node(actor.remote(), host, kind, found.get("NodeManagerAddress", host))

    def start(self, waiting: deque[Task]) -> Mapping[Task, str]:
        """Start a task on each node that is free, or on as many as share it."""
        started: dict[Task, str] = {}
        teams: dict[str, list[str]] = {}  # names of free nodes, by kind, until enough for a task are there
        for name, last in self._nodes.items():
            if last.task is not None or last.reply is not None:
                continue
            names = teams.setdefault(last.kind, [])
            names.append(name)
            task = next((each for each in waiting if each.kind in ("", last.kind)), None)
            if len(names) < self._num_nodes or task is None:
                continue
            waiting.remove(task)
            team = [self._nodes[each] for each in teams.pop(last.kind)]
            first, files = team[0], self._files_of(task)
            address = f"{first.address}:{self._ray.get(first.actor.free_port.remote())}" if len(team) > 1 else ""
            for rank, node in enumerate(team):
                node.task, node.leads = task, node is first
                node.actor.start.remote(files, rendezvous_arguments(address, rank) if address else [])
                node.reply = node.actor.news.remote()
            started[task] = names[0]
        return started

    def poll(self) -> list[Ended]:
        """Wait for news of any node, and return the tasks that ended or whose node was lost.

        Raises:
            EngineError: There is no node, and none has come for minutes.
        """
        if time.monotonic() >= self._next_look:
            self._look()
        replies = {node.reply: name for name, node in self._nodes.items() if node.reply is not None}
        if replies:
            self._last_seen = time.monotonic()
        elif time.monotonic() - self._last_seen > _PATIENCE_SECONDS:
            raise EngineError("The Ray cluster has no node left for the plan. The same command goes on when it has.")
        else:
            time.sleep(0.1)
            return []
        ready, _ = self._ray.wait(list(replies), num_returns=len(replies), timeout=0.2)
        ended: list[Ended] = []
        for reply in ready:
            node = self._nodes[name := replies[reply]]
            try:
                news = self._ray.get(reply)
            except self._ray.exceptions.RayError as error:
                del self._nodes[name]
                with suppress(self._ray.exceptions.RayError):
                    self._ray.kill(node.actor)
                if node.task is not None and node.leads:  # without a node the one that leads ends by itself
                    why = (str(error).strip() or type(error).__name__).splitlines()[0]
                    ended.append(Ended(node.task, None, f"{node.name} was lost: {shortened(why)}"))
                continue
            node.reply = None
            if node.task is None:  # the actor has started
                continue
            records, result = news
            self._save(records)
            if result is None:
                node.reply = node.actor.news.remote()
            else:
                ended += [Ended(node.task, result)] if node.leads else []
                node.task = None
        return ended

    def running(self) -> int:
        """Return how many nodes measure."""
        return sum(node.task is not None and node.leads for node in self._nodes.values())

    def close(self) -> None:
        """End what runs on the nodes, and leave the cluster."""
        ends = [node.actor.end.remote() for node in self._nodes.values() if node.task is not None]
        self._ray.wait(ends, num_returns=len(ends), timeout=10.0) if ends else None
        self._ray.shutdown()
