"""Lesson 7, a load test: right answers in other styles, and wrong ones that fail in ways of their own."""

import math
from itertools import accumulate, takewhile
from random import Random

import numpy as np

from answers import right, wrong
from helpers import metrics

# --- poisson_arrivals -----------------------------------------------------------------------------------------------


@right("poisson_arrivals")
def time_goes_on(rate, duration, random):
    times, now = [], 0.0
    while True:
        now += random.expovariate(rate)
        if now >= duration:
            return times
        times.append(now)


@right("poisson_arrivals")
def more_than_enough(rate, duration, random):
    gaps = (random.expovariate(1.0) / rate for _ in range(1000))
    return [time for time in accumulate(gaps) if time < duration]


@right("poisson_arrivals")
def by_the_inverse_of_the_distribution(rate, duration, random):
    """What `expovariate` does."""
    gaps = (-math.log(1 - random.random()) / rate for _ in range(10**6))
    return [np.float32(time) for time in takewhile(lambda time: time < duration, accumulate(gaps))]


@wrong("poisson_arrivals", "never draws from the generator that it is given")
def the_module_s_own_generator(rate, duration, random):
    return time_goes_on(rate, duration, Random())


@wrong("poisson_arrivals", "never draws from the generator that it is given")
def a_generator_of_its_own(rate, duration, random):
    return time_goes_on(rate, duration, Random(1234))


@wrong("poisson_arrivals", "should be a list, and is a filter")
def not_yet_a_list(rate, duration, random):
    return filter(lambda time: time < duration, more_than_enough(rate, duration, random))


@wrong("poisson_arrivals", "should be [")
def numbered_times(rate, duration, random):
    return list(enumerate(time_goes_on(rate, duration, random)))


@wrong("poisson_arrivals", "should be [")
def rounded_times(rate, duration, random):
    return [round(time, 1) for time in time_goes_on(rate, duration, random)]


@wrong("poisson_arrivals", "should be [")
def from_the_last_one(rate, duration, random):
    return time_goes_on(rate, duration, random)[::-1]


# --- open_loop_latencies --------------------------------------------------------------------------------------------


@right("open_loop_latencies")
def by_what_is_left_of_the_wait(arrivals, service_seconds):
    """Lindley's recursion: the next latency is its service and what the gap leaves of the latency before."""
    latencies = []
    for number, seconds in enumerate(service_seconds):
        left = max(0, latencies[-1] - (arrivals[number] - arrivals[number - 1])) if number else 0
        latencies.append(left + seconds)
    return latencies


@right("open_loop_latencies")
def by_the_latest_idle_moment(arrivals, service_seconds):
    return [
        max(arrivals[first] + sum(service_seconds[first : last + 1]) for first in range(last + 1)) - arrivals[last]
        for last in range(len(arrivals))
    ]


@right("open_loop_latencies")
def in_float32(arrivals, service_seconds):
    return [np.float32(latency) for latency in by_what_is_left_of_the_wait(arrivals, service_seconds)]


@wrong("open_loop_latencies", "should be [2.0, 4.0, 4.0, 7.0, 2.0], and is [2.0, 3.0, 1.0, 4.0, 2.0]")
def in_two_rows(arrivals, service_seconds):
    latencies, free = [], [0, 0]
    for sent, seconds in zip(arrivals, service_seconds, strict=True):
        free = [max(sent, min(free)) + seconds, max(free)]
        latencies.append(free[0] - sent)
    return latencies


@wrong("open_loop_latencies", "should be a list, and is a float")
def mean_latency(arrivals, service_seconds):
    latencies = by_what_is_left_of_the_wait(arrivals, service_seconds)
    return sum(latencies) / max(len(latencies), 1)


@wrong("open_loop_latencies", "should be a list, and is a dict")
def latencies_by_arrival(arrivals, service_seconds):
    return dict(zip(arrivals, by_what_is_left_of_the_wait(arrivals, service_seconds), strict=True))


@wrong("open_loop_latencies", "changed its argument: `service_seconds`")
def returned_as_it_is_after_adding(arrivals, service_seconds):
    service_seconds[:] = by_what_is_left_of_the_wait(arrivals, service_seconds)
    return service_seconds


@wrong("open_loop_latencies", "stopped with IndexError")
def a_request_is_always_there(arrivals, service_seconds):
    free, latencies = arrivals[0], []
    for sent, seconds in zip(arrivals, service_seconds, strict=True):
        free = max(free, sent) + seconds
        latencies.append(free - sent)
    return latencies


# --- goodput --------------------------------------------------------------------------------------------------------


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


@wrong("goodput", "calls the course's own `goodput`")
def the_course_s_own(requests, seconds, ttft, tpot):
    served = [metrics.RequestMetrics(None, sent, times) for sent, times in requests if times]
    return metrics.goodput(served, seconds, ttft, tpot)


@wrong("goodput", "stopped with TypeError")
def a_tpot_of_none(requests, seconds, ttft, tpot):
    each = [metrics.RequestMetrics(None, sent, times) for sent, times in requests if times]
    return sum(one.ttft <= ttft and one.tpot <= tpot for one in each) / seconds


@wrong("goodput", "gives a share of the requests")
def divided_by_the_number_of_requests(requests, seconds, ttft, tpot):
    return with_the_course_s_own_times(requests, len(requests), ttft, tpot) if requests else 0


@wrong("goodput", "should be a number, and is a bool")
def whether_there_are_any(requests, seconds, ttft, tpot):
    return with_the_course_s_own_times(requests, seconds, ttft, tpot) > 0


@wrong("goodput", "stopped with IndexError")
def from_the_first_to_the_last_token(requests, seconds, ttft, tpot):
    duration = requests[-1][1][-1] - requests[0][0]
    return with_the_course_s_own_times(requests, duration, ttft, tpot)


@wrong("goodput", "changed its argument: `requests`")
def refused_requests_are_removed(requests, seconds, ttft, tpot):
    requests[:] = [one for one in requests if one[1]]
    return with_the_course_s_own_times(requests, seconds, ttft, tpot)
