"""The fleet memo: two numbers, judged by the requests of a trace that meet their limits. Any numbers may be right.

A grade runs another trace of the same kind. The memo's text is graded by the instructor.
"""

from collections.abc import Callable
from functools import partial

from ..comparing import kind
from ..exercise import JudgedExercise, Passed, Wrong
from ..fleet_plan import TPOT, TTFT, run_plan

SHARE = 0.99  # of the requests have to meet both limits
MOST_REPLICAS = 4


def _judge(plan_fleet: Callable, seed: int, most: int | None = None) -> Passed:
    """Pass a plan that keeps the promise with at most so many replicas; name what most of the others exceed."""
    numbers = plan_fleet()
    if not isinstance(numbers, list | tuple) or len(numbers) != 2:
        raise Wrong(f"should return two ints, replicas and tokens, but returned {kind(numbers)}.")
    served = run_plan(*numbers, seed)
    if most and numbers[0] > most:
        raise Wrong(
            f"pays for {numbers[0]} replicas, and {most} can keep the promise. Which of the two limits do fewer "
            "replicas exceed, and which number of tokens avoids that?"
        )
    if served.share >= SHARE:
        return Passed(f"On this trace: {served}.")
    if served.late > served.slow:
        why = f"wait for more than {TTFT} s for their first token: is it the queue, or a prefill in too many pieces"
    else:
        why = f"need more than {1000 * TPOT:g} ms per token: what else do the iterations compute in which they decode"
    raise Wrong(
        f"serves {served.share:.1%} of the requests in time, where {SHARE:.0%} are promised. Most others {why}?"
    )


plan_fleet = JudgedExercise(
    "plan_fleet()", "the queue is short, and no iteration is too long for the requests that decode", _judge
)
plan_fleet_price = JudgedExercise(
    "plan_fleet()",
    "the token budget balances both limits, so fewer replicas are enough",
    partial(_judge, most=MOST_REPLICAS),
    "plan_fleet_price",
)
