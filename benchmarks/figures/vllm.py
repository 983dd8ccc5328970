"""vLLM (Kwon et al., SOSP 2023): the share of the KV cache that holds tokens, with and without blocks.

Kept: OPT-13B on an A100 with 40 GB, whose KV cache has 12 GiB, or 15,728 tokens; sequences of at most 2,048 tokens;
prompts and outputs with the means of ShareGPT, 161 and 338 tokens; blocks of 16; and the three reservations of the
paper's Orca: up to the longest possible sequence (Max), the output's length rounded up to a power of two (Pow2), and
the output's true length (Oracle). Reservations are contiguous and come from a buddy allocator.
Scaled down: 200 requests, all of which wait from the start. Lengths are exponential, because only their means are
published. Shares are averages over the iterations in which requests wait for memory.
"""

import random
from collections.abc import Callable

from helpers.engine import BlockManager, EngineConfig, Scheduler, Sequence, UnlimitedMemory

from .replica import NO_LIMIT, Figure, make_sequences, run

REQUESTS, PROMPT_MEAN, OUTPUT_MEAN, LONGEST = 200, 161, 338, 2048
SLOTS, BLOCK = 15_728, 16  # 12 GiB at 819,200 bytes per token
LINES = [
    (
        "memory that holds tokens: the longest sequence reserved (Max)",
        "20.4%",
        "Published: ShareGPT's lengths. Ours: exponential lengths with the same means.",
    ),
    ("the output rounded up to a power of two (Pow2)", "26.8%", "The same."),
    ("the output's true length (Oracle)", "38.2%", "The same."),
    (
        "blocks of 16",
        "96.3%",
        "The same. In both, a sequence's last block is half empty on average.",
    ),
]


class BuddyMemory(UnlimitedMemory):
    """Memory that a sequence reserves when it is admitted: contiguous, its size a power of two.

    Args:
        slots: the number of tokens that it holds.
        reserved: returns how many tokens a sequence reserves; the size is rounded up.
    """

    def __init__(self, slots: int, reserved: Callable[[Sequence], int]):
        self._reserved, self._held = reserved, {}
        self._free, start = set(), 0  # (start, size)
        for size in (1 << bit for bit in reversed(range(slots.bit_length()))):
            if slots & size:
                self._free.add((start, size))
                start += size

    def allocate(self, sequence: Sequence, tokens: int) -> bool:
        """Reserve the smallest free piece that is large enough, split in halves as often as possible."""
        if sequence in self._held:
            return True
        wanted = _power_of_two(self._reserved(sequence))
        fitting = [piece for piece in self._free if piece[1] >= wanted]
        if not fitting:
            return False
        start, size = min(fitting, key=lambda piece: piece[::-1])
        self._free.remove((start, size))
        while size > wanted:
            size //= 2
            self._free.add((start + size, size))
        self._held[sequence] = (start, size)
        return True

    def free(self, sequence: Sequence) -> None:
        """Free a sequence's piece, and join it with its buddy as long as that is free, too."""
        super().free(sequence)
        start, size = self._held.pop(sequence)
        while (start ^ size, size) in self._free:
            self._free.remove((start ^ size, size))
            start, size = min(start, start ^ size), 2 * size
        self._free.add((start, size))


def _power_of_two(tokens: int) -> int:
    return 1 << (tokens - 1).bit_length()


RESERVATIONS = {
    "Max": lambda sequence: LONGEST,
    "Pow2": lambda sequence: min(sequence.prompt_tokens + _power_of_two(sequence.max_tokens), LONGEST),
    "Oracle": lambda sequence: sequence.prompt_tokens + sequence.max_tokens,
}


def requests(count: int = REQUESTS) -> list[Sequence]:
    """Draw requests; those that are longer than the model allows are drawn again."""
    draw, prompts, outputs = random.Random(2), [], []
    while len(prompts) < count:
        prompt, output = 1 + int(draw.expovariate(1 / PROMPT_MEAN)), 1 + int(draw.expovariate(1 / OUTPUT_MEAN))
        if prompt + output <= LONGEST:
            prompts.append(prompt)
            outputs.append(output)
    return make_sequences(prompts, outputs)


def share_with_tokens(memory) -> float:
    """Return the share of the memory that holds tokens, averaged over the iterations in which a request waits."""
    scheduler = Scheduler(EngineConfig(max_batch_size=1000, max_tokens_per_step=NO_LIMIT), memory)
    shares = []
    for _ in run(requests(), scheduler):
        if not scheduler.waiting:
            break
        shares.append(sum(sequence.computed for sequence in scheduler.running) / SLOTS)
    return sum(shares) / len(shares)


def figures() -> list[Figure]:
    """Return the shares of the three reservations and of blocks."""
    held = [share_with_tokens(BuddyMemory(SLOTS, RESERVATIONS[name])) for name in RESERVATIONS]
    held.append(share_with_tokens(BlockManager(SLOTS // BLOCK, BLOCK, prefix_caching=False)))
    rows = zip(LINES, held, strict=True)
    return [Figure(quantity, published, f"{share:.1%}", why) for (quantity, published, why), share in rows]
