"""Runs scripts as `python FILE` does, each in a fork of a process that has imported what takes seconds.

A line of JSON on stdin names the command, its folder and the files for its output; a line on stdout says how it ended.
"""

import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

_MODULES = ("torch", "torch._dynamo", "torch.optim")  # an optimizer imports the second
# What scripts need besides, by the text that tells of it; imported before the first script that has the text.
_MORE_MODULES = {
    ".compile(": "torch._inductor.compile_fx",
    "torchao": "torchao.float8",
    "torchvision": "torchvision.models",
    "timm": "timm",
    "transformers": "transformers.modeling_utils",
    "lightning": "lightning",
}
_TRACED = str(Path(__file__).with_name("traced.py"))


def serve() -> None:
    """Carry out requests until there are none."""
    for name in _MODULES:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        for text, name in _MORE_MODULES.items():
            if text in request["text"]:
                importlib.import_module(name)
        if request["traced"]:
            runpy.run_path(_TRACED)  # imports the rest of the compiler
        gc.freeze()  # a child's collections leave these pages shared
        child = os.fork()
        if child == 0:
            _become(request)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(request: dict[str, Any]) -> NoReturn:
    """Run a script in this process, as its only task, and end."""
    os.chdir(request["folder"])
    for number, name in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    sys.argv = request["command"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    code = 1
    if request["traced"]:
        runpy.run_path(_TRACED)["trace_only"]()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  as the interpreter prints it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
