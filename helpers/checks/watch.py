"""Watch a model while a student's function calls it: what each forward pass was given to read.

Counting passes and tokens tells apart what the tokens cannot: a loop with and without a cache, a server that refills
its rows and one that waits.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """One forward pass.

    Attributes:
        input_ids: the tokens read, a list for each row.
        cached: columns that the cache held before.
        named: the inputs that were given (not None), by name.
    """

    input_ids: list[list[int]]
    cached: int
    named: frozenset[str]

    @property
    def rows(self) -> int:
        return len(self.input_ids)

    @property
    def tokens(self) -> int:
        """Tokens read in each row."""
        return len(self.input_ids[0])


@contextlib.contextmanager
def watched(model) -> Iterator[list[Pass]]:
    """The list of the model's forward passes within the block, growing as they happen.

    `forward` itself is replaced, so that a direct call of it counts, too; it keeps its signature, which callers read.
    """
    passes: list[Pass] = []
    forward = model.forward
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def watching(*args, **kwargs):
        inputs = signature.bind(*args, **kwargs).arguments
        inputs |= inputs.get("kwargs") or {}
        cache = inputs.get("past_key_values")
        passes.append(
            Pass(
                inputs["input_ids"].tolist(),
                cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0,
                frozenset(name for name, value in inputs.items() if value is not None),
            )
        )
        return forward(*args, **kwargs)

    shadowed = vars(model).get("forward")
    model.forward = watching
    try:
        yield passes
    finally:
        if shadowed is None:
            del model.forward
        else:
            model.forward = shadowed
