"""Lesson 1, the loop with a cache, over several turns: what was said is computed once."""

import math

import torch

from ... import kv_cache
from ...models import load_model
from ..edits import add_edits
from ..exercise import Exercise
from ..watch import loop_on_model, model_named

cached_loop = Exercise(
    "cached_loop(model, turns, max_tokens)",
    "each token is computed once, and the output is the same as for the whole conversation without a cache",
    observe=loop_on_model,
)


@cached_loop.cases
def _(random):
    other, tokenizer = model_named("other"), load_model()[1]
    eos = other.config.eos_token_id

    def ids(name: str, *counts: int) -> list[list[int]]:
        size = model_named(name).config.vocab_size
        return [[random.randrange(1, size) for _ in range(count)] for count in counts]

    def tensors(turns: list[list[int]]) -> list[torch.Tensor]:
        return [torch.tensor([turn]) for turn in turns]

    def such_that(fits, max_tokens: int, *counts: int) -> tuple[str, list[list[int]], int]:
        """Return turns for the other model whose outputs fit."""
        every = (ids("other", *counts) for _ in range(9999))
        return "other", next(t for t in every if fits(loop(other, tensors(t), max_tokens))), max_tokens

    for name, turns, max_tokens in [
        ("course", ids("course", 7, 3), 6),
        such_that(lambda outputs: any(eos in out[:-1] for out in outputs), 9, 4, 2),
        such_that(lambda outputs: outputs[0][-1] == eos, 3, 4, 2),
        such_that(lambda outputs: outputs[0][-1] == 0, 2, 3, 2),
        such_that(lambda outputs: 0 in outputs[0][:-1], 4, 3, 2),
        ("other", [[*ids("other", 2)[0], eos, 0], [0], [*ids("other", 4)[0], eos]], 3),
        ("course", ids("course", 1, 2, 1), 1),
        ("course", ids("course", 2, 17, 1), 3),  # a long second turn
        ("course", [tokenizer("What goes up")["input_ids"], *ids("course", 4)], 12),  # generates EOS earlier
        ("course", [tokenizer("What comes up")["input_ids"]], 10),
        such_that(lambda outputs: any(eos in out[:-1] for out in outputs), 20, 9, 3),
    ]:
        given = f"turns of {' and '.join(str(len(turn)) for turn in turns)} tokens, max_tokens {max_tokens}"
        yield (name, tensors(turns), max_tokens), given


@cached_loop.reference
def loop(model, turns, n):
    cache, outputs, text = kv_cache.new(), [], turns[0][:, :0]
    token = text
    for turn in turns:
        text = torch.cat([text, turn], dim=1)
        input_ids, output = torch.cat([token, turn], dim=1), []
        for _ in range(n):
            with torch.no_grad():
                logits = model(input_ids=input_ids, past_key_values=cache, use_cache=True).logits
            token = logits[:, -1:].argmax(dim=-1)
            text = torch.cat([text, token], dim=1)
            output.append(token.item())
            input_ids = token
        outputs.append(output)
    return outputs


BEGINS = "text = torch.cat([text, turn] -> {}; text = torch.cat([text, turn]"
FORGETS = BEGINS.format("cache = kv_cache.new()")
NO_CACHE = "past_key_values=cache -> past_key_values=kv_cache.new()"
TURN_ALONE, WHOLE_TEXT = "torch.cat([token, turn], dim=1) -> turn", "torch.cat([token, turn], dim=1) -> text"
LAST_PASS = "model(input_ids=token, past_key_values=cache, use_cache=True)"
UNTIL = "for _ in range(n) -> while len(output) < n and {}.eos_token_id not in output[-1:]"
add_edits(cached_loop, {
    "recomputes the whole text in every pass. The cache holds the keys and values of the earlier tokens: after the "
    "prefill, each pass needs to compute only one token.": ("input_ids=input_ids -> input_ids=text", NO_CACHE),
    "gives the model one token and no cache, so it sees a text of a single token. It also needs the keys and "
    "values of the earlier tokens.": NO_CACHE,
    "gives the model the whole text although the cache already holds most of it: those tokens are computed again, "
    "and are in the cache twice. Only the newest token is missing from the cache.":
        "input_ids=input_ids -> input_ids=text",
    "adds each new token to those that the previous pass computed: their keys are in the cache already, and are added "
    "to it again.": "input_ids = token -> input_ids = torch.cat([input_ids, token], dim=1)",
    "gives every pass the prompt's last token. Each pass must compute the token that the previous pass generated.":
        "input_ids = token -> input_ids = turn[:, -1:]",
    "begins a turn with the user's tokens alone: the last token of the previous output was generated, but is not in "
    "the cache yet.": TURN_ALONE,
    "begins a turn with the whole conversation, although the cache already holds most of it: those tokens are in the "
    "cache twice.": WHOLE_TEXT,
    "begins every turn with an empty cache, which has none of the keys of the conversation so far.": FORGETS,
    "begins every turn with a new cache: the model has forgotten what was said before.": (TURN_ALONE, FORGETS),
    "begins every turn with a new cache, and computes the whole conversation again.": (WHOLE_TEXT, FORGETS),
    "computes the user's tokens before the last token of the previous output, which comes before them in the text.":
        "[token, turn] -> [turn, token]",
    "generates one token too few: the prefill yields a token, too.": "range(n) -> range(n - 1)",
    "drops the first token of a turn and adds one at the end: the prefill yields the first token of the output.":
        ("range(n) -> range(n + 1)", "append(output) -> append(output[1:])"),
    "generates one token too many: the prefill already yields the first one.": "range(n) -> range(n + 1)",
    "stops at EOS. A server does that, but this loop should generate exactly max_tokens tokens.":
        UNTIL.format("model.config"),
    "runs a pass more than a turn needs, only to compute its last token. The next turn can compute it together with "
    "the user's tokens, and the last turn needs no other pass.":
        f"outputs.append(output) -> outputs.append(output); {LAST_PASS}; token = token[:, :0]",
    "computes the last token of the previous output in a pass of its own: the first pass of a turn can compute it "
    "together with the user's tokens.":
        (BEGINS.format(f"outputs and {LAST_PASS}"), "[token, turn] -> [token[:, :0], turn]"),
    "numbers the positions of every pass from 0. A token's position is its place in the whole text, and the "
    "model's output depends on it: a cache must not change the output.":
        "use_cache=True -> use_cache=True, position_ids=torch.arange(input_ids.size(1))[None]",
})  # fmt: skip


@cached_loop.rule
def calls_the_model(arguments, outcome, right):
    passes, needed = outcome.result["forward passes"], right.result["forward passes"]
    if not passes:
        return "never calls the model: each token takes a forward pass"
    same = outcome.result["token ids"] == right.result["token ids"] and len(passes) == len(needed)
    if same and math.prod(passes[-1]) != math.prod(needed[-1]):
        return "gives a decode pass more than the newest token, although the cache holds the earlier ones"
    return None
