"""What castwise's own scheduler costs on 1,000 nodes and 10,000 trials, and how far its makespan is from the bound.

    python benchmarks/cluster_cost.py [--nodes N] [--trials N] [--out FILE]

Needs neither Ray nor a GPU: a made-up Ray with a clock of its own stands in, whose nodes measure nothing and answer
with records. All else is castwise's: plan, shards, journal, retries, records on disk. What the real Ray costs is not in
it. The bound is the larger of all work over all nodes, and the longest shard.
"""

import argparse
import multiprocessing
import os
import pickle
import platform
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stored import RECORDS, write

from castwise.cluster.shard import ShardResult
from castwise.orchestrator.machine import find_commit
from castwise.records.schema import Trial
from castwise.registry.precisions import PRECISIONS
from castwise.spec.plan_file import PlanFile
from castwise.spec.trial import TrialSpec

SHARD_SECONDS = 5.0  # for castwise's start on a node
TRIAL_SECONDS = 60.0  # the median of a trial
START_SECONDS = 3.0  # of an actor


@dataclass(frozen=True)
class Scenario:
    """How trials form comparisons, and what goes wrong."""

    name: str
    precisions: int  # of a comparison
    spread: float  # the standard deviation of the logarithm of a trial's time
    lost_nodes: float = 0.0  # the share of nodes that are lost in the time of the bound


SCENARIOS = (
    Scenario("one trial a comparison, times vary by 10 %", 1, 0.1),
    Scenario("one trial a comparison, times vary by 30 %", 1, 0.3),
    Scenario("four trials a comparison, times vary by 30 %", 4, 0.3),
    Scenario("one trial a comparison, times vary by 10 %, 5 % of the nodes are lost", 1, 0.1, lost_nodes=0.05),
)


class NodeLostError(Exception):
    """What the made-up Ray raises."""


@dataclass(eq=False)
class Reply:
    """What an actor answers, and when."""

    at: float
    value: Any = None
    is_lost: bool = False


class Node:
    """An actor on a made-up node: each call has `remote`."""

    def __init__(self, ray: "FakeRay", lost_at: float) -> None:
        self._ray, self._lost_at, self._ends, self._sent = ray, lost_at, [], 0
        self._records: list[Callable[[], bytes]] = []
        for name in ("__ray_ready__", "start", "news", "end"):
            setattr(self, name, SimpleNamespace(remote=partial(self._call, name)))

    def _call(self, name: str, *arguments: Any) -> Reply:
        now, value = self._ray.now, None
        at = now + START_SECONDS if name == "__ray_ready__" else now
        if name == "start":
            pickle.dumps(arguments)  # as Ray does in this process
            with self._ray.not_counted():
                specs = PlanFile.model_validate_json(arguments[0]).specs
                self._ends, at_end = [], now + SHARD_SECONDS
                for spec in specs:
                    at_end += self._ray.seconds_of[spec.key]
                    self._ends.append(at_end)
                self._records, self._sent = [partial(self._ray.record_of, spec) for spec in specs], 0
        elif name == "news":
            at = min(now + 2.0, self._ends[-1])
            with self._ray.not_counted():
                done = sum(end <= at for end in self._ends)
                new, self._sent = [make() for make in self._records[self._sent : done]], done
            value = (new, ShardResult(0, True, "", "node") if done == len(self._ends) else None)
        return Reply(self._lost_at, is_lost=True) if self._lost_at <= at else Reply(at, value)


class FakeRay:
    """As much of Ray as castwise calls."""

    exceptions = SimpleNamespace(RayError=NodeLostError)
    util = SimpleNamespace(scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda name, **_: name))

    def __init__(self, lost_at: Sequence[float], seconds_of: dict[str, float], template: Trial) -> None:
        self.now, self.seconds_of, self._template, self._lost_at = 0.0, seconds_of, template, lost_at
        self.uncounted_seconds = 0.0

    def record_of(self, spec: TrialSpec) -> bytes:
        return self._template.model_copy(update={"spec": spec}).model_dump_json(indent=1).encode()

    def not_counted(self) -> Any:
        ray = self

        class Uncounted:
            def __enter__(self) -> None:
                self.began = time.process_time()

            def __exit__(self, *_: object) -> None:
                ray.uncounted_seconds += time.process_time() - self.began

        return Uncounted()

    def init(self, **_: Any) -> None:
        pass

    def nodes(self) -> list[dict[str, Any]]:
        resources = {"CPU": 8.0, "GPU": 1.0, "accelerator_type:H200": 1.0}
        names = [(f"{number:05}", lost_at) for number, lost_at in enumerate(self._lost_at)]
        return [{"NodeID": name, "Alive": at > self.now, "Resources": resources} for name, at in names]

    def remote(self, _: type) -> Any:
        def options(scheduling_strategy: str, **_: Any) -> Any:
            return SimpleNamespace(remote=lambda: Node(self, self._lost_at[int(scheduling_strategy)]))

        return SimpleNamespace(options=options)

    def wait(self, replies: list[Reply], *, timeout: float, **_: Any) -> tuple[list[Reply], list[Reply]]:
        self.now += timeout
        return [reply for reply in replies if reply.at <= self.now], []

    def get(self, reply: Reply) -> Any:
        if reply.is_lost:
            raise NodeLostError("its node died")
        return reply.value

    def kill(self, _: Node) -> None:
        pass

    def shutdown(self) -> None:
        pass


class Counts:
    """Takes the progress, and prints nothing."""

    num_lost = num_given_up = 0

    def counts(self, waiting: int, running: int, ended: int) -> None:
        pass

    def remark(self, line: str) -> None:
        self.num_lost += "was lost" in line

    def gave_up(self, *_: object) -> None:
        self.num_given_up += 1


def simulate(scenario: Scenario, num_nodes: int, num_trials: int) -> dict[str, Any]:
    """Return what a scenario came to."""
    from castwise.cluster import ray_nodes
    from castwise.cluster.dispatch import Journal, Task, dispatch
    from castwise.cluster.options import ManyMachinesOptions
    from castwise.records.store import Store

    rng = random.Random(0)
    sizes, rows = range(1, num_trials // scenario.precisions + 1), PRECISIONS[: scenario.precisions]
    specs = [
        TrialSpec(workload="resnet50", precision=row.name, loss_scale=row.loss_scale, batch_size=size, device="cuda:0")
        for size, row in product(sizes, rows)
    ]
    seconds_of = {spec.key: TRIAL_SECONDS * rng.lognormvariate(0, scenario.spread) for spec in specs}
    template = Trial.model_validate_json(next((RECORDS / "trials").rglob("resnet50-fp32-*.json")).read_bytes())
    plan = PlanFile(options={}, specs=tuple(specs))
    longest = max(SHARD_SECONDS + sum(seconds_of[each.key] for each in found) for found in plan.comparisons)
    work = SHARD_SECONDS * len(plan.comparisons) + sum(seconds_of.values())
    bound = max(work / num_nodes, longest)
    lost = set(rng.sample(range(num_nodes), round(scenario.lost_nodes * num_nodes)))
    lost_at = [rng.uniform(0, bound) if number in lost else float("inf") for number in range(num_nodes)]
    # A node's time counts as long as it is there.
    bound = max(bound, (work + sum(bound - at for at in lost_at if at < bound)) / num_nodes)
    ray = FakeRay(lost_at, seconds_of, template)
    sys.modules["ray"] = ray  # type: ignore[assignment]
    ray_nodes.time = SimpleNamespace(  # type: ignore[attr-defined]
        monotonic=lambda: ray.now, sleep=lambda seconds: setattr(ray, "now", ray.now + seconds)
    )
    listener = Counts()
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        store, journal = Store(Path(folder)), Journal(Path(folder) / ".cluster")
        shards = plan.shards(len(plan.comparisons))
        backend = ray_nodes.RayBackend(ManyMachinesOptions(on="ray"), plan, shards, store, [])
        tasks = [Task(number) for number in range(1, len(shards) + 1)]
        dispatch(tasks, journal, backend, listener.gave_up, listener.counts, listener.remark)
        cpu_seconds = time.process_time() - began - ray.uncounted_seconds
        records = Counter(path.name.rpartition("-")[2][:12] for path in Path(folder).rglob("*.json"))
        done = sum(ending == "done" for ending, _ in journal.endings.values())
        journal.close()
    return {
        "name": scenario.name,
        "nodes": num_nodes,
        "shards": len(shards),
        "trials": len(specs),
        "cpu_seconds": cpu_seconds,
        "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "makespan_seconds": ray.now,
        "bound_seconds": bound,
        "lost_shards": listener.num_lost,
        "shards_done": done,
        "shards_given_up": listener.num_given_up,
        "trials_on_record": len(records),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    for scenario in SCENARIOS:
        # A process each, for its peak of memory.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            result = pool.apply(simulate, (scenario, arguments.nodes, arguments.trials))
        results.append(result)
        over = result["makespan_seconds"] / result["bound_seconds"] - 1
        print(
            f"{result['name']}: {result['cpu_seconds']:.1f} s of CPU, {result['peak_rss_bytes'] / 1e6:.0f} MB, "
            f"makespan {100 * over:.1f} % above the bound, {result['lost_shards']} shards lost and moved, "
            f"{result['trials_on_record']} of {result['trials']} trials on record",
            flush=True,
        )
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    environment = {
        "cpu": f"{cpu.partition(': ')[2]} ({os.cpu_count()} cores)",
        "python": platform.python_version(),
        "commit": find_commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    write(arguments.out, {"environment": environment, "scenarios": results})


if __name__ == "__main__":
    main()
