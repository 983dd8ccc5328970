"""What requests say: text of about so many tokens for a server whose tokenizer nobody knows, or token ids.

Hardly any two prompts begin alike, so a server that shares beginnings has next to nothing to share.
"""

import random
from collections.abc import Iterator, Sequence

from ..tiny_model.corpus import Writer


def words(seed: int = 0) -> Iterator[str]:
    """The words of one story after another, without an end."""
    writer = Writer(seed)
    while True:
        yield from writer.story().split()


def texts(lengths: Sequence[int], tokens_per_word: float = 4 / 3, seed: int = 0) -> list[str]:
    """A text of about so many tokens for each length: the next words of a stream of stories."""
    stream = words(seed)
    return [" ".join(next(stream) for _ in range(max(1, round(length / tokens_per_word)))) for length in lengths]


def token_ids(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Exactly so many random token ids for each length, between 100 and 999: every vocabulary has those."""
    draw = random.Random(seed)
    return [[draw.randint(100, 999) for _ in range(length)] for length in lengths]
