"""Lesson 10, a load test: right answers in other styles, and wrong ones that fail in ways of their own."""

import numpy as np

from answers import ALMOST, right


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
def with_the_mean_of_the_gaps(requests, seconds, ttft, tpot):
    good = []
    for sent, times in requests:
        gaps = np.diff(times)
        if len(times) and times[0] <= sent + ttft and (not len(gaps) or gaps.mean() <= tpot):
            good.append(sent)
    return np.float32(len(good) / seconds)


ALMOST["goodput"] |= {"changed its argument: `requests`": lambda result, requests, *_: requests.clear() or result}
