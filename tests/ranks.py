"""Ranks of a `ddp` trial as processes of their own, for tests of what they do together."""

import multiprocessing
import os
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from programs import PATIENCE_SECONDS

from castwise.orchestrator.processes import _PRELOAD
from castwise.spec.trial import MeasurementProtocol, TrialSpec, device_of_rank
from castwise.trial.distributed import Peers, join_peers
from castwise.trial.lifetime import kill_when_parent_dies

Work = Callable[[Peers, Path], Any]


def answers_of(work: Work, spec: TrialSpec, folder: Path) -> list[Any]:
    """Return what each rank has to show, by rank.

    Args:
        work: What each does, a function of a module; in one process, so that torch is imported once.
        spec: Says how many ranks there are, and the device of the first.
        folder: Where they meet; work may write there too.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    pipes = [context.Pipe() for _ in range(spec.world_size)]
    processes = [
        context.Process(target=_be_rank, args=(work, spec, rank, folder, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()  # so that the end of a rank is the end of its pipe
    try:
        for ours, _ in pipes:
            assert ours.poll(PATIENCE_SECONDS), "a rank has not answered"
        return [pickle.loads(ours.recv_bytes()) for ours, _ in pipes]
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def _be_rank(work: Work, spec: TrialSpec, rank: int, folder: Path, connection: Connection) -> None:
    kill_when_parent_dies(os.getppid())
    own = {"device": device_of_rank(spec.device, rank), "protocol": MeasurementProtocol()}
    peers = join_peers(spec.model_copy(update=own), rank, (folder / "rendezvous").as_uri())
    shown = work(peers, folder)
    peers.close()  # before the answer: what hangs here must not pass
    # Plain pickling: what a connection does to tensors by itself needs this process to live until they are read.
    connection.send_bytes(pickle.dumps(shown))
