"""Lesson 4, scheduling: the next tokens of a request, the order of the queue, and the longest waits."""

from itertools import pairwise
from statistics import mean, median

from ...engine import Sequence
from ..exercise import Exercise


def sequence_of(request_id, prompt, generated=0, computed=0, max_tokens=50, priority=0, waited=0) -> Sequence:
    """Return a sequence with these numbers of tokens; the first `computed` are in the cache."""
    sequence = Sequence(request_id, [7] * prompt, max_tokens, priority=priority, computed=computed, waited=waited)
    sequence.token_ids += [8] * generated
    return sequence


next_chunk = Exercise(
    "next_chunk(prompt_tokens, generated, computed, budget)",
    "prefill, chunk, decode and recomputation are one operation: compute the next tokens, as far as the budget allows",
    names=("the number of tokens to compute", "whether the request gets a new token"),
)


next_chunk.table(
    [
        (7, 0, 0, 100), (20, 0, 0, 8), (20, 0, 8, 8), (20, 0, 16, 8), (20, 0, 12, 8),  # a prompt, whole and in chunks
        (7, 3, 9, 8), (9, 1, 9, 1),  # decodes
        (7, 3, 0, 100), (7, 3, 0, 8), (7, 3, 8, 8), (6, 5, 4, 4), (7, 3, 7, 2),  # after a preemption
        (7, 0, 0, 0), (7, 3, 9, 0),  # other requests have used the budget
        (4000, 300, 512, 257), (4000, 300, 4299, 256),
    ],
    lambda random: [
        (random.randint(12, 40), random.randint(1, 9), random.randint(1, 10), budget)
        for budget in (64, random.randint(1, 8))
    ],
)  # fmt: skip


@next_chunk.reference
def next_tokens(prompt, generated, computed, budget):
    uncomputed = prompt + generated - computed
    return min(uncomputed, budget), uncomputed <= budget


PROMPT_ONLY = "counts only the prompt. After a preemption, the model has to recompute the generated tokens, too."
SAME_PASS = "Once all of its tokens are computed, a request gets a new one from that same pass"
TOO_SOON = "reports a new token too early: it would follow the chunk, but the text continues after the chunk."
for _message, _wrong in [
    ("recomputes the text from the beginning: the cache already holds the keys and values of the computed tokens.",
     lambda p, g, c, b, u, t: (min(p + g, b), p + g <= b)),
    ("treats every request that has generated tokens as a decode. A preempted request has lost its cache: its "
     "tokens must be recomputed before it gets a new one.",
     lambda p, g, c, b, u, t: (min(n := 1 if g else u, b), n <= b)),
    ("computes one token too few: the newest token was sampled, but its key and value are not in the cache yet.",
     lambda p, g, c, b, u, t: (min(n := u - (g > 0), b), n <= b)),
    (PROMPT_ONLY, lambda p, g, c, b, u, t: (min(p - c, b), p - c <= b)),
    (PROMPT_ONLY, lambda p, g, c, b, u, t: (min(n := 1 if g and c >= p else p - c, b), n <= b)),
    (f"reports no new token after the last chunk of a prompt. {SAME_PASS}, in chunks or not.",
     lambda p, g, c, b, u, t: (t, t == u and (c == 0 or g > 0))),
    (f"reports no new token after a prefill. {SAME_PASS}: another pass would have nothing to compute.",
     lambda p, g, c, b, u, t: (t, t == u and g > 0)),
    (f"reports no new token after a prefill. {SAME_PASS}: another pass would have nothing to compute.",
     lambda p, g, c, b, u, t: (t, g > 0)),
    (f"reports a new token only after decodes. {SAME_PASS}: another pass would have nothing to compute.",
     lambda p, g, c, b, u, t: (t, t == u == 1 and g > 0)),
    (f"reports no new token if the budget is exactly used up. {SAME_PASS}.", lambda p, g, c, b, u, t: (t, u < b)),
    (TOO_SOON, lambda p, g, c, b, u, t: (t, t > 0)), (TOO_SOON, lambda p, g, c, b, u, t: (t, True)),
    ("reports a new token once the prompt is computed. A preempted request must also recompute its generated "
     "tokens: before that, the model would repeat them.", lambda p, g, c, b, u, t: (t, t > 0 and c + t >= p)),
    ("reports a new token for a request that computes nothing: without a forward pass there are no logits.",
     lambda p, g, c, b, u, t: (t, t in (0, u))),
    ("exceeds the budget. The tokens that do not fit are computed in later iterations.",
     lambda p, g, c, b, u, t: (u, True)),
]:  # fmt: skip
    next_chunk.misconception(_message, lambda p, g, c, b, of=_wrong: of(p, g, c, b, p + g - c, min(p + g - c, b)))

longest_first = Exercise(
    "longest_first(waiting)",
    "the class with the largest limits starts first, and within a class no request overtakes",
    forbidden=["helpers.engine.policies:LongestFirst.order"],
)


@longest_first.cases
def _(random):
    def drawn(count, scale):
        """Return limits so far from the classes' borders that rounding cannot matter. The first is not the largest."""
        while True:
            limits = [max(1, round(scale * random.random() ** 2)) for _ in range(count)]
            if limits[0] < 0.9 * max(limits) and all(abs(3 * n - k * max(limits)) > 3 for n in limits for k in (1, 2)):
                return limits

    letters = "abcdefghijklmnopqrstuvwx"
    for limits in [
        [10, 70, 45, 90, 20, 50, 85],
        [5, 98, 12, 100, 20, 8, 90, 25, 15],  # thirds of the limit, not of the queue
        [80, 100, 45, 85, 95, 50, 75, 55],  # none in the lowest third
        [40] * 5,
        [5, 5, 8, 10, 9],
        drawn(24, 500),
        drawn(10, 90),
        [],
    ]:
        is_drawn = len(limits) >= 10  # then names are in no order, and some requests were preempted
        named = list(zip(random.sample(letters, 24) if is_drawn else letters, limits, strict=False))
        generated = (random.choice([0, limit - 1]) * is_drawn for limit in limits)
        queue = [sequence_of(name, random.randint(3, 59), next(generated), max_tokens=limit) for name, limit in named]
        yield (queue,), f"max_tokens in order of arrival: {', '.join(f'{n} {m}' for n, m in named) or 'an empty queue'}"


def thirds(limit, largest):
    return (3 * limit > largest) + (3 * limit > 2 * largest)


def in_classes(waiting, relative_to=lambda limits: max(limits, default=0), class_of=thirds):
    """Order a queue by classes, the highest first, with replaceable parts."""
    measure = relative_to([one.max_tokens for one in waiting])
    return sorted(waiting, key=lambda one: -class_of(one.max_tokens, measure))


longest_first.reference(in_classes)
SHORTEST = "puts the shortest first. The long requests then start last, and most rows are empty while they finish."
THE_MEAN = "derives the classes from the mean of the limits. They are thirds of the largest limit in the queue."
longest_first.add_misconceptions([
    ("keeps the order of arrival: a long request that starts last runs alone at the end.", list),
    ("sorts by max_tokens alone. Within a class, requests keep their order of arrival: a limit is not a promise, "
     "and a slightly larger one is no reason to go first.", lambda w: sorted(w, key=lambda one: -one.max_tokens)),
    (SHORTEST, lambda w: sorted(w, key=lambda one: one.max_tokens)),
    (SHORTEST, lambda w: in_classes(w, class_of=lambda n, m: -thirds(n, m))),
    ("reverses the order of arrival within a class, where the request that arrived first goes first.",
     lambda w: in_classes(w[::-1])),
    ("sorts by prompt length. A prefill takes one pass or a few; max_tokens limits how many passes follow it.",
     lambda w: sorted(w, key=lambda one: -one.prompt_tokens)),
    (THE_MEAN, lambda w: in_classes(w, lambda limits: mean([*limits] or [0]))),
    (THE_MEAN, lambda w: in_classes(w, lambda limits: mean([*limits] or [0]), lambda n, m: n > m)),
    (THE_MEAN, lambda w: in_classes(w, lambda limits: 4 / 3 * mean([*limits] or [0]))),
    ("subtracts the tokens that a request has generated: the classes are ranges of `max_tokens`.",
    lambda w: sorted(w, key=lambda s: -thirds(s.max_tokens - s.generated, max(t.max_tokens - t.generated for t in w)))),
    ("makes classes with equal numbers of requests. A class is a range of limits: it may be empty or hold nearly "
     "all.",
     lambda w: in_classes(w, sorted, lambda n, m: 3 * m.index(n) // len(m))),
    ("divides the range between the smallest and the largest limit. A class is a third of the largest limit itself.",
     lambda w: in_classes(w, sorted, lambda n, m: thirds(n - m[0], m[-1] - m[0]))),
    ("puts the largest limit into a class of its own: other limits in the highest third belong to the same class.",
     lambda w: in_classes(w, class_of=lambda n, m: 3 * n // m)),
    ("makes two classes: the task asks for three.", lambda w: in_classes(w, class_of=lambda n, m: 2 * n > m)),
    ("compares with fixed limits. The classes are thirds of the largest limit in this queue.",
     lambda w: in_classes(w, class_of=lambda n, m: thirds(n, 90))),
])  # fmt: skip


longest_first.requires_new("list")


@longest_first.rule
def is_the_same_queue(arguments, outcome, right):
    """Report requests that are missing or repeated, or the first one that is out of order."""
    ids, largest = [one.request_id for one in outcome.result], max((one.max_tokens for one in arguments[0]), default=0)
    for one in arguments[0]:
        if ids.count(one.request_id) != 1:
            return f"returns {one.request_id} {ids.count(one.request_id)} times, but each request is in the queue once"
    for one, other in zip(outcome.result, right.result, strict=True):
        if thirds(one.max_tokens, largest) != thirds(other.max_tokens, largest):
            return f"puts {one.request_id} before {other.request_id}, which is in a higher third of {largest}"
        if one.request_id != other.request_id:
            return f"changes the order of arrival within a class: {one.request_id} is before {other.request_id}"
    return None


most_urgent = Exercise(
    "most_urgent(waiting, aging)",
    "the smallest number goes first, and waiting lowers it, so no request starves",
    forbidden=["helpers.engine.policies:Priority.order"],
)


@most_urgent.cases
def _(random):
    def drawn(aging):
        waited = random.sample(range(4 * aging), 6)  # all different, so exactly one request is next
        return aging, [(name, random.randint(0, 4), each) for name, each in zip("abcdef", waited, strict=True)]

    for aging, requests in [
        (50, [("c", 1, 2), ("a", 2, 9), ("b", 0, 5)]), (10, [("d", 0, 16), ("a", 2, 29), ("b", 1, 20), ("c", 3, 17)]),
        (50, [("d", 1, 15), ("b", 2, 100), ("c", 1, 50), ("a", 3, 160)]),
        (50, [("d", 0, 0), ("a", 1, 50), ("c", 0, 15), ("b", 2, 51)]), (50, [("a", 2, 50), ("b", 1, 49)]),
        (50, [("a", 1, 60), ("b", 0, 40)]), (20, [("b", 1, 7), ("a", 1, 19), ("c", 1, 3)]),
        (2, [("b", 6, 3), ("a", 0, 2)]), (50, [("b", 6, 3), ("c", 1, 9)]),
        (7, [("e", 4, 27), ("a", 3, 26), ("d", 1, 13), ("b", 2, 20)]),
        (20, [("a", 0, 19), ("e", 9, 199), ("c", 4, 81)]), (20, [("c", 2, 59), ("b", 1, 58), ("a", 3, 61)]),
        (1, [("a", 3, 4), ("b", 300, 302), ("c", 4, 7)]),
        *map(drawn, (7, 20, 50)),
    ]:  # fmt: skip
        queue = [sequence_of(name, 4, priority=priority, waited=waited) for name, priority, waited in requests]
        told = ", ".join(f"{name} with priority {priority} and waited {waited}" for name, priority, waited in requests)
        yield (queue, aging), f"{told}; aging {aging}"
    yield ([], 50), "an empty queue"


def first_by(key):
    """Return a function that takes the first request by a key of level, waited, priority and aging."""
    return lambda waiting, a: min(
        waiting, key=lambda one: key(one.priority - one.waited // a, one.waited, one.priority, a), default=None
    )


longest_waiting = most_urgent.reference(first_by(lambda level, w, p, a: (level, -w)))
LEVEL = "Only *full* spans of `aging` iterations count."
TIES = "Among equally urgent requests, the one that has waited longest is next"
for _message, _key in [
    ("picks the largest number. A smaller number is more urgent: priority 0 goes before 1.",
     lambda level, w, p, a: -level),
    ("picks the largest number. A smaller number is more urgent: priority 0 goes before 1.",
     lambda level, w, p, a: -p - w // a),
    ("makes waiting requests less urgent. Smaller numbers are more urgent, so waiting has to lower them.",
     lambda level, w, p, a: p + w // a),
    ("ignores `waited`: as long as urgent requests keep arriving, the others starve.", lambda level, w, p, a: p),
    ("lets waiting count too much: all `aging` iterations together are worth one level.",
     lambda level, w, p, a: p - w * a),
    ("picks the request that arrived first, whatever its priority: that is first come, first served.",
     lambda level, w, p, a: 0),
    (f"counts fractions of a level. {LEVEL}", lambda level, w, p, a: p - w / a),
    (f"rounds to the nearest level. {LEVEL}", lambda level, w, p, a: p - round(w / a)),
    ("is off by one where a level begins: exactly `aging` iterations are worth a level.",
     lambda level, w, p, a: p - (w - 1) // a),
    ("stops at level 0: a request that has waited long enough is more urgent than a new one of priority 0.",
     lambda level, w, p, a: max(level, 0)),
    ("counts at most one level: every full `aging` iterations are worth another one.",
     lambda level, w, p, a: p - (w >= a)),
]:  # fmt: skip
    most_urgent.misconception(_message, first_by(lambda *each, key=_key: (key(*each), -each[1])))
    most_urgent.misconception(_message, first_by(_key))
for _message, _key in [
    (f"breaks ties by priority. {TIES}, however it reached its level.", lambda level, w, p, a: (level, p)),
    (f"picks the newest of equally urgent requests. {TIES}.", lambda level, w, p, a: (level, w)),
    (f"breaks ties by the place in the list, which is in no order. {TIES}.", lambda level, w, p, a: level),
]:
    most_urgent.misconception(_message, first_by(_key))


@most_urgent.rule
def takes_the_lowest_level(arguments, outcome, right):
    """Report the levels of the request that was taken and of the one that is next."""
    (_, aging), taken, wanted = arguments, outcome.result, right.result
    if wanted is None or taken.request_id == wanted.request_id:
        return None
    one, other = (each.priority - each.waited // aging for each in (taken, wanted))
    why = f". {TIES}" if one == other else ""
    return f"picks {taken.request_id}, which counts as {one}, and {wanted.request_id} counts as {other}{why}"


worst_waits = Exercise(
    "worst_waits(arrivals, token_times)",
    "the longest TTFT shows how long a user waits, and the longest gap how long an output stalls",
    names=("the longest time to a first token", "the longest gap between two tokens"),
)


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


def longest_waits(arrivals, token_times, first=lambda a, times: times[0] - a, gaps=all_gaps, worst=(max, max)):
    """Return both numbers, with replaceable parts: the waits that count, and the statistics."""
    requests = [(arrivals[name], times) for name, times in token_times.items()]
    pooled = [gap for request in requests for gap in gaps(*request)]
    return float(worst[0]([first(*request) for request in requests])), float(worst[1](pooled or [0]))


def own(times):
    return float(max(all_gaps(0, times), default=0))


worst_waits.reference(longest_waits)
worst_waits.add_misconceptions([
    ("measures TTFT from time 0. A user waits from the arrival of the request.", {"first": lambda a, times: times[0]}),
    ("measures until the last token: that is the latency of the whole request.",
     {"first": lambda a, times: times[-1] - a}),
    ("returns the mean TTFT: a mean hides the request that waits longest.", {"worst": (mean, max)}),
    ("returns the median TTFT: a median hides the request that waits longest.", {"worst": (median, max)}),
    ("returns the shortest TTFT: the task asks for the longest.", {"worst": (min, max)}),
    ("returns the TTFT of the last request: the task asks for the longest of all.",
     {"worst": (lambda values: values[-1], max)}),
    ("returns the TTFT of the first request: the task asks for the longest of all.",
     {"worst": (lambda values: values[0], max)}),
    ("counts the wait for the first token as a gap. That is TTFT; a gap is between two tokens.",
     {"gaps": lambda a, times: all_gaps(a, [a, *times])}),
    ("averages each request's gaps, which gives its TPOT: a mean hides one long stall.",
     {"gaps": lambda a, times: [mean(all_gaps(a, times))] if times[1:] else []}),
    ("returns the mean gap: a mean hides one long stall.", {"worst": (max, mean)}),
    ("returns the median gap: a median hides one long stall.", {"worst": (max, median)}),
    ("returns the shortest gap: the task asks for the longest.", {"worst": (max, min)}),
    ("measures from the first token to the last: a gap is the time from one token to the next.",
     {"gaps": lambda a, times: [times[-1] - times[0]]}),
    ("looks at only the first gap of each request: an output can stall at any token.",
     {"gaps": lambda a, times: all_gaps(a, times)[:1]}),
    ("looks at only the last gap of each request: an output can stall at any token.",
     {"gaps": lambda a, times: all_gaps(a, times)[-1:]}),
    ("counts the steps without a token: a gap is the time from one token to the next.",
     {"gaps": lambda a, times: [gap - 1 for gap in all_gaps(a, times)]}),
    ("matches arrivals and token times by their order in the dicts. Requests are identified by their ids.",
     lambda a, t: longest_waits(dict(zip(t, a.values(), strict=True)), t)),
    ("measures gaps between tokens of different requests. A user sees one output, and only its own gaps.",
     lambda a, t: (longest_waits(a, t)[0], own(sorted(time for times in t.values() for time in times)))),
    ("returns the longest gap of the last request: the task asks for the longest of all.",
     lambda a, t: (longest_waits(a, t)[0], own(list(t.values())[-1]))),
    ("returns the longest gap of the first request: the task asks for the longest of all.",
     lambda a, t: (longest_waits(a, t)[0], own(next(iter(t.values()))))),
])  # fmt: skip
