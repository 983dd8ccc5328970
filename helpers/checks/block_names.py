"""Names of blocks, for prefix caching. A name can be any key of a dict, so that only sharing a name can be compared."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import combinations

from torch import Tensor

from .comparing import kind


def numbered_names(function: Callable, texts: Seq[list[int]], block_size: int, salts: Seq[str]) -> dict:
    """Name the blocks of several texts twice; return, for each text, its names as numbers.

    Blocks have the same number if they have the same name. What is no list, or no key of a dict, is given in words.
    Texts with the first salt are also numbered alone.
    """
    pairs = list(zip(texts, salts, strict=True))
    named = [_usable(function(text, block_size, salt)) for text, salt in pairs]
    again = [_usable(function(text, block_size, salt)) for text, salt in pairs]
    return {
        "one salt": _numbered([names for names, salt in zip(named, salts, strict=True) if salt == salts[0]]),
        "all salts": _numbered(named),
        "same names again": named == again,
    }


class _Words(str):
    """What a value is that is no list or no name, in words."""


def _usable(names) -> list | _Words:
    if not isinstance(names, list):
        return _Words(kind(names))
    return [name if _is_key(name) else _Words(kind(name)) for name in names]


def _is_key(name) -> bool:
    """Return whether a name can be the key of a dict and be found again."""
    try:
        return not isinstance(name, Tensor | None) and {name: True}.get(name, False)
    except Exception:
        return False


def _numbered(named: Seq[list | _Words]) -> list:
    numbers: dict = {}

    def number(name):
        return str(name) if isinstance(name, _Words) else numbers.setdefault(name, len(numbers))

    return [str(names) if isinstance(names, _Words) else [number(name) for name in names] for names in named]


def wrong_names(texts: Seq[list[int]], block_size: int, salts: Seq[str], named: list, right: list) -> str | None:
    """Return what is wrong with numbered names: no list, no names, or two blocks that wrongly share one or do not."""
    blocks = []
    for text, salt, names, own in zip(texts, salts, named, right, strict=True):
        if isinstance(names, str):
            return f"should return a list of names, and returned {names}"
        if words := [name for name in names if isinstance(name, str)]:
            return f"has {words[0]} for a name, which cannot be the key of a dict"
        if len(names) != len(own):
            return f"names {len(names)} blocks of {text}, and {len(own)} of its blocks of {block_size} are full"
        where = [f"block {place} of {text} with salt {salt!r}" for place in range(len(own))]
        blocks += zip(names, own, where, strict=True)
    for (name, own, where), (other_name, other_own, other_where) in combinations(blocks, 2):
        if name == other_name and own != other_own:
            return f"gives the same name to {where} and {other_where}, and up to their ends something differs"
        if name != other_name and own == other_own:
            return f"gives different names to {where} and {other_where}, and up to their ends all is the same"
    return None
