"""Structured outputs as HTTP requests describe them: OpenAI's `response_format`, and vLLM's `structured_outputs`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from ..features.structured_outputs import StructuredOutputs
from .strict import Strict


class TextFormat(Strict):
    type: Literal["text"]


class AnyObjectFormat(Strict):
    type: Literal["json_object"]


class JSONSchema(Strict):
    """OpenAI's wrapping of a schema. The name and the description change nothing, and a schema is always strict."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")  # `schema` is a method of the base class
    strict: bool | None = None


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JSONSchema


ResponseFormat = Annotated[TextFormat | AnyObjectFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputsField(Strict):
    """The fields of `StructuredOutputs`. Exactly one is given."""

    json_schema: str | dict[str, Any] | None = Field(None, alias="json")  # `json` is a method of the base class
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None  # in the notation of Lark, or of llama.cpp (GBNF)


def structured_outputs(
    response_format: ResponseFormat | None, field: StructuredOutputsField | None
) -> StructuredOutputs | None:
    """Return what a request's text must match; None for any text.

    Raises:
        ValueError: the request describes it twice, or not properly.
    """
    schema = None
    match response_format:
        case AnyObjectFormat():
            schema = {"type": "object"}
        case SchemaFormat(json_schema=wrapped):
            schema = wrapped.json_schema
    if field is None:
        return None if schema is None else StructuredOutputs(json=schema)
    if schema is not None:
        raise ValueError("Give response_format or structured_outputs, not both.")
    return StructuredOutputs(field.json_schema, field.regex, field.choice, field.grammar)
