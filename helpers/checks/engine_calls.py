"""The capstone, the student's side: a model that an engine calls, and the loop that drives the engine.

Both are thin: whatever counts happens behind `serve`, where a grader has it in its own process. There are the requests
that have not arrived, the weights, the KV cache and all counts, so an engine can neither see nor change them.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass


@dataclass
class Row:
    """What a forward pass computes for one request.

    Attributes:
        request_id: whose row it is.
        start: the position of the first token; the keys of all earlier positions must be in the blocks.
        token_ids: the tokens to compute, at least one.
        block_table: the blocks with the keys of positions 0, 1, 2, ..., in this order, those of `token_ids` included.
    """

    request_id: int
    start: int
    token_ids: list[int]
    block_table: list[int]


class ModelError(Exception):
    """The model refuses a pass, and the run is over; the text says why."""


class Model:
    """A model with a paged KV cache. Nothing but its blocks remembers a token.

    Attributes:
        num_blocks: the number of blocks, from 0.
        block_size: tokens per block: position p is in the block `block_table[p // block_size]`.
        eos_id: the token that ends an output.
    """

    def __init__(self, shape: tuple[int, int, int], serve: Callable):
        self.num_blocks, self.block_size, self.eos_id = shape
        self._serve = serve

    def forward(self, rows: list[Row]) -> list[int]:
        """Run one forward pass: write the keys of all `token_ids` into their blocks, and choose tokens greedily.

        Returns:
            For each row, the token that follows its last one.

        Raises:
            ModelError: the pass is impossible.
        """
        reply = self._serve(("forward", [astuple(row) if isinstance(row, Row) else row for row in rows]))
        if isinstance(reply, str):
            raise ModelError(reply)
        return reply


def drive(engine_class: Callable, serve: Callable, shape: tuple, max_rows: int, max_tokens_per_step: int) -> None:
    """Let an engine serve the requests behind `serve` until all have finished, or the run is over."""
    engine = engine_class(Model(shape, serve), max_rows, max_tokens_per_step)
    while (arrived := serve(("arrivals",))) is not None:
        for request_id, prompt, max_new_tokens in arrived:
            engine.add_request(request_id, list(prompt), max_new_tokens)
        serve(("finished", engine.step()))
