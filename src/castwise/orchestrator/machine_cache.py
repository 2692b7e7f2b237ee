"""What earlier commands found out about this machine, so that records can answer without importing torch.

The first process that is started after all must find the same machine: nothing from the cache gets into a record.
"""

import glob
import hashlib
import importlib.util
import os
import platform
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import Field, TypeAdapter

from castwise._version import __version__
from castwise.records.schema import Environment
from castwise.registry.datasets import cache_dir
from castwise.spec.frozen import FrozenModel
from castwise.spec.user_model import UserModel, UserWorkload, digest_of
from castwise.telemetry.gpu import GpuUnreadableError
from castwise.telemetry.nvml import compute_processes, driver_version, power_limit

_MOST_MACHINES = 20  # in the file; the environment variables of each login may differ
_AUTO = "auto"  # no device was named
# A file that cannot be read, written or understood; no home folder; a torch that cannot be found.
_FAILURES = (OSError, ValueError, RuntimeError, ImportError)
# Variables of one login or terminal.
_LOGIN_VARIABLES = ("_", "SHLVL", "PWD", "OLDPWD", "WINDOWID", "XDG_SESSION_ID")
_LOGIN_PREFIXES = ("SSH_", "TERM", "TMUX", "VSCODE_")


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
