"""A batch of requests and the four verbs that grow, run and shrink it.

In float32 and with greedy decoding, every request gets exactly the tokens that it would get alone, in whatever order
requests join and leave. Two things make this true: pads are masked, and every row counts its positions from its own
first token.

A batch is a plain dict:

    request_ids       list, B                  the request of each row
    input_ids         int64 [B, L] or [B, 1]   what the next forward pass computes: the prompts, then one token per row
    position_ids      int64, as input_ids      a row's own positions; 0 is its first real token
    attention_mask    int64 [B, KV length + L] 1 real, 0 left padding
    past_key_values   transformers Cache       keys and values [B, kv heads, KV length, head dim] per layer; absent
                                               before prefill
    responses         list of str, B           prompt and the text generated so far
    token_ids         list of lists, B         generated token ids, including the EOS that ended a row
    tokens_remaining  list of int, B           0 = finished
    finish_reasons    list, B                  None, "stop" (EOS) or "length" (max_tokens)

No verb changes its argument. An empty batch is a batch, too: every list empty, every tensor with 0 rows.
"""

import itertools
import sys
from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from . import kv_cache
from .detokenizer import text_of
from .models import context_length, default_pair, eos_token_ids
from .padded_batch import concatenate_rows, forward, keep_last_columns, left_padded, select_rows
from .request import Request, as_requests, repeated_ids

Batch = dict
_next_id = itertools.count()  # requests without an id get one that no other request of this process has


def init_batch(requests: Sequence[Request | tuple[str, int]], model=None, tokenizer=None) -> Batch:
    """Tokenize requests, left-pad them and number their positions: a batch ready for its prefill.

    Args:
        requests: `Request`s or `(prompt, max_tokens)` tuples, one row each.
        model, tokenizer: `load_model()`'s default pair if omitted.

    Raises:
        ValueError: there are no requests; one has an empty prompt, a max_tokens below 1 or more tokens than the model's
            context; or two share an id.
    """
    model, tokenizer = default_pair(model, tokenizer)
    requests = as_requests(requests, new_ids=_next_id)
    prompts = [tokenizer(request.prompt)["input_ids"] for request in requests]
    for request, prompt in zip(requests, prompts, strict=True):
        _check_fits(request, len(prompt), context_length(model))

    return {
        "request_ids": [request.request_id for request in requests],
        **left_padded(prompts, tokenizer.pad_token_id, model.device),
        "responses": [request.prompt for request in requests],
        "token_ids": [[] for _ in requests],
        "tokens_remaining": [request.max_tokens for request in requests],
        "finish_reasons": [None for _ in requests],
    }


def generate_next_token(batch: Batch, model=None, tokenizer=None) -> Batch:
    """Run one forward pass and append a token to every unfinished row: a prefill at first, then decode steps.

    A finished row stays until `filter_batch` removes it. It is still computed, because the batch is one tensor, but it
    gets no more tokens. This is the waste of static batching.
    """
    model, tokenizer = default_pair(model, tokenizer)
    if not batch["request_ids"]:
        return dict(batch)
    # Only finished rows can be longer than the context, and GPT-Neo and MPT cannot attend to more columns than that.
    batch = keep_last_columns(batch, context_length(model) or sys.maxsize)
    logits, cache = forward(batch, model)
    next_ids = logits[:, -1].argmax(dim=-1)

    eos = eos_token_ids(model, tokenizer)
    responses, token_ids, remaining, reasons = [], [], [], []
    for row, token in enumerate(next_ids.tolist()):
        response, ids, left = batch["responses"][row], batch["token_ids"][row], batch["tokens_remaining"][row]
        reason = batch["finish_reasons"][row]
        if left > 0:
            prompt = response.removesuffix(text_of(ids, tokenizer))
            ids, left = [*ids, token], left - 1
            reason = "stop" if token in eos else "length" if left == 0 else None
            left = left if reason is None else 0
            response = prompt + text_of(ids[:-1] if token in eos else ids, tokenizer)
        responses.append(response)
        token_ids.append(ids)
        remaining.append(left)
        reasons.append(reason)

    # A finished row keeps its position, which must not exceed the model's context.
    moves = torch.tensor([[int(left > 0)] for left in remaining], device=next_ids.device)
    return {
        "request_ids": list(batch["request_ids"]),
        "input_ids": next_ids[:, None],
        "position_ids": batch["position_ids"][:, -1:] + moves,
        "attention_mask": pad(batch["attention_mask"], (0, 1), value=1),
        "past_key_values": cache,
        "responses": responses,
        "token_ids": token_ids,
        "tokens_remaining": remaining,
        "finish_reasons": reasons,
    }


def merge_batches(first: Batch, second: Batch) -> Batch:
    """Return the rows of both batches, left-padded to one width: every row's newest token is in the last column.

    Raises:
        ValueError: a batch that has not been prefilled, a request id that is in both, batches of different models.
    """
    for batch, other in ((first, second), (second, first)):
        if not batch["request_ids"]:
            return dict(other)
    _check_mergeable(first, second)
    return concatenate_rows(first, second)


def filter_batch(batch: Batch) -> tuple[Batch, list[int]]:
    """Remove the finished rows and the padding that all remaining rows share.

    Returns:
        The batch of unfinished rows, in their order (an empty batch if there are none), and the removed row indices.
    """
    stay = [row for row, left in enumerate(batch["tokens_remaining"]) if left > 0]
    removed = [row for row, left in enumerate(batch["tokens_remaining"]) if left == 0]
    return (select_rows(batch, stay) if removed else dict(batch)), removed


def _check_fits(request: Request, prompt_tokens: int, context: int | None) -> None:
    if prompt_tokens == 0:
        raise ValueError(f"The prompt {request.prompt!r} has no tokens: give at least one word to continue.")
    if context is not None and prompt_tokens + request.max_tokens > context:
        raise ValueError(
            f"Request {request.request_id!r} has {prompt_tokens} prompt tokens and max_tokens {request.max_tokens}, "
            f"{prompt_tokens + request.max_tokens} in all, but the model's context is {context}: "
            f"shorten the prompt or ask for fewer tokens."
        )


def _check_mergeable(first: Batch, second: Batch) -> None:
    for batch in (first, second):
        if "past_key_values" not in batch:
            raise ValueError(
                f"The batch of requests {batch['request_ids']} has not been prefilled: "
                f"call generate_next_token on it before you merge it."
            )
    if repeated := repeated_ids(first["request_ids"] + second["request_ids"]):
        raise ValueError(f"Request ids must be unique in a batch; both batches have {repeated}.")
    if kv_cache.shapes(first["past_key_values"]) != kv_cache.shapes(second["past_key_values"]):
        raise ValueError("The two batches were made by different models: their caches do not fit together.")
