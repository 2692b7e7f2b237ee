import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import castwise
from castwise.errors import UsageError
from castwise.trial.user_model.source import is_users, print_error, user_files, where


def test_is_users() -> None:
    assert is_users(__file__)
    assert is_users("/home/me/train_me.py")
    for file in (json.__file__, torch.__file__, castwise.__file__, "<string>", "", None):
        assert not is_users(file)


def test_packages_installed_into_a_folder_of_any_name_are_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `pip install --target libs` does, and some machines are set up."""
    library = str(tmp_path / "libs" / "pydantic" / "_internal" / "_validate_call.py")
    (tmp_path / "libs" / "pydantic-2.13.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)  # the user's own folder beside it
    assert is_users(library)
    monkeypatch.syspath_prepend(tmp_path / "libs")
    assert not is_users(library)
    assert is_users(str(tmp_path / "train.py"))


def test_what_torch_compile_makes_is_not_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    code = str(tmp_path / "xu" / "cxurdz.py")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert is_users(code)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert not is_users(code)


class Lazy(ModuleType):
    """A module that is imported when it is asked for anything, and cannot be, as libraries make them."""

    def __getattr__(self, name: str) -> object:
        raise ImportError(name)


def test_files_of_modules_are_found_without_importing_lazy_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = Lazy("imported")
    imported.__file__ = "/home/me/imported.py"
    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    monkeypatch.setitem(sys.modules, "imported", imported)
    before = set(sys.modules) - {"lazy", "imported"}
    assert user_files([Path("train.py")], before) == {Path("train.py"), Path("/home/me/imported.py")}


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


def test_a_traceback_begins_with_the_user_s_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    raised = raised_by("def load():\n    return json.loads('{')\n\nload()\n", "/home/me/train_me.py")
    inner = raised.__traceback__
    assert inner is not None
    raised.__traceback__ = inner.tb_next  # the test's own line counts as the user's
    library = raised_by("json.loads('{')", "<string>")
    assert library.__traceback__ is not None
    library.__traceback__ = library.__traceback__.tb_next
    faulty = raised_by("y = = 2\n", "/home/me/train_me.py").with_traceback(None)
    own = UsageError("It returned 3.")
    own.__cause__ = raised
    firsts = []
    for error in (raised, library, faulty, own, UsageError("It returned 3.")):
        print_error(error)
        lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
        firsts.append(next((line for line in lines if line.startswith("File ")), ""))
    assert firsts[0] == firsts[3] == 'File "/home/me/train_me.py", line 4, in <module>'
    assert firsts[1] == 'File "<string>", line 1, in <module>'
    assert firsts[2] == 'File "/home/me/train_me.py", line 1'
    assert firsts[4] == ""
