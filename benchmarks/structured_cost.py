"""What a grammar costs per iteration: `python -m benchmarks.structured_cost`.

The claim: with 8 structured rows, the grammars take less than 5% of an iteration, greedy or sampled. An engine whose
texts are free and one whose texts are JSON take turns. Their iterations are compared as wholes; since the difference is
hidden in the noise, the time within the grammars is measured, too.
"""

import random
import statistics
import time
from dataclasses import dataclass, field

import torch
from tqdm.auto import tqdm

from helpers import Engine, EngineConfig, SamplingParams, StructuredOutputs, load_model
from helpers.models import EMBEDDED
from helpers.runners.grammar_state import GrammarState

from .machine import processor
from .models import find_model

ROWS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 16, 64
WARM_UP, ROUNDS = 1, 5
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,20}( [A-Z][a-z]{2,20}){2}$"},
        "born": {"type": "string", "format": "date"},
        "children": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 20, "maxItems": 90},
    },
    "required": ["name", "born", "children"],
    "additionalProperties": False,
}


@dataclass
class Measurement:
    """Milliseconds of single iterations in which every row decodes.

    Attributes:
        whole: of the iteration.
        grammar: of its grammars.
    """

    whole: list[float] = field(default_factory=list)
    grammar: list[float] = field(default_factory=list)


class GrammarClock:
    """Counts the time within grammars, in all engines of this process."""

    def __init__(self):
        self.seconds = 0.0

    def __enter__(self) -> "GrammarClock":
        self._methods = {name: getattr(GrammarState, name) for name in ("allows", "mask")}
        for name, method in self._methods.items():
            setattr(GrammarState, name, self._timed(method))
        return self

    def __exit__(self, *_) -> None:
        for name, method in self._methods.items():
            setattr(GrammarState, name, method)

    def _timed(self, method):
        def timed(*args):
            start = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def measure(model, tokenizer, temperature: float, rounds: int = ROUNDS) -> tuple[Measurement, Measurement]:
    """Return the times of free texts and of structured ones."""
    engine = Engine(model, tokenizer, EngineConfig(max_batch_size=ROWS, trace_length=10))
    settings = {"max_tokens": OUTPUT_TOKENS, "temperature": temperature, "seed": 0 if temperature else None}
    kinds = {
        "free": SamplingParams(ignore_eos=True, **settings),
        "structured": SamplingParams(structured_outputs=StructuredOutputs(json=RECORD), **settings),
    }
    results = {kind: Measurement() for kind in kinds}
    draw = random.Random(0)
    with GrammarClock() as clock:
        for number in tqdm(range(WARM_UP + rounds), unit="round", leave=False):
            for kind, params in kinds.items():
                for _ in range(ROWS):
                    engine.add_request([draw.randrange(1, len(tokenizer)) for _ in range(PROMPT_TOKENS)], params)
                for iteration in range(OUTPUT_TOKENS):
                    clock.seconds, start = 0.0, time.perf_counter()
                    engine.step()
                    whole = time.perf_counter() - start
                    if number >= WARM_UP and iteration:  # the first one prefills
                        results[kind].whole.append(1000 * whole)
                        results[kind].grammar.append(1000 * clock.seconds)
                assert not engine.has_unfinished_requests(), "all outputs have the same length"
    return results["free"], results["structured"]


def table(rows: list[tuple[str, Measurement, Measurement]]) -> str:
    """Return the times as a Markdown table."""
    lines = [
        f"Processor: {processor()}, {torch.get_num_threads()} threads. Milliseconds per iteration of {ROWS} rows that "
        f"decode: medians of whole iterations, means of the time within grammars.",
        "",
        "| | free | structured | grammars | share |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, free, structured in rows:
        whole, grammar = statistics.median(structured.whole), statistics.mean(structured.grammar)
        lines.append(
            f"| {name} | {statistics.median(free.whole):.2f} | {whole:.2f} | {grammar:.3f} | {grammar / whole:.1%} |"
        )
    return "\n".join(lines)


def main() -> str:
    """Measure the embedded model and GPT-2 124M, greedy and sampled."""
    models = {"embedded model": load_model(EMBEDDED), "GPT-2 124M": load_model(find_model("gpt2").folder)}
    return table(
        [
            (f"{name}, temperature {temperature}", *measure(*pair, temperature))
            for name, pair in models.items()
            for temperature in (0, 1)
        ]
    )


if __name__ == "__main__":
    print(main())
