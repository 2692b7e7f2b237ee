"""What every test on a GPU begins with."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Forget what other tests compiled: a trial has a process of its own, in which no limit of recompiles is near."""
    torch.compiler.reset()
