"""Lesson 2, a static batch: left padding, and positions."""

import torch

from ..exercise import Exercise
from ..hand_made import mask_of


@Exercise.declare(
    "the pads are on the left and hidden by the mask, and every row ends with its newest token at the right edge",
    names=("input_ids", "attention_mask"),
    forbidden=["helpers.padded_batch:left_padded"],
)
def left_pad(rows, pad_id, max_length):
    rows = [row[-max_length:] for row in rows]
    width = max(map(len, rows))
    ids = [[pad_id] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)


left_pad.table([
    ([[5, 6], [7, 8, 9, 4], [3]], 0, 8),
    ([[2, 7, 2, 6], [8, 2], [2]], 2, 4),  # texts that contain the pad's id
    ([[1, 2, 3, 4, 5], [6, 7], [8, 9, 1, 2]], 0, 3), ([[4, 5]], 0, 6), ([[3, 1, 4], [1, 5, 9]], 7, 2),
    ([[6, 8, 9], [9, 3]], 1, 1),
    ([[0, 5, 0], [0], [6, 0]], 50256, 3),  # an id of 0, and a large pad
    ([[300, 4000], [7]], 300, 2),
], lambda random: [
    ([random.choices(range(6), k=random.randint(1, 7)) for _ in range(5)], 3, random.randint(3, 6)),
])  # fmt: skip

NEWEST = "A row's newest token must be in the last column, where the next token is predicted and appended."
MASK_ON_THE_RIGHT = "[0] * (width - len(row)) + [1] * len(row) -> [1] * len(row) + [0] * (width - len(row))"
left_pad.add_misconceptions({
    f"pads on the right: the last column of a short row then holds a pad, and the model would continue the pad. "
    f"{NEWEST}": (MASK_ON_THE_RIGHT, "[pad_id] * (width - len(row)) + row -> row + [pad_id] * (width - len(row))"),
    "pads the mask on the right and the tokens on the left: it hides real tokens and shows pads.": MASK_ON_THE_RIGHT,
    "pads with 0. The pad's id is an argument, because every tokenizer has its own.": "[pad_id] -> [0]",
    f"keeps the first tokens of a row that is too long, and cuts off the end that the model has to continue. {NEWEST}":
        "[-max_length:] -> [:max_length]",
    "makes every batch `max_length` wide. If the longest row is shorter, each pass computes columns that hold only "
    "pads.": "max(map(len, rows)) -> max_length",
    "finds the width before it cuts the rows: a row that is cut makes no batch wider.":
        ("    width = max(map(len, rows))\n -> ", "rows = [row[ -> width = max(map(len, rows)); rows = [row["),
    "treats every token with the pad's id as a pad. A text may contain that token (GPT-2 is padded with its EOS): "
    "the mask follows from where you padded, not from the ids.":
        "torch.tensor(mask) -> (torch.tensor(ids) != pad_id).long()",
    "leaves the pads visible: with a mask of 1 everywhere, the tokens of a short row attend to pads as if they "
    "were text.": "[0] * (width -> [1] * (width",
})  # fmt: skip

position_ids = Exercise(
    "position_ids(attention_mask, new_tokens)",
    "every row counts its own tokens from 0, cached ones included, whatever columns they are in",
    forbidden=["helpers.padded_batch:left_padded"],
)
position_ids.reference(lambda mask, new_tokens: (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -new_tokens:])
position_ids.add_misconceptions({
    "numbers the columns, pads included. Positions count a row's own tokens from 0, whatever columns they are in.":
        lambda mask, n: torch.arange(mask.size(1)).expand_as(mask)[:, -n:],
    "counts the pads. Positions count real tokens.": lambda mask, n: (1 - mask).cumsum(dim=1)[:, -n:],
    "restarts at 0 in every pass. The cached tokens come first in the text, and the new positions continue from "
    "there.": lambda mask, n: mask[:, -n:].cumsum(dim=1) - 1,
    "returns positions for the cached tokens, too. The pass computes only the last `new_tokens` columns, and needs "
    "only their positions.": lambda mask, n: mask.cumsum(dim=1) - 1,
})  # fmt: skip


position_ids.table([
    ("prompts", "00111 11111 00001", 5), ("one new token", "0111111 0000111 1111111", 1),
    ("3 new tokens", "1111111 0000011 0011111", 3), ("a prompt", "1111", 4),
], lambda random: [
    ("new tokens", " ".join(f"{'1' * random.randint(1, 9):0>9}" for _ in range(4)), random.randint(1, 9)),
], given="the mask {}, new_tokens {}", build=lambda random, mask, new_tokens: (mask_of(mask), new_tokens))  # fmt: skip


@position_ids.ignoring
def pads(positions, arguments):
    return torch.where(arguments[0][:, -arguments[1] :] == 1, positions, torch.zeros_like(positions))


@position_ids.rule
def can_be_looked_up(arguments, outcome, right):
    mask, new_tokens = arguments
    for position in outcome.result[mask[:, -new_tokens:] == 0].tolist():
        if not 0 <= position < mask.size(1):
            return (
                f"gives a pad the position {position}. The mask hides the pad, but the model still looks up its "
                "position: it must be at least 0 and less than the number of columns"
            )
    return None
