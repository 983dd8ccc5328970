"""Lesson 2: right answers in other styles, and wrong ones that fail in ways of their own."""

import torch

from answers import ALMOST, WRONG, right


@right("left_pad")
def flipped_pad_sequence(rows, pad_id, max_length):
    sequences = [torch.tensor(row[::-1][:max_length]) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=pad_id).flip(1)
    lengths = torch.tensor([len(row) for row in rows])
    return [ids, (torch.arange(ids.size(1)).flip(0) < lengths[:, None]).long()]


ALMOST["left_pad"] |= {
    "attention_mask holds bool, but should hold int64": lambda result, *case: (result[0], result[1].bool()),
    "input_ids, row 0, column 2: expected 5, got 1": lambda result, *case: result[::-1],
}


@right("position_ids")
def columns_minus_pads(attention_mask, new_tokens):
    pads = (attention_mask == 0).sum(dim=1, keepdim=True)
    width = attention_mask.size(1)
    return (torch.arange(width - new_tokens, width) - pads).relu()


WRONG["position_ids"] |= {
    "gives a pad the position -1": lambda mask, n: (mask.cumsum(dim=1) - 1)[:, -n:],
    "gives a pad the position 5": lambda mask, n: (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, mask.size(1))[:, -n:],
}
