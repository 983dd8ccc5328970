"""Lesson 15, live weights: blocks that adapters and updates leave usable, and updates while requests run."""

from ..edits import add_edits
from ..exercise import Exercise

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
    "recognizes an adapter by its name: other files under the same name would find the blocks of the old ones.":
        "(files[name], -> (name,",
    "keeps apart two names of the same files: these compute the same keys.": "(files[name], -> (files[name], name,",
    "forgets an adapter's blocks when it is unloaded or loaded: the same files compute the same keys whenever they are "
    "loaded.": ["rest[1] -> rest[1], object()", f'{UPDATED} -> elif kind == "unload": {FORGET}\n        {UPDATED}'],
    "keeps blocks when the weights are updated: their keys are those of the old weights.": "cache.clear() -> pass",
    "forgets only the base model's blocks at an update: an adapter's keys are computed with the model's weights, too.":
        "cache.clear() -> cache = {key for key in cache if key[0]}",
    "forgets only the adapters' blocks at an update: the base model's are those of the old weights, too.":
        "cache.clear() -> cache = {key for key in cache if not key[0]}",
    "looks only at a block's own tokens, or back at one block more: keys depend on everything before them.":
        [(f"*ids[:end] -> {seen}", f"{COUNT} -> {count}") for seen in SEEN for count in (COUNT, LEADING)],
    "leaves out a block that holds a prompt's last token: in this task, it counts.":
        ["len(ids) + 1 -> len(ids)", f"{COUNT} -> min((len(ids) - 1) // block_size, {COUNT})"],
    "counts a block that is not full: it will get more tokens, so it cannot be shared yet.":
        "len(ids) + 1 -> len(ids) + block_size",
    "finds the blocks that the request itself has just computed.":
        ("cache.update(keys) -> pass", "found.append( -> cache.update(keys); found.append("),
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
    "counts only the tokens from before the update as old ones: with 'finish', some requests get old ones afterwards.":
        "+= not is_new -> += len(passes) <= update",
})  # fmt: skip
