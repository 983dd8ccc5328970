"""Lesson 3, the server's loop: the right tokens for every request, in as few forward passes as it takes."""

from functools import cache

from ..loops import Generation, generate_continuous, generate_static
from ..models import eos_token_ids, load_model
from .attempt import Attempt
from .differences import Wrong, expect_ids, kind
from .one_request import prompt_that_ends
from .watch import Pass, watched


def continuous_loop(attempt: Attempt) -> None:
    """Seven requests through three rows, passes watched; then one row, more rows than requests, budgets of 1."""
    story = "Once upon a time, a brave"
    mixed = [
        (story, 16),
        ("The rain in Spain", 10),
        ("Many hands", 3),
        ("There was once a poor miller called Jonas, and", 12),
        ("What comes up must", 2),
        ("Look", 9),
        ("A rolling stone", 4),
    ]
    _expect_loop(attempt, mixed, 3, counted=True)
    _expect_loop(attempt, [(story, 8), ("Look", 1), (prompt_that_ends(12), 12)], 1, counted=False)
    _expect_loop(attempt, [("Look", 1), ("Many hands", 1), (story, 4)], 8, counted=False)


def _expect_loop(attempt: Attempt, requests: list, rows: int, counted: bool) -> None:
    model, tokenizer = load_model()
    eos = eos_token_ids(model, tokenizer)
    run = _run(tuple(requests), rows, model, tokenizer)
    given = f"{len(requests)} requests, {rows} row{'s' if rows > 1 else ''}"
    with watched(model) as passes:
        got = attempt(list(requests), rows, given=given)
    if not isinstance(got, list) or not all(isinstance(each, list) for each in got):
        raise Wrong(f"should return a list with a list of token ids for each request; it returned {kind(got)}.")
    right = [output.token_ids for output in run.outputs]
    if not passes and any(right):
        raise Wrong("never calls the model.")
    most = max(one.rows for one in passes)
    if most > rows:
        raise Wrong(f"runs {most} rows at once ({given}): the server has memory for {rows}.")
    if got != right:
        _explain_answers(got, right, eos, given)
    if counted:
        static = _static_passes(tuple(requests), rows, model, tokenizer)
        _expect_few_passes(passes, run.trace, static, given, rows)


# The right answers are computed once: a student checks a function many times.


@cache
def _run(requests: tuple, rows: int, model, tokenizer) -> Generation:
    """Return what the course's own loop does."""
    return generate_continuous(requests, rows, model, tokenizer)


@cache
def _static_passes(requests: tuple, rows: int, model, tokenizer) -> int:
    """Return how many forward passes static batching takes."""
    return generate_static(requests, rows, model, tokenizer).trace.forward_passes


def _explain_answers(got: list, right: list, eos: set[int], given: str) -> None:
    if len(got) != len(right):
        raise Wrong(f"returns {len(got)} answers for {len(right)} requests: every request must be answered ({given}).")
    if sorted(got) == sorted(right):
        raise Wrong(
            f"has all answers, in the order in which they were finished ({given}). Somebody waits for each: answer i "
            f"belongs to request i."
        )
    for number, (came, wanted) in enumerate(zip(got, right, strict=True)):
        if came == wanted:
            continue
        expect_ids(came, f"answer {number}")
        if came == wanted[:-1]:
            what = "EOS, which is a generated token, too" if wanted[-1] in eos else "and the request asked for it"
            raise Wrong(f"answer {number} lacks its last token, {what} ({given}).")
        if came == wanted[: len(came)]:
            raise Wrong(f"answer {number} ends after {len(came)} of {len(wanted)} tokens ({given}).")
        if came[: len(wanted)] == wanted:
            raise Wrong(
                f"answer {number} goes on after its end, {len(came)} tokens instead of {len(wanted)} ({given})."
            )
        if came in right:
            raise Wrong(f"answer {number} is the answer to request {right.index(came)} ({given}): rows were mixed up.")
        raise Wrong(f"answer {number} is not what the model says to that request alone ({given}).")


def _expect_few_passes(passes: list[Pass], trace, static: int, given: str, rows: int) -> None:
    needed = trace.forward_passes
    if len(passes) <= needed:
        return
    count = f"{len(passes)} forward passes where {needed} suffice ({given})"
    if len(passes) == static:
        raise Wrong(
            f"takes {count}: that is static batching. A finished request's row must not wait for the longest one: the "
            f"next request can have it before the next pass."
        )
    if max(one.rows for one in passes) == 1:
        raise Wrong(f"takes {count}: it serves one request at a time, and {rows - 1} rows stay empty.")
    prefills = sum(one.cached == 0 for one in passes)
    wanted = sum(any(row.work == "prefill" for row in one.row_steps) for one in trace.passes)
    if prefills > wanted:
        raise Wrong(
            f"takes {count}, and {prefills} of them are prefills instead of {wanted}: requests that join at the same "
            f"time can share one."
        )
    raise Wrong(f"takes {count}: before every pass, free rows should be filled and finished ones be gone.")


TASKS = {
    "continuous_loop(requests, max_batch_size)": (
        continuous_loop,
        "every request has the tokens it gets alone, and a free row goes to the next one at once",
    ),
}
