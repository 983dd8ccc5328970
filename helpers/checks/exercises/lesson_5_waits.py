"""Lesson 5, chunked prefill: the next chunk of a request, and the longest waits."""

from itertools import pairwise

from ..exercise import Exercise

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


@next_chunk.reference
def next_tokens(p, g, c, budget):
    uncomputed = p + g - c
    tokens = min(uncomputed, budget)
    return tokens, tokens == uncomputed


DONE, SAME_PASS = "tokens == uncomputed", "Once all of its tokens are computed, a request gets a new one from that pass"
next_chunk.add_misconceptions({
    "treats every request that has generated tokens as a decode. A preempted request has lost its cache: its "
    "tokens must be recomputed before it gets a new one.": "p + g - c -> 1 if g else p - c",
    "computes one token too few: the newest token was sampled, but its key and value are not in the cache yet.":
        "p + g - c -> p + g - c - (g > 0)",
    "counts only the prompt. After a preemption, the model has to recompute the generated tokens, too.":
        [" + g -> ", "p + g - c -> 1 if g and c >= p else p - c"],
    f"reports no new token after the last chunk of a prompt. {SAME_PASS}: another one would have nothing to compute.":
        [f"{DONE} -> g > 0", *(f"{DONE} -> {DONE} and {more}" for more in ("g > 0", "(c == 0 or g > 0)"))],
    f"reports no new token if the budget is exactly used up. {SAME_PASS}.": f"{DONE} -> uncomputed < budget",
    "reports a new token too early: it would follow the chunk, but the text continues after the chunk.":
        [f"{DONE} -> tokens > 0", f"{DONE} -> True"],
    "reports a new token once the prompt is computed. A preempted request must also recompute its generated "
    "tokens: before that, the model would repeat them.": f"{DONE} -> tokens > 0 and c + tokens >= p",
    "reports a new token for a request that computes nothing: without a forward pass there are no logits.":
        f"{DONE} -> tokens in (0, uncomputed)",
})  # fmt: skip


@Exercise.declare(
    "the longest TTFT shows how long a user waits, and the longest gap how long an output stalls",
    names=("the longest time to a first token", "the longest gap between two tokens"),
)
def worst_waits(arrivals, token_times):
    first = [times[0] - arrivals[name] for name, times in token_times.items()]
    gaps = [later - time for times in token_times.values() for time, later in pairwise(times)]
    return float(max(first)), float(max(gaps, default=0))


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


OUTPUTS, LONGEST = "token_times.values()", "max(gaps, default=0)"
worst_waits.add_misconceptions({
    "measures TTFT from time 0. A user waits from the arrival of the request.": " - arrivals[name] -> ",
    "returns the mean or the median TTFT, which hides the request that waits longest.":
        ["max(first) -> statistics.mean(first)", "max(first) -> statistics.median(first)"],
    "returns the mean or the median gap, which hides one long stall.":
        [f"{LONGEST} -> statistics.{what}(gaps or [0])" for what in ("mean", "median")],
    "averages each request's gaps, which gives its TPOT: a mean hides one long stall.":
        f"{LONGEST} -> max([(t[-1] - t[0]) / (len(t) - 1) for t in {OUTPUTS} if t[1:]], default=0)",
    "matches arrivals and token times by their order in the dicts. Requests are identified by their ids.":
        f"arrivals[name] for name, times in token_times.items() -> a for a, times in zip(arrivals.values(), {OUTPUTS})",
    "counts the wait for the first token as a gap. That is TTFT; a gap is between two tokens.":
        f"{OUTPUTS} -> [[arrivals[name], *times] for name, times in token_times.items()]",
    "looks at only one gap of each request: an output can stall at any token.":
        ["pairwise(times) -> pairwise(times[:2])", "pairwise(times) -> pairwise(times[-2:])"],
    "measures gaps between tokens of different requests. A user sees one output, and only its own gaps.":
        f"{OUTPUTS} -> [sorted(sum({OUTPUTS}, []))]",
})  # fmt: skip
