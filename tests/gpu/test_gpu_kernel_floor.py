"""Products timed alone on a GPU: in a graph, over copies, and no faster than any GPU could."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from goal_turns import HERE
from kernel_products import PARTS, Product, Window
from kernel_times import Manner, time_way, ways_of

pytestmark = pytest.mark.gpu

MOST_FLOPS_PER_SECOND = 1e16  # more than any GPU has


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("kernel", "groups"), [(3, 1), (1, 1), (3, 64)])
def test_every_way_of_a_convolution_is_captured(part: str, kernel: int, groups: int) -> None:
    window = Window((1, 1), (kernel // 2, kernel // 2), (1, 1), groups)
    shapes = ((16, 64, 28, 28), (64, 64 // groups, kernel, kernel), (16, 64, 28, 28))
    product = Product("convolution", part, shapes, window)
    manner = Manner(torch.device("cuda", 0), torch.bfloat16)
    for way in ways_of(product):
        assert time_way(way, product, manner, 0.0) > product.flops / MOST_FLOPS_PER_SECOND


@pytest.mark.timeout(300)
def test_a_row_is_timed_whole_within_its_budget(tmp_path: Path) -> None:
    out = tmp_path / "floor.json"
    command = [sys.executable, str(HERE / "kernel_floor.py"), "--rows", "wrn", "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stderr
    (found,) = json.loads(out.read_text())["rows"]
    assert not any(each["failed"] for each in found["products"])
    assert "not timed" not in result.stdout
    assert found["seconds"] < 60
