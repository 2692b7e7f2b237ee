"""What the server imports that trials are forked from: once for all of them, and before the first.

torch imports `torch._dynamo` when the first optimizer is made, which takes longer than all the rest of it: in the
server it is there for every trial.
"""

import atexit
import gc
import importlib

from castwise.garbage import without_collector

# The worker pulls in torch.
_MODULES = ("castwise.measure.worker", "castwise.measure.workloads", "torch._dynamo", "torchvision")

# Imports make a million objects that stay: the collector would go over them again and again while they are made, which
# took a tenth of the time (torch 2.15, Python 3.11), and once more in every trial.
# Source: docs.python.org/3.11/library/gc.html (gc.freeze, on processes that fork).
with without_collector():
    for _name in _MODULES:
        importlib.import_module(_name)
    gc.freeze()
# The server's own end is an ordinary one, and libraries that count their objects complain of those still frozen.
atexit.register(gc.unfreeze)
