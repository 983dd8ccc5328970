"""Watch a model while a student's function calls it, and record what each forward pass computes.

The number of passes and tokens shows what the output cannot: whether a loop uses a cache, and whether a server refills
its rows or waits. Two models are watched: the course's, and another one with another vocabulary, EOS and pad.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    def shape(self) -> tuple[int, int, int]:
        """Rows, columns in the cache, tokens computed in each row."""
        return len(self.input_ids), self.cached, len(self.input_ids[0])


@contextlib.contextmanager
def watched(model) -> Iterator[list[Pass]]:
    """Record the model's forward passes within the block in a list, and silence a warning.

    `forward` itself is replaced, so that direct calls count, too. It keeps its signature, which callers inspect. The
    warning is transformers' about an EOS that is also the pad and has no attention mask.
    """
    passes: list[Pass] = []
    forward, level = model.forward, logging.get_verbosity()
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
    return {"token ids": token_ids, "forward passes": [list(one.shape[1:]) for one in passes]}


def verb_on_model(function: Callable, argument, model_name: str, tokenizer_name: str):
    """Run a verb; return its batch, with (rows, cached columns, tokens per row) of each forward pass."""
    model = model_named(model_name)
    with watched(model) as passes:
        batch = function(argument, model, tokenizer_named(tokenizer_name))
    return {**batch, "forward passes": [one.shape for one in passes]} if isinstance(batch, Mapping) else batch


def outputs_on_model(function: Callable, first: list, second: list, model_name: str, tokenizer_name: str) -> dict:
    """Run a loop over two groups of requests; return its outputs, and the rows of each forward pass."""
    model = model_named(model_name)
    with watched(model) as passes:
        outputs = function(first, second, model, tokenizer_named(tokenizer_name))
    return {"the list of outputs": outputs, "rows": [one.shape[0] for one in passes]}


def loop_in_words(function: Callable, requests: list[tuple[str, int, int]], max_batch_size: int) -> dict:
    """Run a serving loop on the course's model; return its outputs, and which requests each forward pass computes."""
    model, tokenizer = load_model()
    with watched(model) as passes:
        outputs = function(requests, max_batch_size)
    prompts = [tokenizer(prompt)["input_ids"] for prompt, *_ in requests]
    return {"the list of outputs": outputs, "forward passes": _participants(passes, prompts)}


def _participants(passes: Sequence[Pass], prompts: list[list[int]]) -> list[tuple[str, list]]:
    """Return ("prefill" or "decode step", the numbers of its requests) for each pass; None stands for an unknown row.

    The requests of a prefill are known by their prompts, those of a decode step by the tokens of the previous pass.
    """
    awaited: dict[int, tuple[int, int]] = {}  # per request: tokens in its row in the next pass, and the newest one
    described, prefilled = [], set()
    for one in passes:
        numbers: list[int | None] = []
        for ids, mask, token in zip(one.input_ids, one.attention_mask, one.next_ids, strict=True):
            row = sum(mask), ids[-1]
            if one.cached:
                known = (number for number, state in awaited.items() if state == row)
            else:
                known = (n for n, prompt in enumerate(prompts) if prompt == ids[-row[0] :] and n not in prefilled)
            number = next((number for number in known if number not in numbers), None)
            numbers.append(number)
            if number is not None:
                awaited[number] = row[0] + 1, token
        if one.cached:  # other requests have left: a later one with the same prompt may get the same tokens
            awaited = {number: awaited[number] for number in numbers if number is not None}
        prefilled.update(numbers)
        kind = "decode step" if one.cached else "prefill"
        described.append((kind, sorted(numbers, key=lambda number: (number is None, number))))
    return described
