"""Lesson 15, adapters: two small products beside the base's, and rows of many adapters in one pass."""

import torch

from ..adapted_layers import with_calls, with_multiplications
from ..exercise import Exercise


def randn(random, *shapes):
    """Return tensors of these shapes, drawn anew for each seed."""
    draw = torch.Generator().manual_seed(random.randrange(10**6))
    return [torch.randn(shape, generator=draw) for shape in shapes]


@Exercise.declare(
    "an adapter is two small products beside the base's, so the weight stays the same for all rows",
    observe=with_multiplications,
)
def adapted_linear(x, weight, a, b, alpha):
    scale = alpha / len(a)
    return x @ weight.T + scale * (x @ a.T @ b.T)


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
adapted_linear.add_misconceptions({
    "forgets the scaling: what A and B add is multiplied by alpha / rank.": "alpha / len(a) -> 1",
    "multiplies by alpha alone: it is divided by the rank, so that another rank needs no other alpha.":
        "alpha / len(a) -> alpha",
    "scales the base's product: only the adapter's part is scaled.":
        [f"{BESIDE} -> scale * (x @ weight.T + {SMALL})", f"{BESIDE} -> scale * (x @ weight.T) + {SMALL}"],
    "swaps A and B: A comes first and takes the inputs to the rank, B takes the rank to the outputs.":
        [f"{SMALL} -> x @ b @ a", f"{SMALL} -> x @ b.T @ a.T"],
    "returns only what the adapter adds: the base's product is missing.": "x @ weight.T + -> ",
})  # fmt: skip


@Exercise.declare("a pass reads the base once, and each adapter of its rows once", observe=with_calls)
def adapt_rows(x, base, adapters, chunks):
    names = names_of_rows(chunks)
    y = base(x)
    for name in set(names) - {None}:
        rows = [row for row, own in enumerate(names) if own == name]
        y[rows] += adapters[name](x[rows])
    return y


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


def names_of_rows(chunks):
    return [name for name, tokens in chunks for _ in range(tokens)]


def chunk_by_chunk(x, base, adapters, chunks):
    y, start = base(x), 0
    for name, tokens in chunks:
        if name is not None:
            y[start : start + tokens] += adapters[name](x[start : start + tokens])
        start += tokens
    return y


ADD, PRODUCTS, OCCURRING = "y[rows] += adapters[name](x[rows])", "adapters[name](x[rows])", "set(names) - {None}"
PER_ROW = "base(x) -> torch.cat([base(row[None]) for row in x])"
PRODUCTS_PER_ROW = f"{PRODUCTS} -> torch.cat([adapters[name](x[[row]]) for row in rows])"
adapt_rows.add_misconceptions({
    "adds the products of every adapter to all rows: each row gets those of its own.":
        f"{ADD} -> y += adapters[name](x)",
    "calls the base again for each group: each call reads all of its weights, so one call has to serve all rows.":
        [PER_ROW, (PER_ROW, PRODUCTS_PER_ROW), f"{ADD} -> y[rows] = base(x[rows]) + {PRODUCTS}"],
    "replaces the base's outputs by an adapter's products: these are added.": f"{ADD} -> y[rows] = {PRODUCTS}",
    "gives an adapter the base's outputs: it starts from the inputs.": "(x[rows]) -> (y[rows])",
    "calls an adapter again for each of its rows: each call reads its matrices.": PRODUCTS_PER_ROW,
    "calls an adapter again for each chunk: its matrices are read again.": chunk_by_chunk,
    "computes an adapter's products for rows that have another one or none, and throws them away.":
        f"{PRODUCTS} -> adapters[name](x)[rows]",
    "calls adapters that no row has: hundreds may be loaded, and each call reads matrices.":
        f"{OCCURRING} -> adapters",
})  # fmt: skip


@adapt_rows.rule
def every_row_is_right(arguments, outcome, right):
    off = (outcome.result["outputs"] - right.result["outputs"]).abs().amax(dim=1) > 1e-3
    wrong = off.nonzero().flatten().tolist()
    return f"returns wrong outputs for the rows {wrong}: count them from 0" if wrong else None
