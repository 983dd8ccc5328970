"""N-gram lookup: the newest tokens have occurred before, and what followed them then is proposed again.

Texts that are edited, quoted or summarized repeat their prompts (prompt lookup decoding, Saxena, 2023). A lookup costs
no forward pass. A dictionary of all n-grams of a text grows with it, so that a lookup takes the same time anywhere.
"""

from collections import OrderedDict

KEPT = 1024  # texts whose n-grams are kept; the least recently used one is dropped


class NgramProposer:
    """Proposes what followed the latest earlier occurrence of the newest tokens; a `Proposer`.

    Args:
        longest, shortest: how many of the newest tokens must occur earlier. Longer n-grams are looked up first.

    Raises:
        ValueError: `shortest` is below 1, or above `longest`.
    """

    def __init__(self, longest: int = 3, shortest: int = 1):
        if not 1 <= shortest <= longest:
            raise ValueError(f"shortest must be from 1 to longest, not {shortest} with longest {longest}.")
        self.sizes = range(longest, shortest - 1, -1)
        self._indexes: OrderedDict[int, _Index] = OrderedDict()  # by the identity of the list of ids

    def propose(self, token_ids: list[int], k: int) -> list[int]:
        """Return at most `k` ids that followed the newest tokens earlier in the text."""
        index = self._index(token_ids)
        index.extend(self.sizes)
        for size in self.sizes:
            follower = index.followers.get(tuple(token_ids[-size:]))
            if follower is not None:
                drafts = token_ids[follower : follower + k]
                while len(drafts) < k:  # the text repeats itself, up to its end
                    drafts += token_ids[follower : follower + k - len(drafts)]
                return drafts
        return []

    def _index(self, token_ids: list[int]) -> "_Index":
        index = self._indexes.get(id(token_ids))
        if index is None or index.end > len(token_ids):
            index = self._indexes[id(token_ids)] = _Index(token_ids)
            if len(self._indexes) > KEPT:
                self._indexes.popitem(last=False)
        self._indexes.move_to_end(id(token_ids))
        return index


class _Index:
    """For each n-gram of a text, the position after its latest occurrence."""

    def __init__(self, token_ids: list[int]):
        self.token_ids, self.end = token_ids, 1  # the list is kept, so its identity stays its own
        self.followers: dict[tuple[int, ...], int] = {}

    def extend(self, sizes: range) -> None:
        """Add the n-grams that are followed by a token and were not added before."""
        for end in range(self.end, len(self.token_ids)):
            for size in sizes:
                if size <= end:
                    self.followers[tuple(self.token_ids[end - size : end])] = end
        self.end = max(self.end, len(self.token_ids))
