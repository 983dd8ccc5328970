"""Lesson 1, a single request: the next token, the bytes of a cache, the end of an output, and a loop over turns."""

import torch

from ... import kv_cache
from ...models import load_model
from ..exercise import Exercise
from ..watch import loop_on_model, model_named

greedy_step = Exercise("greedy_step(logits)", "every row gets the best token of its own last position")
greedy_step.reference(lambda logits: logits[:, -1].argmax(dim=-1))
greedy_step.add_misconceptions({
    "returns the best token of every position. Only the last position of a row predicts the token that follows the "
    "whole text: the first one predicts what follows the first token, and so on.": lambda logits: logits.argmax(dim=-1),
    "returns one token for all rows together. Each row is a separate sequence and needs its own next token.":
        lambda logits: logits[:, -1].argmax(),
    "uses the first position, which predicts the second token. The last position predicts what follows the whole "
    "text.": lambda logits: logits[:, 0].argmax(dim=-1),
    "picks the logit with the largest absolute value, but a very negative logit means a very unlikely token.":
        lambda logits: logits[:, -1].abs().argmax(dim=-1),
    "returns the best token's logit, which is a score. The task asks for its id: its index in the vocabulary.":
        lambda logits: logits[:, -1].max(dim=-1).values,
})  # fmt: skip


@greedy_step.cases
def _(random):
    # Every position of every row has its own best token, and its logit is not always the largest in absolute value.
    by_hand = [
        [[9.0, 0, 1, 2, 3], [0, 8, 1, 2, 3], [0, 1, -9, 7, 2]],
        [[0, 1, 6, 2, 3], [0, 1, 2, 3, 5], [-1, -2, -3, -4, -0.5]],
    ]
    yield (torch.tensor(by_hand),), "logits of shape [2, 3, 5]"
    draw = torch.Generator().manual_seed(random.randrange(10**6))
    yield (torch.randn(4, 4, 4, generator=draw) - 2,), "logits of shape [4, 4, 4]"
    yield (torch.randn(3, 5, 11, generator=draw),), "logits of shape [3, 5, 11]"
    yield (torch.tensor([[[1.0, 0, 2], [-3, -5, -4]], [[2, 0, 1], [-9, -7, -8]]]),), "negative logits, token 0 is best"
    yield (torch.tensor([[[0.0, 0, 0], [-2001.23, -2001.21, -2003]]]),), "logits near -2,000"
    yield (torch.eye(5)[[3, 0, 4, 1, 2]][:, None],), "logits of shape [5, 1, 5]"
    wide = torch.randn(2, 2, 5000, generator=draw)
    wide[:, -1, 4321:4323] = torch.tensor([[9.0, 8.5], [8.5, 9.0]])
    yield (wide,), "a vocabulary of 5,000 tokens"


@Exercise.declare("a key and a value for every token that a layer keeps, in every KV head of every layer")
def kv_cache_bytes(windows, kv_heads, head_dim, number_bytes, tokens):
    return 2 * sum(tokens if w is None else min(w, tokens) for w in windows) * kv_heads * head_dim * number_bytes


kv_cache_bytes.table([
    ([None, None, 4], 5, 7, 4, 11), ([None] * 32, 8, 128, 2, 2048),
    ([512, None, 512, 512, 1024, 4096], 4, 256, 2, 3000), ([16, None, 8, 16], 3, 5, 4, 9), ([7, 6], 3, 5, 4, 7),
], lambda random: [
    ([None, 7, *random.choices([None, 6, 30, 500], k=5)], 13, 17, 2, random.randint(19, 99)),
])  # fmt: skip

kv_cache_bytes.add_misconceptions({
    "leaves out the layers: each has its own cache.": "in windows -> in windows[:1]",
    "counts numbers, not bytes: a number takes several bytes.": " * number_bytes -> ",
    "grows with the square of the number of tokens. The cache keeps one key and one value per token; it is the "
    "*work* without a cache that grows quadratically.": " * number_bytes -> * number_bytes * tokens",
    "keeps all tokens in every layer: one with a window drops older keys and values.": "min(w, tokens) -> tokens",
    "counts the whole window, also where the text is shorter: memory for tokens that do not exist is not part of the "
    "cache.": "min(w, tokens) -> w",
})  # fmt: skip


def ids(text):
    """Return ids that are equal without being one object, as those of a tokenizer are: `is` does not compare them."""
    return list(map(int, text.split()))


@Exercise.declare(
    "an output ends with its first EOS or at max_tokens, whichever is first",
    names=("the token ids that are kept", "the reason"),
)
def stop(token_ids, eos_id, max_tokens):
    kept = token_ids[:max_tokens]
    if eos_id in kept:
        return kept[: kept.index(eos_id) + 1], "stop"
    return kept, "length" if len(kept) == max_tokens else None


stop.table([
    ("EOS below max_tokens", [5, 6, 7], 7, 8), ("tokens after EOS", [5, 6, 7, 9, 7, 4], 7, 8),
    ("EOS twice, once at the limit", [5, 7, 6, 7], 7, 4), ("more tokens than max_tokens", [5, 6, 8, 9], 7, 3),
    ("exactly max_tokens tokens", [5, 6, 8], 7, 3), ("EOS as the last token that is allowed", [5, 6, 7], 7, 3),
    ("EOS beyond max_tokens", [5, 6, 8, 7], 7, 3), ("EOS far beyond max_tokens", [5, 6, 8, 9, 7], 7, 2),
    ("an output that has not ended", [5, 6], 7, 3), ("no tokens yet", [], 7, 3),
    ("an EOS whose id is 0", [4, 0, 3], 0, 8), ("an EOS whose id is 0, and no such token", [4, 3], 0, 3),
    ("EOS as the first token", [7, 5], 7, 1), ("EOS as the only token", [0], 0, 1),
    ("a token of id 0", [5, 0, 6, 0], 7, 9), ("large ids", ids("50256 5 50255 50256 7"), int("50255"), 4),
    ("large ids", ids("300 4000 1000 4000"), int("4001"), 4), ("one token twice, no EOS", [5, 5, 5, 5, 5], 7, 4),
], lambda random: [("random tokens", random.choices(range(4), k=9), 3, random.randint(2, 9))])  # fmt: skip

UP_TO_EOS, AT_THE_LIMIT = "kept[: kept.index(eos_id) + 1]", '"length" if len(kept) == max_tokens'
stop.add_misconceptions({
    "drops EOS. EOS is not text, but the model generated it: it counts as a token and stays in the list.":
        "index(eos_id) + 1 -> index(eos_id)",
    "keeps tokens after the first EOS. The output ends there, whatever follows in the list.": f"{UP_TO_EOS} -> kept",
    'returns "length" although the model ended the output itself: EOS came exactly at the limit.':
        f'{UP_TO_EOS}, "stop" -> {UP_TO_EOS}, "length" if kept.index(eos_id) + 1 == max_tokens else "stop"',
    'returns "length" for an output that has not ended yet: more tokens are allowed.':
        f"{AT_THE_LIMIT} else None -> 'length'",
    "assumes that there is an EOS. An output can end without one, or may not have ended yet.":
        ("[:max_tokens] -> ", "eos_id in kept -> True"),
})  # fmt: skip


@Exercise.declare(
    "each token is computed once, and the output is the same as for the whole conversation without a cache",
    observe=loop_on_model,
)
def cached_loop(model, turns, max_tokens):
    cache, outputs, text = kv_cache.new(), [], turns[0][:, :0]
    token = text
    for turn in turns:
        text = torch.cat([text, turn], dim=1)
        input_ids, output = torch.cat([token, turn], dim=1), []
        for _ in range(max_tokens):
            with torch.no_grad():
                logits = model(input_ids=input_ids, past_key_values=cache, use_cache=True).logits
            token = logits[:, -1:].argmax(dim=-1)
            text = torch.cat([text, token], dim=1)
            output.append(token.item())
            input_ids = token
        outputs.append(output)
    return outputs


@cached_loop.cases
def _(random):
    tokenizer, eos = load_model()[1], model_named("other").config.eos_token_id

    def ids(name: str, *counts: int) -> list[list[int]]:
        size = model_named(name).config.vocab_size
        return [[random.randrange(1, size) for _ in range(count)] for count in counts]

    for name, turns, max_tokens in [
        ("course", ids("course", 7, 3), 6),
        ("other", [[26, 3, 20, 45, 56, 9, 25, 25, 29], [10, 21, 47]], 20),  # generates EOS, and goes on
        ("other", [[44, 7, 54, 25], [36, 23]], 3),  # EOS is a turn's last token
        ("other", [[12, 46, 18], [33, 5]], 2),  # id 0 is a turn's last token
        ("other", [[12, 40, 16], [26, 38]], 4),  # generates id 0, and goes on
        ("other", [[*ids("other", 2)[0], eos, 0], [0], [*ids("other", 4)[0], eos]], 3),
        ("course", ids("course", 1, 2, 1), 1),
        ("course", ids("course", 2, 17, 1), 3),  # a long second turn
        ("course", [tokenizer("What goes up")["input_ids"], *ids("course", 4)], 12),  # generates EOS earlier
        ("course", [tokenizer("What comes up")["input_ids"]], 10),
    ]:
        given = f"turns of {' and '.join(str(len(turn)) for turn in turns)} tokens, max_tokens {max_tokens}"
        yield (name, [torch.tensor([turn]) for turn in turns], max_tokens), given


BEGINS = "text = torch.cat([text, turn] -> {}; text = torch.cat([text, turn]"
FORGETS = BEGINS.format("cache = kv_cache.new()")
NO_CACHE = "past_key_values=cache -> past_key_values=kv_cache.new()"
TURN_ALONE, WHOLE_TEXT = "torch.cat([token, turn], dim=1) -> turn", "torch.cat([token, turn], dim=1) -> text"
LAST_PASS = "model(input_ids=token, past_key_values=cache, use_cache=True)"
cached_loop.add_misconceptions({
    "recomputes the whole text in every pass. The cache holds the keys and values of the earlier tokens: after the "
    "prefill, each pass needs to compute only one token.": ("input_ids=input_ids -> input_ids=text", NO_CACHE),
    "gives the model one token and no cache, so it sees a text of a single token. It also needs the keys and "
    "values of the earlier tokens.": NO_CACHE,
    "gives the model the whole text although the cache already holds most of it: those tokens are computed again, "
    "and are in the cache twice. It lacks only the newest token.": "input_ids=input_ids -> input_ids=text",
    "begins a turn with the user's tokens alone: the last token of the previous output was generated, but is not in "
    "the cache yet.": TURN_ALONE,
    "begins a turn with the whole conversation, although the cache already holds most of it: those tokens are in the "
    "cache twice.": WHOLE_TEXT,
    "begins every turn with a new cache: the keys of the conversation so far are lost, or are computed again.":
        [FORGETS, (TURN_ALONE, FORGETS), (WHOLE_TEXT, FORGETS)],
    "computes the user's tokens before the last token of the previous output, which comes before them in the text.":
        "[token, turn] -> [turn, token]",
    "generates one token too few: the prefill yields a token, too.": "range(max_tokens) -> range(max_tokens - 1)",
    "generates one token too many: the prefill yields the first one.": "range(max_tokens) -> range(max_tokens + 1)",
    "stops at EOS. A server does that, but this loop should generate exactly max_tokens tokens.":
        "for _ in range(max_tokens) -> while len(output) < max_tokens and model.config.eos_token_id not in output[-1:]",
    "runs a pass more than a turn needs, only to compute its last token. The next turn can compute it together with "
    "the user's tokens, and the last turn needs no other pass.":
        f"outputs.append(output) -> outputs.append(output); {LAST_PASS}; token = token[:, :0]",
    "numbers the positions of every pass from 0. A token's position is its place in the whole text, and the "
    "model's output depends on it: a cache must not change the output.":
        "use_cache=True -> use_cache=True, position_ids=torch.arange(input_ids.size(1))[None]",
})  # fmt: skip
