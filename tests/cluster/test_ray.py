"""A plan on Ray: a cluster of several nodes in this machine, with castwise on its fake engine as each node's process."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cli
import pytest
from conftest import CommandLine, Outcome
from programs import SOURCES, Program, wait_until

from castwise.cluster import ray_nodes, shard
from castwise.records.store import load_folder

pytest.importorskip("ray")
REQUEST = ("resnet50", "--precision", "fp32,bf16-mixed", "--rounds", "1")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Return a cluster with a head that measures nothing, and two nodes of different GPU models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCES), str(Path(fake_cli.__file__).parent)]))
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        patch.setenv("RAY_ADDRESS", made.address)
        for model in ("A100", "H200"):
            made.add_node(num_cpus=1, num_gpus=1, resources={f"accelerator_type:{model}": 1})
        yield made
        made.shutdown()


@pytest.fixture
def on_ray(cluster: Any, command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(shard, "PROGRAM", (fake_cli.__file__,))
    monkeypatch.setattr(ray_nodes, "_LOOK_SECONDS", 0.5)

    def run(*arguments: str | Path) -> Outcome:
        return command.run(*REQUEST, "--on", "ray", *arguments)

    return run


def test_nodes_measure_the_plan_and_records_come_back(on_ray: Any, command: CommandLine) -> None:
    found = on_ray("--batch-size", "8,16,32")
    assert found.code == 0, found.err
    assert found.engine.measured == []
    trials, problems = load_folder(command.results)
    assert problems == []
    assert Counter(trial.spec.batch_size for trial in trials) == {8: 2, 16: 2, 32: 2}
    again = on_ray("--batch-size", "8,16,32")
    assert "3 of 3 shards have ended already" in again.err
