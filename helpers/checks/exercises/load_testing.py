"""Lesson 7, a load test: the send times of an open loop, its latencies, and the goodput."""

from itertools import accumulate, pairwise
from math import log
from random import Random
from statistics import median

from ..exercise import Exercise

# --- poisson_arrivals -----------------------------------------------------------------------------------------------

poisson_arrivals = Exercise(
    "poisson_arrivals(phases, random)",
    "requests arrive in bursts and with pauses, at the rate of the hour, and do not wait for earlier outputs",
)


@poisson_arrivals.cases
def _(random):
    drawn = [(random.randint(1, 4), random.choice([1, 3, 7])) for _ in range(4)]
    for phases, seed in [
        ([(20.0, 0.25)], 1),
        ([(6.0, 2.0), (3.0, 8.0)], 2),
        ([(3.0, 3.0), (4.0, 0), (2.5, 6.0)], 3),
        ([(2.0, 0), (4.0, 5.0), (4.0, 1.0)], 4),
        ([(0.5, 0.1), (0.25, 9.0), (8.0, 1.0)], 5),
        ([(5.0, 0)], 6),
        (drawn, random.randrange(10**6)),
    ]:
        yield (phases, Random(seed)), f"phases {phases}, Random({seed})"


@poisson_arrivals.reference
def send_times(
    phases,
    random,
    gap=lambda random, rate: random.expovariate(rate),
    first=False,
    late=False,
    rate_of=lambda rate, phases: rate,
    anew=True,
    clock=lambda start: start,
):
    """Draw send times, with replaceable parts."""
    times, start, after = [], 0, 0
    for seconds, own_rate in phases:
        if not anew and after > start:  # the gap that was drawn in an earlier phase goes on
            if after < start + seconds:
                times.append(after)
            now = after
        else:
            now = start
            if first and own_rate:
                times.append(now)
        if rate := rate_of(own_rate, phases):
            while now < start + seconds and (now := now + gap(random, rate)) < start + seconds:
                times.append(now)
            after = now
            if late:
                times.append(now)
        start = clock(start + seconds)
    return times


EVEN = "Users send independently of each other: sometimes several requests arrive at once, and then none for a while."
ONE_PHASE = "A rate belongs to its phase"


def mean_rate(rate, phases):
    return sum(seconds * each for seconds, each in phases) / sum(seconds for seconds, _ in phases)


poisson_arrivals.add_misconceptions({
    "sends the first request of a phase at its start: there is a gap before it, too.": {"first": True},
    f"sends at fixed intervals. {EVEN}": {"gap": lambda random, rate: 1 / rate},
    f"sends at fixed intervals, from the start on. {EVEN}": {"gap": lambda random, rate: 1 / rate, "first": True},
    "uses `rate` as the mean gap, which is 1 / rate seconds.": {
        "gap": lambda random, rate: random.expovariate(1 / rate)
    },
    "ignores the rate: its mean gap is one second.": {"gap": lambda random, rate: random.expovariate(1)},
    "sends a request after the end of a phase: that gap is dropped.": {"late": True},
    "draws gaps from a uniform distribution, in which short gaps are as rare as long ones. Exponential gaps are "
    "mostly short, and now and then very long.": {"gap": lambda random, rate: random.uniform(0, 2 / rate)},
    "adds a fixed gap to each drawn one: no two requests could arrive almost together.": {
        "gap": lambda random, rate: 1 / rate + random.expovariate(rate)
    },
    "draws exponential gaps, but not with `expovariate`: then a seed does not give the same times everywhere.": {
        "gap": lambda random, rate: -log(random.random()) / rate
    },
    f"uses the mean rate of all phases. {ONE_PHASE}: a busy hour is not the day's average.": {"rate_of": mean_rate},
    f"uses the first rate for all phases. {ONE_PHASE}.": {"rate_of": lambda rate, phases: phases[0][1]},
    "lets a gap that was drawn at one phase's rate last into the next. Each phase begins with a new gap, at its own "
    "rate.": {"anew": False},
    "starts every phase at 0: a phase begins when the one before it is over.": {"clock": lambda start: 0},
    "returns the gaps: the task asks for the time at which each request is sent.": (
        lambda *case: [b - a for a, b in pairwise([0, *send_times(*case)])]
    ),
    "sends exactly `rate * seconds` requests. Their number is random, too: a phase ends when its time is over.": (
        lambda phases, random: list(
            accumulate(random.expovariate(rate) for seconds, rate in phases for _ in range(int(rate * seconds)))
        )
    ),
    "spreads exactly `rate * seconds` requests over a phase. The gaps are random, and so is the number of requests.": (
        lambda phases, random: [
            start + each
            for (seconds, rate), start in zip(phases, accumulate((s for s, _ in phases), initial=0), strict=False)
            for each in sorted(random.uniform(0, seconds) for _ in range(int(rate * seconds)))
        ]
    ),
    "sets the seed, which belongs to the caller: every test would be the same.": (
        lambda phases, random: random.seed(0) or send_times(phases, random)
    ),
    "divides by a rate of 0: in a pause, no request is sent, and no gap is drawn.": (
        lambda phases, random: [random.expovariate(1 / rate) for _, rate in phases] and send_times(phases, random)
    ),
})  # fmt: skip


@poisson_arrivals.rule
def draws_from_its_argument(arguments, outcome, right):
    """Report a generator that was not used."""
    if right.result and outcome.arguments[1].getstate() == arguments[1].getstate():
        return "never draws from the generator that it is given. With it, the same seed gives the same test"
    return None


# --- open_loop_latencies --------------------------------------------------------------------------------------------

open_loop_latencies = Exercise(
    "open_loop_latencies(arrivals, service_seconds)",
    "latency starts at the intended send time, so it includes the time that a request waits for others",
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
    """Return (send time, begin, end) for each request, with replaceable parts."""
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


open_loop_latencies.add_misconceptions({
    "returns the service times: a closed loop would measure just that. In an open loop, a request also waits while "
    "the server is busy with earlier ones.": lambda sent, service: service,
    "starts a request before it is sent: when no request waits, the server is idle.": {
        "begin": lambda sent, now: now
    },
    "adds up all service times so far. Work that ends before a request is sent does not delay it.": (
        lambda sent, service: list(accumulate(service))
    ),
    "assumes that the previous request started when it was sent: it may have waited, too.": {
        "free": lambda sent, end, seconds: sent + seconds
    },
    "serves the latest request first. The server runs requests in the order in which they are sent.": {
        "rank": lambda service: lambda number: -number
    },
    "serves the shortest request first. The server runs requests in the order in which they are sent.": {
        "rank": lambda service: service.__getitem__
    },
    "sorts the latencies: they must be in the order of the requests.": lambda *case: sorted(
        from_intended_send_time(*case)
    ),
    "reverses the latencies: they must be in the order of the requests.": lambda *case: from_intended_send_time(*case)[
        ::-1
    ],
    "counts from the first send time: each request has its own.": lambda a, s: [end - a[0] for *_, end in served(a, s)],
    "returns the time between responses, which does not include the wait.": (
        lambda *case: [b - a for a, b in pairwise([0, *(end for *_, end in served(*case))])]
    ),
    "treats the send times as gaps, and adds them up.": lambda a, s: from_intended_send_time(list(accumulate(a)), s),
})  # fmt: skip
for _message, _each in {
    "counts only the wait. Latency lasts from the send time to the response.": lambda sent, begin, end: begin - sent,
    "returns the time of each response. Latency counts from the send time of each request.": lambda sent, begin, end: (
        end
    ),
    "returns the time at which each request starts. Latency lasts from the send time to the "
    "response.": lambda sent, begin, end: begin,
    "divides by the service time: the task asks for seconds.": lambda sent, begin, end: (end - sent) / (end - begin),
}.items():
    open_loop_latencies.misconception(_message, lambda *case, _each=_each: [_each(*times) for times in served(*case)])

# --- goodput --------------------------------------------------------------------------------------------------------

goodput = Exercise(
    "goodput(requests, seconds, ttft, tpot)",
    "only requests that are served in time count, and neither a mean nor a refusal hides the others",
    forbidden=["helpers.metrics:goodput"],
)


@goodput.cases
def _(random):
    """Yield requests as a send time and the times of their tokens."""
    drawn = ""
    for sent in random.sample(range(40), 30):  # not in the order in which they were sent
        gaps = [random.choice([0.5, 1.25, 2]), *random.choices([0.125, 0.25, 0.5, 0.75, 1.5], k=4)]
        drawn += f";{sent}: " + " ".join(map(str, list(accumulate(gaps, initial=sent))[1 : random.randint(1, 6)]))
    for what, text, *rest in [
        ("in time or late", "0: 0.5 1 1.5; 1: 3.5 4 4.5; 2: 2.5 4.5 6.5; 3: 3.5 3.75", 4, 1, 0.5),
        ("other limits", "0: 0.5 1 1.5; 1: 3.5 4 4.5; 2: 2.5 4.5 6.5; 3: 3.5 3.75", 8, 2.5, 2),
        ("limits that are exactly met", "0: 1 1.5 2 2.5; 4: 5 5.25", 10, 1, 0.5),
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
GAPS = "TPOT is the mean gap between tokens, and there is one gap fewer than there are tokens."

for _message, _wrong in {
    "counts refused requests. No token of theirs was late, but only because they got none.": lambda s, t, *xy: (
        not t or good(s, t, *xy)
    ),
    "assumes that every request has tokens. A refused one has none, and does not count.": (
        lambda s, t, x, y: t[0] - s <= x and mean_gap(t) <= y
    ),
    "leaves out outputs of one token: without a TPOT, only TTFT has a limit.": lambda *one: (
        len(one[1]) > 1 and good(*one)
    ),
    "assumes that there is a second token: an output of one token has no TPOT, and only TTFT has a limit.": (
        lambda s, t, x, y: first(s, t, x) and (t[-1] - t[0]) / (len(t) - 1) <= y
    ),
    "leaves out requests that exactly meet a limit: *at most* includes the limit itself.": (
        lambda s, t, x, y: t and t[0] - s < x and (len(t) < 2 or mean_gap(t) < y)
    ),
    "leaves out a TTFT that exactly meets its limit.": lambda s, t, x, y: t and t[0] - s < x and mean_gap(t) <= y,
    "leaves out a TPOT that exactly meets its limit.": lambda s, t, x, y: (
        first(s, t, x) and (mean_gap(t) < y or not t[1:])
    ),
    "counts requests that meet one limit: both must be met.": lambda s, t, x, y: (
        t and (first(s, t, x) or mean_gap(t) <= y)
    ),
    "checks TTFT only: the later tokens can be too slow.": lambda s, t, x, y: first(s, t, x),
    "checks TPOT only: the first token can be too late.": lambda s, t, x, y: t and mean_gap(t) <= y,
    "swaps the limits: the first is for TTFT, the second for TPOT.": lambda s, t, x, y: good(s, t, y, x),
    f"includes the wait for the first token in TPOT. {GAPS}": lambda s, t, x, y: (
        first(s, t, x) and t[-1] - s <= y * len(t)
    ),
    f"includes the wait for the first token in TPOT, as one of its gaps. {GAPS}": (
        lambda s, t, x, y: first(s, t, x) and (len(t) < 2 or t[-1] - s <= y * (len(t) - 1))
    ),
    f"divides by the number of tokens. {GAPS}": lambda s, t, x, y: first(s, t, x) and t[-1] - t[0] <= y * len(t),
    "compares the longest gap: TPOT is the mean gap.": (
        lambda s, t, x, y: first(s, t, x) and all(b - a <= y for a, b in pairwise(t))
    ),
    "compares the median gap: TPOT is the mean gap.": (
        lambda s, t, x, y: first(s, t, x) and median([b - a for a, b in pairwise(t)] or [0]) <= y
    ),
    "lets fast tokens make up for a late first one: TTFT has its own limit.": lambda s, t, x, y: (
        t and t[-1] - s <= x + (len(t) - 1) * y
    ),
    "compares the latency of the whole request with the TTFT limit.": (
        lambda s, t, x, y: t and t[-1] - s <= x and mean_gap(t) <= y
    ),
    "uses the time of the first token as TTFT, which counts from the send time.": lambda s, t, *xy: good(0, t, *xy),
    "counts all requests that were served, in time or not: that is throughput.": lambda s, t, *xy: t,
    "counts all requests that were sent: that is the offered load.": lambda *one: True,
    "counts requests that miss a limit: the task asks for those that meet both.": lambda s, t, *xy: (
        t and not good(s, t, *xy)
    ),
}.items():
    goodput.misconception(_message, rate(_wrong))


@goodput.misconception(
    "compares the means of all requests with the limits. Each request meets its limits or misses them."
)
def by_means(requests, seconds, ttft, tpot):
    served = [one for one in requests if one[1]]
    waits, gaps = [times[0] - sent for sent, times in served], [mean_gap(times) for _, times in served]
    met = served and sum(waits) <= ttft * len(served) and sum(gaps) <= tpot * len(served)
    return len(served) / seconds if met else 0


SHARE = "returns a share of the requests, which does not say how many per second are served in time."
for _message, _value in [
    (SHARE, lambda number, requests, seconds: number / max(len(requests), 1)),
    (SHARE, lambda number, requests, seconds: number / len(requests)),
    (SHARE, lambda number, requests, seconds: 100 * number / max(len(requests), 1)),
    (SHARE, lambda number, requests, seconds: number / max(sum(bool(times) for _, times in requests), 1)),
    ("returns the number of requests: the task asks for requests per second.", lambda number, *_: number),
    ("rounds to a whole number: half a request per second is 0.5.", lambda number, _, seconds: number // seconds),
    ("returns seconds per request, the inverse of goodput.", lambda number, _, seconds: seconds / max(number, 1)),
]:
    goodput.misconception(_message, rate(value=_value))
