"""What a user pays for electricity and for GPUs, in any currency."""

import math
from dataclasses import dataclass

from castwise.errors import UsageError

JOULES_PER_KWH = 3.6e6
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Prices:
    """Prices in one currency; None where the user gave none.

    Attributes:
        per_kwh: Of a kilowatt-hour.
        per_gpu_hour: Of a GPU for an hour, its electricity included.
    """

    per_kwh: float | None = None
    per_gpu_hour: float | None = None

    def __bool__(self) -> bool:
        """Return whether there is a price to reckon with."""
        return self.per_kwh is not None or self.per_gpu_hour is not None

    def check(self) -> None:
        """Make sure that prices can be such.

        Raises:
            UsageError: One is negative or no number.
        """
        for what, price in (("kWh", self.per_kwh), ("GPU hour", self.per_gpu_hour)):
            if price is not None and not (price >= 0 and math.isfinite(price)):
                raise UsageError(f"A price of {price:g} per {what} is impossible. Give a number from 0.")
