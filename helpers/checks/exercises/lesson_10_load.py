"""Lesson 10, load: latencies and goodput of an open loop, and a bounded queue."""

from itertools import accumulate
from math import ceil

from ..exercise import Exercise
from ..queues import first_mistake, run_story


@Exercise.declare("latency starts at the intended send time, so it includes the time that a request waits for others")
def open_loop_latencies(arrivals, service_seconds):
    free, latencies = 0.0, []
    for sent, seconds in zip(arrivals, service_seconds, strict=True):
        begin = max(sent, free)
        latencies.append(begin + seconds - sent)
        free = begin + seconds
    return latencies


open_loop_latencies.table([
    ("a queue that grows and shrinks", [0.0, 1.0, 2.0, 3.0, 12.0], [2.0, 3.0, 1.0, 4.0, 2.0]),
    ("a server that is never busy", [1.0, 5.0, 9.0], [2.0, 2.0, 3.0]),
    ("a stall", [0.5, 1.0, 1.5, 2.0, 2.5, 3.0], [0.25, 4.0, 0.25, 0.25, 0.25, 0.25]),
    ("requests sent together", [2.0, 2.0, 2.0], [3.0, 1.0, 2.0]), ("one request", [7.0], [1.5]),
    ("no requests", [], []),
], lambda random: [
    ("nine requests", sorted(random.uniform(0, 20) for _ in range(9)), [random.uniform(0.5, 4) for _ in range(9)])
], given="sent at {}, service {}")  # fmt: skip


LATENCY = "begin + seconds - sent"
open_loop_latencies.add_misconceptions({
    "returns the service times: a closed loop would measure just that. In an open loop, a request also waits while "
    "the server is busy with earlier ones.": f"{LATENCY} -> seconds",
    "starts a request before it is sent: when no request waits, the server is idle.": "max(sent, free) -> free",
    "adds up all service times so far. Work that ends before a request is sent does not delay it.":
        lambda sent, service: list(accumulate(service)),
    "assumes that the previous request started when it was sent: it may have waited, too.": "= begin -> = sent",
    "counts only the wait. Latency lasts from the send time to the response.": f"{LATENCY} -> begin - sent",
    "returns the time of each response. Latency counts from the send time of each request.": " - sent -> ",
})  # fmt: skip


@Exercise.declare(
    "only requests that are served in time count, and neither a mean nor a refusal hides the others",
    forbidden=["helpers.metrics:goodput"],
)
def goodput(requests, seconds, ttft, tpot):
    good = 0
    for sent, t in requests:
        if t and t[0] - sent <= ttft and (t[-1] - t[0]) / max(1, len(t) - 1) <= tpot:
            good += 1
    return good / seconds


def _requests(text):
    """Return (send time, times of its tokens) for each request of a text such as "0: 0.5 1; 2:"."""
    parts = [part.partition(":") for part in text.split(";") if part]
    return [(float(sent), [float(time) for time in times.split()]) for sent, _, times in parts]


def _drawn_requests(random):
    text = ""
    for sent in random.sample(range(40), 30):  # not in the order in which they were sent
        gaps = [random.choice([0.5, 1.25, 2]), *random.choices([0.125, 0.25, 0.5, 0.75, 1.5], k=4)]
        text += f";{sent}: " + " ".join(map(str, list(accumulate(gaps, initial=sent))[1 : random.randint(1, 6)]))
    return text


goodput.table([
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
    ("a little too slow, or too late", "0: 0.5 1 1.5625; 1: 2.0625 2.5", 4, 1, 0.5),
    ("limits that are exactly met", "0: 1 1.5 2 2.5; 4: 5 5.25", 10, 1, 0.5),
    ("single tokens", "0: 0.25; 5: 7; 6: 6.5 7; 8: 8.5 9.25", 10, 1, 0.5),
    ("refused requests", "0: 0.5 1; 1:; 1:; 2:; 3: 3.25 3.5; 3: 3.25 3.5", 5, 1, 0.5),
    ("uneven gaps", "9: 9.5 9.75 10 11.5; 6: 7.5 7.625 7.75 7.875; 8: 8.5 9.25 9.5", 16, 1, 0.5),
    ("a long gap", "0: 0.25 0.5 0.75 1.5 3; 0: 1 1.5 2; 3: 3.5 3.75 4.75", 2, 1, 0.625),
    ("late in several ways", "0: 0.75 1; 1: 1.75 2.375 3; 2: 2.25 2.5 4.5; 3: 5 7; 4: 4.5 4.75 7", 5, 1, 0.5),
    ("refused requests only", "1:; 2:", 4, 1, 1), ("no requests", "", 3, 1, 1),
], lambda random: [("thirty requests", _drawn_requests(random), 50, 1.25, 0.5)],
   given="(send time: token times) {}, {} s, limits {} and {} s",
   build=lambda random, text, *limits: (_requests(text), *limits))  # fmt: skip

MEAN_GAP = "(t[-1] - t[0]) / max(1, len(t) - 1)"
BOTH = f"t[0] - sent <= ttft and {MEAN_GAP} <= tpot"
goodput.add_misconceptions({
    "counts refused requests. No token of theirs was late, but only because they got none.": "if t and -> if not t or",
    "leaves out requests that exactly meet a limit: *at most* includes the limit itself.": "<= -> <",
    "compares one of the two values with its limit: a request in time meets both limits.":
        [f"{BOTH} -> {condition}" for condition in BOTH.split(" and ")],
    "counts the wait for the first token as one of the gaps: TPOT begins with the first token.":
        "(t[-1] - t[0]) -> (t[-1] - sent)",
    "swaps the limits: the first is for TTFT, the second for TPOT.": "good = -> ttft, tpot = tpot, ttft; good =",
    "divides by the number of tokens. TPOT is the mean gap, and there is one gap fewer than there are tokens.":
        [f"{MEAN_GAP} -> (t[-1] - sent) / len(t)", "max(1, len(t) - 1) -> len(t)"],
    "counts all requests that were served, in time or not: that is throughput.": f" and {BOTH} -> ",
    "compares the longest gap with the limit: TPOT is the mean gap, so a long one among short ones can be within it.":
        f"{MEAN_GAP} -> max([b - a for a, b in pairwise(t)], default=0)",
    "leaves out requests of one token: they have no TPOT, and only TTFT has a limit.": "if t and -> if t[1:] and",
    "compares the means of all requests with the limits. Each request meets its limits or misses them.":
        f"{BOTH} -> statistics.mean(t[0] - sent for sent, t in requests if t) <= ttft "
        f"and statistics.mean({MEAN_GAP} for _, t in requests if t) <= tpot",
    "returns a share of the requests, which does not say how many per second are served in time.":
        [f"good / seconds -> {share}" for share in (
            "good / max(1, len(requests))", "good / len(requests)", "100 * good / max(1, len(requests))",
            "good / max(1, sum(bool(t) for _, t in requests))")],
    "assumes that every request has tokens. A refused one has none, and does not count.": "if t and -> if",
    "assumes that there is a second token: an output of one token has no TPOT, and only TTFT has a limit.":
        "max(1, len(t) - 1) -> (len(t) - 1)",
})  # fmt: skip


@Exercise.declare(
    "the queue holds no more requests than can be served in time, and a request leaves once, for whatever reason",
    observe=run_story,
)
class BoundedQueue:
    def __init__(self, rows, max_queue, seconds):
        self.rows, self.max_queue, self.seconds = rows, max_queue, seconds
        self.running, self.waiting = [], []

    def offer(self, request_id):
        if len(self.running) < self.rows:
            self.running.append(request_id)
        elif len(self.waiting) < self.max_queue:
            self.waiting.append(request_id)
        else:
            return ceil(self.seconds / self.rows)
        return 0

    def leave(self, request_id):
        if request_id in self.waiting:
            self.waiting.remove(request_id)
        elif request_id in self.running:
            self.running.remove(request_id)
            self.running += self.waiting[:1]
            del self.waiting[:1]


def _steps(random, rows, max_queue, seconds, story):
    """Return the arguments of a story in which a minus precedes a request that leaves. One of the ids is 0."""
    queue, steps = BoundedQueue.solution(rows, max_queue, seconds), []
    for step in story.split():
        event, name = "leave" if step[0] == "-" else "offer", 0 if step.strip("-") == "0" else step.strip("-")
        if event == "leave" or name not in queue.running + queue.waiting:  # what has a place is not offered again
            steps.append((event, name))
            getattr(queue, event)(name)
    return rows, max_queue, seconds, steps


def _drawn(random):
    letters = random.sample("abcdefghijklmnopqrstuvwxyz", 9)
    story = " ".join(random.choice(["", "-"]) + random.choice(letters) for _ in range(60))
    return [("a long story", random.randint(1, 3), random.randint(0, 3), random.choice([1, 2.5, 7, 40]), story)]


BoundedQueue.table([
    ("requests that fill the rows and the queue", 3, 2, 10, "d c b a 0 e f"),
    ("a running request leaves", 2, 3, 6, "d c b a -c"), ("a waiting request leaves", 2, 3, 6, "d c b 0 -0 a -b -d e"),
    ("a refused request leaves", 1, 2, 7.005, "d c b a -a 0 e"),
    ("a request leaves twice", 2, 3, 5.5, "d c b -c -c a 0 -a -a e f g"),
    ("a refused request is offered again", 4, 1, 1, "f e d c b 0 -c 0 -b g"),
    ("no places in the queue", 1, 0, 3, "b a -a -b c 0 b"), ("an empty queue", 3, 2, 10, "-z f -d -f -f a"),
    ("a long story", 2, 3, 6, "d c b a 0 e f -b f g -g h -e i -e j -d -d k l -c -a -f -i -k m -m n o p"),
], _drawn, given="rows {}, max_queue {}, seconds {}", build=_steps)  # fmt: skip

RETRY = "ceil(self.seconds / self.rows)"
BoundedQueue.add_misconceptions({
    "assumes that a request that leaves has a place. It may have left before, or may have been refused: then "
    "nothing happens.": "elif request_id in self.running -> else",
    "does not divide by the number of rows: each is busy for `seconds`, but any of them will do.":
        [f"{RETRY} -> ceil(self.seconds)", f"{RETRY} -> ceil(self.seconds * self.rows)"],
    "rounds down, or to the nearest second: a client that retries too early is refused again.":
        [f"{RETRY} -> max(1, {rounded}(self.seconds / self.rows))" for rounded in ("int", "round")],
    "waits until the queue is empty. Each request that finishes makes room for another.":
        [f"{RETRY} -> max(1, ceil(len({line}) * self.seconds / self.rows))"
         for line in ("self.waiting", "self.waiting + self.running")],
})  # fmt: skip


@BoundedQueue.rule
def keeps_its_promises(arguments, outcome, right):
    got = outcome.result
    return got["problem"] or first_mistake(got["steps"], right.result["steps"], arguments[0])
