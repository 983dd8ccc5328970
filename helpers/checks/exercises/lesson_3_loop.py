"""Lesson 3, the loop: every request gets the right tokens, and each free row goes to the next request at once."""

from collections import deque
from itertools import zip_longest

from ... import batching
from ...request import Request
from ...tiny_model.corpus import unseen_prompts
from ..exercise import Exercise
from ..watch import serving_on_model


@Exercise.declare(
    "every request gets the tokens that it gets alone, and a free row goes to the next request at once",
    observe=serving_on_model,
    forbidden=[f"helpers.loops:generate_{loop}" for loop in ("alone", "static", "continuous")],
)
def continuous_loop(requests, max_batch_size):
    waiting = deque((time, Request(*each, number)) for number, (*each, time) in enumerate(requests))
    running, outputs, now = {"request_ids": []}, {}, 0
    while waiting or running["request_ids"]:
        if not running["request_ids"]:  # idle
            now = max(now, waiting[0][0])
        free = max_batch_size - len(running["request_ids"])
        joining = min(free, sum(time <= now for time, _ in waiting))
        if joining > 0:
            batch = batching.init_batch([waiting.popleft()[1] for _ in range(joining)])
            running, now = batching.merge_batches(running, batching.generate_next_token(batch)), now + 1
        running, now = batching.generate_next_token(running), now + 1
        ended = zip(running["request_ids"], running["token_ids"], running["tokens_remaining"], strict=True)
        outputs |= {number: token_ids for number, token_ids, left in ended if left == 0}
        running, _ = batching.filter_batch(running)
    return [outputs[number] for number in range(len(requests))]


OUTPUTS, PASSES = "the list of outputs", "forward passes"


@continuous_loop.cases
def _(random):
    story, saying = "Once upon a time, a brave", "There was once a poor miller called Jonas, and"
    budgets = {story: 16, "The rain in Spain": 10, "Many hands": 3, saying: 12, "What comes up must": 2, "Look": 9}
    drawn = {prompt: random.randint(2, 12) for prompt in unseen_prompts(9, random.randrange(10**6))}
    for requests, arrivals, rows in [
        ([*budgets.items(), ("A rolling stone", 4)], [0, 0, 1, 4, 4, 9, 40], 3),
        ([*budgets.items(), ("A rolling stone", 4)], [0] * 7, 3),
        (list(drawn.items()), sorted(random.randint(0, 30) for _ in drawn), random.randint(3, 5)),
        (list(budgets.items())[:4], [0, 2, 4, 7], 4), (list(budgets.items())[:3], [0, 2, 5], 3),
        (list(drawn.items())[:5], [3, 5, 7, 9, 40], 4),
        ([("Look", 1), (story, 5), ("Many hands", 1), (saying, 1), ("What goes up", 20), ("A rolling stone", 2)],
         [0, 0, 0, 2, 2, 3], 2),
        ([("Look", 1), ("Many hands", 1), (story, 4)], [0, 0, 0], 8),
        ([("Look", 3), (story, 9), ("Look", 6), ("Look", 3), (story, 2)], [0, 0, 1, 1, 6], 2),  # one prompt three times
        ([(saying, 8), ("Many hands", 2), ("Look", 2), (story, 8), ("Look", 5)], [0, 0, 0, 0, 12], 3),
        # Both rows finish at once, while two requests wait that have arrived one after the other.
        ([(story, 4), (saying, 4), ("Many hands", 3), ("What goes up", 3)], [0, 0, 1, 3], 2),
        ([(saying, 6), (story, 6), ("A rolling stone", 3), ("Look", 2)], [0, 0, 2, 4], 2),
    ]:  # fmt: skip
        given = f"{len(requests)} requests that arrive at {arrivals}, {rows} rows"
        yield ([(*request, arrival) for request, arrival in zip(requests, arrivals, strict=True)], rows), given


STEP = "running, now = batching.generate_next_token(running)"
continuous_loop.add_misconceptions({
    "waits until the whole batch has finished, which is static batching. A waiting request can take a finished "
    "request's row before the next pass.": "min(free -> min(0 if running['request_ids'] else free",
    "lets requests join before they arrive, as if all were there from the start.": "deque((time -> deque((0",
    "counts only decode steps as time. A prefill is a forward pass, too, and requests arrive while it runs.":
        "token(batch)), now + 1 -> token(batch)), now",
    "lets a request join one forward pass after it could: at time t, the requests with an arrival of t are there.":
        "deque((time -> deque((time + 1 if time else 0",
    "sets the clock back: when no row is left, a request that has arrived during the passes before starts now.":
        "max(now, waiting[0][0]) -> waiting[0][0]",
    "runs more than max_batch_size rows: the server has no memory for them.": "max_batch_size - -> len(requests) -",
    "runs a separate prefill for every joining request: requests that join at the same time can share one.":
        ("if joining > 0 -> for _ in range(joining)", "for _ in range(joining)] -> for _ in range(1)]"),
    "returns the outputs in the order in which the requests finished. Output i must belong to request i, because "
    "its client waits for it.": "outputs[number] for number in range(len(requests)) -> *outputs.values()",
    "records outputs by prompt: two requests may have the same prompt.": (
        "outputs |= {number: -> outputs |= {requests[number][0]:", "outputs[number] -> outputs[requests[number][0]]"),
    "loses the output of a request that finishes in its prefill: its row leaves before its tokens are recorded.":
        f"{STEP} -> running, _ = batching.filter_batch(running); {STEP}",
})  # fmt: skip


@continuous_loop.ignoring
def _(result, arguments):
    """A row that finishes in its prefill may leave before the next pass or after it."""
    return result if all(budget > 1 for _, budget, _ in arguments[0]) else result | {PASSES: []}


@continuous_loop.rule
def every_output_is_right(arguments, outcome, right):
    got, wanted = (list(each.result[OUTPUTS]) for each in (outcome, right))
    lost = len(got) != len(wanted) or None in got
    for number, output in enumerate(wanted):
        if lost and output not in got:
            ends = " (it finishes in its prefill)" if len(output) == 1 else ""
            return f"returns no output for request {number}{ends}: each of the {len(wanted)} requests needs one"
        if lost:
            got.remove(output)
        elif isinstance(came := got[number], list) and came != output:
            if came in wanted:
                return f"returns the output of request {wanted.index(came)} for request {number}: rows were mixed up"
            if came[: len(output)] == output[: len(came)]:
                return f"returns {len(came)} tokens for request {number}, which should get {len(output)}"
            return f"returns tokens for request {number} that the model does not generate for that request alone"
    return None


@continuous_loop.rule
def free_rows_are_filled_in_order(arguments, outcome, right):
    got, wanted = (continuous_loop.ignore(each.result, arguments)[PASSES] for each in (outcome, right))
    for number, pair in enumerate(zip_longest(got, wanted, fillvalue=("missing", 0, 0))):
        if pair[0] != pair[1]:
            came, due = (f"a {kind} of {rows} x {tokens} tokens" if rows else kind for kind, rows, tokens in pair)
            return (
                f"forward pass {number} should be {due}, but is {came}. Finished rows leave, and waiting requests get "
                "free rows in their order of arrival"
            )
    return None
