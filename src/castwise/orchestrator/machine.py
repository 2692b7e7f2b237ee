"""The machine that jobs run on: its device, its data sets, castwise's own commit, and what earlier commands found out.

What is known of it lets records answer without importing torch. The first process that is started after all must find
the same machine: nothing from the cache gets into a record.
"""

import glob
import hashlib
import importlib.util
import os
import platform
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pydantic import Field, TypeAdapter

from castwise._version import __version__
from castwise.errors import EngineError, MissingDataError, UsageError
from castwise.orchestrator.processes import ForkserverEngine
from castwise.orchestrator.session import BackgroundCloser, Engine, OnNote, Session, TrialFailedError
from castwise.records.schema import Environment
from castwise.registry.datasets import DataSet, cache_dir, default_data_dir, verify
from castwise.spec.frozen import FrozenModel
from castwise.spec.user_model import UserModel, UserWorkload, digest_of
from castwise.telemetry.gpu import GpuUnreadableError
from castwise.telemetry.nvml import compute_processes, driver_version, power_limit

COMMIT_VARIABLE = "CASTWISE_COMMIT"

_PROBE_TIMEOUT_SECONDS = 300.0
_FETCH_TIMEOUT_SECONDS = 600.0
_ANSWER_SECONDS = 5.0  # in which a process says what a script was doing when its time was up

_MOST_MACHINES = 20  # in the file; the environment variables of each login may differ
_AUTO = "auto"  # no device was named
# A file that cannot be read, written or understood; no home folder; a torch that cannot be found.
_FAILURES = (OSError, ValueError, RuntimeError, ImportError)
# Variables of one login or terminal.
_LOGIN_VARIABLES = ("_", "SHLVL", "PWD", "OLDPWD", "WINDOWID", "XDG_SESSION_ID")
_LOGIN_PREFIXES = ("SSH_", "TERM", "TMUX", "VSCODE_")

EngineFactory = Callable[[Path | None, str | None], Engine]


class MachineChangedError(EngineError):
    """The first process found another machine than earlier commands did."""


@dataclass(frozen=True)
class Machine:
    engine: Engine
    environment: Environment
    device: str  # "cpu", "cuda:N", "xpu:N" or "mps:0"
    data_dir: Path
    cache: "MachineCache | None" = None  # keeps what processes find out


# Finds a machine by the device asked for, the data folder and the models that zoos must have.
FindMachine = Callable[[str | None, Path | None, Sequence[str]], Machine]


def detect_machine(
    device: str | None, data_dir: Path | None, zoo_models: Sequence[str] = (), make_engine: EngineFactory | None = None
) -> Machine:
    """Return the machine with the device asked for; None takes the first GPU, or the CPU if there is none.

    Raises:
        UsageError: There is no such device, or a zoo has no such model.
        EngineError: No measuring process could be started.
    """
    folder = data_dir or default_data_dir()
    engine = (make_engine or ForkserverEngine)(folder, find_commit())
    environment = choose_device(engine, device, zoo_models)
    return Machine(engine, environment, _device_of(environment, device), folder)


def cached_machine(device: str | None, data_dir: Path | None, zoo_models: Sequence[str] = ()) -> Machine:
    """Return what `detect_machine` does, without a process if earlier commands know the machine.

    Its engine raises a MachineChangedError if the first process finds another machine.
    """
    cache = MachineCache()
    known = cache.environment(device, zoo_models)
    if known is None:
        machine = detect_machine(device, data_dir, zoo_models)
        cache.keep_environment(device, machine.environment, zoo_models)
        return replace(machine, cache=cache)
    folder, commit = data_dir or default_data_dir(), find_commit()
    engine = _CheckedEngine(partial(ForkserverEngine, folder, commit), known, device, cache)
    return Machine(engine, known.model_copy(update={"commit": commit}), _device_of(known, device), folder, cache)


@dataclass
class _CheckedEngine:
    """Real processes, the first of which must find the machine that is known."""

    make: Callable[[], Engine]
    known: Environment
    device: str | None
    cache: "MachineCache"
    engine: Engine | None = None

    def start(self, timeout_seconds: float, num_processes: int = 1) -> Session:
        if self.engine is None:
            self.engine = self.make()
            environment = choose_device(self.engine, self.device)
            if environment.model_copy(update={"commit": self.known.commit}) != self.known:
                self.cache.keep_environment(self.device, environment, ())
                raise MachineChangedError(
                    "The machine has changed while castwise looked at it. Give the command again."
                )
        return self.engine.start(timeout_seconds, num_processes)


def may_have_gpu(device: str | None) -> bool:
    """Return whether a device may be a GPU; None is one if there is a driver. No process is needed to know."""
    if device is not None:
        return device != "cpu"
    return driver_version() is not None or Path("/dev/kfd").exists() or sys.platform == "darwin"


def _device_of(environment: Environment, asked: str | None) -> str:
    if environment.gpu is None:
        return "cpu"
    return asked if asked is not None and ":" in asked else f"{environment.device_type}:0"


def detect_devices() -> Iterator[Environment]:
    """Yield the environment of each GPU as it is found, or of the CPU if there is none.

    Raises:
        EngineError: No measuring process could be started.
    """
    engine = ForkserverEngine(None, find_commit())
    yield (first := choose_device(engine, None))
    for index in range(1, first.num_gpus):
        yield choose_device(engine, f"{first.device_type}:{index}")


def choose_device(engine: Engine, device: str | None, zoo_models: Sequence[str] = ()) -> Environment:
    """Return the environment that a trial on this device has, from a process that also looks up models of zoos.

    Raises:
        UsageError: There is no such device, or a zoo has no such model.
    """
    session = engine.start(_PROBE_TIMEOUT_SECONDS)
    try:
        environment = session.open(device or "auto")
        if zoo_models:
            session.check(zoo_models)
        return environment
    except TrialFailedError as failure:
        if failure.refused:
            raise UsageError(failure.message) from None
        if device in (None, "cpu"):
            raise EngineError(f"The measuring process could not open a device: {failure.message}.") from None
        raise UsageError(
            f"The device '{device}' cannot be opened: {failure.message}. `castwise doctor` shows what there is."
        ) from None
    finally:
        BackgroundCloser().close([session])


def inspect_user_model(
    machine: Machine,
    model: UserModel,
    timeout_seconds: float | None = None,
    on_note: OnNote | None = None,
    begun: list[Session] | None = None,
) -> UserWorkload:
    """Return what is known of a user's model, whose code runs in a process of its own, for a limited time.

    Args:
        machine: Runs it.
        model: Where it comes from.
        timeout_seconds: How long its code may take; None for five minutes.
        on_note: Receives a line now and then on what a script is waited for.
        begun: Gets the process of a script, which waits after its second step to be measured as written.

    Raises:
        UsageError: There is no such function, it raises, or what it returns cannot be trained.
    """
    if machine.cache is not None and (known := machine.cache.user_workload(machine.device, model)) is not None:
        return known
    limit = timeout_seconds or _PROBE_TIMEOUT_SECONDS
    is_script = model.kind == "script"  # whose process ends it itself, and knows what it was doing
    try:
        with ExitStack() as stack:
            session = machine.engine.start(limit + _ANSWER_SECONDS if is_script else limit)
            stack.callback(session.close)
            session.open(machine.device)
            found = session.inspect(model, limit, on_note)
            if is_script and begun is not None:
                begun.append(session)
                stack.pop_all()
    except TrialFailedError as failure:
        if failure.status == "timeout" and is_script:
            raise UsageError(
                f"{Path(model.path).name} did not reach its second optimizer step in {limit:.3g} s. Give it more time "
                "with --timeout or --budget.",
                failure.log,
            ) from None
        said = ""
        if (lines := failure.log.strip().splitlines()) and re.search(r"sys\.exit\(\d+\)", failure.message):
            said = f" It ends: {lines[-1]}"  # argparse says there what it refuses
        raise UsageError(failure.message + said, failure.log) from None
    if machine.cache is not None:
        machine.cache.keep_user_workload(machine.device, found)
    return found


def provide(engine: Engine, data_set: DataSet, data_dir: Path) -> None:
    """Make sure that a data set is in a folder: verify it, or download it first if it is missing.

    Raises:
        DataError: It is damaged, or missing and cannot be downloaded.
    """
    try:
        verify(data_set, data_dir)
    except MissingDataError as missing:
        try:
            with closing(engine.start(_FETCH_TIMEOUT_SECONDS)) as session:
                session.fetch(data_set.name, data_dir)
        except TrialFailedError as failure:
            raise MissingDataError(f"{missing} Downloading it failed too: {failure.message.rstrip(' .:')}.") from None
        verify(data_set, data_dir)


def find_commit() -> str | None:
    """Return castwise's commit: CASTWISE_COMMIT, else that of the checkout that this file is in, else None."""
    named = os.environ.get(COMMIT_VARIABLE)
    if named:
        return named
    package = Path(__file__).resolve().parents[1]
    if not (package.parents[1] / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()

    try:
        commit = git("describe", "--always", "--abbrev=12", "--exclude=*")
        return commit + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def check_device_name(device: str | None) -> None:
    """Make sure that a device's name can be one.

    Raises:
        UsageError: It cannot.
    """
    if not re.fullmatch(r"cpu|(cuda|xpu|mps)(:\d{1,3})?", device or "cpu"):
        raise UsageError(f"No device '{device}'. Write cpu, cuda or cuda:N. Intel's xpu and Apple's mps are untried.")


class CachedMachine(FrozenModel):
    environments: dict[str, Environment] = Field(default_factory=dict)  # by the device asked for
    zoo_models: frozenset[str] = frozenset()  # which zoos have
    user_workloads: dict[str, UserWorkload] = Field(default_factory=dict)  # by `_user_model_key`


_FILE = TypeAdapter(dict[str, CachedMachine])  # by `_machine_key`, the newest last


class MachineCache:
    """What earlier commands found out about this machine; whatever cannot be read or kept is asked for again."""

    def __init__(self) -> None:
        self._key, self._machine = "", CachedMachine()
        with suppress(*_FAILURES):
            self._key = _machine_key()
            self._machine = _read().get(self._key, self._machine)

    def environment(self, device: str | None, zoo_models: Sequence[str]) -> Environment | None:
        """Return the environment that a trial on this device has.

        None if it is not known, if its GPU is not there or has another limit, or a zoo's model was not looked up.
        """
        found = self._machine.environments.get(device or _AUTO)
        if found is None or not self._machine.zoo_models.issuperset(zoo_models):
            return None
        if found.gpu is not None:
            try:
                compute_processes(found.gpu_uuid or "")
            except GpuUnreadableError:  # gone, of another vendor, or without NVML
                return None
            if power_limit(found.gpu_uuid or "") != found.power_limit_watts:
                return None
        return found

    def user_workload(self, device: str, model: UserModel) -> UserWorkload | None:
        """Return what is known of a user's model; None if something has changed that it depends on."""
        found = self._machine.user_workloads.get(_user_model_key(device, model))
        if found is None or found.sources is None or any(digest_of(p) != old for p, old in found.sources.items()):
            return None
        return found.model_copy(update={"model": model.model_copy(update={"digest": found.model.digest})})

    def keep_environment(self, device: str | None, environment: Environment, zoo_models: Sequence[str]) -> None:
        """Keep what a process found the device asked for to be, and models that their zoos have."""
        known = self._machine
        update = {
            "environments": known.environments | {device or _AUTO: environment},
            "zoo_models": known.zoo_models.union(zoo_models),
        }
        self._keep(known.model_copy(update=update))

    def keep_user_workload(self, device: str, found: UserWorkload) -> None:
        """Keep what a process found out about a user's model, without secrets among its arguments."""
        if found.sources is not None:
            own = {_user_model_key(device, found.model): found.model_copy(update={"model": found.model.redacted})}
            self._keep(self._machine.model_copy(update={"user_workloads": self._machine.user_workloads | own}))

    def _keep(self, machine: CachedMachine) -> None:
        self._machine = machine
        if not self._key:
            return
        with suppress(*_FAILURES):
            known = _read()
            known.pop(self._key, None)
            newest = dict([*known.items(), (self._key, machine)][-_MOST_MACHINES:])
            file = _cache_file()
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f".{file.name}-{secrets.token_hex(8)}.tmp")
            try:
                temporary.write_bytes(_FILE.dump_json(newest))
                os.replace(temporary, file)
            finally:
                temporary.unlink(missing_ok=True)


def _cache_file() -> Path:
    return cache_dir() / "machines.json"


def _read() -> dict[str, CachedMachine]:
    try:
        return _FILE.validate_json(_cache_file().read_bytes())
    except _FAILURES:
        return {}


def _user_model_key(device: str, model: UserModel) -> str:
    # All of a model but what only its process finds out; of secrets among its arguments only `folder_digest`.
    hidden = model.redacted.model_copy(update={"digest": ""})
    return repr((device, hidden, model.path, model.scratch, os.getcwd()))


def _machine_key() -> str:
    """Return a digest of everything, as far as it is known without torch, that an `Environment` depends on."""
    present = os.getcwd()
    # pip changes the modification time of the folder that it installs into.
    folders = [folder for folder in sys.path if folder not in ("", present)]
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        folders.append(str(Path(torch.origin).parent))
    devices = sorted(
        path for pattern in ("nvidia*", "nvidia*/*", "kfd", "dri/*", "dxg") for path in glob.glob(f"/dev/{pattern}")
    )
    facts = (
        __version__,
        max(_modified(str(file)) for file in Path(__file__).parents[1].rglob("*.py")),
        sys.executable,
        sys.version,
        platform.platform(),
        socket.gethostname(),
        digest_of("/proc/sys/kernel/random/boot_id"),
        sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        driver_version(),
        [(path, os.access(path, os.R_OK | os.W_OK)) for path in devices],
        [(folder, _modified(folder)) for folder in folders],
        sorted(
            (name, value)
            for name, value in os.environ.items()
            if name not in _LOGIN_VARIABLES and not name.startswith(_LOGIN_PREFIXES)
        ),
    )
    return hashlib.sha256(repr(facts).encode(errors="surrogateescape")).hexdigest()


def _modified(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
