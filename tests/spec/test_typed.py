"""Commands that castwise advises are those that the user typed, but for what they change."""

import shlex

import pytest

from castwise.cluster.options import ManyMachinesOptions
from castwise.spec.options import RunOptions
from castwise.spec.typed import advised_line, read_line


def advised(typed: str, shown: str, command: str = "run", **options: str) -> str:
    line = read_line(shlex.split(typed), RunOptions, ManyMachinesOptions)
    return advised_line(command, shown, {"precision": "fp32,tf32", **options}, line)


@pytest.mark.parametrize(
    ("typed", "shown", "words"),
    [
        ("-- python3 -u 'my dir/t.py' --d /d/s", "python t.py --d s", "python3 -u 'my dir/t.py' --d /d/s"),
        ("--rounds 1 -- python sub/t.py --token abc", "python t.py --token HIDDEN", "python sub/t.py --token HIDDEN"),
        ("'python sub/t.py --lr 1'", "python t.py --lr 1", "python sub/t.py --lr 1"),
    ],
)
def test_a_script_is_named_as_it_was_typed(typed: str, shown: str, words: str) -> None:
    assert advised(typed, shown) == f"castwise run --precision fp32,tf32 -- {words}"


@pytest.mark.parametrize(
    ("typed", "shown", "name"),
    [
        ("timm:a.b,sub/m.py resnet50", "m.py:build", "sub/m.py"),
        ("sub/m.py:net --within 1%", "m.py:net", "sub/m.py:net"),
        ("--batch-size 8 resnet50", "resnet50", "resnet50"),
        ("", "mnist-cnn", "mnist-cnn"),
    ],
)
def test_a_model_is_named_as_it_was_typed(typed: str, shown: str, name: str) -> None:
    assert advised(typed, shown) == f"castwise run {name} --precision fp32,tf32"


def test_what_else_was_typed_is_kept() -> None:
    typed = "--results r --again --within=5% --scratch 'my out' --timeout 9s --warm-up=2 --unit tokens --seconds 1"
    kept = "--results r --scratch 'my out' --timeout 9s --warm-up=2 --unit tokens"
    found = advised(f"{typed} --precision fp32 -- python s/t.py", "python t.py", within="1%", unit="tokens")
    assert found == f"castwise run --precision fp32,tf32 --within 1% {kept} --seconds 1 -- python s/t.py"
    assert f"tf32 {kept} -- python s/t.py" in advised(f"{typed} -- python s/t.py", "python t.py", "why")
    accuracy = "castwise accuracy a.py --precision fp32,tf32 --results r --timeout 9s"
    assert advised(f"{typed} a.py", "a.py", "accuracy") == accuracy


def test_a_plan_names_nothing() -> None:
    found = advised("--plan p.json --shard 1/2 --results r", "python t.py")
    assert found == "castwise run --precision fp32,tf32 --results r -- python t.py"
