"""Trial processes that misbehave: targets for `ForkserverEngine`, all but one without torch.

Each speaks the protocol of `worker/server.py` up to the point where it goes wrong. A `functools.partial` over the
leading parameters is a target.
"""

import contextlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from castwise.records.messages import Returned
from castwise.records.schema import Block, Environment, Epoch, Facts, RankSamples, Resumed
from castwise.worker import entry

ENVIRONMENT = Environment(castwise="0", python="3", torch="2", host="h", system="s", cpu="Fake CPU", num_threads=1)
FACTS = Facts(num_parameters=1, units_per_sample=1, param_dtypes={"float32": 1}, optimizer="SGD()", fp32_precision={})
BLOCK = Block(seconds=0.5, num_steps=2, loss=1.0)

EPOCH = Epoch(
    seconds=2.0,
    data_seconds=1.0,
    first_step_seconds=0.5,
    num_steps=2,
    num_samples=8,
    counted_seconds=2.0,
    counted_samples=8,
    losses=((1, 1.0),),
    learning_rate=0.1,
)

RESULTS: dict[str, Any] = {
    "open": ENVIRONMENT,
    "set_up": None,
    "warm_up": FACTS,
    "run_block": BLOCK,
    "resume": Resumed(facts=FACTS, epochs=()),
    "run_epoch": EPOCH,
    "find_weights": {"resnet18": "/w.pth", "resnet34": None},
    "finish": RankSamples(blocks=(BLOCK,)),
}


def returned(method: str, result: object = None) -> bytes:
    """Return the event that a call is answered with, by default as a good worker would."""
    event = Returned(method=method, result=RESULTS.get(method) if result is None else result)
    return event.model_dump_json().encode()


def failed(status: str, message: str, refused: bool = False) -> bytes:
    """Return the event of a call that failed."""
    return json.dumps({"event": "failed", "status": status, "message": message, "refused": refused}).encode()


_FOR_EVER_SECONDS = 600.0  # longer than any test; a leak ends by itself all the same


def behave(connection: Connection, log_path: str) -> None:
    """Answer every command as a good worker would."""
    _serve(connection, log_path, None, lambda: None)


def chat(connection: Connection, log_path: str) -> None:
    """Answer every command, and print in every way there is, in the middle and at the end."""

    def talk() -> None:
        print("print to stdout", flush=True)
        print("print to stderr", file=sys.stderr, flush=True)
        os.write(1, b"write to 1\n")
        os.write(2, b"write to 2\n")
        os.system("echo from a shell; echo from a shell >&2")

    _serve(connection, log_path, "set_up", talk)
    talk()


def die_of(number: int, connection: Connection, log_path: str) -> None:
    """Be ended by a signal while a block runs."""
    _serve(connection, log_path, "run_block", lambda: os.kill(os.getpid(), number))


def sleep_at(command: str, connection: Connection, log_path: str) -> None:
    """Never answer this command."""
    _serve(connection, log_path, command, lambda: time.sleep(_FOR_EVER_SECONDS))


def ignore_everything(connection: Connection, log_path: str) -> None:
    """Read nothing, answer nothing, and survive every signal that can be survived."""
    entry.init_process(log_path)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(_FOR_EVER_SECONDS)


def stay_after_failing(connection: Connection, log_path: str) -> None:
    """Report a failure at "set_up" and stay, whatever becomes of the pipe."""

    def fail() -> None:
        connection.send_bytes(failed("crashed", "RuntimeError: it broke"))
        time.sleep(_FOR_EVER_SECONDS)

    _serve(connection, log_path, "set_up", fail)


def exit_with_real_traceback(connection: Connection, log_path: str) -> None:
    """Say on stderr where it went wrong and end with exit code 3."""

    def leave() -> None:
        try:
            raise ValueError("no such thing")
        except ValueError:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(3)

    _serve(connection, log_path, "warm_up", leave)


def exit_with_traceback(connection: Connection, log_path: str) -> None:
    """Say what happened on stderr and end with exit code 3."""

    def leave() -> None:
        print("Traceback (most recent call last):\n  File ...\nValueError: no such thing", file=sys.stderr, flush=True)
        os._exit(3)

    _serve(connection, log_path, "warm_up", leave)


def exit_silently(connection: Connection, log_path: str) -> None:
    """End with exit code 0 in the middle of the trial, without a word."""
    _serve(connection, log_path, "warm_up", lambda: os._exit(0))


def raise_memory_error(connection: Connection, log_path: str) -> None:
    """Let an exception out of the process's main function."""

    def exhaust() -> None:
        raise MemoryError("no more of it")

    _serve(connection, log_path, "warm_up", exhaust)


def flood_stdout(connection: Connection, log_path: str) -> None:
    """Print 40 MB without a line break, then a line, then end with exit code 3."""

    def flood() -> None:
        piece = b"x" * 2**20
        for _ in range(40):
            os.write(1, piece)
        os.write(1, b"\n" + b"y" * 1000 + b"\n")
        os._exit(3)

    _serve(connection, log_path, "warm_up", flood)


def report(status: str, message: str, connection: Connection, log_path: str, refused: bool = False) -> None:
    """Answer "set_up" with a failure."""
    send(failed(status, message, refused), connection, log_path)


def send(message: bytes, connection: Connection, log_path: str) -> None:
    """Answer "set_up" with this message."""
    _serve(connection, log_path, "set_up", lambda: connection.send_bytes(message))


def send_twice(first: bytes, second: bytes, connection: Connection, log_path: str) -> None:
    """Answer "set_up" with one message and, before it is asked, "warm_up" with another."""

    def send_both() -> None:
        connection.send_bytes(first)
        connection.send_bytes(second)

    _serve(connection, log_path, "set_up", send_both)


def send_raw(content: bytes, connection: Connection, log_path: str) -> None:
    """Write these bytes where the answer to "set_up" should begin, and stay."""

    def write() -> None:
        os.write(connection.fileno(), content)
        time.sleep(_FOR_EVER_SECONDS)

    _serve(connection, log_path, "set_up", write)


def hang_up(connection: Connection, log_path: str) -> None:
    """Close the pipe at "set_up" and go on running."""

    def close() -> None:
        connection.close()
        time.sleep(_FOR_EVER_SECONDS)

    _serve(connection, log_path, "set_up", close)


def leave_child_behind(connection: Connection, log_path: str) -> None:
    """Die at "set_up" while a child of this process holds its end of the pipe; the child ends with the log."""

    def fork() -> None:
        if os.fork() == 0:
            while os.path.exists(log_path):
                time.sleep(0.05)
        os._exit(4)

    _serve(connection, log_path, "set_up", fork)


def tell(events: Sequence[bytes], pause: float, hang: bool, connection: Connection, log_path: str) -> None:
    """Send these events at "run_epoch", a pause before each; then answer, or hang."""

    def send_all() -> None:
        for event in events:
            time.sleep(pause)
            connection.send_bytes(event)
        if hang:
            time.sleep(_FOR_EVER_SECONDS)

    _serve(connection, log_path, "run_epoch", send_all)


def have_children(connection: Connection, log_path: str) -> None:
    """Start a process through multiprocessing at "set_up", as a data loader does, and end it."""

    def start() -> None:
        child = multiprocessing.get_context("fork").Process(target=os.getpid, daemon=True)
        child.start()
        child.join()

    _serve(connection, log_path, "set_up", start)


def err_in_rank(rank: int, fault: str, connection: Connection, log_path: str) -> None:
    """Be one of several ranks that, from "warm_up" on, wait for each other; this rank errs there, by fault.

    `die` of a signal, `raise` (an error is told, and the others tell of a lost connection), `hang`.
    """
    entry.init_process(log_path)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(EOFError, OSError):
        while (call := json.loads(connection.recv_bytes()))["method"] != "warm_up":
            own = call["arguments"].get("rank", -1)
            connection.send_bytes(returned(call["method"]))
        if own != rank and fault == "die":
            time.sleep(0.1)  # a rank that hears of the others' end before the parent does: too early to be the cause
            connection.send_bytes(failed("crashed", "RuntimeError: Connection closed by peer"))
        elif own == rank and fault == "die":
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGSEGV)
        elif own == rank and fault == "raise":
            connection.send_bytes(failed("oom", "CUDA out of memory"))
        time.sleep(_FOR_EVER_SECONDS)


def _serve(connection: Connection, log_path: str, fault_at: str | None, fault: Callable[[], object]) -> None:
    """Answer commands until "finish" or the end of the pipe; at one of them, the fault comes first."""
    entry.init_process(log_path)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    method = ""
    with contextlib.suppress(EOFError, OSError):
        while method != "finish":
            method = json.loads(connection.recv_bytes())["method"]
            if method == fault_at:
                fault()
            connection.send_bytes(returned(method))


def leave_a_helper(path: str, last: str, connection: Connection, log_path: str) -> None:
    """Start a process that outlives this one, note its number, and go on until `last`, which never comes to an end.

    Args:
        path: Gets the number.
        last: The command that hangs; "" for none; "die" ends this process by a signal at "run_block".
        connection: The child's end of the pipe.
        log_path: Takes what is printed.
    """

    def start() -> None:
        helper = subprocess.Popen(["sleep", str(_FOR_EVER_SECONDS)])
        with open(path, "w") as file:
            file.write(str(helper.pid))
        if last == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if last:
            time.sleep(_FOR_EVER_SECONDS)

    _serve(connection, log_path, "run_block", start)
