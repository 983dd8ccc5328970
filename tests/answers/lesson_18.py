"""Answers to the exercises of lesson 18."""

import heapq

import numpy as np

from answers import ALMOST, RIGHT, WRONG, right


@right("finish_times")
def with_lists(requests, rows, constant, per_row):
    waiting, running, now = list(range(len(requests))), [], 0.0
    left, times = [tokens for _, tokens in requests], [None] * len(requests)
    while waiting or running:
        if not running and requests[waiting[0]][0] > now:
            now = requests[waiting[0]][0]
        while waiting and len(running) < rows and requests[waiting[0]][0] <= now:
            running.append(waiting.pop(0))
        now += constant + per_row * len(running)
        for number in running:
            left[number] -= 1
            if left[number] == 0:
                times[number] = now
        running = [number for number in running if left[number]]
    return times


@right("finish_times")
def with_a_heap_of_events(requests, rows, constant, per_row):
    events = [(arrival, number) for number, (arrival, _) in enumerate(requests)]
    heapq.heapify(events)
    left, times, running, now = {}, np.zeros(len(requests)), [], 0.0
    while events or running:
        if not running:
            now = max(now, events[0][0])
        while events and events[0][0] <= now and len(running) < rows:
            _, number = heapq.heappop(events)
            running.append(number)
            left[number] = requests[number][1]
        now += constant + per_row * len(running)
        for number in list(running):
            left[number] -= 1
            if not left[number]:
                times[number] = now
                running.remove(number)
    return times.tolist()


ALMOST["finish_times"] |= {
    "should be a list, but is a dict": lambda times, *_: dict(enumerate(times)),
    "changed its argument: `requests`": lambda times, requests, *_: (requests.append((99.0, 1)), times)[1],
}


RIGHT["finish_times"]["in_another_order_of_additions"] = lambda requests, rows, constant, per_row: _play(
    requests, rows, lambda now, running: now + constant + per_row * running
)


def _play(requests, rows, after):
    now, begun, left, times = 0.0, 0, {}, [0.0] * len(requests)
    while begun < len(requests) or left:
        now = now if left else max(now, requests[begun][0])
        while begun < len(requests) and len(left) < rows and requests[begun][0] <= now:
            left[begun] = requests[begun][1]
            begun += 1
        now = after(now, len(left))
        left = {number: tokens - 1 for number, tokens in left.items()}
        times = [time if left.get(number) != 0 else now for number, time in enumerate(times)]
        left = {number: tokens for number, tokens in left.items() if tokens}
    return times


@right("waiting_and_running")
def with_a_function(requests, start, end):
    def mean(spans):
        return sum(max(0, min(stop, end) - max(begin, start)) for begin, stop in spans) / (end - start)

    return mean([one[:2] for one in requests]), mean([one[1:] for one in requests])


@right("waiting_and_running")
def in_arrays(requests, start, end):
    clipped = np.clip(np.array(requests), start, end)
    return tuple(np.diff(clipped, axis=1).sum(axis=0) / (end - start))


ALMOST["waiting_and_running"] |= {
    "should be 2 values: waiting and running, but is a float": lambda means, *_: sum(means),
    "changed its argument: `requests`": lambda means, requests, *_: (requests.clear(), means)[1],
}


@right("smallest_fleet")
def from_the_smallest_on(fleets, limit, share, price):
    for replicas, hours, _, latencies in sorted(fleets):
        if sum(latency <= limit for latency in latencies) / len(latencies) >= share:
            return replicas, replicas * hours * price
    return None


@right("smallest_fleet")
def by_late_requests(fleets, limit, share, price):
    kept = {}
    for replicas, hours, _, latencies in fleets:
        late = (np.array(latencies) > limit).sum()
        if late <= (1 - share) * len(latencies):
            kept[replicas] = replicas * hours * price
    return min(kept.items(), default=None)


WRONG["smallest_fleet"] |= {"the result should be 2 values, but is None (given: ": lambda *_: None}
ALMOST["smallest_fleet"] |= {
    "changed its argument: `fleets`": lambda found, fleets, *_: (fleets.sort(reverse=True), fleets.pop(), found)[2],
}


RIGHT["plan_fleet"] |= {"as_a_list": lambda: [4, 384], "in_numpy": lambda: np.array([5, 384]).tolist()}
RIGHT["plan_fleet_price"] |= {"by_the_budget": lambda: (np.int64(4), 384)}
WRONG["plan_fleet"] |= {
    "Most others wait for more than 0.5 s for their first token": lambda: (4, 128),
    "Most others need more than 15 ms per token": lambda: (4, 2048),
    "should return two ints, replicas and tokens, but returned an int": lambda: 4,
    "should return two ints, but tokens is": lambda: (4, 384.0),
    "returns 32 for tokens, which should be between 64 and 8192": lambda: (4, 32),
}
WRONG["plan_fleet_price"] |= {
    "pays for 6 replicas, and 4 can keep the promise": lambda: (6, 512),
    "serves ": lambda: (3, 384),
}
