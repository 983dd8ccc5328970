"""Names of blocks, for prefix caching. A name can be any key of a dict, so only its sharing is compared."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from torch import Tensor

from .comparing import kind


def numbered_names(function: Callable, texts: Seq[list[int]], block_size: int, salts: Seq[str]) -> dict:
    """Name the blocks of several texts twice; return, for each text, its names as numbers.

    Blocks have the same number if they have the same name. A value that is not a list, or cannot be a key, is described
    in words. Texts with the first salt are also numbered alone. A name that shows its salt is tried as another salt.
    """
    named, again = (
        [function(text, block_size, salt) for text, salt in zip(texts, salts, strict=True)] for _ in range(2)
    )
    both = _numbered([*named, *again])
    return {
        "one salt": _numbered([names for names, salt in zip(named, salts, strict=True) if salt == salts[0]]),
        "all salts": both[: len(named)],
        "same names again": both[: len(named)] == both[len(named) :],
        "a name as a salt": next((
            names[0] for text, salt, names in zip(texts, salts, named, strict=True)
            if salt and salt in _text_of(names) and function(text[block_size:], block_size, names[0])[0] == names[1]
        ), None),
    }  # fmt: skip


def _text_of(names) -> str:
    """Return the first name if it is text, and others follow it."""
    return names[0] if isinstance(names, list) and len(names) > 1 and isinstance(names[0], str) else ""


def _is_key(name) -> bool:
    """Return whether a name can be the key of a dict, and be found again."""
    try:
        return not isinstance(name, Tensor | None) and {name: True}.get(name, False)
    except Exception:
        return False


def _numbered(named: Seq) -> list:
    numbers: dict = {}

    def number(name) -> int | str:
        return numbers.setdefault(name, len(numbers)) if _is_key(name) else kind(name)

    return [[number(name) for name in names] if isinstance(names, list) else kind(names) for names in named]


def wrong_names(texts: Seq[list[int]], block_size: int, salts: Seq[str], named: list, right: list) -> str | None:
    """Return what is wrong with numbered names: no list, no names, or two blocks that wrongly share one or do not."""
    blocks = []
    for text, salt, names, own in zip(texts, salts, named, right, strict=True):
        if isinstance(names, str):
            return f"should return a list of names, but returned {names}"
        if words := [name for name in names if isinstance(name, str)]:
            return f"returns {words[0]} as a name, which cannot be the key of a dict"
        if len(names) != len(own):
            return f"returns {len(names)} names for {text}, which fills {len(own)} blocks of {block_size}"
        where = [f"block {index} of {text} with salt {salt!r}" for index in range(len(own))]
        blocks += zip(names, own, where, strict=True)
    by_name, by_own = {}, {}
    for name, own, where in blocks:
        other_own, other = by_name.setdefault(name, (own, where))
        if own != other_own:
            return f"gives the same name to {other} and {where}, although something up to their ends differs"
        other_name, other = by_own.setdefault(own, (name, where))
        if name != other_name:
            return f"gives different names to {other} and {where}, although everything up to their ends is the same"
    return None
