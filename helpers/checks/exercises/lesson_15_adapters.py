"""Lesson 15, adapters: two small products beside the base's, and rows of many adapters in one pass."""

from itertools import groupby

import torch

from ..adapted_layers import with_calls, with_multiplications
from ..edits import add_edits
from ..exercise import Exercise


def randn(random, *shapes):
    """Return tensors of these shapes, drawn anew for each seed."""
    draw = torch.Generator().manual_seed(random.randrange(10**6))
    return [torch.randn(shape, generator=draw) for shape in shapes]


adapted_linear = Exercise(
    "adapted_linear(x, weight, a, b, alpha)",
    "an adapter is two small products beside the base's, so the weight stays the same for all rows",
    observe=with_multiplications,
)


@adapted_linear.cases
def _(random):
    drawn = (2, random.randint(8, 12), random.randint(8, 12), 5, random.randint(6, 9))
    for rows, inputs, outputs, rank, alpha in [
        (2, 8, 12, 2, 8), (1, 8, 8, 4, 2), (2, 12, 9, 3, 3), (3, 16, 16, 1, 16), (2, 8, 8, 8, 2), (3, 24, 20, 4, 0.5),
        drawn,
    ]:  # fmt: skip
        shapes = (rows, inputs), (outputs, inputs), (rank, inputs), (outputs, rank)
        given = f"{rows} rows, {inputs} inputs, {outputs} outputs, rank {rank}, alpha {alpha}"
        yield (*randn(random, *shapes), alpha), given


@adapted_linear.reference
def beside_the_base(x, weight, a, b, alpha):
    scale = alpha / len(a)
    return x @ weight.T + scale * (x @ a.T @ b.T)


@adapted_linear.ignoring
def multiplications(result, arguments):
    """Compare the outputs alone: a rule judges the multiplications."""
    return result["outputs"]


@adapted_linear.rule
def does_not_merge(arguments, outcome, right):
    x, weight, a, b, _ = arguments
    scaled = len(x) * len(weight) + a.numel() + b.numel()  # whatever is multiplied by the scale
    most, computed = right.result["multiplications"] + scaled, outcome.result["multiplications"]
    if computed <= most:
        return None
    return (
        f"computes {computed} multiplications, and {most} are enough. A product of B and A is as large as the weight, "
        "and each adapter would need its own"
    )


BESIDE, SMALL = "x @ weight.T + scale * (x @ a.T @ b.T)", "x @ a.T @ b.T"
add_edits(adapted_linear, {
    "forgets the scaling: what A and B add is multiplied by alpha / rank.": "alpha / len(a) -> 1",
    "multiplies by alpha alone: it is divided by the rank, so that another rank needs no other alpha.":
        "alpha / len(a) -> alpha",
    "divides alpha by the root of the rank, as rsLoRA does: this adapter was trained with alpha / rank.":
        "len(a) -> len(a) ** 0.5",
    "divides the rank by alpha: it is the other way around.": "alpha / len(a) -> len(a) / alpha",
    "cuts off the fraction of the scale: an alpha below the rank would make it 0.": "alpha / len(a) -> alpha // len(a)",
    "divides alpha by the inputs or the outputs: the rank is the dimension that A and B share.":
        ["len(a) -> len(b)", "len(a) -> a.shape[1]"],
    "scales the base's product: only the adapter's part is scaled.":
        [f"{BESIDE} -> scale * (x @ weight.T + {SMALL})", f"{BESIDE} -> scale * (x @ weight.T) + {SMALL}"],
    "scales twice, once with A and once with B: once is enough.": "+ scale * -> + scale**2 *",
    "swaps A and B: A comes first and takes the inputs to the rank, B takes the rank to the outputs.":
        [f"{SMALL} -> x @ b @ a", f"{SMALL} -> x @ b.T @ a.T"],
    "gives A the base's outputs: an adapter starts from the layer's inputs.": f"{SMALL} -> x @ weight.T @ a.T @ b.T",
    "returns only what the adapter adds: the base's product is missing.": "x @ weight.T + -> ",
})  # fmt: skip

adapt_rows = Exercise(
    "adapt_rows(x, base, adapters, chunks)",
    "a pass reads the base once, and each adapter of its rows once",
    observe=with_calls,
)


@adapt_rows.cases
def _(random):
    for loaded, texts in [
        ("red blue green", "red1 blue1 red1 -1 blue1"), ("red blue", "-2 blue1 -1"), ("blue red", "red1 red3 red1"),
        ("red", "-1 -2"), ("red blue green", "green2 red1 blue1 green1"), ("red blue", "blue1"),
        ("c a b", "b1 c1 a2 c1 b1 a1 -1 a1"), ("b a", "a3 b1 -1 a1 -1 b4"), ("b a", "a1 a2 b1 b1 a1"),
        ("a b c d e", " ".join(f"{random.choice('abcd-')}{random.choice([1, 1, 2])}" for _ in range(8))),
    ]:  # fmt: skip
        chunks = [(None if text[:-1] == "-" else text[:-1], int(text[-1])) for text in texts.split()]
        inputs, outputs = random.choice([(6, 4), (5, 5), (3, 8)])
        shapes = (sum(tokens for _, tokens in chunks), inputs), (outputs, inputs)
        x, weight = randn(random, *shapes)
        names = enumerate(loaded.split(), 1)
        matrices = {name: tuple(randn(random, (rank, inputs), (outputs, rank))) for rank, name in names}
        yield (x, weight, matrices, chunks), f"chunks {chunks}, loaded are {list(matrices)}"


@adapt_rows.reference
def by_adapter(x, base, adapters, chunks):
    names = names_of_rows(chunks)
    y = base(x)
    for name in set(names) - {None}:
        rows = [row for row, own in enumerate(names) if own == name]
        y[rows] += adapters[name](x[rows])
    return y


def names_of_rows(chunks):
    return [name for name, tokens in chunks for _ in range(tokens)]


def in_groups(names, order=None):
    """Return the rows in the order of their groups: as the adapters first occur, or in another order."""
    order = order or list(dict.fromkeys(names)).index
    return sorted(range(len(names)), key=lambda row: order(names[row]))


def last_without(names):
    return in_groups(names, lambda name: (name is None, name or ""))


def once_per_group(base, x, names):
    rows = in_groups(names)
    y = torch.cat([base(x[list(group)]) for _, group in groupby(rows, key=names.__getitem__)])
    return y[torch.tensor(rows).argsort()]


def with_runs(runs):
    """Return a function that calls an adapter for each run of rows: a name, and as many rows."""

    def by_run(x, base, adapters, chunks):
        y, start = base(x), 0
        for name, tokens in runs(chunks):
            if name is not None:
                y[start : start + tokens] += adapters[name](x[start : start + tokens])
            start += tokens
        return y

    return by_run


def neighbors(chunks):
    return [(name, len(list(rows))) for name, rows in groupby(names_of_rows(chunks))]


ADD, PRODUCTS, OCCURRING = "y[rows] += adapters[name](x[rows])", "adapters[name](x[rows])", "set(names) - {None}"
PER_ROW = "base(x) -> torch.cat([base(row[None]) for row in x])"
PRODUCTS_PER_ROW = f"{PRODUCTS} -> torch.cat([adapters[name](x[[row]]) for row in rows])"
ORDERS = [f"{how}(names)" for how in ("in_groups", "last_without")] + ["in_groups(names, str)"]
add_edits(adapt_rows, {
    "applies one row's adapter to all rows: each row has its own.":
        [f"y = base(x) -> y, names = base(x), [names[{row}]] * len(names)" for row in (0, -1)],
    "adds the products of every adapter to all rows: each row gets those of its own.":
        f"{ADD} -> y += adapters[name](x)",
    "adds an adapter's products to only one of its rows.": "rows = [row for -> rows = [names.index(name) for",
    "returns the rows in the order of the groups: they belong where their inputs are.":
        [f"return y -> return y[{order}]" for order in ORDERS],
    "sorts the rows once more: to undo a sorting, each row goes back to where it was.":
        [f"return y -> return y[{order}][{order}]" for order in ORDERS],
    "calls the base again for each group: each call reads all of its weights, so one call has to serve all rows.":
        ["base(x) -> once_per_group(base, x, names)", PER_ROW, (PER_ROW, PRODUCTS_PER_ROW),
         f"{ADD} -> y[rows] = base(x[rows]) + {PRODUCTS}"],
    "drops the outputs of rows without an adapter: the base's are theirs.":
        ["return y -> y[[name is None for name in names]] = 0; return y",
         "return y -> return y[[name is not None for name in names]]"],
    "gives an adapter to rows that have none: they get what the base returns.":
        [f"y = base(x) -> y, names = base(x), [name or list(adapters)[{place}] for name in names]"
         for place in (0, -1)],
    "replaces the base's outputs by an adapter's products: these are added.": f"{ADD} -> y[rows] = {PRODUCTS}",
    "gives an adapter the base's outputs: it starts from the inputs.": "(x[rows]) -> (y[rows])",
    "calls an adapter again for each of its rows: each call reads its matrices.":
        PRODUCTS_PER_ROW,
    "calls an adapter again for each chunk, or for rows that are apart: its matrices are read again.":
        [with_runs(neighbors), with_runs(list)],
    "takes one row per chunk: a chunk has a row for each of its tokens.":
        "= names_of_rows(chunks) -> = ([name for name, _ in chunks] + [None] * len(x))[: len(x)]",
    "computes an adapter's products for rows that have another one or none, and throws them away.":
        [f"{PRODUCTS} -> adapters[name](x)[rows]",
         (f"{OCCURRING} -> adapters", f"{PRODUCTS} -> adapters[name](x)[rows]")],
    "calls adapters that no row has: hundreds may be loaded, and each call reads matrices.":
        f"{OCCURRING} -> adapters",
})  # fmt: skip


@adapt_rows.rule
def every_row_is_right(arguments, outcome, right):
    off = (outcome.result["outputs"] - right.result["outputs"]).abs().amax(dim=1) > 1e-3
    wrong = off.nonzero().flatten().tolist()
    return f"returns wrong outputs for the rows {wrong}: count them from 0" if wrong else None
