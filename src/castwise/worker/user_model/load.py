"""The user's own model as a task: their code is found, run, and what it returns is made ready to be trained."""

import importlib
import importlib.util
import multiprocessing
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from castwise.errors import CastwiseError, UsageError, unknown_name
from castwise.spec.user_model import UserModel, UserWorkload
from castwise.worker.models.task import Task
from castwise.worker.user_model import transformers
from castwise.worker.user_model.batches import BatchMaker
from castwise.worker.user_model.contract import NAMES, Contract, call_without_arguments, read_contract
from castwise.worker.user_model.global_state import user_code
from castwise.worker.user_model.lightning import adapt, is_lightning_module
from castwise.worker.user_model.loss import make_compute_loss
from castwise.worker.user_model.optimizer import check_optimizer, make_loop
from castwise.worker.user_model.side_effects import count_helpers, helper_notes
from castwise.worker.user_model.source import defined_at, digest, where

# The name that a user's file has among the modules: not its own, which another module may have.
_FILE_MODULE = "castwise_user_file"


def inspect_model(model: UserModel) -> UserWorkload:
    """Return what is known of a user's own model once its code has run.

    Raises:
        UsageError: There is no such function, or what it returns is no model.
    """
    loaded = _load(model)
    found = model.model_copy(update={"digest": loaded.digest})
    batch_size = loaded.contract.batch_size or loaded.batches.batch_size
    return UserWorkload(model=found, batch_size=batch_size, accumulate=loaded.contract.accumulate)


def build_user_model(model: UserModel) -> Task:
    """Build the task of a user's own model; random weights come from torch's global seed.

    Raises:
        UsageError: As `inspect_model`; also where the files are no longer those that were looked at.
    """
    loaded = _load(model)
    if model.digest not in ("", loaded.digest):
        raise UsageError(f"{_whose(model)} was changed while it was being measured. Run castwise again.")
    contract = loaded.contract
    return Task(
        model=contract.model,
        make_batches=loaded.batches.make,
        compute_loss=make_compute_loss(contract, _whose(model)),
        units_per_sample=contract.units_per_sample,
        unit=contract.unit,
        user_loop=make_loop(contract, _whose(model)),
        notes=loaded.notes,
    )


def error_location(error: BaseException, model: UserModel) -> str | None:
    """Return the place of the user's code that an error is about: the innermost it went through, or their function.

    Args:
        error: What was raised. Where castwise raised it, their function is at fault only if the message names it.
        model: Where the model comes from.
    """
    place = where(error)
    if place is not None or (isinstance(error, CastwiseError) and _whose(model) not in str(error)):
        return place
    module = sys.modules.get(_FILE_MODULE if model.kind == "file" else model.name.partition(":")[0])
    return defined_at(getattr(module, model.name.rpartition(":")[2], None))


@dataclass(frozen=True)
class _Loaded:
    """What the user's code came to.

    Attributes:
        contract: Its parts, the model in float32.
        batches: Makes its batches.
        digest: Stands for the files that were read.
        notes: What it changed, a sentence each.
    """

    contract: Contract
    batches: BatchMaker
    digest: str
    notes: tuple[str, ...]


def _load(model: UserModel) -> _Loaded:
    whose, notes = _whose(model), list[str]()
    # A fork server's child starts processes by a fork server too. A user's data loader is to have Python's own way,
    # which their training has: what their file defines need not travel then.
    multiprocessing.set_start_method(None, force=True)
    modules, beside = set(sys.modules), count_helpers()
    with user_code(notes):
        returned = _run(model, whose)
        contract = read_contract(returned, whose)
        if is_lightning_module(contract.model):
            contract = adapt(contract, whose)
        elif contract.batch is None:
            raise UsageError(
                f"{whose} gives no batch. Return (model, batch): an example batch, or a function of the batch size."
            )
        check_optimizer(contract.optimizer, contract.model, whose)
        batches = BatchMaker(contract.batch, contract.accumulate, whose)
    notes += helper_notes(beside) + _in_float32(contract.model)
    files = [Path(model.path)] if model.path and model.kind != "module" else []
    return _Loaded(contract, batches, digest(files, modules), tuple(notes))


def _run(model: UserModel, whose: str) -> Any:
    """Run the user's code and return what their function returns.

    Raises:
        UsageError: It ends the process, as argparse does where it finds arguments that are castwise's.
    """
    sys.argv = [model.path or model.name]
    try:
        return _LOADERS[model.kind](model)
    except SystemExit as error:
        place = where(error)
        raise UsageError(
            f"{whose} ends the process when it is imported or called{f' ({place})' if place else ''}: "
            f'SystemExit({error.code!r}). Put what a script does under `if __name__ == "__main__":`.'
        ) from None


def _whose(model: UserModel) -> str:
    if model.kind == "file":
        return f"{Path(model.path).name}:{model.name}"
    return f"transformers:{model.name}" if model.kind == "transformers" else model.name


def _in_float32(model: nn.Module) -> list[str]:
    """Bring the weights to float32, from where every precision begins; return a sentence where they were not."""
    others = {p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype != torch.float32}
    if not others:
        return []
    model.to(torch.float32)
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in others))
    return [f"your model came in {names}: every precision begins with float32 weights"]


def _from_file(model: UserModel) -> Any:
    """Run a Python file as `python FILE` would, but for its `__name__`, and call its function."""
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
    """Import a module, from the present folder before anywhere else, and call its function."""
    sys.path.insert(0, model.path)
    name, _, function = model.name.partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, and imports another that is not
        raise UsageError(
            f"No module named '{error.name}' can be imported from '{model.path}' or this Python's packages. "
            f"Write FILE.py:{function} for a file, or run castwise in the folder that the package lies in."
        ) from None
    return _call(module, function, name)


def _call(module: Any, name: str, whose: str) -> Any:
    function = getattr(module, name, None)
    if function is None:
        known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        hint = "It defines no function." if not known else ""
        raise unknown_name(f"function of {whose}", name, known, hint)
    if isinstance(function, nn.Module | dict | tuple):
        return function
    return call_without_arguments(function, f"{whose}:{name}")


def _from_pickle(model: UserModel) -> Any:
    """Return what `castwise.compare` sent: the contract's parts, or a function that returns them."""
    with Path(model.path).open("rb") as file:
        parts = pickle.load(file)
    if set(parts) - {"model"} or isinstance(parts["model"], nn.Module):
        return parts
    made = call_without_arguments(parts["model"], model.name)
    return made if not isinstance(made, nn.Module) else {"model": made}


def _from_transformers(model: UserModel) -> Any:
    return transformers.build(model)


_LOADERS: dict[str, Callable[[UserModel], Any]] = {
    "file": _from_file,
    "module": _from_module,
    "pickle": _from_pickle,
    "transformers": _from_transformers,
}

__all__ = ["NAMES", "build_user_model", "inspect_model"]
