"""Lesson 8, prefix sharing: blocks that several requests have, their names, and a bug in a look-up."""

from ..block_books import audit, books_after
from ..block_names import numbered_names, wrong_names
from ..comparing import kind
from ..edits import edited
from ..exercise import Exercise, JudgedExercise, Passed, Wrong
from .lesson_7_blocks import ROOM, A, any_free_block, grow, is_in_order

allocate = Exercise(
    "allocate(free, tables, request, tokens, block_size, shared)",
    "a shared block costs nothing, but one that is in `free` is no longer free",
    observe=books_after,
)
B = {"b": [9]}
allocate.table([
    *[([3, 7, 5], A, "c", tokens, 4, shared) for tokens, *shared in [(9, 0), (16, 0, 7), (12, 3, 5), (8, 5, 3)]],
    *[([3, 7], A, "c", tokens, 4, shared) for tokens, *shared in [(12, 3, 7), (13, 7, 3), (16, 0, 7), (20, 0, 2)]],
    *[([7, 3], A, "c", tokens, 4, shared) for tokens, *shared in [(16, 0, 2), (9, 2, 0, 3)]],
    *[([3, 7], A, request, tokens, 4, []) for request, tokens in [("c", 8), ("c", 9), ("a", 8), ("a", 13)]],
    ([5], B, "c", 8, 4, [9]), ([5], B, "c", 12, 4, [5]), ([5], B, "c", 8, 4, [9, 5]),
    ([6, 5], B, "c", 12, 4, [5, 9, 6]),
], lambda random: [([*random.sample(range(1, 9), 5), 0], {"d": [9, 11]}, "new", random.randint(7, 18), 3, [9, 0])],
   given=f"{ROOM}, shared {{}}")  # fmt: skip
allocate.ignoring(any_free_block)
allocate.reference(grow.solution)
allocate.add_misconceptions({
    "counts shared blocks that are in `free` as free: the request cannot get them twice.": " - len(reused) -> ",
    "subtracts all shared blocks from those that are free: one that is in another request's table was not free.":
        "- len(reused) -> - len(shared)",
    "puts the shared blocks behind the new ones: they hold the beginning of the text.":
        "table + new -> table + new if request in tables else new + table",
    "leaves shared blocks in `free`: the next request would overwrite keys that are in use.": "in free] -> in []]",
    "takes every shared block out of `free`, but some are in another request's table.": " if block in free -> ",
    "does not put the shared blocks into the table: the request's first tokens would have no keys.":
        "table + new -> tables.get(request, []) + new",
})  # fmt: skip
allocate.rule(is_in_order)


@allocate.rule
def keeps_the_caller_s_list(arguments, outcome, right):
    """Report a list of shared blocks that has lost some; a table may be that very list, so it may grow."""
    shared = arguments[-1]
    if list(outcome.result["arguments"][-1][: len(shared)]) == shared:
        return None
    return "takes blocks out of the caller's list `shared`, which still needs it"


@Exercise.declare("a block becomes free only if no other request has it", observe=books_after)
def release(free, tables, request):
    table = tables.pop(request)
    free += [block for block in table if not any(block in other for other in tables.values())]


ABC = {"a": [6], "b": [6, 1, 8], "c": [6, 1, 2]}
release.table([
    ([4], {"a": [2, 5], "b": [0, 1, 3]}, "b"), ([], {"a": [2]}, "a"), ([5], {"a": [6, 1, 2], "b": [6, 1, 8]}, "a"),
    ([], ABC, "b"), ([7, 0], dict(reversed(ABC.items())), "b"), ([5], {"a": [3, 7], "b": [3, 7]}, "b"),
    ([5, 2], {"b": [6, 1, 8]}, "b"),
], lambda random: [([7], {"d": [3, 5, 9, 4], "c": [3, 5, 9, 0, 8], "b": [3]}, random.choice("dcb"))],
   given="free {}, tables {}; {!r} leaves")  # fmt: skip
release.ignoring(lambda result, arguments: {"tables": result["tables"], "free": sorted(result["free"])})

OWN = "[block for block in table if not any(block in other for other in tables.values())]"
release.add_misconceptions({
    "frees blocks that are in another table: the next request would overwrite keys in use.":
        " if not any(block in other for other in tables.values()) -> ",
    "frees no block: without a table and not in `free`, a block is lost. (`free = ...` makes a new list and leaves "
    "the caller's unchanged.)": "free += -> free =",
    "keeps the table: its blocks will hold other requests' tokens.": "table = -> tables = {**tables}; table =",
    "frees nothing if any block is shared: the others must become free.": f"{OWN} -> table if {OWN} == table else []",
})  # fmt: skip
release.rule(lambda arguments, outcome, right: audit(*arguments, outcome.result["free"], outcome.result["tables"]))


@Exercise.declare(
    "blocks share a name only if everything up to their ends is the same, so sharing them is safe",
    observe=numbered_names,
    forbidden=["helpers.block_hashes:hash_blocks"],
)
def prefix_hashes(token_ids, block_size, salt):
    name, names = salt, []
    for end in range(block_size, len(token_ids) + 1, block_size):
        name = (name, *token_ids[end - block_size : end])
        names.append(name)
    return names


@prefix_hashes.cases
def _(random):
    a, b, c, d = [7, 3, 9, 1], [5, 5, 2, 8], [6, 4, 1, 3], [9, 9, 9, 9]
    start, end = [0, *a[1:]], [*a[:-1], 0]  # both differ from `a` in one token
    every = [
        [first, second, *rest] for first in (0, 1) for second in (0, 1) for rest in ([], [0, 0], [0, 1], [1, 0, 1])
    ]
    drawn = [random.choices([0, 1, 10, 11, 300], k=random.randint(2, 8)) for _ in range(20)]
    for texts, size, salts, what in [
        ([a + b + c, a, a + b + d, a + b + c + [1, 2]], 4, "xxxx", "texts that begin alike"),
        ([a + b + c, start + b + c, end + b + c, a + start + c, a + a], 4, "xxxxx", "texts that begin differently"),
        ([a + b + c, a + d + c, a + c + c], 4, "xxx", "texts that differ in the middle"),
        ([a + b + c, a + b[::-1], a[::-1] + b, b + a + c], 4, "xxxx", "the same tokens in another order"),
        ([[1, 11, 2, 3], [11, 1, 2, 3], [1, 1, 12, 3]], 4, "xxx", "ids with the same digits"),
        ([[7, 71], [77, 1], [7, 7]], 2, "xxx", "two ids with the same digits"),
        ([[300, 4000, 5], [3004, 0, 5], [300, 4000, 6], [3, 4000, 5]], 1, "xxxx", "ids of several digits"),
        ([pair for n in (1, 10, 31, 100, 256, 257, 1000, 50257) for pair in ([0, n], [n, 0])], 2, "x" * 16, "ids of 0"),
        ([a + b + c + d + a, start + b + c + d + a, a + b + c + d + b], 2, "xxx", "texts of 10 blocks"),
        ([[n * n % 9973, n] for n in range(2500)], 2, "x" * 2500, "2,500 short texts"),
        ([[7, 3]] * 8, 2, ["x", "X", "xy", "yx", "x ", " x", "z" * 40 + "x", "z" * 40 + "y"], "a text, eight salts"),
        ([[1, 2, 3, 4], [2, 1, 4, 3], [1, 4, 3, 2], [2, 2, 3, 3], [1, 2, 4, 3], [6, 1, 1, 4]], 2, "xxxxxx", "sums"),
        ([a + b, a + b, a, a + c], 4, "xyyx", "a text with two salts"),
        ([[], [1, 2, 3], list(range(13)), list(range(12))], 3, "xxxy", "blocks of 3"),
        ([[4, 5, 6], [4, 5, 7], [4]], 1, "xxy", "blocks of 1"),
        ([[12, 3], [2, 3]], 2, ["x", "x1"], "salts and ids with the same digits"),
        ([[51, 4], [1, 4], [14]], 1, ["y", "y5", "y5"], "salts that end with a digit"),
        ([[7, 3, 9, 1], [9, 1], [7, 3]], 2, ["x", "x[7, 3]", "x"], "a salt that looks like a block"),
        ([[7, 3], [7, 3], [7, 3]], 2, ["", "0", "None"], "a salt without a character"),
        (every, 2, "xy" * 8, "short texts of two tokens"), (drawn, 2, random.choices("xy", k=20), "20 short texts"),
    ]:  # fmt: skip
        yield (texts, size, list(salts)), what


NAME, BLOCK = "(name, *token_ids[end - block_size : end])", "token_ids[end - block_size : end]"
prefix_hashes.add_misconceptions({
    "looks only at a block's own tokens. Its keys depend on everything before it, so after another beginning they are "
    "different.": ["(name, * -> (salt, *", "(name, * -> (salt, end, *"],
    "adds up ids and salts without anything between them: another salt can look like this one with a block.":
        f'{NAME} -> f"{{name}}{{{BLOCK}}}"',
    "ignores the salt. Two customers would share blocks, and each could tell from its TTFT which prompts the other "
    "has sent.": "= salt, [] -> = '', []",
    "names the last block although it is not full. It will get more tokens, so it cannot be shared "
    "yet.": "len(token_ids) + 1 -> len(token_ids) + block_size",
    "ignores the order of tokens, but keys depend on it.": f"*{BLOCK} -> sum({BLOCK})",
    "joins the digits of ids, so that 1, 11 and 11, 1 get the same name.": f'*{BLOCK} -> "".join(map(str, {BLOCK}))',
    "names the same text differently each time: no block would ever be found.": f"{NAME} -> object()",
    "joins the salt and the ids, although a salt may end with digits: other ids with another salt get the same name.":
        f'{NAME} -> name + " ".join(map(str, {BLOCK}))',
})  # fmt: skip


@prefix_hashes.rule
def are_names_of_prefixes(arguments, outcome, right):
    """Report what is not a name, or two blocks that wrongly share a name or wrongly do not."""
    if wrong := wrong_names(*arguments, outcome.result["all salts"], right.result["all salts"]):
        return wrong
    if salt := outcome.result["a name as a salt"]:
        return f"gives the same name to block 1 of a text and to block 0 of its rest with the salt {salt!r}"
    return None


@Exercise.declare(
    "a cached block is of use only if all blocks before it are cached",
    names=("the blocks to share", "the number of tokens left to compute"),
)
def reuse(names, cached, tokens, block_size):
    blocks = []
    for name in names[: (tokens - 1) // block_size]:
        if name not in cached:
            break
        blocks.append(cached[name])
    return blocks, tokens - len(blocks) * block_size


def _drawn(random):
    names = random.sample("abcdefghij", 6)
    some = {name: 10 + number for number, name in enumerate(names) if number != 3}
    return [(names, some, 6 * 3 + random.randint(0, 2), 3), (names[:3], some, 9 + random.randint(0, 2), 3)]


reuse.table([
    (["a", "b"], {"a": 4, "b": 9, "x": 2}, 11, 4), (["a", "b", "c"], {"a": 4, "c": 9}, 13, 4),
    (["a", "b", "c", "d"], {"d": 8, "a": 5, "b": 6}, 19, 4), (["a", "b", "c"], {"b": 4, "c": 0}, 14, 4),
    (["a", "b"], {"a": 0, "b": 1}, 8, 4), (["a", "b", "c"], {"a": 3, "b": 2, "c": 1}, 6, 2),
    (["a", "b", "c"], {"c": 7, "b": 5, "a": 6}, 7, 2),
    (["a", "b", "c", "d", "e"], {"a": 300, "b": 0, "d": 7, "e": 8}, 22, 4),
    (["a", "b", "c", "d", "e"], {"e": 3, "d": 0, "c": 9, "b": 8, "a": 5}, 10, 2),
    (["a", "b", "c"], {"a": 0, "b": 7, "c": 5}, 3, 1), (["a", "b"], {}, 9, 4), ([], {"a": 1}, 3, 4),
], _drawn)  # fmt: skip

LEFT, THE_BUG = "tokens - len(blocks) * block_size", "break -> continue"
reuse.add_misconceptions({
    "shares a block although one before it is missing: the missing block's tokens would be skipped.": THE_BUG,
    "shares nothing if any block is missing: those before the first gap can be shared.": "break -> return [], tokens",
    "computes one token of a text that is cached as a whole, and shares its last block: that block is computed as a "
    "whole, because it holds the last token.": ("(tokens - 1) // -> tokens //", f"{LEFT} -> max(1, {LEFT})"),
    "leaves no token to compute if all blocks are cached. The last token is always computed: its logits give the next "
    "one.": "(tokens - 1) // -> tokens //",
})  # fmt: skip


def exposes_the_bug(failing_input, seed: int) -> str | Passed:
    """Judge arguments: possible ones, for which the planted bug makes a difference."""
    case = failing_input()
    if not isinstance(case, list | tuple) or len(case) != 4:
        raise Wrong(f"should return four arguments, names, cached, tokens and block_size, but returned {kind(case)}.")
    names, cached, tokens, size = case
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names) or len(names) > 999:
        raise Wrong("returns names that are not a list of strings.")
    if len(set(names)) < len(names):
        raise Wrong("returns a name twice: blocks of one text never share a name.")
    if not isinstance(cached, dict) or not all(type(block) is int and block >= 0 for block in cached.values()):
        raise Wrong("returns something for `cached` that is not a dict from names to the numbers of blocks.")
    if len(set(cached.values())) < len(cached):
        raise Wrong("gives two names the same block in `cached`: a block holds the keys of one text.")
    if not all(type(number) is int and number > 0 for number in (tokens, size)) or len(names) != tokens // size:
        raise Wrong("returns a number of names that is not `tokens // block_size`: a prompt has a name per full block.")
    if reuse.solution(*case) != edited(reuse.solution, THE_BUG)(*case):
        return Passed("These arguments show the bug.")
    return "returns arguments for which `reuse_with_a_bug` is right. Which blocks does it share, and which should it?"


failing_input = JudgedExercise(
    "failing_input()", "a test that fails is the first half of a correction", exposes_the_bug
)
