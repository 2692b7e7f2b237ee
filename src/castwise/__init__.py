"""Measure in which numeric precision a model should be trained on the GPU at hand, and say why."""

from castwise.errors import CastwiseError, DataError, EngineError, StoreError, UsageError
from castwise.plan import Plan, Protocol, TrialSpec
from castwise.record import Environment, Trial

__version__ = "0.1.0"

__all__ = [
    "CastwiseError",
    "DataError",
    "EngineError",
    "Environment",
    "Plan",
    "Protocol",
    "StoreError",
    "Trial",
    "TrialSpec",
    "UsageError",
    "__version__",
    "run",
]


def __getattr__(name: str) -> object:
    # `run` pulls in the launcher; importing castwise for its records should not pay for that.
    if name == "run":
        from castwise.sweep.job import run

        return run
    raise AttributeError(f"module 'castwise' has no attribute {name!r}")
