"""Python's garbage collector, where it has nothing to find."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Keep Python from looking for cycles, which records have none of: it would look at all of them, ever again.

    Reading 10,000 trials takes a third of the time without it (benchmarks/store_scaling.py).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
