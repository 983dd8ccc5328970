"""Lesson 1, a single request: the next token, the loop with a cache, how a text ends, what limits decoding."""

import contextlib
from functools import cache

import torch
from transformers.utils import logging

from .. import kv_cache
from ..loops import generate_static
from ..models import load_model
from .attempt import Attempt
from .differences import (
    Wrong,
    expect_ids,
    expect_number,
    expect_numbers,
    expect_pair,
    expect_tensor,
    kind,
    recognise,
    same,
)
from .watch import Pass, watched


def greedy_step(attempt: Attempt) -> None:
    """Logits by hand: 2 rows, 3 tokens, a vocabulary of 5; every position and every row has a best token of its own."""
    logits = torch.tensor(
        [
            [[9.0, 0, 1, 2, 3], [0, 8, 1, 2, 3], [0, 1, -3, 7, 2]],
            [[0, 1, 6, 2, 3], [0, 1, 2, 3, 5], [-1, -2, -3, -4, -0.5]],
        ]
    )
    # So many rows with nearly equal rivals that two draws at random cannot agree in all of them. First of all: what is
    # drawn may look like any other mistake.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        close = torch.randn(64, 2, 8)
    first, second = attempt(close), attempt(close)
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and not same(first, second):
        raise Wrong(
            "does not always take the best token. Greedy decoding draws nothing at random: the same logits give "
            "the same token every time, and that makes every later comparison possible."
        )

    got, expected = attempt(logits), torch.tensor([3, 4])
    if isinstance(got, torch.Tensor):
        last = logits[:, -1]
        recognise(
            got,
            expected,
            [
                (
                    logits.argmax(dim=-1),
                    "returns a best token for every position. Only the last position of a row tells what follows the "
                    "whole text: the others say what follows its first word, its second word, ...",
                ),
                (
                    last.argmax(),
                    "returns one token for all rows together. Every row is a text of its own and gets a token of its "
                    "own.",
                ),
                (
                    logits.argmax(dim=-1)[:, 0],
                    "reads the first position, which says what follows the first token. What follows the whole text "
                    "stands in the last position.",
                ),
                (
                    logits.argmax(dim=-1)[:, -2],
                    "reads the position before the last: that is the guess for a token which the text already has.",
                ),
                (last.argmin(dim=-1), "takes the worst token: the best one has the largest logit."),
                (
                    last.abs().argmax(dim=-1),
                    "takes the largest number regardless of its sign, but a very negative logit means a very unlikely "
                    "token.",
                ),
                (
                    last.argmax(dim=0),
                    "compares the rows with each other, token by token. The rivals for the next token are the "
                    "vocabulary's entries, within a row.",
                ),
                (
                    logits.argmax(dim=1),
                    "compares the positions with each other. The rivals for the next token are the vocabulary's "
                    "entries, in the last position.",
                ),
            ],
        )
        if got.dtype.is_floating_point and same(got, last.max(dim=-1).values):
            raise Wrong("returns the best token's logit, a score. Wanted is its id: its place in the vocabulary.")
    expect_tensor(got, "the result", [2], "one token id for each row")
    for row, (token, best) in enumerate(zip(got.tolist(), expected.tolist(), strict=True)):
        if token != best:
            raise Wrong(f"row {row}: token {token} is not the best one of the last position.")


def cached_loop(attempt: Attempt) -> None:
    """Prompts of unequal length on the embedded model, one of them beyond its EOS, the passes watched."""
    model, tokenizer = load_model()
    cases = [
        ("Once upon a time, a brave", 12),
        ("There was once a poor miller called Jonas, and", 5),
        ("Look", 1),
        (prompt_that_ends(12), 13),
    ]
    for prompt, max_tokens in cases:
        prompt_ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
        given = f"a prompt of {prompt_ids.size(1)} tokens, max_tokens {max_tokens}"
        with _quiet(), watched(model) as passes:
            got = attempt(model, prompt_ids, max_tokens, given=given)
        _loop_tokens(got, passes, prompt_ids, max_tokens, tokenizer.eos_token_id, given)


def prompt_that_ends(limit: int) -> str:
    """Return a prompt whose output the model ends by itself, within `limit` tokens."""
    return _prompt_that_ends(limit, *load_model())


@cache
def _prompt_that_ends(limit: int, model, tokenizer) -> str:
    prompts = ["The quick brown fox jumped over the", "What goes up", "The rain in Spain falls", "A rolling stone"]
    outputs = generate_static([(prompt, limit) for prompt in prompts], 8, model, tokenizer).outputs
    return next((one.prompt for one in outputs if one.finish_reason == "stop"), prompts[0])


@contextlib.contextmanager
def _quiet():
    """Without transformers' warning that an EOS, which is also the pad, is read without an attention mask."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _greedy(prompt_ids: torch.Tensor, count: int) -> list[int]:
    model, _ = load_model()
    cache, generated = kv_cache.new(), []
    with torch.no_grad(), _quiet():
        for _ in range(count):
            prompt_ids = (
                model(input_ids=prompt_ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(dim=-1)
            )
            generated.append(prompt_ids.item())
    return generated


def _loop_tokens(got, passes: list[Pass], prompt_ids: torch.Tensor, max_tokens: int, eos: int, given: str) -> None:
    prompt = prompt_ids[0].tolist()
    given = f" (given: {given})"
    if isinstance(got, torch.Tensor):
        raise Wrong(f"should return a list of token ids; it returned {kind(got)}.")
    expect_ids(got, "the result")
    if not passes:
        raise Wrong("never calls the model: each token takes a forward pass.")
    if got[: len(prompt)] == prompt and len(got) >= len(prompt) + max_tokens - 1:
        raise Wrong("returns the prompt's tokens, too. Wanted are the generated ones only.")

    for number, one in enumerate(passes[1:], start=2):
        if one.cached == 0 and one.tokens == 1:
            raise Wrong(
                f"forward pass {number} reads one token and has no cache: the model sees a text of a single word. "
                f"Hand it the keys and values of what it has read before."
            )
        if one.cached == 0:
            read = sum(each.tokens for each in passes)
            raise Wrong(
                f"reads {read} tokens in {len(passes)} forward passes, the whole text again each time. The cache holds "
                f"what the model made of the earlier tokens: after the prompt, a pass needs to read one token."
            )
        if one.tokens > 1:
            raise Wrong(
                f"forward pass {number} reads {one.tokens} tokens although the cache already holds {one.cached}: what "
                f"is in the cache is read twice, and stands in it twice. Only the newest token is missing in it."
            )
        if number - 2 < len(got) and one.input_ids[0][0] != got[number - 2]:
            raise Wrong(
                f"forward pass {number} reads token {one.input_ids[0][0]}, but the one before it yielded "
                f"{got[number - 2]}. Each pass reads the token that the previous one yielded."
            )

    if len(got) < max_tokens and got and got[-1] == eos:
        raise Wrong(
            f"stops at EOS. That is right for a server; this loop is asked for exactly max_tokens tokens{given}."
        )
    if len(got) == max_tokens - 1:
        raise Wrong(f"yields one token too few{given}: the pass over the prompt yields a token, too.")
    if len(got) == max_tokens + 1:
        raise Wrong(f"yields one token too many{given}: the pass over the prompt already yields the first.")
    if len(got) != max_tokens:
        raise Wrong(f"yields {len(got)} tokens{given}.")
    if len(passes) > max_tokens:
        raise Wrong(
            f"takes {len(passes)} forward passes for {max_tokens} tokens{given}: nobody needs what the model "
            f"says after the last one."
        )
    expected = _greedy(prompt_ids, max_tokens)
    if got != expected:
        place = next(place for place, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
        raise Wrong(
            f"token {place} is {got[place]}; the model says {expected[place]} there{given}. A cache must "
            f"not change what is said."
        )


def stop(attempt: Attempt) -> None:
    """Every way in which a text can end, EOS 7 or 0, and one that has not ended."""
    cases = [
        ([5, 6, 7], 7, 8, ([5, 6, 7], "stop"), "EOS below max_tokens"),
        ([5, 6, 7, 9, 7, 4], 7, 8, ([5, 6, 7], "stop"), "tokens behind EOS"),
        ([5, 6, 8, 9], 7, 3, ([5, 6, 8], "length"), "more tokens than max_tokens"),
        ([5, 6, 8], 7, 3, ([5, 6, 8], "length"), "just max_tokens tokens"),
        ([5, 6, 7], 7, 3, ([5, 6, 7], "stop"), "EOS as the last token that was allowed"),
        ([5, 6, 8, 7], 7, 3, ([5, 6, 8], "length"), "an EOS beyond max_tokens"),
        ([5, 6], 7, 3, ([5, 6], None), "a text that has not ended"),
        ([], 7, 3, ([], None), "no tokens yet"),
        ([4, 0, 3], 0, 8, ([4, 0], "stop"), "an EOS whose id is 0"),
        ([7, 5], 7, 1, ([7], "stop"), "EOS at once"),
    ]
    for token_ids, eos, max_tokens, (kept, reason), given in cases:
        told = f"{token_ids} with EOS {eos} and max_tokens {max_tokens}"
        got = attempt(list(token_ids), eos, max_tokens, given=told)
        expect_pair(got, "the token ids that are kept and the reason")
        ids, why = got
        expect_ids(ids, "the first result")
        if why not in ("stop", "length", None):
            raise Wrong(f'the reason is {why!r}, and should be "stop", "length" or None ({told}).')
        _explain_stop(ids, why, kept, reason, token_ids, eos, max_tokens, f"{given}: {told}")


def _explain_stop(ids, why, kept, reason, token_ids, eos, max_tokens, told: str) -> None:
    if ids == kept and why == reason:
        return
    if ids != kept:
        if reason == "stop" and ids == kept[:-1]:
            message = "drops EOS. It is no text, but the model did generate it: a token that counts, kept in the list"
        elif reason == "stop" and ids == token_ids[: len(ids)] and len(ids) > len(kept):
            message = "keeps tokens behind the first EOS. The text is over there, whatever the model says afterwards"
        elif len(ids) > max_tokens:
            message = f"keeps {len(ids)} tokens where max_tokens allows {max_tokens}"
        elif ids == kept[:-1]:
            message = "keeps one token too few: exactly max_tokens tokens are allowed"
        else:
            message = f"keeps {ids}, and should keep {kept}"
    elif reason is None:
        message = (
            f"says {why!r} for a text that has not ended: neither EOS nor max_tokens has come, so there is no reason"
        )
    elif why is None:
        message = "says None, still running, for a text that has ended"
    elif reason == "stop":
        message = 'says "length" although the model ended the text by itself: it did so at the limit, but it did'
    elif len(token_ids) > max_tokens and eos in token_ids:
        message = 'says "stop" for an EOS that lies beyond max_tokens: by then the text is cut'
    else:
        message = f"says {why!r}, and should say {reason!r}"
    raise Wrong(f"{message} ({told}).")


def decode_floor(attempt: Attempt) -> None:
    """One pass that waits for memory, one that waits for arithmetic."""
    cases = [(500e6, 10e9, 250e6, 100e9), (500e6, 10e9, 64 * 250e6, 100e9)]
    for case in cases:
        expect_number(attempt(*case))
    got = [float(attempt(*case)) for case in cases]
    (m1, m2), (a1, a2) = [w / b for w, b, _, _ in cases], [o / r for _, _, o, r in cases]
    both = "The two go on at the same time: a pass is done when the slower of them is"
    expect_numbers(
        got,
        [max(m1, a1), max(m2, a2)],
        [
            ([m1 + a1, m2 + a2], f"adds the two times. {both}, so neither has to wait for the other's end."),
            ([min(m1, a1), min(m2, a2)], f"takes the shorter time. {both}."),
            (
                [m1, m2],
                "looks at memory only. With many tokens in a pass, the arithmetic takes longer than the reading.",
            ),
            ([a1, a2], "looks at arithmetic only. With one token in a pass, reading the weights takes longer."),
            (
                [max(1 / m1, 1 / a1), max(1 / m2, 1 / a2)],
                "divides the wrong way round: bytes / (bytes a second) gives seconds, its inverse passes a second.",
            ),
        ],
        ["a pass over 1 token", "a pass over 64 tokens"],
    )


def kv_cache_bytes(attempt: Attempt) -> None:
    """Two shapes, all factors different primes or so: whatever is forgotten shows."""
    cases = [(3, 5, 7, 4, 11), (32, 8, 128, 2, 2048)]
    for case in cases:
        expect_number(attempt(*case))
    got = [float(attempt(*case)) for case in cases]
    right = [2 * layers * heads * dim * size * tokens for layers, heads, dim, size, tokens in cases]
    expect_numbers(
        got,
        right,
        [
            ([x / 2 for x in right], "is half of it: a token leaves a key and a value."),
            ([x / c[0] for x, c in zip(right, cases, strict=True)], "forgets the layers: each has a cache of its own."),
            ([x / c[1] for x, c in zip(right, cases, strict=True)], "forgets the heads: each has keys and values."),
            ([x / c[2] for x, c in zip(right, cases, strict=True)], "forgets the head dimension: a key is a vector."),
            (
                [x / c[3] for x, c in zip(right, cases, strict=True)],
                "counts numbers, not bytes: a number takes several.",
            ),
            ([x / c[4] for x, c in zip(right, cases, strict=True)], "is the cost of one token: multiply by how many."),
            ([x * 8 for x in right], "counts bits: number_bytes is in bytes already."),
            (
                [x * c[4] for x, c in zip(right, cases, strict=True)],
                "grows with the square of the tokens. The cache keeps one key and one value a token; it is the *work* "
                "without a cache that grows like that.",
            ),
        ],
        [f"layers, heads, dimension, bytes, tokens = {case}" for case in cases],
    )


TASKS = {
    "greedy_step(logits)": (greedy_step, "every row gets the best token of its own last position"),
    "cached_loop(model, prompt_ids, max_tokens)": (
        cached_loop,
        "the prompt is read once, then one token a pass, and no token has changed",
    ),
    "stop(token_ids, eos_id, max_tokens)": (
        stop,
        "a text ends with its first EOS or at max_tokens, whichever is first",
    ),
    "decode_floor(weight_bytes, bandwidth, operations, rate)": (
        decode_floor,
        "a pass takes at least as long as the slower of reading the weights and doing the arithmetic",
    ),
    "kv_cache_bytes(layers, kv_heads, head_dim, number_bytes, tokens)": (
        kv_cache_bytes,
        "a key and a value for every token, in every head of every layer",
    ),
}
