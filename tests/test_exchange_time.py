"""The parts of `coalesced-reduce`, which a CPU tries and does not time."""

import json
import sys
from pathlib import Path
from typing import Any

import exchange_time
import pytest
import torch
from exchange_tables import exchange_table
from exchange_time import make_reduce, parts_of

from castwise.measure.parallel import Peers
from castwise.plan import TrialSpec

CPU = torch.device("cpu")


class Doubling(Peers):
    """Averages by doubling, so that it shows."""

    def average(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)


def spec_of(workload: str) -> TrialSpec:
    return TrialSpec(workload=workload, precision="bf16-master", loss_scale="none", batch_size=1, device="cpu")


def test_each_part_does_its_share_of_the_whole() -> None:
    peers = Doubling()
    reduce = make_reduce(spec_of("wrn-28-10"), CPU, peers)
    parts = dict(parts_of(reduce, CPU, peers))
    assert list(parts) == ["copy", "mean", "collectives", "largest", "whole"]
    large, small = sorted(reduce._buckets, key=lambda bucket: -bucket._flat.numel())
    assert (large._flat.dtype, small._flat.dtype) == (torch.bfloat16, torch.float32), "batch norm's are of 32 bits"
    for bucket in (large, small):
        bucket._flat.fill_(1)
    for name, expected in {"mean": [2, 2], "collectives": [4, 4], "largest": [8, 4], "copy": [0, 0]}.items():
        parts[name]()
        assert [float(bucket._places[-1].max()) for bucket in (large, small)] == expected, name
    for bucket in (large, small):
        bucket._flat.fill_(1)
    parts["whole"]()
    assert [float(bucket._places[-1].max()) for bucket in (large, small)] == [0, 0], "gradients of zeros, averaged"


def test_a_run_is_kept_with_every_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(spec: TrialSpec, settings: str) -> dict[str, Any]:
        return {"nccl": settings, "seconds": {"copy": 3e-5, "two-shot": None}, "ranks": spec.world_size}

    out = tmp_path / "exchange.json"
    monkeypatch.setattr(exchange_time, "measure", measured)
    asked = ["--device", "cpu", "--gpus", "2", "--nccl", "MIN_NCHANNELS=32", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["exchange_time.py", *asked])
    assert exchange_time.main() == 0
    document = json.loads(out.read_text())
    assert [(run["nccl"], run["ranks"]) for run in document["runs"]] == [("", 2), ("MIN_NCHANNELS=32", 2)]
    lines = exchange_table(out.rename(tmp_path / "2026-11-22-exchange.json")).splitlines()
    assert "2026-11-22" in lines[0]
    assert lines[-2:] == ["| as it is | 30.0 µs | – |", "| MIN_NCHANNELS=32 | 30.0 µs | – |"]
