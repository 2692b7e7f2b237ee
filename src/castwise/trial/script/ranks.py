"""A script that a launcher starts, such as torchrun: every rank runs it hooked, in a fresh interpreter.

The trial's process starts the launcher and hands the parent's calls on to rank 0 (`trial/rank.py`). The other ranks
take as many steps as rank 0 may, and wait at the same ones, so that none is busy while another trial is timed.
"""

import mmap
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from pathlib import Path

from torch.distributed.elastic.utils.distributed import get_free_port

from castwise.errors import EngineError
from castwise.records.messages import EVENT, Call, Failed, Progress
from castwise.records.schema import RankStep
from castwise.trial.lifetime import kill_descendants
from castwise.trial.script.run import Ranks

_MODULES = {"torchrun": ["torch.distributed.run"], "accelerate": ["accelerate.commands.launch"]}
_POLL_SECONDS = 0.1
# While a rank waits for steps: at first small against a step, then without load on the host.
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 5e-5, 5e-3
_SAMPLES_SECONDS = 60.0  # until the slowest rank has taken its second step
UNLIMITED = 2**62
_RANK, _FIRST_RANK = "castwise.trial.rank", "castwise.trial.first_rank"
# Files in the folder: the socket that rank 0 connects to, the call that all ranks begin with, and another rank's error.
DOOR, CALL, FAILURE = "door", "call", "failed"
WARM = "warm"  # a file that is there after rank 0's warm-up
PROFILED = "profiled"  # a file that is there once rank 0 is profiled
SECONDS = "communication-"  # with the rank: the file with what its collectives, and all else, take in a step of that


class SharedFolder(Ranks):
    """What the ranks of a script share: a number of steps, and a file for the samples of each rank."""

    def __init__(self, folder: Path) -> None:
        # Accelerate's launcher starts one process alone without the variables of several.
        self.rank, self.num_ranks = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", "1"))
        self._folder = folder
        with (folder / "steps").open("r+b") as file:
            self._allowed = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")

    def allow(self, num_steps: float) -> None:
        self._allowed[0] = int(min(num_steps, UNLIMITED))

    def wait_for_more(self, num_steps: int) -> int:
        """Wait until more steps are allowed than so many; return how many more."""
        pause = _FIRST_PAUSE_SECONDS
        while self._allowed[0] <= num_steps:
            time.sleep(pause)
            pause = min(1.02 * pause, _LAST_PAUSE_SECONDS)
        return self._allowed[0] - num_steps

    def tell(self, name: str, text: str) -> None:
        """Write a file into the folder; the first of its name stays."""
        new = self._folder / f"new-{self.rank}"
        new.write_text(text)
        with suppress(FileExistsError):
            os.link(new, self._folder / name)
        new.unlink()

    def make_folder(self) -> str:
        folder = self._folder / self._folder.name
        folder.mkdir(exist_ok=True)
        return str(folder)

    def stop_looking(self) -> None:
        self.tell(WARM, "")

    def begin_profile(self) -> None:
        self.tell(PROFILED, "")

    def communication_of_others(self) -> tuple[tuple[float, RankStep], ...]:
        files = [self._folder / f"{SECONDS}{rank}" for rank in range(1, self.num_ranks)]
        texts = [file.read_text().split(" ", 1) for file in files if file.exists()]
        found = tuple((float(seconds), RankStep.model_validate_json(own)) for seconds, own in texts)
        return found if len(found) == len(files) else ()

    def samples_of_others(self) -> int:
        deadline = time.monotonic() + _SAMPLES_SECONDS
        while len(files := list(self._folder.glob("samples-*"))) < self.num_ranks - 1:
            if time.monotonic() > deadline:
                raise EngineError(f"Of {self.num_ranks} ranks {len(files) + 1} took two optimizer steps in time.")
            time.sleep(_POLL_SECONDS)
        return sum(int(file.read_text()) for file in files)


def start_of(launcher: Sequence[str], port: str) -> list[str]:
    """Return what Python starts for a launcher, which takes this port whatever it or its command names.

    Launchers of several precisions run at the same time, on this host alone. Of an option given twice the last counts.
    Source: torch.distributed.run and accelerate.utils.launch, which take ports 29500 and 29400.
    """
    program, *options = launcher
    start = ["-m", *_MODULES[program], *options[program == "accelerate" :]] if program in _MODULES else options
    if start[:2] == ["-m", *_MODULES["accelerate"]]:
        return [*start, "--main_process_port", port]
    if start[:2] != ["-m", *_MODULES["torchrun"]]:
        return start
    has_rendezvous = any(re.match("--rdzv[-_](backend|endpoint)", word) for word in start)
    return [*start, "--master-port", port, *(("--rdzv-endpoint", f"localhost:{port}") if has_rendezvous else ())]


def hand_on(connection: Connection, message: bytes, launcher: Sequence[str], device: str) -> None:
    """Start a script by its launcher, and hand on calls and answers between the parent and rank 0 until one ends.

    The message is the call that needs the script. The launcher is the command without the script; the device is that of
    rank 0, and each rank takes the one of its local rank.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=util.get_temp_dir())))  # which is swept
        (folder / "steps").write_bytes(bytes(8))
        door = stack.enter_context(socket.socket(socket.AF_UNIX))
        door.bind(str(folder / DOOR))
        door.listen()
        door.settimeout(_POLL_SECONDS)
        (folder / CALL).write_bytes(message)
        port = str(get_free_port())  # type: ignore[no-untyped-call]
        is_traced = Call.model_validate_json(message).method == "trace_memory"
        ours = ["-m", _FIRST_RANK if is_traced else _RANK, tempfile.gettempdir(), str(folder), device]
        # A launcher that is killed leaves temporary files behind; ranks take the usual place for theirs.
        environment = os.environ | {"TMPDIR": str(folder)}
        environment |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        environment |= {"OMP_NUM_THREADS": str(os.cpu_count())} if is_traced else {}  # the others do nothing
        process = subprocess.Popen([sys.executable, *start_of(launcher, port), *ours], env=environment)
        stack.callback(process.wait)
        stack.callback(process.kill)
        stack.callback(kill_descendants, process.pid)
        rank_0: Connection | None = None
        while rank_0 is None:
            with suppress(TimeoutError):
                rank_0 = Connection(door.accept()[0].detach())
            if rank_0 is None and process.poll() is not None:
                how = f"'{shlex.join(launcher)}' ended with exit code {process.returncode} before the script began"
                connection.send_bytes(Failed(status="crashed", message=how, refused=True).model_dump_json().encode())
                return
        other_end = {connection: rank_0, rank_0: connection}
        failure, is_asked = folder / FAILURE, True
        with suppress(EOFError, OSError):
            rank_0.send_bytes(message)
            while not (failure.exists() and is_asked):
                for ready in wait(list(other_end), _POLL_SECONDS):
                    assert isinstance(ready, Connection), "both are"
                    sent = ready.recv_bytes()
                    if ready is rank_0 and failure.exists():
                        break  # it reports no more than that it lost the other rank
                    is_asked = ready is connection or isinstance(EVENT.validate_json(sent), Progress)
                    other_end[ready].send_bytes(sent)
        with suppress(EOFError, OSError):
            if failure.exists():
                if not is_asked:
                    connection.recv_bytes()
                connection.send_bytes(failure.read_bytes())
