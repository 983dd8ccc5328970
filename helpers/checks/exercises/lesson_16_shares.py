"""Lesson 16, one model on several processes: what each worker has of a layer, of an MLP and of the attention."""

import re

import torch
from torch.nn.functional import gelu

from ..calling import or_error
from ..comparing import difference
from ..edits import add_edits
from ..exercise import Exercise
from .lesson_15_adapters import randn

split_linear = Exercise(
    "split_linear(weight, bias, size, by)",
    "the outputs of a layer that is split by columns are joined, those of one that is split by rows are added",
)


@split_linear.cases
def _(random):
    size = random.randint(2, 5)
    drawn = size * random.randint(1, 3), size * random.randint(1, 3), size
    for outputs, inputs, size in [(4, 6, 2), (6, 4, 2), (9, 6, 3), (4, 8, 4), (6, 6, 2), (3, 5, 1), drawn]:
        for by in ("columns", "rows"):
            given = f"{outputs} outputs, {inputs} inputs, {size} workers, by {by}"
            yield (*randn(random, (outputs, inputs), (outputs,)), size, by), given


@split_linear.reference
def neighbors_together(weight, bias, size, by):
    none = torch.zeros_like(bias)
    if by == "columns":
        return list(zip(weight.chunk(size, 0), bias.chunk(size), strict=True))
    return list(zip(weight.chunk(size, 1), [bias] + [none] * (size - 1), strict=True))


CUT_W, CUT_B, ONCE = "weight.chunk(size, 0)", "bias.chunk(size)", "[bias] + [none] * (size - 1)"
IN_TURN = "{} -> [{}n::size] for n in range(size)]"
W_IN_TURN = [IN_TURN.format(f"weight.chunk(size, {dim})", f"weight[{':, ' * dim}") for dim in (0, 1)]
COLUMNS_IN_TURN = W_IN_TURN[0], IN_TURN.format(CUT_B, "bias[")
add_edits(split_linear, {
    "exchanges columns and rows: the weight is stored as [outputs, inputs], and a split by columns shares out the "
    "outputs.": ['"columns" -> "rows"', ("size, 0 -> size, -2", "size, 1 -> size, 0", "size, -2 -> size, 1")],
    "splits both kinds of layers in the same way: `by` says which way.": ["by == -> by or", "if by == -> if not"],
    "gives every worker the whole bias of a layer that is split by rows: the sum would contain it several times.":
        f"{ONCE} -> [bias] * size",
    "cuts the bias of a layer that is split by rows: each worker's results have all outputs, so the pieces don't fit.":
        f"{ONCE} -> {CUT_B}",
    "divides the bias of a layer that is split by rows by the number of workers: here, worker 0 has all of it.":
        f"{ONCE} -> [bias / size] * size",
    "gives the bias of a layer that is split by rows to no worker: the sum must contain it once.":
        f"{ONCE} -> [none] * size",
    "gives workers the whole bias of a layer that is split by columns: a worker has some outputs, and needs theirs.":
        f"{CUT_B} -> [bias] * size",
    "gives only worker 0 a bias when it splits by columns: these outputs are not added, so each keeps its own.":
        f"{CUT_B} -> [one * (not n) for n, one in enumerate({CUT_B})]",
    "deals out rows or columns in turn: neighbors stay together, so that joined outputs are in order.":
        [(*COLUMNS_IN_TURN, W_IN_TURN[1]), COLUMNS_IN_TURN, W_IN_TURN[1]],
    "gives every worker the whole weight: none of them would save anything.":
        [(f"{CUT_W} -> [weight] * size", "weight.chunk(size, 1) -> [weight] * size", *bias)
         for bias in ((), (f"{ONCE} -> [bias] * size", f"{CUT_B} -> [bias] * size"))],
})  # fmt: skip

split_mlp = Exercise(
    "split_mlp(x, up, down, size)",
    "columns, then rows: what a worker computes of the first layer is just what it needs for its share of the second",
    names=("the parts", "the outputs"),
)


@split_mlp.cases
def _(random):
    size = random.randint(2, 4)
    drawn = random.randint(1, 4), 2 * size, size * random.randint(2, 4), size * random.randint(1, 3), size
    for tokens, inputs, inner, outputs, size in [
        (1, 4, 8, 4, 2), (3, 4, 6, 4, 2), (2, 6, 6, 3, 3), (4, 8, 16, 8, 4), (2, 3, 5, 2, 1), drawn
    ]:  # fmt: skip
        x, w, b, v, c = randn(random, (tokens, inputs), (inner, inputs), (inner,), (outputs, inner), (outputs,))
        given = f"{tokens} tokens, {inputs} inputs, {inner} inner numbers, {outputs} outputs, {size} workers"
        yield (x, (w, b), (v, c), size), given


@split_mlp.reference
def one_sum(x, up, down, size):
    (w, b), (v, c) = up, down
    shares = zip(w.chunk(size), b.chunk(size), v.chunk(size, 1), strict=True)
    parts = [gelu(x @ own_w.T + own_b, approximate="tanh") @ own_v.T for own_w, own_b, own_v in shares]
    return parts, sum(parts) + c


@split_mlp.ignoring
def where_the_second_bias_is_added(result, arguments):
    (parts, outputs), (_, _, (_, bias), _) = result, arguments
    first = one_sum(*arguments)[0][0]
    adds = difference(parts[0], first + bias, strict=False) is None
    return ([first, *parts[1:]] if adds else parts), outputs


SUM, GELU, OUT = "sum(parts) + c", 'gelu(x @ own_w.T + own_b, approximate="tanh")', "@ own_v.T"


def instead_of_the_sum(*wrong):
    """Return edits: with the second bias after the sum, without it, and with the bias that worker 0 adds."""
    at_0 = f"return parts, {SUM} -> parts[0] = parts[0] + c\n    return parts, "
    return [edit for one in wrong for edit in (f"{SUM} -> {one} + c", f"{SUM} -> {one}", at_0 + one)]


BY_ROWS = "w.chunk(size) -> zip(x.chunk(size, 1), w.chunk(size, 1))", "x @ own_w.T -> own_w[0] @ own_w[1].T"
EVERYWHERE = "b.chunk(size) -> [b] * size"
AT_0 = "b.chunk(size) -> [b] + [0 * b] * (size - 1)"
WHOLE = "v.chunk(size, 1) -> [v] * size"
IN_COLUMNS = "v.chunk(size, 1) -> v.chunk(size)", f"{SUM} -> torch.cat(parts, 1) + c"
ALL = "w.chunk(size) -> [w] * size", EVERYWHERE, WHOLE
add_edits(split_mlp, {
    "splits the first layer by rows and applies the activation to partial sums: GELU of a sum is not the sum of GELUs.":
        [(*BY_ROWS, bias, *rest) for bias in (EVERYWHERE, AT_0) for rest in ((WHOLE,), IN_COLUMNS)],
    "adds the second bias in every worker: the sum then contains it once for each of them.":
        [(f"{SUM} -> {total}", f"{OUT} -> {OUT} + c") for total in ("sum(parts)", SUM)],
    "adds the second bias twice: in a worker, and after the sum.": f"{SUM} -> {SUM} + c",
    "leaves out the second bias.": f"{SUM} -> sum(parts)",
    "leaves out the first bias: each worker adds its share of it before the activation.": " + own_b -> ",
    "leaves out the activation: two linear layers in a row are one.": f"{GELU} -> (x @ own_w.T + own_b)",
    "applies the activation after the second layer: its place is between the two.":
        [(f"{GELU} {OUT} -> gelu((x @ own_w.T + own_b) {OUT}, approximate='tanh')",),
         (f"{GELU} -> (x @ own_w.T + own_b)", f"{SUM} -> gelu({SUM}, approximate='tanh')")],
    "computes another GELU: this one has the approximation 'tanh', as in GPT-2.": ', approximate="tanh" -> ',
    "joins the parts instead of adding them: each part has all outputs, and of each a share of its sum.":
        instead_of_the_sum(*(f"torch.{how}(parts{dim})" for how in ("cat", "stack") for dim in ("", ", 1"))),
    "returns the mean of the parts: they are shares of a sum.": instead_of_the_sum("sum(parts) / size"),
    "forgets the sum: the outputs are those of a single worker.": instead_of_the_sum("parts[0]", "parts[-1]"),
    "splits both layers by columns: each worker of the second one needs the inner numbers of all others, which is a "
    "second exchange.": [("w.chunk(size) -> [w] * size", EVERYWHERE, *IN_COLUMNS)],
    "computes the whole MLP in every worker: each has a share of the inner numbers.":
        [(*ALL, f"{SUM} -> parts[0] + c"), (*ALL, f"{SUM} -> sum(parts) / size + c"),
         (*ALL, f"{OUT} -> {OUT} / size"), (*ALL, f"{OUT} -> {OUT} + c", f"{SUM} -> parts[0]")],
})  # fmt: skip

qkv_rows = Exercise(
    "qkv_rows(heads, kv_heads, head_dim, size)",
    "a worker has whole heads, and a query head is where its keys and values are",
    observe=or_error,
)
qkv_rows.table([
    (4, 2, 1, 2), (4, 4, 2, 2), (8, 2, 2, 2), (6, 3, 1, 3), (8, 4, 2, 4), (12, 4, 3, 2), (5, 5, 2, 5), (4, 1, 2, 1),
    (8, 2, 2, 4), (6, 6, 1, 4), (6, 2, 2, 3), (5, 5, 4, 2), (9, 3, 1, 2), (16, 8, 1, 3),
], lambda random: [
    (kv_heads * random.randint(2, 3), kv_heads, random.randint(2, 4), size)
    for size in (2, 3) for kv_heads in (2 * size, 2 * size + 1)
])  # fmt: skip


@qkv_rows.reference
def part_by_part(heads, kv_heads, head_dim, size):
    for count in (heads, kv_heads):
        if count % size:
            raise ValueError(f"{size} workers cannot share {count} heads equally")
    shares = [[] for _ in range(size)]
    for first, count in ((0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads)):
        for n, own in enumerate(shares):
            begin, end = first + n * count // size, first + (n + 1) * count // size
            own += range(begin * head_dim, end * head_dim)
    return shares


@qkv_rows.ignoring
def other_words(result, arguments):
    """Compare of an error, if one is due, whether it names the workers and a number of heads they can't share."""
    heads, kv_heads, _, size = arguments
    named, uneven = set(map(int, re.findall(r"\d+", result["error"] or ""))), {heads, kv_heads}
    if kv_heads % size and size in named and any(count % size for count in named & uneven):
        return result | {"error": f"a ValueError that names {size} workers and the heads they can't share"}
    return result


PARTS = "((0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads))"
RAISE = 'raise ValueError(f"{size} workers cannot share {count} heads equally")'
QUERIES_ONLY = "(heads, kv_heads): -> (heads,):"
SPAN = "first + n * count // size, first + (n + 1) * count // size"
DROPPED = f"{SPAN} -> first + n * (count // size), first + (n + 1) * (count // size)"
ROWS = "range(begin * head_dim, end * head_dim)"
TURNS = "[row for head in range(first + n, first + count, size) for row in range(head * head_dim, -~head * head_dim)]"
add_edits(qkv_rows, {
    "drops the heads that are left over when the workers can't share them equally. Raise a ValueError.":
        (f"{RAISE} -> pass", DROPPED),
    "gives some workers more heads than others: each pass would wait for them, so raise a ValueError.":
        f"{RAISE} -> pass",
    "checks only the query heads: the KV heads are fewer, and have to be shared out equally, too.":
        [QUERIES_ONLY, (QUERIES_ONLY, DROPPED)],
    "cuts the whole matrix into equal pieces: the first workers would get the queries, the last one the values.":
        f"{PARTS} -> ((0, heads + 2 * kv_heads),)",
    "shares out only the queries: a worker also computes the keys and values that its queries read.":
        f"{PARTS} -> ((0, heads),)",
    "counts as many KV heads as query heads: here, several query heads may share one.":
        f"{PARTS} -> ((0, heads), (heads, heads), (2 * heads, heads))",
    "gives every worker all KV heads: it needs those that its own query heads read, and no others.":
        f"{SPAN} -> (first, first + count) if first else (n * count // size, (n + 1) * count // size)",
    "shares out the queries without their KV heads: query head 0 reads KV head 0, and so do its neighbors.":
        [f"{ROWS} -> ({one} if first else {other})" for one, other in ((TURNS, TURNS), (ROWS, TURNS), (TURNS, ROWS))],
    "returns heads: each has as many rows as `head_dim` says.": f"{ROWS} -> range(begin, end)",
})  # fmt: skip
