import ast
from pathlib import Path

import pytest
from conftest import CommandLine

from castwise.cli.init_template import STARTER, write_starter
from castwise.errors import UsageError
from castwise.trial.user_model.contract import NAMES


def test_the_starter_names_all_that_a_model_may_have(tmp_path: Path) -> None:
    file = tmp_path / "my_bench.py"
    write_starter(file)
    text = file.read_text()
    ast.parse(text)
    assert "castwise run my_bench.py" in text
    assert all(f'"{name}"' in text for name in NAMES)
    assert all(len(line) <= 120 for line in text.splitlines())


def test_commented_lines_of_the_starter_are_code() -> None:
    lines = STARTER.format(file="x.py", function="build").splitlines()
    ast.parse("\n".join(line.replace('# "', '"', 1) for line in lines))


def test_a_file_that_is_there_stays_as_it_is(tmp_path: Path, unwritable: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        write_starter(file)
    assert file.read_text() == "mine"
    with pytest.raises(UsageError, match=r"is no name of a Python file. Write for example mine\.py"):
        write_starter(tmp_path / "mine.txt")
    with pytest.raises(UsageError, match="cannot be written"):
        write_starter(unwritable / "mine.py")


def test_init_says_how_to_run_it(command: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "my_bench.py"
    done = command("init", file)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"Wrote {file}. It runs as it is: castwise run {file}\n"
    again = command("init", file)
    assert (again.code, again.out) == (2, "")
    assert again.error_lines == [f"castwise: '{file}' exists already, and is left as it is. Name another file."]
