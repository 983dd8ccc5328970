"""The power of the checks: wrong answers are told which idea they miss, right ones pass however they are written.

Every wrong answer below is one that a student could plausibly hand in, with a piece of the message meant for it. None
of the messages gives the answer away, and whatever a student's function does, `check` returns True or False.
"""

import ast
import inspect
import signal
import threading
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import solutions
import torch
from torch.nn.functional import pad
from transformers import DynamicCache

from helpers import batching, generate_continuous, generate_static, kv_cache, load_model, workloads
from helpers.batching import Request
from helpers.checks import TASKS, attempt, check, scheduling, score_schedule

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
    for iteration in trace.iterations:
        for slot in iteration.slots:
            useful += slot.new_tokens
    return trace.rows * len(trace.iterations) - useful


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
    return sum(slot.work != "decode" for iteration in trace.iterations for slot in iteration.slots)


@wrong("wasted_slot_steps", "counts pad tokens")
def padding(trace):
    return sum(slot.padding for iteration in trace.iterations for slot in iteration.slots)


@wrong("wasted_slot_steps", "counts the useful slot-steps")
def useful(trace):
    return trace.output_tokens


@wrong("wasted_slot_steps", "*one row* in one pass")
def wasteful_passes(trace):
    return sum(any(slot.new_tokens == 0 for slot in iteration.slots) for iteration in trace.iterations)


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
    trace, theirs = scheduling.serve(first_come_first_served, race, [0] * 16), generate_continuous(race).trace
    assert [one.slots for one in trace.iterations] == [one.slots for one in theirs.iterations]

    trace, theirs = scheduling.serve(static_batches, race, [0] * 16), generate_static(race).trace
    assert trace.forward_passes == theirs.forward_passes


def test_longest_first_comes_closest_to_the_floor():
    race = workloads.race()
    trace = scheduling.serve(solutions.schedule, race, [0] * 32)

    assert trace.forward_passes == 106  # 99 decode steps of the longest request, 7 prefills in between
    assert trace.output_tokens == 680


def test_latency_counts_forward_passes_from_the_arrival():
    requests = [Request("Once upon a time, a brave", 3, 0), Request("Once upon a time, a brave", 2, 1)]
    trace = scheduling.serve(first_come_first_served, requests, [0, 9], rows=1)

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

    scheduling.serve(spying, [Request("Once upon a time, a brave", 3, id) for id in "abc"], [0, 0, 1], rows=2)
    assert seen[:3] == [(2, [], 2), (1, [("a", 2), ("b", 2)], 0), (1, [], 2)]


def test_an_invalid_schedule_is_told_so_and_not_scored(capsys):
    assert score_schedule(never_anybody) == {}
    assert capsys.readouterr().out == (
        "schedule: lets nobody join although nobody runs (32 waiting, 0 running, 8 free rows): this server would stand "
        "still for ever.\n"
    )
    assert score_schedule(lambda waiting: waiting) == {}
    assert "is called as schedule(waiting, running, free_rows)" in capsys.readouterr().out
