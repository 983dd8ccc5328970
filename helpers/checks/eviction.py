"""The eviction contest: a student's `evict()` chooses which cached block is lost, and its score is a count of tokens.

The course's block manager keeps the blocks of finished requests for later ones with the same prefix. Here requests run
one after another, so the order of all accesses is fixed. The score is the number of prompt tokens computed: what is
cached need not be computed. No function can go below Belady's bound (Belady, IBM Systems Journal, 1966).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import count
from random import Random

from ..engine import BlockManager, Sequence
from .calling import answer
from .comparing import kind, show_in_notebook
from .examining import examine
from .exercise import JudgedExercise, Wrong

BLOCKS, BLOCK_SIZE, REQUESTS = 60, 4, 240
SIGNATURE = "evict(blocks, now)"
TRACES = {
    "assistants": "10 system prompts, some of them popular, each time with another question",
    "chats": "conversations, whose next prompt holds the earlier ones",
}


@dataclass(frozen=True)
class CachedBlock:
    """A block of a finished request that can be evicted.

    Attributes:
        name: a number. No other contents have it, and they get another number when they are computed again.
        previous: the name of the block before it in its text; None for the first one.
        index: how many blocks come before it in its text.
        computed: the request that computed it.
        last_used: the last request that had it in its prompt.
        uses: how many requests have had it in their prompts.
        followers: how many blocks have been computed right after it: of different texts, or of one text again.
    """

    name: int
    previous: int | None
    index: int
    computed: int
    last_used: int
    uses: int = 1
    followers: int = 0

    def __deepcopy__(self, memo) -> "CachedBlock":
        return self  # it cannot change, and a check copies thousands


class _Evicting(BlockManager):
    """A block manager that asks a function which cached block to evict."""

    def __init__(self, evict: Callable[[list[CachedBlock], int], CachedBlock]):
        super().__init__(BLOCKS, BLOCK_SIZE)
        self._evict, self._names, self.now = evict, count(), 0
        self._contents: dict[int, dict] = {}  # of each block whose contents are known

    def run(self, number: int, token_ids: list[int]) -> int:
        """Run a request, and return the number of its prompt tokens that were computed."""
        self.now = number
        sequence = Sequence(number, token_ids, 1)
        tokens = len(token_ids) - self.cached_tokens(sequence)
        if not self.allocate(sequence, tokens):
            raise ValueError(f"A prompt of {len(token_ids)} tokens does not fit into {BLOCKS} blocks of {BLOCK_SIZE}.")
        cached = sequence.computed // BLOCK_SIZE
        sequence.computed = len(token_ids)
        previous = None
        for index, block in enumerate(self.tables[sequence][: len(token_ids) // BLOCK_SIZE]):
            if index >= cached:
                known = {"name": next(self._names), "previous": previous and previous["name"], "index": index}
                self._contents[block] = known | {"computed": number, "uses": 0, "followers": 0}
                if previous:
                    previous["followers"] += 1
            previous = self._contents[block]
            previous["last_used"] = number
            previous["uses"] += 1
        self.free(sequence)
        return tokens

    def _new(self, after: int | None) -> int:
        if not self._free:
            blocks = {block: CachedBlock(**self._contents[block]) for block in self.cached_blocks}
            chosen = self._evict(list(blocks.values()), self.now)
            if not isinstance(chosen, CachedBlock) or chosen not in blocks.values():
                what = f"block {chosen.name}" if isinstance(chosen, CachedBlock) else kind(chosen)
                only = f"only these can be evicted (given: {len(blocks)} blocks, now {self.now})"
                raise Wrong(f"should return one of `blocks` as it is, but returned {what}: {only}.")
            evicted = next(block for block, cached in blocks.items() if cached.name == chosen.name)
            self._cached.move_to_end(evicted, last=False)  # the first one is evicted
        return super()._new(after)


def first_in(blocks: list[CachedBlock], now: int) -> CachedBlock:
    """FIFO: evict the block that was computed first, the later ones of a text before the earlier."""
    return min(blocks, key=lambda block: (block.computed, -block.index))


def least_recent(blocks: list[CachedBlock], now: int) -> CachedBlock:
    """LRU: evict the block that has not been used for longest, the later ones of a text before the earlier."""
    return min(blocks, key=lambda block: (block.last_used, -block.index))


# --- traces, counts and the bound ---------------------------------------------------------------------------------


@lru_cache(16)
def prompts(trace: str, seed: int = 0) -> tuple[list[int], ...]:
    """Return the prompts of a trace as token ids; no request can know the ids of a later one."""
    draw, ids = Random(f"{trace} {seed}"), count(1)

    def text(tokens: int) -> list[int]:
        return [next(ids) for _ in range(tokens)]

    if trace == "assistants":
        systems = [text(draw.randint(4, 8) * BLOCK_SIZE) for _ in range(10)]
        chosen = draw.choices(systems, [1 / rank for rank in range(1, 11)], k=REQUESTS)
        return tuple(system + text(draw.randint(1, 6) * BLOCK_SIZE - 2) for system in chosen)
    asked, chats = [], []  # a chat is its text so far, and the number of turns that are left
    while len(asked) < REQUESTS:
        live = [chat for chat in chats if chat[1] > 0]
        if not live or (len(live) < 8 and draw.random() < 0.5):
            chats.append(chat := [text(draw.randint(8, 20)), draw.randint(1, 6)])
        else:
            chat = draw.choice(live)
            chat[0], chat[1] = chat[0] + text(draw.randint(5, 15)), chat[1] - 1
        whole = len(chat[0]) % BLOCK_SIZE == 0
        asked.append(chat[0] + text(whole))  # not all in full blocks, since the last token is always computed
    return tuple(asked)


def computed_tokens(evict: Callable, trace: str, seed: int = 0) -> int:
    """Return how many prompt tokens a trace computes with a function.

    Raises:
        Wrong: the function returns something that cannot be evicted.
    """
    memory = _Evicting(evict)
    return sum(memory.run(number, prompt) for number, prompt in enumerate(prompts(trace, seed)))


@cache
def baselines(trace: str, seed: int = 0) -> dict[str, int]:
    """Return the tokens computed with FIFO and with LRU, and Belady's bound."""
    fifo, lru = (computed_tokens(each, trace, seed) for each in (first_in, least_recent))
    return {"FIFO": fifo, "LRU": lru, "Belady's bound": belady_bound(trace, seed)}


def belady_bound(trace: str, seed: int = 0) -> int:
    """Return the tokens computed if each miss evicts the block whose next use is furthest in the future.

    As a function it would need the future. It is a bound: it ignores that a request's own blocks cannot be evicted,
    and that the last block of a prompt, which is not full, needs room, too.
    """
    asked = prompts(trace, seed)
    uses = [tuple(ids[:end]) for ids in asked for end in range(BLOCK_SIZE, len(ids) + 1, BLOCK_SIZE)]
    next_use, upcoming = [0.0] * len(uses), {}
    for index in reversed(range(len(uses))):
        next_use[index] = upcoming.get(uses[index], float("inf"))
        upcoming[uses[index]] = index
    kept: dict[tuple, float] = {}
    misses = 0
    for block, following in zip(uses, next_use, strict=True):
        if block not in kept:
            misses += 1
            if len(kept) == BLOCKS:
                del kept[max(kept, key=kept.get)]
        kept[block] = following
    return misses * BLOCK_SIZE + sum(len(ids) % BLOCK_SIZE for ids in asked)


def distance_closed(tokens: int, trace: str, seed: int = 0) -> float:
    """Return which part of the distance from LRU to Belady's bound a number of tokens closes; below 0 if above LRU."""
    known = baselines(trace, seed)
    return (known["LRU"] - tokens) / (known["LRU"] - known["Belady's bound"])


def standing(tokens: int, trace: str, seed: int = 0) -> str:
    """Return where a number of tokens stands, in words."""
    known = ", ".join(f"{name} {value:,}" for name, value in baselines(trace, seed).items())
    closed = f"{distance_closed(tokens, trace, seed):.0%} of the distance from LRU to the bound"
    return f"{tokens:,} prompt tokens computed on {trace!r} ({known}): {closed}"


def score_eviction(evict: Callable) -> dict[str, dict[str, int]]:
    """Run a function on both traces, and print the prompt tokens computed beside FIFO, LRU and Belady's bound.

    In a notebook, also draw them.

    Args:
        evict: `evict(blocks, now)` returns one of the blocks.

    Returns:
        For each trace a dict from policy ("FIFO", "LRU", "yours", "Belady's bound") to the tokens. Empty if the
        function fails; a message then says why.
    """
    scores: dict[str, dict[str, int]] = {}

    def run(function: Callable, seed: int) -> None:
        for trace in TRACES:
            known = dict(baselines(trace, seed))
            bound = known.popitem()
            scores[trace] = {**known, "yours": computed_tokens(function, trace, seed), bound[0]: bound[1]}

    verdict = examine(JudgedExercise(SIGNATURE, "all choices are possible", run), lambda q: answer(q, evict))
    if not verdict.passed:
        print(f"evict: {verdict.message}")
        return {}
    print("\n\n".join(_table(trace, score) for trace, score in scores.items()))
    for trace, score in scores.items():
        title = f"{trace}: {TRACES[trace]}"
        show_in_notebook(lambda plots, score=score, title=title: plots.bars(score, "prompt tokens computed", title))
    return scores


def _table(trace: str, score: dict[str, int]) -> str:
    lines = [f"{trace}: {TRACES[trace]}"]
    lines += [f"  {REQUESTS} requests, {sum(map(len, prompts(trace))):,} prompt tokens, {BLOCKS} blocks"]
    lines += [f"  {'':16s}{'computed':>10s}{'from LRU to the bound':>24s}"]
    return "\n".join([*lines, *(f"  {name:16s}{n:10,}{distance_closed(n, trace):24.0%}" for name, n in score.items())])
