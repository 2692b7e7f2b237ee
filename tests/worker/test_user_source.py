import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import castwise
from castwise.worker.user_model.source import digest, is_users, where


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


def test_whose_a_file_is() -> None:
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


def test_the_innermost_line_of_the_users_is_named() -> None:
    code = "def load():\n    return json.loads('{')\n\nload()\n"
    assert where(raised_by(code, "/home/me/train_me.py")) == "train_me.py:2, in load"
    assert where(raised_by(code, "/tmp/ipykernel_4711/123.py")) == "a notebook's cell:2, in load"


def test_a_syntax_error_is_where_it_stands() -> None:
    assert where(raised_by("x = 1\ny = = 2\n", "/home/me/train_me.py")) == "train_me.py:2"


def test_what_only_libraries_raise_is_nowhere() -> None:
    assert where(ValueError("never raised")) is None


def test_a_digest_stands_for_every_file_of_the_users(tmp_path: Path) -> None:
    file, other = tmp_path / "train_me.py", tmp_path / "net.py"
    file.write_text("import net")
    other.write_text("width = 3")

    def now(*, imported: bool) -> str:
        before = set(sys.modules)
        if imported:
            module: Any = ModuleType("net")
            module.__file__ = str(other)
            sys.modules["net"] = module
        try:
            return digest([file], before)
        finally:
            sys.modules.pop("net", None)

    alone, both = now(imported=False), now(imported=True)
    assert len(alone) == len(both) == 12
    assert alone != both
    assert now(imported=True) == both
    other.write_text("width = 4")
    assert now(imported=True) != both
    assert now(imported=False) == alone
    file.write_text("import net  # edited")
    assert now(imported=False) != alone
