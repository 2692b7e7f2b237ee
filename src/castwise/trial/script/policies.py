"""Keras' own mixed precision: its layers' policies, which have a row's type in the place of autocast."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from castwise.errors import TechniqueError
from castwise.registry.precisions import Precision
from castwise.trial.script.replacing import on_import, replaces


def follow_policies(row: Precision | None, note: Callable[[str], None] = lambda _: None) -> None:
    """Give policies a row's type, if there is one; call `note` with the type of each that is of mixed precision."""
    narrow = None if row is None else row.autocast_dtype
    wanted = f"mixed_{narrow}" if narrow else "float32"

    def follow(module: ModuleType) -> None:
        @replaces(module.DTypePolicy, "__init__")
        def make(make_as_written: Any, policy: Any, name: str | None = None) -> None:
            make_as_written(policy, wanted if row and str(name).startswith("mixed_") else name)
            if row and policy.variable_dtype in ("float16", "bfloat16"):
                raise TechniqueError(f"the script's policy in Keras is {policy.name}, which castwise does not replace")
            if policy.variable_dtype != policy.compute_dtype:
                note(policy.compute_dtype)

        @replaces(module, "dtype_policy")
        def default(policy: Any) -> Any:
            if narrow and module.global_state.get_global_attribute("dtype_policy") is None:
                module.set_dtype_policy(wanted)
            return policy()

    on_import("keras.src.dtype_policies.dtype_policy", follow)


def is_kerass(module: nn.Module) -> bool:
    return any(kind.__module__ == "keras.src.backend.torch.layer" for kind in type(module).__mro__)
