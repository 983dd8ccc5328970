"""Lesson 10, a load test: right answers in other styles, and wrong ones that fail in ways of their own."""

import numpy as np

from answers import ALMOST, right
from helpers import metrics


@right("open_loop_latencies")
def by_what_is_left_of_the_wait(arrivals, service_seconds):
    """Lindley's recursion: the next latency is its service and what the gap leaves of the latency before."""
    latencies = []
    for number, seconds in enumerate(service_seconds):
        left = max(0, latencies[-1] - (arrivals[number] - arrivals[number - 1])) if number else 0
        latencies.append(left + seconds)
    return latencies


@right("open_loop_latencies")
def by_the_latest_idle_moment_in_float32(arrivals, service_seconds):
    return [
        np.float32(max(arrivals[first] + sum(service_seconds[first : last + 1]) for first in range(last + 1)) - sent)
        for last, sent in enumerate(arrivals)
    ]


ALMOST["open_loop_latencies"] |= {
    "changed its argument: `service_seconds`": lambda latencies, arrivals, service: service.clear() or latencies,
    "stopped with IndexError": lambda latencies, arrivals, service: latencies if arrivals[0] >= 0 else None,
}


@right("goodput")
def with_the_course_s_own_times(requests, seconds, ttft, tpot):
    each = [metrics.RequestMetrics(None, sent, times) for sent, times in requests if times]
    return sum(one.ttft <= ttft and (one.tpot is None or one.tpot <= tpot) for one in each) / seconds


@right("goodput")
def with_the_mean_of_the_gaps(requests, seconds, ttft, tpot):
    good = []
    for sent, times in requests:
        gaps = np.diff(times)
        if len(times) and times[0] <= sent + ttft and (not len(gaps) or gaps.mean() <= tpot):
            good.append(sent)
    return np.float32(len(good) / seconds)


ALMOST["goodput"] |= {"changed its argument: `requests`": lambda result, requests, *_: requests.clear() or result}
