"""Programs that run Triton's kernels on the CPU."""

import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import SOURCES
from scripts import run_forked


def interpreted(test: Callable[[], None]) -> Callable[[], None]:
    """Mark a test that interprets kernels, which is slow; one process imports torch for all."""
    return pytest.mark.slow(pytest.mark.xdist_group("interpreted kernels")(test))


def run_interpreted(program: str) -> tuple[str, str]:
    """Return what a program prints in Triton's interpreter, and its errors.

    It is run in a process of its own: Triton decides at import whether it interprets. Skips the test without Triton.
    """
    pytest.importorskip("triton")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(textwrap.dedent(program))
        return run_forked(file, text="", TRITON_INTERPRET="1", PYTHONPATH=str(SOURCES))
