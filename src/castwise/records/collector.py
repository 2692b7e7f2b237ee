"""Switch Python's garbage collector off while records are read."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Switch the garbage collector off: records contain no cycles, and it would search all of them again and again.

    Reading 10,000 trials takes a third of the time without it (benchmarks/store_scaling.py).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
