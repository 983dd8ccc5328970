"""Lesson 13, speculative decoding: how many draft tokens fit into a pass, and how many pay."""

from ..edits import add_edits
from ..exercise import Exercise

draft_lengths = Exercise(
    "draft_lengths(budget, prefill_tokens, wanted)",
    "drafts take only what decodes and prompts leave, so speculation fades as load rises",
)
draft_lengths.table([
    (12, 3, [4, 4, 1]), (12, 0, [4, 4, 1]), (64, 10, [4, 0, 2, 4]), (16, 9, [4, 4, 4]), (16, 13, [4, 4, 4]),
    (16, 12, [4, 4, 4]), (5, 0, [3, 3, 3]), (4, 1, [3, 3, 3]), (3, 2, [3, 3, 3]), (6, 7, [2, 1]), (8, 0, [7]),
    (11, 0, [1, 4, 1, 4]), (10, 1, [0, 5, 0]), (512, 500, [5, 5, 5, 5]),
], lambda random: [(random.randint(12, 22), 2, [random.randint(0, 5) for _ in range(6)])],
   given="budget {}, {} prompt tokens, draft tokens wanted {}")  # fmt: skip


def one_by_one(left, wanted):
    lengths = [0] * len(wanted)
    while left > 0 and lengths != wanted:
        for number, most in enumerate(wanted):
            if lengths[number] < most and left > 0:
                lengths[number] += 1
                left -= 1
    return lengths


@draft_lengths.reference
def share(budget, prefill_tokens, wanted):
    left = budget - prefill_tokens - len(wanted)
    return one_by_one(left, wanted)


SHARED = "one_by_one(left, wanted)"
add_edits(draft_lengths, {
    "forgets the decodes: each running request computes its newest token first.": " - len(wanted) -> ",
    "lets drafts take the budget of the prompt: it would be computed later, for tokens that may be rejected.":
        " - prefill_tokens -> ",
    "gives the whole budget to drafts: decodes and prompts come first.": " - prefill_tokens - len(wanted) -> ",
    "serves the first request in full, then the next: let them take turns, one draft token at a time.":
        f"{SHARED} -> [min(most, max(0, left - sum(wanted[:n]))) for n, most in enumerate(wanted)]",
    "gives every request the same share, and loses what is left over: a request that wants less leaves the rest "
    "to the others.": f"{SHARED} -> [min(most, max(0, left) // len(wanted)) for most in wanted]",
    "gives every request what it wants if the budget is too small for the newest tokens and the prompts: there are "
    "no drafts then.": f"{SHARED} -> list(wanted) if left < 0 else {SHARED}",
})  # fmt: skip

best_k = Exercise(
    "best_k(acceptance, rows, milliseconds)",
    "speculation trades arithmetic for passes, so it pays only where a pass has arithmetic to spare",
)
FLAT, STEEP = [0, 20, 20, 20, 20, 20, 20, 20, 20], [0, 20, 30, 40, 50, 60, 70, 80, 90]
BENT = [0, 20, 21, 22, 23, 24, 25, 26, 27, 32, 37, 42, 47, 52, 57, 62, 67]
# A kernel computes up to 8, 16, ... tokens in the same time: the best k is at the end of a stair.
STAIRS = [0, *[20] * 2, *[25] * 2, *[29] * 4, *[46] * 8]
best_k.table([
    (0.5, 1, [0, 10, 11, 12, 13]), (0.9, 1, BENT), (0.6, 1, BENT), (0.0, 1, BENT), (0.8, 2, BENT), (0.8, 4, BENT),
    (0.6, 8, BENT), (0.3, 4, BENT), (1.0, 1, FLAT), (0.7, 2, STEEP), (0.3, 2, STEEP), (0.4, 1, FLAT), (0.0, 1, FLAT),
    (0.0, 2, FLAT), (0.85, 1, STAIRS), (0.5, 1, STAIRS), (0.95, 2, STAIRS),
    (0.9, 1, [0, 10, 30, 31, 32, 33, 34, 35, 36, 37, 38]), (1.0, 1, [0, 10, 30, 31, 32, 33, 60, 61, 62]),
], lambda random: [(round(random.uniform(0.35, 0.95), 2), random.choice([1, 2, 3]), BENT)])  # fmt: skip


@best_k.reference
def fastest(acceptance, rows, milliseconds):
    speeds = []
    for k in range(len(milliseconds)):
        width = rows * (k + 1)
        if width < len(milliseconds):
            tokens = sum(acceptance**before for before in range(k + 1))
            speeds.append(tokens / milliseconds[width])
    return speeds.index(max(speeds))


TOKENS, BEST = "sum(acceptance**before for before in range(k + 1))", "speeds.index(max(speeds))"
add_edits(best_k, {
    "counts every draft token with the same probability. One counts only if all before it are accepted, too.":
        f"{TOKENS} -> 1 + acceptance * k",
    "forgets the token that the model chooses itself: a pass yields at least one.": "range(k + 1)) -> range(1, k + 1))",
    "treats all draft tokens as accepted.": "acceptance**before -> 1",
    "counts a draft as accepted as a whole or not at all.": f"{TOKENS} -> 1 + k * acceptance**k",
    "takes the time of a pass with a single row: all rows compute their drafts in the same pass.":
        ["rows * (k + 1) -> k + 1", "[width] -> [k + 1]"],
    "computes the drafts only: each request also computes its newest token.":
        ["rows * (k + 1) -> rows * max(k, 1)", "[width] -> [rows * max(k, 1)]"],
    "adds the draft of a single row to the pass: every row has one.": ["* (k + 1) -> + k", "[width] -> [rows + k]"],
    "ignores what a pass costs: more tokens take longer.": " / milliseconds[width] -> ",
    "prefers the larger k where two are equally fast: the smaller one computes fewer tokens.":
        f"{BEST} -> max(range(len(speeds)), key=lambda k: (speeds[k], k))",
    "stops at the first k that is slower than the one before: times can rise in stairs, so a larger k may be faster.":
        f"{BEST} -> next((k for k, (now, later) in enumerate(pairwise(speeds)) if later <= now), len(speeds) - 1)",
})  # fmt: skip
