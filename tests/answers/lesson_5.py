"""Answers to the exercises of lesson 5."""

from itertools import pairwise

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from answers import right, solutions, wrong

# --- padded_tokens --------------------------------------------------------------------------------------------------


@right("padded_tokens")
def pads_of_each_row(lengths):
    pads = 0
    for length in lengths:
        pads += max(lengths) - length
    return [pads + sum(lengths), pads, sum(lengths)]


@right("padded_tokens")
def in_numpy(lengths):
    lengths = np.array(lengths)
    batch = len(lengths) * lengths.max()
    return batch, batch - lengths.sum(), lengths.sum()


@wrong("padded_tokens", "should be 3 things")
def without_the_row(lengths):
    return solutions.padded_tokens(lengths)[:2]


@wrong("padded_tokens", "the number of pads should be 6, and is 5")
def one_pad_too_few(lengths):
    batch, pads, row = solutions.padded_tokens(lengths)
    return batch, pads - 1, row


@wrong("padded_tokens", "the tokens of the packed row should be an int, and is the float 15.0")
def row_as_a_float(lengths):
    return *solutions.padded_tokens(lengths)[:2], float(sum(lengths))


@wrong("padded_tokens", "changed its argument: `lengths` is not what it was")
def takes_the_longest_out(lengths):
    longest, count = lengths.pop(lengths.index(max(lengths))), len(lengths) + 1
    total = longest + sum(lengths)
    return count * longest, count * longest - total, total


# Both mistakes at once: the first is named.
@wrong("padded_tokens", "counts a single row of the padded batch")
def one_row_and_no_pads(lengths):
    return max(lengths), 0, sum(lengths)


# --- pack -----------------------------------------------------------------------------------------------------------


def in_a_row(chunks):
    return [token for chunk in chunks for token in chunk]


@right("pack")
def in_comprehensions(chunks, cached):
    ends = [sum(map(len, chunks[: place + 1])) for place in range(len(chunks))]
    pairs = zip(chunks, cached, strict=True)
    positions = [past + place for chunk, past in pairs for place in range(len(chunk))]
    columns = [[end - len(chunk), end] for chunk, end in zip(chunks, ends, strict=True)]
    return [in_a_row(chunks), positions, columns]


@right("pack")
def with_numpy_s_integers(chunks, cached):
    borders = np.cumsum([0, *map(len, chunks)])
    positions = np.concatenate([np.arange(past, past + len(chunk)) for chunk, past in zip(chunks, cached, strict=True)])
    return list(np.concatenate(chunks)), list(positions), list(pairwise(borders))


@wrong("pack", "the row has 6 tokens, pads among them")
def padded_row(chunks, cached):
    width = max(map(len, chunks))
    row = [token for chunk in chunks for token in [0] * (width - len(chunk)) + chunk]
    return row, *solutions.pack(chunks, cached)[1:]


@wrong("pack", "the row of ids should be [0, 5, 0, 5, 5, 0], and is [5, 5, 5]")
def without_id_0(chunks, cached):
    return [token for token in in_a_row(chunks) if token], *solutions.pack(chunks, cached)[1:]


@wrong("pack", "the row of ids should be [43, 44, 43, 45, 15, 43, 44], and is [43, 44, 45, 15]")
def every_token_once(chunks, cached):
    return list(dict.fromkeys(in_a_row(chunks))), *solutions.pack(chunks, cached)[1:]


@wrong("pack", "the list of columns, place 0 should be 2 things, and is a range")
def columns_as_ranges(chunks, cached):
    ids, positions, columns = solutions.pack(chunks, cached)
    return ids, positions, [range(*each) for each in columns]


@wrong("pack", "`chunks` is not what it was")
def grows_the_first_chunk(chunks, cached):
    right = solutions.pack(chunks, cached)
    for chunk in chunks[1:]:
        chunks[0] += chunk
    return chunks[0], *right[1:]


@wrong("pack", "the row of ids should be a list, and is a tensor of int64 with shape [1, 2]")
def row_as_a_tensor(chunks, cached):
    return torch.tensor([in_a_row(chunks)]), *solutions.pack(chunks, cached)[1:]


@wrong("pack", "the list of positions should be [4, 5, 9, 10, 4, 5], and is [4, 5, 4, 5, 4, 5]")
def finds_an_equal_chunk_first(chunks, cached):
    return solutions.pack(chunks, [cached[chunks.index(chunk)] for chunk in chunks])


# --- block_mask -----------------------------------------------------------------------------------------------------


@right("block_mask")
def by_owner(columns):
    owner = torch.tensor([number for number, (start, end) in enumerate(columns) for _ in range(start, end)])
    place = torch.arange(len(owner))
    return (owner[:, None] == owner[None, :]) & (place[None, :] <= place[:, None])


@right("block_mask")
def as_a_block_diagonal(columns):
    return torch.block_diag(*[torch.ones(end - start, end - start).tril() for start, end in columns]).bool()


@right("block_mask")
def cell_by_cell(columns):
    starts = [start for start, end in columns for _ in range(start, end)]
    return torch.tensor([[start <= j <= i for j in range(len(starts))] for i, start in enumerate(starts)])


@wrong("block_mask", "token 3 of the row does not attend to token 3, which is in its own text and not after it")
def first_triangle_only(columns):
    mask = solutions.block_mask(columns)
    mask[columns[0][1] :] = False
    return mask


@wrong("block_mask", "token 3 of the row attends to token 0, which is another request's")
def the_first_token_for_all(columns):
    mask = solutions.block_mask(columns)
    mask[:, 0] = True
    return mask


@wrong("block_mask", "token 0 of the row attends to token 1, which comes after it")
def one_token_ahead(columns):
    mask = solutions.block_mask(columns)
    mask[0, 1:2] = columns[0][1] > 1
    return mask


@wrong("block_mask", "holds int64, and should hold bool. What is not bool is added to the scores")
def mask_of_numbers(columns):
    return solutions.block_mask(columns).long()


@wrong("block_mask", "has shape [1, 1, 5, 5], and should have [5, 5]")
def mask_with_heads(columns):
    return solutions.block_mask(columns)[None, None]


@wrong("block_mask", "the result should be a tensor, and is a list")
def mask_of_lists(columns):
    return solutions.block_mask(columns).tolist()


@wrong("block_mask", "None (is a `return` missing?)")
def mask_without_return(columns):
    solutions.block_mask(columns)


# --- attend_row -----------------------------------------------------------------------------------------------------


def softmax_by_hand(query, key, value, seen=None):
    """Attention of one request, without torch's own: [heads, queries, dim]."""
    new, count = query.size(1), key.size(1)
    scores = query @ key.transpose(1, 2) * query.size(2) ** -0.5
    seen = torch.ones(new, count).tril(count - new).bool() if seen is None else seen
    return scores.masked_fill(~seen, float("-inf")).softmax(dim=-1) @ value


@right("attend_row")
def attended(query, keys, values, columns):
    parts = zip(columns, keys, values, strict=True)
    return torch.cat([softmax_by_hand(query[:, start:end], k, v) for (start, end), k, v in parts], dim=1)


@right("attend_row")
def one_call_with_a_block_mask(query, keys, values, columns):
    """Exact, too; it computes squares to which no query attends."""
    lengths = [key.size(1) for key in keys]
    seen = torch.zeros(query.size(1), sum(lengths), dtype=torch.bool)
    for number, (start, end) in enumerate(columns):
        before = sum(lengths[:number])
        corner = torch.ones(end - start, lengths[number]).tril(lengths[number] - (end - start)).bool()
        seen[start:end, before : before + lengths[number]] = corner
    return scaled_dot_product_attention(query, torch.cat(keys, 1), torch.cat(values, 1), seen)


@right("attend_row")
def token_by_token_in_the_row(query, keys, values, columns):
    output = torch.empty_like(query)
    for (start, end), key, value in zip(columns, keys, values, strict=True):
        for column in range(start, end):
            upto = key.size(1) - (end - column) + 1
            one = slice(column, column + 1)
            output[:, one] = softmax_by_hand(query[:, one], key[:, :upto], value[:, :upto])
    return output


@right("attend_row")
def head_by_head_with_exponentials(query, keys, values, columns):
    heads = []
    for head in range(len(query)):
        rows = []
        for (start, end), key, value in zip(columns, keys, values, strict=True):
            for column in range(start, end):
                upto = key.size(1) - (end - column) + 1
                weights = torch.exp(key[head, :upto] @ query[head, column] / query.shape[-1] ** 0.5)
                rows.append(weights @ value[head, :upto] / weights.sum())
        heads.append(torch.stack(rows))
    return torch.stack(heads)


@right("attend_row")
def with_a_mask_that_is_added(query, keys, values, columns):
    outputs = []
    for (start, end), key, value in zip(columns, keys, values, strict=True):
        new, count = end - start, key.size(1)
        mask = torch.full((new, count), float("-inf")).triu(count - new + 1)
        outputs.append(scaled_dot_product_attention(query[:, start:end], key, value, mask))
    return torch.cat(outputs, dim=1)


@wrong("attend_row", "the output of request 1 is not what it gets alone; wrong are the requests [1]")
def first_request_only(query, keys, values, columns):
    output = solutions.attend_row(query, keys, values, columns)
    output[:, columns[0][1] :] = 0
    return output


@wrong("attend_row", "the output of request 0 is not what it gets alone")
def scaled_as_in_one_model(query, keys, values, columns):
    return solutions.attend_row(query * query.size(2) ** 0.5 / 4, keys, values, columns)


@wrong("attend_row", "the output of request 0 is not what it gets alone")
def every_head_is_the_first(query, keys, values, columns):
    return solutions.attend_row(query, keys, values, columns)[:1].expand_as(query)


@wrong("attend_row", "the output holds NaN: some query attends to no key")
def hides_a_query(query, keys, values, columns):
    output = solutions.attend_row(query, keys, values, columns)
    output[:, 0] = float("nan")
    return output


@wrong("attend_row", "has shape [5, 2, 4], and should have [2, 5, 4]")
def tokens_before_heads(query, keys, values, columns):
    return solutions.attend_row(query, keys, values, columns).transpose(0, 1)


@wrong("attend_row", "changed its argument: `query` is not what it was")
def scales_in_place(query, keys, values, columns):
    output = solutions.attend_row(query, keys, values, columns)
    query *= 0.5
    return output


@wrong("attend_row", "applies the mask after the softmax")
def masks_the_weights(query, keys, values, columns):
    outputs = []
    for (start, end), key, value in zip(columns, keys, values, strict=True):
        weights = (query[:, start:end] @ key.transpose(-2, -1) / query.size(-1) ** 0.5).softmax(dim=-1)
        past = key.size(1) - (end - start)
        for i in range(end - start):
            weights[:, i, past + i + 1 :] = 0
        outputs.append(weights @ value)
    return torch.cat(outputs, dim=1)


@wrong("attend_row", "as attention does with any mask that is not bool")
def float_mask(query, keys, values, columns):
    outputs = []
    for (start, end), key, value in zip(columns, keys, values, strict=True):
        mask = torch.ones(end - start, key.size(1)).tril(key.size(1) - (end - start))
        outputs.append(scaled_dot_product_attention(query[:, start:end], key, value, mask))
    return torch.cat(outputs, dim=1)
