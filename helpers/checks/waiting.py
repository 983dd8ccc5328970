"""Lesson 4, who waits: the two latencies that users notice, taken from when tokens came."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import pairwise

from ..metrics import RequestMetrics
from .attempt import Attempt
from .differences import Wrong, close, expect_numbers, expect_pair, kind


def worst_waits(attempt: Attempt) -> None:
    """Requests with a stall, with a late start, of a single token; first both numbers by what each idea would give."""
    cases = [
        ({"a": 0, "b": 2, "c": 5}, {"a": [3, 4, 5, 11, 12], "b": [6, 7, 8, 12], "c": [7]}),
        ({"x": 3, "y": 4}, {"x": [12, 13, 15], "y": [14]}),
        ({"m": 6, "n": 1}, {"m": [8, 9, 10, 25, 26, 27], "n": [4, 6, 8]}),
        ({"q": 2}, {"q": [4]}),
    ]
    given = [f"arrivals {arrivals}, token_times {times}" for arrivals, times in cases]
    got = []
    for (arrivals, times), told in zip(cases, given, strict=True):
        hints = {"empty": "A single token has no gap; without any gap, the longest counts as 0."}
        hints |= {"division by zero": "A single token has no gap; without any gap, the longest counts as 0."}
        pair = attempt(dict(arrivals), {id: list(each) for id, each in times.items()}, given=told, hints=hints)
        expect_pair(pair, "the longest time to a first token and the longest gap between two tokens")
        for value, name in zip(pair, ("time to a first token", "gap"), strict=True):
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise Wrong(f"the longest {name} should be a number, and is {kind(value)} ({told}).")
        got.append(pair)

    requests = [[RequestMetrics(id, arrivals[id], times[id]) for id in times] for arrivals, times in cases]
    ttft = [max(one.ttft for one in each) for each in requests]
    gap = [max((gap for one in each for gap in one.itl), default=0) for each in requests]
    if all(close(a, y) and close(b, x) for (a, b), x, y in zip(got, ttft, gap, strict=True)):
        raise Wrong("returns the gap first. Wanted are the time to a first token, then the gap.")

    def every(of: Callable[[RequestMetrics], float | None], pick: Callable = max) -> list[float]:
        """In each case, the largest of what a wrong idea gives for its requests."""
        values = [[value for one in each if (value := of(one)) is not None] for each in requests]
        return [pick(each) if each else 0 for each in values]

    def mean(values: Seq[float]) -> float:
        return sum(values) / len(values)

    def pooled(each: Seq[RequestMetrics]) -> float:
        times = sorted(time for one in each for time in one.token_times)
        return max((later - time for time, later in pairwise(times)), default=0)

    expect_numbers(
        [pair[0] for pair in got],
        ttft,
        [
            (
                every(lambda one: one.token_times[0]),
                "measures the time to the first token from step 0. A user waits from the request's own arrival.",
            ),
            (every(lambda one: one.e2e), "measures until the last token: that is the whole request's time."),
            (every(lambda one: one.ttft, mean), "takes the mean of the first waits: it hides the one that waits."),
            (every(lambda one: one.ttft, min), "takes the shortest time to a first token, not the longest."),
            (
                every(lambda one: one.ttft, lambda values: values[-1]),
                "has the time to the first token of the last request only: all of them count, the worst is wanted.",
            ),
            (
                every(lambda one: one.ttft, lambda values: values[0]),
                "has the time to the first token of the first request only: all of them count, the worst is wanted.",
            ),
        ],
        [f"the time to a first token, {told}" for told in given],
    )
    expect_numbers(
        [pair[1] for pair in got],
        gap,
        [
            (
                every(lambda one: max([one.ttft, *one.itl])),
                "counts the wait for the first token as a gap. That is TTFT; a gap lies between two tokens.",
            ),
            (
                [pooled(each) for each in requests],
                "looks at the gaps between anybody's tokens. A user sees one text, and it stands still while the "
                "others go on.",
            ),
            (
                every(lambda one: one.tpot),
                "takes each request's mean time between tokens, which is TPOT: one long stall vanishes in it.",
            ),
            (
                [mean([g for one in each for g in one.itl] or [0]) for each in requests],
                "takes the mean of the gaps: one long stall vanishes in it.",
            ),
            (
                every(lambda one: one.token_times[-1] - one.token_times[0]),
                "goes from the first token to the last: a gap lies between a token and the next one.",
            ),
            (
                every(lambda one: one.itl[0] if one.itl else None),
                "looks at the first gap of each request only: a text can stand still at any token.",
            ),
            (
                every(lambda one: max(one.itl, default=0), lambda values: values[-1]),
                "has the gaps of the last request only: all of them count, the worst is wanted.",
            ),
            (
                every(lambda one: max(one.itl, default=0), lambda values: values[0]),
                "has the gaps of the first request only: all of them count, the worst is wanted.",
            ),
            (
                [max(value - 1, 0) for value in gap],
                "counts the steps in which nothing came. The gap is the time from one token to the next.",
            ),
        ],
        [f"the gap, {told}" for told in given],
    )


TASKS = {
    "worst_waits(arrivals, token_times)": (
        worst_waits,
        "the longest wait for a first token, and the longest stall in the middle of a text",
    ),
}
