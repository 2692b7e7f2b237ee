"""Shards on the nodes of a Ray cluster: an actor on each node holds all of it, and starts castwise as a process.

No process of Ray measures, and each trial sees the node's GPUs. Records come back to this machine as they appear, so
that no file system is shared.
"""

import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from castwise.cluster.dispatch import Task
from castwise.cluster.options import ManyMachinesOptions
from castwise.cluster.shard import ShardProcess, ShardResult, rendezvous_arguments
from castwise.errors import EngineError, UsageError, shortened
from castwise.orchestrator.nodes import free_port
from castwise.orchestrator.temporary_files import TemporaryFolder, make_folder
from castwise.records.schema import Trial
from castwise.records.store import Store, read_records
from castwise.spec.plan_file import PlanFile
from castwise.spec.trial import TrialSpec

_LOOK_SECONDS = 5.0  # from one look at the nodes to the next
_REPLY_SECONDS = 2.0  # after which a node says what is new
_PATIENCE_SECONDS = 300.0  # in which a node must come if there is none


class NodeActor:
    def __init__(self) -> None:
        self._folder: TemporaryFolder | None = None
        self._process: ShardProcess | None = None
        self._sent: set[str] = set()

    def free_port(self) -> int:
        """Return a port at which other nodes can meet this one."""
        return free_port()

    def start(
        self,
        plan: bytes,
        records: Mapping[str, bytes],
        arguments: Sequence[str],
        extra: Sequence[str],
        folder: str,
        secret: str = "",
    ) -> None:
        """Start castwise on a shard, with its records so far by their paths in the results folder."""
        self._folder = make_folder()
        results = self._folder.path / "results"
        (self._folder.path / "plan").write_bytes(plan)
        for name, content in records.items():
            (results / name).parent.mkdir(parents=True, exist_ok=True)
            (results / name).write_bytes(content)
        self._sent = set(records)
        own = ["--plan", str(self._folder.path / "plan"), "--results", str(results)]
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # Ray's, for an actor without GPUs
            del os.environ["CUDA_VISIBLE_DEVICES"]
        self._process = ShardProcess([*arguments, *own, *extra], folder, secret)

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
        if self._process is not None:
            self._process.end()
        if self._folder is not None:
            self._folder.remove()


@dataclass(eq=False)
class _Node:
    actor: Any
    name: str
    kind: str  # the model of its GPUs, or itself, by --per
    address: str
    reply: Any  # what is waited for: that the actor starts, or news of a shard
    task: Task | None = None
    leads: bool = True  # the nodes that share the task: its castwise keeps the records


class RayBackend:
    """The nodes of a Ray cluster, whose records go into a store; a node gets those that a shard has by then.

    `arguments` are those of Python that measure a plan.
    """

    def __init__(
        self,
        machines: ManyMachinesOptions,
        plan: PlanFile,
        shards: Sequence[Sequence[TrialSpec]],
        store: Store,
        arguments: Sequence[str],
    ) -> None:
        try:
            import ray
        except ImportError:
            raise UsageError("--on ray needs Ray: pip install 'castwise[ray]'.") from None
        self._ray: Any = ray
        self._machines, self._plan, self._shards = machines, plan, shards
        self._store, self._arguments = store, arguments
        self._num_gpus, self._num_nodes = plan.num_gpus, plan.num_nodes  # of a node at least; that share a task
        self._known: dict[str, list[Path]] = {}  # files of records, by configuration
        for record in read_records(sorted(store.folder.rglob("*.json")))[0]:
            self._known.setdefault(record.trial.spec.configuration, []).append(record.path)
        address = None if machines.on == "ray" else machines.on  # None takes RAY_ADDRESS, this machine's, or a new one
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise EngineError(
                f"The Ray cluster '{machines.on}' cannot be reached: {shortened(str(error))}. If its nodes ask for a "
                "token, as Ray's newer versions let them, set RAY_AUTH_MODE=token."
            ) from None
        self._nodes: dict[str, _Node] = {}
        self._next_look, self._last_seen = 0.0, time.monotonic()
        self._look()
        if len(self._nodes) < self._num_nodes:
            self.close()
            what = f"{self._num_gpus} GPUs" if self._num_gpus else "a CPU"
            which = "No node of Ray has" if self._num_nodes == 1 else f"No {self._num_nodes} nodes of Ray have"
            raise UsageError(f"{which} {what}, as the plan needs. `ray status` shows the nodes.")

    @property
    def kinds(self) -> list[str]:
        """Return the models of the nodes' GPUs, as Ray calls them, or the nodes."""
        return sorted({node.kind for node in self._nodes.values()})

    def _look(self) -> None:
        """Take nodes that have come: all of their CPUs and GPUs, so that nothing of Ray's runs beside a trial.

        With --pack a node counts as several, each with as many GPUs as a task needs.
        """
        self._next_look = time.monotonic() + _LOOK_SECONDS
        most, pack = self._machines.nodes, self._machines.pack
        for found in self._ray.nodes():
            resources, name = found["Resources"], found["NodeID"]
            has = resources.get("GPU", 0) >= self._num_gpus if self._num_gpus else resources.get("CPU", 0) >= 1
            others = {key.partition("/")[0] for key in self._nodes if most is not None} - {name}
            if not found["Alive"] or not has or (most is not None and len(others) >= most):
                continue
            host = found.get("NodeManagerHostname", name)
            models = (key.partition(":")[2] for key in resources if key.startswith("accelerator_type:"))
            kind = host if self._machines.per == "node" else next(models, "CPU")
            gpus = resources.get("GPU", 0) if self._num_gpus else 0
            parts = int(gpus // self._num_gpus) if pack else 1
            for key in (f"{name}/{part}" if part else name for part in range(parts)):
                if key not in self._nodes:
                    strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(name, soft=False)
                    made = self._ray.remote(NodeActor).options(
                        num_cpus=resources.get("CPU", 0) // parts,
                        num_gpus=self._num_gpus if pack else gpus,
                        scheduling_strategy=strategy,
                    )
                    actor, address = made.remote(), found.get("NodeManagerAddress", host)
                    self._nodes[key] = _Node(actor, host, kind, address, actor.__ray_ready__.remote())

    def start(self, waiting: deque[Task]) -> Mapping[Task, str]:
        """Start a task on each node that is free, or on as many as share it."""
        started: dict[Task, str] = {}
        teams: dict[str, list[str]] = {}  # names of free nodes, by kind, until enough for a task are there
        for name, last in list(self._nodes.items()):
            if last.task is not None or last.reply is not None:
                continue
            (names := teams.setdefault(last.kind, [])).append(name)
            task = next((task for task in waiting if task.kind in ("", last.kind)), None)
            if len(names) < self._num_nodes or task is None:
                continue
            team = [self._nodes[name] for name in teams.pop(last.kind)]
            first, address, secret = team[0], "", secrets.token_hex(32)
            if len(team) > 1:
                try:
                    address = f"{first.address}:{self._ray.get(first.actor.free_port.remote(), timeout=30.0)}"
                except self._ray.exceptions.RayError:  # it was lost
                    del self._nodes[names[0]]
                    continue
            waiting.remove(task)
            specs = tuple(self._shards[task.shard - 1])
            plan = self._plan.model_copy(update={"specs": specs}).model_dump_json().encode()
            files = [path for spec in specs for path in self._known.get(spec.configuration, [])]
            records = {str(path.relative_to(self._store.folder)): path.read_bytes() for path in files}
            for rank, node in enumerate(team):
                node.task, node.leads = task, node is first
                extra = rendezvous_arguments(address, rank) if address else []
                node.actor.start.remote(plan, records, self._arguments, extra, os.getcwd(), secret)
                node.reply = node.actor.news.remote()
            started[task] = names[0]
        return started

    def poll(self) -> list[tuple[Task, ShardResult | str]]:
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
        ended: list[tuple[Task, ShardResult | str]] = []
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
                    ended.append((node.task, f"{node.name} was lost: {shortened(why)}"))
                continue
            node.reply = None
            if node.task is None:  # the actor has started
                continue
            records, result = news
            for trial in map(Trial.model_validate_json, records):
                self._known.setdefault(trial.spec.configuration, []).append(self._store.save(trial))
            if result is None:
                node.reply = node.actor.news.remote()
            else:
                ended += [(node.task, result)] if node.leads else []
                node.task = None
        return ended

    def running(self) -> int:
        return sum(node.task is not None and node.leads for node in self._nodes.values())

    def close(self) -> None:
        """End what runs on the nodes, and leave the cluster."""
        ends = [node.actor.end.remote() for node in self._nodes.values() if node.task is not None]
        self._ray.wait(ends, num_returns=len(ends), timeout=10.0) if ends else None
        self._ray.shutdown()
