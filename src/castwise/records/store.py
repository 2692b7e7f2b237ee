"""Trials on disk: one JSON file each, written whole or not at all, never deleted; and which of them count again.

`RESULTS/<device>-<fingerprint>/<workload>-<precision>-b<batch>-<key>.json`: each machine has a folder, so that a
resumed job never uses another machine's figures.
"""

import errno
import fcntl
import itertools
import json
import os
import re
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from castwise.errors import StoreError, shortened
from castwise.records.collector import gc_disabled
from castwise.records.schema import SCHEMA_VERSION, Environment, Trial
from castwise.spec.quantities import format_bytes
from castwise.spec.trial import TrialSpec

_LARGEST_RECORD = 64 * 2**20  # bytes; the largest of this project's records has 0.2 MB
_MOST_DIGITS = 19  # of an integer; a float cannot hold one of 309
_LONG_NUMBER = re.compile(rb"\d{20}")
KEPT = "._"  # in the names of records and their folders
_NAME_LENGTH = 80
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of a file system without locks
_WAIT_SECONDS = 0.2  # between two looks at a lock that another command holds


@dataclass(frozen=True)
class Problem:
    """A file that is not a castwise record, and why."""

    path: Path
    reason: str


class Store:
    """The records of one results folder, which is made with the first record.

    Raises:
        StoreError: The folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.has_locks = True  # whether the file system has, as far as it is known
        self._seen: set[Path] = set()  # files that were read or written
        self._known: dict[str, Trial] = {}  # what was in those that were read, by spec key
        try:
            try_to_write(folder)
        except OSError as error:
            raise StoreError(
                f"Results cannot be written to '{folder}': {error.strerror or error}. Name another with --results."
            ) from None

    def machine_folder(self, environment: Environment) -> Path:
        return self.folder / name_of(environment)

    def save(self, trial: Trial) -> Path:
        """Write a trial's record and return its path. A file that is there already stays as it is.

        Raises:
            StoreError: The record cannot be written.
        """
        folder = self.machine_folder(trial.environment)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = _write_new(folder, stem_of(trial.spec), trial.model_dump_json(indent=1).encode() + b"\n")
        except OSError as error:
            raise StoreError(
                f"The record of {trial.spec.label} cannot be written to '{folder}': {error.strerror or error}."
            ) from None
        self._seen.add(path)
        return path

    def checkpoint(self, spec: TrialSpec, environment: Environment) -> Path:
        """Return the file from which a training trial resumes on this machine, whether or not it exists."""
        return self.machine_folder(environment) / "checkpoints" / f"{spec.key}.pt"

    def load(self, environment: Environment) -> tuple[dict[str, Trial], list[Problem]]:
        """Return one machine's newest trial for each spec key, and the files that are not records."""
        self._seen.clear()
        self._known.clear()
        return self.load_more(environment)

    def load_more(self, environment: Environment) -> tuple[dict[str, Trial], list[Problem]]:
        """Return what `load` does; only files are read that other commands wrote since the last look."""
        files = sorted(set(self.machine_folder(environment).rglob("*.json")) - self._seen)
        self._seen.update(files)
        records, problems = read_records(files)
        own = (record.trial for record in records if record.trial.environment.fingerprint == environment.fingerprint)
        self._known.update((trial.spec.key, trial) for trial in own)
        return dict(self._known), problems

    @contextmanager
    def claim(self, specs: Iterable[TrialSpec], environment: Environment, say: Callable[[str], None]) -> Iterator[None]:
        """Hold the locks of some configurations on a machine, if the file system has locks.

        While another command holds one of them, this waits, and says so once. The kernel releases a process's locks
        when it ends, whatever ended it.

        Raises:
            StoreError: The folder cannot be written.
        """
        folder = self.machine_folder(environment)
        names = {spec.configuration: stem_of(spec.model_copy(update={"repeat": 0})) for spec in specs}
        paths = sorted(folder / f".{name}.lock" for name in names.values())
        with ExitStack() as held:
            held.callback(remove_empty, folder, self.folder)
            is_waiting = False
            try:
                while (taken := lock_all(paths, held)) is not None:
                    if not is_waiting:
                        say(f"{taken}, writing to '{self.folder}': waiting for its records.")
                    is_waiting = True
                    time.sleep(_WAIT_SECONDS)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    reason = error.strerror or error
                    raise StoreError(f"Results cannot be written to '{folder}': {reason}.") from None
                self.has_locks = False
            yield


@dataclass(frozen=True)
class Record:
    path: Path
    trial: Trial


def read_records(files: Iterable[Path]) -> tuple[list[Record], list[Problem]]:
    """Return the records in some files, oldest first, and the files that are none, each with its reason."""
    records: list[Record] = []
    problems: list[Problem] = []
    with gc_disabled():
        for file in files:
            try:
                records.append(Record(file, _read(file)))
            except StoreError as error:
                problems.append(Problem(file, str(error)))
    return sorted(records, key=lambda record: record.trial.started_at), problems


def load_folder(folder: Path) -> tuple[list[Trial], list[Problem]]:
    """Return all trials under a folder, oldest first, and the JSON files that are none, each with its reason."""
    records, problems = read_records(sorted(folder.rglob("*.json")))
    return [record.trial for record in records], problems


@dataclass(frozen=True)
class ResumePolicy:
    """What is measured although it is on record: crashed and timed-out trials, or everything."""

    retry: bool = False
    again: bool = False


def is_reusable(trial: Trial, timeout_seconds: float, *, retry: bool = False) -> bool:
    """Return whether a record need not be measured again; a timeout counts if the limit was not shorter than now."""
    if trial.status == "timeout" and trial.spec.protocol.timeout_seconds < timeout_seconds:
        return False
    return not (retry and trial.status in ("crashed", "timeout"))


def reusable_trials(specs: Sequence[TrialSpec], known: Mapping[str, Trial], policy: ResumePolicy) -> dict[str, Trial]:
    """Return the recorded trials of the specs' configurations, whatever their repeats, by the key of their own spec."""
    if policy.again:
        return {}
    asked = {spec.configuration: spec for spec in specs}
    found: dict[str, Trial] = {}
    for key, trial in known.items():
        spec = asked.get(trial.spec.configuration)
        # A key leaves defaults out: a record made with other defaults has the same key, and another configuration.
        if (
            spec is not None
            and trial.spec.without_extras == spec.without_extras.model_copy(update={"repeat": trial.spec.repeat})
            and is_reusable(trial, spec.protocol.timeout_seconds, retry=policy.retry)
        ):
            found[key] = trial
    return found


class _RecordVersion(BaseModel):
    schema_version: int


def _read(path: Path) -> Trial:
    try:
        content = _read_file(path)
    except OSError as error:
        raise StoreError(error.strerror or str(error)) from None
    if _LONG_NUMBER.search(content):
        with suppress(ValueError, RecursionError):  # no JSON: said below
            json.loads(content, parse_int=_checked_int)
    try:
        trial = Trial.model_validate_json(content)
    except ValidationError as error:
        _check_version(content)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise StoreError(f"not a record of schema {SCHEMA_VERSION} ({where}: {first['msg']})") from None
    if "schema_version" not in trial.model_fields_set or trial.schema_version != SCHEMA_VERSION:
        _check_version(content)
    return trial.model_copy(update={"message": shortened(trial.message), "log": shortened(trial.log)})


def _read_file(path: Path) -> bytes:
    """Return a file's content; a pipe or a device might never end."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise StoreError("not a regular file")
        if status.st_size > _LARGEST_RECORD:
            raise StoreError(f"larger than a record can be ({format_bytes(_LARGEST_RECORD)})")
        return file.read(_LARGEST_RECORD)


def _checked_int(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise StoreError(f"a number has more than {_MOST_DIGITS} digits")
    return int(digits)


def _check_version(content: bytes) -> None:
    """Raise a StoreError if a file is no record of this schema at all."""
    try:
        version = _RecordVersion.model_validate_json(content).schema_version
    except ValidationError as error:
        if error.errors()[0]["type"] == "json_invalid":
            raise StoreError("not a castwise record: no JSON, or cut off") from None
        raise StoreError("not a castwise record: it has no schema_version") from None
    if version != SCHEMA_VERSION:
        raise StoreError(f"a record of schema {version}, and this castwise reads schema {SCHEMA_VERSION}")


def try_to_write(folder: Path) -> None:
    """Write a file into a folder, create the folder if needed, and leave nothing behind."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    finally:
        for path in made:
            with suppress(OSError):  # somebody else has begun to use it
                path.rmdir()


def lock_all(paths: Sequence[Path], held: ExitStack) -> str | None:
    """Lock all of some files, to be released at `held`'s end; or else none, and return who has one."""
    with ExitStack() as locks:
        for path in paths:
            while True:
                with suppress(FileNotFoundError):  # the command that just ended has removed the folder
                    path.parent.mkdir(parents=True, exist_ok=True)
                    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                    locks.callback(os.close, descriptor)
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # over NFS Linux makes it one of fcntl's
                    except BlockingIOError:
                        owner = os.read(descriptor, 200).decode(errors="replace")
                        return owner or "Another command measures the same"
                    if os.stat(path).st_ino == os.fstat(descriptor).st_ino:  # not one that was just removed
                        break
            locks.callback(_remove, path)  # before it is released
            os.truncate(descriptor, 0)
            os.write(descriptor, f"Process {os.getpid()} on {socket.gethostname()} measures the same".encode())
        held.enter_context(locks.pop_all())
    return None


def _remove(path: Path) -> None:
    with suppress(OSError):  # what prevents it is said elsewhere
        path.unlink()


def remove_empty(*folders: Path) -> None:
    """Remove folders, each in the next, as far as nothing is in them."""
    with suppress(OSError):  # something is in one, which is how it should be
        for folder in folders:
            folder.rmdir()


def _write_new(folder: Path, stem: str, content: bytes) -> Path:
    """Write to a temporary file, sync, and link it to the first free name: whole or not at all."""
    temporary = folder / f".{stem}-{secrets.token_hex(8)}.tmp"  # not mkstemp's: a record has the user's own mode
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        for number in itertools.count(1):
            path = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
            try:
                os.link(temporary, path)  # unlike a rename, never replaces an existing file
                break
            except FileExistsError:
                continue
            except OSError:  # a file system without hard links
                if not path.exists():
                    os.replace(temporary, path)
                    break
    finally:
        temporary.unlink(missing_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return path


def name_of(environment: Environment) -> str:
    return f"{slug(environment.device_name, KEPT)[:_NAME_LENGTH]}-{environment.fingerprint}"


def stem_of(spec: TrialSpec) -> str:
    """Return the name of a trial's files, without the number that makes it unique."""
    num_gpus = f"-x{spec.world_size}" if spec.world_size > 1 else ""
    name = slug(f"{spec.workload}-{spec.precision}-b{spec.batch_size}{num_gpus}", KEPT)
    return f"{name[:_NAME_LENGTH]}-{spec.key}"


def slug(text: str, kept: str = "") -> str:
    """Return lower-case ASCII letters, digits and the `kept` characters, with one hyphen for anything else between."""
    return re.sub(rf"[^a-z0-9{kept}]+", "-", text.lower()).strip("-.")


def free_name(name: str, taken: Container[str], before_number: str = " #") -> str:
    """Return a name, with a number from 2 on if it is taken: `resnet50 #2`."""
    numbered = (f"{name}{before_number}{number}" for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([name], numbered) if candidate not in taken)
