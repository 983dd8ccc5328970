"""Lesson 18, the answer: Little's law within a window, and the price of the smallest fleet that keeps a promise."""

from ..edits import add_edits
from ..exercise import Exercise

waiting_and_running = Exercise(
    "waiting_and_running(requests, start, end)",
    "Little's law holds for the queue, for the rows and for both together",
    names=("waiting", "running"),
)
waiting_and_running.table([
    ([(0.0, 1.0, 5.0), (2.0, 2.0, 3.0)], 0.0, 10.0), ([(0.0, 2.0, 6.0)], 1.0, 5.0),
    ([(0.0, 0.0, 10.0), (1.0, 6.0, 9.0)], 4.0, 8.0), ([(0.0, 1.0, 2.0), (5.0, 7.0, 12.0), (9.0, 11.0, 13.0)], 4.0, 8.0),
    ([(1.0, 2.0, 3.0)], 5.0, 6.0), ([(1.0, 8.0, 9.0), (2.0, 8.0, 12.0), (3.0, 9.0, 10.0)], 2.0, 6.0),
], lambda random: [([tuple(sorted(random.randint(0, 160) / 10 for _ in "abc")) for _ in range(9)], 2.0, 9.0)],
   given="(arrival, admitted, finished) {}, from {} to {}")  # fmt: skip


@waiting_and_running.reference
def by_overlaps(requests, start, end):
    waiting = running = 0.0
    for arrival, admitted, finished in requests:
        waiting += max(0.0, min(admitted, end) - max(arrival, start))
        running += max(0.0, min(finished, end) - max(admitted, start))
    return waiting / (end - start), running / (end - start)


def each(condition):
    """Return an edit that counts some requests only."""
    return f"finished in requests: -> finished in [(a, b, c) for a, b, c in requests if {condition}]:"


WHOLE = ("min(admitted, end) - max(arrival, start) -> admitted - arrival",
         "min(finished, end) - max(admitted, start) -> finished - admitted")  # fmt: skip
add_edits(waiting_and_running, {
    "counts requests that finish within the window only: the others are in the system, too.":
        each("start <= a and c <= end"),
    "counts requests that arrive within the window only: earlier ones may still be in the system.":
        each("start <= a < end"),
    "counts the whole time of a request: only the part within the window belongs to its average.": (
        *WHOLE, "max(0.0, admitted - arrival) -> (admitted - arrival) * (min(admitted, end) > max(arrival, start))",
        "max(0.0, finished - admitted) -> (finished - admitted) * (min(finished, end) > max(admitted, start))"),
    "divides by the number of requests: that is a mean time, and the task asks for a mean number.":
        "(end - start) -> len(requests)",
    "counts a request as running from its arrival on: until it is admitted, it waits.":
        "max(admitted, start) -> max(arrival, start)",
    "counts a request as waiting until it finishes: once admitted, it runs.": "min(admitted -> min(finished",
})  # fmt: skip

smallest_fleet = Exercise(
    "smallest_fleet(fleets, limit, share, price)",
    "a promise is a share of the requests, and every replica is paid for, busy or not",
)
EVEN = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]  # 8 and 16 requests: no rounding decides whether a share is reached
TAIL = [0.1] * 9 + [8.0]
FAR = [0.1] * 7 + [9.0]  # 7 of 8 are in time, and an interpolated percentile is not


def of_1000(in_time):
    return [0.2 + 0.0001 * n for n in range(in_time)] + [0.9] * (1000 - in_time)


smallest_fleet.table([
    ([(1, 2.0, 2.0, [0.5, 3.0]), (2, 1.0, 1.5, [0.5, 1.0])], 1.0, 1.0, 3.0),
    ([(1, 1.0, 1.0, TAIL), (2, 1.0, 1.2, [*TAIL[:8], 0.4, 0.5]), (3, 1.0, 1.3, [0.1] * 10)], 0.5, 0.95, 2.0),
    ([(3, 4.0, 6.0, EVEN), (2, 4.0, 5.5, [2 * one for one in EVEN]), (4, 4.0, 6.0, EVEN)], 0.7, 0.875, 2.5),
    ([(2, 1.0, 1.0, [0.1] * 5 + [2.0] * 3), (4, 1.0, 1.0, [0.1] * 7 + [0.6])], 0.5, 0.875, 1.0),
    ([(1, 1.0, 1.0, [9.0]), (2, 1.0, 2.0, [8.0])], 0.5, 0.5, 1.0),
    ([(5, 2.0, 9.0, [0.2] * 63 + [0.7]), (4, 3.0, 9.0, [0.2] * 62 + [0.7] * 2)], 0.5, 0.96875, 1.5),
    ([(4, 2.0, 3.0, [0.1] * 6 + [3.0]), (3, 2.0, 3.5, [0.2] * 5 + [2.0] * 2)], 1.0, 0.95, 1.0),
    ([(3, 1.0, 2.0, [0.1, 0.2]), (2, 1.0, 2.0, [0.2, 0.3]), (1, 1.0, 1.0, [0.5, 0.6])], 0.4, 1.0, 4.0),
    ([(1, 1.0, 0.9, [0.2] * 7 + [2.0]), (2, 1.0, 0.9, [0.2] * 7 + [0.7])], 0.65, 0.875, 4.0),
    ([(1, 3.5, 3.5, [0.5, 0.5]), (2, 1.5, 2.0, [0.2, 0.2])], 1.0, 1.0, 2.0),
    *[([(size, 1.0, 1.0, of_1000(n)) for size, n in fleets], 0.5, share, 2.0) for share, *fleets in [
        (0.9855, (2, 985), (3, 986), (4, 987)), (0.9865, (5, 987), (4, 986), (3, 984))]],
    ([(1, 1.0, 1.0, FAR), (2, 1.0, 1.0, [0.1] * 8)], 0.4, 0.875, 2.0),
    ([(3, 1.0, 1.0, [0.1] * 8), (1, 1.0, 1.0, [*FAR[1:], 0.5]), (2, 1.0, 1.0, FAR)], 0.4, 0.875, 2.0),
], lambda random: [(
    [(n, 2.25, n * 1.2, [round(random.expovariate(n / 2), 2) for _ in range(16)]) for n in (6, 2, 5, 3)],
    1.0, 0.875, 2.0,
)], given="(replicas, hours, busy hours, latencies) {}, limit {}, share {}, {} per hour")  # fmt: skip


@smallest_fleet.reference
def by_the_share_in_time(fleets, limit, share, price):
    enough = [fleet for fleet in fleets if sum(one <= limit for one in fleet[3]) >= share * len(fleet[3])]
    if not enough:
        return None
    best = min(enough, key=lambda fleet: fleet[0])
    return best[0], best[0] * best[1] * price


def keeps(condition):
    """Return an edit of the condition on the latencies of a fleet that keeps the promise."""
    return f"sum(one <= limit for one in fleet[3]) >= share * len(fleet[3]) -> {condition}"


add_edits(smallest_fleet, {
    "compares the mean with the limit: a promise is a share of the requests, and the mean hides the slow ones.":
        keeps("statistics.mean(fleet[3]) <= limit"),
    "compares the median with the limit: half of the requests may be slower.":
        keeps("statistics.median(fleet[3]) <= limit"),
    "compares the slowest request with the limit: the promise leaves out a share of the requests.":
        keeps("max(fleet[3]) <= limit"),
    "counts a latency that equals the limit as too slow.": "<= limit -> < limit",
    "compares an interpolated percentile with the limit, and it can be between two latencies: count those in time.":
        keeps("np.percentile(fleet[3], 100 * share) <= limit"),
    "asks for more than the promised share: exactly that share keeps the promise.": ">= share -> > share",
    "swaps the two shares: the promised share has to be within the limit, not above it.": "<= limit -> > limit",
    "takes the first fleet that keeps the promise: a smaller one may follow.":
        "min(enough, key=lambda fleet: fleet[0]) -> enough[0]",
    "takes the cheapest fleet that keeps the promise: the smallest one has the fewest replicas, whatever it costs.":
        "lambda fleet: fleet[0] -> lambda fleet: fleet[0] * fleet[1]",
    "pays for hours that have only begun as if they were full: the price is in proportion to the time.":
        "best[1] -> math.ceil(best[1])",
    "pays only for the hours in which replicas are busy: idle replicas cost as much.": "best[0] * best[1] -> best[2]",
})  # fmt: skip
