"""The contents of requests: texts of an approximate length in tokens, or token ids of an exact length.

Texts suit servers whose tokenizer is unknown. Hardly any two prompts have a common prefix, so a prefix cache brings a
server almost no advantage.
"""

import random
from collections.abc import Iterator, Sequence

from ..tiny_model.corpus import Writer


def words(seed: int = 0) -> Iterator[str]:
    """Yield the words of one story after another, without end."""
    writer = Writer(seed)
    while True:
        yield from writer.story().split()


def texts(lengths: Sequence[int], tokens_per_word: float = 4 / 3, seed: int = 0) -> list[str]:
    """Return a text of about each length in tokens, made of consecutive words from a stream of stories."""
    stream = words(seed)
    return [" ".join(next(stream) for _ in range(max(1, round(length / tokens_per_word)))) for length in lengths]


def token_ids(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return a list of random token ids of each length. The ids are 100 to 999, which most vocabularies contain."""
    draw = random.Random(seed)
    return [[draw.randint(100, 999) for _ in range(length)] for length in lengths]
