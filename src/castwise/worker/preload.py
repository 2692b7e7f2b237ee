"""What the forkserver imports, once for all trials.

torch imports `torch._dynamo` when the first optimizer is made, which takes longer than all its other imports.
"""

import gc
import importlib
import os
from contextlib import suppress

from castwise.records.collector import gc_disabled

# Imports make a million objects that stay. The garbage collector would scan them again and again, which took a tenth of
# the time (torch 2.15, Python 3.11). One collection at the end moves them into the oldest generation, as in an ordinary
# training script, so that collections cost a trial's steps as much as that script's.
with gc_disabled():
    for _name in ("castwise.worker.server", "castwise.worker.models", "torch._dynamo", "torchvision"):
        importlib.import_module(_name)
    for _name in os.environ.pop("CASTWISE_IMPORTS", "").split():  # what the user's model needs
        with suppress(Exception):  # the trial's process imports it again, and reports what it raises
            importlib.import_module(_name)
    gc.collect()
