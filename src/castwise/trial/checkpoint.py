"""Where the state of a training loop is kept between epochs."""

import pickle
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from castwise.apply.hardware import module_of

# What a file that is not a checkpoint, or half of one, has been seen to raise.
_DAMAGED = (EOFError, KeyError, OSError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError)


def save(path: Path, state: dict[str, Any]) -> bool:
    """Write a state atomically; return whether it was written.

    A full disk does not end the run: it goes on without a checkpoint, and its log says so.
    """
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, temporary)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
        with suppress(OSError):  # what prevents writing may prevent removing
            temporary.unlink(missing_ok=True)
        warnings.warn(f"nothing was written to '{path}': {_first_line(error)}", stacklevel=2)
        return False
    return True


def load(path: Path, device: torch.device, question: str) -> dict[str, Any] | None:
    """Return a checkpoint's state; None if it is damaged or its "question" is another run's."""
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        if state["question"] == question:
            return state
        reason = "it is of a run with other settings"
    except _DAMAGED as error:
        reason = _first_line(error)
    warnings.warn(f"the checkpoint '{path}' is not used: {reason}", stacklevel=2)
    return None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def random_state(device: torch.device) -> dict[str, Any]:
    return {
        "cpu": torch.get_rng_state(),
        "cuda": None if device.type == "cpu" else module_of(device).get_rng_state(),
    }


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if state["cuda"] is not None:
        module_of(device).set_rng_state(state["cuda"].cpu())
