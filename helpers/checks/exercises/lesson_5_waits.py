"""Lesson 5, chunked prefill: the next chunk of a request, and the longest waits."""

from itertools import pairwise
from statistics import mean, median

from ..exercise import Exercise

SAME_PASS = "Once all of its tokens are computed, a request gets a new one from that same pass"
next_chunk = Exercise(
    "next_chunk(prompt_tokens, generated, computed, budget)",
    "prefill, chunk, decode and recomputation are one operation: compute the next tokens, as far as the budget allows",
    names=("the number of tokens to compute", "whether the request gets a new token"),
)
next_chunk.table([
    (7, 0, 0, 100), (20, 0, 0, 8), (20, 0, 8, 8), (20, 0, 16, 8), (20, 0, 12, 8),  # a prompt, whole and in chunks
    (7, 3, 9, 8), (9, 1, 9, 1),  # decodes
    (7, 3, 0, 100), (7, 3, 0, 8), (7, 3, 8, 8), (6, 5, 4, 4), (7, 3, 7, 2),  # after a preemption
    (7, 0, 0, 0), (7, 3, 9, 0),  # other requests have used the budget
    (4000, 300, 512, 257), (4000, 300, 4299, 256),
], lambda random: [
    (random.randint(12, 40), random.randint(1, 9), random.randint(1, 10), budget)
    for budget in (64, random.randint(1, 8))
])  # fmt: skip
next_chunk.add_misconceptions({
    "treats every request that has generated tokens as a decode. A preempted request has lost its cache: its "
    "tokens must be recomputed before it gets a new one.":
        lambda p, g, c, b, u, t: (min(n := 1 if g else u, b), n <= b),
    "computes one token too few: the newest token was sampled, but its key and value are not in the cache yet.":
        lambda p, g, c, b, u, t: (min(n := u - (g > 0), b), n <= b),
    "counts only the prompt. After a preemption, the model has to recompute the generated tokens, too.": [
        lambda p, g, c, b, u, t: (min(p - c, b), p - c <= b),
        lambda p, g, c, b, u, t: (min(n := 1 if g and c >= p else p - c, b), n <= b)],
    f"reports no new token after the last chunk of a prompt. {SAME_PASS}, in chunks or not.":
        lambda p, g, c, b, u, t: (t, t == u and (c == 0 or g > 0)),
    f"reports no new token after a prefill. {SAME_PASS}: another pass would have nothing to compute.":
        [lambda p, g, c, b, u, t: (t, t == u and g > 0), lambda p, g, c, b, u, t: (t, g > 0)],
    f"reports a new token only after decodes. {SAME_PASS}: another pass would have nothing to compute.":
        lambda p, g, c, b, u, t: (t, t == u == 1 and g > 0),
    f"reports no new token if the budget is exactly used up. {SAME_PASS}.": lambda p, g, c, b, u, t: (t, u < b),
    "reports a new token too early: it would follow the chunk, but the text continues after the chunk.":
        [lambda p, g, c, b, u, t: (t, t > 0), lambda p, g, c, b, u, t: (t, True)],
    "reports a new token once the prompt is computed. A preempted request must also recompute its generated "
    "tokens: before that, the model would repeat them.": lambda p, g, c, b, u, t: (t, t > 0 and c + t >= p),
    "reports a new token for a request that computes nothing: without a forward pass there are no logits.":
        lambda p, g, c, b, u, t: (t, t in (0, u)),
}, part="both")  # fmt: skip


@next_chunk.reference
def next_tokens(p, g, c, b, both=lambda p, g, c, b, uncomputed, count: (count, count == uncomputed)):
    return both(p, g, c, b, p + g - c, min(p + g - c, b))


worst_waits = Exercise(
    "worst_waits(arrivals, token_times)",
    "the longest TTFT shows how long a user waits, and the longest gap how long an output stalls",
    names=("the longest time to a first token", "the longest gap between two tokens"),
)
worst_waits.add_misconceptions({
    "measures TTFT from time 0. A user waits from the arrival of the request.": {"first": lambda a, times: times[0]},
    "returns the mean TTFT: a mean hides the request that waits longest.": {"ttft": mean},
    "returns the median TTFT: a median hides the request that waits longest.": {"ttft": median},
    "returns the mean gap: a mean hides one long stall.": {"gap": mean},
    "returns the median gap: a median hides one long stall.": {"gap": median},
    "matches arrivals and token times by their order in the dicts. Requests are identified by their ids.":
        lambda a, t: longest_waits(dict(zip(t, a.values(), strict=True)), t),
})  # fmt: skip
worst_waits.add_misconceptions({
    "counts the wait for the first token as a gap. That is TTFT; a gap is between two tokens.":
        lambda a, times: all_gaps(a, [a, *times]),
    "averages each request's gaps, which gives its TPOT: a mean hides one long stall.":
        lambda a, times: [mean(all_gaps(a, times))] if times[1:] else [],
    "looks at only the first gap of each request: an output can stall at any token.":
        lambda a, times: all_gaps(a, times)[:1],
    "looks at only the last gap of each request: an output can stall at any token.":
        lambda a, times: all_gaps(a, times)[-1:],
}, part="gaps")  # fmt: skip
worst_waits.add_wrong_results({
    "measures gaps between tokens of different requests. A user sees one output, and only its own gaps.":
        lambda ttft, gap, a, t: (ttft, own(sorted(time for times in t.values() for time in times))),
})  # fmt: skip


@worst_waits.cases
def _(random):
    scenes = [
        ({"a": 0, "b": 2, "c": 5}, {"a": [3, 4, 5, 11, 12], "b": [6, 7, 8, 12], "c": [7]}),
        ({"x": 3, "y": 4, "z": 1}, {"z": [5, 6], "y": [14, 15], "x": [12, 13, 15]}),
        ({"m": 6, "n": 1}, {"m": [8, 9, 10, 25, 26, 27], "n": [4, 6, 8]}),
        ({"s": 1, "t": 9, "u": 2}, {"u": [3, 4, 5, 6, 17, 18, 19], "t": [14, 15], "s": [6, 7, 9, 14]}),
        ({"q": 2}, {"q": [4]}), ({"q": 2, "o": 1}, {"q": [4], "o": [6]}),
        ({"l": 0, "k": 1}, {"k": [2, 3, 4], "l": [1, 20, 21, 22]}),  # the longest gap is the first one
        ({"g": 5, "h": 5, "i": 6}, {"g": [6, 7], "h": [30, 31], "i": [7, 9, 12, 14]}),  # the middle one waits
        ({"w": 0, "v": 40}, {"w": [1, 2, 3], "v": [41, 42]}),  # a pause between two requests is no gap
        ({"e": 0, "f": 0}, {"f": [1.5, 1.75, 4.25], "e": [0.25, 2, 2.5]}),
    ]  # fmt: skip
    for _ in range(2):
        arrivals = {name: random.randint(0, 30) for name in random.sample("abcdef", 4)}
        times = {name: random.sample(range(1, 60), random.randint(2, 9)) for name in random.sample(list(arrivals), 4)}
        scenes.append((arrivals, {name: [arrivals[name] + each for each in sorted(times[name])] for name in times}))
    for arrivals, token_times in scenes:
        arrivals = {name: float(each) for name, each in arrivals.items()}
        token_times = {name: list(map(float, times)) for name, times in token_times.items()}
        yield (arrivals, token_times), f"arrivals {arrivals}, token_times {token_times}"


def all_gaps(arrival, times):
    return [later - time for time, later in pairwise(times)]


def own(times):
    return float(max(all_gaps(0, times), default=0))


@worst_waits.reference
def longest_waits(arrivals, token_times, first=lambda a, times: times[0] - a, gaps=all_gaps, ttft=max, gap=max):
    """Return both numbers, with replaceable parts: the waits that count, and the statistics."""
    requests = [(arrivals[name], times) for name, times in token_times.items()]
    pooled = [gap for request in requests for gap in gaps(*request)]
    return float(ttft([first(*request) for request in requests])), float(gap(pooled or [0]))
