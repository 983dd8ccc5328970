"""Lesson 16, what workers exchange: the sums of a pass, and the best token of each share of the vocabulary."""

from ..edits import add_edits
from ..exercise import Exercise

traffic = Exercise(
    "traffic(blocks, hidden, chunks, is_parallel, splits_embedding)",
    "every sum has the size of the pass's hidden states, however many workers there are",
    names=("the sums", "the bytes"),
)
traffic.table([
    (2, 64, [5], False, True), (2, 64, [5, 1, 1], False, False), (12, 768, [1] * 8, False, True),
    (32, 4096, [1], False, False), (32, 4096, [512, 1, 1], False, True), (6, 160, [7, 3], True, False),
    (24, 2048, [1, 1, 30], True, True), (1, 8, [2], True, True),
], lambda random: [
    (random.randint(3, 40), 64 * random.randint(2, 9), random.choices(range(1, 20), k=4), is_parallel, splits_embedding)
    for is_parallel in (False, True) for splits_embedding in (False, True)
])  # fmt: skip


@traffic.reference
def of_one_pass(blocks, hidden, chunks, is_parallel, splits_embedding):
    sums = blocks * (1 if is_parallel else 2) + int(splits_embedding)
    return sums, sums * sum(chunks) * hidden * 4


PER_BLOCK, TOKENS = "(1 if is_parallel else 2)", "sum(chunks)"
add_edits(traffic, {
    "counts a sum for each matrix: one that is split by columns needs none, since the next one takes its outputs as "
    "they are.": [f"{PER_BLOCK} -> ({parallel} if is_parallel else 4)" for parallel in (2, 3, 4)],
    "counts two sums for each block, parallel or not: results that are added anyway need only one sum together.":
        f"{PER_BLOCK} -> 2",
    "counts one sum for each block, parallel or not: the MLP needs the attention's sum before it can begin.":
        f"{PER_BLOCK} -> 1",
    "forgets the embedding's sum: if it is split, only one worker knows a token's row.": " + int(splits_embedding) -> ",
    "counts a sum for the output layer: each worker has the logits of its own tokens, and these are joined.":
        "int(splits_embedding) -> int(splits_embedding) + 1",
    "counts one token for each request: a chunk of a prompt has several, and each has hidden states.":
        f"{TOKENS} -> len(chunks)",
    "returns the bytes of one sum: the task asks for those of all.": f"sums * {TOKENS} -> {TOKENS}",
    "returns the bytes of one token: each token of the pass has hidden states.": f"{TOKENS} * -> ",
})  # fmt: skip

greedy_token = Exercise(
    "greedy_token(shares)",
    "the best of the workers' best tokens is the best of all, so two numbers from each worker are enough",
    names=("what the workers send", "the token"),
)
NONE = float("-inf")
greedy_token.table([(shares,) for shares in [
    [[1.0, 3.0, 2.0], [0.5, 2.5, 4.0]], [[1.0, 5.0, 2.0], [0.5, 2.5, 4.0]], [[-4.0, -2.0], [-1.5, -3.0], [-6.0, -5.0]],
    [[1.0, 3.0, 3.0], [2.0, 3.0, 3.0]], [[0.0, 1.0], [7.0, 2.0], [7.0, 7.0]], [[2.0, 2.0, 2.0]],
    [[0.5, 1.0, 1.5], [9.0, 2.0], [0.0, 9.5]], [[0.25, 0.5, 0.75, 0.5], [0.5, 0.25, 0.5], [0.5, 0.75, 0.75]],
    [[NONE, NONE], [NONE, -3e4], [-2e4, NONE]], [[NONE, NONE, -1.0], [NONE, NONE]],
]], lambda random: [
    ([random.choices([-2.0, -0.5, 0.0, 1.25], k=count) for count in counts],)
    for counts in ([4] * 3, random.sample(range(2, 6), 3))
])  # fmt: skip


@greedy_token.reference
def best_of_the_best(shares):
    sent, first = [], 0
    for own in shares:
        sent.append((max(own), first + own.index(max(own))))
        first += len(own)
    return sent, max(sent, key=lambda one: one[0])[1]


NEXT, BEST = "first += len(own)", "max(sent, key=lambda one: one[0])"
OWN, ALL = "own.index(max(own))", "sum(shares, [])"
LAST = f"{OWN} -> len(own) - 1 - own[::-1].index(max(own))"
add_edits(greedy_token, {
    "sends a place in the worker's own share: a token's id is its place in the whole vocabulary.":
        [f"{NEXT} -> pass", (f"first + {OWN} -> {OWN}", f"{BEST}[1] -> {ALL}.index(max({ALL}))")],
    "counts ids as if all shares had the same size: they may differ.":
        [f"len(own) -> {size}" for size in ("len(shares[0])", "max(map(len, shares))", f"len({ALL}) // len(shares)")],
    "returns the number of the worker: the task asks for its token.": f"{BEST}[1] -> sent.index({BEST})",
    "prefers the last of several equal logits: everywhere, a tie goes to the lowest id.":
        [(LAST, f"{BEST} -> max(sent)"), LAST, f"{BEST} -> max(sent)"],
    "sends the token before its logit: the task asks for (logit, token).":
        "return sent, -> return [pair[::-1] for pair in sent],",
    "sends all logits: a worker's best one is enough.":
        f"return sent, -> return [(one, n) for n, one in enumerate({ALL})],",
    "sends only the best of all: no worker knows which one that is before all have sent theirs.":
        f"return sent, -> return [{BEST}],",
})  # fmt: skip
