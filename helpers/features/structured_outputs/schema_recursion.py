"""JSON schemas that no finite text can match, because a required part of a value always contains another such value.

llguidance finds every other schema that cannot be met. Here, a reference *can end* if a value that matches it need not
contain a reference that cannot. Each round finds more such references, until a round finds none. A chain of references
may take a round for each, so their number is limited.
"""

from collections.abc import Iterator
from typing import Any

MAX_REFERENCES = 300


def can_end(schema: Any) -> bool:
    """Return whether a finite value can match a JSON schema, as far as its references to itself decide that.

    Raises:
        ValueError: the schema has more than `MAX_REFERENCES` different references.
    """
    references, ending = set(_references(schema)), set()
    if len(references) > MAX_REFERENCES:
        raise ValueError(f"json has {len(references)} different references, and at most {MAX_REFERENCES} are allowed.")
    while found := {ref for ref in references - ending if _may_end(_resolve(schema, ref), ending)}:
        ending |= found
    return _may_end(schema, ending)


def _may_end(schema: Any, ending: set[str]) -> bool:
    """Return `_can_end`; no value reaches a malformed part, or llguidance would have refused it."""
    try:
        return _can_end(schema, ending)
    except (TypeError, AttributeError):
        return True


def _can_end(schema: Any, ending: set[str]) -> bool:
    """Return whether a value can match a part of a schema if only these references can end."""
    if not isinstance(schema, dict):
        return True
    parts = [*schema.get("allOf", ())]
    match schema.get("type"):
        case "object":
            properties = schema.get("properties", {})
            parts += [properties.get(name) for name in schema.get("required", ())]
        case "array":
            least, first = schema.get("minItems", 0), schema.get("prefixItems", [])
            parts += first[:least] if least <= len(first) else [*first, schema.get("items")]
    options = [schema[name] for name in ("anyOf", "oneOf") if name in schema]
    return (
        ("$ref" not in schema or schema["$ref"] in ending)
        and all(_can_end(part, ending) for part in parts)
        and all(any(_can_end(option, ending) for option in several) for several in options)
    )


def _references(schema: Any) -> Iterator[str]:
    """Yield all references in a schema."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def _resolve(schema: Any, reference: str) -> Any:
    """Return the part of a schema that a reference such as "#/$defs/tree" names; None for any other reference."""
    try:
        for step in reference.removeprefix("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            schema = schema[int(step)] if isinstance(schema, list) else schema[step]
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return schema
