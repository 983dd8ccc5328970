"""Lesson 4, the next tokens of one request: how many an iteration computes, and whether a new token follows."""

from .attempt import Attempt
from .differences import Wrong, expect_pair, is_count, kind


def what_to_read(attempt: Attempt) -> None:
    """Check whole prompts, chunks, decodes and preempted requests, with budgets that are too small or just enough."""
    for case, what in [
        ((7, 0, 0, 100), "a prompt that fits"),
        ((20, 0, 0, 8), "a prompt's first chunk"),
        ((20, 0, 8, 8), "a chunk in the middle"),
        ((20, 0, 16, 8), "a prompt's last chunk"),
        ((7, 3, 9, 8), "a decode"),
        ((7, 3, 0, 100), "preempted, so nothing is in the cache"),
        ((7, 3, 0, 8), "preempted, and the budget cuts"),
        ((7, 3, 8, 8), "the rest after a preemption"),
        ((20, 0, 12, 8), "a last chunk that takes the whole budget"),
        ((9, 1, 9, 1), "a decode that takes the whole budget"),
        ((7, 0, 0, 0), "others have used up the budget"),
    ]:
        names = ("prompt_tokens", "generated", "computed", "budget")
        given = f"{what}: " + ", ".join(f"{name} {value}" for name, value in zip(names, case, strict=True))
        got = attempt(*case, given=given)
        expect_pair(got, "the tokens that are read and whether there is a new one")
        tokens, new = got
        if not is_count(tokens):
            hint = " Are the two in the wrong order?" if isinstance(tokens, bool) else ""
            raise Wrong(f"the first result should be a number of tokens, and is {kind(tokens)} ({given}).{hint}")
        if not isinstance(new, bool | int) or new not in (0, 1):
            raise Wrong(f"the second result should be True or False, and is {new!r} ({given}).")
        _explain_read(tokens, *case, given)
        _explain_new(tokens, bool(new), *case, given)


def _explain_read(tokens: int, prompt: int, generated: int, computed: int, budget: int, given: str) -> None:
    uncomputed = prompt + generated - computed
    right = min(uncomputed, budget)
    if tokens == right:
        return
    if tokens < 0:
        why = f"reads {tokens} tokens: the generated ones have to be read as well as the prompt"
    elif computed and tokens in (min(prompt + generated, budget), prompt + generated):
        why = f"begins at the start again: keys and values of the first {computed} tokens are in the cache already"
    elif tokens > budget:
        why = (
            f"reads {tokens} tokens in an iteration that has room for {budget}. What does not fit is read in pieces, "
            f"the next ones in later iterations"
        )
    elif generated and tokens == 1:
        why = (
            f"takes every request that has generated something for a decode. This one was preempted and lost its "
            f"cache: {uncomputed} tokens have to be read again before there can be a new one"
        )
    elif tokens == min(uncomputed - 1, budget):
        why = "reads one token too few: the newest one was chosen by the model, but not read by it yet"
    elif generated and tokens == min(max(prompt - computed, 0), budget):
        why = "counts the prompt only. What was generated belongs to the text, and the model reads it like a prompt"
    else:
        why = f"reads {tokens} tokens, and should read {right}"
    raise Wrong(f"{why} ({given}).")


def _explain_new(tokens: int, new: bool, prompt: int, generated: int, computed: int, budget: int, given: str) -> None:
    uncomputed = prompt + generated - computed
    if new == (tokens == uncomputed):
        return
    if not new:
        work = "the whole prompt" if computed == 0 else "the last chunk" if uncomputed > 1 else "a decode"
        why = (
            f"{work} yields no token. Whoever has read everything gets a new token from the very pass that read it: "
            f"another pass would have nothing to read"
        )
    elif tokens == 0:
        why = "gives a new token to a request that reads nothing: without a forward pass there are no logits"
    elif generated and computed + tokens >= prompt:
        why = (
            f"gives a new token once the prompt has been read. This request has generated {generated} tokens before it "
            f"was preempted, and until they are read, too, the model would say again what it has said"
        )
    else:
        why = (
            f"gives a new token after {computed + tokens} of {prompt + generated} tokens: what the model says there "
            f"would follow the piece, not the whole text"
        )
    raise Wrong(f"{why} ({given}).")


TASKS = {
    "what_to_read(prompt_tokens, generated, computed, budget)": (
        what_to_read,
        "prefill, chunk, decode and starting anew are one thing: compute the next tokens, as far as the budget goes",
    ),
}
