"""Run a student's bounded queue in front of rows that only let time pass, to show the effect of the bound."""

import heapq
from collections.abc import Hashable, Sequence

TOKENS, STEP = 20, 0.05  # a running request gets a token every `STEP` seconds, and leaves with the last one


def simulate_queue(queue, arrivals: Sequence[float]) -> list[tuple[float, list[float]]]:
    """Run requests through a queue; refused requests do not retry.

    Args:
        queue: has `offer`, `leave` and `running`.
        arrivals: when each request is sent.

    Returns:
        For each request, when it was sent and when each of its tokens was generated; a refused request has no tokens.
    """
    times: list[list[float]] = [[] for _ in arrivals]
    ends: list[tuple[float, Hashable]] = []

    def begin(now: float) -> None:
        for number in list(queue.running):
            if not times[number]:
                times[number] = [now + STEP * (token + 1) for token in range(TOKENS)]
                heapq.heappush(ends, (times[number][-1], number))

    for number, sent in enumerate([*arrivals, float("inf")]):
        while ends and ends[0][0] <= sent:
            now, leaving = heapq.heappop(ends)
            queue.leave(leaving)
            begin(now)
        if sent < float("inf"):
            queue.offer(number)
            begin(sent)
    return list(zip(arrivals, times, strict=True))
