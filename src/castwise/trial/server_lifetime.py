"""What the forkserver imports first: it ends with its parent at once, and takes all processes below it along.

multiprocessing's server notices its parent's end when it waits for requests, not while it imports torch for seconds.
"""

import atexit
import os
import warnings
from contextlib import suppress
from pathlib import Path

from castwise.trial import lifetime

_SERVER = os.getpid()
_PARENT = int(os.environ.pop("CASTWISE_PARENT", os.getppid()))  # its parent now may be whoever adopted it


def _is_child_of_main_thread() -> bool:
    """Return whether the parent's main thread started this process: to the kernel, the parent is that thread."""
    with suppress(OSError):
        if str(_SERVER) in Path(f"/proc/{_PARENT}/task/{_PARENT}/children").read_text().split():
            return True
    return os.getppid() != _PARENT  # it has gone already, if only nobody has waited for it yet


def _before_fork() -> None:
    """From now on the server itself ends those below it: it waits for requests, and for its parent's end."""
    if os.getpid() == _SERVER:
        lifetime.prctl(lifetime.PR_SET_PDEATHSIG, 0)
        atexit.unregister(_end)
        atexit.register(_end)  # this late it is the first to be run: those of torch's modules take a while


def _end() -> None:
    if os.getpid() == _SERVER:
        lifetime.kill_descendants(_SERVER)
        os._exit(0)


lifetime.prctl(lifetime.PR_SET_CHILD_SUBREAPER, 1)
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # an orphan that it adopted
if _is_child_of_main_thread():
    lifetime.kill_when_parent_dies(_PARENT)
os.register_at_fork(before=_before_fork)
