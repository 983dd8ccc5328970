"""The base class of OpenAI's requests and their parts: unknown parameters are refused, and types are not converted."""

from pydantic import BaseModel, ConfigDict, model_validator


class Strict(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_parameter(cls, given):
        """An error for each of a hundred thousand unknown parameters would take seconds."""
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        others = set([name for name in given if name not in known][1:])
        return {name: value for name, value in given.items() if name not in others}
