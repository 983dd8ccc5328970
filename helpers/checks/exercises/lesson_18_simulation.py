"""Lesson 18, the simulation and its answer: an event loop, Little's law, and the smallest fleet."""

from ..exercise import Exercise


@Exercise.declare("only an iteration and an idle engine move the clock, and it never runs back")
def finish_times(requests, rows, constant, per_row):
    now, running, times, to_come = 0.0, {}, [0.0] * len(requests), list(range(len(requests)))
    while to_come or running:
        if not running:
            arrival = requests[to_come[0]][0]
            now = max(now, arrival)
        while to_come and len(running) < rows:
            arrival, tokens = requests[to_come[0]]
            if running and arrival > now:
                break
            running[to_come.pop(0)] = tokens
        now += constant + per_row * len(running)
        for number in list(running):
            running[number] -= 1
            if running[number] <= 0:
                del running[number]
                times[number] = now
    return times


finish_times.table([
    ([(0.0, 2), (0.5, 1), (10.0, 1)], 2, 1.0, 0.5), ([(0.0, 1), (0.25, 1), (0.5, 1)], 2, 2.0, 0.25),
    ([(3.0, 1)], 4, 0.5, 0.25), ([(0.0, 2), (1.5, 1), (3.0, 2)], 2, 1.0, 0.5),
    ([(0.0, 4), (0.125, 1), (0.25, 1), (0.375, 2)], 2, 1.0, 0.25), ([(0.0, 1), (0.0, 3), (0.0, 2)], 8, 1.0, 1.0),
    # A queue for few rows, with outputs of unequal length.
    ([(0.0, 5), (0.0, 2), (0.0, 6), (0.0, 1), (0.0, 3), (0.0, 1)], 2, 1.0, 0.5),
    ([(0.0, 3), (0.5, 7), (0.5, 1), (1.0, 4), (1.0, 1), (20.0, 2), (20.0, 1), (21.0, 1)], 2, 0.5, 0.25),
    ([(0.0, 9), (1.0, 1), (1.0, 5), (2.0, 1), (2.0, 1)], 1, 1.0, 0.0),
    ([(0.0, 1), (1.5, 1), (2.0, 1), (7.0, 1)], 1, 1.0, 0.5),  # arrivals exactly when an iteration ends
    ([], 2, 1.0, 0.5),
], lambda random: [  # in eighths: no rounding decides which arrival is due
    ([(time / 8, random.randint(1, 4)) for time in sorted(random.choices(range(97), k=8))], 3, 0.75, 0.125)
], given="(arrival, tokens) {}, {} rows, an iteration takes {} + {} per row")  # fmt: skip

finish_times.add_misconceptions({
    "sets the clock back: after an iteration, a request that arrived meanwhile starts now, and not at its arrival.":
        "max(now, arrival) -> arrival",
    "serves a request before it arrives: an idle engine's clock moves to the next arrival.": "max(now, arrival) -> now",
    "runs empty iterations while the engine is idle. The clock moves straight to the next arrival, and the request "
    "starts there.": "max(now, arrival) -> now + constant * max(0, math.ceil((arrival - now) / constant))",
    "lets a request join an iteration that has begun: it waits for the next one.":
        "arrival > now -> arrival > now + constant + per_row * len(running)",
    "lets a request wait that arrives just when an iteration begins: it can join.": "arrival > now -> arrival >= now",
    "lets requests join only when the engine is idle: a free row can be taken before every iteration.":
        ("if not running: -> idle = not running\n        if idle:", "< rows -> < rows and idle"),
    "ignores how many rows run: each makes the iteration longer.": "constant + per_row * len(running) -> constant",
    "computes an iteration's time before requests join: they are computed in it, too.":
        ("if not running: -> before = len(running)\n        if not running:", "* len(running) -> * before"),
    "pays the constant for every row: all rows of an iteration share it.":
        "constant + per_row * len(running) -> (constant + per_row) * len(running)",
    "returns when the last iteration of a request begins: its token is available at the end.":
        ("now += -> begin, now = now, now +", "times[number] = now -> times[number] = begin"),
    "pays for all rows: only those that run make the iteration longer.": "per_row * len(running) -> per_row * rows",
})  # fmt: skip


@Exercise.declare("Little's law holds for the queue, for the rows and for both together", names=("waiting", "running"))
def waiting_and_running(requests, start, end):
    waiting = running = 0.0
    for arrival, admitted, finished in requests:
        waiting += max(0.0, min(admitted, end) - max(arrival, start))
        running += max(0.0, min(finished, end) - max(admitted, start))
    return waiting / (end - start), running / (end - start)


waiting_and_running.table([
    ([(0.0, 1.0, 5.0), (2.0, 2.0, 3.0)], 0.0, 10.0), ([(0.0, 2.0, 6.0)], 1.0, 5.0),
    ([(0.0, 0.0, 10.0), (1.0, 6.0, 9.0)], 4.0, 8.0), ([(0.0, 1.0, 2.0), (5.0, 7.0, 12.0), (9.0, 11.0, 13.0)], 4.0, 8.0),
    ([(1.0, 2.0, 3.0)], 5.0, 6.0), ([(1.0, 8.0, 9.0), (2.0, 8.0, 12.0), (3.0, 9.0, 10.0)], 2.0, 6.0),
], lambda random: [([tuple(sorted(random.randint(0, 160) / 10 for _ in "abc")) for _ in range(9)], 2.0, 9.0)],
   given="(arrival, admitted, finished) {}, from {} to {}")  # fmt: skip

WHOLE = ("min(admitted, end) - max(arrival, start) -> admitted - arrival",
         "min(finished, end) - max(admitted, start) -> finished - admitted")  # fmt: skip
waiting_and_running.add_misconceptions({
    "counts requests that arrive or finish within the window only: the others are in the system, too.": [
        f"finished in requests: -> finished in [(a, b, c) for a, b, c in requests if {condition}]:"
        for condition in ("start <= a and c <= end", "start <= a < end")],
    "counts the whole time of a request: only the part within the window belongs to its average.": (
        *WHOLE, "max(0.0, admitted - arrival) -> (admitted - arrival) * (min(admitted, end) > max(arrival, start))",
        "max(0.0, finished - admitted) -> (finished - admitted) * (min(finished, end) > max(admitted, start))"),
    "divides by the number of requests: that's a mean time, not a mean number.": "(end - start) -> len(requests)",
    "counts requests as running before they are admitted.": "max(admitted, start) -> max(arrival, start)",
    "counts a request as waiting until it finishes: once admitted, it runs.": "min(admitted -> min(finished",
})  # fmt: skip


@Exercise.declare("a promise is a share of the requests, and every replica is paid for, busy or not")
def smallest_fleet(fleets, limit, share, price):
    enough = [fleet for fleet in fleets if sum(latency <= limit for latency in fleet[3]) >= share * len(fleet[3])]
    if not enough:
        return None
    best = min(enough, key=lambda fleet: fleet[0])
    return best[0], best[0] * best[1] * price


EVEN = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]  # 8 and 16 requests: no rounding decides whether a share is reached
TAIL = [0.1] * 9 + [8.0]
FAR = [0.1] * 7 + [9.0]  # 7 of 8 are in time, and an interpolated percentile is not


def of_1000(in_time):
    return [0.2 + 0.0001 * n for n in range(in_time)] + [0.9] * (1000 - in_time)


smallest_fleet.table([
    ([(1, 2.0, 2.0, [0.5, 3.0]), (2, 1.0, 1.5, [0.5, 1.0])], 1.0, 1.0, 3.0),
    ([(1, 1.0, 1.0, TAIL), (2, 1.0, 1.2, [*TAIL[:8], 0.4, 0.5]), (3, 1.0, 1.3, [0.1] * 10)], 0.5, 0.95, 2.0),
    ([(3, 4.0, 6.0, EVEN), (2, 4.0, 5.5, [2 * latency for latency in EVEN]), (4, 4.0, 6.0, EVEN)], 0.7, 0.875, 2.5),
    ([(2, 1.0, 1.0, [0.1] * 5 + [2.0] * 3), (4, 1.0, 1.0, [0.1] * 7 + [0.6])], 0.5, 0.875, 1.0),
    ([(1, 1.0, 1.0, [9.0]), (2, 1.0, 2.0, [8.0])], 0.5, 0.5, 1.0),
    ([(5, 2.0, 9.0, [0.2] * 63 + [0.7]), (4, 3.0, 9.0, [0.2] * 62 + [0.7] * 2)], 0.5, 0.96875, 1.5),
    ([(4, 2.0, 3.0, [0.1] * 6 + [3.0]), (3, 2.0, 3.5, [0.2] * 5 + [2.0] * 2)], 1.0, 0.95, 1.0),
    ([(3, 1.0, 2.0, [0.1, 0.2]), (2, 1.0, 2.0, [0.2, 0.3]), (1, 1.0, 1.0, [0.5, 0.6])], 0.4, 1.0, 4.0),
    ([(1, 1.0, 0.9, [0.2] * 7 + [2.0]), (2, 1.0, 0.9, [0.2] * 7 + [0.7])], 0.65, 0.875, 4.0),
    ([(1, 3.5, 3.5, [0.5, 0.5]), (2, 1.5, 2.0, [0.2, 0.2])], 1.0, 1.0, 2.0),
    *[([(size, 1.0, 1.0, of_1000(n)) for size, n in fleets], 0.5, share, 2.0) for share, *fleets in [
        (0.9855, (2, 985), (3, 986), (4, 987)), (0.9861, (5, 987), (4, 986), (3, 984))]],
    ([(1, 1.0, 1.0, FAR), (2, 1.0, 1.0, [0.1] * 8)], 0.4, 0.875, 2.0),
    ([(3, 1.0, 1.0, [0.1] * 8), (1, 1.0, 1.0, [*FAR[1:], 0.5]), (2, 1.0, 1.0, FAR)], 0.4, 0.875, 2.0),
], lambda random: [(
    [(n, 2.25, n * 1.2, [round(random.expovariate(n / 2), 2) for _ in range(16)]) for n in (6, 2, 5, 3)],
    1.0, 0.875, 2.0,
)], given="(replicas, hours, busy hours, latencies) {}, limit {}, share {}, {} per hour")  # fmt: skip

KEEPS = "sum(latency <= limit for latency in fleet[3]) >= share * len(fleet[3])"
smallest_fleet.add_misconceptions({
    "compares the mean with the limit: a promise is a share of the requests, and the mean hides the slow ones.":
        [f"{KEEPS} -> statistics.{average}(fleet[3]) <= limit" for average in ("mean", "median")],
    "compares the slowest request with the limit: the promise lets some be late.": f"{KEEPS} -> max(fleet[3]) <= limit",
    "counts a latency that equals the limit as too slow.": "<= limit -> < limit",
    "compares an interpolated percentile with the limit, and it can be between two latencies: count those in time.":
        f"{KEEPS} -> np.percentile(fleet[3], 100 * share) <= limit",
    "asks for more than the promised share: exactly that share keeps the promise.": ">= share -> > share",
    "takes the first fleet that keeps the promise: a smaller one may follow.":
        "min(enough, key=lambda fleet: fleet[0]) -> enough[0]",
    "takes the cheapest fleet that keeps the promise: the smallest one has the fewest replicas, whatever it costs.":
        "lambda fleet: fleet[0] -> lambda fleet: fleet[0] * fleet[1]",
    "pays only for the hours in which replicas are busy: idle replicas cost as much.": "best[0] * best[1] -> best[2]",
})  # fmt: skip
