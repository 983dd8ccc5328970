"""Lesson 7, goodput: how many requests per second meet the limits on TTFT and TPOT.

Times are in seconds from the start of the test.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import pairwise

from .attempt import Attempt
from .differences import expect_number, expect_numbers

Requests = Seq[tuple[float, Seq[float]]]


def goodput(attempt: Attempt) -> None:
    """Check late first tokens, slow output, stalls, single tokens, refusals, limits met exactly and no requests."""
    easy = [(0, [0.5, 1, 1.5]), (1, [3.5, 4, 4.5]), (2, [2.5, 4.5, 6.5]), (3, [3.5, 3.75])]
    cases = [
        (easy, 4, 1, 0.5),
        (easy, 8, 2.5, 2),
        ([(0, [1, 1.5, 2, 2.5]), (4, [5, 5.25])], 10, 1, 0.5),
        ([(0, [0.25]), (5, [7]), (6, [6.5, 7]), (8, [8.5, 10])], 10, 1, 0.5),
        ([(0, [0.5, 1]), (1, []), (1, []), (2, []), (3, [3.25, 3.5])], 5, 1, 0.5),
        ([(10, [10.5, 10.625, 10.75, 12.25, 12.5]), (11, [12.5, 12.5625, 12.625, 12.6875])], 16, 1, 0.5),
        ([(0, [0.25, 0.5, 0.75, 1.5, 2.75]), (0, [1, 1.5, 2]), (3, [3.5, 3.75, 4.75])], 2, 1, 0.625),
        ([(0, [0.75, 1]), (1, [1.75, 2.375, 3]), (2, [2.25, 2.5, 4.5]), (3, [5, 7]), (4, [4.5, 4.75, 7])], 5, 1, 0.5),
        ([(1, []), (2, [])], 4, 1, 1),
        ([], 3, 1, 1),
    ]
    given = [
        f"(sent, token times) {requests}, {seconds} s, limits {ttft} and {tpot} s"
        for requests, seconds, ttft, tpot in cases
    ]
    nothing = "A refused request has no tokens, and does not count."
    hints = {
        "list index out of range": nothing,
        "float division by zero": "A single token has no time per token behind it, and so none that could be too long.",
        "unsupported operand type": "A single token has no TPOT: only its TTFT has a limit.",
        "not supported between": "A single token has no TPOT: only its TTFT has a limit.",
    }
    hints["division by zero"] = hints["float division by zero"]
    got = []
    for (requests, seconds, ttft, tpot), told in zip(cases, given, strict=True):
        number = attempt(
            [(sent, list(times)) for sent, times in requests], seconds, ttft, tpot, given=told, hints=hints
        )
        expect_number(number)
        got.append(float(number))

    def rates(of: Callable[[Requests, float, float, float], float]) -> list[float]:
        """Return what a rule of (requests, seconds, ttft, tpot) gives for each case."""
        return [of(*case) for case in cases]

    def meeting(rule: Callable[[float, Seq[float], float, float], bool]) -> list[float]:
        """Return the requests per second, case by case, that satisfy a rule of (sent, token times, ttft, tpot)."""
        return rates(lambda requests, seconds, *limits: sum(rule(*one, *limits) for one in requests) / seconds)

    def pace(times: Seq[float]) -> float:
        """Return the TPOT of a request; without one, 0."""
        return (times[-1] - times[0]) / max(len(times) - 1, 1)

    def good(sent: float, times: Seq[float], ttft: float, tpot: float) -> bool:
        return bool(times) and times[0] - sent <= ttft and pace(times) <= tpot

    def number(requests: Requests, limits: Seq[float]) -> int:
        return sum(good(*one, *limits) for one in requests)

    def on_the_whole(requests: Requests, seconds: float, ttft: float, tpot: float) -> float:
        """Return the rate if the mean TTFT and the mean TPOT decide about all requests at once."""
        answered = [(sent, times) for sent, times in requests if times] or [(0, [float("inf")])]
        firsts, paces = [times[0] - sent for sent, times in answered], [pace(times) for _, times in answered]
        met = sum(firsts) / len(firsts) <= ttft and sum(paces) / len(paces) <= tpot
        return len(answered) / seconds if met else 0

    def gaps(times: Seq[float]) -> list[float]:
        return [later - time for time, later in pairwise(times)]

    first_too = (
        "spreads the wait for the first token over the others. That wait is TTFT; TPOT is the mean of the gaps between "
        "tokens, and of gaps there is one fewer than of tokens."
    )
    share = "gives a share of the requests. It says nothing about how many a second are served well."
    expect_numbers(
        got,
        meeting(good),
        [
            (
                meeting(lambda sent, times, *limits: not times or good(sent, times, *limits)),
                "counts refused requests. Nothing was too late for them, since nothing came: nobody was served.",
            ),
            (
                meeting(lambda sent, times, *limits: len(times) > 1 and good(sent, times, *limits)),
                "leaves out answers of a single token: they have no TPOT, so only TTFT can be too long.",
            ),
            (
                meeting(lambda sent, times, x, y: bool(times) and times[0] - sent < x and pace(times) < y),
                "leaves out what just meets a limit: at most means that the limit itself is fine.",
            ),
            (
                meeting(lambda sent, times, x, y: bool(times) and times[0] - sent < x and pace(times) <= y),
                "leaves out a TTFT that just meets its limit: at most means that the limit itself is fine.",
            ),
            (
                meeting(
                    lambda sent, times, x, y: (
                        bool(times) and times[0] - sent <= x and (len(times) < 2 or pace(times) < y)
                    )
                ),
                "leaves out a TPOT that just meets its limit: at most means that the limit itself is fine.",
            ),
            (
                meeting(lambda sent, times, x, y: bool(times) and (times[0] - sent <= x or pace(times) <= y)),
                "is content with one of the limits. A user is content only if both are met.",
            ),
            (
                meeting(lambda sent, times, x, _: bool(times) and times[0] - sent <= x),
                "looks at the first token only: a text that crawls afterwards is no good one.",
            ),
            (
                meeting(lambda sent, times, _, y: bool(times) and pace(times) <= y),
                "never looks at the wait for the first token: that can be too long, too.",
            ),
            (
                meeting(lambda sent, times, x, y: good(sent, times, y, x)),
                "has the limits swapped: the first is for TTFT, the second for TPOT.",
            ),
            (
                meeting(lambda s, t, x, y: bool(t) and t[0] - s <= x and (len(t) < 2 or (t[-1] - s) / len(t) <= y)),
                first_too,
            ),
            (meeting(lambda s, t, x, y: bool(t) and t[0] - s <= x and (t[-1] - s) / len(t) <= y), first_too),
            (
                meeting(lambda s, t, x, y: bool(t) and t[0] - s <= x and (t[-1] - s) / max(len(t) - 1, 1) <= y),
                first_too,
            ),
            (
                meeting(
                    lambda s, t, x, y: bool(t) and t[0] - s <= x and (len(t) < 2 or (t[-1] - s) / (len(t) - 1) <= y)
                ),
                first_too,
            ),
            (
                meeting(lambda s, t, x, y: bool(t) and t[0] - s <= x and (t[-1] - t[0]) / len(t) <= y),
                "divides by the number of tokens. Between n tokens there are n - 1 gaps.",
            ),
            (
                meeting(lambda s, t, x, y: bool(t) and t[0] - s <= x and max(gaps(t), default=0) <= y),
                "looks at the longest gap. TPOT is a request's mean time for each token after the first.",
            ),
            (
                meeting(lambda s, t, x, y: bool(t) and t[0] - s <= x and all(gap <= y for gap in gaps(t)[:1])),
                "looks at the first gap only: TPOT is the mean of all of them.",
            ),
            (
                meeting(lambda s, t, x, y: bool(t) and t[-1] - s <= x + y * (len(t) - 1)),
                "forgives a late first token if the others come fast. Each limit counts on its own.",
            ),
            (
                meeting(lambda s, t, x, y: bool(t) and t[-1] - s <= x and pace(t) <= y),
                "compares the whole request's time with the limit for the first token.",
            ),
            (
                meeting(lambda sent, times, x, y: bool(times) and times[0] <= x and pace(times) <= y),
                "takes the time on the clock for TTFT: it counts from the moment at which the request was sent.",
            ),
            (
                meeting(lambda sent, times, *_: bool(times)),
                "counts all that were answered, in time or not: that is throughput.",
            ),
            (
                rates(lambda requests, seconds, *_: len(requests) / seconds),
                "counts all that were sent: that is the load, and says nothing about the server.",
            ),
            (
                rates(lambda requests, seconds, *limits: number(requests, limits)),
                "says how many. Wanted is how many a second.",
            ),
            (
                rates(lambda requests, seconds, *limits: number(requests, limits) / max(len(requests), 1)),
                share,
            ),
            (
                rates(lambda requests, seconds, *limits: 100 * number(requests, limits) / max(len(requests), 1)),
                share,
            ),
            (
                rates(lambda all, seconds, *limits: sum(len(one[1]) for one in all if good(*one, *limits)) / seconds),
                "counts tokens: wanted are requests.",
            ),
            (
                meeting(lambda sent, times, *limits: not good(sent, times, *limits)),
                "counts those that miss a limit. Wanted are those that meet both.",
            ),
            (
                meeting(lambda sent, times, *limits: bool(times) and not good(sent, times, *limits)),
                "counts those that miss a limit. Wanted are those that meet both.",
            ),
            (rates(on_the_whole), "judges all of them by the means. Each request meets its limits or misses them."),
            (
                rates(lambda requests, seconds, *limits: number(requests, limits) // seconds),
                "rounds to a whole number: half a request a second is 0.5.",
            ),
            (
                rates(lambda requests, seconds, *limits: round(number(requests, limits) / seconds)),
                "rounds to a whole number: half a request a second is 0.5.",
            ),
            (
                rates(lambda requests, seconds, *limits: seconds / max(number(requests, limits), 1)),
                "is upside down: wanted are requests a second, not seconds a request.",
            ),
        ],
        given,
    )


TASKS = {
    "goodput(requests, seconds, ttft, tpot)": (
        goodput,
        "what counts is who was served in time, and neither an average nor a refusal hides who was not",
    ),
}
