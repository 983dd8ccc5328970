"""A batch of requests and the four verbs that grow, run and shrink it.

The claim: in fp32 and with greedy decoding, every request gets exactly the tokens it would get alone, in
whatever order requests join and leave. Two things make it true: pads are masked, and every row counts its
own positions from its own first token.

A batch is a plain dict:

    request_ids       list, B                  whose row this is
    input_ids         int64 [B, L] or [B, 1]   what the next forward pass reads: the prompts, then one token a row
    position_ids      int64, as input_ids      a row's own positions; 0 is its first real token
    attention_mask    int64 [B, KV length + L] 1 real, 0 left padding
    past_key_values   transformers Cache       keys and values [B, kv heads, KV length, head dim] a layer; absent
                                               before prefill
    responses         list of str, B           prompt and the text generated so far
    token_ids         list of lists, B         generated token ids, the EOS that ended a row included
    tokens_remaining  list of int, B           0 = finished
    finish_reasons    list, B                  None, "stop" (EOS) or "length" (max_tokens)

No verb changes its argument. An empty batch is a batch, too: every list empty, every tensor with 0 rows.
"""

import itertools
import sys
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

import torch
from torch.nn.functional import pad

from . import kv_cache
from .models import context_length, default_pair, eos_token_ids, run_model

Batch = dict
_next_id = itertools.count()


@dataclass(frozen=True)
class Request:
    """What a user asks for.

    Attributes:
        prompt: the text to continue.
        max_tokens: generate at most this many tokens.
        request_id: the name by which the request is known. `init_batch` numbers requests that have none,
            with a number that no other request of this process has.
    """

    prompt: str
    max_tokens: int
    request_id: Hashable = None


def init_batch(requests: Sequence[Request | tuple[str, int]], model=None, tokenizer=None) -> Batch:
    """Tokenize, left-pad and number the positions of some requests: a batch that is ready for its prefill.

    Args:
        requests: `Request`s or `(prompt, max_tokens)` tuples, one row each.
        model, tokenizer: `load_model()`'s default pair if left out.

    Raises:
        ValueError: no requests, an empty prompt, max_tokens below 1, a request longer than the model's context,
            two requests with the same id.
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
    """One forward pass, one more token for every unfinished row: prefill at first, a decode step from then on.

    A finished row keeps its place until `filter_batch` takes it out. It is computed, because the batch is one
    tensor, but it gets nothing more: that is the waste which static batching lives with.
    """
    model, tokenizer = default_pair(model, tokenizer)
    if not batch["request_ids"]:
        return dict(batch)
    # Only finished rows can be longer than the context, and GPT-Neo and MPT cannot look at more columns than that.
    batch = _trim(batch, context_length(model) or sys.maxsize)
    logits, cache = forward(batch, model)
    next_ids = logits.argmax(dim=-1)

    eos = eos_token_ids(model, tokenizer)
    responses, token_ids, remaining, reasons = [], [], [], []
    for row, token in enumerate(next_ids.tolist()):
        response, ids, left = batch["responses"][row], batch["token_ids"][row], batch["tokens_remaining"][row]
        reason = batch["finish_reasons"][row]
        if left > 0:
            prompt = response.removesuffix(text_of(ids, tokenizer))
            ids, left = [*ids, token], left - 1
            if token in eos:
                left, reason = 0, "stop"
            elif left == 0:
                reason = "length"
            response = prompt + text_of(ids[:-1] if token in eos else ids, tokenizer)
        responses.append(response)
        token_ids.append(ids)
        remaining.append(left)
        reasons.append(reason)

    # A finished row stays where it is: its position must not run past the end of the model's context.
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
    """The rows of both batches, left-padded to one width, so that every row's newest token is in the last column.

    Raises:
        ValueError: a batch that has not been prefilled, a request id that is in both, batches of different models.
    """
    for one, other in ((first, second), (second, first)):
        if not one["request_ids"]:
            return dict(other)
    _check_mergeable(first, second)
    width = max(first["attention_mask"].size(1), second["attention_mask"].size(1))
    first, second = _left_pad(first, width), _left_pad(second, width)

    merged = {key: value + second[key] for key, value in first.items() if isinstance(value, list)}
    for key in ("input_ids", "position_ids", "attention_mask"):
        merged[key] = torch.cat([first[key], second[key]])
    merged["past_key_values"] = kv_cache.concatenate(first["past_key_values"], second["past_key_values"])
    return merged


def filter_batch(batch: Batch) -> tuple[Batch, list[int]]:
    """Take the finished rows out and trim the padding that the rows which stay have in common.

    Returns:
        The batch of unfinished rows, in their order (an empty batch if there are none), and the removed row indices.
    """
    stay = [row for row, left in enumerate(batch["tokens_remaining"]) if left > 0]
    removed = [row for row, left in enumerate(batch["tokens_remaining"]) if left == 0]
    if not removed:
        return dict(batch), []

    rows = torch.tensor(stay, dtype=torch.long, device=batch["attention_mask"].device)
    filtered = {key: [value[row] for row in stay] for key, value in batch.items() if isinstance(value, list)}
    for key in ("input_ids", "position_ids", "attention_mask"):
        filtered[key] = batch[key][rows]
    filtered["past_key_values"] = kv_cache.select_rows(batch["past_key_values"], stay)
    return _trim(filtered, int(filtered["attention_mask"].sum(dim=1).max()) if stay else 1), removed


# --- what the verbs stand on -----------------------------------------------------------------------------------


def left_padded(token_ids: Sequence[list[int]], pad_id: int | None = None, device="cpu") -> dict[str, torch.Tensor]:
    """`input_ids`, `position_ids` and `attention_mask` [B, longest] of some unequal rows of tokens."""
    width = max(map(len, token_ids))
    pads = [width - len(ids) for ids in token_ids]
    pad_id = pad_id or 0  # any id will do, the mask hides it
    return {
        "input_ids": torch.tensor([[pad_id] * n + ids for n, ids in zip(pads, token_ids, strict=True)], device=device),
        "position_ids": torch.tensor([[0] * n + list(range(width - n)) for n in pads], device=device),
        "attention_mask": torch.tensor([[0] * n + [1] * (width - n) for n in pads], device=device),
    }


def forward(batch: Batch, model):
    """One forward pass over what a batch has to read, the batch's own cache left as it was.

    Returns:
        logits [B, vocabulary] behind the newest token of every row, and the cache that has grown by L columns.
    """
    cache = batch.get("past_key_values")
    output = run_model(
        model,
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"].clone(),  # XGLM in transformers 4 adds to what it is given
        attention_mask=batch["attention_mask"],
        past_key_values=kv_cache.copy(cache) if cache is not None else kv_cache.new(),
        use_cache=True,
        logits_to_keep=1,  # left padding: the newest token of every row is in the last column
    )
    return output.logits[:, -1], output.past_key_values


def text_of(token_ids: list[int], tokenizer) -> str:
    """The text of all the tokens, as it follows a prompt; special tokens such as EOS are not part of it.

    Decoded together, since a character may be spread over several tokens, and behind a letter that is cut off again,
    since sentencepiece tokenizers drop the space before a text's first word.
    """
    letter = tokenizer("a", add_special_tokens=False)["input_ids"]  # some tokenizers make it " a"
    before, text = (
        tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for ids in (letter, letter + token_ids)
    )
    return text[len(before) :]


def as_requests(requests: Iterable[Request | tuple[str, int]], new_ids: Iterable | None = None) -> list[Request]:
    """`Request`s with ids, checked; tuples and `Request`s without an id take the next of `new_ids` (0, 1, ...)."""
    requests = list(requests)
    taken = {request.request_id for request in requests if isinstance(request, Request)}
    new_ids = (id for id in (itertools.count() if new_ids is None else new_ids) if id not in taken)
    checked = []
    for request in requests:
        if not isinstance(request, Request):
            if not isinstance(request, tuple | list) or len(request) != 2:
                raise ValueError(f"A request is a (prompt, max_tokens) tuple or a Request, not {request!r}.")
            request = Request(*request)
        if not isinstance(request.prompt, str) or not request.prompt:
            raise ValueError(f"The prompt of a request is a text of at least one character, not {request.prompt!r}.")
        if not isinstance(request.max_tokens, Integral) or request.max_tokens < 1:
            raise ValueError(
                f"max_tokens is a whole number of at least 1, not {request.max_tokens!r} ({request.prompt!r})."
            )
        if request.request_id is None:
            request = replace(request, request_id=next(new_ids))
        checked.append(request)
    if not checked:
        raise ValueError("There are no requests: give at least one (prompt, max_tokens).")
    ids = [request.request_id for request in checked]
    if len(set(ids)) < len(ids):
        raise ValueError(f"Request ids must be unique in a batch; more than once here: {_repeated(ids)}.")
    return checked


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
    ids = first["request_ids"] + second["request_ids"]
    if len(set(ids)) < len(ids):
        raise ValueError(f"Request ids must be unique in a batch; both batches have {_repeated(ids)}.")
    if kv_cache.shapes(first["past_key_values"]) != kv_cache.shapes(second["past_key_values"]):
        raise ValueError("The two batches were made by different models: their caches do not fit together.")


def _left_pad(batch: Batch, width: int) -> Batch:
    columns = width - batch["attention_mask"].size(1)
    return batch | {
        "attention_mask": pad(batch["attention_mask"], (columns, 0)),
        "past_key_values": kv_cache.left_pad(batch["past_key_values"], columns),
    }


def _trim(batch: Batch, width: int) -> Batch:
    """The rightmost `width` columns of all rows; nothing changes where there are no more."""
    columns = batch["attention_mask"].size(1) - width
    if columns <= 0:
        return batch
    return batch | {
        "attention_mask": batch["attention_mask"][:, columns:],
        "past_key_values": kv_cache.trim_left(batch["past_key_values"], columns),
    }


def _repeated(ids: list) -> list:
    return sorted({id for id in ids if ids.count(id) > 1}, key=repr)
