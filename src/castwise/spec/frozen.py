"""The form of everything that crosses the process boundary or lies on disk."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field


class FrozenModel(BaseModel):
    """Base of all JSON documents: frozen, no unknown keys."""

    # JSON has no NaN: written as a string, a diverged trial's loss comes back as what it was. A renamed field keeps
    # its first name in JSON as its alias, so that old records load and the keys of specs stay.
    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_inf_nan="strings", validate_by_name=True, serialize_by_alias=True
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy, some fields changed and not validated; what was computed and cached stays behind."""
        fields = type(self).model_fields.keys()
        unknown = set(update or {}) - fields
        assert not unknown, f"{type(self).__name__} has no field {', '.join(unknown)}"
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - fields:
            del copied.__dict__[name]
        return copied


def renamed(default: Any, json_name: str, **constraints: Any) -> Any:
    """Return the field of a document whose name in JSON is an older one."""
    return Field(default, validation_alias=json_name, serialization_alias=json_name, **constraints)
