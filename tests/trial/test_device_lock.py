"""Trials that are set up in parallel: one that times kernels has the device alone, but not while it compiles."""

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch
from programs import PATIENCE_SECONDS

from castwise.trial import device_lock as lock_module
from castwise.trial.device_lock import DeviceLock, device_lock


def hold(connection: Connection, alone: bool) -> None:
    """Hold the lock in another process, forked like a trial, until a message arrives."""
    lock = DeviceLock(alone=alone)
    lock.acquire()
    connection.send("held")
    connection.recv()
    connection.send("letting go")
    lock.close()


class OtherTrial:
    def __init__(self, alone: bool) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=hold, args=(theirs, alone), daemon=True)
        self.process.start()
        assert self.connection.recv() == "held"

    def let_go(self) -> None:
        self.connection.send("let go")
        self.process.join(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("theirs", "ours", "waits"), [(True, True, True), (True, False, True), (False, True, True), (False, False, False)]
)
def test_exclusive_lock(theirs: bool, ours: bool, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "_MAX_WAIT_SECONDS", limit := 0.2 if waits else PATIENCE_SECONDS)
    other = OtherTrial(theirs)
    with device_lock(alone=ours, compiles=False) as lock:
        assert (lock.waited_seconds >= limit) is waits
    other.let_go()
    monkeypatch.setattr(lock_module, "_MAX_WAIT_SECONDS", PATIENCE_SECONDS)
    with device_lock(alone=ours, compiles=False) as lock:
        assert lock.waited_seconds < PATIENCE_SECONDS, "it was to be had"


def test_lock_of_a_dead_process_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "_MAX_WAIT_SECONDS", PATIENCE_SECONDS)
    other = OtherTrial(alone=True)
    other.process.kill()
    other.process.join()
    with device_lock(alone=True, compiles=False) as lock:
        assert lock.waited_seconds < PATIENCE_SECONDS


def test_lock_is_released_while_compiling() -> None:
    free: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        free.append(is_free())
        torch._dynamo.utils.counters["inductor"].update(fxgraph_cache_miss=1, fxgraph_cache_hit=2)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.sin() + 1, backend=backend)
    with device_lock(alone=True, compiles=True) as lock:
        assert not is_free()
        compiled(torch.ones(3))
        assert lock.compile_seconds > 0
        assert (lock.compiled_graphs, lock.loaded_graphs) == (1, 2)
        assert free == [True]
        assert not is_free(), "taken again for what follows"
    assert is_free()


def is_free() -> bool:
    other = DeviceLock(alone=True)
    try:
        return other.try_acquire()
    finally:
        other.close()


def test_without_a_lock_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "_FILE", None)
    with device_lock(alone=True, compiles=False), device_lock(alone=True, compiles=False) as second:
        assert second.waited_seconds == 0.0
