"""Measure in which numeric precision a model should be trained on the GPU at hand, and say why."""

from importlib import import_module
from typing import TYPE_CHECKING

from castwise._version import __version__

if TYPE_CHECKING:
    from castwise.api import Comparison, compare, run
    from castwise.errors import CastwiseError, DataError, EngineError, StoreError, UsageError
    from castwise.records.schema import Environment, Trial
    from castwise.spec.trial import TrialSpec

__all__ = [
    "CastwiseError",
    "Comparison",
    "DataError",
    "EngineError",
    "Environment",
    "StoreError",
    "Trial",
    "TrialSpec",
    "UsageError",
    "__version__",
    "compare",
    "run",
]

# Where each public name lives. They are imported when first asked for: `castwise --help` needs none of them.
_HOMES = {
    "CastwiseError": "castwise.errors",
    "Comparison": "castwise.api",
    "DataError": "castwise.errors",
    "EngineError": "castwise.errors",
    "Environment": "castwise.records.schema",
    "StoreError": "castwise.errors",
    "Trial": "castwise.records.schema",
    "TrialSpec": "castwise.spec.trial",
    "UsageError": "castwise.errors",
    "compare": "castwise.api",
    "run": "castwise.api",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'castwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
