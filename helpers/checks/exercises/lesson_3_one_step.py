"""Lesson 3, the first two verbs: requests become a batch, and every step gives each row one more token."""

from random import Random

import torch
from torch.nn.functional import pad

from ... import kv_cache
from ...loops import generate_continuous
from ...models import context_length
from ...tiny_model.corpus import unseen_prompts
from ..exercise import Exercise
from ..hand_made import blank, blank_cache, contents
from ..watch import LETTERS, model_named, tokenizer_named, verb_on_model

MODELS = {"course": "the course's model", "other": "a second model"}


def _prompts(name: str, count: int, random) -> list[str]:
    """Return prompts of unequal length for one of the models."""
    if name == "course":
        return unseen_prompts(count, random.randrange(10**6))
    return ["".join(random.choice(LETTERS) for _ in range(random.randint(1, 9))) for _ in range(count)]


@Exercise.declare(
    "every row starts in column 0, the pads come last, and a request that was preempted continues",
    observe=verb_on_model,
    forbidden=["helpers.batching:init_batch", "helpers.padded_batch:left_padded"],
)
def init_batch(requests, model, tokenizer):
    texts = [tokenizer(prompt)["input_ids"] + token_ids for prompt, token_ids, _ in requests]
    width = max(map(len, texts))

    def padded(rows, pad=0):
        return torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=model.device)

    return {
        "request_ids": list(range(len(requests))),
        "token_ids": [list(token_ids) for _, token_ids, _ in requests],
        "tokens_remaining": [max_tokens - len(token_ids) for _, token_ids, max_tokens in requests],
        "finish_reasons": [None for _ in requests],
        "input_ids": padded(texts),
        "position_ids": padded([list(range(len(text))) for text in texts]),
        "attention_mask": padded([[1] * len(text) for text in texts]),
    }


init_batch.table([
    ("course", [("The rain in Spain", [], 4), ("The quick brown fox jumped", [], 2), ("Look", [], 9)]),
    ("course", [("The rain in Spain", [5, 9], 4), ("The quick brown fox", [], 3), ("Look", [8, 8, 3, 1], 9)]),
    ("other", [("a pad<pad>", [0], 7), ("<eos>an EOS<eos>", [], 5), ("abc", [7, 7], 12), ("a", [], 1)]),
    ("course", [("Look<|endoftext|>up", [6], 6), ("<|endoftext|>Many hands make light work", [], 3)]),
    ("course", [("What comes", [4], 3)]),
    ("course", [("Look", [], 3), ("Look", [0, 0], 7), ("Look", [300, 0], 3)]),  # one prompt three times
], lambda random: [
    ("other", [(prompt, random.choices(range(20), k=random.randint(0, 4)), 9)
               for prompt in [*_prompts("other", 4, random), "<pad>tail"]]),
], given="on the {} model, (prompt, tokens generated before, max_tokens) {}",
   build=lambda random, name, requests: (requests, name, name))  # fmt: skip

MASK, POSITIONS = "padded([[1] * len(text) for text in texts])", "[list(range(len(text))) for text in texts]"
init_batch.add_misconceptions({
    "finds pads by their id. A prompt may contain it (GPT-2 is padded with its EOS): the mask follows from where you "
    "padded.": [f"{MASK} -> 1 * (padded(texts, {pad}) != {pad})" for pad in ("tokenizer.pad_token_id", 0)],
    "leaves the pads visible: with a mask of 1 everywhere, tokens attend to pads as if they were text.":
        f"{MASK} -> torch.ones_like(padded(texts))",
    "gives pads a position that the model cannot look up. The mask hides a pad, but its position is still looked "
    "up: any valid one will do.": f"{POSITIONS} -> {POSITIONS}, -1",
    "pads on the left, as the lesson does. In this layout, every row starts in column 0.":
        "row + [pad] * (width - len(row)) -> [pad] * (width - len(row)) + row",
    "starts preempted requests anew: the tokens that they had generated would be generated again.":
        "texts = -> requests = [(prompt, [], n) for prompt, _, n in requests]; texts =",
    "puts only the prompts into `input_ids`. A preempted request has lost its cache, so the prefill has to compute its "
    "generated tokens, too.": "] + token_ids -> ]",
    "loses generated tokens in `token_ids`: the client waits for all of its output.": "list(token_ids) for -> [] for",
    "leaves `tokens_remaining` at max_tokens: earlier tokens count, too.": "max_tokens - len(token_ids) -> max_tokens",
})  # fmt: skip


@init_batch.ignoring
def _(result, arguments):
    """Accept any distinct request ids, and any pads that the model can look up."""
    requests, name, _ = arguments
    model, batch = model_named(name), contents(result)
    ids = batch["request_ids"]
    if isinstance(ids, list) and len(set(ids)) == len(ids) == len(requests):
        batch["request_ids"] = list(range(len(requests)))
    hidden = init_batch.solution(requests, model, tokenizer_named(name))["attention_mask"] == 0
    if batch["attention_mask"].shape == hidden.shape:
        hidden = hidden | (batch["attention_mask"] == 0)
    batch["input_ids"] = blank(batch["input_ids"], hidden, model.config.vocab_size)
    batch["position_ids"] = blank(batch["position_ids"], hidden, context_length(model))
    return batch


@init_batch.rule
def every_row_has_a_list_of_its_own(arguments, outcome, right):
    lists = [row for row in outcome.result["token_ids"] if isinstance(row, list)]
    if len({id(row) for row in lists}) < len(lists):
        return "uses one list for every row of `token_ids`: a token appended to one row would appear in all of them"
    if {id(row) for row in lists} & {id(token_ids) for _, token_ids, _ in outcome.arguments[0]}:
        return "puts the requests' own lists into `token_ids`: a token appended to a row would appear in its request"
    return None


NO_CACHE = "calls the model without the cache: in a decode step, it would see only one token."


def newest_columns(mask, width):
    """Return for each row which of the last `width` columns holds its newest token."""
    return mask[:, -width:].sum(dim=1) - 1


@Exercise.declare(
    "one forward pass adds a token to every unfinished row, and the old batch is unchanged",
    observe=verb_on_model,
    forbidden=["helpers.batching:generate_next_token", "helpers.padded_batch:forward"],
)
def generate_next_token(batch, model, tokenizer, column=newest_columns):
    """Run one pass, with a replaceable part: the columns whose logits give the next tokens."""
    cache = kv_cache.copy(batch.get("past_key_values", kv_cache.new()))
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        logits = model(**inputs, past_key_values=cache, use_cache=True).logits
    next_ids = logits.argmax(dim=-1).gather(1, column(batch["attention_mask"], logits.size(1))[:, None])[:, 0]
    after = {key: list(batch[key]) for key in ("token_ids", "tokens_remaining", "finish_reasons")}
    for row, token in enumerate(next_ids.tolist()):
        if batch["tokens_remaining"][row] > 0:
            ends = token == tokenizer.eos_token_id
            left = 0 if ends else batch["tokens_remaining"][row] - 1
            after["token_ids"][row] = [*batch["token_ids"][row], token]
            after["tokens_remaining"][row] = left
            after["finish_reasons"][row] = "stop" if ends else None if left else "length"
    after |= {"input_ids": next_ids[:, None], "position_ids": batch["attention_mask"].sum(dim=1, keepdim=True)}
    return batch | after | {"attention_mask": pad(batch["attention_mask"], (0, 1), value=1), "past_key_values": cache}


@generate_next_token.cases
def _(random):
    """Yield the passes of two batches in which rows end at different times, the same ones for every seed."""
    for name in MODELS:
        model, tokenizer = model_named(name), tokenizer_named(name)
        prompts = _prompts(name, 64, Random(4))
        outputs = generate_continuous([(each, 10) for each in prompts], 64, model, tokenizer).outputs
        by_eos = [each for each in outputs if each.finish_reason == "stop" and len(each.token_ids) > 1]
        others = [each for each in outputs if each.finish_reason == "length"]
        with_0 = [each for each in others if 0 in each.token_ids[:3]]
        # Rows that finish, run and finish again: EOS exactly at the limit, no EOS, EOS before the limit, id 0.
        rows = [by_eos[0], others[0], by_eos[1], others[1], *by_eos[2:4], *with_0[:1]]
        budgets = [len(by_eos[0].token_ids), 9, len(by_eos[1].token_ids), 1, 20, 20, 3]
        requests = [(row.prompt, [], most) for row, most in zip(rows, budgets, strict=False)]
        batch, step = init_batch.solution(requests, model, tokenizer), 0
        pads = batch["attention_mask"] == 0
        other_pads = {key: batch[key].masked_fill(pads, 3) for key in ("input_ids", "position_ids")}
        yield (batch | other_pads, name, name), f"a prefill whose pads have id and position 3, on {MODELS[name]}"
        while any(batch["tokens_remaining"]):
            after = generate_next_token.solution(batch, model, tokenizer)
            if step < 2 or batch["finish_reasons"] != after["finish_reasons"]:
                yield (batch, name, name), f"{f'decode step {step}' if step else 'the prefill'}, on {MODELS[name]}"
            batch, step = after, step + 1


NEWEST_COLUMN = '.gather(1, column(batch["attention_mask"], logits.size(1))[:, None])[:, 0]'
POSITION, STOPS = 'batch["attention_mask"].sum(dim=1, keepdim=True)', '"stop" if ends else'
generate_next_token.add_misconceptions({
    "changed its argument: the model grows the cache that it is given, here that of the old batch. If the cell "
    "runs twice, it computes the step on a cache that already contains it.": "kv_cache.copy( -> (",
    "calls the model without the mask: rows would attend to pads as if they were text.":
        '"attention_mask", "position_ids")} -> "position_ids")}',
    "calls the model without the position ids: the model would number the columns, and a row's output would depend "
    "on its padding.": '"attention_mask", "position_ids")} -> "attention_mask")}',
    NO_CACHE: "past_key_values=cache, -> ",
    "gives a finished row another token. The row is still computed, because the batch is one tensor, but its "
    "output is complete.": 'if batch["tokens_remaining"][row] > 0 -> if True',
    "looks for the EOS of one tokenizer, whatever tokenizer it is given: each has its own.":
        'tokenizer.eos_token_id -> tokenizer_named("course").eos_token_id',
    "lets a row continue after EOS: its output is complete, and all further steps for it are wasted.":
        "token == tokenizer.eos_token_id -> False",
    "uses the logits of the first column. The next token follows a row's newest token.": f"{NEWEST_COLUMN} -> [:, 0]",
    "uses the logits of the last column, which in the prefill of a short row is a pad. The next token follows a row's "
    "newest token.": f"{NEWEST_COLUMN} -> [:, -1]",
    "drops EOS. EOS is not text, but the model generated it: it belongs to `token_ids`, too.":
        '[*batch["token_ids"][row], token] -> batch["token_ids"][row] + [token] * (not ends)',
    'sets the reason "length" although the model ended the output itself: EOS came exactly at the limit.':
        f'{STOPS} -> "length" if batch["tokens_remaining"][row] == 1 else {STOPS}',
    "puts the whole text into `input_ids`. The cache already holds the earlier tokens: the next pass computes only "
    "the newest one.": '"input_ids": next_ids[:, None] -> '
        '"input_ids": torch.cat([batch["input_ids"], next_ids[:, None]], dim=1)',
    "does not widen the attention mask: without a column for it, the next pass cannot attend to the new token.":
        'pad(batch["attention_mask"], (0, 1), value=1) -> batch["attention_mask"]',
    "adds 1 to the position in the last column, which in the prefill of a short row is a pad's. A position is the "
    "number of the row's tokens before it.": f'{POSITION} -> batch["position_ids"][:, -1:] + 1',
    "uses the column as the position, pads included. A row counts only its own tokens.":
        f'{POSITION} -> torch.full_like(next_ids[:, None], batch["attention_mask"].size(1))',
})  # fmt: skip


@generate_next_token.ignoring
def _(result, arguments):
    """Ignore what a finished row or a hidden column holds, as long as the model can look it up."""
    before, name, _ = arguments
    model, batch = model_named(name), contents(result)
    ended = torch.tensor([left == 0 for left in batch["tokens_remaining"]], device=model.device)[:, None]
    limits = {"input_ids": model.config.vocab_size, "position_ids": context_length(model), "attention_mask": 2}
    batch |= {key: blank(batch[key], ended, limits[key]) for key in limits if key in batch}
    if "past_key_values" in batch:
        batch["past_key_values"] = blank_cache(batch["past_key_values"], ended | (before["attention_mask"] == 0))
    return batch


@generate_next_token.rule
def one_forward_pass(arguments, outcome, right):
    passes, [(_, columns, _)] = outcome.result["forward passes"], right.result["forward passes"]
    if len(passes) != 1:
        return f"calls the model {len(passes)} times for one step. All rows share one pass: that is a batch's purpose"
    return NO_CACHE if passes[0][1] < columns else None
