"""What the text of an output must match: a regular expression, a list of choices, a JSON schema or a grammar.

This is only the description. `grammar.py` compiles it when a request is added, and the sampler excludes every token
that would break it (`grammar_state.py`).
"""

import json
import re
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import Any

MAX_LENGTH = 2**16  # characters of a description, which bounds the time to compile it
MAX_CHOICE = 1024  # characters of a choice: a token takes as long as what must follow it, and too much is an error
# llguidance calls itself for each rule in a chain of rules, and for each bracket within another one.
MAX_RULES, MAX_DEPTH = 500, 100
# Every part is possessive, and no two of them can match the same white space, so the search takes linear time.
RULE = re.compile(r"^[^\S\n]*+[?!]?[\w.-]++\s*+((\[[^\]\n]*+\]|\{[^}\n]*+\})\s*+)?+(::=|:)|(::=)", re.MULTILINE)


@dataclass(frozen=True)
class StructuredOutputs:
    """What an output must match. Names and meanings are vLLM's; give exactly one.

    Attributes:
        json: a JSON schema, as a dictionary or as JSON text. Kept as JSON text. `{"type": "object"}` is any object.
        regex: a regular expression for the whole text, without look-around and backreferences.
        choice: the text is one of these, of at most `MAX_CHOICE` characters each.
        grammar: a context-free grammar in the notation of Lark, or in that of llama.cpp (GBNF).

    Raises:
        ValueError: not exactly one is given, or it has the wrong type or is longer than `MAX_LENGTH`. Whether it can be
            met depends on the vocabulary, and is checked when the request is added.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Seq[str] | None = None
    grammar: str | None = None

    def __post_init__(self):
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1:
            names = " and ".join(given) or "none"
            raise ValueError(f"Give exactly one of json, regex, choice and grammar to structured outputs, not {names}.")
        if self.json is not None:
            object.__setattr__(self, "json", _json_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        text = getattr(self, self.kind)
        if not isinstance(text, str | tuple):
            raise ValueError(f"{self.kind} must be a text, not {text!r}.")
        if self.length > MAX_LENGTH:
            raise ValueError(
                f"{self.kind} has {self.length} characters, and at most {MAX_LENGTH} are allowed: shorten it."
            )
        self._check_depth()
        try:
            "".join(text).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{self.kind} contains half of a surrogate pair: remove or replace it.") from error

    @property
    def kind(self) -> str:
        """The name of the attribute that is given."""
        return next(field.name for field in fields(self) if getattr(self, field.name) is not None)

    @property
    def text(self) -> str:
        """The description as text; choices as a JSON list."""
        text = getattr(self, self.kind)
        return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)

    def _check_depth(self) -> None:
        """Refuse many rules or brackets within brackets; what is in quotes counts, too, so this is a bound."""
        if self.grammar is not None and (number := sum(1 for _ in RULE.finditer(self.grammar))) > MAX_RULES:
            raise ValueError(f"grammar has {number} rules, and at most {MAX_RULES} are allowed: simplify it.")
        if self.kind == "choice":
            return
        depth = 0
        for character in self.text:
            depth = max(0, depth + (character in "([{") - (character in ")]}"))
            if depth > MAX_DEPTH:
                raise ValueError(f"{self.kind} is nested too deeply: at most {MAX_DEPTH} brackets may be open at once.")

    @property
    def length(self) -> int:
        """The number of characters in the description."""
        return len("".join(getattr(self, self.kind)))


def _json_text(schema: str | Mapping[str, Any]) -> str:
    """Return a JSON schema as JSON text."""
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(schema, Mapping):
            raise ValueError("it is not an object")
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise ValueError("The JSON schema is nested too deeply: simplify it.") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"json must be a JSON schema, as a dictionary or as JSON text: {error}.") from error


def _choices(choices: Iterable[str]) -> tuple[str, ...]:
    """Return the choices as a tuple, each once."""
    if isinstance(choices, str) or not isinstance(choices, Iterable):
        raise ValueError(f"choice must be a list of texts, not {choices!r}.")
    choices = tuple(dict.fromkeys(choices))
    if not choices or not all(isinstance(text, str) and text for text in choices):
        raise ValueError(f"choice must be one or more non-empty texts, not {list(choices)!r}.")
    if (longest := max(map(len, choices))) > MAX_CHOICE:
        raise ValueError(f"A choice has {longest} characters, and at most {MAX_CHOICE} are allowed: shorten it.")
    return choices
