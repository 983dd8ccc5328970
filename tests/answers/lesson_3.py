"""Lesson 3: the four verbs, masks and rows that are merged and removed, and the loop."""

from itertools import compress

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import DynamicCache

from answers import right, wrong
from helpers import Request, batching, generate_continuous, kv_cache
from helpers.checks.exercises.joining_and_leaving import select, split, stack, stack_masks, unfinished
from helpers.checks.exercises.lesson_3 import init, one_pass
from helpers.checks.exercises.serving_loop import in_order, serve

LISTS = ("request_ids", "token_ids", "tokens_remaining", "finish_reasons")


def layers(cache):
    return [(layer.keys, layer.values) for layer in cache.layers]


def cache_of(pairs):
    cache = DynamicCache()
    for number, (keys, values) in enumerate(pairs):
        cache.update(keys, values, number)
    return cache


# --- init_batch -----------------------------------------------------------------------------------------------------


@right("init_batch")
def with_the_tokenizer_s_padding(requests, model, tokenizer):
    batch = dict(tokenizer([prompt for prompt, _ in requests], padding=True, return_tensors="pt").to(model.device))
    batch["position_ids"] = (batch["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    batch["request_ids"] = [f"request {number}" for number in range(len(requests))]
    batch["token_ids"] = [[] for _ in requests]
    batch["tokens_remaining"] = [max_tokens for _, max_tokens in requests]
    return batch | {"finish_reasons": [None] * len(requests), "responses": [prompt for prompt, _ in requests]}


@right("init_batch")
def with_numpy(requests, model, tokenizer):
    prompts = [tokenizer(prompt)["input_ids"] for prompt, _ in requests]
    shape = len(prompts), max(map(len, prompts))
    ids, positions, mask = np.full(shape, model.config.vocab_size - 1), np.ones(shape, int), np.zeros(shape, int)
    for row, prompt in enumerate(prompts):
        own = row, slice(-len(prompt), None)
        ids[own], positions[own], mask[own] = prompt, range(len(prompt)), 1
    tensors = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
    tensors = {key: torch.from_numpy(value).to(model.device) for key, value in tensors.items()}
    budgets = [np.int64(max_tokens) for _, max_tokens in requests]
    lists = [np.arange(len(requests)).tolist(), [[] for _ in requests], budgets, [None] * len(requests)]
    return tensors | dict(zip(LISTS, lists, strict=True))


@wrong("init_batch", "the result has no 'position_ids'")
def no_positions(requests, model, tokenizer):
    return {key: value for key, value in init(requests, model, tokenizer).items() if key != "position_ids"}


@wrong("init_batch", "should be a dict, and is a tensor of int64 with shape [3, 5]")
def ids_only(requests, model, tokenizer):
    return init(requests, model, tokenizer)["input_ids"]


@wrong("init_batch", "one and the same list for every row")
def shared_list(requests, model, tokenizer):
    return init(requests, model, tokenizer) | {"token_ids": [[]] * len(requests)}


@wrong("init_batch", "`request_ids` should be [0, 1, 2], and is [0, 0, 1]")
def two_rows_with_one_id(requests, model, tokenizer):
    return init(requests, model, tokenizer) | {"request_ids": [max(0, row - 1) for row in range(len(requests))]}


@wrong("init_batch", "`attention_mask` holds float32, and should hold int64")
def float_mask(requests, model, tokenizer):
    batch = init(requests, model, tokenizer)
    return batch | {"attention_mask": batch["attention_mask"].float()}


@wrong("init_batch", "`input_ids` has shape [3, 6], and should have [3, 5]")
def a_column_that_no_row_needs(requests, model, tokenizer):
    batch = init(requests, model, tokenizer)
    return batch | {key: pad(batch[key], (1, 0)) for key in ("input_ids", "position_ids", "attention_mask")}


@wrong("init_batch", "`forward passes` should be [], and is [(3, 0, 5)]")
def prefilled_at_once(requests, model, tokenizer):
    batch = init(requests, model, tokenizer)
    one_pass(batch, model, tokenizer)
    return batch


@wrong("init_batch", "gives pads a position that no model can look up")
def positions_beyond_the_context(requests, model, tokenizer):
    batch = init(requests, model, tokenizer)
    return batch | {"position_ids": batch["position_ids"].masked_fill(batch["attention_mask"] == 0, 10**6)}


@wrong("init_batch", "calls the course's own `init_batch`")
def the_course_s_own_init(requests, model, tokenizer):
    return batching.init_batch(requests, model, tokenizer)


# --- generate_next_token --------------------------------------------------------------------------------------------


@right("generate_next_token")
def finished_rows_frozen(batch, model, tokenizer):
    """A finished row's mask and position stay as they are: it makes no difference to any other row."""
    after = one_pass(batch, model, tokenizer)
    on = torch.tensor([[int(left > 0)] for left in after["tokens_remaining"]], device=model.device)
    mask = torch.cat([batch["attention_mask"], on], dim=1)
    return after | {"attention_mask": mask, "position_ids": batch["position_ids"][:, -1:] + on}


@right("generate_next_token")
def positions_from_the_mask(batch, model, tokenizer):
    after = one_pass(batch, model, tokenizer)
    return dict(after, position_ids=after["attention_mask"].sum(dim=1, keepdim=True) - 1)


@right("generate_next_token")
def the_model_s_own_cache(batch, model, tokenizer):
    """The model makes the first cache; its inputs are given by position, with gradients; the lists are built anew."""
    old = batch.get("past_key_values")
    inputs = {key: batch[key] for key in ("attention_mask", "position_ids")}
    cache = old and cache_of(layers(old))
    output = model.forward(batch["input_ids"], cache, use_cache=True, logits_to_keep=1, **inputs)
    after = {"request_ids": batch["request_ids"], "token_ids": [], "tokens_remaining": [], "finish_reasons": []}
    newest = output.logits[:, -1].max(dim=-1).indices
    for row, token in enumerate(newest):
        ids, left, reason = (batch[key][row] for key in LISTS[1:])
        if left:
            ids, left = [*ids, int(token)], left - 1
            if token == model.config.eos_token_id:
                left, reason = 0, "stop"
            elif left == 0:
                reason = "length"
        for key, value in zip(LISTS[1:], (ids, left, reason), strict=True):
            after[key].append(value)
    mask = torch.cat([batch["attention_mask"], batch["attention_mask"].new_ones(len(newest), 1)], dim=1)
    positions = batch["position_ids"][:, [-1]] + 1
    after |= {"input_ids": newest.unsqueeze(1), "attention_mask": mask, "position_ids": positions}
    return after | {"past_key_values": output.past_key_values}


@wrong("generate_next_token", "changed its argument: `batch['token_ids']`")
def appended_in_place(batch, model, tokenizer):
    after = one_pass(batch, model, tokenizer)
    for old, new in zip(batch["token_ids"], after["token_ids"], strict=True):
        old[:] = new
    return after


@wrong("generate_next_token", "`input_ids` has shape [6], and should have [6, 1]")
def flat_input_ids(batch, model, tokenizer):
    after = one_pass(batch, model, tokenizer)
    return after | {"input_ids": after["input_ids"][:, 0]}


@wrong("generate_next_token", "calls the model 3 times for one step")
def row_by_row(batch, model, tokenizer):
    for row in range(2):
        model(input_ids=batch["input_ids"][[row]])
    return one_pass(batch, model, tokenizer)


@wrong("generate_next_token", "calls the model without the cache")
def cache_not_given(batch, model, tokenizer):
    if "past_key_values" in batch:  # the mask must fit the tokens, or the model raises an error
        batch = batch | {"attention_mask": torch.ones_like(batch["input_ids"])}
        return one_pass(batch, model, tokenizer, ["past_key_values"])
    return one_pass(batch, model, tokenizer)


@wrong("generate_next_token", "the result has no 'past_key_values'")
def cache_not_stored(batch, model, tokenizer):
    return batch | {key: value for key, value in one_pass(batch, model, tokenizer).items() if key != "past_key_values"}


@wrong("generate_next_token", "`tokens_remaining` should be")
def finished_rows_count_on(batch, model, tokenizer):
    after = one_pass(batch, model, tokenizer)
    pairs = zip(after["tokens_remaining"], batch["tokens_remaining"], strict=True)
    return after | {"tokens_remaining": [left if before else -1 for left, before in pairs]}


@wrong("generate_next_token", "`finish_reasons` should be")
def reasons_made_anew(batch, model, tokenizer):
    after = one_pass(batch, model, tokenizer)
    newest = [tokenizer.eos_token_id == token for [token] in after["input_ids"].tolist()]
    pairs = zip(newest, after["tokens_remaining"], strict=True)
    return after | {"finish_reasons": [None if left else "stop" if eos else "length" for eos, left in pairs]}


@wrong("generate_next_token", "`token_ids` should be")
def the_second_best(batch, model, tokenizer):
    after = one_pass(batch, model, tokenizer)
    return after | {"token_ids": [[token + 1 for token in row] for row in after["token_ids"]]}


@wrong("generate_next_token", "`finish_reasons` should be")
def another_eos(batch, model, tokenizer):
    tokenizer.eos_token_id, eos = 0, tokenizer.eos_token_id
    try:
        return one_pass(batch, model, tokenizer)
    finally:
        tokenizer.eos_token_id = eos


@wrong("generate_next_token", "`input_ids`")
def finished_rows_hold_no_token(batch, model, tokenizer):
    after = one_pass(batch, model, tokenizer)
    left = torch.tensor(after["tokens_remaining"], device=model.device)[:, None]
    return after | {"input_ids": after["input_ids"].masked_fill(left == 0, -100)}


@wrong("generate_next_token", "calls the course's own `generate_next_token`")
def the_course_s_own_step(batch, model, tokenizer):
    return batching.generate_next_token(batch, model, tokenizer)


# --- merge_masks ----------------------------------------------------------------------------------------------------


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


@wrong("merge_masks", "holds float32, and should hold int64")
def float_masks(first, second):
    return stack_masks(first, second).float()


# --- merge_batches --------------------------------------------------------------------------------------------------


@right("merge_batches")
def with_caches_of_its_own(first, second):
    """Layer by layer into tensors of ones: what is in hidden columns makes no difference."""
    merged = {key: first[key] + second[key] for key in LISTS} | {"responses": []}
    merged["attention_mask"] = as_lists(first["attention_mask"].cpu(), second["attention_mask"]).to(
        first["attention_mask"].device
    )
    for key in ("input_ids", "position_ids"):
        merged[key] = torch.vstack((first[key], second[key]))
    pairs = []
    for old in zip(layers(first["past_key_values"]), layers(second["past_key_values"]), strict=True):
        both = []
        for one, two in zip(*old, strict=True):
            new = one.new_ones(len(one) + len(two), one.size(1), max(one.size(2), two.size(2)), one.size(3))
            new[: len(one), :, new.size(2) - one.size(2) :] = one
            new[len(one) :, :, new.size(2) - two.size(2) :] = two
            both.append(new)
        pairs.append(both)
    return merged | {"past_key_values": cache_of(pairs)}


@right("merge_batches")
def with_the_cache_s_functions(first, second):
    columns = first["attention_mask"].size(1) - second["attention_mask"].size(1)
    caches = [kv_cache.left_pad(first["past_key_values"], max(0, -columns))]
    caches.append(kv_cache.left_pad(second["past_key_values"], max(0, columns)))
    merged = {key: [*first[key], *second[key]] for key in LISTS}
    merged |= {key: torch.cat([first[key], second[key]]) for key in ("input_ids", "position_ids")}
    masks = stack_masks(first["attention_mask"], second["attention_mask"])
    return merged | {"attention_mask": masks, "past_key_values": kv_cache.concatenate(*caches)}


def with_cache(first, second, change):
    merged = stack(first, second)
    return merged | {"past_key_values": cache_of(change(layers(merged["past_key_values"])))}


@wrong("merge_batches", "`past_key_values` has 1 layers, and should have 2")
def one_layer_merged(first, second):
    return with_cache(first, second, lambda pairs: pairs[:1])


@wrong("merge_batches", "keys of layer 0 holds float64, and should hold float32")
def cache_in_double(first, second):
    return with_cache(first, second, lambda pairs: [[each.double() for each in pair] for pair in pairs])


@wrong("merge_batches", "keys of layer 0 is on the device 'meta'")
def cache_elsewhere(first, second):
    return with_cache(first, second, lambda pairs: [[each.to("meta") for each in pair] for pair in pairs])


@wrong("merge_batches", "changed its argument: `first['request_ids']`")
def first_is_extended(first, second):
    merged = stack(first, second)
    first["request_ids"] += second["request_ids"]
    return merged


@wrong("merge_batches", "changed its argument: keys of layer 0")
def first_cache_is_reused(first, second):
    merged = stack(first, second)
    for old, new in zip(first["past_key_values"].layers, merged["past_key_values"].layers, strict=True):
        old.keys, old.values = new.keys, new.values
    return merged


@wrong("merge_batches", "should stay a transformers cache, which the model takes; it is a list")
def list_of_tuples(first, second):
    merged = stack(first, second)
    return merged | {"past_key_values": layers(merged["past_key_values"])}


@wrong("merge_batches", "the result has no 'finish_reasons'")
def the_lesson_s_cell(first, second):
    return {key: value for key, value in stack(first, second).items() if key != "finish_reasons"}


@wrong("merge_batches", "None (is a `return` missing?)")
def no_return(first, second):
    stack(first, second)


@wrong("merge_batches", "calls the course's own `merge_batches`")
def the_course_s_own_merge(first, second):
    return batching.merge_batches(first, second)


# --- filter_rows and filter_batch -----------------------------------------------------------------------------------


@right("filter_rows")
def with_a_boolean_index(batch):
    stays = torch.tensor([left > 0 for left in batch["tokens_remaining"]], device=batch["input_ids"].device)
    filtered = {key: list(compress(batch[key], stays)) for key in LISTS}
    filtered |= {key: batch[key][stays] for key in ("input_ids", "position_ids", "attention_mask")}
    pairs = layers(batch["past_key_values"])
    filtered["past_key_values"] = cache_of([(keys[stays], values[stays]) for keys, values in pairs])
    return filtered, (~stays).nonzero().flatten().tolist()


@right("filter_rows")
def popped_from_the_end(batch):
    removed = [row for row, left in enumerate(batch["tokens_remaining"]) if not left]
    filtered = {key: list(batch[key]) for key in LISTS}
    for row in reversed(removed):
        for key in LISTS:
            filtered[key].pop(row)
    stay = np.flatnonzero(batch["tokens_remaining"])
    filtered |= {key: batch[key][stay] for key in ("input_ids", "position_ids", "attention_mask")}
    return [filtered | {"past_key_values": kv_cache.select_rows(batch["past_key_values"], stay)}, removed]


@right("filter_batch")
def until_a_column_is_needed(batch):
    filtered, removed = with_a_boolean_index(batch)
    if not filtered["request_ids"]:
        return {"request_ids": []}, removed
    columns = 0
    while not filtered["attention_mask"][:, columns].any():
        columns += 1
    filtered["attention_mask"] = filtered["attention_mask"][:, columns:]
    return filtered | {"past_key_values": kv_cache.trim_left(filtered["past_key_values"], columns)}, removed


@wrong("filter_rows", "should be 2 things: the batch and the list of the removed rows, and is a dict")
def batch_only(batch):
    return unfinished(batch)[0]


@wrong("filter_rows", "the batch should be a dict, and is")
def the_list_first(batch):
    return unfinished(batch)[::-1]


@wrong("filter_rows", "changed its argument: `batch['request_ids']`")
def removed_in_place(batch):
    filtered, removed = unfinished(batch)
    batch["request_ids"][:] = filtered["request_ids"]
    return filtered, removed


@wrong("filter_rows", "the list of the removed rows should be a list, and is a tensor")
def removed_as_a_tensor(batch):
    return unfinished(batch)[0], torch.tensor(split(batch)[1])


@wrong("filter_rows", "returns the batch that it was given")
def nothing_to_do(batch):
    return unfinished(batch) if split(batch)[1] else (batch, [])


@wrong("filter_rows", "changes a list while it iterates over it")
def popped_in_the_lists_only(batch):
    lists = {key: list(batch[key]) for key in LISTS}
    removed = []
    for row, left in enumerate(lists["tokens_remaining"]):
        if left == 0:
            removed.append(row)
            for each in lists.values():
                each.pop(row)
    stay = [row for row in range(len(batch["request_ids"])) if row not in removed]
    return select(batch, stay) | lists, removed


@wrong("filter_rows", "calls the course's own `filter_batch`")
@wrong("filter_batch", "calls the course's own `filter_batch`")
def the_course_s_own_filter(batch):
    return batching.filter_batch(batch)


@wrong("filter_batch", "the mask still has 2 columns of padding")
def not_trimmed(batch):
    return unfinished(batch)


def trim(batch, columns_of, mask=True, cache=True):
    """Remove finished rows, and `columns_of(the mask of the rows that stay)` columns."""
    stay, removed = split(batch)
    new = select(batch, stay)
    other = select(batch, stay, slice(max(0, columns_of(new["attention_mask"])) if stay else 0, None))
    parts = {"attention_mask": mask, "past_key_values": cache}
    return new | {key: other[key] for key, trims in parts.items() if trims}, removed


def shared(mask):
    return mask.size(1) - int(mask.sum(dim=1).max())


@wrong("filter_batch", "trims one column too many from the mask: row 1's first real token is gone")
def one_column_too_many_trimmed(batch):
    return trim(batch, lambda mask: shared(mask) + 1)


@wrong("filter_batch", "trims one column too many from the mask")
def trimmed_by_the_first_row(batch):
    return trim(batch, lambda mask: mask.size(1) - int(mask[0].sum()))


@wrong("filter_batch", "the mask still has one column of padding")
def one_column_left(batch):
    return trim(batch, lambda mask: shared(mask) - 1)


@wrong("filter_batch", "the cache still has 2 columns of padding")
def only_the_mask_is_trimmed(batch):
    return trim(batch, shared, cache=False)


@wrong("filter_batch", "the mask still has 2 columns of padding")
def only_the_cache_is_trimmed(batch):
    return trim(batch, shared, mask=False)


# --- continuous_loop ------------------------------------------------------------------------------------------------


@right("continuous_loop")
def prefill_without_decode(requests, max_batch_size):
    """In an iteration either requests join or all rows decode: the passes are the same."""
    queue, outputs, running = list(enumerate(requests)), {}, {"request_ids": []}
    while queue or running["request_ids"]:
        free = max_batch_size - len(running["request_ids"])
        if queue and free:
            joining = [Request(*request, f"r{number}") for number, request in queue[:free]]
            queue = queue[free:]
            new = batching.generate_next_token(batching.init_batch(joining))
            running = batching.merge_batches(running, new)
        else:
            running = batching.generate_next_token(running)
        outputs |= dict(zip(running["request_ids"], running["token_ids"], strict=True))
        running, _ = batching.filter_batch(running)
    return [outputs[f"r{number}"] for number in range(len(requests))]


@right("continuous_loop")
def newcomers_on_top(requests, max_batch_size):
    """Ids of the verbs' own making, rows in another order, and outputs kept as lists that grow."""
    waiting, running, owner, outputs = list(range(len(requests))), {"request_ids": []}, {}, [None] * len(requests)
    while True:
        free = max_batch_size - len(running["request_ids"])
        if joining := [waiting.pop(0) for _ in range(min(free, len(waiting)))]:
            batch = batching.init_batch([requests[number] for number in joining])
            owner |= dict(zip(batch["request_ids"], joining, strict=True))
            running = batching.merge_batches(batching.generate_next_token(batch), running)
        for request_id, token_ids in zip(running["request_ids"], running.get("token_ids", []), strict=True):
            outputs[owner[request_id]] = token_ids
        running, removed = batching.filter_batch(running) if running["request_ids"] else (running, [])
        if removed:
            continue
        if not running["request_ids"]:
            return outputs
        running = batching.generate_next_token(running)
        for request_id, token_ids in zip(running["request_ids"], running["token_ids"], strict=True):
            outputs[owner[request_id]] = token_ids
        running, _ = batching.filter_batch(running)


def broken_loop(requests, rows, pick=lambda waiting: 0, lose=None, late=False):
    """The loop with a queue of its own: which request is next, whose output is lost, when rows leave."""
    waiting = [Request(*request, number) for number, request in enumerate(requests)]
    running, outputs, step = {"request_ids": []}, {}, 0
    while waiting or running["request_ids"]:
        joining = []
        while waiting and len(joining) < rows - len(running["request_ids"]):
            joining.append(waiting.pop(pick(waiting)))
        if joining:
            new = batching.generate_next_token(batching.init_batch(joining))
            running = batching.merge_batches(running, new)
        running, step = batching.generate_next_token(running), step + 1
        outputs |= dict(zip(running["request_ids"], running["token_ids"], strict=True))
        if not late or step % 2 == 0:
            running, _ = batching.filter_batch(running)
    outputs.pop(lose, None)
    return outputs


def in_list(outputs, count):
    return [outputs.get(number) for number in range(count)]


@wrong("continuous_loop", "the output of request 2 is missing")
def a_lost_output(requests, max_batch_size):
    return in_list(broken_loop(requests, max_batch_size, lose=2), len(requests))


@wrong("continuous_loop", "the output of request 2 is missing")
def a_shorter_list(requests, max_batch_size):
    outputs = broken_loop(requests, max_batch_size, lose=2)
    return [outputs[number] for number in sorted(outputs)]


@wrong("continuous_loop", "the output of request 0 is missing (it ends in its prefill)")
def lost_in_the_prefill(requests, max_batch_size):
    outputs = in_order(requests, max_batch_size)
    return [output if len(output) > 1 else None for output in outputs]


@wrong("continuous_loop", "the output of request 6 is missing")
def last_one_forgotten(requests, max_batch_size):
    return in_order(requests[:-1], max_batch_size)


@wrong("continuous_loop", "lets request 6 join before request 3")
def newest_first(requests, max_batch_size):
    return in_list(broken_loop(requests, max_batch_size, lambda waiting: -1), len(requests))


@wrong("continuous_loop", "Requests join in the order in which they came")
def shortest_first(requests, max_batch_size):
    def shortest(waiting):
        return min(range(len(waiting)), key=lambda place: waiting[place].max_tokens)

    return in_list(broken_loop(requests, max_batch_size, shortest), len(requests))


@wrong("continuous_loop", "forward pass 10 should be: prefill of requests [5]. It is: decode step of")
def rows_leave_late(requests, max_batch_size):
    return in_list(broken_loop(requests, max_batch_size, late=True), len(requests))


@wrong("continuous_loop", "`the list of outputs` should be a list, and is a dict")
def outputs_by_id(requests, max_batch_size):
    return serve(requests, max_batch_size)


@wrong("continuous_loop", "the output of request 0 has 1 tokens, and should have")
def prefill_only(requests, max_batch_size):
    outputs = in_order(requests, max_batch_size)
    return outputs if max_batch_size == 3 else [output[:1] for output in outputs]


@wrong("continuous_loop", "the output of request 0 is that of request 1: rows were mixed up")
def mixed_up(requests, max_batch_size):
    outputs = in_order(requests, max_batch_size)
    return [outputs[1], outputs[0], *outputs[2:]]


@wrong("continuous_loop", "calls the course's own `generate_continuous`")
def the_course_s_own_loop(requests, max_batch_size):
    return [output.token_ids for output in generate_continuous(requests, max_batch_size).outputs]
