"""Trials over several nodes: the leader's castwise gives orders to the processes that followers start on their nodes.

A follower keeps one connection, over which the leader asks for the processes of a trial, and has one more for each
process, over which messages pass as they do in a pipe. Both ends of each prove that they know the nodes' secret; all
messages are JSON; nothing is unpickled.
"""

import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any

from castwise._version import __version__
from castwise.errors import EngineError, UsageError
from castwise.orchestrator.session import ProcessGoneError
from castwise.orchestrator.temporary_files import TemporaryFolder, make_folder
from castwise.registry.datasets import cache_dir

SECRET = "CASTWISE_SECRET"  # the environment variable; without it a file of the user's has it

_PATIENCE_SECONDS = 600.0  # in which all nodes must come; torchrun's join_timeout
_STALL_SECONDS = 10  # between two pieces of one message
MESSAGE_BYTES = 64 * 2**20  # the largest message that is read; a block is about 100 bytes
_HELLO_BYTES = 10_000
_GONE = b"gone "  # begins the message on the end of a process; all others are JSON objects


class Nodes:
    """The leader's side: waits for the other nodes, and is closed at the end, which ends them.

    Args:
        rendezvous: HOST:PORT, by which the others reach this node.
        count: How many nodes share a trial, this one included.
        check: Raises an error if the wait would be in vain; nodes that have come by then end, too.

    Raises:
        UsageError: The port cannot be used, or a node has another castwise.
        EngineError: The others do not come.
    """

    def __init__(self, rendezvous: str, count: int, check: Callable[[], object] = lambda: None) -> None:
        self.host, port = _parse(rendezvous)
        self.count = count
        self._followers: list[tuple[str, Connection]] = []
        self._num_refused, self._secret = 0, read_secret()
        try:
            self._server = socket.create_server(("", port))
        except OSError as error:
            raise UsageError(f"Port {port} cannot be used here: {error.strerror}. Give --rendezvous another.") from None
        try:
            check()
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while len(self._followers) < count - 1:
                hello, connection = self._accept(deadline)
                if hello.get("castwise") != __version__:
                    raise UsageError(f"{hello.get('host')} has another castwise than {__version__}. Install the same.")
                connection.send_bytes(json.dumps(len(self._followers)).encode())
                self._followers.append((str(hello.get("host")), connection))
        except BaseException:
            self.close()
            raise

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the names of the other nodes, in the order of their ranks."""
        return tuple(host for host, _ in self._followers)

    def ask(self, num_processes: int) -> None:
        """Have each of the others start its processes of a trial; raise an EngineError if one has gone."""
        for host, connection in self._followers:
            try:
                connection.send_bytes(str(num_processes).encode())
            except OSError:
                raise EngineError(f"The node {host} has gone.") from None

    def take(self, num_processes: int) -> "list[RemoteProcess]":
        """Return the processes that were asked for, by node; raise an EngineError if a node has gone."""
        found: dict[tuple[int, int], RemoteProcess] = {}
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while len(found) < num_processes * len(self._followers):
            hello, connection = self._accept(deadline)
            if "process" in hello:
                node = int(hello["node"])
                found[node, int(hello["process"])] = RemoteProcess(connection, self._followers[node][0])
        return [found[place] for place in sorted(found)]

    def free_rendezvous(self) -> str:
        """Return where the ranks of a trial meet: rank 0 is on this node, and listens there."""
        return f"tcp://{self.host}:{free_port()}"

    def close(self) -> None:
        for _, connection in self._followers:
            connection.close()
        self._server.close()

    def _accept(self, deadline: float) -> tuple[dict[str, Any], Connection]:
        """Return the next connection of a node that knows the secret, with what it says first."""
        while True:
            controls = {control: host for host, control in self._followers}
            for end in wait([self._server.fileno(), *controls], max(0.0, deadline - time.monotonic())):
                if isinstance(end, Connection):
                    raise EngineError(f"The node {controls[end]} has gone.")
                connection = _connection(self._server.accept()[0])
                never_stall(connection)
                try:
                    deliver_challenge(connection, self._secret)
                    answer_challenge(connection, self._secret)
                    hello = json.loads(connection.recv_bytes(_HELLO_BYTES))
                    if isinstance(hello, dict):
                        return hello, connection
                except AuthenticationError:
                    self._num_refused += 1
                except (OSError, EOFError, ValueError):  # whoever it is
                    pass
                connection.close()
            if time.monotonic() > deadline:
                there = f"{len(self._followers) + 1} of {self.count} nodes are there after {_PATIENCE_SECONDS:g} s"
                if self._num_refused:
                    raise EngineError(f"{there}, and one was refused: {_set_secret()}")
                raise EngineError(f"{there}. Start the same command on each.")


class RemoteProcess:
    def __init__(self, connection: Connection, host: str) -> None:
        self.is_busy = False
        self._connection, self._host, self._log = connection, host, ""

    @property
    def ends(self) -> list[Any]:
        return [self._connection]

    def send(self, message: bytes) -> None:
        """Send a message; a process that has ended is noticed by the next `receive`."""
        with suppress(OSError):
            self._connection.send_bytes(message)

    def receive(self) -> bytes:
        """Return the message that has come.

        Raises:
            ProcessGoneError: The process has ended.
            EngineError: Its node has gone.
        """
        try:
            message = self._connection.recv_bytes(MESSAGE_BYTES)
        except (EOFError, OSError):
            raise EngineError(f"The node {self._host} has gone.") from None
        if not message.startswith(_GONE):
            return message
        how, self._log = json.loads(message.removeprefix(_GONE))
        raise ProcessGoneError("crashed", f"{how} on {self._host}", self._log)

    def log_tail(self) -> str:
        """Return the end of what the process printed, if it has ended."""
        return self._log

    def close(self) -> None:
        self._connection.close()

    kill = close


def follow(rendezvous: str, start_process: Callable[[TemporaryFolder], Any]) -> None:
    """Start processes for the leader until it closes the connection.

    Raises:
        UsageError: The leader does not take this node, or has another secret.
        EngineError: There is no leader.
    """
    try:
        control = _connect(rendezvous, {"host": socket.gethostname()}, _PATIENCE_SECONDS)
        node = json.loads(control.recv_bytes(_HELLO_BYTES))
    except (EOFError, OSError):
        raise UsageError(
            f"The leader at {rendezvous} does not take this node: it has ended, has all that it needs, or "
            f"another castwise than {__version__}."
        ) from None
    threads: list[threading.Thread] = []
    with suppress(EOFError, OSError):
        while True:
            for number in range(int(control.recv_bytes(_HELLO_BYTES))):
                folder = make_folder("log")
                process = start_process(folder)
                channel = _connect(rendezvous, {"node": node, "process": number}, _STALL_SECONDS)
                never_stall(channel)
                threads.append(threading.Thread(target=_relay, args=(process, channel, folder), daemon=True))
                threads[-1].start()
    for thread in threads:  # their connections end with the leader
        thread.join()


def _relay(process: Any, channel: Connection, folder: TemporaryFolder) -> None:
    """Pass messages on until one of the two has gone; then end the other."""
    with suppress(EOFError, OSError):
        while True:
            try:
                if channel in wait([channel, *process.ends]):
                    process.send(channel.recv_bytes(MESSAGE_BYTES))
                else:
                    channel.send_bytes(process.receive())
            except ProcessGoneError as gone:
                channel.send_bytes(_GONE + json.dumps([gone.message, gone.log]).encode())
                break
    process.kill()
    process.close()
    channel.close()
    folder.remove()


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def read_secret() -> bytes:
    """Return what nodes prove to each other that they know; the first of them makes the file.

    Raises:
        UsageError: The file cannot be read or made.
    """
    if given := os.environ.get(SECRET):
        return given.encode()
    try:
        file = cache_dir() / "secret"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_name(f".{file.name}-{secrets.token_hex(8)}")
            try:
                with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as output:
                    output.write(secrets.token_hex(32))
                with suppress(FileExistsError):  # another node was faster
                    os.link(new, file)  # whole, or not at all
            finally:
                new.unlink(missing_ok=True)
        return file.read_bytes()
    except (OSError, RuntimeError) as error:
        raise UsageError(f"The nodes' secret cannot be read ({error}): {_set_secret()}") from None


def _set_secret() -> str:
    return f"set {SECRET} to the same text on each node."


def _parse(rendezvous: str) -> tuple[str, int]:
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(
            f"--rendezvous takes the first node's name and a free port, such as node1:29400, not '{rendezvous}'."
        )
    return host, int(port)


def _connect(rendezvous: str, hello: dict[str, Any], seconds: float) -> Connection:
    """Return a connection to the leader, which may be busy for a while before it answers.

    Raises:
        UsageError: It has another secret.
        EngineError: There is none.
        OSError, EOFError: It has ended meanwhile.
    """
    address, secret, deadline = _parse(rendezvous), read_secret(), time.monotonic() + seconds
    while True:
        try:
            connection = _connection(socket.create_connection(address, timeout=_STALL_SECONDS))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise EngineError(f"No leader answers at {rendezvous}: {error.strerror or error}.") from None
        time.sleep(0.2)
    try:
        answer_challenge(connection, secret)
        deliver_challenge(connection, secret)
    except AuthenticationError:
        raise UsageError(f"The leader at {rendezvous} has another secret: {_set_secret()}") from None
    connection.send_bytes(json.dumps({"castwise": __version__, **hello}).encode())
    return connection


def _connection(end: socket.socket) -> Connection:
    """Return a socket as a connection that fails if its other host has gone."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6), ("TCP_USER_TIMEOUT", 40_000)):
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(end.detach())


def never_stall(connection: Connection) -> None:
    """Let a connection fail whose other end stops in the middle of a message."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _STALL_SECONDS, 0))
