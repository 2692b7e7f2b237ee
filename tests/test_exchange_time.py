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

from castwise.spec.plan import TrialSpec
from castwise.worker.distributed import Peers

CPU = torch.device("cpu")


class Doubling(Peers):
    """Averages by doubling, so that it shows."""

    def all_reduce_mean(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)


def spec_of(workload: str) -> TrialSpec:
    return TrialSpec(workload=workload, precision="bf16-master", loss_scale="none", batch_size=1, device="cpu")


def test_each_part_does_its_share_of_the_whole() -> None:
    peers = Doubling()
    reduce = make_reduce(spec_of("wrn-28-10"), CPU, peers)
    parts = dict(parts_of(reduce, CPU, peers))
    assert list(parts) == ["copy", "collectives", "largest", "whole"]
    flat = parts["collectives"].__self__.flat  # type: ignore[attr-defined]
    large, small = sorted(flat, key=lambda each: -each.numel())
    assert (large.dtype, small.dtype) == (torch.bfloat16, torch.float32), "batch norm's are of 32 bits"
    for each in flat:
        each.fill_(1)
    for name, expected in {"collectives": [2, 2], "largest": [4, 2]}.items():
        parts[name]()
        assert [float(each.max()) for each in (large, small)] == expected, name
    parts["copy"]()
    assert sum(int(each.count_nonzero()) for each in flat) < sum(map(len, flat)) / 100, "between the places alone"
    for weight in (weight for group in reduce._groups for weight in group):
        assert weight.grad is not None
        weight.grad.fill_(1)
    parts["whole"]()
    gradients = [weight.grad for group in reduce._groups for weight in group]
    assert all(gradient is not None and not gradient.any() for gradient in gradients), "zeros, averaged"


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
