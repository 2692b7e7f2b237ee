"""What trials find imported in the process they are forked from."""

import gc
import multiprocessing
import sys
from multiprocessing.connection import Connection

from programs import PATIENCE_SECONDS

from castwise.orchestrator.processes import _PRELOAD


def tell(connection: Connection) -> None:
    few_young = gc.get_count()[0] < gc.get_threshold()[0] * 10
    connection.send((gc.isenabled(), gc.get_freeze_count() == 0 and few_young, "torch._dynamo" in sys.modules))


def test_trials_start_with_imports_and_garbage_collector() -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(target=tell, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(PATIENCE_SECONDS)
    assert ours.recv() == (True, True, True)
    process.join(PATIENCE_SECONDS)
