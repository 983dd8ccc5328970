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
    # Every position of every row has its own best token, and its logit is not always the largest in absolute value.
    by_hand = [
        [[9.0, 0, 1, 2, 3], [0, 8, 1, 2, 3], [0, 1, -9, 7, 2]],
        [[0, 1, 6, 2, 3], [0, 1, 2, 3, 5], [-1, -2, -3, -4, -0.5]],
    ]
    yield (torch.tensor(by_hand),), "logits of shape [2, 3, 5]"
    draw = torch.Generator().manual_seed(random.randrange(10**6))
    yield (torch.randn(4, 4, 4, generator=draw) - 2,), "logits of shape [4, 4, 4]"
    yield (torch.randn(3, 5, 11, generator=draw),), "logits of shape [3, 5, 11]"
    yield (torch.randn(1, 2, 7, generator=draw),), "logits of shape [1, 2, 7]"
    # With so many equal rows and nearly equal logits, randomly drawn tokens cannot all be the same.
    yield (torch.randn(1, 2, 8, generator=draw).div(9).repeat(64, 1, 1),), "logits of shape [64, 2, 8], all rows equal"


@greedy_step.reference
def best_of_last_position(logits):
    return logits[:, -1].argmax(dim=-1)


for _message, _wrong in {
    "returns the best token of every position. Only the last position of a row predicts the token that follows the "
    "whole text: the first one predicts what follows the first token, and so on.": lambda logits: logits.argmax(dim=-1),
    "returns one token for all rows together. Each row is a separate sequence and needs its own next "
    "token.": lambda logits: logits[:, -1].argmax(),
    "uses the first position, which predicts the second token. The last position predicts what follows the whole "
    "text.": lambda logits: logits[:, 0].argmax(dim=-1),
    "uses the second-to-last position, which predicts a token that the text already has.": lambda logits: logits[
        :, -2
    ].argmax(dim=-1),
    "picks the least likely token: the most likely one has the largest logit.": lambda logits: logits[:, -1].argmin(
        dim=-1
    ),
    "picks the logit with the largest absolute value, but a very negative logit means a very unlikely "
    "token.": lambda logits: logits[:, -1].abs().argmax(dim=-1),
    "compares the rows with each other. The candidates for the next token are the entries of the vocabulary, and "
    "each row chooses among its own logits.": lambda logits: logits[:, -1].argmax(dim=0),
    "compares the positions with each other. The candidates for the next token are the entries of the vocabulary, "
    "at the last position.": lambda logits: logits.argmax(dim=1),
    "returns the best token's logit, which is a score. The task asks for its id: its index in the "
    "vocabulary.": lambda logits: logits[:, -1].max(dim=-1).values,
    "keeps the dimension over which `argmax` ran: the task asks for one token id per row, shape "
    "[rows].": lambda logits: logits[:, -1].argmax(dim=-1, keepdim=True),
}.items():
    greedy_step.misconception(_message, _wrong)


@greedy_step.rule
def draws_nothing(arguments, outcome, right):
    """Report tokens that differ between equal rows."""
    if len(arguments[0]) < 64 or outcome.result.shape != right.result.shape or len(outcome.result.unique()) < 3:
        return None
    return (
        "gives equal rows different tokens. Greedy decoding involves no randomness: the same logits always give "
        "the same token, and every later comparison in this course relies on that"
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
    "counts only half of the cache: each token has a key and a value.": lambda n, h, d, b, t: n * h * d * b * t,
    "leaves out the layers: each has its own cache.": lambda n, h, d, b, t: 2 * h * d * b * t,
    "leaves out the heads: each has its own keys and values.": lambda n, h, d, b, t: 2 * n * d * b * t,
    "leaves out the head dimension: a key is a vector.": lambda n, h, d, b, t: 2 * n * h * b * t,
    "counts numbers, not bytes: a number takes several bytes.": lambda n, h, d, b, t: 2 * n * h * d * t,
    "returns the bytes of one token: the cache holds many.": lambda n, h, d, b, t: 2 * n * h * d * b,
    "returns bits: `number_bytes` is already in bytes.": lambda n, h, d, b, t: 16 * n * h * d * b * t,
    "grows with the square of the number of tokens. The cache keeps one key and one value per token; it is the "
    "*work* without a cache that grows quadratically.": lambda n, h, d, b, t: 2 * n * h * d * b * t**2,
}.items():
    kv_cache_bytes.misconception(_message, _wrong)

# --- decode_floor ---------------------------------------------------------------------------------------------------

decode_floor = Exercise(
    "decode_floor(weight_bytes, bandwidth, operations, rate)",
    "a pass takes at least as long as the slower of reading the weights and doing the arithmetic",
)
BOTH = "Both happen at the same time, so the pass ends when the slower one ends"


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
    f"adds the two times. {BOTH}.": lambda w, b, o, r: w / b + o / r,
    f"returns the shorter time. {BOTH}.": lambda w, b, o, r: min(w / b, o / r),
    "considers only the memory traffic. With many tokens in a pass, the arithmetic takes longer than reading the "
    "weights.": lambda w, b, o, r: w / b,
    "considers only the arithmetic. With one token in a pass, reading the weights takes longer.": lambda w, b, o, r: (
        o / r
    ),
    "divides the wrong way round: bytes divided by bytes per second give seconds. The inverse is passes per "
    "second.": lambda w, b, o, r: max(b / w, r / o),
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
        ("tokens after EOS", [5, 6, 7, 9, 7, 4], 7, 8),
        ("EOS twice, once at the limit", [5, 7, 6, 7], 7, 4),
        ("more tokens than max_tokens", [5, 6, 8, 9], 7, 3),
        ("exactly max_tokens tokens", [5, 6, 8], 7, 3),
        ("EOS as the last token that is allowed", [5, 6, 7], 7, 3),
        ("EOS beyond max_tokens", [5, 6, 8, 7], 7, 3),
        ("EOS far beyond max_tokens", [5, 6, 8, 9, 7], 7, 2),
        ("an output that has not ended", [5, 6], 7, 3),
        ("no tokens yet", [], 7, 3),
        ("an EOS whose id is 0", [4, 0, 3], 0, 8),
        ("EOS as the first token", [7, 5], 7, 1),
        ("random tokens", [random.randint(0, 3) for _ in range(9)], 3, random.randint(2, 9)),
    ]:
        yield tuple(case), f"{what}: {case[0]} with EOS {case[1]} and max_tokens {case[2]}"


@stop.reference
def first_eos_or_limit(token_ids, eos_id, max_tokens):
    kept = token_ids[:max_tokens]
    if eos_id in kept:
        return kept[: kept.index(eos_id) + 1], "stop"
    return kept, "length" if len(kept) == max_tokens else None


@stop.misconception("looks for the last EOS. The output ends at the first one.")
def last_eos(token_ids, eos_id, max_tokens):
    kept = token_ids[:max_tokens]
    if eos_id not in kept:
        return first_eos_or_limit(token_ids, eos_id, max_tokens)
    return kept[: len(kept) - kept[::-1].index(eos_id)], "stop"


for _message, _wrong in {
    "drops EOS. EOS is not text, but the model generated it: it counts as a token and stays in the "
    "list.": lambda kept, reason, ids, eos, n: ([token for token in kept if token != eos], reason),
    "keeps tokens after the first EOS. The output ends there, whatever follows in the "
    "list.": lambda kept, reason, ids, eos, n: (ids[:n], reason),
    'returns "length" although the model ended the output itself: EOS came exactly at the limit.': (
        lambda kept, reason, ids, eos, n: (kept, "length" if len(kept) == n else reason)
    ),
    'returns "stop" for an EOS beyond max_tokens: the output was cut before it.': (
        lambda kept, reason, ids, eos, n: (kept, "stop" if eos in ids else reason)
    ),
    "returns a reason for an output that has not ended: it has reached neither EOS nor "
    "max_tokens.": lambda kept, reason, ids, eos, n: (kept, reason or "length"),
    "keeps one token more than max_tokens allows.": lambda kept, reason, *case: first_eos_or_limit(
        *case[:2], case[2] + 1
    ),
    "keeps one token too few: exactly max_tokens tokens are allowed.": lambda kept, reason, *case: first_eos_or_limit(
        *case[:2], case[2] - 1
    ),
    "assumes that there is an EOS. An output can end without one, or may not have ended "
    "yet.": lambda kept, reason, ids, eos, n: (ids[: ids.index(eos) + 1], "stop"),
}.items():
    stop.misconception(_message, lambda *case, _wrong=_wrong: _wrong(*first_eos_or_limit(*case), *case))


@stop.rule
def is_a_known_reason(arguments, outcome, right):
    """Report an unknown reason, or a list that is not a new one."""
    kept, reason = outcome.result
    if kept is outcome.arguments[0]:
        return (
            "returns the list that it was given. Return a new one: otherwise, a later change to one list "
            "changes the other"
        )
    if reason not in ("stop", "length", None):
        return f'returns the reason {reason!r}, which should be "stop", "length" or None'
    return None


# --- cached_loop ----------------------------------------------------------------------------------------------------

cached_loop = Exercise(
    "cached_loop(model, prompt_ids, max_tokens)",
    "the prompt is computed once, each later pass computes one token, and the output is the same as without a cache",
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
        ("course", load_model()[1]("What goes up")["input_ids"], 12),  # generates EOS earlier, and so does the next
        ("course", load_model()[1]("What comes up")["input_ids"], 10),
        ("other", next(prompt for _ in range(999) if yields_eos(prompt := ids("other", 9), 24)), 24),
    ]:
        given = f"a prompt of {len(prompt)} tokens, max_tokens {max_tokens}"
        yield (name, torch.tensor([prompt]), max_tokens), given


def loop(model, prompt_ids, passes, feed=lambda token, text: token, cached=True, until=(), positions=False):
    """Run the loop, with replaceable parts: what a later pass computes, whether it gets the cache, where it ends."""
    cache, input_ids, text, generated = kv_cache.new(), prompt_ids, prompt_ids, []
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
        input_ids = feed(token, text)
    return generated


@cached_loop.reference
def one_token_per_pass(model, prompt_ids, max_tokens):
    return loop(model, prompt_ids, max_tokens)


for _message, _wrong in {
    "recomputes the whole text in every pass. The cache holds the keys and values of the earlier tokens: after the "
    "prefill, each pass needs to compute only one "
    "token.": lambda *case: loop(*case, feed=lambda token, text: text, cached=False),
    "gives the model one token and no cache, so it sees a text of a single token. It also needs the keys and "
    "values of the earlier tokens.": lambda *case: loop(*case, cached=False),
    "gives the model the whole text although the cache already holds most of it: those tokens are computed again, "
    "and are in the cache twice. Only the newest token is missing from the "
    "cache.": lambda *case: loop(*case, feed=lambda token, text: text),
    "gives every pass the prompt's last token. Each pass must compute the token that the previous pass "
    "generated.": lambda model, prompt, n: loop(model, prompt, n, feed=lambda token, text: prompt[:, -1:]),
    "generates one token too few: the prefill yields a token, too.": lambda model, prompt, n: loop(
        model, prompt, n - 1
    ),
    "drops the first token: the prefill yields it, and it counts.": lambda *case: loop(*case)[1:],
    "drops the first token and adds one at the end: the prefill yields the first token of the "
    "output.": lambda model, prompt, n: loop(model, prompt, n + 1)[1:],
    "generates one token too many: the prefill already yields the first one.": lambda model, prompt, n: loop(
        model, prompt, n + 1
    ),
    "counts the prompt's tokens, too: `max_tokens` limits the generated tokens only.": lambda model, prompt, n: loop(
        model, prompt, max(n - prompt.size(1), 0)
    ),
    "runs one forward pass more than it needs: the output of the last one is discarded.": lambda model, prompt, n: loop(
        model, prompt, n + 1
    )[:n],
    "returns the prompt's tokens, too. The task asks for the generated tokens only.": lambda model, prompt, n: (
        prompt[0].tolist() + loop(model, prompt, n)
    ),
    "stops at EOS. A server does that, but this loop should generate exactly max_tokens tokens.": lambda model, *case: (
        loop(model, *case, until=[model.config.eos_token_id])
    ),
    "stops at the EOS of one tokenizer. This loop should generate exactly max_tokens tokens, with any "
    "model.": lambda *case: loop(*case, until=[load_model()[1].eos_token_id]),
    "numbers the positions of every pass from 0. A token's position is its place in the whole text, and the "
    "model's output depends on it: a cache must not change the output.": lambda *case: loop(*case, positions=True),
}.items():
    cached_loop.misconception(_message, _wrong)


@cached_loop.rule
def calls_the_model(arguments, outcome, right):
    """Report a loop that never calls the model, and more passes or tokens than the loop needs."""
    passes, needed = outcome.result["forward passes"], right.result["forward passes"]
    if not passes:
        return "never calls the model: each token takes a forward pass"
    if outcome.result["token ids"] == right.result["token ids"] and math.prod(passes[-1]) != math.prod(needed[-1]):
        return "gives a decode pass more than the newest token, although the cache holds the earlier ones"
    return None
