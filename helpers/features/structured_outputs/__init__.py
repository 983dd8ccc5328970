"""Structured outputs: an output matches a JSON schema, a regular expression, a list of choices or a grammar.

description.py    what an output must match, as a request states it
grammar.py        compiles a description for the vocabulary of a model
compilation.py    the calls of llguidance, with limits
worker.py         a process in which they run first
grammar_state.py  the place of an output in its grammar: which tokens may come next
"""

from ...engine import EngineCore, Feature
from .description import StructuredOutputs as StructuredOutputs
from .grammar import GrammarCompiler


class StructuredOutputsFeature(Feature):
    """Compiles the description of a request, and excludes every token that would break it."""

    name = "structured_outputs"

    def __init__(self, engine: EngineCore):
        self.compiler = GrammarCompiler(engine.tokenizer, engine.model_info)

    def check(self, params):
        if not isinstance(params.structured_outputs, StructuredOutputs):
            raise ValueError(f"structured_outputs must be StructuredOutputs, not {params.structured_outputs!r}.")
        self.compiler.compile(params.structured_outputs)

    def is_ready(self, params) -> bool:
        """Return whether `check` takes a few milliseconds at most."""
        return self.compiler.is_ready(params.structured_outputs)

    def check_quickly(self, params) -> bool:
        """Do what `check` does if it takes a tenth of a second at most, and return whether it did."""
        return self.compiler.compile_quickly(params.structured_outputs)

    def end(self) -> None:
        """End the workers."""
        self.compiler.quick_worker.end()
        self.compiler.worker.end()

    def prepare(self, request):
        request.notes[self.name] = self.compiler.compile(request.params.structured_outputs)

    def logits_rule(self, sequence):
        from .grammar_state import GrammarState  # only here: a simulator has no logits, and no numpy

        return GrammarState(sequence.request.notes[self.name], sequence.prompt_tokens)


attach = StructuredOutputsFeature
