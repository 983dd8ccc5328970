"""Lesson 7, an open-loop load: when requests are sent, and how long each one takes, its wait included.

Times are in seconds from the start of the test. Gaps are drawn from a generator that the check passes in.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate, pairwise
from math import log
from random import Random

from .attempt import Attempt
from .differences import Wrong, close, expect_numbers, kind


def _expect_times(got, count: int, what: str, given: str) -> None:
    """Raise `Wrong` unless `got` is a list of `count` numbers."""
    if not isinstance(got, list | tuple):
        raise Wrong(f"should return a list, {what}; it returned {kind(got)} ({given}).")
    for number in got:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise Wrong(f"the list should hold numbers, {what}, and {kind(number)} is in it ({given}).")
    if len(got) != count:
        raise Wrong(f"the list has length {len(got)}, and should have {count}: {what} ({given}).")


# --- when requests are sent -------------------------------------------------------------------------------------------


def poisson_arrivals(attempt: Attempt) -> None:
    """Check rates above and below one, two seeds, a single request and no requests."""
    cases = [(2.0, 6, 1), (2.0, 6, 2), (0.25, 5, 3), (8.0, 7, 4), (0.5, 1, 5), (3.0, 0, 6)]
    given = [f"rate {rate:g}, count {count}, Random({seed})" for rate, count, seed in cases]
    got, unused = [], True
    for (rate, count, seed), told in zip(cases, given, strict=True):
        random = Random(seed)
        times = attempt(rate, count, random, given=told)
        _expect_times(times, count, "a send time for each request", told)
        got.append(list(times))
        unused = unused and random.getstate() == Random(seed).getstate()

    def drawn(of: Callable[[float, int, Random], Seq[float]]) -> list[float]:
        """Concatenate the times that a rule of (rate, count, random) gives for each case."""
        return [time for rate, count, seed in cases for time in of(rate, count, Random(seed))]

    def gaps(rate: float, count: int, random: Random) -> list[float]:
        return [random.expovariate(rate) for _ in range(count)]

    def sums(gap: Callable[[float, Random], float]) -> list[float]:
        """Return the times of all cases if a rule of (rate, random) draws each gap."""
        return drawn(lambda rate, count, random: accumulate(gap(rate, random) for _ in range(count)))

    def stretched(rate: float, count: int, random: Random) -> list[float]:
        times = list(accumulate(gaps(rate, count, random)))
        return [time * count / rate / times[-1] for time in times]

    def evenly(rate: float, count: int, random: Random) -> list[float]:
        return [random.uniform(0, count / rate) for _ in range(count)]

    right = sums(lambda rate, random: random.expovariate(rate))
    flat = [time for times in got for time in times]
    told = [f"request {number}, {told}" for told, times in zip(given, got, strict=True) for number in range(len(times))]
    at_zero = "sends the first request at 0: before it there is a gap, too, as before any other."
    even = (
        "spreads the requests evenly over a fixed time, so that the last one is sure to come before it is over. Draw "
        "the gaps: when the last one comes is chance, too."
    )
    bounded = (
        "the gaps are drawn evenly: there is a longest one, and short ones are as rare as long ones. Exponential gaps "
        "are mostly short, and now and then very long."
    )
    if unused:
        _explain_without_chance(flat, cases)
    elif got[0] == got[1]:
        raise Wrong(
            "gives the same times whatever generator is handed over: does it set the seed? The seed is the caller's."
        )
    expect_numbers(
        flat,
        right,
        [
            (drawn(gaps), "returns the gaps. A request is sent one gap after the one before: add them up."),
            (
                drawn(lambda *case: sorted(gaps(*case))),
                "returns the gaps by their length. A request is sent one gap after the one before: add them up.",
            ),
            (drawn(lambda *case: list(accumulate([0, *gaps(*case)]))[:-1]), at_zero),
            (drawn(lambda *case: [0, *accumulate(gaps(*case)[1:])][: case[1]]), at_zero),
            (
                sums(lambda rate, random: random.expovariate(1 / rate)),
                "the gaps are `rate` seconds in the mean. With `rate` requests a second, a gap is 1 / rate seconds.",
            ),
            (sums(lambda rate, random: random.expovariate(1)), "never uses the rate: a gap is one second in the mean."),
            (
                sums(lambda rate, random: 1000 * random.expovariate(rate)),
                "counts in milliseconds: wanted are seconds, as in `rate`.",
            ),
            (drawn(lambda *case: sorted(evenly(*case))), even),
            (drawn(evenly), even),
            (sums(lambda rate, random: random.uniform(0, 2 / rate)), bounded),
            (sums(lambda rate, random: random.random() / rate), bounded),
            (
                sums(lambda rate, random: 1 / rate + random.expovariate(rate)),
                "adds a fixed gap to each drawn one: that sends half as many requests a second.",
            ),
            (
                sums(lambda rate, random: (random.expovariate(rate) + 1 / rate) / 2),
                "mixes a fixed gap into each drawn one: no two requests come close to each other, and bursts are what "
                "a server has to stand.",
            ),
            (
                sums(lambda rate, random: -log(random.random()) / rate),
                "the distribution is right, the numbers are not those of `expovariate`: use it, so that the same seed "
                "gives everybody the same times.",
            ),
            (
                drawn(lambda *case: accumulate(gaps(*case)[:1] * case[1])),
                "draws one gap for all: each request has a gap of its own.",
            ),
            (
                drawn(lambda *case: list(accumulate(gaps(*case)))[::-1]),
                "has the times backwards: the first request is the first to be sent.",
            ),
            (
                drawn(stretched),
                "stretches the times until the rate is met exactly. It is a mean: in a single run, more or fewer come.",
            ),
            (
                drawn(lambda *case: map(round, accumulate(gaps(*case)))),
                "rounds to whole seconds: requests would come in packs.",
            ),
            (
                drawn(lambda *case: accumulate(map(round, gaps(*case)))),
                "rounds the gaps to whole seconds: requests would come in packs.",
            ),
            (
                sums(lambda rate, random: random.expovariate(rate) + random.expovariate(rate)),
                "adds up two gaps for each request: that sends half as many a second.",
            ),
            (
                sums(lambda rate, random: random.expovariate(rate) * 0 + random.expovariate(rate)),
                "draws two numbers for each request and uses one: draw once, so that the same seed gives everybody the "
                "same times.",
            ),
        ],
        told,
    )


def _explain_without_chance(times: Seq[float], cases: Seq[tuple[float, int, int]]) -> None:
    for first in (0, 1):
        if all(map(close, times, [number / rate for rate, n, _ in cases for number in range(first, first + n)])):
            raise Wrong(
                "sends at fixed gaps. Users do not know of each other: sometimes several come at once, and then for a "
                "while nobody."
            )
    raise Wrong(
        "never draws from the generator that is handed over. With it, the same seed gives everybody the same test."
    )


# --- how long each takes ----------------------------------------------------------------------------------------------


def open_loop_latencies(attempt: Attempt) -> None:
    """Check a queue that grows and shrinks, an idle server, a stall, simultaneous requests, a single one and none."""
    cases = [
        ([0, 1, 2, 3, 12], [2, 3, 1, 4, 2]),
        ([1, 5, 9], [2, 2, 3]),
        ([0.5, 1, 1.5, 2, 2.5, 3], [0.25, 4, 0.25, 0.25, 0.25, 0.25]),
        ([2, 2, 2], [3, 1, 2]),
        ([7], [1.5]),
        ([], []),
    ]
    given = [f"sent at {sent}, service {service}" for sent, service in cases]
    got = []
    for (sent, service), told in zip(cases, given, strict=True):
        times = attempt(list(sent), list(service), given=told)
        _expect_times(times, len(sent), "a latency for each request", told)
        got.append(list(times))

    def every(of: Callable[[Seq[float], Seq[float]], Seq[float]]) -> list[float]:
        """Concatenate the latencies that a rule of (send times, service times) gives for each case."""
        return [number for case in cases for number in of(*case)]

    def ends(sent: Seq[float], service: Seq[float]) -> list[float]:
        """Return when each request finishes if the server runs one at a time, in order."""
        done = []
        for time, seconds in zip(sent, service, strict=True):
            done.append(max([time, *done[-1:]]) + seconds)
        return done

    def latencies(sent: Seq[float], service: Seq[float]) -> list[float]:
        return [end - time for end, time in zip(ends(sent, service), sent, strict=True)]

    def waits(sent: Seq[float], service: Seq[float]) -> list[float]:
        return [latency - seconds for latency, seconds in zip(latencies(sent, service), service, strict=True)]

    def never_idle(sent: Seq[float], service: Seq[float]) -> list[float]:
        return [end - time for end, time in zip(accumulate(service), sent, strict=True)]

    def behind_one(sent: Seq[float], service: Seq[float]) -> list[float]:
        """Return the latencies if a request waited only for the one just before it."""
        free = [0, *(time + seconds for time, seconds in zip(sent, service, strict=True))]
        return [max(time, free[i]) + service[i] - time for i, time in enumerate(sent)]

    def by_rank(rank: Callable[[int], float], sent: Seq[float], service: Seq[float]) -> list[float]:
        """Return the latencies if the server always runs the waiting request with the lowest rank of (number)."""
        left, now, done = set(range(len(sent))), 0.0, {}
        while left:
            now = max(now, min(sent[i] for i in left))
            i = min((i for i in left if sent[i] <= now), key=rank)
            now += service[i]
            done[i] = now - sent[i]
            left.remove(i)
        return [done[i] for i in range(len(sent))]

    expect_numbers(
        [number for each in got for number in each],
        every(latencies),
        [
            (
                every(lambda sent, service: service),
                "nobody ever waits here. That is what a client sees that sends only after the answer before: a server "
                "that takes one at a time makes the next request wait, and its user does not care why.",
            ),
            (
                every(waits),
                "counts the wait only. Latency goes from the intended send time to the answer, the work included.",
            ),
            (every(ends), "returns when each is done. Latency counts from each request's own send time."),
            (
                every(lambda *case: [end - seconds for end, seconds in zip(ends(*case), case[1], strict=True)]),
                "returns when each begins. Wanted is the time from the intended send time to the answer.",
            ),
            (
                every(never_idle),
                "works on the next request before it is sent: when nobody waits, the server is idle.",
            ),
            (
                every(lambda sent, service: accumulate(service)),
                "adds up all work so far. What was done before a request was sent keeps it no longer.",
            ),
            (
                every(behind_one),
                "lets a request wait as if the one before had begun at once: that may have waited, too.",
            ),
            (
                every(lambda *case: by_rank(lambda i: -i, *case)),
                "serves the last one to come first. The server takes them in the order in which they were sent.",
            ),
            (
                every(lambda *case: by_rank(lambda i: case[1][i], *case)),
                "serves the shortest first. The server takes them in the order in which they were sent.",
            ),
            (
                every(lambda *case: sorted(latencies(*case))),
                "has the latencies by their size: they belong to the requests, in the order in which these were sent.",
            ),
            (
                every(lambda *case: latencies(*case)[::-1]),
                "has the latencies backwards: the first request's comes first.",
            ),
            (
                every(lambda *case: [x / seconds for x, seconds in zip(latencies(*case), case[1], strict=True)]),
                "divides by the service time: wanted are seconds.",
            ),
            (
                every(lambda sent, service: latencies(list(accumulate(sent)), service)),
                "takes the send times for gaps and adds them up: they are times already.",
            ),
            (
                every(lambda sent, service: latencies(sent, [*service[1:], *service[:1]])),
                "takes the next one's service time for each request.",
            ),
            (
                every(lambda sent, service: latencies(sent, [*service[-1:], *service[:-1]])),
                "takes the service time of the one before for each request.",
            ),
            (
                every(lambda sent, service: [end - sent[0] for end in ends(sent, service)]),
                "counts from the first request's send time: each has its own.",
            ),
            (
                every(lambda sent, service: [b - a for a, b in pairwise([0, *ends(sent, service)])]),
                "takes the time between two answers: while the server is busy that is the service time, and no wait is "
                "seen.",
            ),
        ],
        [f"request {i}, {told}" for told, (sent, _) in zip(given, cases, strict=True) for i in range(len(sent))],
    )


TASKS = {
    "poisson_arrivals(rate, count, random)": (
        poisson_arrivals,
        "requests come when their users like, in bursts and with pauses, and never wait for an answer",
    ),
    "open_loop_latencies(arrivals, service_seconds)": (
        open_loop_latencies,
        "who has to wait for others waits from the moment at which the request should have been sent",
    ),
}
