"""The power of the checks: wrong answers are told which idea they miss, right ones pass however they are written.

Every wrong answer below is one that a student could plausibly hand in, with a piece of the message meant for it. None
of the messages gives the answer away, and whatever a student's function does, `check` returns True or False.
"""

import ast
import codecs
import contextlib
import inspect
import json
import math
import signal
import threading
import time
from collections import Counter, deque
from hashlib import sha256
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import ClassVar

import pytest
import solutions
import torch
from torch.nn.functional import pad
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from helpers import (
    Engine,
    EngineConfig,
    Request,
    SamplingParams,
    batching,
    generate_continuous,
    generate_static,
    kv_cache,
    load_model,
    metrics,
    workloads,
)
from helpers.checks import (
    TASKS,
    Reader,
    attempt,
    check,
    engine_with,
    planned_by,
    scheduling,
    score_schedule,
    simulate_queue,
)
from helpers.engine import BlockManager, LongestFirst, Priority, Scheduler, Sequence, WaitingQueue

pytestmark = pytest.mark.usefixtures("one_thread")

RIGHT: list = []
WRONG: list = []


def right(task):
    """Another way to write it."""

    def note(function):
        RIGHT.append(pytest.param(task, function, id=f"{task}-{function.__name__}"))
        return function

    return note


def wrong(task, message):
    """A wrong answer, and a piece of the message meant for it."""

    def note(function):
        WRONG.append(pytest.param(task, function, message, id=f"{task}-{function.__name__}"))
        return function

    return note


for task in TASKS:
    RIGHT.append(pytest.param(task, getattr(solutions, task), id=f"{task}-solution"))


# === lesson 1 =====================================================================================================


@right("greedy_step")
def with_topk(logits):
    return logits[:, -1, :].topk(1).indices.squeeze(-1)


@right("greedy_step")
def with_a_softmax_and_a_loop(logits):
    return torch.tensor([int(torch.softmax(row[-1], dim=0).argmax()) for row in logits])


@right("greedy_step")
def sorted_descending(logits):
    return logits.select(1, logits.size(1) - 1).sort(dim=-1, descending=True).indices[:, 0]


@wrong("greedy_step", "Only the last position")
def every_position(logits):
    return logits.argmax(dim=-1)


@wrong("greedy_step", "reads the first position")
def first_position(logits):
    return logits[:, 0].argmax(dim=-1)


@wrong("greedy_step", "the position before the last")
def last_but_one(logits):
    return logits[:, -2].argmax(dim=-1)


@wrong("greedy_step", "one token for all rows together")
def one_for_all(logits):
    return logits[:, -1].argmax()


@wrong("greedy_step", "compares the rows with each other")
def over_the_rows(logits):
    return logits[:, -1].argmax(dim=0)


@wrong("greedy_step", "compares the positions with each other")
def over_the_positions(logits):
    return logits.argmax(dim=1)


@wrong("greedy_step", "takes the worst token")
def the_smallest(logits):
    return logits[:, -1].argmin(dim=-1)


@wrong("greedy_step", "regardless of its sign")
def the_largest_in_size(logits):
    return logits[:, -1].abs().argmax(dim=-1)


@wrong("greedy_step", "a score. Wanted is its id")
def the_score(logits):
    return logits[:, -1].max(dim=-1).values


@wrong("greedy_step", "has shape [2, 1], and should have [2]: one token id for each row")
def kept_dimension(logits):
    return logits[:, -1].argmax(dim=-1, keepdim=True)


@wrong("greedy_step", "should be a tensor, and is a list")
def as_a_list(logits):
    return logits[:, -1].argmax(dim=-1).tolist()


@wrong("greedy_step", "holds int32, and should hold int64")
def as_int32(logits):
    return logits[:, -1].argmax(dim=-1).int()


@wrong("greedy_step", "draws nothing at random")
def sampled(logits):
    return torch.multinomial(torch.softmax(3 * logits[:, -1], dim=-1), 1)[:, 0]


@right("cached_loop")
def with_the_model_s_own_cache(model, prompt_ids, max_tokens):
    cache, ids, out = None, prompt_ids, []
    while len(out) < max_tokens:
        result = model(ids, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        out.append(int(result.logits[0, -1].argmax()))
        ids = torch.tensor([[out[-1]]], device=model.device)
    return out


@right("cached_loop")
def prefill_apart_from_decode(model, prompt_ids, max_tokens):
    cache = DynamicCache()
    with torch.inference_mode():
        text = [model(input_ids=prompt_ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(dim=-1)]
        for position in range(prompt_ids.size(1), prompt_ids.size(1) + max_tokens - 1):
            where = torch.tensor([[position]], device=model.device)
            result = model(input_ids=text[-1], past_key_values=cache, position_ids=where, use_cache=True)
            text.append(result.logits[:, -1:].argmax(dim=-1))
    return torch.cat(text, dim=1)[0].tolist()


def loop(model, prompt_ids, passes, feed=lambda token, text: token, cached=True, until=()):
    """A cached loop with parts to be broken: what a later pass reads, whether it has the cache, where it ends."""
    cache, to_read, text, out = kv_cache.new(), prompt_ids, prompt_ids, []
    for _ in range(passes):
        with torch.no_grad():
            given = cache if cached else kv_cache.new()
            token = model(input_ids=to_read, past_key_values=given, use_cache=True).logits[:, -1:].argmax(dim=-1)
        out.append(token.item())
        if out[-1] in until:
            break
        text = torch.cat([text, token], dim=1)
        to_read = feed(token, text)
    return out


@wrong("cached_loop", "the whole text again each time")
def no_cache(model, prompt_ids, max_tokens):
    return loop(model, prompt_ids, max_tokens, feed=lambda token, text: text, cached=False)


@wrong("cached_loop", "reads one token and has no cache")
def forgets_the_cache(model, prompt_ids, max_tokens):
    return loop(model, prompt_ids, max_tokens, cached=False)


@wrong("cached_loop", "is read twice")
def whole_text_and_cache(model, prompt_ids, max_tokens):
    return loop(model, prompt_ids, max_tokens, feed=lambda token, text: text)


@wrong("cached_loop", "Each pass reads the token that the previous one yielded")
def same_token_again(model, prompt_ids, max_tokens):
    return loop(model, prompt_ids, max_tokens, feed=lambda token, text: prompt_ids[:, -1:])


@wrong("cached_loop", "one token too few")
def one_too_few(model, prompt_ids, max_tokens):
    return loop(model, prompt_ids, max_tokens - 1) if max_tokens > 1 else []


@wrong("cached_loop", "one token too many")
def one_too_many(model, prompt_ids, max_tokens):
    return loop(model, prompt_ids, max_tokens + 1)


@wrong("cached_loop", "nobody needs what the model says after the last one")
def one_pass_too_many(model, prompt_ids, max_tokens):
    return loop(model, prompt_ids, max_tokens + 1)[:max_tokens]


@wrong("cached_loop", "returns the prompt's tokens, too")
def with_the_prompt(model, prompt_ids, max_tokens):
    return prompt_ids[0].tolist() + loop(model, prompt_ids, max_tokens)


@wrong("cached_loop", "stops at EOS")
def stops_at_eos(model, prompt_ids, max_tokens):
    return loop(model, prompt_ids, max_tokens, until=[load_model()[1].eos_token_id])


@wrong("cached_loop", "at place 0 stands a tensor of int64")
def list_of_tensors(model, prompt_ids, max_tokens):
    return [torch.tensor(token) for token in loop(model, prompt_ids, max_tokens)]


@wrong("cached_loop", "A cache must not change what is said")
def positions_from_zero(model, prompt_ids, max_tokens):
    cache, to_read, out = kv_cache.new(), prompt_ids, []
    for _ in range(max_tokens):
        where = torch.arange(to_read.size(1), device=model.device)[None]
        with torch.no_grad():
            given = dict(input_ids=to_read, position_ids=where, past_key_values=cache, use_cache=True)
            to_read = model(**given).logits[:, -1:].argmax(dim=-1)
        out.append(to_read.item())
    return out


@right("stop")
def token_by_token(token_ids, eos_id, max_tokens):
    kept = []
    for token in token_ids:
        kept.append(token)
        if token == eos_id:
            return kept, "stop"
        if len(kept) == max_tokens:
            return kept, "length"
    return kept, None


@wrong("stop", "drops EOS")
def without_eos(token_ids, eos_id, max_tokens):
    kept, reason = solutions.stop(token_ids, eos_id, max_tokens)
    return [token for token in kept if token != eos_id], reason


@wrong("stop", "keeps tokens behind the first EOS")
def all_kept(token_ids, eos_id, max_tokens):
    return token_ids[:max_tokens], solutions.stop(token_ids, eos_id, max_tokens)[1]


@wrong("stop", 'says "length" although the model ended the text by itself')
def length_first(token_ids, eos_id, max_tokens):
    kept, reason = solutions.stop(token_ids, eos_id, max_tokens)
    return kept, "length" if len(kept) == max_tokens else reason


@wrong("stop", "lies beyond max_tokens")
def eos_anywhere(token_ids, eos_id, max_tokens):
    kept, reason = solutions.stop(token_ids, eos_id, max_tokens)
    return kept, "stop" if eos_id in token_ids else reason


@wrong("stop", "for a text that has not ended")
def never_none(token_ids, eos_id, max_tokens):
    kept, reason = solutions.stop(token_ids, eos_id, max_tokens)
    return kept, reason or "length"


@wrong("stop", "where max_tokens allows 3")
def off_by_one_up(token_ids, eos_id, max_tokens):
    return solutions.stop(token_ids, eos_id, max_tokens + 1)


@wrong("stop", "one token too few")
def off_by_one_down(token_ids, eos_id, max_tokens):
    return solutions.stop(token_ids, eos_id, max_tokens - 1)


@wrong("stop", "stopped with ValueError in line")
def eos_must_be_there(token_ids, eos_id, max_tokens):
    return token_ids[: token_ids.index(eos_id) + 1], "stop"


@wrong("stop", "the reason is 'eos', and should be \"stop\"")
def other_word(token_ids, eos_id, max_tokens):
    kept, reason = solutions.stop(token_ids, eos_id, max_tokens)
    return kept, "eos" if reason == "stop" else reason


@wrong("stop", "changed its argument: the list is not what it was")
def cuts_in_place(token_ids, eos_id, max_tokens):
    kept, reason = solutions.stop(token_ids, eos_id, max_tokens)
    del token_ids[len(kept) :]
    return token_ids, reason


@wrong("stop", "should return two things")
def no_reason(token_ids, eos_id, max_tokens):
    return solutions.stop(token_ids, eos_id, max_tokens)[0]


@right("decode_floor")
def by_hand(weight_bytes, bandwidth, operations, rate):
    reading, arithmetic = weight_bytes / bandwidth, operations / rate
    return reading if reading > arithmetic else arithmetic


@wrong("decode_floor", "adds the two times")
def added(weight_bytes, bandwidth, operations, rate):
    return weight_bytes / bandwidth + operations / rate


@wrong("decode_floor", "takes the shorter time")
def shorter(weight_bytes, bandwidth, operations, rate):
    return min(weight_bytes / bandwidth, operations / rate)


@wrong("decode_floor", "looks at memory only")
def memory_only(weight_bytes, bandwidth, operations, rate):
    return weight_bytes / bandwidth


@wrong("decode_floor", "divides the wrong way round")
def inverse(weight_bytes, bandwidth, operations, rate):
    return max(bandwidth / weight_bytes, rate / operations)


@wrong("kv_cache_bytes", "a token leaves a key and a value")
def keys_only(layers, kv_heads, head_dim, number_bytes, tokens):
    return layers * kv_heads * head_dim * number_bytes * tokens


@wrong("kv_cache_bytes", "forgets the layers")
def one_layer(layers, kv_heads, head_dim, number_bytes, tokens):
    return 2 * kv_heads * head_dim * number_bytes * tokens


@wrong("kv_cache_bytes", "counts numbers, not bytes")
def numbers(layers, kv_heads, head_dim, number_bytes, tokens):
    return 2 * layers * kv_heads * head_dim * tokens


@wrong("kv_cache_bytes", "the cost of one token")
def one_token(layers, kv_heads, head_dim, number_bytes, tokens):
    return 2 * layers * kv_heads * head_dim * number_bytes


@wrong("kv_cache_bytes", "the square of the tokens")
def attention_matrix(layers, kv_heads, head_dim, number_bytes, tokens):
    return 2 * layers * kv_heads * head_dim * number_bytes * tokens**2


# === lesson 2 =====================================================================================================


@right("left_pad")
def into_full_tensors(rows, pad_id):
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), pad_id), torch.zeros(len(rows), width, dtype=torch.long)
    for row, tokens in enumerate(rows):
        ids[row, width - len(tokens) :] = torch.tensor(tokens)
        mask[row, width - len(tokens) :] = 1
    return ids, mask


@right("left_pad")
def flipped_pad_sequence(rows, pad_id):
    sequences = [torch.tensor(row[::-1]) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=pad_id).flip(1)
    lengths = torch.tensor([len(row) for row in rows])
    return [ids, (torch.arange(ids.size(1)).flip(0) < lengths[:, None]).long()]


@wrong("left_pad", "row 0 is padded on the right")
def right_pads(rows, pad_id):
    width = max(map(len, rows))
    ids = [row + [pad_id] * (width - len(row)) for row in rows]
    return torch.tensor(ids), torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])


@wrong("left_pad", "mask is padded on the right, its tokens on the left")
def right_mask(rows, pad_id):
    return solutions.left_pad(rows, pad_id)[0], right_pads(rows, pad_id)[1]


@wrong("left_pad", "fills up with 0 where the pad's id is 2")
def always_zero(rows, pad_id):
    return solutions.left_pad(rows, 0)


@wrong("left_pad", "takes every token with the id 2 for a pad")
def mask_from_ids(rows, pad_id):
    ids, _ = solutions.left_pad(rows, pad_id)
    return ids, (ids != pad_id).long()  # right as long as no text has the pad's id in it


@wrong("left_pad", "upside down")
def mask_of_pads(rows, pad_id):
    ids, mask = solutions.left_pad(rows, pad_id)
    return ids, 1 - mask


@wrong("left_pad", "shows the pads")
def mask_of_ones(rows, pad_id):
    ids, _ = solutions.left_pad(rows, pad_id)
    return ids, torch.ones_like(ids)


@wrong("left_pad", "attention_mask holds bool, and should hold int64")
def bool_mask(rows, pad_id):
    ids, mask = solutions.left_pad(rows, pad_id)
    return ids, mask.bool()


@wrong("left_pad", "input_ids holds float32")
def float_ids(rows, pad_id):
    ids, mask = solutions.left_pad(rows, pad_id)
    return ids.float(), mask


@wrong("left_pad", "input_ids is on the device 'meta'")
def elsewhere(rows, pad_id):
    ids, mask = solutions.left_pad(rows, pad_id)
    return ids.to("meta"), mask.to("meta")


@wrong("left_pad", "cuts all rows to the shortest one")
def shortest(rows, pad_id):
    width = min(map(len, rows))
    return torch.tensor([row[-width:] for row in rows]), torch.ones(len(rows), width, dtype=torch.long)


@wrong("left_pad", "sorts the rows by their length")
def longest_first(rows, pad_id):
    return solutions.left_pad(sorted(rows, key=len, reverse=True), pad_id)


@wrong("left_pad", "5 wide where the longest has 4 tokens")
def one_column_too_many(rows, pad_id):
    ids, mask = solutions.left_pad(rows, pad_id)
    return pad(ids, (1, 0), value=pad_id), pad(mask, (1, 0))


@wrong("left_pad", "returns the mask first")
def mask_first(rows, pad_id):
    return solutions.left_pad(rows, pad_id)[::-1]


@wrong("left_pad", "all rows must be filled up to one width")
def ragged(rows, pad_id):
    return torch.tensor(rows), torch.tensor([[1] * len(row) for row in rows])


@wrong("left_pad", "changed its argument: the list is not what it was")
def pads_the_argument(rows, pad_id):
    answer = solutions.left_pad(rows, pad_id)
    for row in rows:
        row[:0] = [pad_id] * (max(map(len, rows)) - len(row))
    return answer


@wrong("left_pad", "should return two tensors")
def lists(rows, pad_id):
    return tuple(each.tolist() for each in solutions.left_pad(rows, pad_id))


@right("position_ids")
def filled_with_one(attention_mask):
    positions = attention_mask.long().cumsum(-1) - 1
    return positions.masked_fill(attention_mask == 0, 1)


@right("position_ids")
def columns_minus_pads(attention_mask):
    pads = (attention_mask == 0).sum(dim=1, keepdim=True)
    return (torch.arange(attention_mask.size(1)) - pads).relu()


@wrong("position_ids", "numbers the columns, pads included: row 0's first real token is at position 2")
def columns(attention_mask):
    return torch.arange(attention_mask.size(1)).expand_as(attention_mask)


@wrong("position_ids", "starts with 1")
def from_one(attention_mask):
    return attention_mask.cumsum(dim=1)


@wrong("position_ids", "gives the pad in row 0, column 0 position -1")
def negative_pads(attention_mask):
    return attention_mask.cumsum(dim=1) - 1


@wrong("position_ids", "counts from the right")
def backwards(attention_mask):
    return (attention_mask.flip(1).cumsum(dim=1).flip(1) - 1).clamp(min=0)


@wrong("position_ids", "holds float32")
def float_positions(attention_mask):
    return (attention_mask.float().cumsum(dim=1) - 1).clamp(min=0)


@wrong("position_ids", "changed its argument: the tensor")
def counted_in_place(attention_mask):
    return attention_mask.cumsum_(dim=1).sub(1).clamp(min=0)


@right("batch_throughput")
def in_two_steps(lengths, seconds_per_pass):
    duration = sorted(lengths)[-1] * seconds_per_pass
    return sum(lengths) / duration


@wrong("batch_throughput", "counts every row in every pass")
def full_rows(lengths, seconds_per_pass):
    return len(lengths) * max(lengths) / (max(lengths) * seconds_per_pass)


@wrong("batch_throughput", "lets every token take a pass of its own")
def one_at_a_time(lengths, seconds_per_pass):
    return sum(lengths) / (sum(lengths) * seconds_per_pass)


@wrong("batch_throughput", "the seconds that a pass takes are missing")
def tokens_a_pass(lengths, seconds_per_pass):
    return sum(lengths) / max(lengths)


@wrong("batch_throughput", "end with its shortest row")
def until_the_shortest(lengths, seconds_per_pass):
    return sum(lengths) / (min(lengths) * seconds_per_pass)


@right("wasted_slot_steps")
def all_minus_useful(trace):
    useful = 0
    for iteration in trace.passes:
        for row in iteration.row_steps:
            useful += row.new_tokens
    return trace.rows * len(trace.passes) - useful


@right("wasted_slot_steps")
def by_kind(trace):
    return trace.work["finished"] + trace.work["stalled"] + trace.work["empty"]


@wrong("wasted_slot_steps", "counts finished rows only")
def finished_only(trace):
    return trace.work["finished"]


@wrong("wasted_slot_steps", "forgets the rows that were stalled")
def not_stalled(trace):
    return trace.work["finished"] + trace.work["empty"]


@wrong("wasted_slot_steps", "counts prefills as waste")
def all_but_decode(trace):
    return sum(row.work != "decode" for iteration in trace.passes for row in iteration.row_steps)


@wrong("wasted_slot_steps", "counts pad tokens")
def padding(trace):
    return sum(row.padding for iteration in trace.passes for row in iteration.row_steps)


@wrong("wasted_slot_steps", "counts the useful slot-steps")
def useful(trace):
    return trace.output_tokens


@wrong("wasted_slot_steps", "*one row* in one pass")
def wasteful_passes(trace):
    return sum(any(row.new_tokens == 0 for row in iteration.row_steps) for iteration in trace.passes)


# === lesson 3: a batch is made and stepped ========================================================================


@right("init_batch")
def with_the_tokenizer_s_padding(requests):
    model, tokenizer = load_model()
    prompts = [prompt for prompt, _ in requests]
    batch = dict(tokenizer(prompts, padding=True, return_tensors="pt").to(model.device))
    batch["position_ids"] = (batch["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    batch["request_ids"] = [f"request {number}" for number in range(len(requests))]
    batch["token_ids"] = [[] for _ in requests]
    batch["tokens_remaining"] = [max_tokens for _, max_tokens in requests]
    return batch


@right("init_batch")
def the_course_s_own(requests):
    return batching.init_batch(requests)


def init(requests, **changes):
    return solutions.init_batch(requests) | changes


@wrong("init_batch", "is padded on the right")
def right_padded_prompts(requests):
    model, tokenizer = load_model()
    prompts = [tokenizer(prompt)["input_ids"] for prompt, _ in requests]
    ids, mask = right_pads(prompts, tokenizer.pad_token_id)
    return init(requests, input_ids=ids.to(model.device), attention_mask=mask.to(model.device))


@wrong("init_batch", "position_ids numbers the columns, pads included")
def positions_of_columns(requests):
    ids = solutions.init_batch(requests)["input_ids"]
    return init(requests, position_ids=torch.arange(ids.size(1), device=ids.device).expand_as(ids))


@wrong("init_batch", "shows the pads")
def mask_left_out(requests):
    return init(requests, attention_mask=torch.ones_like(solutions.init_batch(requests)["input_ids"]))


@wrong("init_batch", "returns a batch without 'position_ids'")
def no_positions(requests):
    batch = solutions.init_batch(requests)
    del batch["position_ids"]
    return batch


@wrong("init_batch", "sorts the rows by their length")
def row_order_lost(requests):
    _, tokenizer = load_model()
    return solutions.init_batch(sorted(requests, key=lambda request: len(tokenizer(request[0])["input_ids"])))


@wrong("init_batch", "`token_ids` holds the prompts")
def prompts_as_generated(requests):
    _, tokenizer = load_model()
    return init(requests, token_ids=[tokenizer(prompt)["input_ids"] for prompt, _ in requests])


@wrong("init_batch", "one and the same list for every row")
def shared_list(requests):
    return init(requests, token_ids=[[]] * len(requests))


@wrong("init_batch", "Each row needs an id that no other row has")
def ids_not_unique(requests):
    return init(requests, request_ids=[0] * len(requests))


@wrong("init_batch", "takes the prompt's tokens off")
def budget_for_the_prompt(requests):
    _, tokenizer = load_model()
    left = [max_tokens - len(tokenizer(prompt)["input_ids"]) for prompt, max_tokens in requests]
    return init(requests, tokens_remaining=left)


@wrong("init_batch", "a pad's id is none of the vocabulary's")
def pad_id_of_the_loss(requests):
    batch = solutions.init_batch(requests)
    return batch | {"input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


@wrong("init_batch", "should return a batch, a dict; it returned a tensor")
def ids_only(requests):
    return solutions.init_batch(requests)["input_ids"]


@right("generate_next_token")
def the_verb_itself(batch):
    return batching.generate_next_token(batch)


@right("generate_next_token")
def finished_rows_frozen(batch):
    """A finished row's mask and position stay as they are: it makes no difference to anybody."""
    after = solutions.generate_next_token(batch)
    on = torch.tensor([[int(left > 0)] for left in after["tokens_remaining"]], device=after["input_ids"].device)
    after["attention_mask"] = torch.cat([batch["attention_mask"], on], dim=1)
    after["position_ids"] = batch["position_ids"][:, -1:] + on
    return after


@right("generate_next_token")
def positions_from_the_mask(batch):
    after = solutions.generate_next_token(batch)
    after["position_ids"] = after["attention_mask"].sum(dim=1, keepdim=True) - 1
    return dict(after)


def step(
    batch, leave_out=(), copy=kv_cache.copy, eos_ends=True, finished_go_on=False, best=lambda logits: logits[:, -1]
):
    """One pass, with parts to be broken: inputs left out, the cache not copied, EOS or finished rows overlooked."""
    model, tokenizer = load_model()
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
    inputs["past_key_values"] = copy(batch.get("past_key_values", kv_cache.new()))
    with torch.no_grad():
        logits = model(**{key: value for key, value in inputs.items() if key not in leave_out}, use_cache=True).logits
    ids = best(logits).argmax(dim=-1)
    token_ids, left = [list(row) for row in batch["token_ids"]], list(batch["tokens_remaining"])
    for row, token in enumerate(ids.tolist()):
        if left[row] > 0 or finished_go_on:
            token_ids[row].append(token)
            left[row] = 0 if eos_ends and token == tokenizer.eos_token_id else left[row] - 1
    return batch | {
        "input_ids": ids[:, None],
        "position_ids": batch["position_ids"][:, -1:] + 1,
        "attention_mask": pad(batch["attention_mask"], (0, 1), value=1),
        "past_key_values": inputs["past_key_values"],
        "token_ids": token_ids,
        "tokens_remaining": left,
    }


right("generate_next_token")(step)


@wrong("generate_next_token", "the model grows the cache that it is given")
def grown_in_place(batch):
    return step(batch, copy=lambda cache: cache)


@wrong("generate_next_token", "changed its argument: `token_ids`")
def appended_in_place(batch):
    after = step(batch)
    for old, new in zip(batch["token_ids"], after["token_ids"], strict=True):
        old[:] = new
    return after


@wrong("generate_next_token", "without the position ids")
def positions_left_out(batch):
    return step(batch, leave_out=["position_ids"])


@wrong("generate_next_token", "without the attention mask")
def mask_not_given(batch):
    return step(batch, leave_out=["attention_mask"])


@wrong("generate_next_token", "without the cache (decode step 1)")
def cache_not_given(batch):
    if "past_key_values" in batch:  # the mask has to fit the tokens that are read, or the model complains
        return step(batch | {"attention_mask": torch.ones_like(batch["input_ids"])}, leave_out=["past_key_values"])
    return step(batch)


@wrong("generate_next_token", "Before its prefill a batch has no cache yet")
def always_a_cache(batch):
    return step(batch | {"past_key_values": batch["past_key_values"]})


@wrong("generate_next_token", "says EOS, and `tokens_remaining` is")
def eos_overlooked(batch):
    return step(batch, eos_ends=False)


@wrong("generate_next_token", "is finished and gets another token")
def finished_rows_decoded_on(batch):
    return step(batch, finished_go_on=True)


@wrong("generate_next_token", "and it is missing in `token_ids`: EOS is a generated token, too")
def eos_not_counted(batch):
    after, eos = step(batch), load_model()[1].eos_token_id
    return after | {"token_ids": [[token for token in row if token != eos] for row in after["token_ids"]]}


@wrong("generate_next_token", "`tokens_remaining` stays 14")
def never_counts_down(batch):
    return step(batch) | {"tokens_remaining": list(batch["tokens_remaining"])}


@wrong("generate_next_token", "the earlier ones are lost")
def newest_token_only(batch):
    after = step(batch)
    return after | {"token_ids": [row[-1:] for row in after["token_ids"]]}


@wrong("generate_next_token", "the new token is missing in `token_ids`")
def token_not_noted(batch):
    return step(batch) | {"token_ids": batch["token_ids"]}


@wrong("generate_next_token", "at the right edge")
def first_column_of_the_logits(batch):
    return step(batch, best=lambda logits: logits[:, 0])


@wrong("generate_next_token", "the next pass reads the newest token only")
def whole_text_to_read(batch):
    after = step(batch)
    return after | {"input_ids": torch.cat([batch["input_ids"], after["input_ids"]], dim=1)}


@wrong("generate_next_token", "`input_ids` (the prefill) has shape [4], and should have [4, 1]")
def flat_input_ids(batch):
    after = step(batch)
    return after | {"input_ids": after["input_ids"][:, 0]}


@wrong("generate_next_token", "The next pass reads the token that this one yielded")
def old_token_to_read(batch):
    return step(batch) | {"input_ids": batch["input_ids"][:, -1:]}


@wrong("generate_next_token", "the attention mask does not grow")
def mask_as_it_was(batch):
    return step(batch) | {"attention_mask": batch["attention_mask"]}


@wrong("generate_next_token", "grows by a 0")
def mask_grows_by_zero(batch):
    return step(batch) | {"attention_mask": pad(batch["attention_mask"], (0, 1))}


@wrong("generate_next_token", "grows on the left")
def mask_grows_on_the_left(batch):
    return step(batch) | {"attention_mask": pad(batch["attention_mask"], (1, 0), value=1)}


@wrong("generate_next_token", "one place further")
def position_stays(batch):
    return step(batch) | {"position_ids": batch["position_ids"][:, -1:]}


@wrong("generate_next_token", "one too far")
def position_off_by_one(batch):
    after = step(batch)
    return after | {"position_ids": after["attention_mask"].sum(dim=1, keepdim=True)}


@wrong("generate_next_token", "the column's number")
def position_of_the_column(batch):
    width = batch["attention_mask"].size(1)
    return step(batch) | {"position_ids": torch.full_like(batch["input_ids"][:, -1:], width)}


@wrong("generate_next_token", "3 times for one step")
def row_by_row(batch):
    for row in range(2):
        load_model()[0](input_ids=batch["input_ids"][[row]], attention_mask=batch["attention_mask"][[row]])
    return step(batch)


# === lesson 3: rows join ==========================================================================================


@right("merge_masks")
def into_zeros(first, second):
    width = max(first.shape[1], second.shape[1])
    merged = torch.zeros(len(first) + len(second), width, dtype=torch.long)
    merged[: len(first), width - first.shape[1] :] = first
    merged[len(first) :, width - second.shape[1] :] = second
    return merged


@right("merge_masks")
def as_lists(first, second):
    rows = first.tolist() + second.tolist()
    width = max(map(len, rows))
    return torch.tensor([[0] * (width - len(row)) + row for row in rows])


def masks(first, second, widen, width=max):
    """Both masks, each brought to the wider one's width by `widen(mask, columns)`."""
    width = width(first.size(1), second.size(1))
    return torch.cat([widen(mask, width - mask.size(1)) for mask in (first, second)])


@wrong("merge_masks", "padded on the right: its newest token must stay at the right edge")
def masks_right(first, second):
    return masks(first, second, lambda mask, columns: pad(mask, (0, columns)))


@wrong("merge_masks", "is padded with 1")
def masks_padded_with_ones(first, second):
    return masks(first, second, lambda mask, columns: pad(mask, (columns, 0), value=1))


@wrong("merge_masks", "is cut to the narrower width")
def masks_cut(first, second):
    return masks(first, second, lambda mask, columns: mask[:, -columns:] if columns else mask, width=min)


@wrong("merge_masks", "rows can only be stacked when all are equally wide")
def masks_stacked(first, second):
    return torch.cat([first, second])


@wrong("merge_masks", "the wider batch's oldest tokens are no longer seen")
def only_the_second_is_widened(first, second):
    return torch.cat([first, pad(second, (first.size(1) - second.size(1), 0))])  # by -3 columns, which cuts


@wrong("merge_masks", "Either of the two may be the wider one")
def zeros_of_negative_width(first, second):
    zeros = torch.zeros(len(second), first.size(1) - second.size(1), dtype=torch.long)
    return torch.cat([first, torch.cat([zeros, second], dim=1)])


@wrong("merge_masks", "has the second batch's rows first")
def masks_swapped(first, second):
    return solutions.merge_masks(second, first)


@wrong("merge_masks", "is 1 everywhere")
def masks_of_ones(first, second):
    return torch.ones_like(solutions.merge_masks(first, second))


@wrong("merge_masks", "holds float32")
def float_masks(first, second):
    return solutions.merge_masks(first, second).float()


@wrong("merge_masks", "has the rows of the first batch only")
def newcomers_forgotten(first, second):
    return masks(first, second, lambda mask, columns: pad(mask, (columns, 0)))[: len(first)]


def tensors(cache):
    return [(layer.keys, layer.values) for layer in cache.layers]


def cache_of(layers):
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


@right("merge_batches")
def the_verb_for_joining(first, second):
    return batching.merge_batches(first, second)


@right("merge_batches")
def with_caches_of_its_own(first, second):
    """Layer by layer into tensors of ones: what stands in hidden columns makes no difference."""
    merged = {key: first[key] + second[key] for key in first if isinstance(first[key], list)}
    merged["attention_mask"] = solutions.merge_masks(first["attention_mask"], second["attention_mask"])
    for key in ("input_ids", "position_ids"):
        merged[key] = torch.vstack((first[key], second[key]))
    layers = []
    for pairs in zip(tensors(first["past_key_values"]), tensors(second["past_key_values"]), strict=True):
        (one_k, one_v), (two_k, two_v) = pairs
        width = max(one_k.size(2), two_k.size(2))
        both = []
        for one, two in ((one_k, two_k), (one_v, two_v)):
            new = one.new_ones(len(one) + len(two), one.size(1), width, one.size(3))
            new[: len(one), :, width - one.size(2) :] = one
            new[len(one) :, :, width - two.size(2) :] = two
            both.append(new)
        layers.append(both)
    merged["past_key_values"] = cache_of(layers)
    return merged


def left(tensor, columns):
    return pad(tensor, (0, 0, columns, 0))


def merge(first, second, keys=left, values=left, stack=torch.cat, change=lambda layers: layers):
    """A merge with parts to be broken: how keys and values are widened, what becomes of the layers."""
    widths = [batch["attention_mask"].size(1) for batch in (first, second)]
    layers = []
    for pairs in zip(tensors(first["past_key_values"]), tensors(second["past_key_values"]), strict=True):
        add = [max(widths) - width for width in widths]
        layers.append(
            [
                stack([widen(pair[part], columns) for pair, columns in zip(pairs, add, strict=True)])
                for part, widen in enumerate((keys, values))
            ]
        )
    return solutions.merge_batches(first, second) | {"past_key_values": cache_of(change(layers))}


@wrong("merge_batches", "row 2's keys are padded on the right: its newest token must stay at the right edge")
def cache_padded_on_the_right(first, second):
    def on_the_right(tensor, columns):
        return pad(tensor, (0, 0, 0, columns))

    return merge(first, second, keys=on_the_right, values=on_the_right)


@wrong("merge_batches", "the keys are right, the values are not: row 2's values are padded on the right")
def values_not_padded_like_keys(first, second):
    return merge(first, second, values=lambda tensor, columns: pad(tensor, (0, 0, 0, columns)))


@wrong("merge_batches", "the keys are right, the values are not: the values hold the keys")
def keys_twice(first, second):
    return merge(first, second, change=lambda layers: [(keys, keys) for keys, _ in layers])


@wrong("merge_batches", "layer 0 is right, layer 1 is not: the keys are those of the first batch only")
def last_layer_forgotten(first, second):
    old = tensors(first["past_key_values"])
    return merge(first, second, change=lambda layers: layers[:1] + old[1:])


@wrong("merge_batches", "the cache has 1 layers, the model has 2")
def one_layer_merged(first, second):
    return merge(first, second, change=lambda layers: layers[:1])


@wrong("merge_batches", "the keys are those of the first batch only")
def cache_of_the_first(first, second):
    return solutions.merge_batches(first, second) | {"past_key_values": first["past_key_values"]}


@wrong("merge_batches", "rows can only be stacked when all are equally wide")
def cache_not_padded(first, second):
    return merge(first, second, keys=lambda tensor, columns: tensor)


@wrong("merge_batches", "numbers that are not finite")
def padded_with_infinity(first, second):
    def widen(tensor, columns):
        return pad(tensor, (0, 0, columns, 0), value=float("-inf"))

    return merge(first, second, keys=widen, values=widen)


@wrong("merge_batches", "the keys have one column too many")
def cache_as_wide_as_the_mask(first, second):
    return merge(first, second, *[lambda tensor, columns: left(tensor, columns + 1)] * 2)


@wrong("merge_batches", "the cache (keys) holds float64")
def cache_in_double(first, second):
    return merge(first, second, change=lambda layers: [[each.double() for each in pair] for pair in layers])


@wrong("merge_batches", "the keys have the rows in another order than `request_ids`")
def cache_rows_swapped(first, second):
    return merge(first, second, stack=lambda pair: torch.cat(pair[::-1]))


@wrong("merge_batches", "the mask has the rows of the first batch only")
def mask_not_merged(first, second):
    return merge(first, second) | {"attention_mask": first["attention_mask"]}


@wrong("merge_batches", "row 2 of the mask is padded on the right")
def mask_on_the_wrong_side(first, second):
    merged = merge(first, second)
    return merged | {"attention_mask": masks_right(first["attention_mask"], second["attention_mask"])}


@wrong("merge_batches", "the positions move with the padding")
def positions_shifted(first, second):
    merged = merge(first, second)
    width = merged["attention_mask"].size(1)
    moved = [batch["position_ids"] + width - batch["attention_mask"].size(1) for batch in (first, second)]
    return merged | {"position_ids": torch.cat(moved)}


@wrong("merge_batches", "`input_ids` has the rows in another order than `request_ids`")
def ids_swapped(first, second):
    return merge(first, second) | {"input_ids": torch.cat([second["input_ids"], first["input_ids"]])}


@wrong("merge_batches", "`token_ids` has the first batch's rows only")
def generated_tokens_forgotten(first, second):
    return merge(first, second) | {"token_ids": first["token_ids"]}


@wrong("merge_batches", "puts the second batch's rows before the first's")
def newcomers_on_top(first, second):
    return solutions.merge_batches(second, first)


@wrong("merge_batches", "changed its argument: `request_ids`")
def first_is_extended(first, second):
    merged = solutions.merge_batches(first, second)
    first["request_ids"] += second["request_ids"]
    return merged


@wrong("merge_batches", "changed its argument: the cache")
def first_cache_is_reused(first, second):
    merged = solutions.merge_batches(first, second)
    for old, new in zip(first["past_key_values"].layers, merged["past_key_values"].layers, strict=True):
        old.keys, old.values = new.keys, new.values
    return merged


@wrong("merge_batches", "should stay a transformers cache, which the model takes; it is a list")
def list_of_tuples(first, second):
    merged = solutions.merge_batches(first, second)
    return merged | {"past_key_values": tensors(merged["past_key_values"])}


@wrong("merge_batches", "returns a batch without 'past_key_values'")
def no_cache_merged(first, second):
    merged = solutions.merge_batches(first, second)
    del merged["past_key_values"]
    return merged


@wrong("merge_batches", "the cache (keys) is on the device 'meta'")
def cache_elsewhere(first, second):
    return merge(first, second, change=lambda layers: [[each.to("meta") for each in pair] for pair in layers])


@wrong("merge_batches", "returned None (is a `return` missing?)")
def no_return(first, second):
    solutions.merge_batches(first, second)


# === lesson 3: rows leave =========================================================================================


@right("filter_rows")
def with_a_boolean_index(batch):
    stays = torch.tensor([left > 0 for left in batch["tokens_remaining"]], device=batch["input_ids"].device)
    filtered = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            filtered[key] = value[stays]
        elif isinstance(value, list):
            filtered[key] = [entry for entry, stay in zip(value, stays, strict=True) if stay]
    pairs = tensors(batch["past_key_values"])
    filtered["past_key_values"] = cache_of([(keys[stays], values[stays]) for keys, values in pairs])
    return filtered, (~stays).nonzero().flatten().tolist()


@right("filter_batch")
def the_verb_for_leaving(batch):
    return batching.filter_batch(batch)


@right("filter_batch")
def until_a_column_is_needed(batch):
    filtered, removed = with_a_boolean_index(batch)
    if not filtered["request_ids"]:
        return {"request_ids": []}, removed
    columns = 0
    while not filtered["attention_mask"][:, columns].any():
        columns += 1
    pairs = tensors(filtered["past_key_values"])
    filtered["attention_mask"] = filtered["attention_mask"][:, columns:]
    filtered["past_key_values"] = cache_of([(keys[:, :, columns:], values[:, :, columns:]) for keys, values in pairs])
    return filtered, removed


def rows_out(batch, **changes):
    filtered, removed = solutions.filter_rows(batch)
    changes = {key: value(filtered, removed) if callable(value) else value for key, value in changes.items()}
    return filtered | (changes if filtered["request_ids"] else {}), removed


@wrong("filter_rows", "`request_ids` keeps the finished rows and drops the others")
def finished_stay(batch):
    upside_down = batch | {"tokens_remaining": [int(left == 0) for left in batch["tokens_remaining"]]}
    return solutions.filter_rows(upside_down)[0], solutions.filter_rows(batch)[1]


@wrong("filter_rows", "lists the rows that stay")
def the_wrong_list(batch):
    return solutions.filter_rows(batch)[0], [row for row, left in enumerate(batch["tokens_remaining"]) if left > 0]


@wrong("filter_rows", "lists the request ids of the removed rows")
def ids_for_row_numbers(batch):
    filtered, removed = solutions.filter_rows(batch)
    return filtered, [batch["request_ids"][row] for row in removed]


@wrong("filter_rows", "`request_ids` loses a wrong row")
def popped_from_the_front(batch):
    filtered, removed = solutions.filter_rows(batch)
    ids = list(batch["request_ids"])
    for row in removed:
        del ids[row : row + 1]
    return filtered | {"request_ids": ids}, removed


@wrong("filter_rows", "the mask still has the finished rows")
def mask_keeps_the_rows(batch):
    return rows_out(batch, attention_mask=batch["attention_mask"])


@wrong("filter_rows", "the keys of the finished rows are still in the cache")
def cache_keeps_the_rows(batch):
    return rows_out(batch, past_key_values=batch["past_key_values"])


@wrong("filter_rows", "layer 0 is right, layer 1 is not: the keys of the finished rows are still in the cache")
def second_layer_forgotten(batch):
    old = tensors(batch["past_key_values"])
    return rows_out(batch, past_key_values=lambda new, _: cache_of(tensors(new["past_key_values"])[:1] + old[1:]))


@wrong("filter_rows", "the keys are right, the values are not: the values of the finished rows are still in the cache")
def values_forgotten(batch):
    def mixed(new, removed):
        pairs = zip(tensors(new["past_key_values"]), tensors(batch["past_key_values"]), strict=True)
        return cache_of([(keys, values) for (keys, _), (_, values) in pairs])

    return rows_out(batch, past_key_values=mixed)


@wrong("filter_rows", "`position_ids` still has the finished rows")
def positions_keep_the_rows(batch):
    return rows_out(batch, position_ids=batch["position_ids"])


@wrong("filter_rows", "this exercise takes rows out and leaves the columns alone")
def trimmed_too_early(batch):
    return solutions.filter_batch(batch)


@wrong("filter_rows", "`request_ids` has the rows in another order than before")
def stays_backwards(batch):
    rows = [row for row, left in enumerate(batch["tokens_remaining"]) if left > 0][::-1]
    filtered, removed = solutions.filter_rows(batch)
    for key in ("request_ids", "token_ids", "tokens_remaining"):
        filtered[key] = [batch[key][row] for row in rows]
    for key in ("input_ids", "position_ids", "attention_mask"):
        filtered[key] = batch[key][rows]
    return filtered | {"past_key_values": kv_cache.select_rows(batch["past_key_values"], rows)}, removed


@wrong("filter_rows", "an empty index must still be one of whole numbers")
def float_index(batch):
    filtered, removed = solutions.filter_rows(batch)
    stay = torch.tensor([row for row, left in enumerate(batch["tokens_remaining"]) if left > 0])
    return filtered | {"attention_mask": batch["attention_mask"][stay]}, removed


@wrong("filter_rows", "should return two things")
def batch_only(batch):
    return solutions.filter_rows(batch)[0]


@wrong("filter_rows", "changed its argument: `request_ids`")
def removed_in_place(batch):
    filtered, removed = solutions.filter_rows(batch)
    batch["request_ids"][:] = filtered["request_ids"]
    return filtered, removed


def trim(batch, columns_of, mask=True, cache=True, side="left"):
    """Finished rows out, and `columns_of(rows that stay)` columns trimmed."""
    filtered, removed = solutions.filter_rows(batch)
    if filtered["request_ids"]:
        columns = max(0, columns_of(filtered["attention_mask"]))
        if mask:
            old = filtered["attention_mask"]
            filtered["attention_mask"] = old[:, columns:] if side == "left" else old[:, : old.size(1) - columns]
        if cache:
            pairs = tensors(filtered["past_key_values"])
            stop = None if side == "left" else pairs[0][0].size(2) - columns
            start = columns if side == "left" else 0
            filtered["past_key_values"] = cache_of([(k[:, :, start:stop], v[:, :, start:stop]) for k, v in pairs])
    return filtered, removed


def common(mask):
    return mask.size(1) - int(mask.sum(dim=1).max())


@wrong("filter_batch", "the mask still has 2 columns of padding that all rows have in common")
def not_trimmed(batch):
    return solutions.filter_rows(batch)


@wrong("filter_batch", "one column too many is trimmed from the mask: row 1's first real token is gone")
def one_column_too_many_trimmed(batch):
    return trim(batch, lambda mask: common(mask) + 1)


@wrong("filter_batch", "one column too many is trimmed from the mask")
def trimmed_by_the_first_row(batch):
    return trim(batch, lambda mask: mask.size(1) - int(mask[0].sum()))


@wrong("filter_batch", "the mask still has one column of padding")
def one_column_left(batch):
    return trim(batch, lambda mask: common(mask) - 1)


@wrong("filter_batch", "the cache (keys) still has 2 columns of padding")
def only_the_mask_is_trimmed(batch):
    return trim(batch, common, cache=False)


@wrong("filter_batch", "the mask still has 2 columns of padding")
def only_the_cache_is_trimmed(batch):
    return trim(batch, common, mask=False)


@wrong("filter_batch", "the mask is trimmed on the right")
def trimmed_on_the_right(batch):
    return trim(batch, common, side="right")


@wrong("filter_batch", "the keys are trimmed on the right")
def cache_trimmed_on_the_right(batch):
    filtered, removed = trim(batch, common)
    return filtered | {"past_key_values": trim(batch, common, side="right")[0]["past_key_values"]}, removed


@wrong("filter_batch", "`position_ids` moves with the trimming")
def positions_trimmed(batch):
    filtered, removed = trim(batch, common)
    if filtered["request_ids"]:
        columns = batch["attention_mask"].size(1) - filtered["attention_mask"].size(1)
        filtered["position_ids"] = filtered["position_ids"] - columns
    return filtered, removed


@wrong("filter_batch", "When every row is finished there is no longest row")
def longest_of_nobody(batch):
    filtered, removed = trim(batch, common)
    max(filtered["attention_mask"].sum(dim=1).tolist())
    return filtered, removed


# === lesson 3: the loop ===========================================================================================


@right("continuous_loop")
def prefill_without_decode(requests, max_batch_size):
    """Either somebody joins in an iteration or everybody decodes: the passes are the same."""
    queue, answers, running = list(enumerate(requests)), {}, {"request_ids": []}
    while queue or running["request_ids"]:
        free = max_batch_size - len(running["request_ids"])
        if queue and free:
            joining = [Request(*request, f"r{number}") for number, request in queue[:free]]
            queue = queue[free:]
            new = batching.generate_next_token(batching.init_batch(joining))
            running = batching.merge_batches(running, new)
        else:
            running = batching.generate_next_token(running)
        answers |= dict(zip(running["request_ids"], running["token_ids"], strict=True))
        running, _ = batching.filter_batch(running)
    return [answers[f"r{number}"] for number in range(len(requests))]


@right("continuous_loop")
def the_loop_itself(requests, max_batch_size):
    return [output.token_ids for output in generate_continuous(requests, max_batch_size).outputs]


def serve(requests, rows, may_join=lambda free, running: free):
    """The loop, with the rule of joining to be broken: answers by request, in the order in which they end."""
    waiting = deque(Request(*request, number) for number, request in enumerate(requests))
    running, answers = {"request_ids": []}, {}
    while waiting or running["request_ids"]:
        count = min(may_join(rows - len(running["request_ids"]), running["request_ids"]), len(waiting))
        if count > 0:
            joining = [waiting.popleft() for _ in range(count)]
            running = batching.merge_batches(running, batching.generate_next_token(batching.init_batch(joining)))
        running = batching.generate_next_token(running)
        for row, number in enumerate(running["request_ids"]):
            if running["tokens_remaining"][row] == 0:
                answers[number] = running["token_ids"][row]
        running, _ = batching.filter_batch(running)
    return answers


def in_order(answers):
    return [answers[number] for number in sorted(answers)]


@wrong("continuous_loop", "that is static batching")
def waits_for_the_batch(requests, max_batch_size):
    return in_order(serve(requests, max_batch_size, lambda free, running: 0 if running else free))


@wrong("continuous_loop", "one request at a time")
def alone(requests, max_batch_size):
    return in_order(serve(requests, 1))


@wrong("continuous_loop", "rows at once")
def everybody_at_once(requests, max_batch_size):
    return in_order(serve(requests, len(requests)))


@wrong("continuous_loop", "in the order in which they were finished")
def in_order_of_their_ends(requests, max_batch_size):
    return list(serve(requests, max_batch_size).values())


@wrong("continuous_loop", "every request must be answered")
def last_one_forgotten(requests, max_batch_size):
    return in_order(serve(requests[:-1], max_batch_size))


@wrong("continuous_loop", "should return a list with a list of token ids for each request; it returned a dict")
def answers_by_id(requests, max_batch_size):
    return serve(requests, max_batch_size)


@wrong("continuous_loop", "requests that join at the same time can share one")
def a_prefill_for_each(requests, max_batch_size):
    waiting = deque(Request(*request, number) for number, request in enumerate(requests))
    running, answers = {"request_ids": []}, {}
    while waiting or running["request_ids"]:
        while waiting and len(running["request_ids"]) < max_batch_size:
            new = batching.generate_next_token(batching.init_batch([waiting.popleft()]))
            running = batching.merge_batches(running, new)
        running = batching.generate_next_token(running)
        answers |= dict(zip(running["request_ids"], running["token_ids"], strict=True))
        running, _ = batching.filter_batch(running)
    return in_order(answers)


@wrong("continuous_loop", "lacks its last token")
def last_token_cut(requests, max_batch_size):
    return [token_ids[:-1] for token_ids in in_order(serve(requests, max_batch_size))]


@wrong("continuous_loop", "ends after 1 of 8 tokens")
def prefill_only(requests, max_batch_size):
    if max_batch_size == 3:
        return in_order(serve(requests, max_batch_size))
    return [token_ids[:1] for token_ids in in_order(serve(requests, max_batch_size))]


# === lesson 4: what a request reads ===============================================================================


@right("what_to_read")
def token_by_token_until_the_end(prompt_tokens, generated, computed, budget):
    read = 0
    while read < budget and computed + read < prompt_tokens + generated:
        read += 1
    return [read, int(computed + read == prompt_tokens + generated)]


@right("what_to_read")
def by_kinds_of_work(prompt_tokens, generated, computed, budget):
    everything = prompt_tokens + generated
    if budget >= everything - computed:
        return everything - computed, True
    return budget, False


@wrong("what_to_read", "reads 20 tokens in an iteration that has room for 8")
def whole_prompts(prompt_tokens, generated, computed, budget):
    return prompt_tokens + generated - computed, True


@wrong("what_to_read", "the last chunk yields no token. Whoever has read everything gets a new token")
def last_chunk_yields_nothing(prompt_tokens, generated, computed, budget):
    tokens, new = solutions.what_to_read(prompt_tokens, generated, computed, budget)
    return tokens, new and (computed == 0 or generated > 0)


@wrong("what_to_read", "the whole prompt yields no token")
def prefill_yields_nothing(prompt_tokens, generated, computed, budget):
    return solutions.what_to_read(prompt_tokens, generated, computed, budget)[0], generated > 0


@wrong("what_to_read", "gives a new token after 8 of 20 tokens: what the model says there")
def every_chunk_yields(prompt_tokens, generated, computed, budget):
    tokens = min(prompt_tokens + generated - computed, budget)
    return tokens, tokens > 0


@wrong("what_to_read", "counts the prompt only. What was generated belongs to the text")
def restart_reads_the_prompt_only(prompt_tokens, generated, computed, budget):
    uncomputed = 1 if computed >= prompt_tokens and generated else prompt_tokens - computed
    return min(uncomputed, budget), uncomputed <= budget


@wrong("what_to_read", "reads -2 tokens: the generated ones have to be read as well")
def what_is_left_of_the_prompt(prompt_tokens, generated, computed, budget):
    uncomputed = prompt_tokens - computed
    return min(uncomputed, budget), uncomputed <= budget


@wrong("what_to_read", "takes every request that has generated something for a decode")
def generated_means_decode(prompt_tokens, generated, computed, budget):
    uncomputed = 1 if generated else prompt_tokens - computed
    return min(uncomputed, budget), uncomputed <= budget


@wrong("what_to_read", "the model would say again what it has said")
def new_token_after_the_prompt(prompt_tokens, generated, computed, budget):
    tokens, _ = solutions.what_to_read(prompt_tokens, generated, computed, budget)
    return tokens, tokens > 0 and computed + tokens >= prompt_tokens


@wrong("what_to_read", "begins at the start again: keys and values of the first 16 tokens are in the cache")
def nothing_is_remembered(prompt_tokens, generated, computed, budget):
    tokens = min(prompt_tokens + generated, budget)
    return tokens, tokens == prompt_tokens + generated - computed


@wrong("what_to_read", "the newest one was chosen by the model, but not read by it yet")
def newest_is_taken_as_read(prompt_tokens, generated, computed, budget):
    uncomputed = prompt_tokens + generated - computed - (generated > 0)
    return min(uncomputed, budget), uncomputed <= budget


@wrong("what_to_read", "gives a new token to a request that reads nothing")
def new_without_a_pass(prompt_tokens, generated, computed, budget):
    tokens, new = solutions.what_to_read(prompt_tokens, generated, computed, budget)
    return tokens, new or tokens == 0


@wrong("what_to_read", "Are the two in the wrong order?")
def new_comes_first(prompt_tokens, generated, computed, budget):
    return solutions.what_to_read(prompt_tokens, generated, computed, budget)[::-1]


@wrong("what_to_read", "should be True or False, and is 8")
def the_new_token_s_place(prompt_tokens, generated, computed, budget):
    tokens, new = solutions.what_to_read(prompt_tokens, generated, computed, budget)
    return tokens, computed + tokens + 1 if new else False


@wrong("what_to_read", "should return two things")
def tokens_only(prompt_tokens, generated, computed, budget):
    return min(prompt_tokens + generated - computed, budget)


# === lesson 4: who is next ========================================================================================


@right("longest_first")
def three_queues(waiting):
    longest = max((sequence.max_tokens for sequence in waiting), default=0)
    queues = [], [], []
    for sequence in waiting:
        if sequence.max_tokens >= 2 / 3 * longest:
            queues[0].append(sequence)
        elif sequence.max_tokens >= 1 / 3 * longest:
            queues[1].append(sequence)
        else:
            queues[2].append(sequence)
    return queues[0] + queues[1] + queues[2]


@right("longest_first")
def the_engine_s_own_queue(waiting):
    return list(LongestFirst().order(WaitingQueue(waiting), []))


@wrong("longest_first", "sorts by max_tokens alone")
def no_classes(waiting):
    return sorted(waiting, key=lambda sequence: -sequence.max_tokens)


@wrong("longest_first", "puts the shortest first")
def shortest_limit_first(waiting):
    return sorted(waiting, key=lambda sequence: sequence.max_tokens)


@wrong("longest_first", "puts the shortest first")
def shortest_class_first(waiting):
    longest = max((sequence.max_tokens for sequence in waiting), default=0)
    return sorted(waiting, key=lambda sequence: 3 * sequence.max_tokens // (longest + 1))


@wrong("longest_first", "leaves the order of arrival as it is")
def as_they_came(waiting):
    return list(waiting)


@wrong("longest_first", "has the classes right, but within a class the order of arrival must stay")
def turned_around(waiting):
    longest = max((sequence.max_tokens for sequence in waiting), default=0)
    return sorted(waiting, key=lambda sequence: 3 * sequence.max_tokens // (longest + 1))[::-1]


@wrong("longest_first", "changes the order of requests that are all alike")
def equals_turned_around(waiting):
    alike = len({sequence.max_tokens for sequence in waiting}) == 1
    return waiting[::-1] if alike else solutions.longest_first(waiting)


@wrong("longest_first", "goes by the prompts")
def longest_prompt_first(waiting):
    return sorted(waiting, key=lambda sequence: -len(sequence.token_ids))


@wrong("longest_first", "has one class only, but the longest in this queue may get 9 tokens")
def fixed_limits(waiting):
    return sorted(waiting, key=lambda sequence: -(sequence.max_tokens > 30) - (sequence.max_tokens > 60))


@wrong("longest_first", "in different thirds of 90")
def two_classes(waiting):
    longest = max((sequence.max_tokens for sequence in waiting), default=0)
    return sorted(waiting, key=lambda sequence: -(2 * sequence.max_tokens > longest))


@wrong("longest_first", "changed its argument: the list is not what it was")
def sorted_in_place(waiting):
    right_order = solutions.longest_first(waiting)
    waiting[:] = right_order
    return waiting


@wrong("longest_first", "changed its argument: `max_tokens` is not what it was")
def limits_replaced(waiting):
    right_order = solutions.longest_first(waiting)
    for sequence in waiting:
        sequence.max_tokens = 3 * sequence.max_tokens // 91
    return right_order


@wrong("longest_first", "request a is missing in the queue")
def short_ones_dropped(waiting):
    return [sequence for sequence in solutions.longest_first(waiting) if sequence.max_tokens > 15]


@wrong("longest_first", "stands there twice")
def classes_overlap(waiting):
    longest = max((sequence.max_tokens for sequence in waiting), default=0)
    long = [sequence for sequence in waiting if sequence.max_tokens > longest / 3]
    return long + [sequence for sequence in waiting if sequence.max_tokens < longest / 3 * 2]


@wrong("longest_first", "Wanted are the sequences themselves")
def ids_of_the_queue(waiting):
    return [sequence.request_id for sequence in solutions.longest_first(waiting)]


@wrong("longest_first", "A queue may be empty")
def somebody_always_waits(waiting):
    longest = max(sequence.max_tokens for sequence in waiting)
    return solutions.longest_first(waiting) if longest else []


@wrong("longest_first", "A sequence is no dict")
def as_a_dict(waiting):
    return sorted(waiting, key=lambda sequence: sequence["max_tokens"])


@wrong("longest_first", "so Python compares the sequences themselves")
def compared_as_tuples(waiting):
    pairs = [(-sequence.max_tokens // 31, sequence) for sequence in waiting]
    return [sequence for _, sequence in sorted(pairs)]


@wrong("longest_first", "returned None (is a `return` missing?)")
def sorts_and_returns_nothing(waiting):
    list(waiting).sort(key=lambda sequence: -sequence.max_tokens)


@right("most_urgent")
def the_first_of_the_sorted(waiting, ageing):
    return next(iter(Priority(ageing).order(WaitingQueue(waiting), [])), None)


@right("most_urgent")
def one_after_the_other(waiting, ageing):
    best, its_level = None, float("inf")
    for sequence in waiting:
        level = sequence.priority - int(sequence.waited / ageing)
        if level < its_level:
            best, its_level = sequence, level
    return best


def by_urgency(urgency, backwards=False):
    def most_urgent(waiting, ageing):
        queue = waiting[::-1] if backwards else waiting
        return min(queue, key=lambda sequence: urgency(sequence.priority, sequence.waited, ageing), default=None)

    return most_urgent


@wrong("most_urgent", "takes the largest number")
def largest_number(waiting, ageing):
    return max(waiting, key=lambda sequence: sequence.priority - sequence.waited // ageing, default=None)


@wrong("most_urgent", "takes the largest number")
def largest_number_with_ageing_added(waiting, ageing):
    return max(waiting, key=lambda sequence: sequence.priority + sequence.waited // ageing, default=None)


@wrong("most_urgent", "lets whoever waits become less urgent")
def ageing_with_the_wrong_sign(waiting, ageing):
    return by_urgency(lambda priority, waited, ageing: priority + waited // ageing)(waiting, ageing)


@wrong("most_urgent", "never looks at `waited`")
def no_ageing(waiting, ageing):
    return by_urgency(lambda priority, waited, ageing: priority)(waiting, ageing)


@wrong("most_urgent", "lets waiting count too much")
def ageing_multiplied(waiting, ageing):
    return by_urgency(lambda priority, waited, ageing: priority - waited * ageing)(waiting, ageing)


@wrong("most_urgent", "takes whoever came first, whatever their priority")
def waited_longest(waiting, ageing):
    return by_urgency(lambda priority, waited, ageing: -waited)(waiting, ageing)


@wrong("most_urgent", "takes whoever came first, whatever their priority")
def first_of_the_queue(waiting, ageing):
    return waiting[0] if waiting else None


@wrong("most_urgent", "counts parts of a level")
def ageing_divided_exactly(waiting, ageing):
    return by_urgency(lambda priority, waited, ageing: priority - waited / ageing)(waiting, ageing)


@wrong("most_urgent", "rounds to the nearest level")
def ageing_rounded(waiting, ageing):
    return by_urgency(lambda priority, waited, ageing: priority - round(waited / ageing))(waiting, ageing)


@wrong("most_urgent", "stops at level 0")
def never_below_zero(waiting, ageing):
    return by_urgency(lambda priority, waited, ageing: max(0, priority - waited // ageing))(waiting, ageing)


@wrong("most_urgent", "counts one level at most")
def aged_once(waiting, ageing):
    return by_urgency(lambda priority, waited, ageing: priority - (waited >= ageing))(waiting, ageing)


@wrong("most_urgent", "is off by one where a level begins")
def ageing_exceeded(waiting, ageing):
    return by_urgency(lambda priority, waited, ageing: priority - (waited - 1) // ageing)(waiting, ageing)


@wrong("most_urgent", "takes the last among equals")
def last_among_equals(waiting, ageing):
    return by_urgency(lambda priority, waited, ageing: priority - waited // ageing, backwards=True)(waiting, ageing)


@wrong("most_urgent", "is off by one where a level begins")
def ageing_rounded_up(waiting, ageing):
    return by_urgency(lambda priority, waited, ageing: priority - math.ceil(waited / ageing))(waiting, ageing)


@wrong("most_urgent", "takes d, which counts as -1, and b counts as -1: among equals, the first to come goes first")
def ageing_a_constant(waiting, ageing):
    return by_urgency(lambda priority, waited, ageing: priority - waited // 50)(waiting, ageing)


@wrong("most_urgent", "takes a, which counts as 2, and b counts as 0")
def two_levels_only(waiting, ageing):
    return by_urgency(lambda priority, waited, ageing: priority > 2)(waiting, ageing)


@wrong("most_urgent", "Wanted is the sequence itself")
def the_urgent_one_s_id(waiting, ageing):
    return solutions.most_urgent(waiting, ageing).request_id


@wrong("most_urgent", "returns None although 3 requests wait")
def nobody_is_urgent(waiting, ageing):
    return next((sequence for sequence in waiting if sequence.priority < 0), None)


@wrong("most_urgent", "Then there is nobody to take: None")
def a_queue_is_never_empty(waiting, ageing):
    return min(waiting, key=lambda sequence: sequence.priority - sequence.waited // ageing)


@wrong("most_urgent", "should return None when nobody waits; it returned a list")
def empty_list_for_nobody(waiting, ageing):
    return solutions.most_urgent(waiting, ageing) or []


@wrong("most_urgent", "changed its argument: the list is not what it was")
def popped_from_the_queue(waiting, ageing):
    best = solutions.most_urgent(waiting, ageing)
    if waiting:
        waiting.remove(best)
    return best


@wrong("most_urgent", "changed its argument: `priority` is not what it was")
def priorities_lowered(waiting, ageing):
    for sequence in waiting:
        sequence.priority -= sequence.waited // ageing
    return min(waiting, key=lambda sequence: sequence.priority, default=None)


# === lesson 4: who reads how much =================================================================================


@right("plan_chunks")
def in_three_loops(running, waiting, rows, tokens):
    plan, queue = [], list(waiting)
    for sequence in running:
        if sequence.is_decode:
            plan.append([sequence.request_id, 1])
            tokens -= 1
    for sequence in running:
        if not sequence.is_decode and tokens:
            plan.append([sequence.request_id, min(tokens, sequence.num_uncomputed_tokens)])
            tokens -= plan[-1][1]
    free = rows - len(running)
    while queue and free and tokens:
        joining = queue.pop(0)
        plan.append([joining.request_id, min(tokens, len(joining.token_ids) - joining.computed)])
        tokens, free = tokens - plan[-1][1], free - 1
    return plan


@right("plan_chunks")
def newcomers_listed_first(running, waiting, rows, tokens):
    """In what order a plan lists them makes no difference: it is one iteration."""
    return solutions.plan_chunks(running, waiting, rows, tokens)[::-1]


@right("plan_chunks")
def the_engine_s_own_plan(running, waiting, rows, tokens):
    scheduler = Scheduler(EngineConfig(max_batch_size=rows, max_tokens_per_step=tokens))
    scheduler.running, scheduler.waiting = list(running), WaitingQueue(waiting)
    return [(chunk.sequence.request_id, chunk.tokens) for chunk in scheduler.schedule().chunks]


def planned(
    running,
    waiting,
    rows,
    tokens,
    order=lambda decoding, reading, joining: decoding + reading + joining,
    joining=lambda running, waiting, rows: waiting[: rows - len(running)],
    decodes=lambda sequence: sequence.is_decode,
    uncomputed=lambda sequence: sequence.num_uncomputed_tokens,
    chunk=min,
    cost=lambda sequence, chunk: chunk,
):
    """A plan with parts to be broken: in which order, who joins, who decodes, how much is read and what it costs."""
    decoding = [sequence for sequence in running if decodes(sequence)]
    reading = [sequence for sequence in running if not decodes(sequence)]
    plan = []
    for sequence in order(decoding, reading, joining(running, waiting, rows)):
        read = chunk(1 if decodes(sequence) else uncomputed(sequence), tokens)
        if read > 0:
            plan.append((sequence.request_id, read))
            tokens -= cost(sequence, read)
    return plan


right("plan_chunks")(planned)


@wrong("plan_chunks", "reads 11 tokens, one more than the budget allows")
def one_token_too_many(running, waiting, rows, tokens):
    return solutions.plan_chunks(running, waiting, rows, tokens + 1)


@wrong("plan_chunks", "has no tokens left for d, e, whose next token somebody waits for. Decodes come first")
def prompts_first(running, waiting, rows, tokens):
    return planned(
        running, waiting, rows, tokens, order=lambda decoding, reading, joining: reading + joining + decoding
    )


@wrong("plan_chunks", "has no tokens left for d, e")
def in_the_order_of_rows(running, waiting, rows, tokens):
    return planned(running, waiting, rows, tokens, order=lambda decoding, reading, joining: [*running, *joining])


@wrong("plan_chunks", "forgets d, e: who decodes takes part in every iteration")
def prompts_only(running, waiting, rows, tokens):
    tight = planned(running, waiting, rows, tokens, order=lambda decoding, reading, joining: reading + joining)
    return [(request_id, min(read, tokens // 2)) for request_id, read in tight[:1]] + tight[1:]


@wrong("plan_chunks", "each of the 2 decodes reads one, and it counts like any other")
def decodes_are_free(running, waiting, rows, tokens):
    return planned(running, waiting, rows, tokens, cost=lambda sequence, read: 0 if sequence.is_decode else read)


@wrong("plan_chunks", "lets p read its 12 tokens at once, when 8 of the budget are left")
def whole_prompt_at_once(running, waiting, rows, tokens):
    return planned(running, waiting, rows, tokens, chunk=lambda whole, left: whole if left > 0 else 0)


@wrong("plan_chunks", "What one reads, the next ones cannot have")
def everybody_has_the_whole_budget(running, waiting, rows, tokens):
    return planned(running, waiting, rows, tokens, cost=lambda sequence, read: 0)


@wrong("plan_chunks", "when v's turn comes, 0 of the budget are left, and it is given 5")
def budget_for_each_kind(running, waiting, rows, tokens):
    old = planned(running, [], rows, tokens)
    return old + planned([], waiting, rows - len(running), tokens - len(running) + 1)


@wrong("plan_chunks", "leaves 8 tokens of the budget unused, and p has 12 to read. A prompt need not be read at once")
def whole_or_not_at_all(running, waiting, rows, tokens):
    return planned(running, waiting, rows, tokens, chunk=lambda whole, left: whole if whole <= left else 0)[:2]


@wrong("plan_chunks", "leaves 10 tokens of the budget unused, and v has 12 to read")
def newcomers_whole_or_not_at_all(running, waiting, rows, tokens):
    plan = planned(running, [], rows, tokens)
    left = tokens - sum(read for _, read in plan)
    for sequence in waiting[: rows - len(running)]:
        if sequence.num_uncomputed_tokens > left:
            break
        plan.append((sequence.request_id, sequence.num_uncomputed_tokens))
        left -= sequence.num_uncomputed_tokens
    return plan


@wrong("plan_chunks", "lets w, x overtake v")
def whoever_fits(running, waiting, rows, tokens):
    plan = planned(running, [], rows, tokens)
    left = tokens - sum(read for _, read in plan)
    for sequence in waiting[: rows - len(running)]:
        if sequence.num_uncomputed_tokens <= left:
            plan.append((sequence.request_id, sequence.num_uncomputed_tokens))
            left -= sequence.num_uncomputed_tokens
    return plan


@wrong("plan_chunks", "lets w overtake v")
def shortest_prompt_joins_first(running, waiting, rows, tokens):
    return solutions.plan_chunks(running, sorted(waiting, key=lambda one: one.num_uncomputed_tokens), rows, tokens)


@wrong("plan_chunks", "lets w overtake v")
def newest_first(running, waiting, rows, tokens):
    return solutions.plan_chunks(running, waiting[::-1], rows, tokens)


@wrong("plan_chunks", "lets v, w share the tokens. Prompts that are half read have yielded nothing yet")
def shared_equally(running, waiting, rows, tokens):
    plan = planned(running, [], rows, tokens)
    left, joining = tokens - sum(read for _, read in plan), waiting[: rows - len(running)]
    shares = [(sequence.request_id, min(sequence.num_uncomputed_tokens, left // len(joining))) for sequence in joining]
    return plan + [(request_id, read) for request_id, read in shares if read]


@wrong("plan_chunks", "while p, whose prompt has been begun, reads nothing")
def begun_prompt_forgotten(running, waiting, rows, tokens):
    return planned(running, waiting, rows, tokens, order=lambda decoding, reading, joining: decoding + joining)


@wrong("plan_chunks", "forgets p, whose prompt has been begun: there is room for 4 tokens of it")
def begun_prompt_left_alone(running, waiting, rows, tokens):
    """Whatever else is right: a prompt that could be ended now is not."""
    plan = solutions.plan_chunks(running, waiting, rows, tokens)
    return [(request_id, read) for request_id, read in plan if request_id != "p" or read > 4]


@wrong("plan_chunks", "It holds a row, and yields nothing before its prompt is read")
def newcomers_before_the_begun(running, waiting, rows, tokens):
    return planned(
        running, waiting, rows, tokens, order=lambda decoding, reading, joining: decoding + joining + reading
    )


@wrong("plan_chunks", "leaves 2 tokens of the budget unused, and q has 6 to read")
def one_begun_prompt_an_iteration(running, waiting, rows, tokens):
    def order(decoding, reading, joining):
        return decoding + reading[:1] + (joining if len(reading) < 2 else [])

    return planned(running, waiting, rows, tokens, order=order)


@wrong("plan_chunks", "lets q overtake p")
def newest_begun_first(running, waiting, rows, tokens):
    return planned(running, waiting, rows, tokens, order=lambda d, reading, joining: d + reading[::-1] + joining)


@wrong("plan_chunks", "lets 4 requests join where 2 rows are free: every running request holds one")
def more_than_the_rows(running, waiting, rows, tokens):
    return planned(running, waiting, rows, tokens, joining=lambda running, waiting, rows: waiting)


@wrong("plan_chunks", "lets 3 requests join where 2 rows are free: p holds a row, too")
def rows_of_those_that_decode(running, waiting, rows, tokens):
    def joining(running, waiting, rows):
        return waiting[: rows - sum(sequence.is_decode for sequence in running)]

    return planned(running, waiting, rows, tokens, joining=joining)


@wrong("plan_chunks", "lets w wait, and there are a free row and 23 tokens that nobody uses")
def one_newcomer_at_a_time(running, waiting, rows, tokens):
    return planned(running, waiting[:1], rows, tokens)


@wrong("plan_chunks", "lets v wait, and there are a free row")
def nobody_joins_while_others_run(running, waiting, rows, tokens):
    roomy = tokens > 20
    return planned(running, [] if running and roomy else waiting, rows, tokens)


@wrong("plan_chunks", "lets p read 4 tokens, and 4 of the budget stay unused")
def chunks_of_four(running, waiting, rows, tokens):
    return planned(running, waiting, rows, tokens, chunk=lambda whole, left: min(whole, left, 4))[:3]


@wrong("plan_chunks", "which has 4 to read: the first 16 are in the cache already")
def prompts_from_the_start(running, waiting, rows, tokens):
    return planned(running, waiting, rows, tokens, uncomputed=lambda sequence: len(sequence.token_ids))


@wrong("plan_chunks", "takes r for a decode because it has generated something")
def generated_means_decoding(running, waiting, rows, tokens):
    return planned(running, waiting, rows, tokens, decodes=lambda sequence: sequence.generated > 0)


@wrong("plan_chunks", "counts r's prompt only")
def preempted_read_their_prompts(running, waiting, rows, tokens):
    return planned(
        running, waiting, rows, tokens, uncomputed=lambda sequence: sequence.prompt_tokens - sequence.computed
    )


@wrong("plan_chunks", "plans 0 tokens for request v: who reads nothing takes no part")
def with_empty_chunks(running, waiting, rows, tokens):
    plan = dict(solutions.plan_chunks(running, waiting, rows, tokens))
    everybody = [*running, *waiting[: rows - len(running)]]
    return [(sequence.request_id, plan.get(sequence.request_id, 0)) for sequence in everybody]


@wrong("plan_chunks", "plans for request d twice")
def running_twice(running, waiting, rows, tokens):
    return [(sequence.request_id, 1) for sequence in running if sequence.is_decode] + solutions.plan_chunks(
        running, waiting, rows, tokens
    )


@wrong("plan_chunks", "has a sequence where its request id should be")
def sequences_for_ids(running, waiting, rows, tokens):
    by_id = {sequence.request_id: sequence for sequence in running + waiting}
    return [(by_id[id], read) for id, read in solutions.plan_chunks(running, waiting, rows, tokens)]


@wrong("plan_chunks", "should return a list of (request id, tokens); it returned a dict")
def plan_as_a_dict(running, waiting, rows, tokens):
    return dict(solutions.plan_chunks(running, waiting, rows, tokens))


@wrong("plan_chunks", "and a str is among them")
def ids_without_tokens(running, waiting, rows, tokens):
    return [request_id for request_id, _ in solutions.plan_chunks(running, waiting, rows, tokens)]


@wrong("plan_chunks", "changed its argument: `computed` is not what it was")
def reads_while_it_plans(running, waiting, rows, tokens):
    plan = solutions.plan_chunks(running, waiting, rows, tokens)
    for sequence in running + waiting:
        sequence.computed += dict(plan).get(sequence.request_id, 0)
    return plan


@wrong("plan_chunks", "changed its argument: the list is not what it was")
def queue_is_emptied(running, waiting, rows, tokens):
    plan = solutions.plan_chunks(running, waiting, rows, tokens)
    waiting[:] = [sequence for sequence in waiting if sequence.request_id not in dict(plan)]
    return plan


# === lesson 4: who waits for it ===================================================================================


@right("worst_waits")
def pooled_lists(arrivals, token_times):
    firsts = [token_times[id][0] - arrivals[id] for id in arrivals]
    gaps = [times[i] - times[i - 1] for times in token_times.values() for i in range(1, len(times))]
    return [max(firsts), max(gaps, default=0)]


@right("worst_waits")
def with_the_course_s_metrics(arrivals, token_times):
    each = [metrics.RequestMetrics(id, arrivals[id], times) for id, times in token_times.items()]
    return float(max(one.ttft for one in each)), float(max([0, *(gap for one in each for gap in one.itl)]))


def waits(arrivals, token_times, first=lambda arrival, times: times[0] - arrival, gaps=None, worst=max):
    """Both numbers with parts to be broken."""
    gaps = gaps or (lambda arrival, times: [later - time for time, later in pairwise(times)])
    each = [(arrivals[id], times) for id, times in token_times.items()]
    return worst([first(*one) for one in each]), worst([gap for one in each for gap in gaps(*one)] or [0])


right("worst_waits")(waits)


@wrong("worst_waits", "measures the time to the first token from step 0")
def first_token_from_step_zero(arrivals, token_times):
    return waits(arrivals, token_times, first=lambda arrival, times: times[0])


@wrong("worst_waits", "measures until the last token")
def until_the_last_token(arrivals, token_times):
    return waits(arrivals, token_times, first=lambda arrival, times: times[-1] - arrival)


@wrong("worst_waits", "it hides the one that waits")
def means(arrivals, token_times):
    return waits(arrivals, token_times, worst=lambda values: sum(values) / len(values))


@wrong("worst_waits", "takes the shortest time to a first token")
def best_waits(arrivals, token_times):
    return waits(arrivals, token_times, worst=min)


@wrong("worst_waits", "of the last request only")
def last_request_s(arrivals, token_times):
    for request_id, times in token_times.items():
        ttft = times[0] - arrivals[request_id]
        gap = max((later - time for time, later in pairwise(times)), default=0)
    return ttft, gap


@wrong("worst_waits", "of the first request only")
def first_request_s(arrivals, token_times):
    for request_id, times in token_times.items():
        return times[0] - arrivals[request_id], max((later - time for time, later in pairwise(times)), default=0)


@wrong("worst_waits", "counts the wait for the first token as a gap")
def gaps_from_the_arrival(arrivals, token_times):
    return waits(arrivals, token_times, gaps=lambda a, times: [later - time for time, later in pairwise([a, *times])])


@wrong("worst_waits", "looks at the gaps between anybody's tokens")
def gaps_of_the_server(arrivals, token_times):
    pooled = sorted(time for times in token_times.values() for time in times)
    return waits(arrivals, token_times)[0], max((later - time for time, later in pairwise(pooled)), default=0)


@wrong("worst_waits", "which is TPOT: one long stall vanishes in it")
def mean_time_per_token(arrivals, token_times):
    def gaps(arrival, times):
        return [(times[-1] - times[0]) / (len(times) - 1)] if len(times) > 1 else []

    return waits(arrivals, token_times, gaps=gaps)


@wrong("worst_waits", "takes the mean of the gaps")
def mean_gap(arrivals, token_times):
    gaps = [later - time for times in token_times.values() for time, later in pairwise(times)]
    return waits(arrivals, token_times)[0], sum(gaps) / max(len(gaps), 1)


@wrong("worst_waits", "goes from the first token to the last")
def first_to_last(arrivals, token_times):
    return waits(arrivals, token_times, gaps=lambda arrival, times: [times[-1] - times[0]])


@wrong("worst_waits", "looks at the first gap of each request only")
def first_gap(arrivals, token_times):
    return waits(
        arrivals, token_times, gaps=lambda arrival, times: [b - a for a, b in [times[:2]] if b] if times[1:] else []
    )


@wrong("worst_waits", "has the gaps of the last request only")
def gaps_of_the_last(arrivals, token_times):
    return waits(arrivals, token_times)[0], last_request_s(arrivals, token_times)[1]


@wrong("worst_waits", "counts the steps in which nothing came")
def steps_in_between(arrivals, token_times):
    return waits(arrivals, token_times, gaps=lambda arrival, times: [b - a - 1 for a, b in pairwise(times)])


@wrong("worst_waits", "returns the gap first")
def gap_first(arrivals, token_times):
    return waits(arrivals, token_times)[::-1]


@wrong("worst_waits", "without any gap, the longest counts as 0")
def always_a_gap(arrivals, token_times):
    gaps = [later - time for times in token_times.values() for time, later in pairwise(times)]
    return waits(arrivals, token_times)[0], max(gaps)


@wrong("worst_waits", "the gap, arrivals {'a': 0, 'b': 2, 'c': 5}, token_times")
def gap_in_double(arrivals, token_times):
    ttft, gap = waits(arrivals, token_times)
    return ttft, 2 * gap


@wrong("worst_waits", "the longest gap should be a number, and is None")
def no_gap_is_none(arrivals, token_times):
    ttft, gap = waits(arrivals, token_times)
    return ttft, gap or None


@wrong("worst_waits", "changed its argument")
def arrivals_put_in_front(arrivals, token_times):
    answer = waits(arrivals, token_times)
    for request_id, times in token_times.items():
        times.insert(0, arrivals[request_id])
    return answer


# === lesson 5: what padding costs =================================================================================


@right("padded_tokens")
def pads_of_each_row(lengths):
    pads = 0
    for length in lengths:
        pads += max(lengths) - length
    return [pads + sum(lengths), pads, sum(lengths)]


def counted(lengths, rectangle=None, pads=None, row=None):
    """The three counts, with one of them replaced."""
    right = solutions.padded_tokens(lengths)
    wrong = [other and other(lengths) for other in (rectangle, pads, row)]
    return tuple(one if other is None else other for one, other in zip(right, wrong, strict=True))


@wrong("padded_tokens", "all its rows are as wide as the longest")
def own_tokens_in_the_rectangle(lengths):
    return counted(lengths, rectangle=sum)


@wrong("padded_tokens", "counts a single row of the rectangle")
def one_row_of_the_rectangle(lengths):
    return counted(lengths, rectangle=max)


@wrong("padded_tokens", "the others would be cut")
def as_wide_as_the_shortest(lengths):
    return counted(lengths, rectangle=lambda lengths: len(lengths) * min(lengths))


@wrong("padded_tokens", "each row holds one of them")
def as_wide_as_all_together(lengths):
    return counted(lengths, rectangle=lambda lengths: len(lengths) * sum(lengths))


@wrong("padded_tokens", "takes the requests' own tokens for pads")
def tokens_taken_for_pads(lengths):
    return counted(lengths, pads=sum)


@wrong("padded_tokens", "takes everything in the rectangle for pads")
def everything_is_a_pad(lengths):
    return counted(lengths, pads=lambda lengths: len(lengths) * max(lengths))


@wrong("padded_tokens", "the longest and the shortest request only")
def longest_minus_shortest(lengths):
    return counted(lengths, pads=lambda lengths: max(lengths) - min(lengths))


@wrong("padded_tokens", "counts rows that are padded")
def rows_with_pads(lengths):
    return counted(lengths, pads=lambda lengths: sum(length < max(lengths) for length in lengths))


@wrong("padded_tokens", "gives a share")
def share_of_pads(lengths):
    return counted(lengths, pads=lambda lengths: 1 - sum(lengths) / len(lengths) / max(lengths))


@wrong("padded_tokens", "finds no pads")
def pads_are_useful(lengths):
    return counted(lengths, pads=lambda lengths: 0)


@wrong("padded_tokens", "pads the row, too")
def row_with_pads(lengths):
    return counted(lengths, row=lambda lengths: len(lengths) * max(lengths))


@wrong("padded_tokens", "makes the row as long as the longest request")
def row_of_the_longest(lengths):
    return counted(lengths, row=max)


@wrong("padded_tokens", "one token for each request: that is so only if all of them decode")
def a_token_each(lengths):
    return counted(lengths, row=len)


@wrong("padded_tokens", "in another order")
def row_first(lengths):
    return solutions.padded_tokens(lengths)[::-1]


@wrong("padded_tokens", "should return three things")
def without_the_row(lengths):
    return solutions.padded_tokens(lengths)[:2]


@wrong("padded_tokens", "the pads, lengths [5, 3, 7]: expected 6, got 5")
def one_pad_too_few(lengths):
    return counted(lengths, pads=lambda lengths: len(lengths) * max(lengths) - sum(lengths) - 1)


# === lesson 5: one row for everybody ==============================================================================


def in_a_row(chunks):
    return [token for chunk in chunks for token in chunk]


@right("pack")
def in_comprehensions(chunks, cached):
    ends = [sum(map(len, chunks[: place + 1])) for place in range(len(chunks))]
    pairs = zip(chunks, cached, strict=True)
    positions = [past + place for chunk, past in pairs for place in range(len(chunk))]
    columns = [[end - len(chunk), end] for chunk, end in zip(chunks, ends, strict=True)]
    return [in_a_row(chunks), positions, columns]


def packed(chunks, cached, ids=None, positions=None, columns=None):
    """A row with a part replaced; `positions` and `columns` are told of each (past, new, start)."""
    row, right_positions, right_columns = solutions.pack(chunks, cached)
    parts = [(past, end - start, start) for past, (start, end) in zip(cached, right_columns, strict=True)]
    if positions:
        right_positions = [place for part in parts for place in positions(*part)]
    if columns:
        right_columns = [columns(*part) for part in parts]
    return row if ids is None else ids, right_positions, right_columns


@wrong("pack", "the positions start with 0 again, although tokens of the request are in the cache")
def positions_restart(chunks, cached):
    return packed(chunks, cached, positions=lambda past, new, start: range(new))


@wrong("pack", "the positions run on through the row")
def positions_are_columns(chunks, cached):
    return packed(chunks, cached, positions=lambda past, new, start: range(start, start + new))


@wrong("pack", "adds the column to what is cached")
def positions_with_the_column(chunks, cached):
    return packed(chunks, cached, positions=lambda past, new, start: range(past + start, past + start + new))


@wrong("pack", "one too far: the first token of a text has position 0")
def positions_from_one(chunks, cached):
    return packed(chunks, cached, positions=lambda past, new, start: range(past + 1, past + new + 1))


@wrong("pack", "the newest of the cached tokens has that position already")
def positions_of_the_newest_cached(chunks, cached):
    return packed(chunks, cached, positions=lambda past, new, start: range(past - 1, past - 1 + new))


@wrong("pack", "all tokens of a chunk get the same position")
def one_position_a_chunk(chunks, cached):
    return packed(chunks, cached, positions=lambda past, new, start: [past] * new)


@wrong("pack", "numbers the cached tokens, too")
def positions_of_the_whole_text(chunks, cached):
    return packed(chunks, cached, positions=lambda past, new, start: range(past + new))


@wrong("pack", "As in a slice, `end` is the column behind it")
def columns_with_their_last(chunks, cached):
    return packed(chunks, cached, columns=lambda past, new, start: (start, start + new - 1))


@wrong("pack", "the columns are (start, number of tokens)")
def columns_with_a_length(chunks, cached):
    return packed(chunks, cached, columns=lambda past, new, start: (start, new))


@wrong("pack", "all requests start in column 0")
def everybody_starts_at_zero(chunks, cached):
    return packed(chunks, cached, columns=lambda past, new, start: (0, new))


@wrong("pack", "one too far to the right")
def columns_from_one(chunks, cached):
    return packed(chunks, cached, columns=lambda past, new, start: (start + 1, start + new + 1))


@wrong("pack", "the columns are the positions")
def columns_are_positions(chunks, cached):
    return packed(chunks, cached, columns=lambda past, new, start: (past, past + new))


@wrong("pack", "leave room for what is cached")
def columns_of_the_cache(chunks, cached):
    with_past = [past + len(chunk) for past, chunk in zip(cached, chunks, strict=True)]
    borders = [sum(with_past[:place]) for place in range(len(chunks) + 1)]
    return *solutions.pack(chunks, cached)[:2], list(pairwise(borders))


@wrong("pack", "a list of borders: wanted is a pair")
def borders(chunks, cached):
    ids, positions, columns = solutions.pack(chunks, cached)
    return ids, positions, [0] + [end for _, end in columns]


@wrong("pack", "should be pairs (start, end), and a range is among them")
def columns_as_ranges(chunks, cached):
    return packed(chunks, cached, columns=lambda past, new, start: range(start, start + new))


@wrong("pack", "the ids are a list for each request")
def rows_for_a_row(chunks, cached):
    return packed(chunks, cached, ids=chunks)


@wrong("pack", "the ids are a list in a list")
def a_batch_of_one(chunks, cached):
    return packed(chunks, cached, ids=[in_a_row(chunks)])


@wrong("pack", "in a row nobody has to be padded")
def padded_row(chunks, cached):
    width = max(map(len, chunks))
    return packed(chunks, cached, ids=[token for chunk in chunks for token in [0] * (width - len(chunk)) + chunk])


@wrong("pack", "sorts the requests by length")
def longest_chunk_first(chunks, cached):
    return packed(chunks, cached, ids=in_a_row(sorted(chunks, key=len)))


@wrong("pack", "has the requests backwards")
def last_request_first(chunks, cached):
    return packed(chunks, cached, ids=in_a_row(chunks[::-1]))


@wrong("pack", "all of a chunk is read")
def newest_tokens_only(chunks, cached):
    return packed(chunks, cached, ids=[chunk[-1] for chunk in chunks])


@wrong("pack", "drops tokens that come twice")
def every_token_once(chunks, cached):
    return packed(chunks, cached, ids=list(dict.fromkeys(in_a_row(chunks))))


@wrong("pack", "changed its argument")
def grows_the_first_chunk(chunks, cached):
    ids = chunks[0]
    for chunk in chunks[1:]:
        ids += chunk
    return packed(chunks, cached, ids=ids)


@wrong("pack", "should be a list of token ids, and is a tensor of int64 with shape [1, 2]")
def row_as_a_tensor(chunks, cached):
    return packed(chunks, cached, ids=torch.tensor([in_a_row(chunks)]))


@wrong("pack", "should return three things")
def row_and_positions_only(chunks, cached):
    return solutions.pack(chunks, cached)[:2]


# === lesson 5: who sees whom ======================================================================================


def owners(columns):
    return torch.tensor([number for number, (start, end) in enumerate(columns) for _ in range(start, end)])


@right("block_mask")
def by_owner(columns):
    owner = owners(columns)
    place = torch.arange(len(owner))
    return (owner[:, None] == owner[None, :]) & (place[None, :] <= place[:, None])


@right("block_mask")
def as_a_block_diagonal(columns):
    return torch.block_diag(*[torch.ones(end - start, end - start).tril() for start, end in columns]).bool()


def ones(columns):
    return torch.ones(columns[-1][1], columns[-1][1])


@wrong("block_mask", "others' texts, too: line 3 looks at column 0")
def one_triangle_for_all(columns):
    return ones(columns).tril().bool()


@wrong("block_mask", "a token sees what comes after it in its text")
def whole_squares(columns):
    return torch.block_diag(*[torch.ones(end - start, end - start) for start, end in columns]).bool()


@wrong("block_mask", "lines and columns are swapped")
def transposed_mask(columns):
    return solutions.block_mask(columns).T


@wrong("block_mask", "is upside down: True means that a token looks")
def true_hides(columns):
    return ~solutions.block_mask(columns)


@wrong("block_mask", "a token does not see itself")
def not_oneself(columns):
    return solutions.block_mask(columns).tril(-1)


@wrong("block_mask", "nothing but itself")
def only_oneself(columns):
    return torch.eye(columns[-1][1]).bool()


@wrong("block_mask", "everybody sees everything")
def all_ones(columns):
    return ones(columns).bool()


@wrong("block_mask", "the others' texts and not its own")
def others_only(columns):
    owner = owners(columns)
    return ones(columns).tril().bool() & (owner[:, None] != owner)


@wrong("block_mask", "line 3 does not look at column 3, which is in its own text")
def first_triangle_only(columns):
    return solutions.block_mask([columns[0], (columns[-1][1],) * 2])


@wrong("block_mask", "looks at column 0, which is another request's")
def everybody_sees_the_first_token(columns):
    mask = solutions.block_mask(columns).clone()
    mask[:, 0] = True
    return mask


@wrong("block_mask", "looks at column 1, which comes after it")
def one_token_ahead(columns):
    mask = solutions.block_mask(columns)
    mask[0, 1:2] = columns[0][1] > 1
    return mask


@wrong("block_mask", "holds int64, and should hold bool. What is not bool is added to the scores")
def mask_of_numbers(columns):
    return solutions.block_mask(columns).long()


@wrong("block_mask", "is a mask to add to the scores; wanted is a bool one")
def additive_mask(columns):
    return torch.zeros_like(ones(columns)).masked_fill(~solutions.block_mask(columns), float("-inf"))


@wrong("block_mask", "has shape [1, 1, 5, 5], and should have [5, 5]")
def mask_with_heads(columns):
    return solutions.block_mask(columns)[None, None]


@wrong("block_mask", "should return a tensor; it returned a list")
def mask_of_lists(columns):
    return solutions.block_mask(columns).tolist()


@wrong("block_mask", "should return a tensor; it returned None (is a `return` missing?)")
def mask_without_return(columns):
    solutions.block_mask(columns)


# === lesson 5: attention of a row =================================================================================


def softmax_by_hand(query, key, value, shift=0, scale=None, hidden=None):
    """Attention of one request, without torch's own: [heads, queries, dim]."""
    new, count = query.size(1), key.size(1)
    scores = query @ key.transpose(1, 2) * (scale or query.size(2) ** -0.5)
    seen = torch.ones(new, count).tril(count - new + shift).bool() if hidden is None else hidden(new, count)
    return scores.masked_fill(~seen, float("-inf")).softmax(dim=-1) @ value


def attended(query, keys, values, columns, of=lambda each, columns: each, **broken):
    answers = [
        softmax_by_hand(query[:, start:end], key, value, **broken)
        for (start, end), key, value in zip(columns, of(keys, columns), of(values, columns), strict=True)
    ]
    return torch.cat(answers, dim=1)


right("attend_row")(attended)


@right("attend_row")
def one_call_with_a_block_mask(query, keys, values, columns):
    """Exact, too; it computes squares that nobody looks at."""
    lengths = [key.size(1) for key in keys]
    seen = torch.zeros(query.size(1), sum(lengths), dtype=torch.bool)
    for number, (start, end) in enumerate(columns):
        before = sum(lengths[:number])
        corner = torch.ones(end - start, lengths[number]).tril(lengths[number] - (end - start)).bool()
        seen[start:end, before : before + lengths[number]] = corner
    return torch.nn.functional.scaled_dot_product_attention(query, torch.cat(keys, 1), torch.cat(values, 1), seen)


@right("attend_row")
def token_by_token_in_the_row(query, keys, values, columns):
    answer = torch.empty_like(query)
    for (start, end), key, value in zip(columns, keys, values, strict=True):
        for column in range(start, end):
            upto = key.size(1) - (end - column) + 1
            one = slice(column, column + 1)
            answer[:, one] = softmax_by_hand(query[:, one], key[:, :upto], value[:, :upto])
    return answer


@wrong("attend_row", "lines up the first query with the first key")
def is_causal(query, keys, values, columns):
    attention = torch.nn.functional.scaled_dot_product_attention
    parts = zip(columns, keys, values, strict=True)
    return torch.cat([attention(query[:, s:e], k, v, is_causal=e - s > 1) for (s, e), k, v in parts], dim=1)


@wrong("attend_row", "lines up the first query with the first key")
def always_is_causal(query, keys, values, columns):
    attention = torch.nn.functional.scaled_dot_product_attention
    parts = zip(columns, keys, values, strict=True)
    return torch.cat([attention(query[:, s:e], k, v, is_causal=True) for (s, e), k, v in parts], dim=1)


def seen_by_all(queries, keys):
    return torch.ones(queries, keys).bool()


@wrong("attend_row", "sees those that come after it in its own chunk")
def no_mask_at_all(query, keys, values, columns):
    return attended(query, keys, values, columns, hidden=seen_by_all)


@wrong("attend_row", "sees those that come after it in its own chunk")
def no_mask_with_a_past(query, keys, values, columns):
    prompt = all(key.size(1) == end - start for key, (start, end) in zip(keys, columns, strict=True))
    return attended(query, keys, values, columns, hidden=None if prompt else seen_by_all)


@wrong("attend_row", "looks at the tokens of this pass only")
def keys_of_this_pass(query, keys, values, columns):
    def newest(each, columns):
        return [one[:, start - end :] for one, (start, end) in zip(each, columns, strict=True)]

    return attended(query, keys, values, columns, of=newest)


@wrong("attend_row", "looks at everybody's keys: a query would see another request's text")
def keys_of_everybody(query, keys, values, columns):
    return attended(
        query, keys, values, columns, of=lambda each, columns: [torch.cat(each, 1)] * len(each), hidden=seen_by_all
    )


@wrong("attend_row", "puts the keys of all requests together")
def keys_of_everybody_behind_each_other(query, keys, values, columns):
    return attended(query, keys, values, columns, of=lambda each, columns: [torch.cat(each, 1)] * len(each))


@wrong("attend_row", "the row is read as one text")
def one_text(query, keys, values, columns):
    return softmax_by_hand(query, torch.cat(keys, 1), torch.cat(values, 1))


@wrong("attend_row", "takes the first request's keys for all of them")
def keys_of_the_first(query, keys, values, columns):
    return attended(query, keys, values, columns, of=lambda each, columns: [each[0]] * len(each))


@wrong("attend_row", "takes the keys backwards")
def keys_backwards(query, keys, values, columns):
    return attended(query, keys, values, columns, of=lambda each, columns: each[::-1])


@wrong("attend_row", "the answers stand side by side in another order")
def answers_backwards(query, keys, values, columns):
    right = solutions.attend_row(query, keys, values, columns)
    return torch.cat([right[:, start:end] for start, end in columns[::-1]], dim=1)


@wrong("attend_row", "keys and values are swapped")
def values_for_keys(query, keys, values, columns):
    return solutions.attend_row(query, values, keys, columns)


@wrong("attend_row", "what a query gets is made of the values")
def keys_for_values(query, keys, values, columns):
    return solutions.attend_row(query, keys, keys, columns)


@wrong("attend_row", "not divided by the square root")
def unscaled(query, keys, values, columns):
    return attended(query, keys, values, columns, scale=1.0)


@wrong("attend_row", "not by its square root")
def scaled_by_the_dimension(query, keys, values, columns):
    return attended(query, keys, values, columns, scale=1 / query.size(2))


@wrong("attend_row", "a token does not see itself")
def not_at_itself(query, keys, values, columns):
    return attended(query, keys, values, columns, shift=-1)


@wrong("attend_row", "a token sees one that comes after it")
def one_ahead(query, keys, values, columns):
    return attended(query, keys, values, columns, shift=1)


@wrong("attend_row", "the mask is upside down")
def hides_what_it_should_see(query, keys, values, columns):
    def upside_down(new, count):
        return ~torch.ones(new, count).tril(count - new).bool()

    return torch.nan_to_num(attended(query, keys, values, columns, hidden=upside_down))


@wrong("attend_row", "the answer in column 3, of request 1, is not what that request alone would get")
def first_request_only(query, keys, values, columns):
    right = solutions.attend_row(query, keys, values, columns).clone()
    right[:, columns[0][1] :] = 0
    return right


@wrong("attend_row", "keys are those of its whole text so far: there may be more of them than queries")
def square_mask(query, keys, values, columns):
    def square(new, count):
        return torch.ones(new, new).tril().bool()

    return attended(query, keys, values, columns, hidden=square)


@wrong("attend_row", "put the answers side by side again, in one")
def list_of_answers(query, keys, values, columns):
    right = solutions.attend_row(query, keys, values, columns)
    return [right[:, start:end] for start, end in columns]


@wrong("attend_row", "has shape [5, 2, 4], and should have [2, 5, 4]: as `query`")
def tokens_before_heads(query, keys, values, columns):
    return solutions.attend_row(query, keys, values, columns).transpose(0, 1)


@wrong("attend_row", "changed its argument")
def scales_in_place(query, keys, values, columns):
    query *= 0.5
    return attended(query, keys, values, columns, scale=1.0)


# === lesson 6: what blocks waste ==================================================================================


@right("unused_room")
def with_ceil(lengths, block_size):
    return sum(math.ceil(length / block_size) for length in lengths) * block_size - sum(lengths)


@right("unused_room")
def block_by_block(lengths, block_size):
    unused = 0
    for length in lengths:
        room = 0
        while room < length:
            room += block_size
        unused += room - length
    return unused


@wrong("unused_room", "a block that has been begun is taken, too")
def full_blocks_only(lengths, block_size):
    return sum(length // block_size * block_size - length for length in lengths)


@wrong("unused_room", "a further block when the last one is just full")
def always_one_more_block(lengths, block_size):
    return sum((length // block_size + 1) * block_size - length for length in lengths)


@wrong("unused_room", "counts the tokens in the last blocks")
def tokens_in_the_last_blocks(lengths, block_size):
    return sum(length % block_size for length in lengths)


@wrong("unused_room", "puts the tokens of all requests together")
def one_table_for_all(lengths, block_size):
    return -sum(lengths) % block_size


@wrong("unused_room", "gives everybody as many blocks as the longest")
def blocks_of_a_rectangle(lengths, block_size):
    return len(lengths) * math.ceil(max(lengths) / block_size) * block_size - sum(lengths)


@wrong("unused_room", "counts all the room that is taken")
def room_taken(lengths, block_size):
    return sum(lengths) + solutions.unused_room(lengths, block_size)


@wrong("unused_room", "counts blocks, not room")
def blocks_taken(lengths, block_size):
    return sum(math.ceil(length / block_size) for length in lengths)


@wrong("unused_room", "gives a share of the room")
def share_unused(lengths, block_size):
    return solutions.unused_room(lengths, block_size) / room_taken(lengths, block_size)


@wrong("unused_room", "counts blocks that are not full")
def blocks_not_full(lengths, block_size):
    return sum(length % block_size != 0 for length in lengths)


@wrong("unused_room", "the most that a request can waste")
def the_worst_case(lengths, block_size):
    return len(lengths) * (block_size - 1)


@wrong("unused_room", "has the wrong sign")
def tokens_minus_room(lengths, block_size):
    return -solutions.unused_room(lengths, block_size)


@wrong("unused_room", "lengths [6, 10, 3], blocks of 4: expected 5, got 4")
def last_request_forgotten(lengths, block_size):
    return solutions.unused_room(lengths[:-1], block_size)


@wrong("unused_room", "should return a number; it returned a list")
def each_one_s_room(lengths, block_size):
    return [-length % block_size for length in lengths]


# === lesson 6: where a token is ===================================================================================


@right("slot_of")
def from_a_list_of_all_slots(table, position, block_size):
    slots = [block * block_size + place if block >= 0 else None for block in table for place in range(block_size)]
    return slots[position] if position < len(slots) else None


@right("slot_of")
def with_an_exception(table, position, block_size):
    try:
        block = table[position // block_size]
    except IndexError:
        return None
    return block * block_size + position % block_size if block != -1 else None


def looked_up(table, position, block_size, slot):
    """`slot` of (place in the table, place in the block); None where nothing is allocated."""
    place, offset = divmod(position, block_size)
    return None if solutions.slot_of(table, position, block_size) is None else slot(place, offset)


@wrong("slot_of", "returns the number of the block")
def number_of_the_block(table, position, block_size):
    return looked_up(table, position, block_size, lambda place, offset: table[place])


@wrong("slot_of", "returns the first slot of the block")
def offset_forgotten(table, position, block_size):
    return looked_up(table, position, block_size, lambda place, offset: table[place] * block_size)


@wrong("slot_of", "adds the place to the block's number")
def block_not_multiplied(table, position, block_size):
    return looked_up(table, position, block_size, lambda place, offset: table[place] + offset)


@wrong("slot_of", "divides the wrong way")
def divided_the_wrong_way(table, position, block_size):
    return looked_up(table, position, block_size, lambda place, offset: table[offset % len(table)] * block_size + place)


@wrong("slot_of", "as if the memory were one piece")
def without_the_table(table, position, block_size):
    return looked_up(table, position, block_size, lambda place, offset: position)


@wrong("slot_of", "returns the place in the table")
def place_in_the_table(table, position, block_size):
    return looked_up(table, position, block_size, lambda place, offset: place)


@wrong("slot_of", "returns the place in the block only")
def place_in_the_block(table, position, block_size):
    return looked_up(table, position, block_size, lambda place, offset: offset)


@wrong("slot_of", "counts tokens from 1")
def tokens_from_one(table, position, block_size):
    before = max(position - 1, 0)
    return looked_up(
        table,
        position,
        block_size,
        lambda place, offset: table[before // block_size] * block_size + (position - 1) % block_size,
    )


@wrong("slot_of", "is one slot too far")
def slots_from_one(table, position, block_size):
    return looked_up(table, position, block_size, lambda place, offset: table[place] * block_size + offset + 1)


@wrong("slot_of", "as many slots in a block as the table has entries")
def as_large_as_the_table(table, position, block_size):
    return looked_up(table, position, block_size, lambda place, offset: table[place] * len(table) + offset)


@wrong("slot_of", "adds the token's own number")
def position_behind_the_block(table, position, block_size):
    return looked_up(table, position, block_size, lambda place, offset: table[place] * block_size + position)


@wrong("slot_of", "takes -1 for a block and says slot -3")
def minus_one_is_a_block(table, position, block_size):
    return table[position // block_size] * block_size + position % block_size


@wrong("slot_of", "To Python, place -1 is the last one")
def minus_one_for_nothing(table, position, block_size):
    slot = solutions.slot_of(table, position, block_size)
    return -1 if slot is None else slot


@wrong("slot_of", "A token that the table has no entry for has no slot")
def table_is_long_enough(table, position, block_size):
    block = table[position // block_size]
    return None if block == -1 else block * block_size + position % block_size


@wrong("slot_of", "says 1, but there is no block for this token")
def last_block_for_all_behind(table, position, block_size):
    if not table or table[min(position // block_size, len(table) - 1)] == -1:
        return None
    return table[min(position // block_size, len(table) - 1)] * block_size + position % block_size


@wrong("slot_of", "Block 0 is a block like any other")
def block_zero_is_none(table, position, block_size):
    slot = solutions.slot_of(table, position, block_size)
    return slot if slot and table[position // block_size] else None


@wrong("slot_of", "Block 0 is a block like any other")
def slot_zero_is_none(table, position, block_size):
    return solutions.slot_of(table, position, block_size) or None


@wrong("slot_of", "says None, but there is a block for this token")
def begun_tables_only(table, position, block_size):
    return solutions.slot_of(table, position, block_size) if -1 not in table else None


@wrong("slot_of", "returns a fraction, and a slot is a whole number")
def slots_as_floats(table, position, block_size):
    slot = solutions.slot_of(table, position, block_size)
    return slot if slot is None else float(slot)


@wrong("slot_of", "stopped with TypeError in line")
def true_division(table, position, block_size):
    return table[position / block_size] * block_size + position % block_size


@wrong("slot_of", "should return a number or None; it returned a tuple")
def block_and_place(table, position, block_size):
    return looked_up(table, position, block_size, lambda place, offset: (table[place], offset))


# === lesson 6: who has which block ================================================================================


@right("allocate")
def block_after_block(free, tables, request, tokens, block_size):
    table = list(tables.get(request, []))
    spare = list(free)
    while len(table) * block_size < tokens:
        if not spare:
            return False
        table.append(spare.pop())  # which of them makes no difference
    tables[request], free[:] = table, spare
    return True


@right("allocate")
def with_slices(free, tables, request, tokens, block_size):
    needed = math.ceil(tokens / block_size) - len(tables.get(request, ()))
    if len(free) < needed:
        return False
    tables.setdefault(request, []).extend(free[:needed])
    del free[:needed]
    return True


def taken(
    free,
    tables,
    request,
    tokens,
    block_size,
    blocks_for=lambda tokens, size: -(-tokens // size),
    missing=lambda whole, had: whole - had,
    enough=lambda missing, free: missing <= len(free),
    take=lambda free, missing: [free.pop(0) for _ in range(missing)],
    joined=lambda table, new: table + new,
):
    """An allocator with parts to be broken."""
    table = tables.get(request, [])
    number = missing(blocks_for(tokens, block_size), len(table))
    if not enough(number, free):
        return False
    tables[request] = joined(table, take(free, number))
    return True


right("allocate")(taken)


@wrong("allocate", "takes 2 blocks where 3 are needed: 3 tokens do not fill a block, but need one as well")
def rounded_down(*arguments):
    return taken(*arguments, blocks_for=lambda tokens, size: tokens // size)


@wrong("allocate", "takes 3 blocks where 2 are needed: 8 tokens fill 2 blocks of 4 exactly")
def one_block_ahead(*arguments):
    return taken(*arguments, blocks_for=lambda tokens, size: tokens // size + 1)


@wrong("allocate", "takes 3 blocks where 1 is needed: 9 is the number of all its tokens")
def as_if_new(*arguments):
    return taken(*arguments, missing=lambda whole, had: whole)


@wrong("allocate", "refuses, although 3 blocks are needed and 4 are free")
def a_block_a_token(*arguments):
    return taken(*arguments, blocks_for=lambda tokens, size: tokens)


@wrong("allocate", "takes 1 block where 3 are needed (free")
def one_block_at_a_time(*arguments):
    return taken(*arguments, missing=lambda whole, had: min(whole - had, 1))


@wrong("allocate", "all that are free: others need some, too")
def takes_all(*arguments):
    return taken(*arguments, take=lambda free, missing: [free.pop() for _ in range(len(free))] if missing else [])


@wrong("allocate", "although 2 blocks are needed and 2 are free: it is just enough")
def keeps_one_back(*arguments):
    return taken(*arguments, enough=lambda missing, free: missing < len(free) or missing < 1)


@wrong("allocate", "refuses, although no block is needed")
def refuses_when_nothing_is_free(free, tables, request, tokens, block_size):
    return bool(free) and taken(free, tables, request, tokens, block_size)


@wrong("allocate", "although 2 more are needed and 2 are free: block 1 is there already")
def compares_the_whole(free, tables, request, tokens, block_size):
    return -(-tokens // block_size) <= len(free) and taken(free, tables, request, tokens, block_size)


@wrong("allocate", "promises room that is not there: 3 more blocks would be needed, and 2 are free")
def as_many_as_there_are(*arguments):
    return taken(
        *arguments,
        enough=lambda missing, free: True,
        take=lambda free, missing: [free.pop(0) for _ in range(min(missing, len(free)))],
    )


@wrong("allocate", "refuses, and keeps blocks 3, 7")
def half_an_allocation(free, tables, request, tokens, block_size):
    while len(tables.get(request, [])) * block_size < tokens:
        if not free:
            return False
        tables[request] = [*tables.get(request, []), free.pop(0)]
    return True


@wrong("allocate", "refuses, and takes 2 blocks out of `free`")
def taken_and_forgotten(free, tables, request, tokens, block_size):
    table = list(tables.get(request, []))
    while len(table) * block_size < tokens:
        if not free:
            return False
        table.append(free.pop(0))
    tables[request] = table
    return True


@wrong("allocate", "leaves an empty table behind")
def table_before_asking(free, tables, request, tokens, block_size):
    tables.setdefault(request, [])
    return taken(free, tables, request, tokens, block_size)


@wrong("allocate", "find that out before you take the first one")
def pops_from_nothing(*arguments):
    return taken(*arguments, enough=lambda missing, free: True)


@wrong("allocate", "A newcomer has no table yet")
def everybody_has_a_table(free, tables, request, tokens, block_size):
    tables[request] += [free.pop() for _ in range(-(-tokens // block_size) - len(tables[request]))]
    return True


@wrong("allocate", "leaves blocks 3, 7, 1 in `free`: the next request would get the same block")
def given_out_and_still_free(*arguments):
    return taken(*arguments, take=lambda free, missing: free[:missing])


@wrong("allocate", "gives out block 3 twice")
def one_block_twice(*arguments):
    return taken(*arguments, take=lambda free, missing: [free.pop(0)] * missing if missing else [])


@wrong("allocate", "gives out blocks 0, 2, and free were [3, 7, 1, 5]: somebody's tokens may be there")
def numbers_instead_of_blocks(*arguments):
    def first_numbers(free, missing):
        del free[:missing]
        return list(range(missing))

    return taken(*arguments, take=first_numbers)


@wrong("allocate", "neither free nor in a table")
def free_is_emptied(*arguments):
    def first_and_all_gone(free, missing):
        first = free[:missing]
        free.clear()
        return first

    return taken(*arguments, take=first_and_all_gone)


@wrong("allocate", "loses blocks 0, 2: the tokens so far are there")
def new_table_each_time(*arguments):
    return taken(*arguments, joined=lambda table, new: new or table)


@wrong("allocate", "puts new blocks before the old ones")
def new_blocks_in_front(*arguments):
    return taken(*arguments, joined=lambda table, new: new + table)


@wrong("allocate", "have to stay the first")
def table_sorted(*arguments):
    return taken(*arguments, joined=lambda table, new: sorted(table + new, reverse=True))


@wrong("allocate", "gives a newcomer no table")
def newcomer_without_a_table(free, tables, request, tokens, block_size):
    table = tables.get(request, [])
    missing = -(-tokens // block_size) - len(table)
    if missing > len(free):
        return False
    table += [free.pop(0) for _ in range(missing)]
    return True


@wrong("allocate", "returns nothing, although the room is there now")
def says_nothing(free, tables, request, tokens, block_size):
    taken(free, tables, request, tokens, block_size)


@wrong("allocate", "changes nothing and returns nothing")
def changes_copies(free, tables, request, tokens, block_size):
    taken(list(free), dict(tables), request, tokens, block_size)


@wrong("allocate", "changes the table of a, and c was asked for")
def takes_from_others(free, tables, request, tokens, block_size):
    done = taken(free, tables, request, tokens, block_size)
    tables["a"] = tables["a"][:1]
    return done


@wrong("allocate", "the table of c should hold numbers of blocks, and holds [3, 7, 1]")
def list_in_a_table(*arguments):
    return taken(*arguments, joined=lambda table, new: [*table, new])


@right("release")
def block_by_block_unless_shared(free, tables, request):
    for block in reversed(tables[request]):
        if sum(block in table for table in tables.values()) == 1:
            free.insert(0, block)
    del tables[request]


@right("release")
def by_counting_references(free, tables, request):
    references = Counter(block for table in tables.values() for block in table)
    for block in tables.pop(request):
        references[block] -= 1
        if references[block] == 0:
            free.append(block)
    return True


@wrong("release", "which another table has, too: the next request would overwrite keys")
def everything_back(free, tables, request):
    free.extend(tables.pop(request))


@wrong("release", "gives nothing back because some blocks are shared")
def nothing_while_shared(free, tables, request):
    table = tables.pop(request)
    if not any(block in other for other in tables.values() for block in table):
        free.extend(table)


@wrong("release", "neither in a table nor free, so nobody can ever have them again")
def freed_blocks_lost(free, tables, request):
    tables.pop(request)


@wrong("release", "loses blocks 0, 1: neither in a table nor free")
def last_block_only(free, tables, request):
    free.append(tables.pop(request)[-1])


@wrong("release", "`free` itself has to change: a new list with its name is another list")
def a_new_free_list(free, tables, request):
    free = free + tables.pop(request)  # a name for another list, and the caller's stays as it was


@wrong("release", "changes nothing: its blocks go to `free`, and its table goes away")
def nothing_at_all(free, tables, request):
    pass


@wrong("release", "keeps the table: whoever has left holds nothing")
def table_stays(free, tables, request):
    solutions.release(free, dict(tables), request)


@wrong("release", "leaves an empty table behind")
def table_emptied(free, tables, request):
    solutions.release(free, tables, request)
    tables[request] = []


@wrong("release", "`free` should hold numbers of blocks, and holds [0, 1, 3]")
def table_into_free(free, tables, request):
    free.append(tables.pop(request))


@wrong("release", "in `free` twice: two requests would get the same")
def freed_twice(free, tables, request):
    table = tables[request]
    solutions.release(free, tables, request)
    free += [block for block in table if block in free]


@wrong("release", "changes the table of b, and a was asked for")
def shared_blocks_taken_away(free, tables, request):
    table = tables.pop(request)
    free.extend(table)
    for name, other in tables.items():
        tables[name] = [block for block in other if block not in table]


@wrong("release", "what was free before still is")
def free_replaced(free, tables, request):
    table = tables[request]
    before = list(free)
    solutions.release(free, tables, request)
    free[:] = [block for block in free if block in table and block not in before]


@wrong("release", "which were never its own")
def numbers_given_back(free, tables, request):
    free.extend(block for block in range(10, 10 + len(tables.pop(request))))


# === lesson 6: who begins alike ===================================================================================


@right("prefix_hashes")
def with_sha256(token_ids, block_size):
    name, names = "", []
    for end in range(block_size, len(token_ids) + 1, block_size):
        name = sha256(f"{name}{token_ids[end - block_size : end]}".encode()).hexdigest()
        names.append(name)
    return names


@right("prefix_hashes")
def everything_before_as_the_name(token_ids, block_size):
    """No hash at all, and as good as one, but for its length."""
    return [tuple(token_ids[:end]) for end in range(block_size, len(token_ids) + 1, block_size)]


@right("prefix_hashes")
def the_engine_s_own_chain(token_ids, block_size):
    return BlockManager(1, block_size)._hashes(Sequence(0, token_ids, 1), len(token_ids))


def named(token_ids, size, name=lambda before, block: hash((before, *block)), start=0):
    """A chain of names with parts to be broken."""
    names, before = [], start
    for end in range(size, len(token_ids) + 1, size):
        before = name(before, token_ids[end - size : end])
        names.append(before)
    return names


@wrong("prefix_hashes", "looks at a block's own tokens only. Its keys have seen everything before it")
def own_tokens_only(token_ids, block_size):
    return named(token_ids, block_size, lambda before, block: hash(tuple(block)))


@wrong("prefix_hashes", "looks at a block's own tokens only. Its keys have seen everything before it")
def own_tokens_and_place(token_ids, block_size):
    return [(place, own) for place, own in enumerate(own_tokens_only(token_ids, block_size))]


@wrong("prefix_hashes", "the order of the tokens makes no difference to the name")
def sums_of_tokens(token_ids, block_size):
    return named(token_ids, block_size, lambda before, block: hash((before, sum(block))))


@wrong("prefix_hashes", "the order of the blocks before makes no difference")
def sums_of_names(token_ids, block_size):
    return named(token_ids, block_size, lambda before, block: before + hash(tuple(block)))


@wrong("prefix_hashes", "looks back one block only")
def one_block_back(token_ids, block_size):
    own = [tuple(token_ids[end - block_size : end]) for end in range(block_size, len(token_ids) + 1, block_size)]
    return [hash((own[place - 1] if place else None, block)) for place, block in enumerate(own)]


@wrong("prefix_hashes", "leaves out a part of the past")
def first_block_and_own(token_ids, block_size):
    first = tuple(token_ids[:block_size])
    return [hash((first, place, own)) for place, own in enumerate(own_tokens_only(token_ids, block_size))]


@wrong("prefix_hashes", "all of a block's own tokens belong to its name")
def first_token_of_each_block(token_ids, block_size):
    return named(token_ids, block_size, lambda before, block: hash((before, block[0])))


@wrong("prefix_hashes", "all of a block's own tokens belong to its name")
def last_token_of_each_block(token_ids, block_size):
    return named(token_ids, block_size, lambda before, block: hash((before, block[-1])))


@wrong("prefix_hashes", "gives all blocks the same name")
def length_of_each_block(token_ids, block_size):
    return named(token_ids, block_size, lambda before, block: hash(len(block)))


@wrong("prefix_hashes", "all of a block's own tokens belong to its name")
def past_without_the_block(token_ids, block_size):
    ends = range(block_size, len(token_ids) + 1, block_size)
    return [tuple(token_ids[: end - block_size]) for end in ends]


@wrong("prefix_hashes", "writes the numbers of the tokens together")
def numbers_written_together(token_ids, block_size):
    return named(token_ids, block_size, lambda before, block: before + "|" + "".join(map(str, block)), start="")


@wrong("prefix_hashes", "gives a name to the last block, which is not full")
def rest_has_a_name(token_ids, block_size):
    ends = range(0, len(token_ids), block_size)
    return [tuple(token_ids[: end + block_size]) for end in ends]


@wrong("prefix_hashes", "leaves out the last block, which is just full")
def last_full_block_left_out(token_ids, block_size):
    return named(token_ids[:-1], block_size)


@wrong("prefix_hashes", "does one stand for the empty beginning?")
def with_the_empty_beginning(token_ids, block_size):
    return [0, *named(token_ids, block_size)]


@wrong("prefix_hashes", "one for each block, not for each token")
def a_name_a_token(token_ids, block_size):
    return named(token_ids, 1)


@wrong("prefix_hashes", "has one name for the whole text")
def one_name_for_all(token_ids, block_size):
    return [hash(tuple(token_ids))]


@wrong("prefix_hashes", "depends on what comes after it")
def the_whole_text_in_every_name(token_ids, block_size):
    whole = tuple(token_ids[: len(token_ids) // block_size * block_size])
    return named(token_ids, block_size, lambda before, block: hash((before, whole, *block)))


@wrong("prefix_hashes", "the tokens behind the last full block change the name of that block")
def the_rest_in_every_name(token_ids, block_size):
    return named(token_ids, block_size, lambda before, block: hash((before, *token_ids, *block)))


@wrong("prefix_hashes", "depends on how long the text is")
def the_length_in_every_name(token_ids, block_size):
    return named(token_ids, block_size, lambda before, block: hash((before, len(token_ids) // block_size, *block)))


@wrong("prefix_hashes", "has the names backwards")
def last_block_first(token_ids, block_size):
    return named(token_ids, block_size)[::-1]


@wrong("prefix_hashes", "other names the second time")
def new_names_each_time(token_ids, block_size):
    return named(token_ids, block_size, lambda before, block: object())


@wrong("prefix_hashes", "fit for the key of a dict, and is a list")
def lists_as_names(token_ids, block_size):
    return [token_ids[:end] for end in range(block_size, len(token_ids) + 1, block_size)]


@wrong("prefix_hashes", "should return a list, a name for each full block; it returned a set")
def a_set_of_names(token_ids, block_size):
    return set(named(token_ids, block_size))


@wrong("prefix_hashes", "has 3 names, and there are 4 full blocks")
def blocks_of_four(token_ids, block_size):
    return named(token_ids, 4)


# === lesson 7: events out of a stream =============================================================================


@right("read_events")
def line_by_line_in_bytes(pieces):
    rest, data = bytearray(), []
    for piece in pieces:
        rest += piece
        while (end := rest.find(b"\n")) >= 0:
            line, rest = bytes(rest[:end]), rest[end + 1 :]
            if line[:5] == b"data:":
                data.append(line[5:].lstrip())
            elif not line and data:
                text, data = b"\n".join(data), []
                if text == b"[DONE]":
                    return
                yield json.loads(text)


@right("read_events")
def with_a_decoder_that_waits(pieces):
    decode, text = codecs.getincrementaldecoder("utf-8")().decode, ""
    for piece in pieces:
        text += decode(piece)
        while "\n\n" in text:
            event, _, text = text.partition("\n\n")
            data = "".join(line[5:] for line in event.split("\n") if line.startswith("data:"))
            if data.strip() == "[DONE]":
                return
            if data:
                yield json.loads(data)


@right("read_events")
class AnIterator:
    """A class with `__next__` in the place of a generator."""

    def __init__(self, pieces):
        self.events = solutions.read_events(pieces)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.events)


def data_of(event, prefix="data:"):
    """What an event's bytes say behind `data:`."""
    lines = event.decode().split("\n")
    return "\n".join(line.removeprefix(prefix).strip() for line in lines if line.startswith(prefix))


def listened(pieces, data=data_of, parse=json.loads, join=lambda rest, piece: rest + piece, at_end=lambda rest: []):
    """A reader with parts to be broken."""
    rest = b""
    for piece in pieces:
        *events, rest = join(rest, piece).split(b"\n\n")
        for event in events:
            text = data(event)
            if text == "[DONE]":
                return
            if text:
                yield parse(text)
    yield from at_end(rest)


right("read_events")(listened)


@wrong("read_events", "stopped with JSONDecodeError")
def a_piece_is_an_event(pieces):
    for piece in pieces:
        text = data_of(piece.strip())
        if text == "[DONE]":
            return
        yield json.loads(text)


@wrong("read_events", "loses {'n': 2}. A stream is cut anywhere")
def one_event_a_piece(pieces):
    for piece in pieces:
        text = data_of(piece.partition(b"\n\n")[0])
        if text == "[DONE]":
            return
        if text:
            yield json.loads(text)


@wrong("read_events", "A stream is cut anywhere: keep what has come")
def nothing_is_kept(pieces):
    return listened(pieces, join=lambda rest, piece: piece)


@wrong("read_events", "A stream is cut anywhere: keep what has come")
def lines_of_each_piece(pieces):
    for piece in pieces:
        for line in piece.split(b"\n"):
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data:"):
                yield json.loads(line[5:])


@wrong("read_events", "The bytes of a character may come in two pieces")
def pieces_are_decoded(pieces):
    text = ""
    for piece in pieces:
        text += piece.decode()
        *events, text = text.split("\n\n")
        for event in events:
            data = data_of(event.encode())
            if data == "[DONE]":
                return
            if data:
                yield json.loads(data)


@wrong("read_events", "yields {'text': ' ber'}, and should yield {'text': '🦊 über'}")
def lost_characters(pieces):
    return solutions.read_events(piece.decode(errors="ignore").encode() for piece in pieces)


@wrong("read_events", "�ber'}, and should yield {'text': '🦊 über'}")
def replaced_characters(pieces):
    return solutions.read_events(piece.decode(errors="replace").encode() for piece in pieces)


@wrong("read_events", "should yield {'text': '🦊 über'}")
def another_encoding(pieces):
    return listened(pieces, data=lambda event: data_of(event.decode("latin-1").encode()))


@wrong("read_events", "reads the whole stream before anything comes out")
def joined_first(pieces):
    return listened([b"".join(pieces)])


@wrong("read_events", "reads the whole stream before anything comes out")
def collected_and_then_iterated(pieces):
    return iter(list(solutions.read_events(pieces)))


@wrong("read_events", "returns a list, when the stream is over: nobody could read along")
def returned_as_a_list(pieces):
    return list(solutions.read_events(pieces))


@wrong("read_events", "back until more has come")
def one_event_late(pieces):
    before = None
    for event in solutions.read_events(pieces):
        if before is not None:
            yield before
        before = event
    if before is not None:
        yield before


@wrong("read_events", "back until more has come")
def looks_at_the_rest_first(pieces):
    rest = b""
    for piece in pieces:
        *events, rest = rest.split(b"\n\n")
        rest += piece
        for event in events:
            if data_of(event) == "[DONE]":
                return
            if data_of(event):
                yield json.loads(data_of(event))


@wrong("read_events", "before its empty line has come. Another `data:` line may belong to it")
def at_the_end_of_a_line(pieces):
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            text = data_of(line)
            if text == "[DONE]":
                return
            if text:
                yield json.loads(text)


@wrong("read_events", "Another `data:` line may belong to it")
def as_soon_as_it_can_be_parsed(pieces):
    rest = b""
    for piece in pieces:
        rest = (rest + piece).lstrip()
        while rest.startswith(b"data:"):
            if rest[5:].strip().startswith(b"[DONE]"):
                return
            try:
                event, end = json.JSONDecoder().raw_decode(rest[5:].decode().lstrip())
            except ValueError:
                break
            yield event
            rest = rest[5:].lstrip()[len(rest[5:].decode().lstrip()[:end].encode()) :].lstrip()


@wrong("read_events", "Only what stands behind `data:` is JSON")
def data_and_all(pieces):
    return listened(pieces, parse=lambda text: json.loads("data: " + text))


@wrong("read_events", "yields a str: wanted is what the JSON of an event says, parsed")
def not_parsed(pieces):
    return listened(pieces, parse=str)


@wrong("read_events", "`[DONE]` is no JSON: it says that the stream is over")
def done_is_parsed(pieces):
    return listened(pieces, data=lambda event: data_of(event).replace("[DONE]", " [DONE]").lstrip() + " ")


@wrong("read_events", "yields `[DONE]`: that is no event")
def done_is_an_event(pieces):
    return listened(
        pieces,
        data=lambda event: data_of(event) + " ",
        parse=lambda text: text.strip() if "[DONE]" in text else json.loads(text),
    )


@wrong("read_events", "A line that begins with `:` is a comment")
def comments_are_data(pieces):
    return listened(pieces, data=lambda event: event.decode().removeprefix("data:").strip())


@wrong("read_events", "A line that begins with `:` is a comment")
def comments_are_empty_events(pieces):
    return listened(pieces, data=lambda event: data_of(event) or "{}")


@wrong("read_events", "A line that begins with `:` is a comment")
def comments_swallow_their_event(pieces):
    return listened(pieces, data=lambda event: "" if event.startswith(b":") else data_of(event))


@wrong("read_events", "Lines that begin with something else than `data:` are no data")
def events_begin_with_data(pieces):
    return listened(
        pieces,
        data=lambda event: (
            data_of(b"\n".join(line for line in event.split(b"\n") if line[:1] != b":"))
            if event.startswith((b"data", b":"))
            else ""
        ),
    )


@wrong("read_events", "The blank behind `data:` may be missing")
def with_a_blank_only(pieces):
    return listened(pieces, data=lambda event: data_of(event, "data: "))


@wrong("read_events", "The blank behind `data:` may be missing")
def six_characters_cut(pieces):
    def behind(event):
        return "\n".join(line[6:] for line in event.decode().split("\n") if line.startswith("data:"))

    return listened(pieces, data=behind)


@wrong("read_events", "The lines of an event belong together")
def each_data_line_an_event(pieces):
    rest = b""
    for piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                text = data_of(line)
                if text == "[DONE]":
                    return
                if text:
                    yield json.loads(text)


@wrong("read_events", "The lines of an event belong together")
def last_data_line_of_an_event(pieces):
    return listened(pieces, data=lambda event: data_of(event).rpartition("\n")[2])


@wrong("read_events", "What a text says does not end a stream")
def done_anywhere(pieces):
    return listened(pieces, data=lambda event: "[DONE]" if b"[DONE]" in event else data_of(event))


@wrong("read_events", "In a text, `data:` has no meaning")
def split_at_data(pieces):
    return listened(
        pieces, data=lambda event: "".join(part.strip() for part in data_of(event).replace("data:", "").split("\n"))
    )


@wrong("read_events", "`str.splitlines` cuts at other characters, too")
def with_splitlines(pieces):
    return listened(
        pieces, data=lambda event: "\n".join(data_of(line.encode()) for line in event.decode().splitlines())
    )


@wrong("read_events", "goes on reading behind `[DONE]`")
def reads_on_behind_done(pieces):
    return listened(pieces, data=lambda event: data_of(event).replace("[DONE]", ""))


@wrong("read_events", "`[DONE]` is the end, whatever comes behind it")
def finishes_the_piece(pieces):
    rest, done = b"", False
    for piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for text in filter(None, map(data_of, events)):
            done = done or text == "[DONE]"
            if text != "[DONE]":
                yield json.loads(text)
        if done:
            return


@wrong("read_events", "goes on reading behind `[DONE]`")
def waits_for_the_connection_to_end(pieces):
    pieces = iter(pieces)
    yield from solutions.read_events(pieces)
    for _ in pieces:
        pass


@wrong("read_events", "What has no empty line behind it is not whole")
def the_rest_is_an_event(pieces):
    return listened(pieces, at_end=lambda rest: [json.loads(data_of(rest))] if rest else [])


@wrong("read_events", "What has no empty line behind it is not whole")
def the_rest_if_it_can_be_parsed(pieces):
    def parsed(rest):
        try:
            return [json.loads(data_of(rest))]
        except ValueError:
            return []

    return listened(pieces, at_end=parsed)


@wrong("read_events", "go through them")
def pieces_by_their_numbers(pieces):
    for number in range(len(pieces)):
        yield json.loads(pieces[number])


@wrong("read_events", "should yield the events one after the other; it returned None (is a `yield` missing?)")
def prints_the_events(pieces):
    for event in listened(pieces):
        str(event)


@wrong("read_events", "should yield the events one after the other; it returned a dict")
def first_event_only(pieces):
    return next(listened(pieces))


@wrong("read_events", "is called as read_events(pieces), and your function does not take that")
def from_nowhere():
    yield {"n": 1}


@wrong("read_events", "yields {}, and should yield {'n': 1}")
def for_ever(pieces):
    while True:
        yield {}


# === lesson 7: when requests are sent =============================================================================


@right("poisson_arrivals")
def time_goes_on(rate, count, random):
    times, now = [], 0.0
    while len(times) < count:
        now += random.expovariate(rate)
        times.append(now)
    return times


@right("poisson_arrivals")
def unit_gaps_divided(rate, count, random):
    gaps = [random.expovariate(1.0) / rate for _ in range(count)]
    return [sum(gaps[: place + 1]) for place in range(count)]


@right("poisson_arrivals")
def by_the_inverse_of_the_distribution(rate, count, random):
    """What `expovariate` does."""
    return tuple(accumulate(-math.log(1 - random.random()) / rate for _ in range(count)))


def gaps_only(rate, count, random):
    return [random.expovariate(rate) for _ in range(count)]


wrong("poisson_arrivals", "returns the gaps. A request is sent one gap after the one before")(gaps_only)


@wrong("poisson_arrivals", "returns the gaps by their length")
def gaps_sorted(rate, count, random):
    return sorted(gaps_only(rate, count, random))


@wrong("poisson_arrivals", "sends at fixed gaps")
def fixed_gaps(rate, count, random):
    return [number / rate for number in range(count)]


@wrong("poisson_arrivals", "sends at fixed gaps")
def fixed_gaps_from_the_first_gap(rate, count, random):
    return [(number + 1) / rate for number in range(count)]


@wrong("poisson_arrivals", "never draws from the generator that is handed over")
def rate_for_gap(rate, count, random):
    return [number * rate for number in range(count)]


@wrong("poisson_arrivals", "sends the first request at 0")
def first_at_zero(rate, count, random):
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += random.expovariate(rate)
    return times


@wrong("poisson_arrivals", "sends the first request at 0")
def counted_from_the_first(rate, count, random):
    times = solutions.poisson_arrivals(rate, count, random)
    return [time - times[0] for time in times]


@wrong("poisson_arrivals", "the gaps are `rate` seconds in the mean")
def rate_upside_down(rate, count, random):
    return list(accumulate(random.expovariate(1 / rate) for _ in range(count)))


@wrong("poisson_arrivals", "the gaps are `rate` seconds in the mean")
def multiplied_by_the_rate(rate, count, random):
    return list(accumulate(random.expovariate(1) * rate for _ in range(count)))


@wrong("poisson_arrivals", "never uses the rate")
def one_a_second(rate, count, random):
    return list(accumulate(random.expovariate(1) for _ in range(count)))


@wrong("poisson_arrivals", "counts in milliseconds")
def in_milliseconds(rate, count, random):
    return [1000 * time for time in solutions.poisson_arrivals(rate, count, random)]


@wrong("poisson_arrivals", "spreads the requests evenly over a fixed time")
def sorted_uniform(rate, count, random):
    return sorted(random.uniform(0, count / rate) for _ in range(count))


@wrong("poisson_arrivals", "spreads the requests evenly over a fixed time")
def unsorted_uniform(rate, count, random):
    return [random.random() * count / rate for _ in range(count)]


@wrong("poisson_arrivals", "the gaps are drawn evenly")
def uniform_gaps(rate, count, random):
    return list(accumulate(random.uniform(0, 2 / rate) for _ in range(count)))


@wrong("poisson_arrivals", "the gaps are drawn evenly")
def gaps_up_to_the_mean(rate, count, random):
    return list(accumulate(random.random() / rate for _ in range(count)))


@wrong("poisson_arrivals", "adds a fixed gap to each drawn one")
def both_gaps(rate, count, random):
    return list(accumulate(1 / rate + random.expovariate(rate) for _ in range(count)))


@wrong("poisson_arrivals", "bursts are what a server has to stand")
def half_fixed(rate, count, random):
    return list(accumulate(0.5 / rate + random.expovariate(rate) / 2 for _ in range(count)))


@wrong("poisson_arrivals", "the numbers are not those of `expovariate`")
def with_another_formula(rate, count, random):
    return list(accumulate(-math.log(random.random()) / rate for _ in range(count)))


@wrong("poisson_arrivals", "draws one gap for all")
def one_gap_for_all(rate, count, random):
    gap = random.expovariate(rate)
    return [gap * (number + 1) for number in range(count)]


@wrong("poisson_arrivals", "has the times backwards")
def last_one_first(rate, count, random):
    return solutions.poisson_arrivals(rate, count, random)[::-1]


@wrong("poisson_arrivals", "stretches the times until the rate is met exactly")
def met_exactly(rate, count, random):
    times = solutions.poisson_arrivals(rate, count, random)
    return [time * count / rate / times[-1] for time in times]


@wrong("poisson_arrivals", "rounds to whole seconds")
def rounded_times(rate, count, random):
    return [round(time) for time in solutions.poisson_arrivals(rate, count, random)]


@wrong("poisson_arrivals", "rounds the gaps to whole seconds")
def rounded_gaps(rate, count, random):
    return list(accumulate(round(random.expovariate(rate)) for _ in range(count)))


@wrong("poisson_arrivals", "adds up two gaps for each request")
def two_gaps_each(rate, count, random):
    return list(accumulate(random.expovariate(rate) + random.expovariate(rate) for _ in range(count)))


@wrong("poisson_arrivals", "draws two numbers for each request and uses one")
def draws_and_forgets(rate, count, random):
    times = []
    for _ in range(count):
        random.expovariate(rate)  # to see what it gives
        times.append((times or [0])[-1] + random.expovariate(rate))
    return times


@wrong("poisson_arrivals", "never draws from the generator that is handed over")
def the_module_s_own_generator(rate, count, random):
    return solutions.poisson_arrivals(rate, count, Random())


@wrong("poisson_arrivals", "never draws from the generator that is handed over")
def a_generator_of_its_own(rate, count, random):
    return solutions.poisson_arrivals(rate, count, Random(0))


@wrong("poisson_arrivals", "gives the same times whatever generator is handed over")
def sets_the_seed(rate, count, random):
    random.seed(0)
    return solutions.poisson_arrivals(rate, count, random)


@wrong("poisson_arrivals", "the list has length 5, and should have 6: a send time for each request")
def gaps_between_requests(rate, count, random):
    return solutions.poisson_arrivals(rate, max(count - 1, 0), random)


@wrong("poisson_arrivals", "and should have 6")
def until_the_time_is_over(rate, count, random):
    times = [random.expovariate(rate)]
    while times[-1] < count / rate:
        times.append(times[-1] + random.expovariate(rate))
    return times[:-1]


@wrong("poisson_arrivals", "should return a list, a send time for each request; it returned an accumulate")
def not_yet_a_list(rate, count, random):
    return accumulate(random.expovariate(rate) for _ in range(count))


@wrong("poisson_arrivals", "should hold numbers, a send time for each request, and a tuple is in it")
def numbered_times(rate, count, random):
    return list(enumerate(solutions.poisson_arrivals(rate, count, random)))


@wrong("poisson_arrivals", "request 0, rate 2, count 6, Random(1): expected")
def normal_gaps(rate, count, random):
    return list(accumulate(abs(random.gauss(1 / rate, 1 / rate)) for _ in range(count)))


@wrong("poisson_arrivals", "request 1, rate 2, count 6, Random(1): expected")
def each_from_the_rate_so_far(rate, count, random):
    return [random.expovariate(rate) * (number + 1) for number in range(count)]


# === lesson 7: how long each takes ================================================================================


@right("open_loop_latencies")
def by_what_is_left_of_the_wait(arrivals, service_seconds):
    """Lindley's recursion: the next one's latency is its work and what the gap leaves of the latency before."""
    latencies = []
    for number, seconds in enumerate(service_seconds):
        left = max(0, latencies[-1] - (arrivals[number] - arrivals[number - 1])) if number else 0
        latencies.append(left + seconds)
    return latencies


@right("open_loop_latencies")
def by_the_latest_idle_moment(arrivals, service_seconds):
    return [
        max(arrivals[first] + sum(service_seconds[first : last + 1]) for first in range(last + 1)) - arrivals[last]
        for last in range(len(arrivals))
    ]


def answered(arrivals, service_seconds, begin=lambda sent, free: max(sent, free), free=lambda begin, end: end):
    """(send time, begin, end) of each, with parts to be broken."""
    times, until = [], 0
    for sent, seconds in zip(arrivals, service_seconds, strict=True):
        start = begin(sent, until)
        times.append((sent, start, start + seconds))
        until = free(start, start + seconds)
    return times


@right("open_loop_latencies")
def end_minus_sent(arrivals, service_seconds):
    return [end - sent for sent, _, end in answered(arrivals, service_seconds)]


@wrong("open_loop_latencies", "nobody ever waits here. That is what a client sees that sends only after the answer")
def from_the_begin(arrivals, service_seconds):
    return [end - begin for _, begin, end in answered(arrivals, service_seconds)]


@wrong("open_loop_latencies", "nobody ever waits here")
def of_a_client_that_waits(arrivals, service_seconds):
    """A closed loop: the next request is sent when the answer before is there."""
    latencies, now = [], 0
    for intended, seconds in zip(arrivals, service_seconds, strict=True):
        sent = max(now, intended)
        now = sent + seconds
        latencies.append(now - sent)
    return latencies


@wrong("open_loop_latencies", "nobody ever waits here")
def everybody_at_the_same_time(arrivals, service_seconds):
    return list(service_seconds)


@wrong("open_loop_latencies", "counts the wait only")
def waits_only(arrivals, service_seconds):
    return [begin - sent for sent, begin, _ in answered(arrivals, service_seconds)]


@wrong("open_loop_latencies", "returns when each is done")
def ends_only(arrivals, service_seconds):
    return [end for _, _, end in answered(arrivals, service_seconds)]


@wrong("open_loop_latencies", "returns when each begins")
def begins_only(arrivals, service_seconds):
    return [begin for _, begin, _ in answered(arrivals, service_seconds)]


@wrong("open_loop_latencies", "works on the next request before it is sent")
def never_idle(arrivals, service_seconds):
    return [end - sent for sent, _, end in answered(arrivals, service_seconds, begin=lambda sent, free: free)]


@wrong("open_loop_latencies", "adds up all work so far")
def all_work_so_far(arrivals, service_seconds):
    return list(accumulate(service_seconds))


@wrong("open_loop_latencies", "as if the one before had begun at once")
def behind_the_one_before(arrivals, service_seconds):
    latencies, free = [], 0
    for sent, seconds in zip(arrivals, service_seconds, strict=True):
        latencies.append(max(sent, free) + seconds - sent)
        free = sent + seconds
    return latencies


def taken_by(rank):
    """A server that takes, of those that wait, the one with the smallest rank."""

    def latencies(arrivals, service_seconds):
        waiting, now, done = list(range(len(arrivals))), 0, {}
        while waiting:
            now = max(now, min(arrivals[number] for number in waiting))
            there = [number for number in waiting if arrivals[number] <= now]
            number = min(there, key=lambda number: rank(number, service_seconds))
            waiting.remove(number)
            now += service_seconds[number]
            done[number] = now - arrivals[number]
        return [done[number] for number in range(len(arrivals))]

    return latencies


@wrong("open_loop_latencies", "serves the last one to come first")
def a_stack(arrivals, service_seconds):
    return taken_by(lambda number, _: -number)(arrivals, service_seconds)


@wrong("open_loop_latencies", "serves the shortest first")
def shortest_work_first(arrivals, service_seconds):
    return taken_by(lambda number, service: service[number])(arrivals, service_seconds)


@wrong("open_loop_latencies", "has the latencies by their size")
def sorted_latencies(arrivals, service_seconds):
    return sorted(end_minus_sent(arrivals, service_seconds))


@wrong("open_loop_latencies", "has the latencies backwards")
def latencies_backwards(arrivals, service_seconds):
    return end_minus_sent(arrivals, service_seconds)[::-1]


@wrong("open_loop_latencies", "divides by the service time")
def slowdown(arrivals, service_seconds):
    latencies = end_minus_sent(arrivals, service_seconds)
    return [latency / seconds for latency, seconds in zip(latencies, service_seconds, strict=True)]


@wrong("open_loop_latencies", "takes the send times for gaps")
def arrivals_are_gaps(arrivals, service_seconds):
    return end_minus_sent(list(accumulate(arrivals)), service_seconds)


@wrong("open_loop_latencies", "takes the service time of the one before")
def service_of_the_one_before(arrivals, service_seconds):
    return end_minus_sent(arrivals, [*service_seconds[-1:], *service_seconds[:-1]])


@wrong("open_loop_latencies", "takes the next one's service time")
def service_of_the_next(arrivals, service_seconds):
    return end_minus_sent(arrivals, [*service_seconds[1:], *service_seconds[:1]])


@wrong("open_loop_latencies", "counts from the first request's send time")
def from_the_first_arrival(arrivals, service_seconds):
    return [end - arrivals[0] for _, _, end in answered(arrivals, service_seconds)]


@wrong("open_loop_latencies", "takes the time between two answers")
def between_two_answers(arrivals, service_seconds):
    ends = ends_only(arrivals, service_seconds)
    return [later - end for end, later in pairwise([0, *ends])]


@wrong("open_loop_latencies", "nobody ever waits here")
def waits_for_the_begin_of_the_one_before(arrivals, service_seconds):
    return [end - sent for sent, _, end in answered(arrivals, service_seconds, free=lambda begin, end: begin)]


@wrong("open_loop_latencies", "expected 4, got 3")
def in_two_rows(arrivals, service_seconds):
    latencies, free = [], [0, 0]
    for sent, seconds in zip(arrivals, service_seconds, strict=True):
        free = [max(sent, min(free)) + seconds, max(free)]
        latencies.append(free[0] - sent)
    return latencies


@wrong("open_loop_latencies", "request 0, sent at [0, 1, 2, 3, 12]")
def milliseconds_of_latency(arrivals, service_seconds):
    return [1000 * latency for latency in end_minus_sent(arrivals, service_seconds)]


@wrong("open_loop_latencies", "request 1, sent at")
def latencies_added_up(arrivals, service_seconds):
    return list(accumulate(end_minus_sent(arrivals, service_seconds)))


@wrong("open_loop_latencies", "the list has length 3, and should have 5: a latency for each request")
def those_that_waited(arrivals, service_seconds):
    return [end - sent for sent, begin, end in answered(arrivals, service_seconds) if begin > sent]


@wrong("open_loop_latencies", "it returned a float")
def mean_latency(arrivals, service_seconds):
    return sum(end_minus_sent(arrivals, service_seconds)) / len(arrivals)


@wrong("open_loop_latencies", "a tuple is in it")
def wait_and_work(arrivals, service_seconds):
    return [(begin - sent, end - begin) for sent, begin, end in answered(arrivals, service_seconds)]


@wrong("open_loop_latencies", "should return a list, a latency for each request; it returned a dict")
def latencies_by_arrival(arrivals, service_seconds):
    return dict(zip(arrivals, end_minus_sent(arrivals, service_seconds), strict=True))


@wrong("open_loop_latencies", "changed its argument")
def arrivals_are_put_off(arrivals, service_seconds):
    latencies = end_minus_sent(arrivals, service_seconds)
    for number, (_, begin, _) in enumerate(answered(arrivals, service_seconds)):
        arrivals[number] = begin
    return latencies


@wrong("open_loop_latencies", "stopped with IndexError")
def somebody_is_always_there(arrivals, service_seconds):
    free, latencies = arrivals[0], []
    for sent, seconds in zip(arrivals, service_seconds, strict=True):
        free = max(free, sent) + seconds
        latencies.append(free - sent)
    return latencies


# === lesson 7: which of them count ================================================================================


@right("goodput")
def with_the_course_s_own_times(requests, seconds, ttft, tpot):
    each = [metrics.RequestMetrics(None, sent, times) for sent, times in requests if times]
    return sum(one.ttft <= ttft and (one.tpot is None or one.tpot <= tpot) for one in each) / seconds


@right("goodput")
def with_the_mean_of_the_gaps(requests, seconds, ttft, tpot):
    good = []
    for sent, times in requests:
        gaps = [later - time for time, later in pairwise(times)]
        if not times or times[0] > sent + ttft:
            continue
        if not gaps or sum(gaps) <= tpot * len(gaps):
            good.append(sent)
    return len(good) / seconds


def first_wait(sent, times):
    return times[0] - sent


def mean_gap_of(times):
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0


def rated(good, per=lambda good, requests, seconds: len(good) / seconds):
    """A goodput with parts to be broken: which requests count, and what is made of them."""

    def answer(requests, seconds, ttft, tpot):
        return per([(sent, times) for sent, times in requests if good(sent, times, ttft, tpot)], requests, seconds)

    return answer


def in_time(sent, times, ttft, tpot):
    return bool(times) and first_wait(sent, times) <= ttft and mean_gap_of(times) <= tpot


right("goodput")(rated(in_time))


def first_in_time_and(condition):
    """Those that are answered, the first token in time, and for which a rule of (sent, times, limit) holds."""
    return rated(lambda sent, times, x, y: bool(times) and first_wait(sent, times) <= x and condition(sent, times, y))


for message, broken in [
    ("counts refused requests", rated(lambda sent, times, *limits: not times or in_time(sent, times, *limits))),
    ("leaves out answers of a single token", first_in_time_and(lambda _, t, y: len(t) > 1 and mean_gap_of(t) <= y)),
    (
        "leaves out what just meets a limit",
        rated(lambda s, t, x, y: bool(t) and first_wait(s, t) < x and (len(t) < 2 or mean_gap_of(t) < y)),
    ),
    (
        "leaves out a TTFT that just meets its limit",
        rated(lambda s, t, x, y: bool(t) and first_wait(s, t) < x and mean_gap_of(t) <= y),
    ),
    (
        "leaves out a TPOT that just meets its limit",
        first_in_time_and(lambda _, t, y: len(t) < 2 or mean_gap_of(t) < y),
    ),
    (
        "is content with one of the limits",
        rated(lambda s, t, x, y: bool(t) and (first_wait(s, t) <= x or mean_gap_of(t) <= y)),
    ),
    ("looks at the first token only", first_in_time_and(lambda *_: True)),
    ("never looks at the wait for the first token", rated(lambda s, t, x, y: bool(t) and mean_gap_of(t) <= y)),
    ("has the limits swapped", rated(lambda s, t, x, y: in_time(s, t, y, x))),
    (
        "spreads the wait for the first token over the others",
        first_in_time_and(lambda s, t, y: t[-1] - s <= y * len(t)),
    ),
    (
        "spreads the wait for the first token over the others",
        first_in_time_and(lambda s, t, y: len(t) < 2 or (t[-1] - s) / (len(t) - 1) <= y),
    ),
    ("Between n tokens there are n - 1 gaps", first_in_time_and(lambda s, t, y: (t[-1] - t[0]) / len(t) <= y)),
    ("looks at the longest gap", first_in_time_and(lambda s, t, y: all(b - a <= y for a, b in pairwise(t)))),
    ("looks at the first gap only", first_in_time_and(lambda s, t, y: len(t) < 2 or t[1] - t[0] <= y)),
    (
        "forgives a late first token if the others come fast",
        rated(lambda s, t, x, y: bool(t) and t[-1] - s <= x + (len(t) - 1) * y),
    ),
    (
        "compares the whole request's time with the limit for the first token",
        rated(lambda s, t, x, y: bool(t) and t[-1] - s <= x and mean_gap_of(t) <= y),
    ),
    (
        "takes the time on the clock for TTFT",
        rated(lambda s, t, x, y: bool(t) and t[0] <= x and mean_gap_of(t) <= y),
    ),
    ("that is throughput", rated(lambda sent, times, *_: bool(times))),
    ("that is the load", rated(lambda *_: True)),
    ("says how many. Wanted is how many a second", rated(in_time, lambda good, requests, seconds: len(good))),
    (
        "gives a share of the requests",
        rated(in_time, lambda good, requests, seconds: len(good) / len(requests) if requests else 0),
    ),
    (
        "gives a share of the requests",
        rated(in_time, lambda good, requests, seconds: 100 * len(good) / max(len(requests), 1)),
    ),
    (
        "counts tokens: wanted are requests",
        rated(in_time, lambda good, requests, seconds: sum(len(times) for _, times in good) / seconds),
    ),
    ("counts those that miss a limit", rated(lambda *case: not in_time(*case))),
    ("counts those that miss a limit", rated(lambda sent, times, *limits: times and not in_time(sent, times, *limits))),
    ("rounds to a whole number", rated(in_time, lambda good, requests, seconds: len(good) // seconds)),
    ("rounds to a whole number", rated(in_time, lambda good, requests, seconds: round(len(good) / seconds))),
    ("is upside down", rated(in_time, lambda good, requests, seconds: seconds / max(len(good), 1))),
    ("A refused request has no tokens", rated(lambda s, t, x, y: first_wait(s, t) <= x and mean_gap_of(t) <= y)),
    (
        "A single token has no time per token behind it",
        first_in_time_and(lambda s, t, y: (t[-1] - t[0]) / (len(t) - 1) <= y),
    ),
    (
        "A single token has no TPOT",
        first_in_time_and(lambda s, t, y: metrics.RequestMetrics(None, s, t).tpot <= y),
    ),
    (
        "stopped with IndexError",
        rated(in_time, lambda good, requests, seconds: len(good) / (requests[-1][1][-1] - requests[0][0])),
    ),
    ("should return a number; it returned a list", rated(in_time, lambda good, requests, seconds: good)),
    ("should return a number; it returned a bool", rated(in_time, lambda good, requests, seconds: len(good) > 0)),
    ("expected 0.5, got 0.571429", rated(in_time, lambda good, requests, seconds: len(good) / (seconds - 0.5))),
]:
    wrong("goodput", message)(broken)


@wrong("goodput", "judges all of them by the means")
def means_of_all(requests, seconds, ttft, tpot):
    answered = [(sent, times) for sent, times in requests if times]
    if not answered:
        return 0
    first = sum(times[0] - sent for sent, times in answered) / len(answered)
    pace = sum(mean_gap_of(times) for _, times in answered) / len(answered)
    return len(answered) / seconds if first <= ttft and pace <= tpot else 0


# === lesson 7: a queue that says no ===============================================================================


class Bounded:
    """A queue with parts to be broken."""

    def __init__(self, rows, max_queue, seconds):
        self.rows, self.max_queue, self.seconds = rows, max_queue, seconds
        self.running, self.waiting = [], []

    def offer(self, request_id):
        if not self.has_room():
            return self.retry_after()
        self.take_in(request_id)
        return 0

    def leave(self, request_id):
        if request_id in self.waiting:
            self.waiting.remove(request_id)
        elif request_id in self.running:
            self.running.remove(request_id)
            self.fill()

    def has_room(self):
        return len(self.running) < self.rows or len(self.waiting) < self.max_queue

    def retry_after(self):
        return math.ceil(self.seconds / self.rows)

    def take_in(self, request_id):
        (self.running if len(self.running) < self.rows else self.waiting).append(request_id)

    def fill(self):
        if self.waiting:
            self.running.append(self.waiting.pop(0))


right("BoundedQueue")(Bounded)


@right("BoundedQueue")
class OneLineOfAll:
    """Those in front run; who leaves makes everybody behind move up."""

    def __init__(self, rows, max_queue, seconds):
        self.rows, self.places, self.pause = rows, rows + max_queue, max(1, math.ceil(seconds / rows))
        self.line = {}

    @property
    def running(self):
        return list(self.line)[: self.rows]

    @property
    def waiting(self):
        return tuple(self.line)[self.rows :]

    def offer(self, name):
        if len(self.line) == self.places:
            return self.pause
        self.line[name] = True
        return 0

    def leave(self, name):
        self.line.pop(name, None)


@right("BoundedQueue")
def with_a_set_and_a_deque(rows, max_queue, seconds):
    queue = SimpleNamespace(running=set(), waiting=deque())

    def offer(name):
        if len(queue.running) < rows:
            queue.running.add(name)
            return 0
        if len(queue.waiting) < max_queue:
            queue.waiting.append(name)
            return 0
        return int(-(-seconds // rows))

    def leave(name):
        if name in queue.running:
            queue.running.discard(name)
            if queue.waiting:
                queue.running.add(queue.waiting.popleft())
        with contextlib.suppress(ValueError):
            queue.waiting.remove(name)

    queue.offer, queue.leave = offer, leave
    return queue


def breaks(message, **parts):
    """A `Bounded` with these methods in the place of its own."""
    wrong("BoundedQueue", message)(type("_and_".join(parts), (Bounded,), parts))


breaks("accepts f although all rows and all places in the queue are taken", has_room=lambda self: True)
breaks("accepts f although", has_room=lambda self: len(self.waiting) <= self.max_queue)
breaks(
    "although only 2 of 3 places in the queue are taken",
    has_room=lambda self: len(self.running + self.waiting) < self.rows + self.max_queue - 1,
)
breaks(
    "although only 1 of 3 places in the queue are taken",
    has_room=lambda self: len(self.running + self.waiting) < self.max_queue,
)
breaks("although only 0 of 3 places in the queue are taken", has_room=lambda self: len(self.running) < self.rows)
breaks("refuses, although a row is free", has_room=lambda self: len(self.waiting) < self.max_queue)
breaks("although a row is free", has_room=lambda self: False)
breaks("says when one row is free", retry_after=lambda self: math.ceil(self.seconds))
breaks("Less than a second is rounded up", retry_after=lambda self: int(self.seconds / self.rows))
breaks("Less than a second is rounded up", retry_after=lambda self: round(self.seconds / self.rows))
breaks("rounds down: who comes back too early", retry_after=lambda self: max(1, int(self.seconds / self.rows)))
breaks("rounds to the nearest second", retry_after=lambda self: max(1, round(self.seconds / self.rows)))
breaks("adds a second even to whole ones", retry_after=lambda self: int(self.seconds / self.rows) + 1)
breaks(
    "says when all who wait will have begun",
    retry_after=lambda self: max(1, math.ceil(len(self.waiting) * self.seconds / self.rows)),
)
breaks(
    "says when all who are there will be done",
    retry_after=lambda self: math.ceil(len(self.waiting + self.running) * self.seconds / self.rows),
)
breaks("multiplies by the rows", retry_after=lambda self: math.ceil(self.seconds * self.rows))
breaks("says the same however fast the server is", retry_after=lambda self: 1)
breaks("takes whole seconds, so make it an int", retry_after=lambda self: self.seconds / self.rows)
breaks("takes whole seconds, so make it an int", retry_after=lambda self: -1)
breaks("says 0, which means accepted, and does not take f in", retry_after=lambda self: 0)
breaks("it returned False", retry_after=lambda self: False)
breaks("it returned None", retry_after=lambda self: None)
breaks("lets a wait although a row is free", take_in=lambda self, name: self.waiting.append(name))
breaks("has 3 running in 2 rows", take_in=lambda self, name: self.running.append(name))
breaks("has it neither running nor waiting", take_in=lambda self, name: None)
breaks(
    "has ['d', 'c'] waiting: their order of arrival",
    take_in=lambda self, name: (
        self.running.append(name) if len(self.running) < self.rows else self.waiting.insert(0, name)
    ),
)
breaks("leaves a row empty although c waits", fill=lambda self: None)
breaks("gives the row to e, and c came first", fill=lambda self: self.running.append(self.waiting.pop()))
breaks("among the running and among the waiting", fill=lambda self: self.running.extend(self.waiting[:1]))
breaks("Perhaps nobody waits", fill=lambda self: self.running.append(self.waiting.pop(0)))
breaks("loses c: who was accepted keeps the place", fill=lambda self: self.waiting and self.waiting.pop(0))


@wrong("BoundedQueue", "keeps the place of e, which has left: who hangs up while waiting")
class OnlyAnswersLeave(Bounded):
    def leave(self, request_id):
        if request_id in self.running:
            super().leave(request_id)


@wrong("BoundedQueue", "keeps the row of b, which has left")
class OnlyWaitersLeave(Bounded):
    def leave(self, request_id):
        if request_id in self.waiting:
            super().leave(request_id)


@wrong("BoundedQueue", "then there is nothing to do")
class EverybodyIsThere(Bounded):
    def leave(self, request_id):
        if request_id in self.waiting:
            self.waiting.remove(request_id)
        else:
            self.running.remove(request_id)
            self.fill()


@wrong("BoundedQueue", "then there is nothing to do")
class KeysAreThere(Bounded):
    def leave(self, request_id):
        places = dict.fromkeys(self.running + self.waiting)
        del places[request_id]
        super().leave(request_id)


@wrong("BoundedQueue", "keeps the row of b, which has left")
class OldestLeaves(Bounded):
    def leave(self, request_id):
        self.running.pop(0)
        self.fill()


@wrong("BoundedQueue", "has 3 running in 2 rows")
class EveryLeaveFreesARow(Bounded):
    def leave(self, request_id):
        here = request_id in self.running
        super().leave(request_id)
        if not here:
            self.fill()


class Counting(Bounded):
    """Counts free places beside its lists."""

    def __init__(self, rows, max_queue, seconds):
        super().__init__(rows, max_queue, seconds)
        self.free = rows + max_queue

    def has_room(self):
        return self.free > 0

    def take_in(self, request_id):
        self.free -= 1
        super().take_in(request_id)

    def leave(self, request_id):
        self.free += request_id in self.running or request_id in self.waiting
        super().leave(request_id)


right("BoundedQueue")(Counting)


@wrong("BoundedQueue", "accepts h although all rows and all places in the queue are taken")
class RefusedFreesAPlace(Counting):
    """Who was refused leaves, too, and frees a place that it never had; so does who leaves twice."""

    def leave(self, request_id):
        self.free += 1
        super(Counting, self).leave(request_id)


@wrong("BoundedQueue", "accepts j although all rows and all places in the queue are taken")
class LeavingTwiceFreesTwo(Counting):
    """Knows its requests, and not that one of them is gone."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.known = set()

    def take_in(self, request_id):
        self.known.add(request_id)
        super().take_in(request_id)

    def leave(self, request_id):
        self.free += request_id in self.known
        super(Counting, self).leave(request_id)


@wrong("BoundedQueue", "says 3, and so refuses, although only 2 of 3 places in the queue are taken")
class WaitersGiveNothingBack(Counting):
    def leave(self, request_id):
        self.free += request_id in self.running
        super(Counting, self).leave(request_id)


@wrong("BoundedQueue", "says 3, and so refuses, although only 2 of 3 places in the queue are taken")
class OnceRefusedAlwaysRefused(Bounded):
    def offer(self, request_id):
        self.refused = getattr(self, "refused", set())
        if request_id in self.refused:
            return self.retry_after()
        answer = super().offer(request_id)
        if answer:
            self.refused.add(request_id)
        return answer


@wrong("BoundedQueue", "refuses f and keeps it")
class RefusedButKept(Bounded):
    def offer(self, request_id):
        answer = super().offer(request_id)
        if answer:
            self.waiting.append(request_id)
        return answer


@wrong("BoundedQueue", "makes room for f by sending c away")
class OldestMakesRoom(Bounded):
    def offer(self, request_id):
        if not self.has_room():
            self.waiting.pop(0)
        return super().offer(request_id)


@wrong("BoundedQueue", "loses c: who was accepted keeps the place")
class RefusesAndShedsOthers(Bounded):
    def retry_after(self):
        self.waiting = self.waiting[1:]
        return super().retry_after()


@wrong("BoundedQueue", "loses a: who was accepted keeps the place")
class LastComeOnly(Bounded):
    def take_in(self, request_id):
        self.running = [request_id]


@wrong("BoundedQueue", "loses a: who was accepted keeps the place")
class LeavesAreContagious(Bounded):
    def leave(self, request_id):
        self.running, self.waiting = [], []


@wrong("BoundedQueue", "Are these another queue's lists?")
class ListsOfTheClass(Bounded):
    running: ClassVar = []
    waiting: ClassVar = []

    def __init__(self, rows, max_queue, seconds):
        self.rows, self.max_queue, self.seconds = rows, max_queue, seconds


@wrong("BoundedQueue", "should make an object with the method `offer`; it made a Half without one")
class Half:
    def __init__(self, rows, max_queue, seconds):
        self.running, self.waiting = [], []


@wrong("BoundedQueue", "should keep the ids of those that are running in `self.running`, and that is an int")
class NumbersOnly(Bounded):
    def __init__(self, rows, max_queue, seconds):
        super().__init__(rows, max_queue, seconds)
        self.running = self.waiting = 0


@wrong("BoundedQueue", "is called as BoundedQueue(rows, max_queue, seconds)")
class TwoSettings(Bounded):
    def __init__(self, rows, max_queue):
        super().__init__(rows, max_queue, 1)


@wrong("BoundedQueue", "is called as leave(request_id), and your function does not take that")
class LeaveWithoutAName(Bounded):
    def leave(self):
        self.running.pop(0)


@wrong("BoundedQueue", "has a twice: it needs one place")
class TwoRowsEach(Bounded):
    def leave(self, request_id):
        super().leave(request_id)
        self.running = self.running[:1] * 2


@wrong("BoundedQueue", "a new one has [None, None] running")
class RowsOfNobody(Bounded):
    def __init__(self, rows, max_queue, seconds):
        super().__init__(rows, max_queue, seconds)
        self.running = [None] * rows


@wrong("BoundedQueue", "has None, which is not here")
class EmptyRowsAreKept(Bounded):
    def leave(self, request_id):
        super().leave(request_id)
        self.running += [None] * (self.rows - len(self.running))


@wrong("BoundedQueue", "is not written yet")
class OfferIsMissing(Bounded):
    def offer(self, request_id):
        raise NotImplementedError


# === codelab ======================================================================================================


@right("schedule")
def first_come_first_served(waiting, running, free_rows):
    return waiting[:free_rows]


@right("schedule")
def shortest_first(waiting, running, free_rows):
    waiting.sort(key=lambda request: (request.max_tokens, request.arrived))
    return waiting[: max(0, free_rows)]


@right("schedule")
def two_or_more_at_once(waiting, running, free_rows):
    """Fewer prefills: a single free row waits for a second one."""
    return waiting[:free_rows] if free_rows > 1 or len(waiting) == 1 or not running else []


@wrong("schedule", "rows stand free while requests wait")
def static_batches(waiting, running, free_rows):
    return [] if running else waiting[:free_rows]


@wrong("schedule", "lets 5 requests join")
def more_than_rows(waiting, running, free_rows):
    return waiting


@wrong("schedule", "twice")
def the_same_twice(waiting, running, free_rows):
    return [waiting[0]] * min(2, free_rows) if waiting else []


@wrong("schedule", "which is running already")
def those_that_run(waiting, running, free_rows):
    return (running + waiting)[:free_rows]


@wrong("schedule", "should return waiting requests as they are, and returned an int")
def ids_of_requests(waiting, running, free_rows):
    return [request.request_id for request in waiting[:free_rows]]


@wrong("schedule", "this server would stand still for ever")
def never_anybody(waiting, running, free_rows):
    return []


@wrong("schedule", "returned a ServerRequest")
def a_single_one(waiting, running, free_rows):
    return waiting[0] if waiting and free_rows else []


@wrong("schedule", "stopped with IndexError in line")
def nobody_waits(waiting, running, free_rows):
    return [waiting[0]] if free_rows else []


@wrong("schedule", "more than half of what static batching takes")
def nearly_alone(waiting, running, free_rows):
    return waiting[:1] if len(running) < 2 else []


# === the tests ====================================================================================================


@pytest.mark.parametrize("task, function", RIGHT)
def test_a_right_answer_passes_however_it_is_written(task, function, capsys):
    assert check(task, function) is True
    assert capsys.readouterr().out.startswith(f"{task}: passed. ")


@pytest.mark.parametrize("task, function, message", WRONG)
def test_a_wrong_answer_gets_the_message_meant_for_it(task, function, message, capsys):
    assert check(task, function) is False
    out = capsys.readouterr().out

    assert out.startswith(f"{task}: ")
    assert message in out
    assert "Traceback" not in out and "cannot be compared" not in out
    assert len(out.splitlines()[0]) < 420, "one or two sentences, not an essay"


def test_every_exercise_has_wrong_answers_and_two_right_ones_where_there_are_two():
    wrong_tasks = {param.values[0] for param in WRONG}
    right_tasks = [param.values[0] for param in RIGHT]

    assert wrong_tasks == set(TASKS)
    assert len(WRONG) >= 35
    assert [task for task in TASKS if right_tasks.count(task) < 2] == ["kv_cache_bytes"]


def pieces_of_code(task):
    """The expressions of a solution that hold its idea."""
    tree = ast.parse(inspect.getsource(getattr(solutions, task)))
    kinds = (ast.Call, ast.Subscript, ast.BinOp, ast.Compare)
    return {piece for node in ast.walk(tree) if isinstance(node, kinds) and len(piece := ast.unparse(node)) > 12}


def texts_of(file):
    """All strings of a source file but its docstrings: whatever a message is made of."""
    tree = ast.parse(file.read_text())
    documented = (ast.Module, ast.FunctionDef, ast.ClassDef)
    docstrings = [ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)]
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [text for text in strings if text not in docstrings]


def test_no_message_gives_the_solution_away():
    """Beside the student's own line, a message holds only strings from the checks' source, and results."""
    texts = "\n".join(text for file in Path(inspect.getfile(check)).parent.glob("*.py") for text in texts_of(file))
    assert "its newest token must stay at the right edge" in texts

    pieces = {piece for task in TASKS for piece in pieces_of_code(task)} - set(TASKS.values())
    assert [piece for piece in pieces if piece in texts] == []
    helpful = "argmax cumsum clamp torch.cat .pad( (mask trim_left select_rows concatenate sorted( kv_cache. dim= key="
    assert [word for word in helpful.split() if word in texts] == []


def test_an_exception_is_reported_with_its_line(capsys):
    def divides(lengths, seconds_per_pass):
        nothing = 0
        return sum(lengths) / nothing

    assert check("batch_throughput", divides) is False
    line = inspect.getsourcelines(divides)[1] + 2
    out = capsys.readouterr().out
    assert f"stopped with ZeroDivisionError in line {line}, `return sum(lengths) / nothing`: division by zero" in out
    assert "Traceback" not in out and len(out.splitlines()) == 1


def test_an_exception_in_a_library_is_reported_with_the_student_s_line(capsys):
    def stacks(first, second):
        helper = torch.cat
        return helper([first, second])

    check("merge_masks", stacks)
    assert "`return helper([first, second])`: Sizes of tensors must match" in capsys.readouterr().out


def test_an_exception_in_a_notebook_cell_is_reported_with_its_line(capsys):
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    cell = "def left_pad(rows, pad_id):\n    wide = 1\n    return rows[17]\n\nresult = check('left_pad', left_pad)"
    shell.user_ns["check"] = check
    assert shell.run_cell(cell).success
    assert shell.user_ns["result"] is False
    assert "stopped with IndexError in line 3, `return rows[17]`" in capsys.readouterr().out


@pytest.mark.parametrize("task", TASKS)
def test_what_is_not_written_yet_is_said_kindly(task, capsys):
    def stub(*arguments):
        raise NotImplementedError

    assert check(task, stub) is False
    assert f"{task}: is not written yet." in capsys.readouterr().out


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "answer",
    [
        None,
        7,
        "text",
        [],
        (),
        {},
        [None],
        (None, None),
        torch.zeros(0),
        torch.zeros(2, 3),
        float("nan"),
        float("inf"),
        object(),
        {"a": 1},
    ],
    ids=repr,
)
def test_whatever_comes_back_check_says_so_and_does_not_raise(task, answer, capsys):
    assert check(task, lambda *arguments: answer) is False
    assert len(capsys.readouterr().out) > len(task) + 10


def test_what_is_no_function_is_said_kindly(capsys):
    assert check("left_pad", solutions.left_pad([[1]], 0)) is False
    assert "is given tuple, not a function" in capsys.readouterr().out
    assert check("left_pad", lambda rows: rows) is False
    assert "is called as left_pad(rows, pad_id), and your function does not take that" in capsys.readouterr().out


def test_an_unknown_task_is_an_error_that_lists_those_there_are():
    with pytest.raises(ValueError, match=r"no exercise 'leftpad'\. There are: greedy_step, cached_loop"):
        check("leftpad", solutions.left_pad)


@pytest.mark.parametrize("catch", [(), Exception, BaseException], ids=["plain", "except_Exception", "bare_except"])
def test_a_loop_that_does_not_end_is_stopped(catch, monkeypatch, capsys):
    monkeypatch.setattr(attempt, "SECONDS", 0.2)

    def endless(lengths, seconds_per_pass):
        try:
            while True:
                pass
        except catch:
            while True:  # it has swallowed the first interruption, and gets a second one
                pass

    assert check("batch_throughput", endless) is False
    assert "did not finish within 0.2 seconds: does your loop end?" in capsys.readouterr().out


def test_a_function_that_only_waits_is_stopped_too(monkeypatch, capsys):
    monkeypatch.setattr(attempt, "SECONDS", 0.1)

    assert check("batch_throughput", lambda lengths, seconds: time.sleep(30)) is False
    assert "did not finish within 0.1 seconds" in capsys.readouterr().out


def test_a_time_limit_leaves_no_timer_and_no_handler_behind():
    before = signal.getsignal(signal.SIGALRM)
    check("batch_throughput", solutions.batch_throughput)

    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_second_thread_can_check_too():
    results = []
    thread = threading.Thread(target=lambda: results.append(check("position_ids", solutions.position_ids)))
    thread.start()
    thread.join()

    assert results == [True]


def test_the_student_s_own_interrupt_gets_through():
    def interrupted(lengths, seconds_per_pass):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check("batch_throughput", interrupted)


def test_checks_leave_the_model_as_it_was():
    model, _ = load_model()
    for task in ("cached_loop", "generate_next_token", "continuous_loop"):
        check(task, lambda *arguments: 1 / 0)

    assert "forward" not in vars(model)


# --- drawing ------------------------------------------------------------------------------------------------------


def test_expected_stands_beside_actual_as_text(capsys):
    check("merge_masks", masks_right)
    title, head, *grid = capsys.readouterr().out.splitlines()[1:]

    assert title == "  attention_mask  (. is padding, * differs)"
    assert head.split() == ["expected", "yours"]
    assert grid == [
        "  .  .  1  1  1  1     .  .  1  1  1  1 ",
        "  1  1  1  1  1  1     1  1  1  1  1  1 ",
        "  .  .  .  1  1  1     1* 1* 1* .* .* .*",
        "  .  .  .  .  1  1     .  1* 1* .  .* .*",
        "  .  .  .  1  1  1     1* 1* 1* .* .* .*",
    ]
    check("merge_masks", masks_right, show=False)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_notebook_gets_a_picture_of_the_cache(monkeypatch, capsys):
    shown = []
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=None))
    monkeypatch.setattr("IPython.display.display", shown.append)
    check("merge_batches", cache_padded_on_the_right)

    assert len(capsys.readouterr().out.splitlines()) == 1
    [picture] = shown
    assert picture.alt.startswith("keys of layer 0 (first head, first number): row 2, column 0: expected 0, got 30")


# --- lesson 4's plans in the engine -------------------------------------------------------------------------------


def test_a_student_s_plan_runs_the_engine_and_changes_no_token():
    requests = workloads.budgets(9, high=12, seed=3)
    config = EngineConfig(max_batch_size=3, max_tokens_per_step=4, scheduler_cls=planned_by(solutions.plan_chunks))
    engine = Engine(config=config)
    answers = engine.generate(
        [one.prompt for one in requests], [SamplingParams(max_tokens=one.max_tokens) for one in requests]
    )

    assert [one.token_ids for one in answers] == [one.token_ids for one in generate_continuous(requests).outputs]
    read = Counter()
    for iteration in engine.trace.passes:
        read[iteration.step] += sum(row.tokens for row in iteration.row_steps)
    assert max(read.values()) == 4


def test_a_student_s_plan_need_not_know_of_cached_prefixes():
    requests = workloads.one_beginning(3, words=30, max_tokens=4)
    scheduler_cls = planned_by(solutions.plan_chunks)
    engine = Engine(config=EngineConfig(max_batch_size=1, max_tokens_per_step=30, scheduler_cls=scheduler_cls))
    answers = engine.generate(
        [one.prompt for one in requests], [SamplingParams(max_tokens=one.max_tokens) for one in requests]
    )

    assert [one.token_ids for one in answers] == [one.token_ids for one in generate_continuous(requests).outputs]
    asked = sum(len(engine.tokenizer(one.prompt)["input_ids"]) for one in requests)
    assert engine.trace.prompt_tokens < asked


def test_a_plan_for_nobody_does_not_run_the_engine_for_ever():
    engine = Engine(config=EngineConfig(scheduler_cls=planned_by(lambda *arguments: [])))
    with pytest.raises(ValueError, match="The plan is empty although 2 requests are there"):
        engine.generate(["Look", "Many hands"], SamplingParams(max_tokens=2))


# --- lesson 5's row and lesson 6's books under the model ----------------------------------------------------------


def test_a_student_s_row_changes_no_token():
    model, tokenizer = load_model()
    reader = Reader(solutions.pack, solutions.attend_row)
    first, second = (tokenizer(text)["input_ids"] for text in ("The quick brown fox", "What comes up must come"))
    reader.read({"gone": first[:3]})
    reader.forget("gone")
    reader.read({"first": first[:-1], "second": second[:2]})
    logits = reader.read({"second": second[2:], "first": first[-1:], "gone": second[:1]})

    for name, text in {"first": first, "second": second, "gone": second[:1]}.items():
        with torch.no_grad():
            alone = model(torch.tensor([text])).logits[0, -1]
        torch.testing.assert_close(logits[name], alone, rtol=0, atol=1e-4)
    assert reader.columns == [3, 5, 1 + len(second) - 2 + 1]
    assert model.config._attn_implementation == "sdpa", "it is a copy that is changed"


def test_a_student_s_row_runs_a_model_whose_heads_share_keys():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=2, **sizes)).eval()
    reader = Reader(solutions.pack, solutions.attend_row, model)
    reader.read({"a": [3, 4, 5], "b": [6]})
    logits = reader.read({"b": [7, 8], "a": [9]})

    for name, text in {"a": [3, 4, 5, 9], "b": [6, 7, 8]}.items():
        with torch.no_grad():
            alone = model(torch.tensor([text])).logits[0, -1]
        torch.testing.assert_close(logits[name], alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("blocks, passes", [(48, 12), (12, 18)])
def test_a_student_s_books_run_the_engine_and_change_no_token(blocks, passes):
    requests = workloads.race(4, every=1, long=12)
    config = EngineConfig(num_blocks=blocks, block_size=4, max_batch_size=4)
    engine = engine_with(solutions.allocate, solutions.release, solutions.slot_of, config)
    params = [SamplingParams(max_tokens=one.max_tokens) for one in requests]
    answers = engine.generate([one.prompt for one in requests], params)

    assert [one.token_ids for one in answers] == [one.token_ids for one in generate_continuous(requests).outputs]
    assert engine.trace.forward_passes == passes
    assert sorted(engine.block_manager.free_blocks) == list(range(blocks)), "all of them have come back"


@pytest.mark.parametrize("forgetful", [lambda *arguments: False, lambda free, tables, *rest: free.clear()])
def test_books_that_refuse_everybody_do_not_run_the_engine_for_ever(forgetful):
    engine = engine_with(forgetful, solutions.release, solutions.slot_of, EngineConfig(num_blocks=8))
    with pytest.raises(ValueError, match="is refused, and nobody has any of the 8 blocks"):
        engine.generate(["Look", "Many hands"], SamplingParams(max_tokens=2))


# --- lesson 7's queue under load ----------------------------------------------------------------------------------


def test_rows_behind_a_student_s_queue_are_full_and_never_more_than_full():
    arrivals = solutions.poisson_arrivals(10, 300, Random(3))
    requests = simulate_queue(solutions.BoundedQueue(4, 6, 1), arrivals, tokens=5, step=0.1)
    running = [(times[0] - 0.1, times[-1]) for _, times in requests if times]

    assert [sent for sent, _ in requests] == arrivals
    assert all(len(times) in (0, 5) and all(time > sent for time in times) for sent, times in requests)
    together = [sum(begin <= now < end for begin, end in running) for now, _ in running]
    assert max(together) == 4
    waits = [times[0] - 0.1 - sent for sent, times in requests if times]
    assert min(waits) == pytest.approx(0, abs=1e-9)
    assert 0.5 < max(waits) < 1 + 1e-9, "whoever is sixth in the queue needs two ends of a row at most"
    assert any(not times for _, times in requests)


def test_a_long_queue_answers_as_many_and_hardly_any_in_time():
    arrivals, goodput, answered = solutions.poisson_arrivals(10, 600, Random(7)), {}, {}
    for max_queue in (0, 4, 64, 600):
        requests = simulate_queue(solutions.BoundedQueue(8, max_queue, 1), arrivals)
        seconds = max(times[-1] for _, times in requests if times)
        answered[max_queue] = sum(bool(times) for _, times in requests) / seconds
        goodput[max_queue] = solutions.goodput(requests, seconds, 1, 0.06)

    assert answered[0] < 7 < 7.5 < answered[4] < answered[64] < answered[600] < 8
    assert goodput[4] == answered[4] and goodput[0] == answered[0], "whoever is let in is served in time"
    assert goodput[64] < 0.5 and goodput[600] < 0.5


def test_an_argument_that_is_replaced_counts_as_changed(capsys):
    def replaces(waiting):
        waiting[0] = None

    assert check("longest_first", replaces) is False
    assert "changed its argument: the list is not what it was" in capsys.readouterr().out


# --- the codelab's score ------------------------------------------------------------------------------------------


def test_the_race_costs_what_the_lesson_says(capsys):
    scores = score_schedule(first_come_first_served)
    race = scores["race"]

    assert list(scores) == ["race", "mixed", "arriving"]
    assert race["first come, first served"] == race["yours"]
    assert race["yours"]["forward_passes"] == 132  # 6 prefills + 126 decode steps
    assert race["yours"]["useful_share"] == 680 / (132 * 8)
    assert race["static"]["forward_passes"] == 400
    assert race["static"]["p95_latency"] > 2 * race["yours"]["p95_latency"]
    assert race["floor"] == 100  # the longest request; full rows would take 85
    for score in scores.values():
        assert all(score["floor"] <= score[policy]["forward_passes"] for policy in (*scheduling.BASELINES, "yours"))
        assert score["yours"]["forward_passes"] < score["static"]["forward_passes"]
    out = capsys.readouterr().out
    assert "forward passes" in out and "floor                                  100" in out


def test_the_loop_that_runs_a_schedule_is_the_course_s_continuous_loop():
    race = workloads.race(16, long=40)
    trace, theirs = scheduling.run_schedule(first_come_first_served, race, [0] * 16), generate_continuous(race).trace
    assert [one.row_steps for one in trace.passes] == [one.row_steps for one in theirs.passes]

    trace, theirs = scheduling.run_schedule(static_batches, race, [0] * 16), generate_static(race).trace
    assert trace.forward_passes == theirs.forward_passes


def test_longest_first_comes_closest_to_the_floor():
    race = workloads.race()
    trace = scheduling.run_schedule(solutions.schedule, race, [0] * 32)

    assert trace.forward_passes == 106  # 99 decode steps of the longest request, 7 prefills in between
    assert trace.output_tokens == 680


def test_latency_counts_forward_passes_from_the_arrival():
    requests = [Request("Once upon a time, a brave", 3, 0), Request("Once upon a time, a brave", 2, 1)]
    trace = scheduling.run_schedule(first_come_first_served, requests, [0, 9], rows=1)

    # Request 0 is done after 3 passes; the server then waits for request 1, which takes 2.
    assert trace.token_times == {0: [1, 2, 3], 1: [10, 11]}
    assert scheduling.measure(trace, [0, 9])["p95_latency"] == pytest.approx(2 + 0.95)


def test_a_schedule_sees_what_waits_and_what_runs(capsys):
    seen = []

    def spying(waiting, running, free_rows):
        seen.append((len(waiting), [(one.request_id, one.generated) for one in running], free_rows))
        waiting_before = list(waiting)
        waiting.clear()  # a copy: nothing is lost
        return waiting_before[:free_rows]

    scheduling.run_schedule(spying, [Request("Once upon a time, a brave", 3, id) for id in "abc"], [0, 0, 1], rows=2)
    assert seen[:3] == [(2, [], 2), (1, [("a", 2), ("b", 2)], 0), (1, [], 2)]


def test_an_invalid_schedule_is_told_so_and_not_scored(capsys):
    assert score_schedule(never_anybody) == {}
    assert capsys.readouterr().out == (
        "schedule: lets nobody join although nobody runs (32 waiting, 0 running, 8 free rows): this server would stand "
        "still for ever.\n"
    )
    assert score_schedule(lambda waiting: waiting) == {}
    assert "is called as schedule(waiting, running, free_rows)" in capsys.readouterr().out
