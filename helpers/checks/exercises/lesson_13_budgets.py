"""Lesson 13, speculative decoding: how many draft tokens fit into a pass, and how many pay."""

from ..exercise import Exercise

draft_lengths = Exercise(
    "draft_lengths(budget, prefill_tokens, wanted)",
    "drafts take only what decodes and prompts leave, so speculation fades as load rises",
)


draft_lengths.table(
    [
        (12, 3, [4, 4, 1]), (12, 0, [4, 4, 1]), (64, 10, [4, 0, 2, 4]), (16, 9, [4, 4, 4]), (16, 13, [4, 4, 4]),
        (16, 12, [4, 4, 4]), (5, 0, [3, 3, 3]), (4, 1, [3, 3, 3]), (3, 2, [3, 3, 3]), (6, 7, [2, 1]), (8, 0, [7]),
        (11, 0, [1, 4, 1, 4]), (10, 1, [0, 5, 0]), (512, 500, [5, 5, 5, 5]),
    ],
    lambda random: [(random.randint(12, 22), 2, [random.randint(0, 5) for _ in range(6)])],
    given="budget {}, {} prompt tokens, draft tokens wanted {}",
)  # fmt: skip


def one_by_one(left, wanted):
    lengths = [0] * len(wanted)
    while left > 0 and lengths != wanted:
        for number, most in enumerate(wanted):
            if lengths[number] < most and left > 0:
                lengths[number] += 1
                left -= 1
    return lengths


def in_order(left, wanted):
    lengths = []
    for most in wanted:
        lengths.append(min(most, max(0, left)))
        left -= lengths[-1]
    return lengths


@draft_lengths.reference
def share(budget, prefill, wanted, left=lambda b, p, n: b - p - n, give=one_by_one):
    """Share the budget, with replaceable parts: what is left for drafts, and which requests get it."""
    return give(left(budget, prefill, len(wanted)), wanted)


for _part, _wrongs in {
    "left": {
        "forgets the decodes: each running request computes its newest token first.": lambda b, p, n: b - p,
        "lets drafts take the budget of the prompt: it would be computed later, for tokens that may be rejected.":
            lambda b, p, n: b - n,
        "gives the whole budget to drafts: decodes and prompts come first.": lambda b, p, n: b,
        "leaves one token of the budget unused.": lambda b, p, n: b - p - n - 1,
    },
    "give": {
        "serves the first request in full, then the next: let them take turns, one draft token at a time.": in_order,
        "ignores the budget: no pass may compute more tokens.": lambda left, wanted: list(wanted),
        "gives every request the same share, and loses what is left over: a request that wants less leaves the rest "
        "to the others.": lambda left, wanted: [min(most, max(0, left) // len(wanted)) for most in wanted],
        "gives a request more draft tokens than it wants.":
            lambda left, wanted: one_by_one(left, [max(wanted)] * len(wanted)),
        "drafts for all or for none: some draft tokens are better than none.":
            lambda left, wanted: list(wanted) if sum(wanted) <= left else [0] * len(wanted),
        "gives every request what it wants if the budget is too small for the newest tokens and the prompts: there are "
        "no drafts then.": lambda left, wanted: list(wanted) if left < 0 else one_by_one(left, wanted),
        "starts with the last request: the first one has the first turn.":
            lambda left, wanted: one_by_one(left, wanted[::-1])[::-1],
    },
}.items():  # fmt: skip
    draft_lengths.add_misconceptions(_wrongs, part=_part)

best_k = Exercise(
    "best_k(acceptance, rows, milliseconds)",
    "speculation trades arithmetic for passes, so it pays only where a pass has arithmetic to spare",
)

FLAT, STEEP = [0, 20, 20, 20, 20, 20, 20, 20, 20], [0, 20, 30, 40, 50, 60, 70, 80, 90]
BENT = [0, 20, 21, 22, 23, 24, 25, 26, 27, 32, 37, 42, 47, 52, 57, 62, 67]


# A kernel computes up to 8, 16, ... tokens in the same time: the best k is at the end of a stair.
STAIRS = [0, *[20] * 2, *[25] * 2, *[29] * 4, *[46] * 8]
best_k.table(
    [
        (0.5, 1, [0, 10, 11, 12, 13]),
        (0.9, 1, BENT), (0.6, 1, BENT), (0.0, 1, BENT), (0.8, 2, BENT), (0.8, 4, BENT), (0.6, 8, BENT), (0.3, 4, BENT),
        (1.0, 1, FLAT), (0.7, 2, STEEP), (0.3, 2, STEEP), (0.4, 1, FLAT), (0.0, 1, FLAT), (0.0, 2, FLAT),
        (0.85, 1, STAIRS), (0.5, 1, STAIRS), (0.95, 2, STAIRS), (0.9, 1, [0, 10, 30, 31, 32, 33, 34, 35, 36, 37, 38]),
        (1.0, 1, [0, 10, 30, 31, 32, 33, 60, 61, 62]),
    ],
    lambda random: [(round(random.uniform(0.35, 0.95), 2), random.choice([1, 2, 3]), BENT)],
)  # fmt: skip


def yielded(a, k):
    return sum(a**before for before in range(k + 1))


def computed(rows, k):
    return rows * (k + 1)


@best_k.reference
def fastest(a, rows, seconds, tokens=yielded, width=computed, first=0, cost=lambda s: s, bound=computed):
    """Return the best k, with replaceable parts: the tokens of a request and of a pass, the first k, the cost, the end.

    The end, `bound`, is the number of tokens for which a pass must be in the list.
    """
    tried = [k for k in range(first, len(seconds)) if bound(rows, k) < len(seconds)]
    return max(tried, key=lambda k: (tokens(a, k) / cost(seconds[width(rows, k)]), -k), default=first)


for _message, _parts in {
    "counts every draft token with the same probability. One counts only if all before it are accepted, too.":
        {"tokens": lambda a, k: 1 + a * k},
    "forgets the token that the model chooses itself: a pass yields at least one.":
        {"tokens": lambda a, k: yielded(a, k) - 1},
    "treats all draft tokens as accepted.": {"tokens": lambda a, k: k + 1},
    "counts a draft as accepted as a whole or not at all.": {"tokens": lambda a, k: 1 + k * a**k},
    "takes the time of a pass with a single row: all rows compute their drafts in the same pass.":
        {"width": lambda r, k: k + 1},
    "computes the drafts only: each request also computes its newest token.": {"width": lambda r, k: r * max(k, 1)},
    "adds the draft of a single row to the pass: every row has one.": {"width": lambda r, k: r + k},
    "always drafts: where nothing is accepted or the pass is already expensive, k is 0.": {"first": 1},
    "ignores what a pass costs: more tokens take longer.": {"cost": lambda s: 1},
}.items():  # fmt: skip
    for _bound in {computed, _parts.get("width", computed)}:
        best_k.misconception(_message, lambda *case, parts=_parts, bound=_bound: fastest(*case, bound=bound, **parts))


@best_k.misconception("prefers the larger k where two are equally fast: the smaller one computes fewer tokens.")
def largest(a, rows, seconds):
    most = (len(seconds) - 1) // rows - 1
    return max(range(most + 1), key=lambda k: (yielded(a, k) / seconds[rows * (k + 1)], k))


@best_k.misconception(
    "stops at the first k that is slower than the one before: times can rise in stairs, so a larger k may be faster."
)
def until_it_is_slower(a, rows, seconds):
    k = 0
    while computed(rows, k + 1) < len(seconds):
        now, following = (yielded(a, one) / seconds[computed(rows, one)] for one in (k, k + 1))
        if following <= now:
            break
        k += 1
    return k


@best_k.misconception("returns the speed: the task asks for the number of draft tokens.")
def speed(a, rows, seconds):
    k = fastest(a, rows, seconds)
    return rows * yielded(a, k) / seconds[rows * (k + 1)]
