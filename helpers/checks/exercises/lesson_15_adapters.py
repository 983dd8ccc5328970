"""Lesson 15, adapters in one pass, blocks that they leave usable, and weights that change while requests run."""

from itertools import accumulate, groupby

from ..adapted_layers import with_calls
from ..exercise import Exercise
from ..hand_made import randn


@Exercise.declare("a pass reads the base once, and each adapter of its rows once", observe=with_calls)
def adapt_rows(x, base, adapters, chunks):
    names = [name for name, tokens in chunks for _ in range(tokens)]
    y = base(x)
    for name in set(names) - {None}:
        rows = [row for row, own in enumerate(names) if own == name]
        y[rows] += adapters[name](x[rows])
    return y


def _layers(random, loaded, texts):
    """Return the arguments of words such as "red2", two rows with this adapter, or "-1", a row without one."""
    chunks = [(None if text[:-1] == "-" else text[:-1], int(text[-1])) for text in texts.split()]
    inputs, outputs = random.choice([(6, 4), (5, 5), (3, 8)])
    x, weight = randn(random, (sum(tokens for _, tokens in chunks), inputs), (outputs, inputs))
    names = enumerate(loaded.split(), 1)
    return x, weight, {name: tuple(randn(random, (rank, inputs), (outputs, rank))) for rank, name in names}, chunks


adapt_rows.table([
    ("red blue green", "red1 blue1 red1 -1 blue1"), ("red blue", "-2 blue1 -1"), ("blue red", "red1 red3 red1"),
    ("red", "-1 -2"), ("red blue green", "green2 red1 blue1 green1"), ("red blue", "blue1"),
    ("c a b", "b1 c1 a2 c1 b1 a1 -1 a1"), ("b a", "a3 b1 -1 a1 -1 b4"), ("b a", "a1 a2 b1 b1 a1"),
], lambda random: [
    ("a b c d e", " ".join(f"{random.choice('abcd-')}{random.choice([1, 1, 2])}" for _ in range(8))),
], given="loaded are {}; chunks {}, where -1 is a row without an adapter", build=_layers)  # fmt: skip


def apart(chunks):
    """Return (name, its rows) for each chunk that has an adapter."""
    ends = accumulate(tokens for _, tokens in chunks)
    return [(name, slice(end - tokens, end)) for (name, tokens), end in zip(chunks, ends, strict=True) if name]


def joined(chunks):
    """Return the chunks with neighbors of one adapter as a single one."""
    return [(name, sum(tokens for _, tokens in group)) for name, group in groupby(chunks, key=lambda chunk: chunk[0])]


ADD, PRODUCTS, OCCURRING = "y[rows] += adapters[name](x[rows])", "adapters[name](x[rows])", "set(names) - {None}"
PER_ROW = "base(x) -> torch.cat([base(row[None]) for row in x])"
PRODUCTS_PER_ROW = f"{PRODUCTS} -> torch.cat([adapters[name](x[[row]]) for row in rows])"
RANKS = "names.index(names[row])", "str(names[row])", "(names[row] is None, names[row] or '')"
GROUPED = [f"sorted(range(len(names)), key=lambda row: {rank})" for rank in RANKS]
adapt_rows.add_misconceptions({
    "applies one row's adapter to all rows: each row has its own.":
        [f"y = base(x) -> y, names = base(x), [names[{row}]] * len(names)" for row in (0, -1)],
    "takes one row per chunk: a chunk has a row for each of its tokens.":
        "for _ in range(tokens)] -> ]; names = (names + [None] * len(x))[: len(x)]",
    "returns the rows in the order of the groups: they belong where their inputs are.":
        [f"return y -> return y[{order}]" for order in GROUPED],
    "adds every adapter's products to all rows: each row gets those of its own.": f"{ADD} -> y += adapters[name](x)",
    "calls the base again for each group: each call reads all of its weights, so one call has to serve all rows.":
        [PER_ROW, (PER_ROW, PRODUCTS_PER_ROW),
         "y = base(x) -> groups = [[row for row, own in enumerate(names) if own == name] for name in set(names)]\n"
         "    y = torch.cat([base(x[rows]) for rows in groups])[torch.tensor(sum(groups, [])).argsort()]",
         f"{ADD} -> y[rows] = base(x[rows]) + {PRODUCTS}"],
    "calls an adapter again for each of its rows: each call reads its matrices.": PRODUCTS_PER_ROW,
    "calls an adapter again for each chunk, or for rows that are apart: its matrices are read again.":
        [(f"for name in {OCCURRING} -> for name, rows in apart({groups})",
          "rows = [row for row, own in enumerate(names) if own == name] -> pass")
         for groups in ("chunks", "joined(chunks)")],
    "computes an adapter's products for rows that have another one or none, and throws them away.":
        [(f"{OCCURRING} -> {loop}", f"{PRODUCTS} -> adapters[name](x)[rows]") for loop in (OCCURRING, "adapters")],
    "calls adapters that no row has: hundreds may be loaded, and each call reads matrices.": f"{OCCURRING} -> adapters",
})  # fmt: skip


@adapt_rows.rule
def every_row_is_right(arguments, outcome, right):
    off = (outcome.result["outputs"] - right.result["outputs"]).abs().amax(dim=1) > 1e-3
    wrong = off.nonzero().flatten().tolist()
    return f"returns wrong outputs for the rows {wrong}: count them from 0" if wrong else None


@Exercise.declare(
    "keys depend on the weights that compute them, so a cached block belongs to its weights and to its tokens"
)
def cached_blocks(events, block_size):
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


TEXT = [7, 3, 9, 1, 4, 4, 0]
LOADED = [("load", "red", "A1"), ("load", "blue", "B2")]
RED, BLUE, PINK, OLD, BASE = [("request", name, TEXT) for name in ("red", "blue", "pink", "old", None)]
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
    ([*LOADED, RED, BASE, BLUE], 2), ([LOADED[0], RED, BASE, LOADED[1], RED, BASE], 2),
    ([LOADED[0], ("load", "blue", "A2"), ("load", "pink", "A"), ("load", "old", "A1A"), RED, OLD, BLUE, PINK, RED], 2),
    ([*LOADED, RED, *ANOTHER, RED, RED, BLUE], 2),
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

COUNT, LEADING = "sum(key in cache for key in keys)", "[*(key in cache for key in keys), False].index(False)"
STARTS = "end - block_size", "max(0, end - 2 * block_size)"
SEEN = [f"{position}*ids[{start} : end]" for position in ("", "end, ") for start in STARTS]
cached_blocks.add_misconceptions({
    "shares blocks across adapters, or with the base model. An adapter changes keys, too.": [
        "(files[name], -> (0,", 'key in cache for -> key in cache or ("", *key[1:]) in cache for'],
    "recognizes blocks by their tokens alone, as in lesson 8: keys depend on all weights that compute them.":
        ("(files[name], -> (0,", "cache.clear() -> pass"),
    "recognizes an adapter by its name: other files under the same name would find the blocks of the old ones.":
        "(files[name], -> (name,",
    "keeps apart two names of the same files: these compute the same keys.": "(files[name], -> (files[name], name,",
    "forgets an adapter's blocks when it is unloaded or loaded: the same files compute the same keys whenever they are "
    "loaded.": ["rest[1] -> rest[1], object()", 'elif kind == "update": -> elif kind == "unload":\n'
        "            cache = {key for key in cache if key[0] != files[rest[0]]}\n"
        '        elif kind == "update":'],
    "keeps blocks when the weights are updated: their keys are those of the old weights.": "cache.clear() -> pass",
    "forgets only the base model's blocks at an update: an adapter's keys are computed with the model's weights, too.":
        "cache.clear() -> cache = {key for key in cache if key[0]}",
    "looks only at a block's own tokens, or back at one block more: keys depend on everything before them.":
        [(f"*ids[:end] -> {seen}", f"{COUNT} -> {count}") for seen in SEEN for count in (COUNT, LEADING)],
    "counts a block that is not full: it will get more tokens.": "len(ids) + 1 -> len(ids) + block_size",
    "finds the blocks that the request itself has just computed.":
        ("cache.update(keys) -> pass", "found.append( -> cache.update(keys); found.append("),
})  # fmt: skip


@Exercise.declare(
    "a token is of the weights of its pass, and so must be all keys that it attends to",
    names=("the tokens of the old weights", "the tokens computed in each pass"),
)
def live_update(requests, update, running):
    old, generated, cached = ([0] * len(requests) for _ in range(3))
    passes, is_new = [], False
    while any(generated[n] < most for n, (_, _, most) in enumerate(requests)):
        begun = [n for n, (arrival, _, most) in enumerate(requests) if 0 < generated[n] < most]
        if not is_new and len(passes) >= update and (running == "recompute" or not begun):
            is_new, cached = True, [0] * len(requests)
        passes.append(0)
        for n, (arrival, prompt, most) in enumerate(requests):
            waits = update < len(passes) and not is_new and not generated[n]
            if arrival < len(passes) and generated[n] < most and not waits:
                passes[-1] += prompt + generated[n] - cached[n]
                cached[n] = prompt + generated[n]
                generated[n] += 1
                old[n] += not is_new
    return old, passes


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

ALL, WHEN = "is_new, cached = True, [0] * len(requests)", '(running == "recompute" or not begun)'
AGAIN = "[0 if n in begun else count for n, count in enumerate({})]"
live_update.add_misconceptions({
    "keeps the keys of the old weights: later tokens would attend to a mixture of both.":
        [(f"{ALL} -> is_new = True", f"{WHEN} -> {when}") for when in (WHEN, "True")],
    "generates the tokens again: those of the old weights stay, and only their keys are recomputed.":
        [f"{ALL} -> {ALL}; generated = {AGAIN.format('generated')}{counts}"
         for counts in ("", f"; old = {AGAIN.format('old')}")],
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
    "recomputes only the prompts, or only the generated tokens: the keys of both are of the old weights.":
        [f"{ALL} -> is_new, cached = True, [{kept} if n in begun else 0 for n in range(len(requests))]"
         for kept in ("generated[n]", "generated[n] - 1", "requests[n][1]")],
    "leaves out the newest token at the update: it has no key yet, so the pass computes it with all others.":
        f"{ALL} -> is_new, cached = True, [int(n in begun) for n in range(len(requests))]",
    "changes the weights one pass too late or too early: they are new from pass `update` on.":
        [("len(passes) >= -> len(passes) >", "update < -> update + 1 <"),
         ("len(passes) >= -> len(passes) + 1 >=", "update < -> update <=")],
})  # fmt: skip
