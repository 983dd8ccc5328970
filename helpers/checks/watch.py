"""Watch a model while a student's function calls it, and record what each forward pass computes.

The number of passes and tokens shows what the output cannot: whether a loop uses a cache, and whether a server refills
its rows or waits.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from ..models import load_model


@dataclass(frozen=True)
class Pass:
    """One forward pass.

    Attributes:
        input_ids: the tokens computed, a list for each row.
        cached: the number of columns in the cache before the pass.
        attention_mask: as given, or all ones.
        next_ids: the most likely token after each row's last column.
    """

    input_ids: list[list[int]]
    cached: int
    attention_mask: list[list[int]]
    next_ids: list[int]

    @property
    def rows(self) -> int:
        return len(self.input_ids)

    @property
    def tokens(self) -> int:
        """Tokens computed in each row."""
        return len(self.input_ids[0])


@contextlib.contextmanager
def watched(model) -> Iterator[list[Pass]]:
    """Record the model's forward passes within the block in a list.

    `forward` itself is replaced, so that direct calls count, too. It keeps its signature, which callers inspect.
    """
    passes: list[Pass] = []
    forward = model.forward
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def watching(*args, **kwargs):
        inputs = signature.bind(*args, **kwargs).arguments
        inputs |= inputs.get("kwargs") or {}
        cache, mask = inputs.get("past_key_values"), inputs.get("attention_mask")
        ids = inputs["input_ids"].tolist()
        cached = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
        mask = [[1] * (cached + len(row)) for row in ids] if mask is None else mask.tolist()
        output = forward(*args, **kwargs)
        logits = output.logits if hasattr(output, "logits") else output[0]
        passes.append(Pass(ids, cached, mask, logits[:, -1].argmax(dim=-1).tolist()))
        return output

    shadowed = vars(model).get("forward")
    model.forward = watching
    try:
        yield passes
    finally:
        if shadowed is None:
            del model.forward
        else:
            model.forward = shadowed


@cache
def other_model() -> GPT2LMHeadModel:
    """Return a small model with random weights, and with another vocabulary and another EOS than the course's.

    Its EOS is a token that it often generates.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.3}
        return GPT2LMHeadModel(GPT2Config(**shape, vocab_size=60, bos_token_id=4, eos_token_id=4)).eval()


def model_named(name: str):
    """Return the "course" model or the "other" one."""
    return load_model()[0] if name == "course" else other_model()


def loop_on_model(function: Callable, name: str, turns: list[torch.Tensor], max_tokens: int) -> dict:
    """Run a conversation on a model; return its tokens, and [cached columns, tokens computed] of each forward pass."""
    model = model_named(name)
    turns[:] = [turn.to(model.device) for turn in turns]  # the same list, which the function must not change
    with quiet(), watched(model) as passes:
        token_ids = function(model, turns, max_tokens)
    return {"token ids": token_ids, "forward passes": [[one.cached, one.tokens] for one in passes]}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' warning about an EOS that is also the pad and has no attention mask."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
