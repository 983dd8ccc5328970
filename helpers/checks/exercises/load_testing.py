"""Lesson 7, a load test: the send times of an open loop, its latencies, and the goodput."""

from itertools import accumulate, pairwise
from math import log
from random import Random
from statistics import median

from ..exercise import Exercise

# --- poisson_arrivals -----------------------------------------------------------------------------------------------

poisson_arrivals = Exercise(
    "poisson_arrivals(rate, duration, random)",
    "requests are sent when their users want, in bursts and with pauses, and never wait for an output",
)


@poisson_arrivals.cases
def _(random):
    drawn = random.randint(2, 9), 9.5, random.randrange(10**6)
    for rate, duration, seed in [(0.25, 20.0, 1), (2.0, 6.0, 2), (2.0, 6.0, 3), (8.0, 2.5, 4), (0.1, 0.5, 5), drawn]:
        yield (rate, duration, Random(seed)), f"rate {rate:g}, duration {duration:g}, Random({seed})"


def send_times(rate, duration, random, gap=lambda random, rate: random.expovariate(rate), first=None, late=False):
    """Draw send times, with parts to be broken."""
    times, now = [], gap(random, rate) if first is None else first
    while now < duration:
        times.append(now)
        now += gap(random, rate)
    return [*times, now] if late else times


poisson_arrivals.reference(lambda rate, duration, random: send_times(rate, duration, random))
EVEN = "Users do not know of each other: sometimes several requests come at once, and then none for a while."

for _message, _parts in {
    "sends the first request at 0: there is a gap before it, too.": {"first": 0},
    f"sends at fixed gaps. {EVEN}": {"gap": lambda random, rate: 1 / rate},
    f"sends at fixed gaps, from 0 on. {EVEN}": {"gap": lambda random, rate: 1 / rate, "first": 0},
    "takes `rate` for the mean gap, which is 1 / rate seconds.": {
        "gap": lambda random, rate: random.expovariate(1 / rate)
    },
    "never uses the rate: a gap is one second in the mean.": {"gap": lambda random, rate: random.expovariate(1)},
    "sends a request after the end: all send times are below `duration`.": {"late": True},
    "the gaps are drawn evenly: there is a longest one, and short ones are as rare as long ones. Exponential gaps are "
    "mostly short, and now and then very long.": {"gap": lambda random, rate: random.uniform(0, 2 / rate)},
    "adds a fixed gap to each drawn one.": {"gap": lambda random, rate: 1 / rate + random.expovariate(rate)},
    "draws exponential gaps, but not with `expovariate`: use it, so that a seed gives the same times everywhere.": {
        "gap": lambda random, rate: -log(random.random()) / rate
    },
}.items():
    poisson_arrivals.misconception(_message, lambda *case, _parts=_parts: send_times(*case, **_parts))
for _message, _wrong in {
    "returns the gaps. A request is sent one gap after the one before: add them up.": (
        lambda *case: [b - a for a, b in pairwise([0, *send_times(*case)])]
    ),
    "sends `rate * duration` requests. How many are sent is chance, too: stop when the time is over.": (
        lambda rate, duration, random: list(accumulate(random.expovariate(rate) for _ in range(int(rate * duration))))
    ),
    "spreads `rate * duration` requests evenly over the time. Draw the gaps: then the number is chance, too.": (
        lambda rate, duration, random: sorted(random.uniform(0, duration) for _ in range(int(rate * duration)))
    ),
    "sets the seed. The seed is the caller's: with this one, every test is the same.": (
        lambda rate, duration, random: random.seed(0) or send_times(rate, duration, random)
    ),
}.items():
    poisson_arrivals.misconception(_message, _wrong)


@poisson_arrivals.rule
def draws_from_its_argument(arguments, outcome, right):
    """Report a generator that is left as it was."""
    if right.result and outcome.arguments[2].getstate() == arguments[2].getstate():
        return "never draws from the generator that it is given. With it, the same seed gives the same test"
    return None


# --- open_loop_latencies --------------------------------------------------------------------------------------------

open_loop_latencies = Exercise(
    "open_loop_latencies(arrivals, service_seconds)",
    "a request that waits for others waits from the moment at which it should have been sent",
)


@open_loop_latencies.cases
def _(random):
    drawn = sorted(random.uniform(0, 20) for _ in range(9)), [random.uniform(0.5, 4) for _ in range(9)]
    for what, sent, service in [
        ("a queue that grows and shrinks", [0, 1, 2, 3, 12], [2, 3, 1, 4, 2]),
        ("a server that is never busy", [1, 5, 9], [2, 2, 3]),
        ("a stall", [0.5, 1, 1.5, 2, 2.5, 3], [0.25, 4, 0.25, 0.25, 0.25, 0.25]),
        ("requests sent together", [2, 2, 2], [3, 1, 2]),
        ("one request", [7], [1.5]),
        ("no requests", [], []),
        ("nine requests", *drawn),
    ]:
        sent, service = [float(time) for time in sent], [float(seconds) for seconds in service]
        yield (sent, service), what if len(sent) > 6 else f"{what}: sent at {sent}, service {service}"


def served(arrivals, service_seconds, begin=max, free=lambda sent, end, seconds: end, rank=None):
    """Return (send time, begin, end) for each request, with parts to be broken."""
    waiting, now, times = set(range(len(arrivals))), 0, {}
    while waiting:
        sent = {number for number in waiting if arrivals[number] <= max(now, min(arrivals[n] for n in waiting))}
        number = min(sent, key=rank(service_seconds)) if rank else min(waiting)
        waiting.remove(number)
        start = begin(arrivals[number], now)
        times[number] = arrivals[number], start, start + service_seconds[number]
        now = free(arrivals[number], times[number][2], service_seconds[number])
    return [times[number] for number in range(len(arrivals))]


@open_loop_latencies.reference
def from_intended_send_time(arrivals, service_seconds, **parts):
    return [end - sent for sent, _, end in served(arrivals, service_seconds, **parts)]


for _message, _wrong in {
    "no request ever waits here. That is what a client sees that sends only after the response before: a server that "
    "takes one request at a time makes the next one wait.": lambda sent, service: service,
    "works on a request before it is sent: when no request waits, the server is idle.": (
        lambda *case: from_intended_send_time(*case, begin=lambda sent, now: now)
    ),
    "adds up all work so far. What was done before a request was sent keeps it no longer.": (
        lambda sent, service: list(accumulate(service))
    ),
    "lets a request wait as if the one before had begun at once: that one may have waited, too.": (
        lambda *case: from_intended_send_time(*case, free=lambda sent, end, seconds: sent + seconds)
    ),
    "serves the latest request first. The server takes them in the order in which they are sent.": (
        lambda *case: from_intended_send_time(*case, rank=lambda service: lambda number: -number)
    ),
    "serves the shortest request first. The server takes them in the order in which they are sent.": (
        lambda *case: from_intended_send_time(*case, rank=lambda service: service.__getitem__)
    ),
    "sorts the latencies: they are in the order of their requests.": lambda *case: sorted(
        from_intended_send_time(*case)
    ),
    "reverses the latencies: they are in the order of their requests.": lambda *case: from_intended_send_time(*case)[
        ::-1
    ],
    "counts from the first send time: each request has its own.": lambda a, s: [end - a[0] for *_, end in served(a, s)],
    "takes the time between two responses: while the server is busy, no wait shows in it.": (
        lambda *case: [b - a for a, b in pairwise([0, *(end for *_, end in served(*case))])]
    ),
    "takes the send times for gaps, and adds them up.": lambda a, s: from_intended_send_time(list(accumulate(a)), s),
}.items():
    open_loop_latencies.misconception(_message, _wrong)
for _message, _each in {
    "counts the wait only. Latency goes from the send time to the response.": lambda sent, begin, end: begin - sent,
    "returns when each is done. Latency counts from each request's send time.": lambda sent, begin, end: end,
    "returns when each begins. Wanted is the time from its send time to the response.": lambda sent, begin, end: begin,
    "divides by the service time: wanted are seconds.": lambda sent, begin, end: (end - sent) / (end - begin),
}.items():
    open_loop_latencies.misconception(_message, lambda *case, _each=_each: [_each(*times) for times in served(*case)])

# --- goodput --------------------------------------------------------------------------------------------------------

goodput = Exercise(
    "goodput(requests, seconds, ttft, tpot)",
    "a request counts if it was served in time, and neither a mean nor a refusal hides one that was not",
    forbidden=["helpers.metrics:goodput"],
)


@goodput.cases
def _(random):
    """Yield requests as a send time and the times of their tokens."""
    drawn = ""
    for sent in random.sample(range(40), 30):  # in another order than they were sent
        gaps = [random.choice([0.5, 1.25, 2]), *random.choices([0.125, 0.25, 0.5, 0.75, 1.5], k=4)]
        drawn += f";{sent}: " + " ".join(map(str, list(accumulate(gaps, initial=sent))[1 : random.randint(1, 6)]))
    for what, text, *rest in [
        ("in time or late", "0: 0.5 1 1.5; 1: 3.5 4 4.5; 2: 2.5 4.5 6.5; 3: 3.5 3.75", 4, 1, 0.5),
        ("other limits", "0: 0.5 1 1.5; 1: 3.5 4 4.5; 2: 2.5 4.5 6.5; 3: 3.5 3.75", 8, 2.5, 2),
        ("limits that are just met", "0: 1 1.5 2 2.5; 4: 5 5.25", 10, 1, 0.5),
        ("single tokens", "0: 0.25; 5: 7; 6: 6.5 7; 8: 8.5 10", 10, 1, 0.5),
        ("refused requests", "0: 0.5 1; 1:; 1:; 2:; 3: 3.25 3.5; 3: 3.25 3.5", 5, 1, 0.5),
        ("uneven gaps", "9: 9.5 9.75 10 11.5; 6: 7.5 7.625 7.75 7.875; 8: 8.5 9.25 9.5", 16, 1, 0.5),
        ("a long gap", "0: 0.25 0.5 0.75 1.5 3; 0: 1 1.5 2; 3: 3.5 3.75 4.75", 2, 1, 0.625),
        ("late in several ways", "0: 0.75 1; 1: 1.75 2.375 3; 2: 2.25 2.5 4.5; 3: 5 7; 4: 4.5 4.75 7", 5, 1, 0.5),
        ("refused requests only", "1:; 2:", 4, 1, 1),
        ("no requests", "", 3, 1, 1),
        ("thirty requests", drawn, 50, 1.25, 0.5),
    ]:
        parts = [one.partition(":") for one in text.split(";") if one]
        requests = [(float(sent), [float(time) for time in times.split()]) for sent, _, times in parts]
        shown = f" (send time: token times) {text}" if 0 < len(requests) < 9 else ""
        yield (requests, *rest), f"{what}{shown}, {rest[0]} s, limits {rest[1]} and {rest[2]} s"


def mean_gap(times):
    return (times[-1] - times[0]) / max(len(times) - 1, 1)


def first(sent, times, ttft):
    return bool(times) and times[0] - sent <= ttft


def good(sent, times, ttft, tpot):
    return first(sent, times, ttft) and mean_gap(times) <= tpot


def rate(meets=good, value=lambda number, requests, seconds: number / seconds):
    """Return an implementation that counts the requests that meet a rule of (sent, times, TTFT limit, TPOT limit)."""
    return lambda requests, seconds, *limits: value(
        sum(bool(meets(*one, *limits)) for one in requests), requests, seconds
    )


goodput.reference(rate())
GAPS = "TPOT is the mean of the gaps between tokens, and of gaps there is one fewer than of tokens."

for _message, _wrong in {
    "counts refused requests. Nothing was too late for them, since nothing came.": lambda s, t, *xy: (
        not t or good(s, t, *xy)
    ),
    "takes it for granted that a request has tokens. A refused one has none, and does not count.": (
        lambda s, t, x, y: t[0] - s <= x and mean_gap(t) <= y
    ),
    "leaves out outputs of one token: without a TPOT, only TTFT has a limit.": lambda *one: (
        len(one[1]) > 1 and good(*one)
    ),
    "takes it for granted that there is a second token: with one there is no TPOT, and only TTFT has a limit.": (
        lambda s, t, x, y: first(s, t, x) and (t[-1] - t[0]) / (len(t) - 1) <= y
    ),
    "leaves out requests that just meet a limit: at most means that the limit itself is fine.": (
        lambda s, t, x, y: t and t[0] - s < x and (len(t) < 2 or mean_gap(t) < y)
    ),
    "leaves out a TTFT that just meets its limit.": lambda s, t, x, y: t and t[0] - s < x and mean_gap(t) <= y,
    "leaves out a TPOT that just meets its limit.": lambda s, t, x, y: (
        first(s, t, x) and (mean_gap(t) < y or not t[1:])
    ),
    "is content with one of the limits.": lambda s, t, x, y: t and (first(s, t, x) or mean_gap(t) <= y),
    "looks at the first token only: the others can be too slow.": lambda s, t, x, y: first(s, t, x),
    "never looks at the wait for the first token.": lambda s, t, x, y: t and mean_gap(t) <= y,
    "swaps the limits: the first is for TTFT, the second for TPOT.": lambda s, t, x, y: good(s, t, y, x),
    f"counts the wait for the first token in TPOT. {GAPS}": lambda s, t, x, y: (
        first(s, t, x) and t[-1] - s <= y * len(t)
    ),
    f"counts the wait for the first token in TPOT, as one of its gaps. {GAPS}": (
        lambda s, t, x, y: first(s, t, x) and (len(t) < 2 or t[-1] - s <= y * (len(t) - 1))
    ),
    f"divides by the number of tokens. {GAPS}": lambda s, t, x, y: first(s, t, x) and t[-1] - t[0] <= y * len(t),
    "looks at the longest gap: TPOT is the mean.": (
        lambda s, t, x, y: first(s, t, x) and all(b - a <= y for a, b in pairwise(t))
    ),
    "looks at the median gap: TPOT is the mean.": (
        lambda s, t, x, y: first(s, t, x) and median([b - a for a, b in pairwise(t)] or [0]) <= y
    ),
    "forgives a late first token if the others come fast.": lambda s, t, x, y: t and t[-1] - s <= x + (len(t) - 1) * y,
    "compares the whole request's time with the limit for the first token.": (
        lambda s, t, x, y: t and t[-1] - s <= x and mean_gap(t) <= y
    ),
    "takes a time on the clock for TTFT, which counts from the send time.": lambda s, t, *xy: good(0, t, *xy),
    "counts all requests that were served, in time or not: that is throughput.": lambda s, t, *xy: t,
    "counts all requests that were sent: that is the load.": lambda *one: True,
    "counts requests that miss a limit. Wanted are those that meet both.": lambda s, t, *xy: t and not good(s, t, *xy),
}.items():
    goodput.misconception(_message, rate(_wrong))


@goodput.misconception("judges all requests by their means. Each request meets its limits or misses them.")
def by_means(requests, seconds, ttft, tpot):
    served = [one for one in requests if one[1]]
    waits, gaps = [times[0] - sent for sent, times in served], [mean_gap(times) for _, times in served]
    met = served and sum(waits) <= ttft * len(served) and sum(gaps) <= tpot * len(served)
    return len(served) / seconds if met else 0


SHARE = "gives a share of the requests. It does not say how many per second are served well"
for _message, _value in {
    "gives their number. Wanted is their number per second.": lambda number, requests, seconds: number,
    SHARE: lambda number, requests, seconds: number / max(len(requests), 1),
    f"{SHARE}, and it needs a request to divide by.": lambda number, requests, seconds: number / len(requests),
    f"{SHARE}. It is a percentage.": lambda number, requests, seconds: 100 * number / max(len(requests), 1),
    f"{SHARE}, and leaves out refused requests.": (
        lambda number, requests, seconds: number / max(sum(bool(times) for _, times in requests), 1)
    ),
    "rounds to a whole number: half a request per second is 0.5.": lambda number, requests, seconds: number // seconds,
    "is upside down: wanted are requests per second.": lambda number, requests, seconds: seconds / max(number, 1),
}.items():
    goodput.misconception(_message, rate(value=_value))
