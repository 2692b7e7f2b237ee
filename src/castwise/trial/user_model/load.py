"""The user's model as a task: find and run their code, check what it returns, and prepare it for training."""

import ast
import importlib
import importlib.util
import inspect
import multiprocessing
import pickle
import sys
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from castwise.apply.applied import check_optimizer
from castwise.apply.precision import Weights
from castwise.errors import CastwiseError, UsageError, unknown_name
from castwise.spec.user_model import LightningParts, UserModel, UserParts, UserWorkload
from castwise.trial.models.task import Task
from castwise.trial.user_model import transformers
from castwise.trial.user_model.batches import BatchMaker, common_first_size
from castwise.trial.user_model.contract import Contract, call_without_arguments, read_contract
from castwise.trial.user_model.global_state import user_code
from castwise.trial.user_model.lightning import adapt, is_lightning_module
from castwise.trial.user_model.loop import (
    check_batch,
    make_compute_loss,
    make_loop,
    make_optimizer,
    make_scheduler,
)
from castwise.trial.user_model.side_effects import count_helpers, helper_notes
from castwise.trial.user_model.source import Sources, defined_at, digest, phase_of, user_files, where

# The module name of a user's file; its own name may belong to another module.
_FILE_MODULE = "castwise_user_file"
# Usual names of functions that train. Such a function may overwrite the user's checkpoints.
_TRAINING_NAMES = ("main", "train", "fit", "train_model", "training_loop")
_ONLY_BUILDS = (
    "castwise calls a function that only builds: it returns the model and a batch, and castwise trains. "
    "`castwise init FILE` writes one to start from; `castwise run -- python FILE.py` measures a script as it is."
)
_MOST_NAMES = 6  # of a module's functions that an error lists


def inspect_model(model: UserModel) -> UserWorkload:
    """Run a user's code and return what is known of their model.

    Raises:
        UsageError: There is no such function, or what it returns is no model.
    """
    with Sources() as sources:
        loaded = _load(model)
    found = model.model_copy(update={"digest": loaded.digest})
    return UserWorkload(
        model=found,
        batch_size=loaded.contract.batch_size or loaded.batches.batch_size,
        accumulate=loaded.contract.accumulate,
        can_be_judged=loaded.contract.can_be_judged,
        parts=_describe(loaded, _named(model)) if model.kind in ("file", "module") else None,
        sources=sources.digests(loaded.files),
    )


def build_user_model(model: UserModel) -> Task:
    """Build the task of a user's model; random weights come from torch's global seed."""
    loaded = _load(model)
    if model.digest not in ("", loaded.digest):
        raise UsageError(f"{_display_name(model)} was changed while it was being measured. Run castwise again.")
    contract, source = loaded.contract, _display_name(model)
    return Task(
        model=contract.model,
        make_batches=loaded.batches.make,
        compute_loss=make_compute_loss(contract, source),
        units_per_sample=contract.units_per_sample,
        unit=contract.unit,
        user_loop=make_loop(contract, source),
        training_set=contract.training_set,
        validate=contract.validate,
        higher_is_better=contract.higher_is_better if contract.can_be_judged else None,
        notes=loaded.notes,
    )


def error_location(error: BaseException, model: UserModel, *, autocasts: bool) -> str | None:
    """Return the innermost line of the user's code in an error's traceback.

    If it has none, return the part of the step that torch raised it in, or else the line of their function. An error
    that castwise raised is about their function only if the message names it.
    """
    line, is_ours = where(error), isinstance(error, CastwiseError)
    if line is not None or model.kind == "script" or (is_ours and _display_name(model) not in str(error)):
        return line
    phase = None if is_ours else phase_of(error)
    if phase is None:
        return defined_at(_named(model))
    return f"{phase}{', under autocast,' if autocasts else ''} of {_display_name(model)}"


def _named(model: UserModel) -> Any:
    """Return what the user named: a function as a rule; None if there is none."""
    module = sys.modules.get(_FILE_MODULE if model.kind == "file" else model.name.partition(":")[0])
    return getattr(module, model.name.rpartition(":")[2], None)


@dataclass(frozen=True)
class _Loaded:
    """What the user's code returned, checked."""

    returned: Any  # by their function
    contract: Contract  # its parts, the model in float32
    lightning: LightningParts | None  # where a LightningModule has its own
    batches: BatchMaker
    files: frozenset[Path]  # the user's, with the modules that were imported
    digest: str  # of these files
    notes: tuple[str, ...]  # what the code changed, a sentence each
    was_float32: bool  # whether the model came so


def _load(model: UserModel) -> _Loaded:
    source, notes = _display_name(model), list[str]()
    # This process is a fork server's child and would start processes by a fork server, which pickles what the user's
    # file defines. Their data loader needs Python's default method, as in their training.
    multiprocessing.set_start_method(None, force=True)
    modules, num_helpers = set(sys.modules), count_helpers()
    with user_code(notes):
        returned = _run(model, source)
        contract, lightning = read_contract(returned, source), None
        if is_lightning_module(contract.model):
            contract, lightning = adapt(contract, source)
        elif contract.batch is None:
            raise UsageError(
                f"{source} gives no batch. Return (model, batch): an example batch, or a function of the batch size."
                if model.kind != "pickle"
                else f"{source} comes without a batch. Pass an example batch, or a function of the batch size, as the "
                "argument after the model."
            )
        check_optimizer(contract.optimizer, contract.model, source)
        check = partial(check_batch, contract, source)
        batches = BatchMaker(contract.batch, contract.accumulate, source, check)
    notes += helper_notes(num_helpers)
    weights = [each for each in contract.model.parameters() if each.is_floating_point()]
    others = sorted({str(each.dtype).removeprefix("torch.") for each in weights if each.dtype != torch.float32})
    if others:
        contract.model.to(torch.float32)
        notes.append(f"your model came in {', '.join(others)}: every precision begins with float32 weights")
    files = [Path(model.path)] if model.path and model.kind != "module" else []
    read = user_files(files, modules)
    return _Loaded(returned, contract, lightning, batches, read, digest(read), tuple(notes), not others)


def _run(model: UserModel, source: str) -> Any:
    """Run the user's code and return what their function returns; UsageError if it ends the process."""
    sys.argv = [model.path or model.name]
    try:
        return _LOADERS[model.kind](model)
    except SystemExit as error:
        line = where(error)
        raise UsageError(
            f"{source} ends the process when it is imported or called{f' ({line})' if line else ''}: "
            f'SystemExit({error.code!r}). Put what a script does under `if __name__ == "__main__":`.'
        ) from None


def _display_name(model: UserModel) -> str:
    if model.kind == "file":
        return f"{Path(model.path).name}:{model.name}"
    return f"transformers:{model.name}" if model.kind == "transformers" else model.name


def _from_file(model: UserModel) -> Any:
    """Run a Python file as `python FILE` would, except for its `__name__`, and call its function."""
    path = Path(model.path)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(_FILE_MODULE, path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[_FILE_MODULE] = module  # pickles and data classes look their module up
    spec.loader.exec_module(module)
    return _call(module, model.name, path.name)


def _from_module(model: UserModel) -> Any:
    """Import a module, searching the current folder first, and call its function."""
    sys.path.insert(0, model.path)
    name, _, function = model.name.partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, and imports one that does not
        raise UsageError(
            f"No module named '{error.name}' can be imported from '{model.path}' or this Python's packages. "
            f"Write FILE.py:{function} for a file, or run castwise in the folder that the package lies in."
        ) from None
    return _call(module, function, name)


def _call(module: Any, name: str, source: str) -> Any:
    function = getattr(module, name, None)
    if function is None:
        known = [
            each
            for each, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__  # of the module itself
            if not value.__name__.startswith("_") and value.__name__ not in _TRAINING_NAMES
        ]
        hint = f"It defines {', '.join(known[:_MOST_NAMES])}." if known else "It defines no function that could build."
        raise unknown_name(f"function of {source}", name, known, f"{hint} {_ONLY_BUILDS}")
    if isinstance(function, nn.Module | dict | tuple):
        return function
    _check_builds(function, name, source)
    return call_without_arguments(function, f"{source}:{name}")


def _check_builds(function: Any, name: str, source: str) -> None:
    """Raise UsageError for a function that trains, or returns nothing: calling it could overwrite the user's files."""
    if name.lower() in _TRAINING_NAMES:
        raise UsageError(f"{source}:{name} is not called: by its name it trains. {_ONLY_BUILDS}")
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return  # it has no source of its own, as a class or a partial function
    if not isinstance(definition, ast.FunctionDef):
        return
    if not any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(definition)):
        raise UsageError(f"{source}:{name} is not called: it returns nothing. {_ONLY_BUILDS}")


def _from_pickle(model: UserModel) -> Any:
    """Return what `castwise.compare` sent: the contract's parts, or a function that returns them."""
    with Path(model.path).open("rb") as file:
        parts = pickle.load(file)
    if set(parts) - {"model"} or isinstance(parts["model"], nn.Module):
        return parts
    made = call_without_arguments(parts["model"], model.name)
    return made if not isinstance(made, nn.Module) else {"model": made}


_LOADERS: dict[str, Callable[[UserModel], Any]] = {
    "file": _from_file,
    "module": _from_module,
    "pickle": _from_pickle,
    "transformers": transformers.build,
}


def _describe(loaded: _Loaded, named: Any) -> UserParts:
    """Return what a script that calls the user's function, or takes the object that they named, has to know of it."""
    returned, contract, batches = loaded.returned, loaded.contract, loaded.batches
    form: Literal["model", "tuple", "dict"] = "tuple"
    names: tuple[str, ...] = ("model", "batch", "loss")
    model = returned
    if isinstance(returned, nn.Module):
        form, names = "model", ("model",)
    elif isinstance(returned, Mapping):
        form, names, model = "dict", tuple(returned), returned["model"]
    else:
        names, model = names[: len(returned)], returned[0]
    optimizer, scheduler = _made(contract)
    batch = batches.example
    if batches.kind == "function":
        with suppress(Exception):  # the trial says why it cannot be had
            batch = contract.batch((contract.batch_size or contract.accumulate) // contract.accumulate)
    return UserParts(
        form=form,
        names=names,
        is_function=returned is not named,
        makes_model=not isinstance(model, nn.Module),
        is_float32=loaded.was_float32,
        is_of_transformers=any(each.__module__.startswith("transformers.") for each in type(contract.model).__mro__),
        lightning=loaded.lightning,
        batch=batches.kind,
        batch_form=_form_of(batch),
        example_size=None if batches.kind == "function" else common_first_size(batch),
        optimizer=_given_as(contract.optimizer, isinstance(contract.optimizer, Optimizer)),
        optimizer_name="" if optimizer is None else type(optimizer).__name__,
        scheduler=_given_as(scheduler, hasattr(contract.scheduler, "step")),
        has_total_steps=getattr(scheduler, "total_steps", None) is not None,
        has_loss_module=isinstance(contract.loss, nn.Module),
        clip_grad_norm=contract.clip_grad_norm,
        accumulate=contract.accumulate,
        unit=contract.unit,
        units_per_sample=contract.units_per_sample,
    )


def _given_as(part: Any, is_instance: bool) -> Literal["none", "instance", "function"]:
    return "none" if part is None else "instance" if is_instance else "function"


def _form_of(batch: Any) -> Literal["tensor", "tuple", "dict", "mapping", "other"]:
    if isinstance(batch, Tensor):
        return "tensor"
    if isinstance(batch, Mapping):
        return "dict" if isinstance(batch, dict) else "mapping"
    return "tuple" if isinstance(batch, tuple | list) else "other"


def _made(contract: Contract) -> tuple[Optimizer | None, Any]:
    """Return the optimizer and the scheduler that is stepped each step, as far as they can be made without a trial."""
    optimizer, scheduler = None, contract.scheduler
    with suppress(Exception):
        optimizer = make_optimizer(contract.optimizer, Weights(contract.model), "")
        if scheduler is not None:
            scheduler = make_scheduler(scheduler, optimizer, "")
    return optimizer, None if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler
