"""Lesson 3: the four verbs, masks and rows that are merged and removed, and the loop."""

import numpy as np
import torch
from torch.nn.functional import pad

from answers import ALMOST, WRONG, right, solutions
from helpers import batching, load_model
from helpers.checks.edits import edited
from helpers.checks.exercises.lesson_3_joining import layers_of, with_layers
from helpers.checks.exercises.lesson_3_leaving import select, split, used_columns

init, one_pass = solutions.init_batch, solutions.generate_next_token
in_order, together = solutions.continuous_loop, solutions.join_and_leave
LISTS = ("request_ids", "token_ids", "tokens_remaining", "finish_reasons")


@right("init_batch")
def with_numpy(requests, model, tokenizer):
    texts = [[*tokenizer(prompt)["input_ids"], *ids] for prompt, ids, _ in requests]
    shape = len(texts), max(map(len, texts))
    ids, positions, mask = np.full(shape, model.config.vocab_size - 1), np.ones(shape, int), np.zeros(shape, int)
    for row, text in enumerate(texts):
        own = row, slice(len(text))
        ids[own], positions[own], mask[own] = text, range(len(text)), 1
    tensors = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
    tensors = {key: torch.from_numpy(value).to(model.device) for key, value in tensors.items()}
    budgets = [np.int64(max_tokens - len(ids)) for _, ids, max_tokens in requests]
    lists = [np.arange(len(requests)).tolist(), [list(ids) for _, ids, _ in requests], budgets, [None] * len(requests)]
    return tensors | dict(zip(LISTS, lists, strict=True))


ALMOST["init_batch"] |= {
    "uses one list for every row": lambda batch, requests, *_: (
        batch if any(batch["token_ids"]) else batch | {"token_ids": [[]] * len(requests)}
    ),
    "puts the requests' own lists": lambda batch, requests, *_: batch | {"token_ids": [each[1] for each in requests]},
    "`input_ids` has shape [3, 6], but should have [3, 5]": lambda batch, *_: (
        batch | {key: pad(batch[key], (1, 0)) for key in ("input_ids", "position_ids", "attention_mask")}
    ),
    "`forward passes` should be [], but is [(3, 0, 5)]": lambda batch, _, *model: one_pass(batch, *model) and batch,
}


@right("generate_next_token")
def finished_rows_frozen(batch, model, tokenizer):
    """A finished row's mask and position stay as they are: it makes no difference to any other row."""
    after = one_pass(batch, model, tokenizer)
    on = torch.tensor([[int(left > 0)] for left in after["tokens_remaining"]], device=model.device)
    mask = torch.cat([batch["attention_mask"], on], dim=1)
    return after | {"attention_mask": mask, "position_ids": mask.sum(dim=1, keepdim=True) - on}


def row_by_row(batch, model, tokenizer):
    for row in range(2):
        model(input_ids=batch["input_ids"][[row]])
    return one_pass(batch, model, tokenizer)


def without_the_cache(batch, model, tokenizer):
    if "past_key_values" not in batch:
        return one_pass(batch, model, tokenizer)
    batch = batch | {"attention_mask": torch.ones_like(batch["input_ids"])}  # or the model raises an error
    return edited(one_pass, "past_key_values=cache, -> ")(batch, model, tokenizer)


def finished_rows_hold_no_token(after, *_):
    left = torch.tensor(after["tokens_remaining"], device=after["input_ids"].device)[:, None]
    return after | {"input_ids": after["input_ids"].masked_fill(left == 0, -100)}


ALMOST["generate_next_token"] |= {
    "`input_ids` has shape [6], but should": lambda after, *_: after | {"input_ids": after["input_ids"][:, 0]},
    "`input_ids`, row": finished_rows_hold_no_token,
    "the result has no 'past_key_values'": lambda after, *_: {k: after[k] for k in after if k != "past_key_values"},
}
WRONG["generate_next_token"] |= {
    "calls the model 3 times for one step": row_by_row,
    "calls the model without the cache": without_the_cache,
    "has its own": lambda batch, model, tokenizer: one_pass(batch, model, load_model()[1]),  # and so its EOS
}


def as_lists(first, second):
    rows = first.tolist() + second.tolist()
    width = max(map(len, rows))
    return torch.tensor([row[:-1] + [0] * (width - len(row)) + row[-1:] for row in rows])


@right("merge_batches")
def with_caches_of_its_own(first, second):
    """Layer by layer into tensors of ones: what is in hidden columns makes no difference."""
    merged = {key: first[key] + second[key] for key in LISTS} | {"responses": []}
    masks = first["attention_mask"], second["attention_mask"]
    merged["attention_mask"] = as_lists(*masks).to(masks[0].device)
    for key in ("input_ids", "position_ids"):
        merged[key] = torch.vstack((first[key], second[key]))
    layers = []
    for old in zip(layers_of(first), layers_of(second), strict=True):
        layers.append([])
        for top, bottom in zip(*old, strict=True):
            new = top.new_ones(len(top) + len(bottom), top.size(1), max(top.size(2), bottom.size(2)), top.size(3))
            new[: len(top), :, : top.size(2)] = top
            new[len(top) :, :, : bottom.size(2)] = bottom
            layers[-1].append(new)
    return with_layers(merged, layers)


def first_cache_is_reused(merged, first, second):
    for old, new in zip(first["past_key_values"].layers, merged["past_key_values"].layers, strict=True):
        old.keys, old.values = new.keys, new.values
    return merged


ALMOST["merge_batches"] |= {
    "`past_key_values` has 1 layers, but should have 2": lambda merged, *_: with_layers(merged, layers_of(merged)[:1]),
    "keys of layer 0 holds float64, but should hold float32": lambda merged, *_: with_layers(
        merged, [[each.double() for each in pair] for pair in layers_of(merged)]
    ),
    "should be a transformers cache": lambda merged, *_: merged | {"past_key_values": layers_of(merged)},
    "changed its argument: `first['request_ids']`": lambda merged, first, _: first["request_ids"].clear() or merged,
    "changed its argument: keys of layer 0": first_cache_is_reused,
}


@right("filter_batch")
def column_by_column(batch):
    removed = [row for row, left in enumerate(batch["tokens_remaining"]) if not left]
    stay = list(np.flatnonzero(batch["tokens_remaining"]))
    if not stay:
        return {"request_ids": []}, removed
    filtered = {key: [batch[key][row] for row in stay] for key in LISTS}
    filtered |= {key: batch[key][stay] for key in ("input_ids", "position_ids", "attention_mask")}
    mask = filtered["attention_mask"]
    columns = [column for column in range(mask.size(1)) if mask[:, column].any()]
    filtered["attention_mask"] = mask[:, columns]
    layers = [[tensor[stay][:, :, columns[:-1]] for tensor in pair] for pair in layers_of(batch)]
    return with_layers(filtered, layers), removed


ALMOST["filter_batch"] |= {
    "`request_ids` should be [], but is ['a', 'b']": lambda result, batch: (
        result if result[0]["request_ids"] else ({**batch}, result[1])
    ),
}


def last_into_free_places(batch):
    """Fill the place of each finished row with the last of those that stay."""
    left, (stay, removed) = batch["tokens_remaining"], split(batch)
    order = [row if left[row] > 0 else stay.pop() for row in range(len(stay))]
    return select(batch, order, used_columns(batch["attention_mask"][order])), removed


def trimmed(batch, change, cache=True):
    """Remove finished rows, and other columns than those without a token."""
    stay, removed = split(batch)
    new = select(batch, stay)
    other = select(batch, stay, change(used_columns(new["attention_mask"])) if stay else None)
    return other if cache else other | {"past_key_values": new["past_key_values"]}, removed


def one_more(used):
    """Keep the first of the columns without a token."""
    used = used.clone()
    used[(~used).nonzero()[:1]] = True
    return used


WRONG["filter_batch"] |= {
    "leaves one column without a token in the mask": lambda batch: trimmed(batch, one_more),
    "those that stay keep their order": last_into_free_places,
}


@right("join_and_leave")
def with_names_and_without_a_step_of_finished_rows(first, second, model, tokenizer):
    batches = [one_pass(init(group, model, tokenizer), model, tokenizer) for group in (first, second)]
    for name, batch in zip("ab", batches, strict=True):
        batch["request_ids"] = [(name, number) for number in batch["request_ids"]]
    if any(batches[0]["tokens_remaining"]):
        batches[0] = one_pass(batches[0], model, tokenizer)
    batch, outputs = solutions.merge_batches(*batches), {}
    while True:
        outputs |= dict(zip(batch["request_ids"], batch["token_ids"], strict=True))
        batch, _ = solutions.filter_batch(batch)
        if not batch["request_ids"]:
            return [outputs[name] for name in sorted(outputs)]
        batch = one_pass(batch, model, tokenizer)


def with_the_text_of_every_request(first, second, model, tokenizer):
    """Prefill all texts anew in every step: no cache, and so no row to merge."""
    outputs = [list(token_ids) for _, token_ids, _ in [*first, *second]]
    left = [most - len(token_ids) for _, token_ids, most in [*first, *second]]
    while any(left):
        rows = [number for number, each in enumerate(left) if each]
        texts = [(first + second)[number][0] for number in rows]
        batch = init([(text, outputs[n], 99) for text, n in zip(texts, rows, strict=True)], model, tokenizer)
        batch = one_pass(batch, model, tokenizer)
        for number, token_ids, reason in zip(rows, batch["token_ids"], batch["finish_reasons"], strict=True):
            outputs[number], left[number] = token_ids, 0 if reason == "stop" else left[number] - 1
    return outputs


def one_group_after_the_other(first, second, model, tokenizer):
    outputs = []
    for group in (first, second):
        batch = init(group, model, tokenizer)
        while any(batch["tokens_remaining"]):
            batch = one_pass(batch, model, tokenizer)
        outputs += batch["token_ids"]
    return outputs


def one_by_one(first, second, model, tokenizer):
    return [with_the_text_of_every_request([each], [], model, tokenizer)[0] for each in [*first, *second]]


WRONG["join_and_leave"] |= {
    # Two verbs that agree: one pads on the right and the other one leaves the pads visible.
    "two of them agree on something wrong": edited(
        together,
        "running = merge_batches.solution(running, joining) -> "
        "running = merge_batches.solution(running, joining); running['attention_mask'].fill_(1)",
    ),
    "runs one row at a time": one_by_one,
    "begins with 4 rows": with_the_text_of_every_request,
    "once merged, both groups share each pass": one_group_after_the_other,
    "in its last pass: those whose outputs are complete leave": edited(
        together, "running, _ = filter_batch.solution(running) -> if not any(running['tokens_remaining']): break"
    ),
}


@right("continuous_loop")
def newcomers_on_top(requests, max_batch_size):
    """Ids of the verbs' own making, rows in another order, and outputs noted after every step."""
    waiting, running, owner, outputs = list(range(len(requests))), {"request_ids": []}, {}, [None] * len(requests)
    passes = 0
    while waiting or running["request_ids"]:
        joining = [n for n in waiting if requests[n][2] <= passes][: max_batch_size - len(running["request_ids"])]
        waiting = [number for number in waiting if number not in joining]
        if joining:
            batch = batching.init_batch([requests[number][:2] for number in joining])
            owner |= dict(zip(batch["request_ids"], joining, strict=True))
            running = batching.merge_batches(batching.generate_next_token(batch), running)
            passes += 1
        passes += 1  # also if nothing runs
        if running["request_ids"]:
            running = batching.generate_next_token(running)
            for request_id, token_ids in zip(running["request_ids"], running["token_ids"], strict=True):
                outputs[owner[request_id]] = token_ids
            running, _ = batching.filter_batch(running)
    return outputs


WRONG["continuous_loop"] |= {
    "get free rows in their order of arrival": lambda requests, n: in_order(requests[::-1], n)[::-1],
    "forward pass 2 should be a prefill of 1 x": edited(
        in_order, "joining = min(free -> joining = min(free * (free > 1 or not running['request_ids'])"
    ),
    "returns no output for request 6": lambda requests, n: in_order(requests[:-1], n),
    "it finishes in its prefill": lambda *case: [out if len(out) > 1 else None for out in in_order(*case)],
    "returns 2 tokens for request 0, which": lambda *case: [out[:2] for out in in_order(*case)],
    "returns the output of request 1 for request 0": lambda *case: (out := in_order(*case))[1::-1] + out[2:],
    "does not generate for that request alone": lambda *case: [[token + 1 for token in out] for out in in_order(*case)],
}
