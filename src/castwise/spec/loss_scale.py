"""The ways to scale a loss, as users write them: `none`, `dynamic`, `dynamic-apex`, or a number."""

import math
from dataclasses import dataclass

from castwise.errors import UsageError


@dataclass(frozen=True)
class DynamicScale:
    """A loss scale that halves on overflow and doubles after a window of good steps."""

    name: str
    init: float
    factor: float  # of growth; its inverse is the backoff
    window: int  # consecutive steps without a skip before the scale grows
    maximum: float | None


DYNAMIC_SCALES: tuple[DynamicScale, ...] = (
    # Source: torch.amp.GradScaler's defaults.
    DynamicScale("dynamic", init=2.0**16, factor=2.0, window=2000, maximum=None),
    # Source: NVIDIA/apex apex/amp/scaler.py at 47e3367f: LossScaler("dynamic").
    DynamicScale("dynamic-apex", init=2.0**16, factor=2.0, window=2000, maximum=2.0**24),
)


def is_dynamic(name: str) -> bool:
    """Return whether a loss scale of this canonical name moves, and skips the steps that overflow."""
    return name.startswith("dynamic")


def parse_loss_scale(text: str) -> str:
    """Return the canonical spelling of a loss scale: `none`, a dynamic scale's name, or a number.

    Raises:
        UsageError: The text is none of these, or the number is not positive and finite.
    """
    wanted = text.strip().lower()
    if wanted == "none" or any(wanted == row.name for row in DYNAMIC_SCALES):
        return wanted
    try:
        scale = float(wanted)
    except ValueError:
        names = ", ".join(row.name for row in DYNAMIC_SCALES)
        raise UsageError(f"'{text}' is no loss scale. Write none, {names}, or a number such as 128.") from None
    if not math.isfinite(scale) or scale <= 0:
        raise UsageError(f"A static loss scale must be a positive number; '{text}' is not. Write for example 128.")
    return repr(scale).removesuffix(".0")
