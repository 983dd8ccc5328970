"""Lesson 6, padding-free batching: a packed row, its mask, and its attention."""

from itertools import accumulate, pairwise

import torch

from ..exercise import Exercise
from ..hand_made import randn


@Exercise.declare(
    "one row holds the tokens of all requests, and each token keeps its position in its own text",
    names=("the row of ids", "the list of positions", "the list of columns"),
)
def pack(chunks, cached):
    positions, columns, start = [], [], 0
    for chunk, past in zip(chunks, cached, strict=True):
        end = start + len(chunk)
        positions += range(past, past + len(chunk))
        columns.append((start, end))
        start = end
    return joined(chunks), positions, columns


pack.table([
    ("two decodes", [[14], [23]], [3, 2]), ("two prompts", [[11, 12], [21, 22, 23]], [0, 0]),
    ("two decodes and a prompt", [[15], [24], [31, 32, 33, 34]], [4, 3, 0]),
    ("two chunks with a decode between them", [[43, 44, 43, 45], [15], [43, 44]], [6, 9, 2]),
    ("a single token", [[7]], [0]), ("equal chunks, with an id of 0", [[0, 5], [0, 5], [5, 0]], [4, 9, 4]),
    ("large ids", [[50256], [300, 4000, 0], [300]], [1000, 0, 7]),
], lambda random: [
    ("four requests", [random.choices(range(9), k=random.randint(1, 5)) for _ in range(4)], random.sample(range(9), 4)),
])  # fmt: skip


def joined(chunks):
    return [token for chunk in chunks for token in chunk]


def side_by_side(lengths):
    return list(pairwise(accumulate(lengths, initial=0)))


POSITIONS = "range(past, past + len(chunk))"
pack.add_misconceptions({
    "sorts the requests by length: columns would go to others.": "joined(chunks) -> joined(sorted(chunks, key=len))",
    "starts each chunk at position 0, although earlier tokens are in the cache.": f"{POSITIONS} -> range(len(chunk))",
    "continues the positions from one request to the next. A token's position is its place in its own text, wherever "
    "it is in the row.": f"{POSITIONS} -> range(start, end)",
    "returns positions for cached tokens: the row holds only the new ones.": f"{POSITIONS} -> range(past + len(chunk))",
    "ends the columns at a request's last token. As in a slice, `end` is the column after it: yours would cut one "
    "token off each request.": "(start, end) -> (start, end - 1)",
    "returns (start, number of tokens) as columns: the task asks for ends.": "(start, end) -> (start, len(chunk))",
})  # fmt: skip


@Exercise.declare("it computes a prompt, a chunk and a decode alike, and no request attends to another")
def attend_row(query, keys, values, columns):
    outputs = []
    for (start, end), key, value in zip(columns, keys, values, strict=True):
        new, count = end - start, key.size(1)
        seen = torch.ones(new, count).tril(count - new).bool()
        scores = query[:, start:end] @ key.transpose(1, 2) / query.size(2) ** 0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        outputs.append(weights @ value)
    return torch.cat(outputs, dim=1)


attend_row.ignoring(  # a query without a key gets NaN or 0, depending on how attention is computed
    lambda result, arguments: result.nan_to_num() if isinstance(result, torch.Tensor) else result
)


def _attention(random, heads, size, spans):
    """Return a query, keys, values and columns for spans of (cached tokens, new tokens)."""
    columns = side_by_side(new for _, new in spans)
    query, *both = randn(random, (heads, columns[-1][1], size), *[(heads, sum(span), size) for span in spans * 2])
    return query, both[: len(spans)], both[len(spans) :], columns


attend_row.table([
    ("two prompts", 2, 4, [(0, 3), (0, 2)]), ("two decodes", 3, 8, [(4, 1), (2, 1)]),
    ("a decode, a chunk of a prompt and a prompt", 2, 16, [(3, 1), (4, 3), (0, 4)]), ("one chunk", 1, 4, [(5, 2)]),
    ("two chunks of equal length", 4, 8, [(2, 2), (2, 2)]),
], lambda random: [("four requests", 3, 2, [(random.randint(0, 5), random.randint(1, 4)) for _ in range(4)])],
   given="{} heads of dimension {}, (cached, new) tokens {}", build=_attention)  # fmt: skip


def newest(tensors, columns):
    return [tensor[:, start - end :] for tensor, (start, end) in zip(tensors, columns, strict=True)]


PAIRS, SHIFT = "zip(columns, keys, values,", "tril(count - new)"
WEIGHTS = 'scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)'
ALL_KEYS = "[torch.cat(keys, dim=1)] * len(columns)"
attend_row.add_misconceptions({
    "attends only to the tokens of this pass. The cached tokens are in `keys` and `values`, too, and every new token "
    "attends to all of them.": ("new, count = -> key, value = key[:, start - end :], value[:, start - end :]\n"
        "        new, count ="),
    "lets a query attend to another request's keys. Each request has its own keys and values in the lists.":
        [f"{PAIRS} -> zip(columns, keys{other}, values{other}," for other in ("[:1] * len(columns)", "[::-1]")]
        + [(f"{PAIRS} -> zip(columns, {ALL_KEYS}, {ALL_KEYS.replace('keys', 'values')},", f"{SHIFT} -> {shift}")
           for shift in (SHIFT, "tril(count)")],
    "computes the row as one text, but its tokens belong to several requests.":
        [lambda q, k, v, c: attend_row.solution(q, [torch.cat(k, dim=1)], [torch.cat(v, dim=1)], [(0, q.size(1))]),
         lambda q, k, v, c: attend_row.solution(
             q, [torch.cat(newest(k, c), dim=1)], [torch.cat(newest(v, c), dim=1)], [(0, q.size(1))])],
    "lets a token attend to later tokens of its own chunk: only a decode, which computes a single token, needs no "
    "mask.": [f"{SHIFT} -> tril(count)", f"{SHIFT} -> tril(count if new < count else 0)"],
    "aligns the first query with the first key. The new tokens are the last ones of a text: the first of them attends "
    "to all cached tokens and to itself.": [f"{SHIFT} -> tril(0)", f"{SHIFT} -> tril(0 if new > 1 else count)"],
    "adds a mask of 1 and 0 to the scores, as attention does with any mask that is not bool: a 0 hides nothing.":
        f"{WEIGHTS} -> (scores + seen).softmax(dim=-1)",
    "applies the mask after the softmax: hidden keys have already taken their share, so the other weights sum to less "
    "than 1.": f"{WEIGHTS} -> scores.softmax(dim=-1) * seen",
    "does not divide the scores by the square root of the head dimension.": " / query.size(2) ** 0.5 -> ",
})  # fmt: skip


@attend_row.rule
def every_request_is_right(arguments, outcome, right):
    if outcome.result.isnan().any():
        return "returns NaN: some query attends to no key, but each attends at least to itself"
    off = (outcome.result - right.result).abs().amax(dim=(0, 2)) > 1e-4
    wrong = [number for number, (start, end) in enumerate(arguments[3]) if off[start:end].any()]
    if wrong:
        return f"returns wrong outputs for the requests {wrong}: each should get what it gets when it runs alone"
    return None
