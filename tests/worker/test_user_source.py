import json

import torch

import castwise
from castwise.worker.user_model.source import is_users, where


def test_is_users() -> None:
    assert is_users(__file__)
    assert is_users("/home/me/train_me.py")
    for file in (json.__file__, torch.__file__, castwise.__file__, "<string>", "", None):
        assert not is_users(file)


def raised_by(code: str, file: str) -> BaseException:
    try:
        exec(compile(code, file, "exec"), {"json": json})
    except (ValueError, SyntaxError) as error:
        return error
    raise AssertionError("nothing was raised")


def test_where_names_the_innermost_user_line() -> None:
    code = "def load():\n    return json.loads('{')\n\nload()\n"
    assert where(raised_by(code, "/home/me/train_me.py")) == "train_me.py:2, in load"
    assert where(raised_by(code, "/tmp/ipykernel_4711/123.py")) == "a notebook's cell:2, in load"


def test_where_of_a_syntax_error() -> None:
    assert where(raised_by("x = 1\ny = = 2\n", "/home/me/train_me.py")) == "train_me.py:2"


def test_where_without_user_code() -> None:
    assert where(ValueError("never raised")) is None
