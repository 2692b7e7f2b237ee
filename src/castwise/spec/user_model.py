"""How a user's own model is named, where it comes from, and what is known of it before it is measured.

Users write `FILE.py:FUNCTION`, `module.path:FUNCTION` or `transformers:CONFIG`; `castwise.compare` writes
`pickle:FILE`. The user's code runs only in the trial's process: here are only names and files.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from castwise.errors import UsageError
from castwise.spec.frozen import FrozenModel, renamed

OwnKind = Literal["file", "module", "pickle", "transformers"]

# What `castwise run train_me.py` calls.
DEFAULT_FUNCTION = "build"

_PICKLE = "pickle:"
_TRANSFORMERS = "transformers:"
# Shown instead of a pickle's file name.
_OBJECT = "own:"


class UserModel(FrozenModel):
    """Where a user's own model comes from; part of a trial's spec.

    Attributes:
        kind: A function of a file or of a module, a pickle of `castwise.compare`, or a configuration of transformers.
        path: The file, absolute; of a module the folder it is looked for in first; of a configuration that is a
            model type of transformers ("bert") empty. In a record no folder: the file's name, of a module empty.
        folder_digest: In a record twelve hexadecimal digits that identify the folder: two files of one name and
            content may read different files next to them. Empty for a pickle, which contains everything.
        name: The function; of a module with the module before it; of a configuration its model type or file's name.
        digest: Identifies the content of all files of the user's that were read, so that an edited file is measured
            again; empty until the trial's process has reported it.
    """

    kind: OwnKind
    path: str
    name: str
    digest: str = ""
    folder_digest: str = renamed("", "place")

    @property
    def redacted(self) -> Self:
        """Return it as it is recorded: records are shared, so the names of a user's folders are left out."""
        path = Path(self.path)
        if not path.is_absolute():
            return self
        folder, name = (path, "") if self.kind == "module" else (path.parent, path.name)
        digest = "" if self.kind == "pickle" else hashlib.sha256(str(folder).encode()).hexdigest()[:12]
        return self.model_copy(update={"path": name, "folder_digest": digest})


class UserWorkload(FrozenModel):
    """What is known of the user's own model before anything is planned.

    Attributes:
        model: Where it comes from, with its digest.
        batch_size: Samples per optimizer step unless the user names another; None if the model does not say.
        accumulate: Batches of one optimizer step: batch sizes are multiples of it.
    """

    model: UserModel
    batch_size: int | None = Field(default=None, ge=1)
    accumulate: int = Field(default=1, ge=1)


@dataclass(frozen=True)
class _Reference:
    """What a user wrote, taken apart.

    Attributes:
        kind: What it names.
        where: File, module or configuration, as written.
        name: The function or, of a pickle, the model's class.
    """

    kind: OwnKind
    where: str
    name: str

    @property
    def shown(self) -> str:
        """Return the workload's name in records and reports, without folders."""
        if self.kind == "file":
            return f"{Path(self.where).name}:{self.name}"
        if self.kind == "module":
            return f"{self.where}:{self.name}"
        if self.kind == "pickle":
            return f"{_OBJECT}{self.name}"
        path = Path(self.where)
        return _TRANSFORMERS + (path.parent.name or path.name if path.name == "config.json" else path.name)


def is_user_model(name: str) -> bool:
    """Return whether a workload's name is that of a user's own model, as written or as shown."""
    return ":" in name or name.strip().endswith(".py")


def shown_name(reference: str) -> str:
    """Return the name of a user's own model in records and reports; such a name itself is returned unchanged."""
    written = reference.strip()
    return written if written.startswith(_OBJECT) else _parse(written).shown


def pickle_reference(file: Path, name: str) -> str:
    """Return the reference of a pickled model.

    Args:
        file: The pickle.
        name: The class of the model, or the function's name.
    """
    return f"{_PICKLE}{file}#{name}"


def locate(reference: str) -> UserModel:
    """Return where a user's own model comes from; relative paths are taken from the present folder.

    Raises:
        UsageError: The reference is none, or its file does not exist.
    """
    parsed = _parse(reference.strip())
    if parsed.kind == "module":
        return UserModel(kind="module", path=str(Path.cwd()), name=f"{parsed.where}:{parsed.name}")
    if parsed.kind == "transformers":
        return _locate_config(parsed.where)
    file = Path(parsed.where).expanduser().absolute()
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise UsageError(
            f"The file '{parsed.where}' {what}. Name a Python file and a function in it: train_me.py:{parsed.name}; "
            "`castwise init FILE` writes one to start from."
        )
    return UserModel(kind=parsed.kind, path=str(file), name=parsed.name)


def _locate_config(where: str) -> UserModel:
    path = Path(where).expanduser().absolute()
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return UserModel(kind="transformers", path=str(file), name=Path(where).name)
    if "/" in where or where.endswith(".json"):
        raise UsageError(
            f"There is no configuration '{where}'. Name a config.json, the folder it lies in, or a model type of "
            "transformers such as transformers:bert; castwise downloads nothing."
        )
    return UserModel(kind="transformers", path="", name=where)


def _parse(written: str) -> _Reference:
    if written.startswith(_OBJECT):
        raise UsageError(
            f"'{written}' was an object of a Python session, and only that has it: call castwise.compare there again."
        )
    if written.startswith(_PICKLE):
        where, _, name = written.removeprefix(_PICKLE).partition("#")
        return _Reference("pickle", where, name or "model")
    if written.startswith(_TRANSFORMERS):
        where = written.removeprefix(_TRANSFORMERS)
        if not where:
            raise UsageError("'transformers:' needs a configuration behind the colon: a config.json or a model type.")
        return _Reference("transformers", where, "")
    where, _, name = written.rpartition(":") if not written.endswith(".py") else (written, "", DEFAULT_FUNCTION)
    if not where or not name.isidentifier():
        raise UsageError(
            f"'{written}' names no function. Write FILE.py:FUNCTION or module.path:FUNCTION; "
            f"FILE.py alone takes its function '{DEFAULT_FUNCTION}'."
        )
    if where.endswith(".py"):
        return _Reference("file", where, name)
    if not all(part.isidentifier() for part in where.split(".")):
        raise UsageError(
            f"'{written}' is neither a Python file nor a module. Write FILE.py:FUNCTION, module.path:FUNCTION, "
            "torchvision:NAME, timm:NAME or transformers:CONFIG."
        )
    return _Reference("module", where, name)
