"""Climbs on several GPUs, with a command that only says what it was told."""

import json
import sys
import time
from pathlib import Path

import pytest
from climb_streams import Asked, Streams

FAKE = """
import json, os, sys, time
name = sys.argv[2]
time.sleep(0.3)
if name == "broken":
    sys.exit("no such workload")
print(json.dumps({"told": sys.argv[1:], "gpu": os.environ["CUDA_VISIBLE_DEVICES"], "at": time.time(), "trials": [1]}))
"""


def streams(folder: Path, seconds: float = 60.0) -> Streams:
    return Streams([sys.executable, "-c", FAKE], ("3", "5"), folder, time.monotonic() + seconds)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("resnet50", ["resnet50"]),
        ("resnet50@330s+8GiB", ["resnet50", "--budget", "330s", "--memory", "8GiB"]),
        ("resnet50+8GiB", ["resnet50", "--memory", "8GiB"]),
    ],
)
def test_a_climb_is_named_with_its_budget_and_memory(text: str, options: list[str]) -> None:
    assert Asked.parse(text).options() == options


def test_each_climb_has_a_gpu_and_its_account_is_kept_without_the_trials(tmp_path: Path) -> None:
    names = ["one", "two", "three"]
    assert streams(tmp_path).run([Asked.parse(name) for name in names]) == dict.fromkeys(names, "ok")
    accounts = [json.loads((tmp_path / f"{name}.json").read_text()) for name in names]
    assert {accounts[0]["gpu"], accounts[1]["gpu"]} == {"3", "5"}
    assert accounts[2]["gpu"] in {"3", "5"}
    assert accounts[2]["at"] > min(account["at"] for account in accounts[:2]), "it waited for a GPU"
    for name, account in zip(names, accounts, strict=True):
        assert account["told"] == ["tune", name, "--results", str(tmp_path / name), "--format", "json"]
        assert "trials" not in account


def test_a_climb_that_fails_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    ends = streams(tmp_path).run([Asked("broken"), Asked("one")])
    assert ends == {"broken": "ended with 1: ['no such workload']", "one": "ok"}


def test_nothing_is_begun_when_the_time_is_up(tmp_path: Path) -> None:
    assert streams(tmp_path, seconds=0).run([Asked("one")]) == {"one": "no time was left"}
