"""Watch a model while a student's function calls it, and record what each forward pass computes.

The number of passes and tokens shows what the output cannot: whether a loop uses a cache, and whether a server refills
its rows or waits. Two models are watched: the course's, and another one with another vocabulary, EOS and pad.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from unittest.mock import patch

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils import logging

from ..models import load_model

OTHER_EOS, OTHER_PAD = 4, 7
# With EOS and the pad, these are as many tokens as the model's vocabulary has.
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,!?'"


@contextlib.contextmanager
def watched(model) -> Iterator[list[tuple[int, int, int]]]:
    """Record (rows, cached columns, tokens per row) of the model's forward passes in a list, and silence a warning.

    `forward` itself is replaced, so that direct calls count, too. It keeps its signature, which callers inspect. The
    warning is transformers' about an EOS that is also the pad and has no attention mask.
    """
    passes: list[tuple[int, int, int]] = []
    forward, level = model.forward, logging.get_verbosity()
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def watching(*args, **kwargs):
        inputs = signature.bind(*args, **kwargs).arguments
        inputs |= inputs.get("kwargs") or {}
        cache, (rows, tokens) = inputs.get("past_key_values"), inputs["input_ids"].shape
        passes.append((rows, cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0, tokens))
        return forward(*args, **kwargs)

    logging.set_verbosity_error()
    try:
        with patch.object(model, "forward", watching):
            yield passes
    finally:
        logging.set_verbosity(level)


@cache
def other_model() -> GPT2LMHeadModel:
    """Return a small model with random weights, which often generates its EOS."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.3}
        config = GPT2Config(**shape, vocab_size=60, bos_token_id=OTHER_EOS, eos_token_id=OTHER_EOS)
        return GPT2LMHeadModel(config).eval()


@cache
def other_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer for `other_model`: one token per letter. Its pad is not its EOS, and id 0 is a letter."""
    tokens = list(LETTERS)
    tokens.insert(OTHER_EOS, "<eos>")
    tokens.insert(OTHER_PAD, "<pad>")
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inputs, special = ["input_ids", "attention_mask"], {"eos_token": "<eos>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", model_input_names=inputs, **special)


def model_named(name: str):
    return load_model()[0] if name == "course" else other_model()


def tokenizer_named(name: str):
    return load_model()[1] if name == "course" else other_tokenizer()


def loop_on_model(function: Callable, name: str, turns: list[torch.Tensor], max_tokens: int) -> dict:
    """Run a conversation on a model; return its tokens, and [cached columns, tokens computed] of each forward pass."""
    model = model_named(name)
    turns[:] = [turn.to(model.device) for turn in turns]  # the same list, which the function must not change
    with watched(model) as passes:
        token_ids = function(model, turns, max_tokens)
    return {"token ids": token_ids, "forward passes": [[cached, tokens] for _, cached, tokens in passes]}


def verb_on_model(function: Callable, argument, model_name: str, tokenizer_name: str):
    """Run a verb; return its batch, with (rows, cached columns, tokens per row) of each forward pass."""
    model = model_named(model_name)
    with watched(model) as passes:
        batch = function(argument, model, tokenizer_named(tokenizer_name))
    return {**batch, "forward passes": passes} if isinstance(batch, Mapping) else batch


def outputs_on_model(function: Callable, first: list, second: list, model_name: str, tokenizer_name: str) -> dict:
    """Run a loop over two groups of requests; return its outputs, and the rows of each forward pass."""
    model = model_named(model_name)
    with watched(model) as passes:
        outputs = function(first, second, model, tokenizer_named(tokenizer_name))
    return {"the list of outputs": outputs, "rows": [rows for rows, *_ in passes]}


def serving_on_model(function: Callable, requests: list[tuple[str, int, int]], max_batch_size: int) -> dict:
    """Run a serving loop on the course's model; return its outputs, and (kind, rows, tokens per row) of each pass."""
    with watched(load_model()[0]) as passes:
        outputs = function(requests, max_batch_size)
    kinds = [("decode step" if cached else "prefill", rows, tokens) for rows, cached, tokens in passes]
    return {"the list of outputs": outputs, "forward passes": kinds}
