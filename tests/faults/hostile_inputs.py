"""Hostile inputs, each from a seed: records, suite files, command lines and names.

Each function raises something other than SystemExit if castwise did not hold.
"""

import contextlib
import io
import json
import random
import sys
import unicodedata
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine, fake_spec, fake_trial

from castwise.cli import app
from castwise.errors import UsageError
from castwise.orchestrator import machine
from castwise.records.store import read_records
from castwise.registry.datasets import find_data_set
from castwise.registry.precisions import find_precision
from castwise.registry.suites import SUITE_NAMES, parse_suite
from castwise.registry.techniques import parse_techniques
from castwise.registry.workloads import find_workload
from castwise.spec.quantities import parse_count, parse_duration, parse_memory, parse_numbers, parse_share
from castwise.spec.user_model import locate

_TEXTS = (
    "",
    " ",
    "\x1b]0;x\x07",
    "\x9b2J",
    "=1+1",
    "\u202e",
    "a" * 5000,
    "../../x",
    "/dev/zero",
    "\0",
    "%s{0}",
    "💥",
    "-",
)
_NUMBERS = (0, -1, 10**18, 10**400, 1e308, -1e-308, float("nan"), float("inf"), 2**63, True, None)
_OTHERS: tuple[Any, ...] = ([], {}, [[[]]], {"a": {"b": []}}, ["x"] * 100, [None], *_TEXTS, *_NUMBERS)


def _is_harmless(text: str) -> bool:
    return not any(unicodedata.category(each) in ("Cc", "Cs") and each not in "\n\t\r" for each in text)


def _mutated(rng: random.Random, value: Any) -> Any:
    """Return a JSON document, one of its values changed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {key: each for key, each in value.items() if key != name}
        return {**value, name: _mutated(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        index = rng.randrange(len(value))
        return [*value[:index], _mutated(rng, value[index]), *value[index + 1 :]]
    return rng.choice(_OTHERS)


def _damaged(rng: random.Random, content: bytes) -> bytes:
    """Return bytes, a few of them changed."""
    start = rng.randrange(len(content))
    kind = rng.randrange(4)
    if kind == 0:
        return content[:start]
    middle = (b"", rng.randbytes(rng.randint(1, 8)), rng.choice([*map(str.encode, _TEXTS[:-2]), b"[" * 2000]))[kind - 1]
    return content[:start] + middle + content[start + rng.randint(0, 8) :]


_RECORD = json.loads(fake_trial(fake_spec()).model_dump_json())


def record(rng: random.Random, folder: Path) -> None:
    """Read a record that was changed; if it still is one, print a report of it."""
    value = _RECORD
    for _ in range(rng.randint(1, 3)):
        value = _mutated(rng, value)
    content = json.dumps(value).encode()
    file = folder / "record.json"
    file.write_bytes(_damaged(rng, content) if rng.random() < 0.3 else content)
    records, _ = read_records([file])
    if records:
        arguments = rng.choice(
            (("report", str(file), "--format", "table"), ("export", str(file)), ("compare", str(file)))
        )
        _call(arguments)


def suite_file(rng: random.Random, folder: Path) -> None:
    """Read a suite file that was changed."""
    del folder
    name = rng.choice(SUITE_NAMES)
    content = resources.files("castwise").joinpath("suites", f"{name}.toml").read_bytes()
    for _ in range(rng.randint(1, 3)):
        content = _damaged(rng, content) or b"x"
    with contextlib.suppress(UsageError):
        parse_suite(content.decode(errors="replace"), "mine.toml")


_WORDS = (
    *("run", "tune", "max-batch", "suite", "report", "compare", "export", "init", "list", "resnet50", "mnist-cnn"),
    *(
        "--precision",
        "fp32",
        "fp32,bf16-mixed",
        "--batch-size",
        "8",
        "1e9",
        "--rounds",
        "1",
        "--within",
        "1%",
        "--budget",
    ),
    *(
        "2s",
        "--seconds",
        "--techniques",
        "none,tuned",
        "channels-last",
        "--gpus",
        "--device",
        "cpu",
        "cuda:99",
        "--format",
    ),
    *(
        "--format",
        "json",
        "csv",
        "markdown",
        "table",
        "--wide",
        "--verbose",
        "-o",
        "x.html",
        "r",
        "published:T4",
        "tensorcore",
    ),
    *(
        "--quick",
        "--synthetic",
        "--seeds",
        "--level",
        "blocks",
        "--title",
        "--help",
        "pickle:x",
        "transformers:y",
        "\udcff.py",
    ),
    *(
        "--memory",
        "--margin",
        "nan",
        "inf",
        "-1",
        "0",
        "--",
        "--data-set",
        "mnist",
        "--again",
        "--retry",
        "torchvision:z",
        "\udcff.py",
    ),
)


def command_line(rng: random.Random, folder: Path) -> None:
    """Call the command line with random words, on the fake engine."""
    with contextlib.chdir(folder):
        words = [
            rng.choice(_WORDS) if rng.random() < 0.85 else rng.choice(_TEXTS[:-1]) for _ in range(rng.randint(1, 7))
        ]
        _call([rng.choice(_WORDS[:9]), *words], measures=True)


def name(rng: random.Random, folder: Path) -> None:
    """Read names, numbers and quantities as users write them."""
    del folder
    text = "".join(rng.choice("0123456789.,:;e+-%/ \x1bxsmhGiBkK_\u0660²·♥") for _ in range(rng.randint(0, 12)))
    text = rng.choice((text, rng.choice(_TEXTS), rng.choice(_WORDS) + text))
    readers: tuple[Callable[[str], object], ...] = (
        *(find_workload, find_precision, find_data_set, parse_techniques, locate),
        *(lambda given, reader=reader: reader("--x", given) for reader in (parse_count, parse_duration, parse_memory)),
        *(lambda given, reader=reader: reader("--x", given) for reader in (parse_numbers, parse_share)),
    )
    for reader in readers:
        with contextlib.suppress(UsageError):
            reader(text)


def _call(arguments: Any, *, measures: bool = False) -> None:
    engine = FakeEngine(exclusive=False)
    machine.ForkserverEngine = lambda data_dir, commit: engine  # type: ignore[misc, assignment]
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["castwise", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
            app.main()
    finally:
        sys.argv = before
    assert engine.num_open == 0 or not measures, "a session was left open"
    assert _is_harmless(out.getvalue()), repr(out.getvalue())
    assert _is_harmless(err.getvalue()), repr(err.getvalue())


INPUTS: dict[str, Callable[[random.Random, Path], None]] = {
    "records": record,
    "suite files": suite_file,
    "command lines": command_line,
    "names, numbers and quantities": name,
}
