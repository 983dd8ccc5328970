"""Lesson 6, prefix hashing: blocks have the same name exactly if all tokens up to their end are the same."""

from collections.abc import Hashable

from torch import Tensor

from .attempt import Attempt
from .differences import Wrong, kind


def prefix_hashes(attempt: Attempt) -> None:
    """Check texts that share a beginning, an end or a middle, and texts with the same tokens in other places."""
    size = 4
    first, second, third = [7, 3, 9, 1], [5, 5, 2, 8], [6, 4, 1, 3]

    def names_of(text: list[int], size: int = size) -> list:
        given = f"token_ids {text}, blocks of {size}"
        got = attempt(list(text), size, given=given)
        if not isinstance(got, list):
            raise Wrong(f"should return a list, a name for each full block; it returned {kind(got)} ({given}).")
        _expect_count(len(got), len(text), size, given)
        for name in got:
            if name is None or not isinstance(name, Hashable) or not _usable(name):
                raise Wrong(f"a name should be fit for the key of a dict, and is {kind(name)} ({given}).")
        return got

    text = first + second + third
    names = names_of(text)
    if names_of(text) != names:
        raise Wrong("gives the same text other names the second time: nobody would ever find a block by them.")
    if len(set(map(repr, names))) == 1:
        raise Wrong(f"gives all blocks the same name: {text} has three of them, with other tokens each.")
    cut = names_of(first)
    if names[-1] == cut[0]:
        raise Wrong("has the names backwards: the first one is the first block's.")

    def same(one: list[int], other: list[int], block: int) -> bool:
        return names_of(one)[block] == names_of(other)[block]

    for one, other, block, why in [
        (
            [*text, 1, 2],
            text,
            2,
            "the tokens behind the last full block change the name of that block. It can be shared, whatever comes "
            "after it",
        ),
        (
            first + second + third,
            first + second + [9, 9, 9, 9],
            1,
            "the name of a block depends on what comes after it. Keys do not: a token sees only what is before it",
        ),
        (first, text, 0, "the name of a block depends on how long the text is. Keys do not"),
    ]:
        if not same(one, other, block):
            raise Wrong(f"{why} (block {block} of {one} and of {other}).")
    own = "gives blocks with other tokens the same name: all of a block's own tokens belong to its name"
    far = "looks back one block only: what differs two blocks before is in the keys, too"
    begins, ends = [0, *first[1:]], [*first[:-1], 0]  # each differs in one token
    for one, other, block, why in [
        (second + first, second + begins, 1, own),
        (second + first, second + ends, 1, own),
        (
            first + second,
            begins + second,
            1,
            "looks at a block's own tokens only. Its keys have seen everything before it, so behind another beginning "
            "they are others",
        ),
        (text, begins + second + third, 2, far),
        (text, ends + second + third, 2, far),
        (second + first + third, second + begins + third, 2, "leaves out a part of the past: the block before counts"),
        (
            first + second,
            first + second[::-1],
            1,
            "the order of the tokens makes no difference to the name, and to the keys it does",
        ),
        (
            text,
            second + first + third,
            2,
            "the order of the blocks before makes no difference to the name, and to the keys it does",
        ),
        (
            [1, 11, 2, 3],
            [11, 1, 2, 3],
            0,
            "writes the numbers of the tokens together, so that 1, 11 and 11, 1 are the same: a name has to keep them "
            "apart",
        ),
    ]:
        if same(one, other, block):
            raise Wrong(f"{why} (block {block} of {one} and of {other}).")
    again = names_of(first + first)
    if again[0] == again[1]:
        raise Wrong(
            f"looks at a block's own tokens only: in {first + first}, the second block stands behind the first."
        )
    for text, size in [([], 4), ([1, 2, 3], 4), (list(range(13)), 3), ([4, 5, 6], 1)]:
        names_of(text, size)


def _usable(name) -> bool:
    """Return whether a name can be a key of a dict and be found again."""
    try:
        return {name: True}.get(name, False) and not isinstance(name, Tensor)
    except Exception:
        return False


def _expect_count(got: int, tokens: int, size: int, given: str) -> None:
    full = tokens // size
    if got == full:
        return
    if got == -(-tokens // size):
        raise Wrong(
            f"gives a name to the last block, which is not full. Tokens will still be added to it, so nobody can share "
            f"it ({given})."
        )
    if got == full - 1 and tokens % size == 0:
        raise Wrong(f"leaves out the last block, which is just full ({given}).")
    if got == full + 1:
        raise Wrong(f"has {got} names for {full} full blocks ({given}): does one stand for the empty beginning?")
    if got in (tokens, tokens - size + 1):
        raise Wrong(f"has {got} names: wanted is one for each block, not for each token ({given}).")
    if got == 1:
        raise Wrong(
            f"has one name for the whole text: a text that begins alike shares only some of its blocks ({given})."
        )
    raise Wrong(f"has {got} names, and there are {full} full blocks ({given}).")


TASKS = {
    "prefix_hashes(token_ids, block_size)": (
        prefix_hashes,
        "two blocks have the same name if everything up to their end is the same, and can be shared",
    ),
}
