"""Lesson 16, one model on several processes: what each worker has, and what the workers exchange."""

from torch.nn.functional import gelu

from ..calling import or_error
from ..comparing import difference
from ..exercise import Exercise
from ..hand_made import randn


@Exercise.declare(
    "columns, then rows: what a worker computes of the first layer is just what it needs for its share of the second",
    names=("the parts", "the outputs"),
)
def split_mlp(x, up, down, size):
    (w, b), (v, c) = up, down
    shares = zip(w.chunk(size), b.chunk(size), v.chunk(size, 1), strict=True)
    parts = [gelu(x @ own_w.T + own_b, approximate="tanh") @ own_v.T for own_w, own_b, own_v in shares]
    return parts, sum(parts) + c


def _mlp(random, tokens, inputs, inner, outputs, size):
    x, w, b, v, c = randn(random, (tokens, inputs), (inner, inputs), (inner,), (outputs, inner), (outputs,))
    return x, (w, b), (v, c), size


split_mlp.table([
    (1, 4, 8, 4, 2), (3, 4, 6, 4, 2), (2, 6, 6, 3, 3), (4, 8, 16, 8, 4), (2, 3, 5, 2, 1),
], lambda random: [(random.randint(1, 4), 6, 3 * random.randint(2, 4), 3 * random.randint(1, 3), 3)],
   given="{} tokens, {} inputs, {} inner numbers, {} outputs, {} workers", build=_mlp)  # fmt: skip


@split_mlp.ignoring
def where_the_second_bias_is_added(result, arguments):
    (parts, outputs), (_, _, (_, bias), _) = result, arguments
    first = split_mlp.solution(*arguments)[0][0]
    adds = difference(parts[0], first + bias, strict=False) is None
    return ([first, *parts[1:]] if adds else parts), outputs


SUM, GELU, OUT = "sum(parts) + c", 'gelu(x @ own_w.T + own_b, approximate="tanh")', "@ own_v.T"
BY_ROWS = "w.chunk(size) -> zip(x.chunk(size, 1), w.chunk(size, 1))", "x @ own_w.T -> own_w[0] @ own_w[1].T"
EVERYWHERE, WHOLE = "b.chunk(size) -> [b] * size", "v.chunk(size, 1) -> [v] * size"
IN_COLUMNS = "v.chunk(size, 1) -> v.chunk(size)", f"{SUM} -> torch.cat(parts, 1) + c"


def instead_of_the_sum(*wrong):
    """Return edits: with the second bias after the sum, without it, and with the bias that worker 0 adds."""
    changes = ("", " + c"), ("", ""), ("parts[0] = parts[0] + c; ", "")
    return [
        f"return parts, {SUM} -> {before}return parts, {instead}{after}"
        for instead in wrong
        for before, after in changes
    ]


split_mlp.add_misconceptions({
    "splits the first layer by rows and applies the activation to partial sums: GELU of a sum is not the sum of GELUs.":
        [(*BY_ROWS, bias, *rest) for bias in (EVERYWHERE, "b.chunk(size) -> [b] + [0 * b] * (size - 1)")
         for rest in ((WHOLE,), IN_COLUMNS)],
    "adds the second bias several times: the sum must contain it once.":
        [(f"{SUM} -> sum(parts)", f"{OUT} -> {OUT} + c"), f"{OUT} -> {OUT} + c", f"{SUM} -> {SUM} + c"],
    "leaves out the second bias.": f"{SUM} -> sum(parts)",
    "leaves out the first bias: each worker adds its share of it before the activation.": " + own_b -> ",
    "leaves out the activation: two linear layers in a row are one.": f"{GELU} -> (x @ own_w.T + own_b)",
    "joins the parts instead of adding them: each part has all outputs, and of each a share of its sum.":
        instead_of_the_sum(*(f"torch.{how}(parts{dim})" for how in ("cat", "stack") for dim in ("", ", 1"))),
    "splits both layers by columns: each worker of the second one needs the inner numbers of all others, which is a "
    "second exchange.": ("w.chunk(size) -> [w] * size", EVERYWHERE, *IN_COLUMNS),
    "computes the whole MLP in every worker: each has a share of the inner numbers.":
        [("w.chunk(size) -> [w] * size", EVERYWHERE, WHOLE, *sums) for sums in (
            (f"{SUM} -> parts[0] + c",), (f"{SUM} -> sum(parts) / size + c",), (f"{OUT} -> {OUT} / size",),
            (f"{OUT} -> {OUT} + c", f"{SUM} -> parts[0]"))],
})  # fmt: skip


@Exercise.declare("a worker has whole heads, and a query head is where its keys and values are", observe=or_error)
def qkv_rows(heads, kv_heads, head_dim, size):
    for count in (heads, kv_heads):
        if count % size:
            raise ValueError(f"{size} workers cannot share {count} heads equally")
    shares = [[] for _ in range(size)]
    for first, count in ((0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads)):
        for n, own in enumerate(shares):
            begin, end = first + n * count // size, first + (n + 1) * count // size
            own += range(begin * head_dim, end * head_dim)
    return shares


qkv_rows.table([
    (4, 2, 1, 2), (4, 4, 2, 2), (8, 2, 2, 2), (6, 3, 1, 3), (8, 4, 2, 4), (12, 4, 3, 2), (5, 5, 2, 5), (4, 1, 2, 1),
    (8, 2, 2, 4), (6, 6, 1, 4), (6, 2, 2, 3), (5, 5, 4, 2), (9, 3, 1, 2), (16, 8, 1, 3),
], lambda random: [
    (kv_heads * random.randint(2, 3), kv_heads, random.randint(2, 4), size)
    for size in (2, 3) for kv_heads in (2 * size, 2 * size + 1)
])  # fmt: skip


@qkv_rows.ignoring
def other_words(result, arguments):
    """Accept any text of an error that is due."""
    is_due = any(count % arguments[-1] for count in arguments[:2])
    return result | {"error": "a ValueError"} if is_due and result["error"] is not None else result


PARTS = "((0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads))"
RAISE = 'raise ValueError(f"{size} workers cannot share {count} heads equally")'
SPAN = "first + n * count // size, first + (n + 1) * count // size"
DROPPED = f"{SPAN} -> first + n * (count // size), first + (n + 1) * (count // size)"
ROWS = "range(begin * head_dim, end * head_dim)"
TURNS = "[row for head in range(first + n, first + count, size) for row in range(head * head_dim, -~head * head_dim)]"
qkv_rows.add_misconceptions({
    "drops the heads left over if workers can't share them: raise a ValueError.": (f"{RAISE} -> pass", DROPPED),
    "gives some workers more heads than others: all would wait for them, so raise a ValueError.": f"{RAISE} -> pass",
    "checks only the query heads: KV heads have to be shared out equally, too.": "(heads, kv_heads): -> (heads,):",
    "cuts the whole matrix into equal pieces: the first workers would get the queries, the last one the values.":
        f"{PARTS} -> ((0, heads + 2 * kv_heads),)",
    "shares out only the queries: a worker also computes the keys and values they read.": f"{PARTS} -> ((0, heads),)",
    "shares out the queries without their KV heads: query head 0 reads KV head 0, and so do its neighbors.":
        [f"{ROWS} -> ({kv_rows} if first else {query_rows})"
         for kv_rows, query_rows in ((TURNS, TURNS), (ROWS, TURNS), (TURNS, ROWS))],
    "counts as many KV heads as query heads: here, several query heads may share one.":
        f"{PARTS} -> ((0, heads), (heads, heads), (2 * heads, heads))",
})  # fmt: skip


@Exercise.declare(
    "the best of the workers' best tokens is the best of all, so two numbers from each worker are enough",
    names=("what the workers send", "the token"),
)
def greedy_token(shares):
    sent, first = [], 0
    for own in shares:
        sent.append((max(own), first + own.index(max(own))))
        first += len(own)
    return sent, max(sent, key=lambda pair: pair[0])[1]


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

NEXT, BEST = "first += len(own)", "max(sent, key=lambda pair: pair[0])"
OWN, ALL = "own.index(max(own))", "sum(shares, [])"
LAST = f"{OWN} -> len(own) - 1 - own[::-1].index(max(own))"
greedy_token.add_misconceptions({
    "sends a place in the worker's own share: a token's id is its place in the whole vocabulary.":
        [f"{NEXT} -> pass", (f"first + {OWN} -> {OWN}", f"{BEST}[1] -> {ALL}.index(max({ALL}))")],
    "counts ids as if all shares had the same size: they may differ.":
        [f"len(own) -> {size}" for size in ("len(shares[0])", "max(map(len, shares))", f"len({ALL}) // len(shares)")],
    "returns the number of the worker: the task asks for its token.": f"{BEST}[1] -> sent.index({BEST})",
    "prefers the last of several equal logits: everywhere, a tie goes to the lowest id.":
        [(LAST, f"{BEST} -> max(sent)"), LAST, f"{BEST} -> max(sent)"],
    "sends the token first: the task asks for (logit, token).": "return sent, -> return [pair[::-1] for pair in sent],",
    "sends all logits: a worker's best one is enough.":
        f"return sent, -> return [(logit, n) for n, logit in enumerate({ALL})],",
    "sends only the best of all: no worker knows it before all have sent theirs.": f"return sent, -> return [{BEST}],",
})  # fmt: skip
