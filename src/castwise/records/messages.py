"""The messages between a trial's process and its parent, as JSON.

A `Call` names a method of the trial's process (`trial/server.py`). While it runs, any number of `Progress` events may
come; then one `Returned` or `Failed` event ends it.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from castwise.records.schema import Shortfall, Status
from castwise.spec.frozen import FrozenModel


class Call(FrozenModel):
    """A method of the trial's process to run, with its arguments as JSON."""

    method: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Progress(FrozenModel):
    """The share of a call that is done, 0 to 1, or a line on what it waits for."""

    event: Literal["progress"] = "progress"
    done: float = 0.0
    note: str = ""


class Returned(FrozenModel):
    event: Literal["returned"] = "returned"
    method: str
    result: Any = None


class Failed(FrozenModel):
    event: Literal["failed"] = "failed"
    status: Status
    message: str
    refused: bool = False  # by castwise itself: the user's mistake, not the trial's failure
    shortfall: Shortfall | None = None


EVENT: TypeAdapter[Progress | Returned | Failed] = TypeAdapter(
    Annotated[Progress | Returned | Failed, Field(discriminator="event")]
)
