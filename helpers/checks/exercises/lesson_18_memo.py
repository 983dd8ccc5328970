"""The fleet memo: two numbers, judged by the requests of a trace that meet their limits. Any numbers may be right.

A grade runs another trace of the same kind. The memo's text is graded by the instructor.
"""

from collections.abc import Callable

from ..comparing import kind
from ..exercise import JudgedExercise, Passed, Wrong
from ..fleet_plan import TPOT, TTFT, Served, run_plan

SIGNATURE = "plan_fleet()"
SHARE = 0.99  # of the requests have to meet both limits
MOST_REPLICAS = 4


def _served(plan_fleet: Callable, seed: int) -> tuple[int, Served]:
    numbers = plan_fleet()
    if not isinstance(numbers, list | tuple) or len(numbers) != 2:
        raise Wrong(f"should return two ints, replicas and tokens, but returned {kind(numbers)}.")
    return numbers[0], run_plan(*numbers, seed)


def keeps_the_promise(plan_fleet: Callable, seed: int) -> str | Passed:
    """Judge the share of requests that meet both limits, and name what most of the others exceed."""
    _, served = _served(plan_fleet, seed)
    if served.share >= SHARE:
        return Passed(f"On this trace: {served}.")
    if served.late > served.slow:
        why = f"wait for more than {TTFT} s for their first token: is it the queue, or a prefill in too many pieces"
    else:
        why = f"need more than {1000 * TPOT:g} ms per token: what else do the iterations compute in which they decode"
    return f"serves {served.share:.1%} of the requests in time, where {SHARE:.0%} are promised. Most others {why}?"


def is_cheap(plan_fleet: Callable, seed: int) -> str | Passed:
    """Judge the number of replicas, of a plan that keeps the promise."""
    replicas, _ = _served(plan_fleet, seed)
    if replicas > MOST_REPLICAS:
        return (
            f"pays for {replicas} replicas, and {MOST_REPLICAS} can keep the promise. Which of the two limits do fewer "
            "replicas exceed, and which number of tokens avoids that?"
        )
    return keeps_the_promise(plan_fleet, seed)


plan_fleet, plan_fleet_price = (
    JudgedExercise(SIGNATURE, idea, judge, name)
    for name, idea, judge in [
        (
            "plan_fleet",
            "the queue is short, and no iteration is too long for the requests that decode",
            keeps_the_promise,
        ),
        ("plan_fleet_price", "the token budget balances both limits, so fewer replicas are enough", is_cheap),
    ]
)
