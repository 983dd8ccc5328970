"""Grammars: structured outputs, compiled for the vocabulary of a model.

A request whose grammar is invalid, or that no text can match, is refused before it takes a row. llguidance compiles
grammars: it has no dependencies and prepares nothing per token of the vocabulary, so a new schema takes a millisecond.
(For 50,000 tokens, xgrammar and outlines-core took 300 ms; xgrammar requires torch, outlines-core has no grammars.)
But a few characters can make it run for hours, take all memory, or overflow the stack, which ends the process. So
rules and nesting are bounded first (`description.py`), and a worker compiles every description that is not obviously
small before the engine's process does (`worker.py`).
"""

import functools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...engine import ModelInfo
from . import compilation
from .compilation import compile_text, vocabulary
from .description import StructuredOutputs
from .worker import Worker

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NUM_CACHED = 16
SMALL = 200  # characters of a choice or a regular expression without counted repetition: a few milliseconds


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar, which the sequences of several requests may share.

    Attributes:
        start: a matcher that has read nothing; each sequence has a copy.
        eos_token_ids: the tokens that end an output, which are allowed wherever the grammar may end.
    """

    start: "LLMatcher"
    eos_token_ids: frozenset[int]

    def __deepcopy__(self, memo: dict) -> "Grammar":
        return self  # it never changes


class GrammarCompiler:
    """Compiles structured outputs, and keeps the newest ones.

    Args:
        tokenizer: the model's tokenizer, byte-level or with byte tokens.
        model: the vocabulary and the EOS tokens of the model.
    """

    def __init__(self, tokenizer, model: ModelInfo):
        self.tokenizer, self.model = tokenizer, model
        # A description that takes long must not delay those that do not, so it has a worker of its own.
        self.quick_worker, self.worker = Worker(self._vocabulary_arguments), Worker(self._vocabulary_arguments)
        self._cached: dict[StructuredOutputs, Grammar] = {}  # the newest last
        self._kept: dict[int, Grammar] = {}  # by the identity of a description, for as long as it lives

    def compile(self, structured_outputs: StructuredOutputs) -> Grammar:
        """Return the grammar of a description.

        A server asks twice: on a thread of its own, and on the engine's thread, which must not compile anything.

        Raises:
            ValueError: it is invalid or too complex, no text matches it, or the model and its tokenizer cannot be
                constrained.
        """
        if (grammar := self._known(structured_outputs)) is None:
            if not self._compile(structured_outputs, self.worker, compilation.DEADLINE):
                raise ValueError(
                    f"{structured_outputs.kind} is too complex: compiling it takes more than "
                    f"{compilation.DEADLINE:g} seconds, {compilation.MEMORY // 2**20} MiB or the stack. Simplify it."
                )
            grammar = self._known(structured_outputs)
        return grammar

    def compile_quickly(self, structured_outputs: StructuredOutputs) -> bool:
        """Compile a description if that takes less than `SLICE`, and return whether it is compiled.

        Raises:
            ValueError: as for `compile`.
        """
        known = self._known(structured_outputs) is not None
        return known or self._compile(structured_outputs, self.quick_worker, compilation.SLICE)

    def is_ready(self, structured_outputs: StructuredOutputs) -> bool:
        """Return whether compiling a description takes a few milliseconds at most, since it is known or small."""
        is_small = _is_small(structured_outputs.kind, structured_outputs.text) and "_vocabulary" in vars(self)
        return is_small or self._known(structured_outputs) is not None

    def _known(self, structured_outputs: StructuredOutputs) -> Grammar | None:
        """Return the grammar of a description that was compiled lately, and keep it for as long as the description."""
        if (grammar := self._kept.get(id(structured_outputs))) is not None:
            return grammar
        grammar = self._cached.get(structured_outputs)
        return grammar and self._keep(structured_outputs, grammar)

    def _keep(self, structured_outputs: StructuredOutputs, grammar: Grammar) -> Grammar:
        key = id(structured_outputs)
        # First, so that no interrupt leaves a grammar to the next object with this identity.
        weakref.finalize(structured_outputs, self._kept.pop, key, None).atexit = False
        self._kept[key] = grammar
        self._cached.pop(structured_outputs, None)
        self._cached[structured_outputs] = grammar
        for old in list(self._cached)[:-NUM_CACHED]:
            self._cached.pop(old, None)
        return grammar

    def _compile(self, structured_outputs: StructuredOutputs, worker: Worker, seconds: float) -> bool:
        """Compile a description and keep its grammar; return whether a worker can do that within limits."""
        tokens, kind, text = self._vocabulary, structured_outputs.kind, structured_outputs.text
        if not _is_small(kind, text) and not worker.check(kind, text, seconds):
            return False
        start = compile_text(tokens, self.model.eos_token_ids, kind, text)
        self._keep(structured_outputs, Grammar(start, self.model.eos_token_ids))
        return True

    @functools.cached_property
    def _vocabulary(self) -> "LLTokenizer":
        """The bytes of every token."""
        if not self.model.eos_token_ids:
            raise ValueError("Structured outputs end with an EOS token, and this model has none.")
        try:
            return vocabulary(*self._vocabulary_arguments())
        except ImportError as error:
            raise ValueError("Structured outputs need llguidance: run pip install llguidance.") from error
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"Structured outputs need a fast tokenizer that is byte-level or has byte tokens, and "
                f"{type(self.tokenizer).__name__} is not one: {error}."
            ) from error

    def _vocabulary_arguments(self) -> tuple[str, int, list[int]]:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        size = max(self.model.vocab_size, len(self.tokenizer))
        return backend.to_str(), size, sorted(self.model.eos_token_ids)


def _is_small(kind: str, text: str) -> bool:
    """Return whether the engine's process may compile a description at once."""
    return len(text) <= SMALL and (kind == "choice" or (kind == "regex" and "{" not in text))
