"""Trials that are set up in parallel: one that times kernels has the devices alone, but not while it compiles."""

import multiprocessing
import sys
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest
import torch
from programs import PATIENCE_SECONDS

from castwise.trial import device_lock as lock_module
from castwise.trial.device_lock import DeviceLock, device_lock


def hold(connection: Connection, trial: str | None) -> None:
    """Hold the lock in another process, forked like a trial, until a message arrives."""
    lock = DeviceLock(trial)
    lock.acquire()
    connection.send(lock.waited_seconds)
    connection.recv()
    connection.send("letting go")
    lock.release()


class OtherProcess:
    def __init__(self, trial: str | None) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=hold, args=(theirs, trial), daemon=True)
        self.process.start()
        assert self.connection.recv() == 0.0

    def let_go(self) -> None:
        self.connection.send("let go")
        self.process.join(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("theirs", "ours", "waits"),
    [("a", "b", True), ("a", None, True), (None, "b", True), (None, None, False), ("a", "a", False)],
)
def test_processes_of_one_trial_share_the_lock(
    theirs: str | None, ours: str | None, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "_MAX_WAIT_SECONDS", limit := 0.2 if waits else PATIENCE_SECONDS)
    other = OtherProcess(theirs)
    with device_lock(ours, compiles=False) as lock:
        assert (lock.waited_seconds >= limit) is waits
    other.let_go()
    monkeypatch.setattr(lock_module, "_MAX_WAIT_SECONDS", PATIENCE_SECONDS)
    with device_lock(ours, compiles=False) as lock:
        assert lock.waited_seconds < PATIENCE_SECONDS, "it was to be had"


def test_another_trial_waits_for_the_last_rank() -> None:
    ranks = [OtherProcess("a"), OtherProcess("a")]
    assert not is_free()
    ranks[0].let_go()
    assert not is_free()
    ranks[1].let_go()
    assert is_free()


def test_ranks_of_two_trials_take_turns_and_none_waits_forever() -> None:
    """A rank holds the lock until the other rank of its trial holds it, too, as in a collective of a step."""
    context = multiprocessing.get_context("fork")
    meetings = [context.Barrier(2), context.Barrier(2)]
    inside = context.Array("i", 2)
    processes = [context.Process(target=meet, args=(trial, meetings, inside)) for trial in (0, 1, 1, 0)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_SECONDS)
    assert [process.exitcode for process in processes] == [0] * 4


def meet(trial: int, meetings: list[Barrier], inside: Any) -> None:
    for _ in range(20):
        with device_lock(f"{trial}", compiles=False) as lock:
            with inside.get_lock():
                inside[trial] += 1
                assert not inside[1 - trial]
            meetings[trial].wait(PATIENCE_SECONDS)
            assert not inside[1 - trial]
            meetings[trial].wait(PATIENCE_SECONDS)
            with inside.get_lock():
                inside[trial] -= 1
        assert lock.waited_seconds < PATIENCE_SECONDS


def test_lock_of_a_dead_process_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "_MAX_WAIT_SECONDS", PATIENCE_SECONDS)
    other = OtherProcess("a")
    other.process.kill()
    other.process.join()
    with device_lock("b", compiles=False) as lock:
        assert lock.waited_seconds < PATIENCE_SECONDS


def test_lock_is_released_while_compiling() -> None:
    free: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        free.append(is_free())
        torch._dynamo.utils.counters["inductor"].update(fxgraph_cache_miss=1, fxgraph_cache_hit=2)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.sin() + 1, backend=backend)
    with device_lock("a", compiles=True) as lock:
        assert not is_free()
        compiled(torch.ones(3))
        assert lock.compile_seconds > 0
        assert (lock.compiled_graphs, lock.loaded_graphs) == (1, 2)
        assert free == [True]
        assert not is_free(), "taken again for what follows"
    assert is_free()


def is_free() -> bool:
    """Return whether another process could have the lock."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=try_once)
    process.start()
    process.join(PATIENCE_SECONDS)
    return process.exitcode == 0


def try_once() -> None:
    sys.exit(0 if DeviceLock("b").try_acquire() else 1)


def test_without_a_lock_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "_FILE", None)
    with device_lock("a", compiles=False), device_lock("b", compiles=False) as second:
        assert second.waited_seconds == 0.0
