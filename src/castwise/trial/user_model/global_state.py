"""Global settings that change what a training step computes: read, compared and restored around user code."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from castwise.apply.precision import read_fp32_precision, restore_fp32_precision

# Variables that override what float32 products compute in, whatever torch's switches say.
# Source: cuBLAS and cuDNN documentation (NVIDIA_TF32_OVERRIDE); torch, aten/src/ATen/Context.cpp.
_PRECISION_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
# Variables that change times or memory. Others are not reported.
_OTHER_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)


@dataclass(frozen=True)
class Setting:
    name: str  # how users set it
    read: Callable[[], Any]
    write: Callable[[Any], object]
    # Whether it stays as the user's code sets it, since their own training has it too. The precision or castwise
    # decides the others.
    is_kept: bool


def _attribute(path: str, *, is_kept: bool) -> Setting:
    """Return the setting that is an attribute, by its path below `torch.`."""
    *parents, name = path.split(".")
    owner: Any = torch
    for parent in parents:
        owner = getattr(owner, parent)
    return Setting(f"torch.{path}", lambda: getattr(owner, name), lambda value: setattr(owner, name, value), is_kept)


def _autocast(device_type: str) -> Setting:
    return Setting(
        f"torch.set_autocast_enabled({device_type!r})",
        lambda: torch.is_autocast_enabled(device_type),
        lambda value: torch.set_autocast_enabled(device_type, value),
        is_kept=False,
    )


def _attention_backend(kind: str) -> Setting:
    cuda = torch.backends.cuda
    enable = f"enable_{kind}_sdp"
    return Setting(f"torch.backends.cuda.{enable}", getattr(cuda, f"{kind}_sdp_enabled"), getattr(cuda, enable), True)


def _current_device() -> int | None:
    """Return the number of the current GPU; None if CUDA is not initialised, which this does not change."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def _set_device(number: int | None) -> None:
    if number is not None:
        torch.cuda.set_device(number)


_ANOMALY = torch.autograd.set_detect_anomaly
_DETERMINISTIC = torch.use_deterministic_algorithms
SETTINGS: tuple[Setting, ...] = (
    Setting("torch.set_default_dtype", torch.get_default_dtype, torch.set_default_dtype, is_kept=False),
    Setting(
        "torch.set_default_device",
        torch.get_default_device,
        # Any device that is set, the CPU too, costs each call of torch time, and torch 2.11 compiles less with it.
        lambda device: torch.set_default_device(None if device == torch.device("cpu") else device),
        is_kept=False,
    ),
    Setting("torch.cuda.set_device", _current_device, _set_device, is_kept=False),
    Setting("torch.set_grad_enabled", torch.is_grad_enabled, torch.set_grad_enabled, is_kept=False),
    _autocast("cuda"),
    _autocast("cpu"),
    _attribute("backends.cuda.matmul.allow_fp16_reduced_precision_reduction", is_kept=False),
    _attribute("backends.cuda.matmul.allow_bf16_reduced_precision_reduction", is_kept=False),
    _attribute("backends.cudnn.enabled", is_kept=True),
    _attribute("backends.cudnn.benchmark", is_kept=True),
    _attribute("backends.cudnn.deterministic", is_kept=True),
    Setting(
        "torch.use_deterministic_algorithms", torch.are_deterministic_algorithms_enabled, _DETERMINISTIC, is_kept=True
    ),
    Setting("torch.autograd.set_detect_anomaly", torch.is_anomaly_enabled, _ANOMALY, is_kept=True),
    Setting("torch.set_num_threads", torch.get_num_threads, torch.set_num_threads, is_kept=True),
    *map(_attention_backend, ("flash", "mem_efficient", "math", "cudnn")),
)


@dataclass(frozen=True)
class ProcessState:
    values: tuple[Any, ...]
    fp32_precision: dict[str, str]
    variables: dict[str, str | None]
    folder: str
    seed: int


def read_process_state() -> ProcessState:
    return ProcessState(
        values=tuple(setting.read() for setting in SETTINGS),
        fp32_precision=read_fp32_precision(),
        variables={name: os.environ.get(name) for name in (*_PRECISION_VARIABLES, *_OTHER_VARIABLES)},
        folder=os.getcwd(),
        seed=torch.initial_seed(),
    )


@contextmanager
def user_code(notes: list[str]) -> Iterator[None]:
    """Run the user's code, restore the settings that castwise decides, and add a sentence to `notes` for each change.

    The other changes are kept until the trial's process ends.
    """
    before = read_process_state()
    try:
        yield
    finally:
        after = read_process_state()
        for setting, old, new in _changed_settings(before, after):
            if old is not None:
                fate = "kept, as your own training has it" if setting.is_kept else f"{old} was restored for this trial"
                notes.append(f"your code sets {setting.name} to {new}: {fate}")
            if not setting.is_kept:
                setting.write(old)
        if switched := _changed_fp32_precision(before, after):
            notes.append(
                f"your code sets what float32 products compute in ({', '.join(switched)}): "
                "each trial's own precision was restored"
            )
            restore_fp32_precision(before.fp32_precision)
        for name, value in after.variables.items():
            if value == before.variables[name]:
                continue
            is_restored = name in _PRECISION_VARIABLES
            fate = "restored, the precision decides that" if is_restored else "kept"
            notes.append(f"your code sets {name}={value or ''} in the environment: {fate}")
            if is_restored:
                os.environ.pop(name, None)
                os.environ.update({name: old} if (old := before.variables[name]) is not None else {})
        if before.seed != after.seed:
            notes.append(f"your code seeds torch with {after.seed}: the weights are those of that seed")
        if before.folder != after.folder:
            os.chdir(before.folder)


def changes_while_training(before: ProcessState) -> list[str]:
    """Return a sentence for each setting that has changed, so that the trial is not what its precision says."""
    after = read_process_state()
    changed = [f"{setting.name} ({old} → {new})" for setting, old, new in _changed_settings(before, after)]
    changed += [f"float32 products of {place}" for place in _changed_fp32_precision(before, after)]
    return [f"your code sets {each} while it trains: this trial is not what its precision says" for each in changed]


def _changed_settings(before: ProcessState, after: ProcessState) -> list[tuple[Setting, Any, Any]]:
    """Return the settings that have changed, each with its old and its new value."""
    settings = zip(SETTINGS, before.values, after.values, strict=True)
    return [(setting, old, new) for setting, old, new in settings if old != new]


def _changed_fp32_precision(before: ProcessState, after: ProcessState) -> list[str]:
    old = before.fp32_precision
    return [f"{place}: {value}" for place, value in after.fp32_precision.items() if value != old[place]]
