"""The form of everything that crosses the process boundary or lies on disk."""

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """Base of all JSON documents: frozen, no unknown keys."""

    # JSON has no NaN: written as a string, a diverged trial's loss comes back as what it was.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")
