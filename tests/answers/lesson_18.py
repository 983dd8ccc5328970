"""Answers to the exercises of lesson 18."""

import numpy as np

from answers import ALMOST, RIGHT, WRONG, right

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
def in_arrays(requests, start, end):
    clipped = np.clip(np.array(requests), start, end)
    return tuple(np.diff(clipped, axis=1).sum(axis=0) / (end - start))


ALMOST["waiting_and_running"] |= {
    "should be 2 values: waiting and running, but is a float": lambda means, *_: sum(means),
    "changed its argument: `requests`": lambda means, requests, *_: (requests.clear(), means)[1],
}


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
