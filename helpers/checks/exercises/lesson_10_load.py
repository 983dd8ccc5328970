"""Lesson 10, a load test: the send times of an open loop, its latencies, and the goodput."""

from collections.abc import Callable
from itertools import accumulate, pairwise
from numbers import Real
from random import Random
from statistics import median, pstdev

from ..comparing import kind
from ..exercise import Exercise, JudgedExercise, Wrong

EVEN = "Users send independently of each other: sometimes several requests arrive at once, and then none for a while"
SLOW, PAUSE, FAST = (2000.0, 0.5), (100.0, 0), (500.0, 4.0)
SHORT = 400  # phases


def are_poisson_arrivals(arrivals: Callable, seed: int) -> str | None:
    """Judge send times by their statistics, since gaps can be drawn in many ways. All seeds try the same phases."""

    def times_of(phases: list, number: int = 1) -> list[list[float]]:
        """Return the times in each phase, from its start."""
        told = f"{str(phases[:4])[:-1]}{', ...' * (len(phases) > 4)}], Random({number})"
        times = arrivals(phases, Random(number), given=told)
        if not isinstance(times, list | tuple) or not all(isinstance(one, Real) for one in times):
            raise Wrong(f"should return a list of times, but returned {kind(times)} (given: {told}).")
        if list(times) != sorted(times):
            raise Wrong(f"returns times that do not increase: are these gaps, or does each phase begin at 0? ({told})")
        starts = list(accumulate((seconds for seconds, _ in phases), initial=0))
        if times and not 0 <= times[0] <= times[-1] < starts[-1]:
            raise Wrong(f"sends a request at {times[-1]:.5g}, but the phases end at {starts[-1]:g} ({told})")
        inside = [[time - a for time in times if a <= time < b] for a, b in pairwise(starts)]
        for place, (_, rate) in enumerate(phases):
            if inside[place] and not rate:
                raise Wrong(f"sends requests in a pause: from {starts[place]:g} on, the rate is 0 ({told})")
        return inside

    for phases in ([(5.0, 0)], [(2.0, 0), (4.0, 5.0), (3.0, 0), (4.0, 1.0)], [(0.5, 0.1), (0.25, 9.0)], []):
        times_of(phases)
    slow, _, fast = times_of([SLOW, PAUSE, FAST])
    for (seconds, rate), times in ((SLOW, slow), (FAST, fast)):
        if abs(len(times) - seconds * rate) > 5 * (seconds * rate) ** 0.5:
            return (
                f"sends {len(times)} requests in {seconds:g} seconds at a rate of {rate:g} per second. The mean gap is "
                "1 / rate, and a rate belongs to its phase"
            )
        gaps = [later - time for time, later in pairwise(times)]
        spread = pstdev(gaps) * rate  # of exponential gaps: 1
        if not 0.85 < spread < 1.15:
            what = "at fixed intervals" if spread < 0.05 else "at intervals that are too even"
            return f"sends {what if spread < 1 else 'too irregularly'}: draw exponential gaps. {EVEN}"
    counts = list(map(len, times_of([(2.0, 1.0)] * SHORT)))
    if pstdev(counts) < 1:  # sqrt(2)
        return f"sends nearly the same number of requests in every phase. {EVEN}, so their number is random, too"
    firsts = [times[0] for times in times_of([(2.0, 1.0)] * SHORT) if times]
    soon = sum(first < 0.1 for first in firsts)
    if soon > SHORT / 4:
        return "sends the first request of a phase at its start: there is a gap before it, too"
    slow, fast = (list(map(len, counts)) for counts in _halves(times_of([(2.0, 0.1), (2.0, 10.0)] * (SHORT // 2))))
    if sum(fast) < 0.9 * 10 * SHORT or sum(slow) > 0.3 * SHORT:
        return (
            "lets a gap that was drawn at one phase's rate last into the next: where a fast phase follows a slow one, "
            "requests are missing. Each phase begins with a new gap, at its own rate"
        )
    if times_of([FAST], 1) == times_of([FAST], 2):
        return "never draws from the generator that it is given, or sets its seed. The seed is the caller's"
    if times_of([FAST], 1) != times_of([FAST], 1):
        return "draws from another generator than the one it is given: the same seed must give the same test"
    return None


def _halves(values: list) -> tuple[list, list]:
    return values[::2], values[1::2]


poisson_arrivals = JudgedExercise(
    "poisson_arrivals(phases, random)",
    "requests arrive in bursts and with pauses, at the rate of the hour, and do not wait for earlier outputs",
    are_poisson_arrivals,
)

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
        ("requests sent together", [2, 2, 2], [3, 1, 2]), ("one request", [7], [1.5]), ("no requests", [], []),
        ("nine requests", *drawn),
    ]:  # fmt: skip
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
    "starts a request before it is sent: when no request waits, the server is idle.": {"begin": lambda sent, now: now},
    "adds up all service times so far. Work that ends before a request is sent does not delay it.":
        lambda sent, service: list(accumulate(service)),
    "assumes that the previous request started when it was sent: it may have waited, too.":
        {"free": lambda sent, end, seconds: sent + seconds},
    "serves the latest request first. The server runs requests in the order in which they are sent.":
        {"rank": lambda service: lambda number: -number},
    "serves the shortest request first. The server runs requests in the order in which they are sent.":
        {"rank": lambda service: service.__getitem__},
    "sorts the latencies: they must be in the order of the requests.":
        lambda *case: sorted(from_intended_send_time(*case)),
    "reverses the latencies: they must be in the order of the requests.":
        lambda *case: from_intended_send_time(*case)[::-1],
    "counts from the first send time: each request has its own.": lambda a, s: [end - a[0] for *_, end in served(a, s)],
    "returns the time between responses, which does not include the wait.":
        lambda *case: [b - a for a, b in pairwise([0, *(end for *_, end in served(*case))])],
    "treats the send times as gaps, and adds them up.": lambda a, s: from_intended_send_time(list(accumulate(a)), s),
})  # fmt: skip
for _message, _each in {
    "counts only the wait. Latency lasts from the send time to the response.": lambda sent, begin, end: begin - sent,
    "returns the time of each response. Latency counts from the send time of each request.":
        lambda sent, begin, end: end,
    "returns the time at which each request starts. Latency lasts from the send time to the "
    "response.": lambda sent, begin, end: begin,
    "divides by the service time: the task asks for seconds.": lambda sent, begin, end: (end - sent) / (end - begin),
}.items():  # fmt: skip
    open_loop_latencies.misconception(_message, lambda *case, _each=_each: [_each(*times) for times in served(*case)])

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
        ("one request, in time", "3: 3.5 4 4.5", 4, 1, 0.5),
        ("one request, its first token is late", "3: 4.5 4.75 5", 4, 1, 0.5),
        ("one request, its tokens are slow", "3: 3.25 4 5", 4, 1, 0.5),
        ("one request, a long wait and fast tokens", "1: 4 4.125 4.25 4.375", 4, 1, 1),
        ("one request, refused", "3:", 4, 1, 0.5), ("one request, a single token in time", "3: 4", 4, 1, 0.5),
        ("one request, a single token too late", "3: 4.25", 4, 1, 0.5),
        ("one request, one long gap among short ones", "3: 3.5 3.75 5 5.25", 4, 1, 0.75),
        ("one request, limits that are exactly met", "3: 4 4.5 5", 4, 1, 0.5),
        ("in time or late", "0: 0.5 1 1.5; 1: 3.5 4 4.5; 2: 2.5 4.5 6.5; 3: 3.5 3.75", 4, 1, 0.5),
        ("other limits", "0: 0.5 1 1.5; 1: 3.5 4 4.5; 2: 2.5 4.5 6.5; 3: 3.5 3.75", 8, 2.5, 2),
        ("limits that are exactly met", "0: 1 1.5 2 2.5; 4: 5 5.25", 10, 1, 0.5),
        ("single tokens", "0: 0.25; 5: 7; 6: 6.5 7; 8: 8.5 10", 10, 1, 0.5),
        ("refused requests", "0: 0.5 1; 1:; 1:; 2:; 3: 3.25 3.5; 3: 3.25 3.5", 5, 1, 0.5),
        ("uneven gaps", "9: 9.5 9.75 10 11.5; 6: 7.5 7.625 7.75 7.875; 8: 8.5 9.25 9.5", 16, 1, 0.5),
        ("a long gap", "0: 0.25 0.5 0.75 1.5 3; 0: 1 1.5 2; 3: 3.5 3.75 4.75", 2, 1, 0.625),
        ("late in several ways", "0: 0.75 1; 1: 1.75 2.375 3; 2: 2.25 2.5 4.5; 3: 5 7; 4: 4.5 4.75 7", 5, 1, 0.5),
        ("refused requests only", "1:; 2:", 4, 1, 1), ("no requests", "", 3, 1, 1),
        ("thirty requests", drawn, 50, 1.25, 0.5),
    ]:  # fmt: skip
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
    "counts refused requests. No token of theirs was late, but only because they got none.":
        lambda s, t, *xy: not t or good(s, t, *xy),
    "assumes that every request has tokens. A refused one has none, and does not count.":
        lambda s, t, x, y: t[0] - s <= x and mean_gap(t) <= y,
    "leaves out outputs of one token: without a TPOT, only TTFT has a limit.":
        lambda *one: len(one[1]) > 1 and good(*one),
    "assumes that there is a second token: an output of one token has no TPOT, and only TTFT has a limit.":
        lambda s, t, x, y: first(s, t, x) and (t[-1] - t[0]) / (len(t) - 1) <= y,
    "leaves out requests that exactly meet a limit: *at most* includes the limit itself.":
        lambda s, t, x, y: t and t[0] - s < x and (len(t) < 2 or mean_gap(t) < y),
    "leaves out a TTFT that exactly meets its limit.": lambda s, t, x, y: t and t[0] - s < x and mean_gap(t) <= y,
    "leaves out a TPOT that exactly meets its limit.":
        lambda s, t, x, y: first(s, t, x) and (mean_gap(t) < y or not t[1:]),
    "counts requests that meet one limit: both must be met.":
        lambda s, t, x, y: t and (first(s, t, x) or mean_gap(t) <= y),
    "checks TTFT only: the later tokens can be too slow.": lambda s, t, x, y: first(s, t, x),
    "checks TPOT only: the first token can be too late.": lambda s, t, x, y: t and mean_gap(t) <= y,
    "swaps the limits: the first is for TTFT, the second for TPOT.": lambda s, t, x, y: good(s, t, y, x),
    f"includes the wait for the first token in TPOT. {GAPS}":
        lambda s, t, x, y: first(s, t, x) and t[-1] - s <= y * len(t),
    f"includes the wait for the first token in TPOT, as one of its gaps. {GAPS}":
        lambda s, t, x, y: first(s, t, x) and (len(t) < 2 or t[-1] - s <= y * (len(t) - 1)),
    f"divides by the number of tokens. {GAPS}": lambda s, t, x, y: first(s, t, x) and t[-1] - t[0] <= y * len(t),
    "compares the longest gap: TPOT is the mean gap.":
        lambda s, t, x, y: first(s, t, x) and all(b - a <= y for a, b in pairwise(t)),
    "compares the median gap: TPOT is the mean gap.":
        lambda s, t, x, y: first(s, t, x) and median([b - a for a, b in pairwise(t)] or [0]) <= y,
    "lets fast tokens make up for a late first one: TTFT has its own limit.":
        lambda s, t, x, y: t and t[-1] - s <= x + (len(t) - 1) * y,
    "compares the latency of the whole request with the TTFT limit.":
        lambda s, t, x, y: t and t[-1] - s <= x and mean_gap(t) <= y,
    "uses the time of the first token as TTFT, which counts from the send time.": lambda s, t, *xy: good(0, t, *xy),
    "counts all requests that were served, in time or not: that is throughput.": lambda s, t, *xy: t,
    "counts all requests that were sent: that is the offered load.": lambda *one: True,
    "counts requests that miss a limit: the task asks for those that meet both.":
        lambda s, t, *xy: t and not good(s, t, *xy),
}.items():  # fmt: skip
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
