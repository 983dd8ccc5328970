"""Lesson 1, the loop with a cache, over several turns: what was said is computed once."""

import math

import torch

from ... import kv_cache
from ...models import load_model
from ..exercise import Exercise
from ..watch import loop_on_model, model_named


def whole_text(token, text, turn):
    return text


cached_loop = Exercise(
    "cached_loop(model, turns, max_tokens)",
    "each token is computed once, and the output is the same as for the whole conversation without a cache",
    observe=loop_on_model,
)
NEWEST = "the last token of the previous output was generated, but is not in the cache yet."
cached_loop.add_misconceptions({
    "recomputes the whole text in every pass. The cache holds the keys and values of the earlier tokens: after the "
    "prefill, each pass needs to compute only one token.": {"feed": whole_text, "begin": whole_text, "cached": False},
    "gives the model one token and no cache, so it sees a text of a single token. It also needs the keys and "
    "values of the earlier tokens.": {"cached": False},
    "gives the model the whole text although the cache already holds most of it: those tokens are computed again, "
    "and are in the cache twice. Only the newest token is missing from the cache.":
        {"feed": whole_text, "begin": whole_text},
    "adds each new token to those that the previous pass computed: their keys are in the cache already, and are added "
    "to it again.": {"grows": True},
    "gives every pass the prompt's last token. Each pass must compute the token that the previous pass generated.":
        {"feed": lambda token, text, turn: turn[:, -1:]},
    f"begins a turn with the user's tokens alone: {NEWEST}": {"begin": lambda token, text, turn: turn},
    "begins a turn with the whole conversation, although the cache already holds most of it: those tokens are in the "
    "cache twice.": {"begin": whole_text},
    "begins every turn with an empty cache, which has none of the keys of the conversation so far.": {"forgets": True},
    "begins every turn with a new cache: the model has forgotten what was said before.":
        {"begin": lambda token, text, turn: turn, "forgets": True},
    "begins every turn with a new cache, and computes the whole conversation again.":
        {"begin": whole_text, "forgets": True},
    "computes the user's tokens before the last token of the previous output, which comes before them in the "
    "text.": {"begin": lambda token, text, turn: torch.cat([turn, token], dim=1)},
    "generates one token too few: the prefill yields a token, too.": lambda model, turns, n: loop(model, turns, n - 1),
    "drops the first token of a turn and adds one at the end: the prefill yields the first token of the output.":
        lambda model, turns, n: [output[1:] for output in loop(model, turns, n + 1)],
    "counts the prompt's tokens, too: `max_tokens` limits the generated tokens only.":
        lambda model, turns, n: loop(model, turns, max(n - turns[0].size(1), 0)),
    "generates one token too many: the prefill already yields the first one.":
        lambda model, turns, n: loop(model, turns, n + 1),
    "stops at EOS. A server does that, but this loop should generate exactly max_tokens tokens.":
        lambda model, *case: loop(model, *case, until=[model.config.eos_token_id]),
    "stops at the EOS of one tokenizer. This loop should generate exactly max_tokens tokens, with any model.":
        lambda *case: loop(*case, until=[load_model()[1].eos_token_id]),
    "runs a pass more than a turn needs, only to compute its last token. The next turn can compute it together with "
    "the user's tokens, and the last turn needs no other pass.": {"alone": "after"},
    "computes the last token of the previous output in a pass of its own: the first pass of a turn can compute it "
    "together with the user's tokens.": {"alone": "before"},
    "numbers the positions of every pass from 0. A token's position is its place in the whole text, and the "
    "model's output depends on it: a cache must not change the output.": {"positions": True},
})  # fmt: skip
cached_loop.add_wrong_results({
    "drops the first token of a turn: the prefill yields it, and it counts.":
        lambda outputs, *case: [output[1:] for output in outputs],
    "returns the prompt's tokens, too. The task asks for the generated tokens only.":
        lambda outputs, model, turns, n: [turn[0].tolist() + out for turn, out in zip(turns, outputs, strict=True)],
    "returns one list for all turns: the task asks for a list per turn.":
        lambda outputs, *case: [token for output in outputs for token in output],
})  # fmt: skip


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
def loop(model, turns, passes, feed=lambda token, text, turn: token,
         begin=lambda token, text, turn: torch.cat([token, turn], dim=1), cached=True, until=(), positions=False,
         forgets=False, alone="", grows=False):  # fmt: skip
    """Run the turns, with replaceable parts: what the first pass of a turn and what a later one computes, whether it
    gets the cache, where a turn ends, whether each turn has a cache of its own, whether the last token of a turn is
    computed in a pass of its own, after the turn or before the next, and whether a pass repeats earlier tokens."""
    cache, text, token, outputs = kv_cache.new(), turns[0][:, :0], turns[0][:, :0], []
    for turn in turns:
        cache = kv_cache.new() if forgets else cache
        text = torch.cat([text, turn], dim=1)
        if alone == "before" and outputs:
            model(input_ids=token, past_key_values=cache, use_cache=True)
            token = token[:, :0]
        input_ids, generated = begin(token, text, turn), []
        for _ in range(passes):
            given = {"past_key_values": cache if cached else kv_cache.new(), "use_cache": True}
            if positions:
                given["position_ids"] = torch.arange(input_ids.size(1))[None]
            with torch.no_grad():
                token = model(input_ids=input_ids, **given).logits[:, -1:].argmax(dim=-1)
            generated.append(token.item())
            if generated[-1] in until:
                break
            text = torch.cat([text, token], dim=1)
            input_ids = torch.cat([input_ids, token], dim=1) if grows else feed(token, text, turn)
        if alone == "after":
            model(input_ids=token, past_key_values=cache, use_cache=True)
            token = token[:, :0]
        outputs.append(generated)
    return outputs


@cached_loop.rule
def calls_the_model(arguments, outcome, right):
    passes, needed = outcome.result["forward passes"], right.result["forward passes"]
    if not passes:
        return "never calls the model: each token takes a forward pass"
    same = outcome.result["token ids"] == right.result["token ids"] and len(passes) == len(needed)
    if same and math.prod(passes[-1]) != math.prod(needed[-1]):
        return "gives a decode pass more than the newest token, although the cache holds the earlier ones"
    return None
