"""What a grammar costs per iteration: `python -m benchmarks.structured_cost`.

The claim: with 8 structured rows, the grammars take less than 5% of an iteration, greedy or sampled. An engine whose
texts are free and one whose texts are JSON take turns. Their iterations are compared as wholes; since the difference is
hidden in the noise, the time within the grammars is measured, too.
"""

import statistics
import time
from collections.abc import Callable

import cyclopts

from helpers import Engine, EngineConfig, SamplingParams, StructuredOutputs
from helpers.features.structured_outputs.grammar_state import GrammarState

from .in_turns import measured_on, random_prompts, seconds, small_and_large, table, take_turns

ROWS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 16, 64
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


class GrammarClock:
    """Counts the time within grammars, in all engines of this process."""

    def __init__(self):
        self.seconds = 0.0

    def __enter__(self) -> "GrammarClock":
        self._methods = {name: getattr(GrammarState, name) for name in ("allows", "change")}
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


def measure(model, tokenizer, temperature: float, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return the milliseconds of iterations and of their grammars, for free texts and structured ones in turn."""
    engine = Engine(model, tokenizer, EngineConfig(max_batch_size=ROWS, trace_length=10))
    settings = {"max_tokens": OUTPUT_TOKENS, "temperature": temperature, "seed": 0 if temperature else None}
    prompts = random_prompts(len(tokenizer), PROMPT_TOKENS)

    def batches(params: SamplingParams) -> Callable[[], list[tuple[float, float]]]:
        def serve() -> list[tuple[float, float]]:
            for _ in range(ROWS):
                engine.add_request(next(prompts), params)
            milliseconds = []
            for _ in range(OUTPUT_TOKENS):
                clock.seconds = 0.0
                whole = seconds(engine.step)
                milliseconds.append((1000 * whole, 1000 * clock.seconds))
            assert not engine.has_unfinished_requests(), "all outputs have the same length"
            return milliseconds[1:]  # the first iteration prefills

        return serve

    runs = {
        "free": batches(SamplingParams(ignore_eos=True, **settings)),
        "structured": batches(SamplingParams(structured_outputs=StructuredOutputs(json=RECORD), **settings)),
    }
    with GrammarClock() as clock:
        results = take_turns(runs, rounds)
    return {kind: [times for batch in batches for times in batch] for kind, batches in results.items()}


def main(*, rounds: int = 5) -> None:
    """Measure what grammars cost the embedded model and GPT-2 124M, greedy and sampled.

    Args:
        rounds: how many batches of each kind are measured.
    """
    rows = []
    for name, pair in small_and_large().items():
        for temperature in (0, 1):
            times = measure(*pair, temperature, rounds)
            free, structured = (statistics.median(whole for whole, _ in times[kind]) for kind in ("free", "structured"))
            grammar = statistics.mean(grammar for _, grammar in times["structured"])
            cells = f"{free:.2f}", f"{structured:.2f}", f"{grammar:.3f}", f"{grammar / structured:.1%}"
            rows.append([f"{name}, temperature {temperature}", *cells])
    print(
        f"{measured_on()} Milliseconds per iteration of {ROWS} rows that decode: medians of whole iterations, means of "
        f"the time within grammars.\n\n{table(['', 'free', 'structured', 'grammars', 'share'], rows)}"
    )


if __name__ == "__main__":
    cyclopts.run(main)
