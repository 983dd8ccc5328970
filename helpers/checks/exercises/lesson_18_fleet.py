"""Lesson 18, the answer: Little's law within a window, and the price of the smallest fleet that keeps a promise."""

import math
import statistics

import numpy as np

from ..exercise import Exercise

waiting_and_running = Exercise(
    "waiting_and_running(requests, start, end)",
    "Little's law holds for the queue, for the rows and for both together",
    names=("waiting", "running"),
)


def _drawn_requests(random):
    requests = []
    for _ in range(9):
        arrival = round(random.uniform(0, 10), 1)
        admitted = round(arrival + random.choice([0, random.uniform(0, 3)]), 1)
        requests.append((arrival, admitted, round(admitted + random.uniform(0.5, 5), 1)))
    return requests


waiting_and_running.table(
    [
        ([(0.0, 1.0, 5.0), (2.0, 2.0, 3.0)], 0.0, 10.0), ([(0.0, 2.0, 6.0)], 1.0, 5.0),
        ([(0.0, 0.0, 10.0), (1.0, 6.0, 9.0)], 4.0, 8.0),
        ([(0.0, 1.0, 2.0), (5.0, 7.0, 12.0), (9.0, 11.0, 13.0)], 4.0, 8.0), ([(1.0, 2.0, 3.0)], 5.0, 6.0),
        ([(1.0, 8.0, 9.0), (2.0, 8.0, 12.0), (3.0, 9.0, 10.0)], 2.0, 6.0),
    ],
    lambda random: [(_drawn_requests(random), 2.0, 9.0)],
    given="(arrival, admitted, finished) {}, from {} to {}",
)  # fmt: skip


def overlap(begin, stop, start, end):
    return max(0.0, min(stop, end) - max(begin, start))


@waiting_and_running.reference
def by_overlaps(
    requests,
    start,
    end,
    inside=overlap,
    over=lambda requests, start, end: end - start,
    kept=lambda request, start, end: True,
    parts=((0, 1), (1, 2)),
):
    """Average over time, with replaceable parts: what counts of an interval, the divisor, and which requests count."""
    total = over(requests, start, end)
    return tuple(
        sum(inside(one[a], one[b], start, end) for one in requests if kept(one, start, end)) / total if total else 0.0
        for a, b in parts
    )


waiting_and_running.add_misconceptions({
    "counts requests that finish within the window only: the others are in the system, too.":
        {"kept": lambda one, start, end: start <= one[0] and one[2] <= end},
    "counts requests that arrive within the window only: earlier ones may still be in the system.":
        {"kept": lambda one, start, end: start <= one[0] < end},
    "counts the whole time of a request: only the part within the window belongs to its average.":
        {"inside": lambda begin, stop, start, end: (stop - begin) * (overlap(begin, stop, start, end) > 0)},
    "counts the whole time of every request, also outside of the window.":
        {"inside": lambda begin, stop, start, end: stop - begin},
    "counts negative times: a request that is not in the system during the window adds nothing.":
        {"inside": lambda begin, stop, start, end: min(stop, end) - max(begin, start)},
    "divides by the number of requests: that is a mean time, and the task asks for a mean number.":
        {"over": lambda requests, start, end: len(requests)},
    "does not divide by the length of the window.": {"over": lambda requests, start, end: 1},
    "divides by the end of the window instead of by its length.": {"over": lambda requests, start, end: end},
    "counts a request as running from its arrival on: until it is admitted, it waits.": {"parts": ((0, 1), (0, 2))},
    "counts a request as waiting until it finishes: once admitted, it runs.": {"parts": ((0, 2), (1, 2))},
    "returns the running requests first.": {"parts": ((1, 2), (0, 1))},
})  # fmt: skip


@waiting_and_running.misconception(
    "averages the numbers at the start and at the end of the window: in between, they may be different."
)
def at_the_ends(requests, start, end):
    return tuple(
        sum((one[a] <= time < one[b]) for one in requests for time in (start, end)) / 2 for a, b in ((0, 1), (1, 2))
    )


smallest_fleet = Exercise(
    "smallest_fleet(fleets, limit, share, price)",
    "a promise is a share of the requests, and every replica is paid for, busy or not",
)


@smallest_fleet.cases
def _(random):
    even = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]  # 8 and 16 requests: no rounding decides whether a share is reached
    tail = [0.1] * 9 + [8.0]
    drawn = [
        (size, 2.25, size * 1.2, [round(random.expovariate(size / 2), 2) for _ in range(16)]) for size in (6, 2, 5, 3)
    ]
    of_1000 = [[0.2 + 0.0001 * n for n in range(late)] + [0.9] * (1000 - late) for late in (985, 986, 987, 984)]
    far = [0.1] * 7 + [9.0]  # 7 of 8 are in time, and an interpolated percentile is not
    for fleets, limit, share, price in [
        ([(1, 2.0, 2.0, [0.5, 3.0]), (2, 1.0, 1.5, [0.5, 1.0])], 1.0, 1.0, 3.0),
        ([(1, 1.0, 1.0, tail), (2, 1.0, 1.2, [*tail[:8], 0.4, 0.5]), (3, 1.0, 1.3, [0.1] * 10)], 0.5, 0.95, 2.0),
        ([(3, 4.0, 6.0, even), (2, 4.0, 5.5, [2 * one for one in even]), (4, 4.0, 6.0, even)], 0.7, 0.875, 2.5),
        ([(2, 1.0, 1.0, [0.1] * 5 + [2.0] * 3), (4, 1.0, 1.0, [0.1] * 7 + [0.6])], 0.5, 0.875, 1.0),
        ([(1, 1.0, 1.0, [9.0]), (2, 1.0, 2.0, [8.0])], 0.5, 0.5, 1.0),
        ([(5, 2.0, 9.0, [0.2] * 63 + [0.7]), (4, 3.0, 9.0, [0.2] * 62 + [0.7] * 2)], 0.5, 0.96875, 1.5),
        ([(4, 2.0, 3.0, [0.1] * 6 + [3.0]), (3, 2.0, 3.5, [0.2] * 5 + [2.0] * 2)], 1.0, 0.95, 1.0),
        (
            [(3, 1.0, 2.0, [0.1, 0.1, 0.2]), (2, 1.0, 2.0, [0.2, 0.1, 0.3]), (1, 1.0, 1.0, [0.5, 0.5, 0.6])],
            0.4,
            1.0,
            4.0,
        ),
        ([(1, 1.0, 0.9, [0.2] * 7 + [2.0]), (2, 1.0, 0.9, [0.2] * 7 + [0.7])], 0.65, 0.875, 4.0),
        ([(1, 3.5, 3.5, [0.5, 0.5]), (2, 1.5, 2.0, [0.2, 0.2])], 1.0, 1.0, 2.0),
        ([(2, 1.0, 1.0, of_1000[0]), (3, 1.0, 1.0, of_1000[1]), (4, 1.0, 1.0, of_1000[2])], 0.5, 0.9855, 2.0),
        ([(5, 1.0, 1.0, of_1000[2]), (4, 1.0, 1.0, of_1000[1]), (3, 1.0, 1.0, of_1000[3])], 0.5, 0.9865, 2.0),
        ([(1, 1.0, 1.0, far), (2, 1.0, 1.0, [0.1] * 8)], 0.4, 0.875, 2.0),
        ([(3, 1.0, 1.0, [0.1] * 8), (1, 1.0, 1.0, [*far[1:], 0.5]), (2, 1.0, 1.0, far)], 0.4, 0.875, 2.0),
        (drawn, 1.0, 0.875, 2.0),
    ]:
        given = (
            f"(replicas, hours, busy hours, latencies) {fleets if len(str(fleets)) < 160 else [f[:3] for f in fleets]}"
        )
        yield (fleets, limit, share, price), f"{given}, limit {limit}, share {share}, {price} per hour"


@smallest_fleet.reference
def by_the_share_in_time(
    fleets,
    limit,
    share,
    price,
    keeps=lambda latencies, limit, share: sum(one <= limit for one in latencies) >= share * len(latencies),
    choose=min,
    pays=lambda fleet: fleet[0] * fleet[1],
):
    """Choose a fleet, with replaceable parts: whether it keeps the promise, which one is taken, and what is paid."""
    enough = [fleet for fleet in fleets if keeps(fleet[3], limit, share)]
    if not enough:
        return None
    fleet = choose(enough, key=lambda fleet: fleet[0])
    return fleet[0], pays(fleet) * price


smallest_fleet.add_misconceptions({
    "compares the mean with the limit: a promise is a share of the requests, and the mean hides the slow ones.":
        {"keeps": lambda latencies, limit, share: statistics.mean(latencies) <= limit},
    "compares the median with the limit: half of the requests may be slower.":
        {"keeps": lambda latencies, limit, share: statistics.median(latencies) <= limit},
    "compares the slowest request with the limit: the promise leaves out a share of the requests.":
        {"keeps": lambda latencies, limit, share: max(latencies) <= limit},
    "counts a latency that equals the limit as too slow.":
        {"keeps": lambda latencies, limit, share: sum(one < limit for one in latencies) >= share * len(latencies)},
    "compares an interpolated percentile with the limit, and it can be between two latencies: count those in time.":
        {"keeps": lambda latencies, limit, share: np.percentile(latencies, 100 * share) <= limit},
    "asks for more than the promised share: exactly that share keeps the promise.":
        {"keeps": lambda latencies, limit, share: sum(one <= limit for one in latencies) > share * len(latencies)},
    "swaps the two shares: the promised share has to be within the limit, not above it.":
        {"keeps": lambda latencies, limit, share: sum(one > limit for one in latencies) >= share * len(latencies)},
    "takes the largest fleet that keeps the promise: the smallest one is enough.": {"choose": max},
    "takes the first fleet that keeps the promise: a smaller one may follow.":
        {"choose": lambda enough, key: enough[0]},
    "takes the cheapest fleet that keeps the promise: the smallest one has the fewest replicas, whatever it costs.":
        {"choose": lambda enough, key: min(enough, key=lambda fleet: fleet[0] * fleet[1])},
    "pays for hours that have only begun as if they were full: the price is in proportion to the time.":
        {"pays": lambda fleet: fleet[0] * math.ceil(fleet[1])},
    "pays only for the hours in which replicas are busy: idle replicas cost as much.": {"pays": lambda fleet: fleet[2]},
    "pays for one replica only.": {"pays": lambda fleet: fleet[1]},
    "pays for one hour only.": {"pays": lambda fleet: fleet[0]},
})  # fmt: skip


@smallest_fleet.misconception("takes one replica more than the smallest fleet that keeps the promise.")
def one_more(fleets, limit, share, price):
    found = by_the_share_in_time(fleets, limit, share, price)
    return found and (found[0] + 1, found[1] / found[0] * (found[0] + 1))


@smallest_fleet.misconception("takes the smallest fleet without looking at its latencies.")
def the_smallest(fleets, limit, share, price):
    fleet = min(fleets)
    return fleet[0], fleet[0] * fleet[1] * price


@smallest_fleet.misconception("returns a fleet that does not keep the promise where none does: return None.")
def the_largest_of_too_small_ones(fleets, limit, share, price):
    found = by_the_share_in_time(fleets, limit, share, price)
    fleet = max(fleets)
    return found or (fleet[0], fleet[0] * fleet[1] * price)
