"""A rank of a script that is traced: the first one runs, in a group that pretends the others, which only wait."""

import os
import runpy
import signal

if __name__ == "__main__":
    if os.environ.get("RANK", "0") != "0":
        signal.pause()  # without PyTorch, whose import takes a CPU that the first one needs
    runpy.run_module("castwise.trial.rank", run_name="__main__")
