"""Grammars: structured outputs, compiled for the vocabulary of a model.

A request whose grammar is invalid, or that no text can match, is refused before it takes a row. llguidance compiles
grammars: it has no dependencies and prepares nothing per token of the vocabulary, so a new schema takes a millisecond.
(For 50,000 tokens, xgrammar and outlines-core took 300 ms; xgrammar requires torch, outlines-core has no grammars.)
"""

import functools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .runner import ModelInfo
from .schema_recursion import can_end
from .structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# A regular expression of a few characters can describe billions of states. With these limits, one that is made to be
# slow costs tens of milliseconds per step instead of seconds, and tens of megabytes, and then an error.
LIMITS = dict(initial_lexer_fuel=200_000, step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=100_000)
NUM_CACHED = 16
# White space as `json.dumps` writes it. If a grammar allows any, a model that is unsure can write nothing else until
# max_tokens. A schema can ask for other white space with llguidance's own keyword, "x-guidance".
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NUM_PROBED = 16  # tokens


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar, which the sequences of several requests may share.

    Attributes:
        start: a matcher that has read nothing; each sequence has a copy.
        eos_token_ids: the tokens that end an output, which are allowed wherever the grammar may end.
    """

    start: "LLMatcher"
    eos_token_ids: frozenset[int]


class GrammarCompiler:
    """Compiles structured outputs, and keeps the newest ones.

    Args:
        tokenizer: the model's tokenizer, byte-level or with byte tokens.
        model: the vocabulary and the EOS tokens of the model.
    """

    def __init__(self, tokenizer, model: ModelInfo):
        self.tokenizer, self.model = tokenizer, model
        self.compile = functools.lru_cache(maxsize=NUM_CACHED)(self._compile)  # a server asks twice, on two threads

    def _compile(self, structured_outputs: StructuredOutputs) -> Grammar:
        """Return the grammar.

        Raises:
            ValueError: it is invalid or too complex, no text matches it, or the model and its tokenizer cannot be
                constrained.
        """
        vocabulary = self._vocabulary
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS, verbose_errors=False)
        kind = structured_outputs.kind
        start = LLMatcher(vocabulary, _source(structured_outputs), log_level=0, limits=limits)
        if start.is_error():
            raise ValueError(f"{kind} cannot be compiled: {reason(start)}")
        if kind == "json" and not can_end(json.loads(structured_outputs.json)):
            raise ValueError("No finite text matches json: a part that it requires always contains itself.")
        self._probe(start.deep_copy(), kind)
        return Grammar(start, self.model.eos_token_ids)

    def _probe(self, matcher: "LLMatcher", kind: str) -> None:
        """Read a few tokens: most grammars that cannot be continued, or only slowly, show it at once."""
        for _ in range(NUM_PROBED):
            bits = matcher.compute_bitmask()
            if matcher.is_error():
                if "NoExtension" in matcher.get_error():
                    raise ValueError(f"No text of this model's tokens matches {kind}: change it.")
                raise ValueError(f"{kind} is too complex: {reason(matcher)}")
            allowed = (8 * at + bits[at].bit_length() - 1 for at in range(len(bits)) if bits[at])
            token_id = next((id for id in allowed if id not in self.model.eos_token_ids), None)
            if token_id is None:
                return
            matcher.consume_token(token_id)

    @functools.cached_property
    def _vocabulary(self) -> "LLTokenizer":
        """The bytes of every token, which takes up to a second to prepare."""
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise ValueError("Structured outputs need llguidance: run pip install llguidance.") from error
        if not self.model.eos_token_ids:
            raise ValueError("Structured outputs end with an EOS token, and this model has none.")
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        try:
            size = max(self.model.vocab_size, len(self.tokenizer))
            return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=sorted(self.model.eos_token_ids))
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"Structured outputs need a fast tokenizer that is byte-level or has byte tokens, and "
                f"{type(self.tokenizer).__name__} is not one: {error}."
            ) from error


def reason(matcher: "LLMatcher") -> str:
    """Return the message of a matcher that has failed, on one line."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:500]


def _source(structured_outputs: StructuredOutputs) -> str:
    """Return the description in llguidance's own format."""
    from llguidance import LLMatcher, grammar_from

    match structured_outputs:
        case StructuredOutputs(json=str(schema)):
            return LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)
        case StructuredOutputs(regex=str(regex)):
            return LLMatcher.grammar_from_regex(regex)
        case StructuredOutputs(choice=tuple(choices)):
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        case StructuredOutputs(grammar=str(grammar)):
            return grammar_from("grammar", grammar)
