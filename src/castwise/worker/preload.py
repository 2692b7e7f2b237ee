"""What the server imports that trials are forked from: once for all of them, and before the first.

torch imports `torch._dynamo` when the first optimizer is made, which takes longer than all the rest of it: in the
server it is there for every trial.
"""

import gc
import importlib

from castwise.records.collector import gc_disabled

# The worker pulls in torch.
_MODULES = ("castwise.worker.server", "castwise.worker.models", "torch._dynamo", "torchvision")

# Imports make a million objects that stay: the collector would go over them again and again while they are made, which
# took a tenth of the time (torch 2.15, Python 3.11). Once at the end it puts them where a training script of one's own
# has them, so that what it costs a trial's steps is what it costs that script's.
with gc_disabled():
    for _name in _MODULES:
        importlib.import_module(_name)
    gc.collect()
