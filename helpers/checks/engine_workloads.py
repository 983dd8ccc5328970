"""The capstone, its workloads: for each milestone fixed kinds of requests, and drawn ones.

The fixed kinds decide, so that no draw is lucky: unequal and equal prompts, outputs of one token, EOS at once and in a
prompt, arrivals during the run and after a pause, memory for barely one request. All tokens depend on the seed.
"""

from collections.abc import Callable, Iterator
from random import Random

from .engine_models import EOS, VOCABULARY, KeyedModel
from .engine_run import Workload

NO_LIMIT = 10**6


class _Draw:
    """Draws requests with prompts of given lengths, whose outputs have given lengths."""

    def __init__(self, random: Random, model: KeyedModel):
        self.random, self.model = random, model
        self.ids = [token for token in range(VOCABULARY) if token != EOS]

    def tokens(self, count: int) -> list[int]:
        return [self.random.choice(self.ids) for _ in range(count)]

    def request(self, arrival: int, length: int, most: int, ends: int = 0, before=(), after=()) -> tuple:
        """Return a request whose output has `ends` tokens, if that is not 0; if it is less than `most`, EOS ends it."""
        for _ in range(2000):
            prompt = [*before, *self.tokens(length), *after]
            if not ends or len(self.model.alone(prompt, most)) == ends:
                break
        return arrival, prompt, most

    def requests(self, *sizes: tuple[int, ...]) -> list[tuple]:
        return [self.request(*size) for size in sizes]

    def some(self, count: int, length: int, most: int, last: int = 0) -> list[tuple]:
        """Return requests up to a length, with up to so many tokens, that arrive up to a time."""
        draw = self.random.randint
        arrivals = sorted(draw(0, last) for _ in range(count))
        return [self.request(arrival, draw(1, length), draw(1, most)) for arrival in arrivals]


def _blocks(request: tuple) -> int:
    """Return the blocks of 4 tokens that a request needs at most."""
    return -(-(len(request[1]) + request[2]) // 4)


def roomy(name: str, requests: list, rows: int, budget: int = NO_LIMIT) -> Workload:
    """Return a workload with memory for the longest request in each row."""
    return Workload(name, requests, rows, budget, rows * max(map(_blocks, requests)))


def _cached(draw: _Draw) -> Iterator[Workload]:
    first, *others = draw.requests((0, 5, 6, 6), (0, 1, 5), (0, 17, 20, 3), (0, 7, 30, 30), (0, 8, 10, 1), (0, 4, 1, 1))
    with_eos = draw.request(0, 2, 4, 4, before=[9, EOS, 0], after=[EOS])
    after_eos = draw.request(0, 2, 9, 3, before=[EOS, 4])
    last = draw.request(0, 4, 9, 9)
    yield roomy("one row, unequal prompts", [first, *others, (0, first[1], 3), with_eos, after_eos, last], 1)
    yield roomy("one row, requests that arrive", draw.some(7, 20, 14, 60), 1)


def _static(draw: _Draw) -> Iterator[Workload]:
    twin = draw.request(0, 3, 4, 4)
    requests = [*draw.requests((0, 12, 9, 9), (0, 1, 6), (0, 5, 14, 2), (0, 3, 1, 1)), twin, (0, twin[1], 2)]
    requests += [draw.request(0, 20, 7, 7), (0, twin[1], 4), *draw.requests((0, 2, 8, 1), (0, 9, 8, 1))]
    yield roomy("4 rows, all requests at once", [*requests, draw.request(0, 3, 5, 5, after=[EOS, 0])], 4)
    yield roomy("all requests at once", draw.some(13, 24, 16), draw.random.randint(3, 5))


def _continuous(draw: _Draw) -> Iterator[Workload]:
    twin = draw.request(2, 6, 5, 5)
    requests = [*draw.requests((0, 9, 22, 22), (0, 3, 2, 2), (0, 5, 9, 4)), twin, (2, twin[1], 8)]
    requests += draw.requests((3, 2, 1, 1), (3, 15, 6, 1), (4, 4, 9, 9), (9, 7, 3, 3), (400, 4, 3, 3), (401, 11, 6, 6))
    yield roomy("3 rows, requests that arrive during the run, and after a pause", requests, 3)
    sizes = ((2, 1), (4, 1), (9, 6), (3, 1), (5, 2), (1, 1), *[(7, 6)] * 9)
    yield roomy("3 rows, short outputs", draw.requests(*((0, length, most, most) for length, most in sizes)), 3)
    yield roomy("3 rows, outputs of one token", draw.requests(*[(0, 4, 1, 1)] * 12), 3)
    yield roomy("2 rows, one long output", draw.requests((0, 5, 60, 60), *[(0, 3, 1, 1)] * 40), 2)
    # A row is free long before a second one, and a long output waits for it.
    sizes = 20, 50, 58, 60, 60
    yield roomy("4 rows, outputs that end one by one", draw.requests(*((0, 5, most, most) for most in sizes)), 4)
    yield roomy("requests that arrive", draw.some(16, 20, 16, 40), draw.random.randint(3, 5))


def _chunked(draw: _Draw) -> Iterator[Workload]:
    long = draw.requests((0, 3, 26, 26), (0, 6, 18, 18), (3, 37, 5, 5), (5, 29, 1, 1), (6, 16, 4, 4), (30, 2, 3, 3))
    yield roomy("4 rows, 8 tokens per step, long prompts that arrive beside decodes", long, 4, 8)
    yield roomy("two long prompts, 16 tokens per step", draw.requests((0, 48, 2, 2), (0, 40, 2, 2)), 2, 16)
    yield roomy("4 rows, 8 tokens per step, prompts of 2 tokens", draw.requests(*[(0, 2, 2, 2)] * 12), 4, 8)
    short = draw.requests(*((0, length, 8, 8) for length in (2, 11, 1, 7)))
    yield roomy("3 rows, 3 tokens per step", short, 3, 3)
    rows = draw.random.randint(3, 5)
    yield roomy("prompts longer than a step", draw.some(12, 40, 14, 40), rows, rows + draw.random.randint(4, 9))


def _paged(draw: _Draw) -> Iterator[Workload]:
    randint = draw.random.randint
    yield Workload("three long requests, memory for fewer than two", draw.requests(*[(0, 24, 40, 40)] * 3), 3, 40, 22)
    few = draw.requests((0, 11, 40, 26), (0, 5, 30, 9), (0, 8, 30, 14), (0, 3, 30, 6), (6, 20, 12, 3))
    least = (11 + 26 - 1) // 4  # its last token is not computed
    yield Workload("memory for barely one request, 4 rows", few, 4, 16, least)
    same = draw.requests(*((at, 8, 30, ends) for at, ends in ((0, 12), (0, 16), (1, 12), (1, 9), (2, 20), (2, 5))))
    yield Workload("memory for half of the rows, limits that outputs do not reach", same, 4, 16, 13)
    arrivals = sorted(randint(0, 40) for _ in range(14))
    drawn = [draw.request(arrival, randint(2, 24), 32) for arrival in arrivals]
    memory = max(map(_blocks, drawn)) + randint(2, 8)
    yield Workload("requests that arrive, little memory", drawn, 5, 20, memory)


def _prefixes(draw: _Draw) -> Iterator[Workload]:
    system, other, question = draw.tokens(16), draw.tokens(16), draw.tokens(8)
    short, third = draw.request(62, 2, 8, 8, before=system[:8]), [*system[:4], *draw.tokens(12), *question]
    asked = [
        draw.request(0, 5, 6, 6, before=system), draw.request(3, 3, 12, 12, before=system),
        draw.request(4, 0, 6, 0, before=[*system, *question]), draw.request(9, 0, 9, 0, before=[*system, *question]),
        draw.request(9, 0, 7, 0, before=[*other, *question]), draw.request(12, 2, 8, 8, before=[*other, *question]),
        draw.request(60, 6, 4, 4, before=system), draw.request(61, 0, 5, 0, before=system),
        short, (63, short[1], 8), draw.request(66, 1, 8, 8, before=short[1]),
        # The question after a third text, which begins like the first; then the first in another order.
        draw.request(67, 0, 5, 0, before=third), draw.request(74, 2, 5, 0, before=third),
        draw.request(78, 3, 4, 4, before=[*system[3::-1], *system[4:]]),
        # Another first token, another one within a block, another first block.
        draw.request(82, 3, 4, 4, before=[(system[0] + 1) % VOCABULARY, *system[1:]]),
        draw.request(82, 3, 4, 4, before=[*system[:5], (system[5] + 1) % VOCABULARY, *system[6:]]),
        draw.request(90, 2, 4, 4, before=[*other[:4], *system[4:]]),
    ]  # fmt: skip
    yield roomy("4 rows, prompts that begin alike", asked, 4, 32)
    pair = [draw.request(0, 3, 2, 2, before=system), draw.request(1, 2, 20, 20, before=system)]
    yield Workload("a prefix in use while memory is short", [*pair, draw.request(6, 44, 2, 2)], 3, 64, 16)
    shared = draw.tokens(24)  # in turn with prompts that need most of the memory
    in_turn = [draw.request(12 * n, 27 - 24 * own, 2, 2, before=shared * own) for n, own in enumerate([1, *[1, 0] * 4])]
    yield Workload("one request after another, little memory", in_turn, 2, 64, 12)
    systems = [draw.tokens(4 * draw.random.randint(3, 6)) for _ in range(4)]
    arrivals = sorted(draw.random.randint(0, 120) for _ in range(24))
    many = [
        draw.request(a, draw.random.randint(0, 7), draw.random.randint(1, 10), before=draw.random.choice(systems))
        for a in arrivals
    ]
    yield Workload("four system prompts, little memory", many, 4, 32, 3 * max(map(_blocks, many)))


WORKLOADS: dict[str, Callable[[_Draw], Iterator[Workload]]] = {
    "engine_cached": _cached,
    "engine_static": _static,
    "engine_continuous": _continuous,
    "engine_chunked": _chunked,
    "engine_paged": _paged,
    "engine_prefixes": _prefixes,
}


def cases(milestone: str, seed: int = 0) -> Iterator[tuple[Workload, KeyedModel]]:
    """Yield the workloads of a milestone, each with its model. Their kinds are fixed; all tokens depend on the seed."""
    model = KeyedModel(f"{milestone} {seed}")
    for workload in WORKLOADS[milestone](_Draw(Random(f"{milestone} {seed}"), model)):
        yield workload, model
