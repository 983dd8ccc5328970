"""Lesson 2: right answers in other styles, and wrong ones that fail in ways of their own."""

import numpy as np
import torch
from torch.nn.functional import pad

from answers import right, wrong
from helpers import padded_batch

# --- batch_throughput -----------------------------------------------------------------------------------------------


@right("batch_throughput")
def in_two_steps(lengths, seconds_per_pass):
    duration = sorted(lengths)[-1] * seconds_per_pass
    return sum(lengths) / duration


@right("batch_throughput")
def in_float32(lengths, seconds_per_pass):
    return np.float32(sum(lengths)) / (np.float32(max(lengths)) * np.float32(seconds_per_pass))


@wrong("batch_throughput", "changed its argument")
def sorted_in_place(lengths, seconds_per_pass):
    lengths.sort()
    return in_two_steps(lengths, seconds_per_pass)


@wrong("batch_throughput", "should be 3.2, and is 1.6")
def until_the_first_row_ends_twice(lengths, seconds_per_pass):
    return in_two_steps(lengths, 2 * seconds_per_pass)


@wrong("batch_throughput", "should be a number, and is a list")
def each_row(lengths, seconds_per_pass):
    return [length / (max(lengths) * seconds_per_pass) for length in lengths]


# --- wasted_slot_steps ----------------------------------------------------------------------------------------------


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


@right("wasted_slot_steps")
def with_numpy(trace):
    return np.sum([[not row.new_tokens for row in iteration.row_steps] for iteration in trace.passes])


@wrong("wasted_slot_steps", "should be an int, and is the float")
def as_a_float(trace):
    return float(all_minus_useful(trace))


@wrong("wasted_slot_steps", "calls the course's own `Trace.wasted_slot_steps`")
def the_course_s_own(trace):
    return trace.wasted_slot_steps


@wrong("wasted_slot_steps", "should be 11, and is 0.3667")
def as_a_share(trace):
    return all_minus_useful(trace) / trace.slot_steps


# --- left_pad -------------------------------------------------------------------------------------------------------


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
def padded_and_then_cut(rows, pad_id, max_length):
    width = max(map(len, rows))
    ids = np.array([[pad_id] * (width - len(row)) + row for row in rows])
    mask = np.array([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return torch.from_numpy(ids)[:, -max_length:], torch.from_numpy(mask)[:, -max_length:]


@wrong("left_pad", "attention_mask holds bool, and should hold int64")
def bool_mask(rows, pad_id, max_length):
    ids, mask = into_full_tensors(rows, pad_id, max_length)
    return ids, mask.bool()


@wrong("left_pad", "input_ids holds float32")
def float_ids(rows, pad_id, max_length):
    ids, mask = into_full_tensors(rows, pad_id, max_length)
    return ids.float(), mask


@wrong("left_pad", "input_ids is on the device 'meta'")
def elsewhere(rows, pad_id, max_length):
    ids, mask = into_full_tensors(rows, pad_id, max_length)
    return ids.to("meta"), mask.to("meta")


@wrong("left_pad", "input_ids has shape [3, 5], and should have [3, 4]")
def one_column_too_many(rows, pad_id, max_length):
    ids, mask = into_full_tensors(rows, pad_id, max_length)
    return pad(ids, (1, 0), value=pad_id), pad(mask, (1, 0))


@wrong("left_pad", "changed its argument: `rows`")
def pads_the_argument(rows, pad_id, max_length):
    answer = into_full_tensors(rows, pad_id, max_length)
    for row in rows:
        row[:0] = [pad_id] * (max(map(len, rows)) - len(row))
    return answer


@wrong("left_pad", "input_ids should be a tensor, and is a list")
def lists(rows, pad_id, max_length):
    return tuple(each.tolist() for each in into_full_tensors(rows, pad_id, max_length))


@wrong("left_pad", "should be 2 things, input_ids and attention_mask")
def ids_only(rows, pad_id, max_length):
    return into_full_tensors(rows, pad_id, max_length)[:1]


@wrong("left_pad", "calls the course's own `left_padded`")
def the_course_s_own_batch(rows, pad_id, max_length):
    batch = padded_batch.left_padded([row[-max_length:] for row in rows], pad_id)
    return batch["input_ids"], batch["attention_mask"]


@wrong("left_pad", "never cuts")
def cuts_only_the_longest_for_the_width(rows, pad_id, max_length):
    return into_full_tensors(rows, pad_id, 10**6)


# --- position_ids ---------------------------------------------------------------------------------------------------


@right("position_ids")
def filled_with_one(attention_mask, new_tokens):
    positions = attention_mask.long().cumsum(-1) - 1
    return positions.masked_fill(attention_mask == 0, 1 % attention_mask.size(1))[:, -new_tokens:]


@right("position_ids")
def columns_minus_pads(attention_mask, new_tokens):
    pads = (attention_mask == 0).sum(dim=1, keepdim=True)
    width = attention_mask.size(1)
    return (torch.arange(width - new_tokens, width) - pads).relu()


@right("position_ids")
def row_by_row(attention_mask, new_tokens):
    rows = []
    for row in attention_mask.tolist():
        rows.append([0] * row.count(0) + list(range(row.count(1))))
    return torch.tensor([row[-new_tokens:] for row in rows])


@wrong("position_ids", "gives a pad position -1")
def negative_pads(attention_mask, new_tokens):
    return (attention_mask.cumsum(dim=1) - 1)[:, -new_tokens:]


@wrong("position_ids", "gives a pad position 1000000")
def pads_beyond_the_table(attention_mask, new_tokens):
    positions = attention_mask.cumsum(dim=1) - 1
    return positions.masked_fill(attention_mask == 0, 10**6)[:, -new_tokens:]


@wrong("position_ids", "gives a pad position 5")
def pads_at_the_width(attention_mask, new_tokens):
    positions = attention_mask.cumsum(dim=1) - 1
    return positions.masked_fill(attention_mask == 0, attention_mask.size(1))[:, -new_tokens:]


@wrong("position_ids", "holds float32")
def float_positions(attention_mask, new_tokens):
    return (attention_mask.float().cumsum(dim=1) - 1).clamp(min=0)[:, -new_tokens:]


@wrong("position_ids", "changed its argument: `attention_mask`")
def counted_in_place(attention_mask, new_tokens):
    return attention_mask.cumsum_(dim=1).sub(1).clamp(min=0)[:, -new_tokens:]


@wrong("position_ids", "gives every real token position 1")
def returned_as_it_is(attention_mask, new_tokens):
    return attention_mask[:, -new_tokens:]


@wrong("position_ids", "should be a tensor, and is a list")
def a_list(attention_mask, new_tokens):
    return row_by_row(attention_mask, new_tokens).tolist()
