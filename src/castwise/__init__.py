"""Measure in which numeric precision a model should be trained on the GPU at hand, and say why."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from castwise.comparison import Comparison, compare
    from castwise.errors import CastwiseError, DataError, EngineError, StoreError, UsageError
    from castwise.plan import TrialSpec
    from castwise.record import Environment, Trial
    from castwise.sweep.job import run

__version__ = "0.1.0"

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
    "Comparison": "castwise.comparison",
    "DataError": "castwise.errors",
    "EngineError": "castwise.errors",
    "Environment": "castwise.record",
    "StoreError": "castwise.errors",
    "Trial": "castwise.record",
    "TrialSpec": "castwise.plan",
    "UsageError": "castwise.errors",
    "compare": "castwise.comparison",
    "run": "castwise.sweep.job",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'castwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
