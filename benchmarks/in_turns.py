"""What the benchmarks of costs and of quality share: everything takes turns, and a table shows the medians.

Engines that are compared run in rounds, each once per round, so that a slow minute of the machine affects all of them.
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from tqdm.auto import tqdm

from helpers import load_model
from helpers.engine import Chunk, EngineCore, Plan, Runner, RunnerOutput, SampledToken
from helpers.models import EMBEDDED

from .machine import processor
from .models import find_model

Name, Result = TypeVar("Name"), TypeVar("Result")


def take_turns(runs: Mapping[Name, Callable[[], Result]], rounds: int, warm_up: int = 1) -> dict[Name, list[Result]]:
    """Call every function once per round, and return what each returned, without the rounds that warm up."""
    results: dict[Name, list[Result]] = {name: [] for name in runs}
    for number in tqdm(range(warm_up + rounds), unit="round", leave=False):
        for name, run in runs.items():
            result = run()
            if number >= warm_up:
                results[name].append(result)
    return results


def seconds(run: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def measured_on() -> str:
    """Return the processor and PyTorch's threads, for the line above a table."""
    return f"Processor: {processor()}, {torch.get_num_threads()} threads."


def small_and_large() -> dict[str, tuple]:
    """Return two models with their tokenizers: the embedded one, and GPT-2 124M with random weights."""
    return {"embedded model": load_model(EMBEDDED), "GPT-2 124M": load_model(find_model("gpt2").folder)}


def random_prompts(vocabulary: int, num_tokens: int) -> Iterator[list[int]]:
    """Yield prompts without end; none begins like another one, so nothing is found in a prefix cache."""
    draw = random.Random(0)
    while True:
        yield [draw.randrange(1, vocabulary) for _ in range(num_tokens)]


class TokenReplacingRunner:
    """A runner that computes what another one computes, and then replaces the tokens that were chosen.

    Args:
        inner: the runner that computes the plans.
        choose: returns the tokens that a sequence gains in a pass, from its chunk.
    """

    not_ragged_because = None

    def __init__(self, inner: Runner, choose: Callable[[Chunk], list[SampledToken]]):
        self.name, self.inner, self.choose = inner.name, inner, choose
        self.num_blocks, self.block_size = inner.num_blocks, inner.block_size

    def run(self, plan: Plan, clock) -> RunnerOutput:
        """Run a plan and replace its tokens."""
        output = self.inner.run(plan, clock)
        for forward_pass in output.passes:
            chunks = [chunk for chunk in forward_pass.chunks if chunk.samples_token]
            forward_pass.sampled.update({chunk.sequence: self.choose(chunk) for chunk in chunks})
        return output


def iteration_times(engine: EngineCore, count: int) -> list[float]:
    """Run iterations, and return the milliseconds of each."""
    return [1000 * seconds(engine.step) for _ in range(count)]
