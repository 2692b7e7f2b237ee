"""Trial processes that misbehave, all but one without torch.

Each speaks the protocol of `trial/server.py` up to the call at which it goes wrong. `fail_at(METHOD, FAULT)` is a
target for `ForkserverEngine`: a fault is a function of the process's connection and of the path of its log.
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
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from programs import FOR_EVER_SECONDS

from castwise.records.messages import Returned
from castwise.records.schema import Block, Environment, Epoch, Facts, RankSamples, Resumed
from castwise.trial import entry

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
    "finish": RankSamples(blocks=(BLOCK,)),
}

Target = Callable[[Connection, str], None]


def returned(method: str, result: object = None) -> bytes:
    """Return the event that a call is answered with, by default as a good trial would."""
    event = Returned(method=method, result=RESULTS.get(method) if result is None else result)
    return event.model_dump_json().encode()


def failed(status: str, message: str, refused: bool = False) -> bytes:
    """Return the event of a call that failed."""
    return json.dumps({"event": "failed", "status": status, "message": message, "refused": refused}).encode()


def behave(connection: Connection, log_path: str) -> None:
    """Answer every call as a good trial would."""
    _serve("", behave, connection, log_path)


def fail_at(method: str, fault: Target) -> Target:
    """Return one that answers calls until "finish" or the end of the pipe, and before one of them does a fault."""
    return partial(_serve, method, fault)


def _serve(fault_at: str, fault: Target, connection: Connection, log_path: str) -> None:
    entry.init_process(log_path)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    method = ""
    with contextlib.suppress(EOFError, OSError):
        while method != "finish":
            method = json.loads(connection.recv_bytes())["method"]
            if method == fault_at:
                fault(connection, log_path)
            connection.send_bytes(returned(method))


def chat(connection: Connection, log_path: str) -> None:
    """Print in every way there is."""
    print("print to stdout", flush=True)
    print("print to stderr", file=sys.stderr, flush=True)
    os.write(1, b"write to 1\n")
    os.write(2, b"write to 2\n")
    os.system("echo from a shell; echo from a shell >&2")


def die_of(number: int, connection: Connection, log_path: str) -> None:
    os.kill(os.getpid(), number)


def hang(connection: Connection, log_path: str) -> None:
    time.sleep(FOR_EVER_SECONDS)


def stay_after_failing(connection: Connection, log_path: str) -> None:
    """Report a failure and stay, whatever becomes of the pipe."""
    connection.send_bytes(failed("crashed", "RuntimeError: it broke"))
    time.sleep(FOR_EVER_SECONDS)


def exit_with_traceback(connection: Connection, log_path: str) -> None:
    """Say on stderr where it went wrong and end with exit code 3."""
    try:
        raise ValueError("no such thing")
    except ValueError:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(3)


def exit_silently(connection: Connection, log_path: str) -> None:
    os._exit(0)


def raise_memory_error(connection: Connection, log_path: str) -> None:
    raise MemoryError("no more of it")


def flood_stdout(connection: Connection, log_path: str) -> None:
    """Print 40 MB without a line break, then a line, then end with exit code 3."""
    for _ in range(40):
        os.write(1, b"x" * 2**20)
    os.write(1, b"\n" + b"y" * 1000 + b"\n")
    os._exit(3)


def report(status: str, message: str, connection: Connection, log_path: str) -> None:
    """Answer with a failure."""
    connection.send_bytes(failed(status, message))


def send_raw(content: bytes, connection: Connection, log_path: str) -> None:
    """Write these bytes where the answer should begin, and stay."""
    os.write(connection.fileno(), content)
    time.sleep(FOR_EVER_SECONDS)


def hang_up(connection: Connection, log_path: str) -> None:
    """Close the pipe and go on running."""
    connection.close()
    time.sleep(FOR_EVER_SECONDS)


def leave_child_behind(connection: Connection, log_path: str) -> None:
    """Die while a child of this process holds its end of the pipe; the child ends with the log."""
    if os.fork() == 0:
        while os.path.exists(log_path):
            time.sleep(0.05)
    os._exit(4)


def send_events(events: Sequence[bytes], connection: Connection, log_path: str) -> None:
    for event in events:
        connection.send_bytes(event)


def send_events_and_hang(events: Sequence[bytes], connection: Connection, log_path: str) -> None:
    send_events(events, connection, log_path)
    time.sleep(FOR_EVER_SECONDS)


def have_children(connection: Connection, log_path: str) -> None:
    """Start a process through multiprocessing, as a data loader does, and end it."""
    child = multiprocessing.get_context("fork").Process(target=os.getpid, daemon=True)
    child.start()
    child.join()


def leave_a_helper(path: str, last: str, own_session: bool, connection: Connection, log_path: str) -> None:
    """Start a process that outlives this one, write its number to a file, and then "hang" or "die", or go on."""
    helper = subprocess.Popen(["sleep", str(FOR_EVER_SECONDS)], start_new_session=own_session)
    with open(path, "w") as file:
        file.write(str(helper.pid))
    if last == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if last:
        time.sleep(FOR_EVER_SECONDS)


def leave_a_daemon(path: str, connection: Connection, log_path: str) -> None:
    """Start a process in a session of its own, whose parent ends, and write a file once it runs."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(path, "w"):
                time.sleep(FOR_EVER_SECONDS)
        os._exit(0)


def ignore_everything(connection: Connection, log_path: str) -> None:
    """Be a process that reads nothing, answers nothing, and survives every signal that can be survived."""
    entry.init_process(log_path)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(FOR_EVER_SECONDS)


def err_in_rank(rank: int, fault: str, connection: Connection, log_path: str) -> None:
    """Be one of several workers that wait for each other from "warm_up" on; one rank has a fault there.

    Faults: `die` of a signal, `raise` (it reports an error, and the others report a lost connection), `hang`.
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
        time.sleep(FOR_EVER_SECONDS)
