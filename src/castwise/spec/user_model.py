"""How a user's own model is named, where it comes from, and what is known of it before it is measured.

Users write `python FILE.py ARGUMENTS` or `python -m MODULE ARGUMENTS` for a script that trains by itself,
`FILE.py:FUNCTION`, `module.path:FUNCTION` or `transformers:CONFIG`; `castwise.compare` writes `pickle:FILE`. The user's
code runs only in the trial's process: here are only names and files.
"""

import ast
import difflib
import functools
import hashlib
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from castwise.errors import UsageError
from castwise.spec.frozen import FrozenModel, renamed
from castwise.spec.types import Unit

OwnKind = Literal["file", "module", "pickle", "transformers", "script"]

# What `castwise run train_me.py` calls.
DEFAULT_FUNCTION = "build"

_PICKLE = "pickle:"
_TRANSFORMERS = "transformers:"
# Shown instead of a pickle's file name.
_OBJECT = "own:"
# What starts a script on several ranks, as it is written; and what castwise does not start.
_LAUNCHERS = (
    ("torchrun",),
    ("accelerate", "launch"),
    ("python", "-m", "torch.distributed.run"),
    ("python", "-m", "accelerate.commands.launch"),
)
_OTHER_LAUNCHERS = (
    *("accelerate", "deepspeed", "mpirun", "srun", "lightning"),
    *("uv", "poetry", "conda", "env", "bash", "sh"),
)
_RUNS_MODULE = ("-m", "--module")
# The option of a launcher that says how many ranks it starts.
_RANKS = re.compile(r"(--(?:nproc[-_]per[-_]node|num[-_]processes)[ =])(\S+)")
# Options of a launcher that start what is no script, or on other hosts.
_ELSEWHERE = re.compile(r" (--(no[-_]python|run[-_]path)|--(nnodes|num[-_]machines)[ =](?!1(:1)?( |$))\S+)")
# The interpreter of a console script; one with a long path has a shell find it. Source: distlib, scripts.py.
_INTERPRETER = re.compile(rb"#!(?:/bin/sh\n'''exec' |/usr/bin/env )?\"?([^\"\n]+?)\"?(?: -.*| \"\$0\" .*)?\n")
# Options of Python before a script that change nothing here; -W has a value, which may be a word of its own.
_HARMLESS_OPTION = re.compile(r"-[uB]|-W(.*)")
# Names of arguments whose values are in no record. Not those of `--tokenizer` or `--max-tokens`.
_SECRET = re.compile(
    r"password|passwd|secret|credential|(^|[-_.+])auth([-_.]|$)|(^|[-_.+])(?<!(bos|eos|pad|unk)[-_])token([-_.]|$)|"
    r"(^-*|\.|api_?|(api|access|private|account|ssh|service)[-_])key$",
    re.IGNORECASE,
)
# Another key is a secret if it looks like one: `--csv-img-key filepath` is a column.
_KEY, _RANDOM = re.compile(r"(^|[-_.+])key([-_.]|$)", re.IGNORECASE), re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w-]{16,}")
# What is an option after a secret's name, and not the secret, which may begin with a hyphen: `-v`, `--lr`, `--lr=0.1`.
_OPTION = re.compile(r"-[A-Za-z]|--[a-z][a-z0-9_.-]*(=.*)?", re.DOTALL)
_IMPORT = r"^\s*(?:from|import) (\w+)"
_ROUNDS = 200_000  # a tenth of a second; chosen here
# Packages whose import takes seconds, and the module that contains most of it. None starts a Python thread, or a CUDA
# context if `trial/preload.py` imports it.
_SLOW_IMPORTS = {"transformers": "transformers.modeling_utils", "timm": "timm", "lightning": "lightning"}
_SLOW_IMPORTS |= {
    name: name for name in ("accelerate", "datasets", "diffusers", "monai", "peft", "sentence_transformers", "trl")
}
_ENVIRONMENT = re.compile(r"\b(environ|putenv|load_dotenv)\b")


class UserModel(FrozenModel):
    """Where a user's own model comes from; part of a trial's spec."""

    kind: OwnKind
    # The absolute file; of a module the folder that is searched first; of a model type of transformers ("bert") empty.
    # Records name no folder: the file's name, and nothing of a module.
    path: str
    name: str  # the function, MODULE:FUNCTION, the configuration's model type or file name, or a script's module
    arguments: tuple[str, ...] = ()  # of a script; in records a file's is its name
    launcher: tuple[str, ...] = ()  # what starts a script on several ranks: ("torchrun", "--nproc-per-node", "2")
    units_per_step: int | None = None  # of a script, as the user counts them; None counts samples of its loader
    unit: Unit | None = None  # what they are called
    scratch: str = ""  # the working directory of a script; empty for the present one, and in records
    # Of all files of the user's that were read: an edited file is measured again. Empty until the process reports it.
    digest: str = ""
    # In records, of the folder: files of one name and content may read different files next to them. Empty for a
    # pickle, which contains everything.
    folder_digest: str = renamed("", "place")

    @property
    def num_ranks(self) -> int:
        """Return how many ranks a script's launcher starts: 1 without one, or if it gives no number."""
        named = _RANKS.search(shlex.join(self.launcher))
        return int(named[2]) if named is not None and named[2].isdecimal() else 1

    @property
    def redacted(self) -> Self:
        """Return it as it is recorded: records are shared, so the names of a user's folders are left out."""
        path = Path(self.path)
        if not path.is_absolute():
            return self
        folder, name = (path, "") if self.kind == "module" else (path.parent, path.name)
        # A script reads files next to it, in the present folder, and those that its arguments name.
        hidden = without_secrets(self.arguments)
        origin = str(folder) if self.kind != "script" else repr((folder, os.getcwd(), self.arguments))
        digest = "" if self.kind == "pickle" else _origin_digest(origin, hides=hidden != [*self.arguments])
        update = {"path": name, "folder_digest": digest, "arguments": tuple(map(_without_folder, hidden))}
        launcher = tuple(map(_without_folder, self.launcher))
        return self.model_copy(update={**update, "launcher": launcher, "scratch": ""})


class LightningParts(FrozenModel):
    """What a script needs of a LightningModule, to train it without a Trainer."""

    hooks: tuple[str, ...] = ()  # of its own, which a Trainer calls first: setup, configure_model
    has_loader: bool = False  # whether the batch is of its train_dataloader
    optimizer_at: str = ""  # where it is in `configured`, which configure_optimizers returned: `["optimizer"]`
    schedulers_at: tuple[str, ...] = ()  # those that are stepped each step, likewise


class UserParts(FrozenModel):
    """How a user's function gives the parts of a training loop: all that a script that calls it has to know."""

    form: Literal["model", "tuple", "dict"]
    names: tuple[str, ...]  # of the parts, in a tuple's order
    is_function: bool = True  # or the name is that of an object of this form
    makes_model: bool = False  # whether the model is given as a function that makes it
    is_float32: bool = True  # whether the model's weights came in float32
    is_of_transformers: bool = False
    lightning: LightningParts | None = None  # if its step and optimizer are used
    batch: Literal["example", "function", "loader"] = "example"
    batch_form: Literal["tensor", "tuple", "dict", "mapping", "other"] = "other"
    example_size: int | None = None  # samples of the example
    optimizer: Literal["none", "instance", "function"] = "none"
    optimizer_name: str = ""  # its class
    scheduler: Literal["none", "instance", "function"] = "none"  # none if it is not stepped each step
    has_total_steps: bool = False  # whether the scheduler must not be stepped more often
    has_loss_module: bool = False  # whether the loss is a module, which may hold tensors
    clip_grad_norm: float | None = None
    accumulate: int = 1
    unit: str = "samples"
    units_per_sample: int = 1


class UserWorkload(FrozenModel):
    """What is known of the user's own model before anything is planned."""

    model: UserModel  # with its digest
    batch_size: int | None = Field(default=None, ge=1)  # per optimizer step; None if the model does not say
    accumulate: int = Field(default=1, ge=1)  # batches of one optimizer step: batch sizes are multiples of it
    can_be_judged: bool = False  # whether it has a training set and a function that validates
    parts: UserParts | None = None  # for a script
    # Of a script: in which it computes what it does as written, by the settings that hold after its first steps.
    same_precisions: tuple[str, ...] = ()
    # What all this follows from, besides installed packages and environment variables: files and folders with their
    # `digest_of`. None if it may follow from anything else.
    sources: dict[str, str] | None = None


_LARGE_BYTES = 2**24  # a file that is not read for its digest


def digest_of(path: str) -> str:
    """Return what changes if a file's content or the names in a folder do; empty if there is neither.

    A large file counts as unchanged if size and modification time are.
    """
    try:
        if os.path.isdir(path):
            content = repr(sorted(name for name in os.listdir(path) if name != "__pycache__"))
        elif not os.path.isfile(path):
            return ""
        elif (state := os.stat(path)).st_size > _LARGE_BYTES:
            content = f"{state.st_size} {state.st_mtime_ns}"
        else:
            return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    except OSError:
        return ""
    return hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()[:12]


def is_user_model(name: str) -> bool:
    """Return whether a workload's name is that of a user's own model, as written or as shown."""
    return is_script(name) or ":" in name or name.strip().endswith(".py")


def is_script(name: str) -> bool:
    """Return whether a workload's name is a command that runs a script: `python train.py --lr 1e-3`."""
    return name.lstrip().startswith(("python ", "torchrun ", "accelerate launch "))


def script_command(words: Sequence[str]) -> str | None:
    """Return the name of the workload that a command line is; None if its words are names of workloads.

    Raises:
        UsageError: It runs no script, or not by this Python.
    """
    named = _without_folder_and_options(words)
    program, is_python = named[0], named[0] == "python"
    launcher = _launcher_of(named)
    if not is_python and not launcher:
        if program in _OTHER_LAUNCHERS or any(word.startswith("-") for word in words[1:]):
            raise UsageError(f"castwise cannot start '{words[0]}'. Name the script: castwise run -- python train.py")
        return None
    if is_python and words[0] not in ("python", "python3") and not _is_this_python(words[0]):
        raise UsageError(f"castwise runs scripts by its own Python, '{sys.executable}', and not by '{words[0]}'.")
    own, file, _ = _parse_script(shlex.join(named))
    if not file or not (launcher or file.endswith(".py") or own[-1] in _RUNS_MODULE or _console_script(file)):
        what = f"'{file}' is no script" if file else "it names no script"
        raise UsageError(f"'{shlex.join(words)}': {what}. Write: castwise run -- python train.py --lr 1e-3")
    refused = _ELSEWHERE.search(f" {shlex.join(own[len(launcher) :])}") if launcher else None
    if refused is not None:
        raise UsageError(f"castwise starts a script's ranks on this host alone: '{refused[1]}' is not possible here.")
    return shlex.join(named)


def _without_folder_and_options(words: Sequence[str]) -> list[str]:
    """Return a command with the bare name of its program, and without options of Python that change nothing here."""
    program = Path(words[0]).name if words else ""
    if re.fullmatch(r"python[\d.]*", program) is None:
        return [program, *words[1:]]
    named = ["python", *words[1:]]
    while len(named) > 1 and (option := _HARMLESS_OPTION.fullmatch(named[1])):
        del named[1 : 3 if option[1] == "" else 2]
    return named


def _launcher_of(words: Sequence[str]) -> tuple[str, ...]:
    """Return what starts a script on several ranks, if a command begins with it."""
    return next((launcher for launcher in _LAUNCHERS if tuple(words[: len(launcher)]) == launcher), ())


def _is_this_python(program: str) -> bool:
    found = shutil.which(program)
    return found is not None and os.path.realpath(found) == os.path.realpath(sys.executable)


def _console_script(name: str) -> Path | None:
    """Return the file of a program, by its path or on the PATH, that this Python runs; None if there is none."""
    found = shutil.which(name)
    if found is None:
        return None
    with open(found, "rb") as file:
        first = _INTERPRETER.match(file.read(1024))
    program = shutil.which(os.fsdecode(first[1])) if first else None
    # Environments share their interpreter, and have packages of their own.
    folders = {os.path.realpath(os.path.dirname(each)) for each in (program or "", sys.executable)}
    return Path(found) if program is not None and len(folders) == 1 and _is_this_python(program) else None


def with_python(words: Sequence[str]) -> list[str]:
    """Return a command with Python before a console script, as in `trl sft`; any other stays.

    Raises:
        UsageError: It is no program, or none that this Python runs.
    """
    program = _without_folder_and_options(words)[0]
    launchers = {launcher[0] for launcher in _LAUNCHERS}
    if program in launchers or program in _OTHER_LAUNCHERS or is_user_model(words[0]):
        return list(words)
    if _console_script(words[0]) is not None:
        return ["python", *words]
    if shutil.which(words[0]) is None:
        raise UsageError(f"There is no program '{words[0]}' on the PATH, and no workload of that name.")
    raise UsageError(
        f"castwise runs scripts by its own Python, '{sys.executable}', and '{words[0]}' is none of its scripts. "
        "Install castwise into the environment of that program."
    )


def _parse_script(command: str) -> tuple[list[str], str, list[str]]:
    """Return what starts a script (python, or a launcher with its options), the file, and its arguments.

    If what starts it ends with `-m`, it is not a file but a module.
    """
    words = shlex.split(command)
    launcher = _launcher_of(words)
    first = 2 if words[1:2] == ["-m"] else 1
    if launcher:
        after = range(len(launcher), len(words))
        first = next((i for i in after if words[i].endswith(".py") or words[i - 1] in _RUNS_MODULE), len(words))
    return words[:first], "".join(words[first : first + 1]), words[first + 1 :]


def with_ranks(command: str, count: int) -> str:
    """Return a script's command with so many ranks.

    Raises:
        UsageError: No launcher starts it.
    """
    start, file, arguments = _parse_script(command)
    launcher = _launcher_of(start)
    if not launcher:
        raise UsageError(
            f"A launcher starts a script on several GPUs, and '{command}' has none. Write: "
            "castwise why --gpus 1,2 -- torchrun --nproc-per-node 2 train.py"
        )
    named, num_named = _RANKS.subn(rf"\g<1>{count}", shlex.join(start))
    option = "--nproc-per-node" if "torch" in launcher[-1] else "--num_processes"
    words = shlex.split(named) if num_named else [*launcher, option, str(count), *start[len(launcher) :]]
    return shlex.join([*words, file, *arguments])


def _file_of_module(name: str) -> str | None:
    """Return the file that `python -m NAME` runs, None if there is none. Nothing of it is imported."""
    spec = None
    if all(part.isidentifier() for part in name.split(".")):
        top, *rest = name.split(".")
        with suppress(ValueError):  # a module that is imported already, but of no file: __main__
            spec = PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
        for part in rest:
            inside = spec and spec.submodule_search_locations
            spec = PathFinder.find_spec(f"{spec.name}.{part}", inside) if spec and inside else None
        if spec is not None and spec.submodule_search_locations is not None:  # a package
            spec = PathFinder.find_spec(f"{name}.__main__", spec.submodule_search_locations)
    return None if spec is None else spec.origin


def _file_of_script(start: Sequence[str], where: str) -> Path:
    """Return the file that a command's start runs, also if it is named as a module; "." for a module without one."""
    if start[-1] in _RUNS_MODULE:
        return Path(_file_of_module(where) or "")
    file = Path(where).expanduser()
    return file if file.exists() else _console_script(where) or file


@functools.cache
def _origin_digest(origin: str, *, hides: bool) -> str:
    """Return a digest; of an origin that holds secrets one that takes long, so that nobody can guess them by it."""
    long = hashlib.pbkdf2_hmac("sha256", origin.encode(), b"castwise", _ROUNDS) if hides else b""
    return (long.hex() or hashlib.sha256(origin.encode()).hexdigest())[:12]


def without_secrets(arguments: Iterable[str]) -> list[str]:
    """Return a script's arguments with `HIDDEN` for the values of those whose names say that they are secret."""
    found: list[str] = []
    before = ""  # the option whose value may come next
    for argument in arguments:
        name, equals, value = argument.partition("=")
        hidden = f"{name}=HIDDEN" if equals and _is_secret(name, value) else argument
        is_value = before and not _OPTION.fullmatch(argument)
        found.append("HIDDEN" if is_value and _is_secret(before, argument) else hidden)
        before = argument if argument.startswith("-") and not equals else ""
    return found


def _is_secret(name: str, value: str) -> bool:
    """Return whether an argument's value is to be hidden, by its name, or by both."""
    return bool(_SECRET.search(name) or (_KEY.search(name) and _RANDOM.fullmatch(value)))


def _without_folder(argument: str) -> str:
    """Return an argument of a script with the name alone of an absolute file."""
    flag, equals, value = argument.rpartition("=")
    return f"{flag}{equals}{Path(value).name}" if os.path.isabs(value) else argument


def is_object(name: str) -> bool:
    """Return whether a workload's name, as shown, is that of an object that only a Python session has."""
    return name.startswith(_OBJECT)


def shown_name(reference: str) -> str:
    """Return the name of a user's own model in records and reports, without folders; a shown name stays as it is."""
    written = reference.strip()
    if is_object(written):
        return written
    if is_script(written):
        start, file, arguments = _parse_script(written)
        return shlex.join(
            [*map(_without_folder, start), Path(file).name, *map(_without_folder, without_secrets(arguments))]
        )
    kind, where, name = _parse(written)
    if kind == "pickle":
        return f"{_OBJECT}{name}"
    if kind == "transformers":
        path = Path(where)
        return _TRANSFORMERS + (path.parent.name or path.name if path.name == "config.json" else path.name)
    return f"{Path(where).name if kind == 'file' else where}:{name}"


def slow_imports(names: Iterable[str]) -> list[str]:
    """Return what users' and zoos' models import that takes seconds, by the files' text or by what is imported here.

    Of a script that sets environment variables it is what it imports before any other statement. A name in a module is
    `module:name`: lazy modules import what is asked for.
    """
    found, parts = set[str](), set[str]()
    for name in names:
        start, where, _ = _parse_script(name) if is_script(name) else ([""], name.rpartition(":")[0] or name, [])
        file = _file_of_script(start, where)
        text = ""
        with suppress(OSError, UnicodeError):
            text = file.read_text() if file.suffix == ".py" else ""
        imported = list(_imports_of(text)) if is_script(name) else re.findall(_IMPORT, text, re.MULTILINE)
        found |= _SLOW_IMPORTS.keys() & {each.partition(".")[0].partition(":")[0] for each in imported}
        parts |= {each for each in imported if ":" in each and each.split(".")[0].split(":")[0] in _SLOW_IMPORTS}
        found |= {package for package in _SLOW_IMPORTS if name.startswith(f"{package}:")}
        found |= {package for package in _SLOW_IMPORTS if name.startswith(_PICKLE) and package in sys.modules}
        if "torchao" in text or (name.startswith(_PICKLE) and "torchao" in sys.modules):
            return []  # it is imported in the trial's process: it asks the GPU
    return [_SLOW_IMPORTS[package] for package in sorted(found)] + sorted(parts)


def _imports_of(text: str) -> Iterator[str]:
    """Yield the modules, and `module:name`, that a script imports in the environment that it finds."""
    with suppress(SyntaxError, ValueError):
        tree = ast.parse(text)
        statements: Iterable[ast.AST] = ast.walk(tree)
        if _ENVIRONMENT.search(text):
            constant = (ast.Import, ast.ImportFrom, ast.Expr)
            statements = itertools.takewhile(
                lambda each: isinstance(each, constant) and not isinstance(getattr(each, "value", None), ast.Call),
                tree.body,
            )
        for each in statements:
            if isinstance(each, ast.Import):
                yield from (alias.name for alias in each.names)
            elif isinstance(each, ast.ImportFrom) and each.module and not each.level:
                yield each.module
                yield from (f"{each.module}:{alias.name}" for alias in each.names if alias.name != "*")


def pickle_reference(file: Path, name: str) -> str:
    """Return the reference of a pickled model; `name` is its class, or the function that makes it."""
    return f"{_PICKLE}{file}#{name}"


def locate(reference: str) -> UserModel:
    """Return where a user's own model comes from; relative paths are taken from the present folder.

    Raises:
        UsageError: The reference is none, or its file does not exist.
    """
    if is_script(reference):
        return _locate_script(reference)
    kind, where, name = _parse(reference.strip())
    if kind == "module":
        return UserModel(kind=kind, path=str(Path.cwd()), name=f"{where}:{name}")
    file = Path(where).expanduser().absolute()
    if kind == "transformers":
        file = file / "config.json" if file.is_dir() else file
        if file.is_file():
            return UserModel(kind=kind, path=str(file), name=Path(where).name)
        if "/" in where or where.endswith(".json"):
            raise UsageError(
                f"There is no configuration '{where}'. Name a config.json, the folder it lies in, or a model type of "
                "transformers such as transformers:bert; castwise downloads nothing."
            )
        return UserModel(kind=kind, path="", name=where)
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise UsageError(
            f"The file '{where}' {what}. Name a Python file, train_me.py, or one with a function, train_me.py:{name}; "
            "`castwise init FILE` writes one to start from."
        )
    if ":" not in reference and _lacks(file, name):
        raise UsageError(
            f"'{where}' has no function '{name}', which returns a model and a batch. To measure a script as it is, put "
            f"-- python before it: castwise run -- python {where}"
        )
    return UserModel(kind=kind, path=str(file), name=name)


def _locate_script(reference: str) -> UserModel:
    start, where, arguments = _parse_script(reference)
    is_module = start[-1] in _RUNS_MODULE
    script = _file_of_script(start, where).absolute()
    if not script.is_file():
        what = "is a folder" if script.is_dir() and not is_module else "does not exist"
        beside = [each.name for each in script.parent.glob("*.py")] if script.parent.is_dir() else []
        near = difflib.get_close_matches(script.name, beside, n=1)
        hint = f" Did you mean {Path(where).with_name(near[0])}?" if near else ""
        raise UsageError(f"The {'module' if is_module else 'script'} '{where}' {what}.{hint}")
    launcher = tuple(start[:-1] if is_module else start)
    return UserModel(
        kind="script",
        path=str(script),
        name=where if is_module else "",
        arguments=tuple(arguments),
        launcher=() if launcher == ("python",) else launcher,
    )


def _lacks(file: Path, name: str) -> bool:
    """Return whether a file certainly binds no such name; one that cannot be parsed is left to Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return False
    words = {each for node in ast.walk(tree) for each in (getattr(node, "name", ""), getattr(node, "id", ""))}
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        for alias in getattr(node, "names", ())
        if isinstance(alias, ast.alias)
    }
    return not {name, "*"} & (words | names)


def _parse(written: str) -> tuple[OwnKind, str, str]:
    """Return what a reference names, the file, module or configuration as written, and the function or class."""
    if any("\ud800" <= character <= "\udfff" for character in written):
        raise UsageError(f"The name '{written}' is not in UTF-8, as names in records are. Rename the file or folder.")
    if is_object(written):
        raise UsageError(
            f"'{written}' was an object of a Python session, and only that has it: call castwise.compare there again."
        )
    if written.startswith(_PICKLE):
        where, _, name = written.removeprefix(_PICKLE).partition("#")
        return "pickle", where, name or "model"
    if written.startswith(_TRANSFORMERS):
        where = written.removeprefix(_TRANSFORMERS)
        if not where:
            raise UsageError("'transformers:' needs a configuration behind the colon: a config.json or a model type.")
        return "transformers", where, ""
    where, _, name = written.rpartition(":") if not written.endswith(".py") else (written, "", DEFAULT_FUNCTION)
    if not where or not name.isidentifier():
        raise UsageError(
            f"'{written}' names no function. Write FILE.py:FUNCTION or module.path:FUNCTION; "
            f"FILE.py alone takes its function '{DEFAULT_FUNCTION}'."
        )
    if where.endswith(".py"):
        return "file", where, name
    if not all(part.isidentifier() for part in where.split(".")):
        raise UsageError(
            f"'{written}' is neither a Python file nor a module. Write FILE.py:FUNCTION, module.path:FUNCTION, "
            "torchvision:NAME, timm:NAME or transformers:CONFIG."
        )
    return "module", where, name
