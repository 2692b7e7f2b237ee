"""Keras' own mixed precision: its layers' policies, which have a row's type in the place of autocast."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from castwise.errors import TechniqueError
from castwise.registry.precisions import AS_WRITTEN, Precision
from castwise.trial.script.replacing import on_import, replaces

_POLICIES = "keras.src.dtype_policies.dtype_policy"
_LAYERS = "keras.src.backend.torch.layer"


def follow_policies(row: Precision, note_on: Callable[[], None]) -> None:
    """Have Keras' own mixed precision in the row's type, or not at all; `note_on` is called where it is on."""
    wanted = "float32" if row.autocast_dtype is None else f"mixed_{row.autocast_dtype}"

    def follow(module: ModuleType) -> None:
        @replaces(module.DTypePolicy, "__init__")
        def make(make_as_written: Any, policy: Any, name: str | None = None) -> None:
            make_as_written(policy, wanted if str(name).startswith("mixed_") else name)
            if policy.variable_dtype in ("float16", "bfloat16"):
                raise TechniqueError(f"the script's policy in Keras is {policy.name}, which castwise does not replace")
            if policy.variable_dtype != policy.compute_dtype:
                note_on()

        @replaces(module, "dtype_policy")
        def default(policy: Any) -> Any:
            if row.autocast_dtype and module.global_state.get_global_attribute("dtype_policy") is None:
                module.set_dtype_policy(wanted)
            return policy()

    if row.name != AS_WRITTEN:
        on_import(_POLICIES, follow)


def note_policies(note: Callable[[str], None]) -> None:
    """Call for each mixed precision of Keras' that the script has itself."""

    def follow(module: ModuleType) -> None:
        @replaces(module.DTypePolicy, "__init__")
        def make(make_as_written: Any, policy: Any, *args: Any, **kwargs: Any) -> None:
            make_as_written(policy, *args, **kwargs)
            if policy.variable_dtype != policy.compute_dtype:
                note(f"autocast {policy.compute_dtype}")

    on_import(_POLICIES, follow)


def is_kerass(module: nn.Module) -> bool:
    return any(kind.__module__ == _LAYERS for kind in type(module).__mro__)
