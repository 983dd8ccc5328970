"""The requests that every engine runs, as token ids: named mixes, the same for the same seed.

Engines ignore EOS, so each request gets exactly `max_tokens` tokens. The work is then the same for every model, and
useful tokens per second can be compared.
"""

import random
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TokenRequest:
    """A prompt as token ids, how many tokens to generate, and how to choose them: the best one, or at random."""

    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Workload:
    """Requests that all arrive at the start, and how many of them an engine may run at once."""

    name: str
    rows: int
    requests: list[TokenRequest]

    @property
    def output_tokens(self) -> int:
        return sum(request.max_tokens for request in self.requests)

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are random, so that no two engines need to choose the same."""
        return any(request.temperature for request in self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def context(self) -> int:
        """The context length that a model needs."""
        return max(len(request.prompt) + request.max_tokens for request in self.requests)


def race(vocabulary: int, seed: int = 0) -> Workload:
    """Lesson 3's race: 32 prompts of 7 tokens in 8 rows, 100 output tokens for every 8th and 10 for the others."""
    draw = random.Random(seed)
    sizes = [(7, 100 if i % 8 == 0 else 10) for i in range(32)]
    return Workload("race", 8, [_request(draw, vocabulary, *size) for size in sizes])


def mixed(vocabulary: int, seed: int = 0) -> Workload:
    """64 requests in 16 rows, prompts and outputs of 8 to 128 tokens, uniform and independent."""
    draw = random.Random(seed)
    sizes = [(draw.randint(8, 128), draw.randint(8, 128)) for _ in range(64)]
    return Workload("mixed", 16, [_request(draw, vocabulary, *size) for size in sizes])


def long(vocabulary: int, seed: int = 0) -> Workload:
    """48 requests in 16 rows, prompts of 256 to 512 tokens and outputs of 16 to 64: most of the work is prefill."""
    draw = random.Random(seed)
    sizes = [(draw.randint(256, 512), draw.randint(16, 64)) for _ in range(48)]
    return Workload("long", 16, [_request(draw, vocabulary, *size) for size in sizes])


def one(vocabulary: int, seed: int = 0) -> Workload:
    """One request of 8 prompt tokens and 128 output tokens: each forward pass reads all weights for one token."""
    return Workload("one", 1, [_request(random.Random(seed), vocabulary, 8, 128)])


WORKLOADS = {workload.__name__: workload for workload in (race, mixed, long, one)}


def sampled(workload: Workload) -> Workload:
    """Return a workload whose tokens are drawn from the likely ones, as those of most chats are."""
    requests = [replace(request, temperature=0.8, top_p=0.9) for request in workload.requests]
    return replace(workload, name=f"{workload.name}, sampled", requests=requests)


def shortened(workload: Workload, requests: int = 6, prompt: int = 24, max_tokens: int = 6) -> Workload:
    """Return the first requests of a workload with shorter prompts and outputs, for a smoke test."""
    return replace(
        workload,
        rows=min(workload.rows, 4),
        requests=[
            replace(request, prompt=request.prompt[:prompt], max_tokens=min(request.max_tokens, max_tokens - i % 2))
            for i, request in enumerate(workload.requests[:requests])
        ],
    )


def _request(draw: random.Random, vocabulary: int, prompt: int, max_tokens: int) -> TokenRequest:
    return TokenRequest([draw.randrange(vocabulary) for _ in range(prompt)], max_tokens)
