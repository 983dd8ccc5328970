"""Lesson 7, a load test: right answers in other styles, and wrong ones that fail in ways of their own."""

import math
from itertools import accumulate, chain, count, takewhile
from random import Random

import numpy as np

from answers import ALMOST, RIGHT, WRONG, right
from helpers import metrics
from helpers.checks.exercises.load_testing import send_times


def in_phases(phases, gap):
    """Phase by phase, from its own start."""
    starts = accumulate((seconds for seconds, _ in phases), initial=0)
    for (seconds, rate), start in zip(phases, starts, strict=False):
        if rate:
            yield from takewhile(lambda time, end=start + seconds: time < end, accumulate(gap(rate, start)))


def gaps(draw):
    return lambda rate, start: chain([start + draw(rate)], (draw(rate) for _ in count()))


RIGHT["poisson_arrivals"] |= {
    "with_gaps_scaled": lambda phases, random: list(in_phases(phases, gaps(lambda rate: random.expovariate(1) / rate))),
    "as_expovariate_does_it": lambda phases, random: [
        np.float32(time) for time in in_phases(phases, gaps(lambda rate: -math.log(1 - random.random()) / rate))
    ],
}
WRONG["poisson_arrivals"] |= {
    "never draws from the generator": lambda phases, random: send_times(phases, Random(1234)),
    "should be a list, but is a filter": lambda *case: filter(None, send_times(*case)),
}


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
