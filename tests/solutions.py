"""One right answer for every exercise, under the name of its task: what `helpers.checks` must accept.

A notebook's cell has `torch`, `pad`, `kv_cache`, `load_model()`'s pair and, in continuous_loop, the four verbs at hand;
so has this file. Requests are `(prompt, max_tokens)` tuples here, as in lesson 3.
"""

import json
from collections import deque
from itertools import pairwise

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from helpers import Request, batching, kv_cache, load_model

# --- lesson 1 -----------------------------------------------------------------------------------------------------


def greedy_step(logits):
    return logits[:, -1].argmax(dim=-1)


def cached_loop(model, prompt_ids, max_tokens):
    to_read, cache, generated = prompt_ids, kv_cache.new(), []
    for _ in range(max_tokens):
        with torch.no_grad():
            logits = model(input_ids=to_read, past_key_values=cache, use_cache=True).logits
        to_read = logits[:, -1].argmax(dim=-1, keepdim=True)
        generated.append(to_read.item())
    return generated


def stop(token_ids, eos_id, max_tokens):
    kept = token_ids[:max_tokens]
    if eos_id in kept:
        return kept[: kept.index(eos_id) + 1], "stop"
    return kept, "length" if len(kept) == max_tokens else None


def decode_floor(weight_bytes, bandwidth, operations, rate):
    return max(weight_bytes / bandwidth, operations / rate)


def kv_cache_bytes(layers, kv_heads, head_dim, number_bytes, tokens):
    return 2 * layers * kv_heads * head_dim * number_bytes * tokens


# --- lesson 2 -----------------------------------------------------------------------------------------------------


def left_pad(rows, pad_id, max_length):
    rows = [row[-max_length:] for row in rows]
    width = max(len(row) for row in rows)
    input_ids = [[pad_id] * (width - len(row)) + row for row in rows]
    attention_mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(input_ids), torch.tensor(attention_mask)


def position_ids(attention_mask, new_tokens):
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)[:, -new_tokens:]


def batch_throughput(lengths, seconds_per_pass):
    return sum(lengths) / (max(lengths) * seconds_per_pass)


def wasted_slot_steps(trace):
    return sum(row.new_tokens == 0 for iteration in trace.passes for row in iteration.row_steps)


# --- lesson 3 -----------------------------------------------------------------------------------------------------


def init_batch(requests):
    model, tokenizer = load_model()
    prompts = [tokenizer(prompt)["input_ids"] for prompt, _ in requests]
    width = max(len(prompt) for prompt in prompts)

    def left_padded(rows):
        padded = [[0] * (width - len(row)) + row for row in rows]
        return torch.tensor(padded, device=model.device)

    return {
        "request_ids": list(range(len(requests))),
        "input_ids": left_padded(prompts),
        "attention_mask": left_padded([[1] * len(prompt) for prompt in prompts]),
        "position_ids": left_padded([list(range(len(prompt))) for prompt in prompts]),
        "token_ids": [[] for _ in requests],
        "tokens_remaining": [max_tokens for _, max_tokens in requests],
    }


def generate_next_token(batch):
    model, tokenizer = load_model()
    cache = kv_cache.copy(batch.get("past_key_values", kv_cache.new()))
    with torch.no_grad():
        logits = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            position_ids=batch["position_ids"],
            past_key_values=cache,
            use_cache=True,
        ).logits
    next_ids = logits[:, -1].argmax(dim=-1)

    token_ids, tokens_remaining = list(batch["token_ids"]), list(batch["tokens_remaining"])
    for row, token in enumerate(next_ids.tolist()):
        if tokens_remaining[row] > 0:
            token_ids[row] = [*token_ids[row], token]
            done = token == tokenizer.eos_token_id
            tokens_remaining[row] = 0 if done else tokens_remaining[row] - 1

    return batch | {
        "input_ids": next_ids[:, None],
        "position_ids": batch["position_ids"][:, -1:] + 1,
        "attention_mask": pad(batch["attention_mask"], (0, 1), value=1),
        "past_key_values": cache,
        "token_ids": token_ids,
        "tokens_remaining": tokens_remaining,
    }


def merge_masks(first, second):
    width = max(first.size(1), second.size(1))
    return torch.cat([pad(mask, (width - mask.size(1), 0)) for mask in (first, second)])


def merge_batches(first, second):
    width = max(first["attention_mask"].size(1), second["attention_mask"].size(1))

    def widen(cache, mask):
        return kv_cache.left_pad(cache, width - mask.size(1))

    merged = {}
    for key in ("request_ids", "token_ids", "tokens_remaining"):
        merged[key] = first[key] + second[key]
    for key in ("input_ids", "position_ids"):
        merged[key] = torch.cat([first[key], second[key]])
    merged["attention_mask"] = merge_masks(first["attention_mask"], second["attention_mask"])
    merged["past_key_values"] = kv_cache.concatenate(
        widen(first["past_key_values"], first["attention_mask"]),
        widen(second["past_key_values"], second["attention_mask"]),
    )
    return merged


def filter_rows(batch):
    stay = [row for row, left in enumerate(batch["tokens_remaining"]) if left > 0]
    removed = [row for row, left in enumerate(batch["tokens_remaining"]) if left == 0]
    filtered = {}
    for key in ("request_ids", "token_ids", "tokens_remaining"):
        filtered[key] = [batch[key][row] for row in stay]
    for key in ("input_ids", "position_ids", "attention_mask"):
        filtered[key] = batch[key][stay]
    filtered["past_key_values"] = kv_cache.select_rows(batch["past_key_values"], stay)
    return filtered, removed


def filter_batch(batch):
    filtered, removed = filter_rows(batch)
    if filtered["request_ids"]:
        mask = filtered["attention_mask"]
        common = mask.size(1) - int(mask.sum(dim=1).max())
        filtered["attention_mask"] = mask[:, common:]
        filtered["past_key_values"] = kv_cache.trim_left(filtered["past_key_values"], common)
    return filtered, removed


def continuous_loop(requests, max_batch_size):
    waiting = deque(Request(prompt, max_tokens, number) for number, (prompt, max_tokens) in enumerate(requests))
    running, answers = {"request_ids": []}, {}
    while waiting or running["request_ids"]:
        free = max_batch_size - len(running["request_ids"])
        if waiting and free:
            joining = [waiting.popleft() for _ in range(min(free, len(waiting)))]
            prefilled = batching.generate_next_token(batching.init_batch(joining))
            running = batching.merge_batches(running, prefilled)
        running = batching.generate_next_token(running)
        for request_id, token_ids in zip(running["request_ids"], running["token_ids"], strict=True):
            answers[request_id] = token_ids
        running, _ = batching.filter_batch(running)
    return [answers[number] for number in range(len(requests))]


# --- lesson 4 -----------------------------------------------------------------------------------------------------


def what_to_read(prompt_tokens, generated, computed, budget):
    uncomputed = prompt_tokens + generated - computed
    tokens = min(uncomputed, budget)
    return tokens, tokens == uncomputed


def longest_first(waiting):
    longest = max((sequence.max_tokens for sequence in waiting), default=0)

    def third(sequence):
        return (3 * sequence.max_tokens > longest) + (3 * sequence.max_tokens > 2 * longest)

    return sorted(waiting, key=third, reverse=True)


def most_urgent(waiting, ageing):
    def urgency(sequence):
        return sequence.priority - sequence.waited // ageing, -sequence.waited

    return min(waiting, key=urgency, default=None)


def plan_chunks(running, waiting, rows, tokens):
    decoding = [sequence for sequence in running if sequence.is_decode]
    reading = [sequence for sequence in running if not sequence.is_decode]
    joining = waiting[: rows - len(running)]
    plan = []
    for sequence in decoding + reading + joining:
        chunk = min(sequence.num_uncomputed_tokens, tokens)
        if chunk > 0:
            plan.append((sequence.request_id, chunk))
            tokens -= chunk
    return plan


def worst_waits(arrivals, token_times):
    ttft, gap = 0, 0
    for request_id, times in token_times.items():
        ttft = max(ttft, times[0] - arrivals[request_id])
        for earlier, later in pairwise(times):
            gap = max(gap, later - earlier)
    return ttft, gap


# --- lesson 5 -----------------------------------------------------------------------------------------------------


def padded_tokens(lengths):
    rectangle = len(lengths) * max(lengths)
    return rectangle, rectangle - sum(lengths), sum(lengths)


def pack(chunks, cached):
    ids, positions, columns = [], [], []
    for chunk, past in zip(chunks, cached, strict=True):
        columns.append((len(ids), len(ids) + len(chunk)))
        positions.extend(range(past, past + len(chunk)))
        ids.extend(chunk)
    return ids, positions, columns


def block_mask(columns):
    total = columns[-1][1]
    mask = torch.zeros(total, total, dtype=torch.bool)
    for start, end in columns:
        mask[start:end, start:end] = torch.ones(end - start, end - start).tril()
    return mask


def attend_row(query, keys, values, columns):
    answers = []
    for (start, end), key, value in zip(columns, keys, values, strict=True):
        own, past = query[:, start:end], key.size(1) - (end - start)
        seen = torch.ones(end - start, key.size(1), dtype=torch.bool, device=query.device).tril(past)
        answers.append(scaled_dot_product_attention(own, key, value, seen))
    return torch.cat(answers, dim=1)


# --- lesson 6 -----------------------------------------------------------------------------------------------------


def unused_room(lengths, block_size):
    return sum(-length % block_size for length in lengths)


def slot_of(table, position, block_size):
    place, offset = divmod(position, block_size)
    if place >= len(table) or table[place] == -1:
        return None
    return table[place] * block_size + offset


def allocate(free, tables, request, tokens, block_size):
    table = tables.get(request, [])
    missing = -(-tokens // block_size) - len(table)
    if missing > len(free):
        return None
    new = [free.pop(0) for _ in range(missing)]
    tables[request] = table + new
    return new


def release(free, tables, request):
    table = tables.pop(request)
    in_use = {block for other in tables.values() for block in other}
    free.extend(block for block in table if block not in in_use)


def prefix_hashes(token_ids, block_size, salt):
    names, name = [], salt
    for end in range(block_size, len(token_ids) + 1, block_size):
        name = hash((name, *token_ids[end - block_size : end]))
        names.append(name)
    return names


# --- lesson 7 -----------------------------------------------------------------------------------------------------


def read_events(pieces):
    buffer = b""
    for piece in pieces:
        *events, buffer = (buffer + piece).split(b"\n\n")
        for event in events:
            lines = event.decode().split("\n")
            data = "\n".join(line.removeprefix("data:").strip() for line in lines if line.startswith("data:"))
            if data == "[DONE]":
                return
            if data:
                yield json.loads(data)


def poisson_arrivals(rate, duration, random):
    times, now = [], random.expovariate(rate)
    while now < duration:
        times.append(now)
        now += random.expovariate(rate)
    return times


def open_loop_latencies(arrivals, service_seconds):
    latencies, free = [], 0
    for sent, seconds in zip(arrivals, service_seconds, strict=True):
        free = max(free, sent) + seconds
        latencies.append(free - sent)
    return latencies


def goodput(requests, seconds, ttft, tpot):
    good = 0
    for sent, times in requests:
        if times and times[0] - sent <= ttft:
            good += len(times) == 1 or (times[-1] - times[0]) / (len(times) - 1) <= tpot
    return good / seconds


class BoundedQueue:
    def __init__(self, rows, max_queue, seconds):
        self.rows, self.max_queue, self.seconds = rows, max_queue, seconds
        self.running, self.waiting = [], []

    def offer(self, request_id):
        if len(self.running) < self.rows:
            self.running.append(request_id)
        elif len(self.waiting) < self.max_queue:
            self.waiting.append(request_id)
        else:
            return -int(-self.seconds // self.rows)
        return 0

    def leave(self, request_id):
        if request_id in self.waiting:
            self.waiting.remove(request_id)
        elif request_id in self.running:
            self.running.remove(request_id)
            if self.waiting:
                self.running.append(self.waiting.pop(0))


# --- codelab ------------------------------------------------------------------------------------------------------


def schedule(waiting, running, free_rows):
    """Longest first: what takes longest must begin soonest, and the short requests fill the rows beside it."""
    return sorted(waiting, key=lambda request: -request.max_tokens)[:free_rows]


schedule_race = schedule_floor = schedule_others = schedule
