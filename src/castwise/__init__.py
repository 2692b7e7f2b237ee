"""Measure in which numeric precision a model should be trained on the GPU at hand, and say why."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from castwise._version import __version__

if TYPE_CHECKING:
    from castwise.api import (
        Accuracies,
        Comparison,
        Diagnoses,
        Fits,
        MaxBatches,
        Report,
        Tuning,
        accuracy,
        compare,
        fits,
        max_batch,
        report,
        run,
        tune,
        why,
    )
    from castwise.apply.applied import Applied, apply
    from castwise.errors import CastwiseError, DataError, EngineError, StoreError, UsageError
    from castwise.records.schema import Environment, Trial
    from castwise.spec.trial import TrialSpec

__all__ = [
    "Accuracies",
    "Applied",
    "CastwiseError",
    "Comparison",
    "DataError",
    "Diagnoses",
    "EngineError",
    "Environment",
    "Fits",
    "MaxBatches",
    "Report",
    "StoreError",
    "Trial",
    "TrialSpec",
    "Tuning",
    "UsageError",
    "__version__",
    "accuracy",
    "apply",
    "compare",
    "fits",
    "max_batch",
    "report",
    "run",
    "tune",
    "why",
]

# Where the public names live that are not in castwise.api. They are imported when first asked for: `castwise --help`
# needs none of them.
_HOMES = {
    **dict.fromkeys(("CastwiseError", "DataError", "EngineError", "StoreError", "UsageError"), "castwise.errors"),
    **dict.fromkeys(("Environment", "Trial"), "castwise.records.schema"),
    "TrialSpec": "castwise.spec.trial",
    **dict.fromkeys(("Applied", "apply"), "castwise.apply.applied"),  # the only ones that need PyTorch
}


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "castwise.api")), name)
    raise AttributeError(f"module 'castwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """The package, in which `castwise.tune` is the function, although there is a subpackage of that name."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):  # as an import of the subpackage sets it
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
