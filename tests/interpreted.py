"""Programs that run Triton's kernels on the CPU."""

import os
import subprocess
import sys
import textwrap

import pytest


def run_interpreted(program: str) -> "subprocess.CompletedProcess[str]":
    """Run a program in Triton's interpreter, in a process of its own: Triton decides at import whether it interprets.

    Skips the test where Triton is not installed.
    """
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
