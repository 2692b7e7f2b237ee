"""A rank of a script that a launcher started: what runs there, as a module, in a fresh interpreter."""

import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from castwise.records.messages import Failed
from castwise.spec.user_model import UserModel
from castwise.worker import server
from castwise.worker.classify_error import classify
from castwise.worker.script.ranks import FAILURE, UNLIMITED, SharedFolder
from castwise.worker.script.run import Moment, Order, ScriptRun
from castwise.worker.user_model.source import where


def main() -> None:
    """Run the script as the rank that the launcher says."""
    os.environ["TMPDIR"], folder, precision, device, path, *arguments = sys.argv[1:]
    tempfile.tempdir = None  # it is read anew
    if device != "cpu":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    ranks = SharedFolder(Path(folder))
    if os.environ.get("RANK", "0") == "0":
        door = socket.socket(socket.AF_UNIX)
        door.connect(str(Path(folder) / "door"))
        server.serve(Connection(door.detach()), device, ranks)
        return
    script = ScriptRun(UserModel(kind="script", path=path, name="", arguments=tuple(arguments)), precision, device)

    def next_mark(moments: Sequence[Moment]) -> int:
        if len(moments) == 2:
            ranks.tell(f"samples-{os.environ['RANK']}", str(script.samples_per_step or 0))
        return min(ranks.wait_for_more(script.num_steps), 1 if len(moments) < 2 else UNLIMITED)

    script.follow(Order(next_mark, synchronised=False))
    script.run()
    if isinstance(script.ending, Exception):
        status, text = classify(script.ending)
        failed = Failed(status=status, message=f"rank {os.environ['RANK']}: {text} ({where(script.ending)})")
        ranks.tell(FAILURE, failed.model_dump_json())
        raise script.ending


if __name__ == "__main__":
    main()
