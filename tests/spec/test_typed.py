"""Commands that castwise advises are those that the user typed, but for what they change."""

import shlex

import pytest

from castwise.spec.options import RunOptions, options_of
from castwise.spec.typed import advised_line, read_line


def advised(typed: str, shown: str) -> str:
    line = read_line(shlex.split(typed), list(options_of(RunOptions)))
    return advised_line("run", shown, {"precision": "fp32,tf32"}, line)


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
        ("sub/m.py:net --device cpu", "m.py:net", "sub/m.py:net"),
        ("--batch-size 8 resnet50", "resnet50", "resnet50"),
        ("", "mnist-cnn", "mnist-cnn"),
    ],
)
def test_a_model_is_named_as_it_was_typed(typed: str, shown: str, name: str) -> None:
    assert advised(typed, shown) == f"castwise run {name} --precision fp32,tf32"
