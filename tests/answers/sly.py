"""Answers that luck could pass: each is right for the data that a task's cases once had, and wrong for other data.

The piece of the message that is meant for each says what kind of data it misses.
"""

import json
import math
from hashlib import md5

import numpy as np
import torch

from answers import RIGHT, WRONG, right
from helpers.checks.edits import edited
from helpers.checks.exercises import EXERCISES
from helpers.checks.exercises.lesson_3_leaving import select, split

# --- lesson 1 -------------------------------------------------------------------------------------------------------


def best_above_minus_1000(logits):
    """A loop whose best logit so far begins at a number that is not small enough."""
    chosen = []
    for row in logits[:, -1].tolist():
        best, token = -1000.0, 0
        for number, logit in enumerate(row):
            if logit > best:
                best, token = logit, number
        chosen.append(token)
    return torch.tensor(chosen)


WRONG["greedy_step"] |= {
    "logits near -2,000": best_above_minus_1000,
    "a vocabulary of 5,000 tokens": lambda logits: logits[:, -1, :4096].argmax(dim=-1),
    "logits of shape [5, 1, 5]": lambda logits: logits[[0, 1, 2, *[0] * (len(logits) - 3)][: len(logits)], -1].argmax(
        -1
    ),
    "expected 1, got 0": lambda logits: (logits[:, -1].clamp(min=-2000.5)).argmax(dim=-1),
}


def eos_compared_with_is(token_ids, eos_id, max_tokens):
    kept = []
    for token in token_ids[:max_tokens]:
        kept.append(token)
        if token is eos_id:
            return kept, "stop"
    return kept, "length" if len(kept) == max_tokens else None


WRONG["stop"] |= {"large ids": eos_compared_with_is}


def forgets_eos(model, turns, n, drop=lambda model, token: token == model.config.eos_token_id):
    """The last token of a turn is not computed if a test calls it the end."""
    outputs, text, cached = [], turns[0][:, :0], None
    for turn in turns:
        text = torch.cat([text, turn], dim=1)
        outputs.append([])
        for _ in range(n):
            start = cached.get_seq_length() if cached is not None else 0
            result = model(input_ids=text[:, start:], past_key_values=cached, use_cache=True)
            cached = result.past_key_values
            token = result.logits[:, -1:].argmax(dim=-1)
            outputs[-1].append(token.item())
            text = torch.cat([text, token], dim=1)
        if drop(model, outputs[-1][-1]):
            text = text[:, :-1]
    return outputs


WRONG["cached_loop"] |= {
    "turns of 4 and 2 tokens, max_tokens 3": forgets_eos,
    "turns of 3 and 2 tokens, max_tokens 2": lambda *case: forgets_eos(*case, drop=lambda model, token: not token),
}

# --- lessons 2 and 3 ------------------------------------------------------------------------------------------------


def newest_by(column):
    """A verb that finds the newest token of a prefill from something else than the mask."""

    def step(batch, model, tokenizer):
        one_pass, newest = EXERCISES["generate_next_token"].solution, column(batch)
        if "past_key_values" in batch:
            return one_pass(batch, model, tokenizer)
        return one_pass(batch, model, tokenizer, column=lambda mask, width: newest)

    return step


WRONG["generate_next_token"] |= {
    "a prefill whose pads have id and position 3": newest_by(lambda batch: batch["position_ids"].argmax(dim=1)),
    "pads have id and position 3, on the course's": newest_by(
        lambda batch: (batch["input_ids"] != 0).sum(dim=1).clamp(min=1) - 1
    ),
}


def one_gap(first, second):
    """Masks whose rows are ones, one gap, ones: how the course's own verbs never leave them otherwise."""
    width = max(first.size(1), second.size(1))
    rows = []
    for row in [*first.tolist(), *second.tolist()]:
        front = row.index(0) if 0 in row else len(row) - 1
        behind = sum(row) - front
        rows.append([1] * front + [0] * (len(row) - sum(row)) + [1] * (behind - 1) + [0] * (width - len(row)) + [1])
    return torch.tensor(rows)


WRONG["merge_batches"] |= {
    "`attention_mask`, row": lambda first, second: (
        EXERCISES["merge_batches"].solution(first, second)
        | {"attention_mask": one_gap(first["attention_mask"], second["attention_mask"])}
    ),
}


def first_and_last_used(mask):
    """Remove what is between the first tokens and the newest one."""
    used = torch.zeros(mask.size(1), dtype=torch.bool)
    if len(mask):
        used[: int(mask.cumprod(dim=1).sum(dim=1).max())] = True
        used[-int(mask.flip(1).cumprod(dim=1).sum(dim=1).max()) :] = True
    return used


WRONG["filter_batch"] |= {
    "row 1 has two gaps": lambda batch: (
        select(batch, (rows := split(batch))[0], first_and_last_used(batch["attention_mask"][rows[0]])),
        rows[1],
    ),
}


def recorded_by_prompt(requests, rows):
    outputs = EXERCISES["continuous_loop"].solution(requests, rows)
    by_prompt = {prompt: output for (prompt, *_), output in zip(requests, outputs, strict=True)}
    return [by_prompt[prompt] for prompt, *_ in requests]


WRONG["continuous_loop"] |= {"records outputs by prompt": recorded_by_prompt}

# --- lessons 4 to 7 -------------------------------------------------------------------------------------------------


def one_chunk_of_a_prompt(running, waiting, rows, tokens):
    """The second waiting request is planned whole or not at all."""
    plan = EXERCISES["plan_chunks"].solution(running, waiting, rows, tokens)
    whole = {sequence.request_id: sequence.num_uncomputed_tokens for sequence in waiting[1:]}
    return [(name, count) for name, count in plan if count >= whole.get(name, 0)]


WRONG["plan_chunks"] |= {
    "although v could compute 1 tokens": one_chunk_of_a_prompt,
    "plans 5 tokens for s, although 9 fit": lambda running, waiting, rows, tokens: [
        (name, min(count, {sequence.request_id: sequence.prompt_tokens for sequence in waiting[1:]}.get(name, count)))
        for name, count in EXERCISES["plan_chunks"].solution(running, waiting, rows, tokens)
    ],
}


def chained_text(separator):
    """Names that are the salt and all tokens so far, joined."""

    def names(token_ids, size, salt):
        ends = range(size, len(token_ids) + 1, size)
        return [separator.join([salt, *map(str, token_ids[:end])]) for end in ends]

    return names


def polynomial(base):
    def names(token_ids, size, salt):
        value, found = salt, []
        for end in range(size, len(token_ids) + 1, size):
            number = 0
            for token in token_ids[end - size : end]:
                number = number * base + token
            value = (value, number)
            found.append(value)
        return found

    return names


WRONG["prefix_hashes"] |= {
    "another salt can look like this one": lambda ids, size, salt: [
        salt + "".join(str(ids[start - size : start]) for start in range(size, end + 1, size))
        for end in range(size, len(ids) + 1, size)
    ],
    "with the salt 'x 7 3 9 1'": chained_text(" "),
    "block 0 of [0, 31]": polynomial(31),
    "with salt 'None'": lambda ids, size, salt: EXERCISES["prefix_hashes"].solution(ids, size, salt or "None"),
}
# --- lessons 9 and 11 ------------------------------------------------------------------------------------------------


def everything_behind_data(pieces):
    rest = b""
    for piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            data = "\n".join(
                line.partition("data:")[2].strip() for line in event.decode().split("\n") if "data:" in line
            )
            if data == "[DONE]":
                return
            if data:
                yield json.loads(data)


WRONG["read_events"] |= {"JSONDecodeError": everything_behind_data}


def softmax_from(largest):
    def softmax(logits, temperature):
        scores = [logit / temperature for logit in logits]
        weights = [math.exp(score - largest(scores)) for score in scores]
        return [weight / sum(weights) for weight in weights]

    return softmax


WRONG["softmax"] |= {
    "subtracts more than the largest logit if all are negative": softmax_from(lambda scores: max(0, *scores)),
}


def masked_with(low):
    def softmax(logits, allowed):
        scores = [logit if token_id in allowed else low for token_id, logit in enumerate(logits)]
        weights = [math.exp(score - max(scores)) for score in scores]
        return [weight / sum(weights) for weight in weights]

    return softmax


WRONG["masked_softmax"] |= {"a logit that is not small enough": masked_with(-1000.0)}

# --- lessons 13 to 18 ------------------------------------------------------------------------------------------------


def drafts_from_text(ids, k, remaining):
    for n in (3, 2, 1):
        text, last = " ".join(map(str, ids[:-1])), " ".join(map(str, ids[-n:]))
        if len(ids) > n and (found := text.rfind(last)) >= 0:
            return ids[text[:found].count(" ") + n :][: min(k, remaining - 1)]
    return []


def drafts_compared_with_is(ids, k, remaining):
    for n in (3, 2, 1):
        for start in range(len(ids) - n - 1, -1, -1):
            if all(first is second for first, second in zip(ids[start : start + n], ids[-n:], strict=True)):
                return ids[start + n :][: min(k, remaining - 1)]
    return []


WRONG["propose"] |= {
    "tokens [300, 4000, 50256, 0, 300, 4000, 50256]": drafts_compared_with_is,
    "compares texts of digits": drafts_from_text,
}
WRONG["verify"] |= {
    "EOS is 9": lambda drafts, chosen, eos: EXERCISES["verify"].solution(drafts, chosen, 0),
    "EOS is 50256": lambda drafts, chosen, eos: EXERCISES["verify"].solution(
        drafts, chosen, eos if eos < 256 else None
    ),
}
WRONG["best_k"] |= {
    "times can rise in stairs": lambda acceptance, rows, milliseconds: next(
        k
        for k in range(len(milliseconds))
        if rows * (k + 2) >= len(milliseconds)
        or sum(acceptance**n for n in range(k + 2)) / milliseconds[rows * (k + 2)]
        <= sum(acceptance**n for n in range(k + 1)) / milliseconds[rows * (k + 1)]
    ),
}


def without_repetitions(events):
    streams = EXERCISES["deliver"].solution(events)
    return {name: [a for n, a in enumerate(tokens) if a not in tokens[:n]] for name, tokens in streams.items()}


def never_again(events):
    """Once a replica is lost, its tokens don't count."""
    lost, kept = set(), []
    for event in events:
        lost |= set(event[1:]) if event[0] == "lost" else set()
        kept += [event] if event[0] != "tokens" or event[1] not in lost else []
    return EXERCISES["deliver"].solution(kept)


def best_above(lowest):
    """A loop whose best logit so far begins at a number that is not small enough."""

    def greedy_token(shares):
        sent, token = [], 0
        for own in shares:
            best, best_token = lowest, token
            for logit in own:
                if logit > best:
                    best, best_token = logit, token
                token += 1
            sent.append((best, best_token))
        return sent, max(sent, key=lambda pair: pair[0])[1]

    return greedy_token


def looked_up_in_the_whole_vocabulary(shares):
    joined = [logit for own in shares for logit in own]
    sent = [(max(own), joined.index(max(own))) for own in shares]
    return sent, joined.index(max(joined))


WRONG["greedy_token"] |= {
    "shares [[-4.0, -2.0], [-1.5, -3.0]": best_above(0.0),
    "what the workers send should be [(3.0, 1), (3.0, 4)], but is [(3.0, 1), (3.0, 1)]": (
        looked_up_in_the_whole_vocabulary
    ),
}
WRONG["deliver"] |= {
    "A text may contain a token several times": without_repetitions,
    "it can come back": lambda events: never_again(events),
}


def shortest_waits_first(requests, rows, constant, per_row):
    """Of the requests that wait, the shortest takes the next row."""
    now, running, times, todo = 0.0, {}, [0.0] * len(requests), list(range(len(requests)))
    while todo or running:
        if not running:
            now = max(now, min(requests[number][0] for number in todo))
        due = sorted((number for number in todo if requests[number][0] <= now), key=lambda n: requests[n][1])
        for number in due[: rows - len(running)]:
            running[number] = requests[number][1]
            todo.remove(number)
        now += constant + per_row * len(running)
        running = {number: left - 1 for number, left in running.items()}
        for number in [number for number, left in running.items() if not left]:
            times[number] = now
            del running[number]
    return times


WRONG["finish_times"] |= {"(arrival, tokens) [(0.0, 5), (0.0, 2), (0.0, 6)": shortest_waits_first}

# --- answers that passed `check`, some of them by luck ----------------------------------------------------------------


def chained(name):
    """Name a block by the previous name and its tokens."""

    def names(ids, size, salt):
        found = [salt]
        for end in range(size, len(ids) + 1, size):
            found.append(name(found[-1], ids[end - size : end]))
        return found[1:]

    return names


def of_all_so_far(name):
    return lambda ids, size, salt: [name(salt, ids[:end], size) for end in range(size, len(ids) + 1, size)]


WRONG["prefix_hashes"] |= {
    "with the salt 'x|[7, 3, 9, 1]'": chained(lambda name, block: f"{name}|{block}"),
    "gives the same name to": chained(lambda name, block: md5(f"{name} {block}".encode()).hexdigest()[:4]),
    "block 3 of": of_all_so_far(lambda salt, ids, size: (salt, len(ids), *ids[-3 * size :])),
    "with salt 'X'": of_all_so_far(lambda salt, ids, size: (salt.lower(), *ids)),
    "with salt 'yx'": of_all_so_far(lambda salt, ids, size: ("".join(sorted(salt)), *ids)),
}
for task, message, edit in [
    ("continuous_loop", "sets the clock back", "max(now, waiting[0][0]) -> waiting[0][0]"),
    ("reuse", "cached {'e': 3", "if name not in cached -> if name not in cached or len(blocks) > 2"),
    ("allowed_tokens", "choices ['nono']", "fewest(rest, vocabulary[1:]) -> fewest(rest, {*vocabulary[1:]} - {piece})"),
    ("masked_softmax", "the logit of the first allowed token", "max(scores) -> logits[allowed[0]]"),
    ("cached_blocks", "[('load', 'red', 'A1'), ('request', 'red'", "(files[name], -> (files[name], len(files),"),
    ("cached_blocks", "('load', 'blue', 'A2')", "(files[name], -> (files[name][:1],"),
    ("goodput", "a little too slow", "<= tpot -> < tpot + 0.1"),
    ("goodput", "single tokens", "max(1, len(t) - 1) -> max(2, len(t) - 1)"),
    ("allowed_tokens", "choices ['onto']", "fewest(rest, vocabulary[1:]) -> fewest(rest, vocabulary[2:])"),
    (
        "allowed_tokens",
        "text 'together', choices ['together']",
        "if text in choices -> if text in choices and choices[1:]",
    ),
]:
    WRONG[task][message] = edited(EXERCISES[task].solution, edit)

# --- right answers that were refused --------------------------------------------------------------------------------

RIGHT["failing_weights"] |= {"numpy_s_floats": lambda: list(np.array([0.3, 1.27, -0.5]))}


@right("quantize")
def zero_point_added_before_rounding(values, bits):
    low, high = min(0.0, *values), max(0.0, *values)
    scale, last = (high - low) / (2**bits - 1), 2**bits - 1
    return (
        [min(last, max(0, math.floor((v - low) / scale + 0.5))) for v in values],
        scale,
        math.floor(-low / scale + 0.5),
    )
