"""What the forkserver imports, once for all trials.

torch imports `torch._dynamo` when the first optimizer is made, which takes longer than all its other imports.
"""

import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from castwise.records.collector import gc_disabled


@contextmanager
def _without_torchao(name: str) -> Iterator[None]:
    """Keep transformers from importing torchao, which opens the GPU: no process could be forked then.

    The user's code does not name it, so its quantizers are not needed.
    """
    if name.partition(".")[0] != "transformers":
        yield
        return
    utils: Any = importlib.import_module("transformers.utils")
    readers = [(module, module.is_torchao_available) for module in (utils, utils.import_utils)]
    for module, _ in readers:
        module.is_torchao_available = lambda *_, **__: False
    try:
        yield
    finally:
        for module, real in readers:
            module.is_torchao_available = real


# Imports make a million objects that stay. The garbage collector would scan them again and again, which took a tenth of
# the time (torch 2.15, Python 3.11). One collection at the end moves them into the oldest generation, as in an ordinary
# training script, so that collections cost a trial's steps as much as that script's.
with gc_disabled():
    for _name in ("castwise.trial.server", "castwise.trial.models", "torch._dynamo", "torchvision"):
        importlib.import_module(_name)
    for _name in os.environ.pop("CASTWISE_IMPORTS", "").split():  # what the user's model needs
        with suppress(Exception), _without_torchao(_name):  # the trial's process imports it again, and reports errors
            importlib.import_module(_name)
    gc.collect()
