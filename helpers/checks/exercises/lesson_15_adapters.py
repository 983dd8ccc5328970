"""Lesson 15, adapters and live weights: two small products, rows of many adapters, shared blocks, new weights."""

from itertools import groupby

import torch

from ..adapted_layers import with_calls, with_multiplications
from ..edits import add_edits
from ..exercise import Exercise

adapted_linear = Exercise(
    "adapted_linear(x, weight, a, b, alpha)",
    "an adapter is two small products beside the base's, so the weight stays the same for all rows",
    observe=with_multiplications,
)


@adapted_linear.cases
def _(random):
    draw = torch.Generator().manual_seed(random.randrange(10**6))
    drawn = (2, random.randint(8, 12), random.randint(8, 12), 5, random.randint(6, 9))
    for rows, inputs, outputs, rank, alpha in [
        (2, 8, 12, 2, 8), (1, 8, 8, 4, 2), (2, 12, 9, 3, 3), (3, 16, 16, 1, 16), (2, 8, 8, 8, 2), (3, 24, 20, 4, 0.5),
        drawn,
    ]:  # fmt: skip
        shapes = (rows, inputs), (outputs, inputs), (rank, inputs), (outputs, rank)
        given = f"{rows} rows, {inputs} inputs, {outputs} outputs, rank {rank}, alpha {alpha}"
        yield (*(torch.randn(shape, generator=draw) for shape in shapes), alpha), given


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
    "divides by the rank, and leaves out alpha.": "alpha / len(a) -> 1 / len(a)",
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
    "returns only the base's product.": f"{BESIDE} -> x @ weight.T",
})  # fmt: skip

adapt_rows = Exercise(
    "adapt_rows(x, base, adapters, names)",
    "a pass reads the base once, and each adapter of its rows once",
    observe=with_calls,
)


@adapt_rows.cases
def _(random):
    draw = torch.Generator().manual_seed(random.randrange(10**6))
    for loaded, texts in [
        ("red blue green", "red blue red - blue"), ("red blue", "- blue -"), ("blue red", "red red red"),
        ("red", "- -"), ("red blue green", "green red blue green"), ("red blue", "blue"), ("c a b", "b c a c b a - a"),
        ("b a", "a b - a b -"), ("a b c d e", " ".join(random.choices("abcd-", k=9))),
    ]:  # fmt: skip
        names = [None if name == "-" else name for name in texts.split()]
        inputs, outputs = random.choice([(6, 4), (5, 5), (3, 8)])
        x, weight = (torch.randn(rows, inputs, generator=draw) for rows in (len(names), outputs))
        matrices = {}
        for rank, name in enumerate(loaded.split(), 1):
            shapes = (rank, inputs), (outputs, rank)
            matrices[name] = tuple(torch.randn(shape, generator=draw) for shape in shapes)
        yield (x, weight, matrices, names), f"the rows' adapters {names}, loaded are {list(matrices)}"


@adapt_rows.reference
def by_adapter(x, base, adapters, names):
    y = base(x)
    for name in set(names) - {None}:
        rows = [row for row, own in enumerate(names) if own == name]
        y[rows] += adapters[name](x[rows])
    return y


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


def of_neighbors(x, base, adapters, names):
    y = base(x)
    for name, group in groupby(range(len(names)), key=names.__getitem__):
        rows = list(group)
        if name is not None:
            y[rows] += adapters[name](x[rows])
    return y


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
    "sorts the rows a second time: to undo a sorting, each row goes back to where it was.":
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
    "groups only neighbors: an adapter whose rows are apart is called again, and its matrices are read again.":
        of_neighbors,
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


cached_blocks = Exercise(
    "cached_blocks(events, block_size)",
    "keys depend on the weights that compute them, so a cached block belongs to its weights and to its tokens",
)
TEXT = [7, 3, 9, 1, 4, 4, 0]
LOADED = [("load", "red", "A1"), ("load", "blue", "B2")]
RED, BLUE, PINK, BASE = [("request", name, TEXT) for name in ("red", "blue", "pink", None)]
UNLOAD, UPDATE = ("unload", "red"), ("update",)
ANOTHER, SAME = [UNLOAD, ("load", "red", "C3")], [UNLOAD, LOADED[0]]
OTHERS = [[7, 3, 9, 1, 5, 5, 5], [8, 3, 9, 1, 4, 4], [7, 3], [7]]


def _drawn(random):
    events, loaded = [], set()
    for _ in range(24):
        name, chance = random.choice(["red", "blue"]), random.random()
        if chance < 0.1:
            events.append(UPDATE)
        elif chance < 0.35:
            events.append(("unload", name) if name in loaded else ("load", name, random.choice(["A1", "B2"])))
            loaded ^= {name}
        else:
            tokens = random.choices([0, 1], k=random.randint(2, 8))
            events.append(("request", random.choice([None, *sorted(loaded)]), tokens))
    return [(events, 2)]


cached_blocks.table([
    ([BASE, BASE], 3), ([*LOADED, RED, RED, BLUE, BLUE, BASE, BASE, RED], 2), ([*LOADED, BASE, RED, BLUE, RED], 2),
    ([*LOADED, RED, BASE, BLUE], 2), ([*LOADED, RED, *ANOTHER, RED, RED, BLUE], 2),
    ([*LOADED, RED, BLUE, *ANOTHER, RED, *SAME, RED, BLUE], 2),
    ([*LOADED, ("load", "pink", "A1"), RED, PINK, UNLOAD, PINK], 3),
    ([*LOADED, BASE, RED, UPDATE, RED, BASE, RED, BASE], 2), ([*LOADED, RED, UPDATE, RED, BLUE, RED], 3),
    ([*LOADED, BASE, UNLOAD, BASE, BLUE, UPDATE, LOADED[0], RED, BASE], 2),
    ([*LOADED, RED, *(("request", "red", tokens) for tokens in OTHERS), ("request", "blue", TEXT[:4])], 2),
    ([("request", None, TEXT[:end]) for end in (2, 4, 7, 7)], 2),
    ([("request", None, tokens) for tokens in ([1, 2, 1, 2], [1, 2, 3, 3], [3, 3, 1, 2], [5, 5, 1, 2])], 2),
    ([("request", None, tokens) for tokens in ([1, 2, 3, 4, 9, 9], [8, 8, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])], 2),
    ([("request", None, tokens) for tokens in ([1, 2, 9], [8, 2, 5, 7], [1, 2, 5, 7])], 1),
    # names that are other adapters' files, and files that continue like tokens
    ([("load", "A1", "B2"), ("load", "B2", "A1"), ("request", "A1", TEXT), ("request", "B2", TEXT), ("unload", "A1"),
      ("load", "A1", "A1"), ("request", "A1", TEXT)], 2),
    ([("load", "red", "A1"), ("load", "blue", "A12"), ("request", "red", [23, 5, 6]), ("request", "blue", [3, 5, 6])],
     1),
], _drawn)  # fmt: skip


@cached_blocks.reference
def by_files(events, block_size):
    files, cache, found = {None: ""}, set(), []
    for kind, *rest in events:
        if kind == "load":
            files[rest[0]] = rest[1]
        elif kind == "update":
            cache.clear()
        elif kind == "request":
            name, ids = rest
            keys = [(files[name], *ids[:end]) for end in range(block_size, len(ids) + 1, block_size)]
            found.append(sum(key in cache for key in keys))
            cache.update(keys)
    return found


COUNT, LOAD = "sum(key in cache for key in keys)", 'if kind == "load":'
OTHER = "An adapter changes keys, too."
UPDATED = 'elif kind == "update":'
SEEN = [f"{place}*ids[{start} : end]" for place in ("", "end, ")
        for start in ("end - block_size", "max(0, end - 2 * block_size)")]  # fmt: skip
LEADING = "next((n for n, key in enumerate(keys) if key not in cache), len(keys))"
FORGET = "cache = {key for key in cache if key[0] != files.get(rest[0])}"
add_edits(cached_blocks, {
    f"shares blocks across adapters, and with the base model. {OTHER}": "(files[name], -> (0,",
    f"lets requests of an adapter use the base model's blocks. {OTHER}":
        'key in cache for -> key in cache or ("", *key[1:]) in cache for',
    "recognizes blocks by their tokens alone, as in lesson 8: keys depend on all weights that compute them.":
        ("(files[name], -> (0,", "cache.clear() -> pass"),
    "recognizes blocks by their tokens and a name: other files and other weights would find old blocks.":
        ("(files[name], -> (name,", "cache.clear() -> pass"),
    "recognizes an adapter by its name: other files under the same name would find the blocks of the old ones.":
        "(files[name], -> (name,",
    "keeps apart two names of the same files: these compute the same keys.": "(files[name], -> (files[name], name,",
    "gives each request blocks of its own: nothing is ever shared.": "(files[name], -> (len(found),",
    "shares nothing among the requests of an adapter: the same adapter computes the same keys for the same text.":
        "(files[name], -> (name and len(found),",
    "forgets an adapter's blocks when it is unloaded or loaded: the same files compute the same keys whenever they are "
    "loaded.": ["rest[1] -> rest[1], object()", f'{UPDATED} -> elif kind == "unload": {FORGET}\n        {UPDATED}'],
    "empties the cache when an adapter is unloaded or loaded: the other blocks are as right as before.":
        [f"{LOAD} -> if kind in {kinds}: cache.clear()\n        {LOAD}"
         for kinds in (["load"], ["unload"], ["load", "unload"])],
    "keeps blocks when the weights are updated: their keys are those of the old weights.": "cache.clear() -> pass",
    "forgets only the base model's blocks at an update: an adapter's keys are computed with the model's weights, too.":
        "cache.clear() -> cache = {key for key in cache if key[0]}",
    "forgets only the adapters' blocks at an update: the base model's are those of the old weights, too.":
        "cache.clear() -> cache = {key for key in cache if not key[0]}",
    "looks only at a block's own tokens, or back at one block more: keys depend on everything before them.":
        [(f"*ids[:end] -> {seen}", f"{COUNT} -> {count}") for seen in SEEN for count in (COUNT, LEADING)],
    "shares blocks only between equal prompts: an equal beginning is enough.":
        "(files[name], *ids[:end]) -> (files[name], end, *ids)",
    "leaves out a block that holds a prompt's last token: in this task, it counts.":
        ["len(ids) + 1 -> len(ids)", f"{COUNT} -> min((len(ids) - 1) // block_size, {COUNT})"],
    "counts a block that is not full: it will get more tokens, so it cannot be shared yet.":
        "len(ids) + 1 -> len(ids) + block_size",
    "finds the blocks that the request itself has just computed.":
        ("cache.update(keys) -> pass", "found.append( -> cache.update(keys); found.append("),
    "counts tokens: the task asks for blocks.": f"{COUNT} -> block_size * {COUNT}",
    "does not keep the blocks of requests that have found some: the rest of their text is new.":
        "cache.update(keys) -> cache.update([] if found[-1] else keys)",
})  # fmt: skip

live_update = Exercise(
    "live_update(requests, update, running)",
    "a token is of the weights of its pass, and so must be all keys that it attends to",
    names=("the tokens of the old weights", "the tokens computed in each pass"),
)
WAITS = [(0, 2, 8), (2, 7, 2), (3, 1, 1), (6, 3, 2)]
live_update.table([
    (requests, update, running)
    for requests, update in [
        ([(0, 5, 4), (0, 3, 6)], 2), ([(0, 5, 4), (1, 3, 2), (3, 4, 3)], 3), ([(0, 6, 3), (3, 2, 2)], 1),
        ([(0, 4, 3), (1, 9, 2)], 0), ([(0, 4, 3), (1, 9, 2)], 3), ([(0, 4, 2), (0, 7, 1)], 9),
        (WAITS, 2), (WAITS, 3), (WAITS, 7), ([(0, 30, 5), (0, 30, 5), (4, 30, 1)], 4),
    ]
    for running in ("recompute", "finish")
], lambda random: [
    ([(0, 3, 8), *((random.randint(0, 7), random.randint(1, 9), random.randint(1, 6)) for _ in range(3))], update, how)
    for update in (random.randint(1, 3), random.randint(4, 6)) for how in ("recompute", "finish")
], given="requests {}, new weights before pass {}, running={}")  # fmt: skip


@live_update.reference
def pass_by_pass(requests, update, running):
    old, done, cached = ([0] * len(requests) for _ in range(3))
    passes, is_new = [], False
    while any(done[n] < most for n, (_, _, most) in enumerate(requests)):
        begun = [n for n, (arrival, _, most) in enumerate(requests) if 0 < done[n] < most]
        if not is_new and len(passes) >= update and (running == "recompute" or not begun):
            is_new, cached = True, [0] * len(requests)
        passes.append(0)
        for n, (arrival, prompt, most) in enumerate(requests):
            waits = update < len(passes) and not is_new and not done[n]
            if arrival < len(passes) and done[n] < most and not waits:
                passes[-1] += prompt + done[n] - cached[n]
                cached[n] = prompt + done[n]
                done[n] += 1
                old[n] += not is_new
    return old, passes


ALL, WHEN = "is_new, cached = True, [0] * len(requests)", '(running == "recompute" or not begun)'
RESTARTED = "[0 if n in begun else one for n, one in enumerate({})]"
add_edits(live_update, {
    "keeps the keys of the old weights: later tokens would attend to a mixture of both.":
        [f"{ALL} -> is_new = True", (f"{ALL} -> is_new = True", f"{WHEN} -> True")],
    "recomputes only the prompts, or only the generated tokens: the keys of both are of the old weights.":
        [f"{ALL} -> is_new, cached = True, [{kept} if n in begun else 0 for n in range(len(requests))]"
         for kept in ("done[n]", "done[n] - 1", "requests[n][1]")],
    "leaves out the newest token at the update: it has no key yet, so the pass computes it with all others.":
        f"{ALL} -> is_new, cached = True, [int(n in begun) for n in range(len(requests))]",
    "generates the tokens again: those of the old weights stay, and only their keys are recomputed.":
        [f"{ALL} -> {ALL}; done = {RESTARTED.format('done')}",
         f"{ALL} -> {ALL}; done = {RESTARTED.format('done')}; old = {RESTARTED.format('old')}"],
    "recomputes in a pass that yields no token: the pass over a text so far yields the next one.":
        f"{ALL} -> is_new = True; passes += [sum(cached[n] for n in begun)] if begun else []",
    "recomputes, whatever `running` is: with 'finish', requests that have begun end with the old weights, and others "
    "wait.": f"{WHEN} -> True",
    "waits, whatever `running` is: with 'recompute', all requests go on with the new weights.": f"{WHEN} -> not begun",
    "lets requests begin with the old weights while others finish: if more keep arriving, the new weights never get "
    "their turn.": "waits = -> waits = False and",
    "lets requests begin with the new weights beside those that finish with the old ones: a pass has one set of "
    "weights.": ("waits = -> waits = False and", "+= not is_new -> += not is_new and arrival < update",
                 "< most] -> < most and arrival < update]", f"{ALL} -> {ALL} if running == 'recompute' else cached"),
    "changes the weights one pass too late or too early: they are new from pass `update` on.":
        [("len(passes) >= -> len(passes) >", "update < -> update + 1 <"),
         ("len(passes) >= -> len(passes) + 1 >=", "update < -> update <=")],
    "computes every text anew in every pass: keys of the same weights stay in the cache.": " - cached[n] -> ",
    "counts no token for a decode: each pass computes the newest token of each request.":
        "cached[n] = prompt + done[n] -> cached[n] = prompt + done[n] + 1",
    "counts only the tokens from before the update as old ones: with 'finish', some requests get old ones afterwards.":
        "+= not is_new -> += len(passes) <= update",
    "counts the tokens of the new weights as old ones, too.": "+= not is_new -> += 1",
    "counts the tokens of the new weights: the task asks for those of the old ones.": "+= not is_new -> += is_new",
})  # fmt: skip
