"""Lesson 2: right answers in other styles, and wrong ones that fail in ways of their own."""

import numpy as np
import torch

from answers import ALMOST, WRONG, right


@right("left_pad")
def into_full_tensors(rows, pad_id, max_length):
    width = min(max(map(len, rows)), max_length)
    ids, mask = torch.full((len(rows), width), pad_id), torch.zeros(len(rows), width, dtype=torch.long)
    for row, tokens in enumerate(rows):
        tokens = tokens[-width:]
        ids[row, width - len(tokens) :] = torch.tensor(tokens)
        mask[row, width - len(tokens) :] = 1
    return ids, mask


@right("left_pad")
def flipped_pad_sequence(rows, pad_id, max_length):
    sequences = [torch.tensor(row[::-1][:max_length]) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=pad_id).flip(1)
    lengths = torch.tensor([len(row) for row in rows])
    return [ids, (torch.arange(ids.size(1)).flip(0) < lengths[:, None]).long()]


@right("left_pad")
def padded_with_numpy_and_then_cut(rows, pad_id, max_length):
    width = max(map(len, rows))
    ids = np.array([[pad_id] * (width - len(row)) + row for row in rows])
    mask = np.array([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return torch.from_numpy(ids)[:, -max_length:], torch.from_numpy(mask)[:, -max_length:]


ALMOST["left_pad"] |= {
    "attention_mask holds bool, but should hold int64": lambda result, *case: (result[0], result[1].bool()),
    "input_ids is on the device 'meta'": lambda result, *case: [each.to("meta") for each in result],
    "input_ids, row 0, column 2: expected 5, got 1": lambda result, *case: result[::-1],
    "changed its argument: `rows`": lambda result, rows, *case: rows.sort() or result,
}


@right("position_ids")
def columns_minus_pads(attention_mask, new_tokens):
    pads = (attention_mask == 0).sum(dim=1, keepdim=True)
    width = attention_mask.size(1)
    return (torch.arange(width - new_tokens, width) - pads).relu()


@right("position_ids")
def row_by_row(attention_mask, new_tokens):
    rows = []
    for row in attention_mask.tolist():
        rows.append([1 % len(row)] * row.count(0) + list(range(row.count(1))))
    return torch.tensor([row[-new_tokens:] for row in rows])


WRONG["position_ids"] |= {
    "gives a pad the position -1": lambda mask, n: (mask.cumsum(dim=1) - 1)[:, -n:],
    "gives a pad the position 5": lambda mask, n: (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, mask.size(1))[:, -n:],
    "changed its argument: `attention_mask`": lambda mask, n: mask.cumsum_(dim=1).sub(1).clamp(min=0)[:, -n:],
}
