"""Lesson 3, the first two verbs: a batch is made, and every step gives each row that goes on one more token.

Checked on the embedded model, and one step at a time: each starts from the right batch, so that a message is about
this step and not about those before it.
"""

import inspect
from collections import Counter

import torch
from torch.nn.functional import pad

from .. import batching, kv_cache
from ..models import eos_token_ids, load_model
from .attempt import Attempt
from .differences import Grids, Wrong, expect_device, expect_equal, expect_ids, expect_tensor, recognise
from .hand_made import TENSORS, expect_batch, hide, layers_of
from .one_request import prompt_that_ends
from .static_batch import expect_padded, expect_positions
from .watch import Pass, watched


def init_batch(attempt: Attempt) -> None:
    """Three prompts of unequal length, neither sorted nor the longest first; a single one."""
    model, tokenizer = load_model()
    cases = [
        [("The rain in Spain", 4), ("The quick brown fox jumped", 2), ("Look", 9)],
        [("What comes", 3)],
    ]
    for requests in cases:
        prompts = [tokenizer(prompt)["input_ids"] for prompt, _ in requests]
        got = attempt(
            list(requests),
            given=f"{len(requests)} requests with prompts of {', '.join(str(len(ids)) for ids in prompts)} tokens",
            hints={"expected sequence of length": "A tensor is rectangular: all rows must be filled up to one width."},
        )
        expect_batch(got, cache=False)
        devices = [model.device]
        expect_padded(got["input_ids"], got["attention_mask"], prompts, _pad_id(got["input_ids"], prompts), devices)
        ids = got["input_ids"]
        if ids.min() < 0 or ids.max() >= model.config.vocab_size:
            raise Wrong("a pad's id is none of the vocabulary's: the mask hides it, but the model looks it up first.")
        expect_positions(got["position_ids"], got["attention_mask"], "position_ids")

        if len(got["request_ids"]) != len(requests) or len(set(got["request_ids"])) != len(requests):
            raise Wrong(
                f"`request_ids` is {got['request_ids']}. Each row needs an id that no other row has: rows will move, "
                f"and the id says whose row it is."
            )
        token_ids = got["token_ids"]
        if token_ids == prompts:
            raise Wrong("`token_ids` holds the prompts. It is for generated tokens, and there are none yet.")
        if token_ids != [[] for _ in requests]:
            raise Wrong(f"`token_ids` should be an empty list for each row, and is {token_ids}.")
        if len(requests) > 1 and token_ids[0] is token_ids[1]:
            raise Wrong(
                "`token_ids` holds one and the same list for every row: a token appended for one row would appear "
                "in all."
            )
        budgets = [max_tokens for _, max_tokens in requests]
        remaining = got["tokens_remaining"]
        recognise(
            remaining,
            budgets,
            [
                ([0] * len(budgets), "`tokens_remaining` says that all rows are finished, before they began."),
                (
                    [n + len(ids) for n, ids in zip(budgets, prompts, strict=True)],
                    "`tokens_remaining` counts the prompt's tokens, too: max_tokens is about generated ones.",
                ),
                (
                    [n - len(ids) for n, ids in zip(budgets, prompts, strict=True)],
                    "`tokens_remaining` takes the prompt's tokens off: max_tokens is about generated ones.",
                ),
                ([n - 1 for n in budgets], "`tokens_remaining` counts a token that nobody has generated yet."),
                (
                    [max(budgets)] * len(budgets),
                    "`tokens_remaining` gives every row the largest budget: each has its own.",
                ),
            ],
        )
        if remaining != budgets:
            raise Wrong(f"`tokens_remaining` should be {budgets}, and is {remaining}.")


def _pad_id(ids, prompts: list[list[int]]) -> int:
    """The id with which a student padded, on whichever side and in whatever order: any is right, the mask hides it."""
    if not isinstance(ids, torch.Tensor) or ids.device.type == "meta":
        return 0  # there will be a message about that
    left_over = Counter(ids.flatten().tolist()) - Counter(token for prompt in prompts for token in prompt)
    return int(left_over.most_common(1)[0][0]) if left_over else 0


# --- a step -------------------------------------------------------------------------------------------------------


def generate_next_token(attempt: Attempt) -> None:
    """A prefill and every decode step of four requests: some end by their budgets, one by EOS, most of them padded.

    Each step starts from the right batch, so that a message is about one step and not about those before it.
    """
    model, tokenizer = load_model()
    eos = eos_token_ids(model, tokenizer)
    requests = [
        ("Once upon a time, a brave", 14),
        ("Look", 1),
        ("There was once a poor miller called Jonas, and", 5),
        (prompt_that_ends(12), 12),
    ]
    batch = batching.init_batch(requests)
    step = 0
    while any(batch["tokens_remaining"]):
        right = batching.generate_next_token(batch)
        step += 1
        given = "the prefill" if step == 1 else f"decode step {step - 1}"
        with watched(model) as passes:
            got = attempt(
                batch,
                given=given,
                hints={
                    "past_key_values": "Before its prefill a batch has no cache yet: then it starts with an empty one.",
                },
            )
        expect_batch(got)
        _expect_pass(passes, given, model)
        _expect_row_lists(got, batch, right, eos, given)
        _expect_step_tensors(got, batch, right, given)
        batch = right


def _expect_pass(passes: list[Pass], given: str, model) -> None:
    if not passes:
        raise Wrong(f"never calls the model ({given}).")
    if len(passes) > 1:
        raise Wrong(
            f"calls the model {len(passes)} times for one step ({given}). All rows go through it together, in one "
            f"forward pass: that is what a batch is for."
        )
    [one] = passes
    takes = inspect.signature(model.forward).parameters
    if "attention_mask" not in one.named:
        raise Wrong(f"calls the model without the attention mask ({given}): rows would look at pads as if at text.")
    if "position_ids" not in one.named and "position_ids" in takes:
        raise Wrong(
            f"calls the model without the position ids ({given}): it would number the columns, and a padded row's "
            f"tokens would not be where they were when the row was alone."
        )
    if given != "the prefill" and not one.cached:
        raise Wrong(f"calls the model without the cache ({given}): it would know nothing but the newest token.")


def _expect_row_lists(got: dict, before: dict, right: dict, eos: set[int], given: str) -> None:
    if got["request_ids"] != right["request_ids"]:
        raise Wrong(f"`request_ids` changes ({given}): rows stay whose they are.")
    for key in ("token_ids", "tokens_remaining"):
        if len(got[key]) != len(right[key]):
            raise Wrong(f"`{key}` has {len(got[key])} entries for {len(right[key])} rows ({given}).")
    for row, ids in enumerate(right["token_ids"]):
        had, came = before["token_ids"][row], got["token_ids"][row]
        where = f"row {row} ({given})"
        expect_ids(came, f"`token_ids` of {where}")
        if came == ids:
            continue
        if before["tokens_remaining"][row] == 0:
            raise Wrong(
                f"{where} is finished and gets another token. It is still computed, since the batch is one tensor, "
                f"but its text is over: nobody writes down what it says."
            )
        if came == had:
            if ids[-1] in eos:
                raise Wrong(f"{where} says EOS, and it is missing in `token_ids`: EOS is a generated token, too.")
            raise Wrong(f"{where}: the new token is missing in `token_ids`, its text would be lost.")
        if len(came) == 1 < len(ids):
            raise Wrong(f"{where}: `token_ids` holds the newest token only, the earlier ones are lost.")
        if len(came) != len(ids):
            raise Wrong(f"{where}: one step yields one token, and `token_ids` went from {len(had)} to {len(came)}.")
        raise Wrong(
            f"{where}: the new token is {came[-1]}, alone the model says {ids[-1]}. The next token is the best one "
            f"behind the row's newest, at the right edge."
        )
    for row, left in enumerate(right["tokens_remaining"]):
        had, came = before["tokens_remaining"][row], got["tokens_remaining"][row]
        where = f"row {row} ({given})"
        if came == left:
            continue
        if had == 0:
            raise Wrong(
                f"{where} is finished, and `tokens_remaining` goes from 0 to {came}: 0 means finished and stays."
            )
        if right["finish_reasons"][row] == "stop":
            raise Wrong(
                f"{where} says EOS, and `tokens_remaining` is {came}, not 0: the text is complete, and a row that goes "
                f"on after EOS works for nobody."
            )
        if came == had:
            raise Wrong(f"{where}: `tokens_remaining` stays {had}, so the row would never end.")
        raise Wrong(f"{where}: `tokens_remaining` goes from {had} to {came}: one step yields one token.")


def _expect_step_tensors(got: dict, before: dict, right: dict, given: str) -> None:
    """The tensors, in rows that go on: what a finished row holds makes no difference any more."""
    rows = len(right["request_ids"])
    goes_on = torch.tensor([left > 0 for left in right["tokens_remaining"]])
    for key in TENSORS:
        expect_device(got[key], f"`{key}`", [right[key].device])
    ids, positions, mask = (got[key] for key in TENSORS)
    width = before["attention_mask"].size(1)
    if isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.size(1) > 1:
        raise Wrong(
            f"`input_ids` holds {ids.size(1)} tokens a row ({given}). The cache has what was read already: the next "
            f"pass reads the newest token only."
        )
    expect_tensor(ids, f"`input_ids` ({given})", [rows, 1], "one token a row for the next pass to read")
    right_ids = right["input_ids"]
    for row in range(rows):
        if goes_on[row] and ids[row, 0] != right_ids[row, 0]:
            raise Wrong(
                f"row {row} ({given}): `input_ids` holds {ids[row, 0].item()}, the newest token is "
                f"{right_ids[row, 0].item()}. The next pass reads the token that this one yielded."
            )

    right_mask = right["attention_mask"].cpu()
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        old = before["attention_mask"].cpu()
        if mask.size(1) == width:
            raise Wrong(
                f"the attention mask does not grow ({given}): the new token needs a column in it, or the next pass "
                f"does not see it.",
                Grids(right_mask.tolist(), mask.long().tolist(), "attention_mask", (None, 0)),
            )
        seen, grids = (
            mask.cpu() * goes_on[:, None],
            Grids(right_mask.tolist(), mask.tolist(), "attention_mask", (None, 0)),
        )
        recognise(
            seen,
            right_mask * goes_on[:, None],
            [
                (
                    pad(old, (0, 1)) * goes_on[:, None],
                    f"the attention mask grows by a 0 ({given}): the new token is real, and a 0 hides it.",
                ),
                (
                    pad(old, (1, 0), value=1) * goes_on[:, None],
                    f"the attention mask grows on the left ({given}): the new token comes at the right edge.",
                ),
                (
                    torch.ones_like(right_mask) * goes_on[:, None],
                    f"the attention mask is 1 everywhere ({given}): the pads of earlier must stay hidden.",
                ),
            ],
            grids,
        )
    expect_tensor(mask, f"`attention_mask` ({given})", right_mask.shape, "one column more than before")
    expect_equal(
        mask.cpu() * goes_on[:, None], right_mask * goes_on[:, None], "attention_mask", "attention_mask", (None, 0)
    )

    if isinstance(positions, torch.Tensor) and positions.dim() == 2 and positions.size(1) > 1:
        raise Wrong(
            f"`position_ids` holds {positions.size(1)} positions a row ({given}): the next pass reads one token, "
            f"so there is one position."
        )
    expect_tensor(positions, f"`position_ids` ({given})", [rows, 1], "the position of each row's newest token")
    for row in range(rows):
        came, wanted = positions[row, 0].item(), right["position_ids"][row, 0].item()
        if not goes_on[row] or came == wanted:
            continue
        if came == wanted - 1:
            raise Wrong(f"row {row} ({given}): the position stays {came}, but the newest token is one place further.")
        if came == wanted + 1:
            raise Wrong(
                f"row {row} ({given}): the newest token's position is {came}, one too far: the row has {wanted} tokens "
                f"before it, and positions begin with 0."
            )
        if came == width:
            raise Wrong(
                f"row {row} ({given}): the position is the column's number, {came}, pads included. A row counts its "
                f"own tokens: {wanted}."
            )
        raise Wrong(f"row {row} ({given}): expected position {wanted}, got {came}.")

    columns = kv_cache.length(right["past_key_values"])
    visible = right_mask[:, :-1] == 1
    for layer, (pair, right_pair) in enumerate(
        zip(layers_of(got["past_key_values"]), layers_of(right["past_key_values"]), strict=True)
    ):
        for name, came, wanted in zip(("keys", "values"), pair, right_pair, strict=True):
            if came.shape[2] != columns:
                raise Wrong(
                    f"the cache has {came.shape[2]} columns in layer {layer} and should have {columns} ({given}): what "
                    f"this pass has read belongs in it, once."
                )
            if not torch.allclose(hide(came.cpu(), visible), hide(wanted.cpu(), visible), atol=1e-3):
                raise Wrong(
                    f"the {name} in layer {layer} are not those of the row alone ({given}): its pads were seen."
                )


TASKS = {
    "init_batch(requests)": (init_batch, "prompts on the right, pads on the left, and every row with its own count"),
    "generate_next_token(batch)": (
        generate_next_token,
        "one pass, one more token for every row that goes on, and the old batch is as it was",
    ),
}
