"""Lesson 10, a load test: right answers in other styles, and wrong ones that fail in ways of their own."""

import math
from itertools import accumulate, chain, count, takewhile
from random import Random

import numpy as np

from answers import ALMOST, RIGHT, WRONG, right
from helpers import metrics


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


def wrong_gaps(draw):
    return lambda phases, random: list(in_phases(phases, gaps(lambda rate: draw(rate, random))))


def with_gaps_that_go_on(phases, random):
    """A gap that was drawn at one rate lasts into the next phase."""
    times, now, start = [], 0, 0
    for seconds, rate in phases:
        now = max(now, start)
        while rate and now < start + seconds and (now := now + random.expovariate(rate)) < start + seconds:
            times.append(now)
        start += seconds
    return [time for time in times if time < start]


def exactly_as_many(phases, random):
    starts = accumulate((seconds for seconds, _ in phases), initial=0)
    return [
        start + time
        for (seconds, rate), start in zip(phases, starts, strict=False)
        for time in sorted(random.uniform(0, seconds) for _ in range(int(rate * seconds)))
    ]


def no_time_in_a_pause(phases, random):
    return list(in_phases([phase for phase in phases if phase[1]], gaps(random.expovariate)))


@right("poisson_arrivals")
def one_clock_of_expected_requests(phases, random):
    """Unit gaps on a clock that counts expected requests, translated into seconds."""
    times, start, expected, now = [], 0, 0, random.expovariate(1)
    for seconds, rate in phases:
        while now < expected + rate * seconds:
            times.append(start + (now - expected) / rate)
            now += random.expovariate(1)
        start, expected = start + seconds, expected + rate * seconds
    return times


WRONG["poisson_arrivals"] |= {
    "should return a list of times, but returned a filter": lambda phases, random: filter(None, [1.0]),
    "at fixed intervals": wrong_gaps(lambda rate, random: 1 / rate),
    "at intervals that are too even": wrong_gaps(lambda rate, random: random.uniform(0, 2 / rate)),
    "too few very short": wrong_gaps(lambda rate, random: random.lognormvariate(-math.log(rate * 2**0.5), 0.8326)),
    "or very long intervals": wrong_gaps(lambda rate, random: min(random.expovariate(rate), 3.9 / rate)),
    "The mean gap is 1 / rate": wrong_gaps(lambda rate, random: random.expovariate(1 / rate)),
    "a rate belongs to its phase": wrong_gaps(lambda rate, random: random.expovariate(1)),
    "their number is random, too": exactly_as_many,
    "there is a gap before it, too": lambda phases, random: list(
        in_phases(phases, lambda rate, start: chain([start], (random.expovariate(rate) for _ in count())))
    ),
    "last into the next": with_gaps_that_go_on,
    "do not increase": lambda phases, random: [
        time for phase in phases for time in in_phases([phase], gaps(random.expovariate))
    ],
    "sends requests in a pause": no_time_in_a_pause,
    "but the phases end at": lambda phases, random: [
        *in_phases(phases, gaps(random.expovariate)),
        sum(seconds for seconds, _ in phases) + 0.1,
    ],
    "sets its seed": lambda phases, random: list(in_phases(phases, gaps(Random(1234).expovariate))),
    "another generator": lambda phases, random: list(in_phases(phases, gaps(Random().expovariate))),
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
