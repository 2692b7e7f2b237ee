"""Notes the losses of a script at `backward`, in its own process or castwise's: Python imports this by its name.

NOTED is the folder for them; the n-th loss is the last one if NOTED_ENDS is set: the process ends there.
"""

import os
import sys
from importlib.machinery import PathFinder

NUM_NOTED = 12


def note(autograd):
    as_written, counts = autograd.backward, {}

    def backward(tensors, *args, **kwargs):
        count = counts[os.getpid()] = counts.get(os.getpid(), 0) + 1
        if count <= NUM_NOTED:
            hooks = sys.modules.get("castwise.trial.script.hooks")
            precision = hooks._installed[0].precision.row.name if hooks and hooks._installed else "alone"
            losses = [tensors] if hasattr(tensors, "item") else tensors
            line = " ".join(float(loss.detach().float().sum()).hex() for loss in losses)
            log = os.open(f"{os.environ['NOTED']}/{precision} {os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(log, f"{line}\n".encode())
            os.close(log)
        if count == NUM_NOTED and "NOTED_ENDS" in os.environ:
            os._exit(0)
        return as_written(tensors, *args, **kwargs)

    autograd.backward = backward


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "torch.autograd":
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            note(module)

        spec.loader.exec_module = exec_module
        return spec


if "NOTED" in os.environ:
    sys.meta_path.insert(0, Finder())
