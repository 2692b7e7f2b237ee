"""Programs that run Triton's kernels on the CPU."""

import os
import subprocess
import sys
import textwrap

import pytest

# Before torch 2.8, wrap_triton refuses kernels that are interpreted.
_WRAPS_NOTHING = """
import torch.library
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8):
    torch.library.wrap_triton = lambda kernel: kernel
"""


def run_interpreted(program: str) -> "subprocess.CompletedProcess[str]":
    """Run a program in Triton's interpreter, in a process of its own: Triton decides at import whether it interprets.

    Skips the test where Triton is not installed.
    """
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", _WRAPS_NOTHING + textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
