"""What the forkserver imports, once for all trials.

torch imports `torch._dynamo` when the first optimizer is made, which takes longer than all its other imports.
"""

import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

from castwise.records.collector import gc_disabled
from castwise.registry.trackers import TRACKER_MODES


@contextmanager
def _without_torchao(name: str) -> Iterator[None]:
    """Keep transformers from importing torchao, which opens the GPU: no process could be forked then.

    The user's code does not name it, so its quantizers are not needed. What its modules keep for later, such as for an
    optimizer's name, tells the truth then.
    """
    is_importing = [True]
    with ExitStack() as stack:
        if name.partition(".")[0] == "transformers":
            utils: Any = importlib.import_module("transformers.utils")
            is_there = utils.is_torchao_available

            def is_told(*args: Any, **named: Any) -> bool:
                return not is_importing and is_there(*args, **named)

            for module in (utils, utils.import_utils):
                stack.enter_context(patch.object(module, "is_torchao_available", is_told))
            stack.callback(is_importing.clear)  # after an import that failed, too
        yield


def _as_for_a_script() -> AbstractContextManager[object]:
    """Set the variables that a script's process has, and let torch count GPUs without opening them."""
    modes = {name: value for variables in TRACKER_MODES.values() for name, value in variables.items()}
    return patch.dict(os.environ, {**modes, **os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"})


def _can_be_forked() -> bool:
    """Return whether trials can be forked from this process: it has one thread, and a child of it can open the GPU."""
    import torch

    if threading.active_count() > 1:
        return False
    child = os.fork()
    if child == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(child, 0)[1] == 0


# Imports make a million objects that stay. The garbage collector would scan them again and again, which took a tenth of
# the time (torch 2.15, Python 3.11). One collection at the end moves them into the oldest generation, as in an ordinary
# training script, so that collections cost a trial's steps as much as that script's.
with gc_disabled():
    for _name in ("castwise.trial.server", "castwise.trial.models", "torch._dynamo", "torchvision"):
        importlib.import_module(_name)
    _names = os.environ.pop("CASTWISE_IMPORTS", "").split()  # what the user's model needs
    for _name in _names:
        _module, _, _part = _name.partition(":")
        # The trial's process imports it again, and reports errors.
        with suppress(Exception), _without_torchao(_module), _as_for_a_script():
            getattr(importlib.import_module(_module), _part or "__name__")
    gc.collect()
if _names and "multiprocessing.forkserver" in " ".join(sys.orig_argv) and not _can_be_forked():
    os.environ["CASTWISE_PARENT"] = str(os.getppid())
    os.execv(sys.executable, sys.orig_argv)  # begins again without them
