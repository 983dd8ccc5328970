"""Lesson 1, a single request: the next token, the loop with a cache, how an output ends, what limits decoding."""

import math

import torch

from ... import kv_cache
from ...models import load_model
from ..exercise import Exercise
from ..watch import loop_on_model, model_named

# --- greedy_step ----------------------------------------------------------------------------------------------------

greedy_step = Exercise("greedy_step(logits)", "every row gets the best token of its own last position")


@greedy_step.cases
def _(random):
    # Every position and row has a best token of its own, and the largest number is not always the largest in size.
    by_hand = [
        [[9.0, 0, 1, 2, 3], [0, 8, 1, 2, 3], [0, 1, -9, 7, 2]],
        [[0, 1, 6, 2, 3], [0, 1, 2, 3, 5], [-1, -2, -3, -4, -0.5]],
    ]
    yield (torch.tensor(by_hand),), "logits of shape [2, 3, 5]"
    draw = torch.Generator().manual_seed(random.randrange(10**6))
    yield (torch.randn(4, 4, 4, generator=draw) - 2,), "logits of shape [4, 4, 4]"
    yield (torch.randn(3, 5, 11, generator=draw),), "logits of shape [3, 5, 11]"
    yield (torch.randn(1, 2, 7, generator=draw),), "logits of shape [1, 2, 7]"
    # So many equal rows with nearly equal rivals that tokens drawn at random cannot be the same in all of them.
    yield (torch.randn(1, 2, 8, generator=draw).div(9).repeat(64, 1, 1),), "logits of shape [64, 2, 8], all rows equal"


@greedy_step.reference
def best_of_last_position(logits):
    return logits[:, -1].argmax(dim=-1)


for _message, _wrong in {
    "returns a best token for every position. Only the last position of a row predicts the token that follows the "
    "whole text: the first one predicts what follows the first token, and so on.": lambda logits: logits.argmax(dim=-1),
    "returns one token for all rows together. Every row is a text of its own and gets a token of its own.": (
        lambda logits: logits[:, -1].argmax()
    ),
    "takes the first position, which predicts the second token. The last one predicts what follows the whole text.": (
        lambda logits: logits[:, 0].argmax(dim=-1)
    ),
    "takes the position before the last, which predicts a token that the text already has.": (
        lambda logits: logits[:, -2].argmax(dim=-1)
    ),
    "takes the worst token: the best one has the largest logit.": lambda logits: logits[:, -1].argmin(dim=-1),
    "takes the largest number regardless of its sign, but a very negative logit means a very unlikely token.": (
        lambda logits: logits[:, -1].abs().argmax(dim=-1)
    ),
    "compares the rows with each other, token by token. The candidates for the next token are the entries of the "
    "vocabulary, within a row.": lambda logits: logits[:, -1].argmax(dim=0),
    "compares the positions with each other. The candidates for the next token are the entries of the vocabulary, in "
    "the last position.": lambda logits: logits.argmax(dim=1),
    "returns the best token's logit, a score. Wanted is its id: its place in the vocabulary.": (
        lambda logits: logits[:, -1].max(dim=-1).values
    ),
    "keeps the dimension over which `argmax` ran: wanted is one token id per row, shape [rows].": (
        lambda logits: logits[:, -1].argmax(dim=-1, keepdim=True)
    ),
}.items():
    greedy_step.misconception(_message, _wrong)


@greedy_step.rule
def draws_nothing(arguments, outcome, right):
    """Report tokens that differ between equal rows."""
    if len(arguments[0]) < 64 or outcome.result.shape != right.result.shape or len(outcome.result.unique()) < 3:
        return None
    return (
        "gives equal rows different tokens. Greedy decoding draws nothing at random: the same logits give the same "
        "token every time, and that makes every later comparison possible"
    )


# --- kv_cache_bytes -------------------------------------------------------------------------------------------------

kv_cache_bytes = Exercise(
    "kv_cache_bytes(layers, kv_heads, head_dim, number_bytes, tokens)",
    "a key and a value for every token, in every KV head of every layer",
)


@kv_cache_bytes.cases
def _(random):
    for shape in [(3, 5, 7, 4, 11), (32, 8, 128, 2, 2048), (random.randint(2, 9), 13, 17, 2, random.randint(19, 99))]:
        yield shape, "layers {}, KV heads {}, head dimension {}, bytes {}, tokens {}".format(*shape)


@kv_cache_bytes.reference
def keys_and_values(layers, kv_heads, head_dim, number_bytes, tokens):
    return 2 * layers * kv_heads * head_dim * number_bytes * tokens


for _message, _wrong in {
    "is half of it: a token leaves a key and a value.": lambda n, h, d, b, t: n * h * d * b * t,
    "forgets the layers: each has a cache of its own.": lambda n, h, d, b, t: 2 * h * d * b * t,
    "forgets the heads: each has keys and values.": lambda n, h, d, b, t: 2 * n * d * b * t,
    "forgets the head dimension: a key is a vector.": lambda n, h, d, b, t: 2 * n * h * b * t,
    "counts numbers, not bytes: a number takes several.": lambda n, h, d, b, t: 2 * n * h * d * t,
    "is the cost of one token: multiply by their number.": lambda n, h, d, b, t: 2 * n * h * d * b,
    "counts bits: `number_bytes` is in bytes already.": lambda n, h, d, b, t: 16 * n * h * d * b * t,
    "grows with the square of the tokens. The cache keeps one key and one value per token; it is the *work* without a "
    "cache that grows like that.": lambda n, h, d, b, t: 2 * n * h * d * b * t**2,
}.items():
    kv_cache_bytes.misconception(_message, _wrong)

# --- decode_floor ---------------------------------------------------------------------------------------------------

decode_floor = Exercise(
    "decode_floor(weight_bytes, bandwidth, operations, rate)",
    "a pass takes at least as long as the slower of reading the weights and doing the arithmetic",
)
BOTH = "The two go on at the same time: a pass is done when the slower of them is"


@decode_floor.cases
def _(random):
    yield (500e6, 10e9, 250e6, 100e9), "a pass over 1 token"
    yield (500e6, 10e9, 64 * 250e6, 100e9), "a pass over 64 tokens"
    yield (random.randint(1, 9) * 1e9, 2e12, 14e9, 3e14), "a pass over 1 token on a GPU"
    yield (14e9, 2e12, random.randint(400, 800) * 14e9, 3e14), "a pass over hundreds of tokens on a GPU"


@decode_floor.reference
def slower_of_two(weight_bytes, bandwidth, operations, rate):
    return max(weight_bytes / bandwidth, operations / rate)


for _message, _wrong in {
    f"adds the two times. {BOTH}, so neither waits for the end of the other.": lambda w, b, o, r: w / b + o / r,
    f"takes the shorter time. {BOTH}.": lambda w, b, o, r: min(w / b, o / r),
    "looks at memory only. With many tokens in a pass, the arithmetic takes longer than the reading.": (
        lambda w, b, o, r: w / b
    ),
    "looks at arithmetic only. With one token in a pass, reading the weights takes longer.": lambda w, b, o, r: o / r,
    "divides the wrong way round: bytes / (bytes per second) gives seconds, its inverse passes per second.": (
        lambda w, b, o, r: max(b / w, r / o)
    ),
}.items():
    decode_floor.misconception(_message, _wrong)

# --- stop -----------------------------------------------------------------------------------------------------------

stop = Exercise(
    "stop(token_ids, eos_id, max_tokens)",
    "an output ends with its first EOS or at max_tokens, whichever is first",
    names=("the token ids that are kept", "the reason"),
)


@stop.cases
def _(random):
    for what, *case in [
        ("EOS below max_tokens", [5, 6, 7], 7, 8),
        ("tokens behind EOS", [5, 6, 7, 9, 7, 4], 7, 8),
        ("EOS twice, once at the limit", [5, 7, 6, 7], 7, 4),
        ("more tokens than max_tokens", [5, 6, 8, 9], 7, 3),
        ("exactly max_tokens tokens", [5, 6, 8], 7, 3),
        ("EOS as the last token that is allowed", [5, 6, 7], 7, 3),
        ("EOS beyond max_tokens", [5, 6, 8, 7], 7, 3),
        ("EOS far beyond max_tokens", [5, 6, 8, 9, 7], 7, 2),
        ("an output that has not ended", [5, 6], 7, 3),
        ("no tokens yet", [], 7, 3),
        ("an EOS whose id is 0", [4, 0, 3], 0, 8),
        ("EOS at once", [7, 5], 7, 1),
        ("any", [random.randint(0, 3) for _ in range(9)], 3, random.randint(2, 9)),
    ]:
        yield tuple(case), f"{what}: {case[0]} with EOS {case[1]} and max_tokens {case[2]}"


@stop.reference
def first_eos_or_limit(token_ids, eos_id, max_tokens):
    kept = token_ids[:max_tokens]
    if eos_id in kept:
        return kept[: kept.index(eos_id) + 1], "stop"
    return kept, "length" if len(kept) == max_tokens else None


@stop.misconception("looks for the last EOS. The output ends with the first one.")
def last_eos(token_ids, eos_id, max_tokens):
    kept = token_ids[:max_tokens]
    if eos_id not in kept:
        return first_eos_or_limit(token_ids, eos_id, max_tokens)
    return kept[: len(kept) - kept[::-1].index(eos_id)], "stop"


for _message, _wrong in {
    "drops EOS. It is no text, but the model generated it: it counts as a token and stays in the list.": (
        lambda kept, reason, ids, eos, n: ([token for token in kept if token != eos], reason)
    ),
    "keeps tokens behind the first EOS. The output is over there, whatever follows in the list.": (
        lambda kept, reason, ids, eos, n: (ids[:n], reason)
    ),
    'says "length" although the model ended the output by itself: it did so exactly at the limit.': (
        lambda kept, reason, ids, eos, n: (kept, "length" if len(kept) == n else reason)
    ),
    'says "stop" for an EOS that lies beyond max_tokens: there the output is already cut.': (
        lambda kept, reason, ids, eos, n: (kept, "stop" if eos in ids else reason)
    ),
    "names a reason for an output that has not ended: neither EOS nor max_tokens has come.": (
        lambda kept, reason, ids, eos, n: (kept, reason or "length")
    ),
    "keeps one token more than max_tokens allows.": lambda kept, reason, *case: first_eos_or_limit(
        *case[:2], case[2] + 1
    ),
    "keeps one token too few: exactly max_tokens tokens are allowed.": (
        lambda kept, reason, *case: first_eos_or_limit(*case[:2], case[2] - 1)
    ),
    "takes an EOS for granted: an output can end without one, or not have ended yet.": (
        lambda kept, reason, ids, eos, n: (ids[: ids.index(eos) + 1], "stop")
    ),
}.items():
    stop.misconception(_message, lambda *case, _wrong=_wrong: _wrong(*first_eos_or_limit(*case), *case))


@stop.rule
def is_a_known_reason(arguments, outcome, right):
    """Report a reason of another name, and a list that is not a new one."""
    kept, reason = outcome.result
    if kept is outcome.arguments[0]:
        return "returns the list that it was given. Return a new one: a later change of one would change the other"
    if reason not in ("stop", "length", None):
        return f'the reason is {reason!r}, and should be "stop", "length" or None'
    return None


# --- cached_loop ----------------------------------------------------------------------------------------------------

cached_loop = Exercise(
    "cached_loop(model, prompt_ids, max_tokens)",
    "the prompt is computed once, then one token per pass, and no token has changed",
    observe=loop_on_model,
)


@cached_loop.cases
def _(random):
    def ids(name: str, count: int) -> list[int]:
        return [random.randrange(1, model_named(name).config.vocab_size) for _ in range(count)]

    def yields_eos(prompt: list[int], passes: int) -> bool:
        return eos in loop(other, torch.tensor([prompt]), passes)[:-1]

    other = model_named("other")
    eos = other.config.eos_token_id
    for name, prompt, max_tokens in [
        ("course", ids("course", 7), 12),
        ("other", next(prompt for _ in range(999) if yields_eos(prompt := ids("other", 4), 9)), 9),
        ("other", [*ids("other", 2), eos, *ids("other", 3)], 5),
        ("course", ids("course", 1), 1),
        ("course", load_model()[1]("What goes up")["input_ids"], 12),  # ends by itself before, and so does the next
        ("course", load_model()[1]("What comes up")["input_ids"], 10),
        ("other", next(prompt for _ in range(999) if yields_eos(prompt := ids("other", 9), 24)), 24),
    ]:
        given = f"a prompt of {len(prompt)} tokens, max_tokens {max_tokens}"
        yield (name, torch.tensor([prompt]), max_tokens), given


def loop(model, prompt_ids, passes, feed=lambda token, text: token, cached=True, until=(), positions=False):
    """Run the loop, with parts to be broken: what a later pass reads, whether it has the cache, where it ends."""
    cache, to_read, text, generated = kv_cache.new(), prompt_ids, prompt_ids, []
    for _ in range(passes):
        given = {"past_key_values": cache if cached else kv_cache.new(), "use_cache": True}
        if positions:
            given["position_ids"] = torch.arange(to_read.size(1))[None]
        with torch.no_grad():
            token = model(input_ids=to_read, **given).logits[:, -1:].argmax(dim=-1)
        generated.append(token.item())
        if generated[-1] in until:
            break
        text = torch.cat([text, token], dim=1)
        to_read = feed(token, text)
    return generated


@cached_loop.reference
def one_token_per_pass(model, prompt_ids, max_tokens):
    return loop(model, prompt_ids, max_tokens)


for _message, _wrong in {
    "computes the whole text again in every pass. The cache holds what the model computed for the earlier tokens: "
    "after the prompt, a pass needs one token.": lambda *case: loop(*case, feed=lambda token, text: text, cached=False),
    "gives a pass one token and no cache: the model sees a text of a single token. Pass the keys and values of the "
    "tokens before.": lambda *case: loop(*case, cached=False),
    "gives a pass the whole text although the cache holds it already: its tokens are computed twice, and stand in the "
    "cache twice. Only the newest token is missing in it.": lambda *case: loop(*case, feed=lambda token, text: text),
    "gives every pass the prompt's last token. Each pass computes the token that the previous one yielded.": (
        lambda model, prompt, n: loop(model, prompt, n, feed=lambda token, text: prompt[:, -1:])
    ),
    "yields one token too few: the pass over the prompt yields a token, too.": (
        lambda model, prompt, n: loop(model, prompt, n - 1)
    ),
    "drops the first token: the pass over the prompt yields one, and it counts.": lambda *case: loop(*case)[1:],
    "drops the first token and adds one at the end: the pass over the prompt yields the first.": (
        lambda model, prompt, n: loop(model, prompt, n + 1)[1:]
    ),
    "yields one token too many: the pass over the prompt already yields the first.": (
        lambda model, prompt, n: loop(model, prompt, n + 1)
    ),
    "counts the prompt's tokens, too: `max_tokens` is about generated ones.": (
        lambda model, prompt, n: loop(model, prompt, max(n - prompt.size(1), 0))
    ),
    "runs one pass more than it needs: the output of the last one is thrown away.": (
        lambda model, prompt, n: loop(model, prompt, n + 1)[:n]
    ),
    "returns the prompt's tokens, too. Wanted are the generated ones only.": (
        lambda model, prompt, n: prompt[0].tolist() + loop(model, prompt, n)
    ),
    "stops at EOS. A server does that; this loop should generate exactly max_tokens tokens.": (
        lambda model, *case: loop(model, *case, until=[model.config.eos_token_id])
    ),
    "stops at the EOS of one tokenizer. This loop should generate exactly max_tokens tokens, for any model.": (
        lambda *case: loop(*case, until=[load_model()[1].eos_token_id])
    ),
    "gives every pass positions from 0 on. A token's position is its place in the whole text, and the model goes by "
    "it: a cache must not change the output.": lambda *case: loop(*case, positions=True),
}.items():
    cached_loop.misconception(_message, _wrong)


@cached_loop.rule
def calls_the_model(arguments, outcome, right):
    """Report a loop that never calls the model, and more passes or tokens than the loop needs."""
    passes, needed = outcome.result["forward passes"], right.result["forward passes"]
    if not passes:
        return "never calls the model: each token takes a forward pass"
    if outcome.result["token ids"] == right.result["token ids"] and math.prod(passes[-1]) != math.prod(needed[-1]):
        return "gives a pass more tokens than the newest one, although the cache holds the earlier ones"
    return None
