"""N-gram lookup: the newest tokens have occurred before, and what followed them then is proposed again.

Texts that are edited, quoted or summarized repeat their prompts (prompt lookup decoding, Saxena, 2023). A lookup costs
no forward pass. A dictionary of all n-grams of a text grows with it, so a lookup takes the same time in any text.
"""

from .speculation import as_context

SIZES = range(3, 0, -1)  # how many of the newest tokens must occur earlier; longer n-grams are looked up first


class NgramProposer:
    """Proposes what followed the latest earlier occurrence of the newest tokens; a `Proposer`."""

    def propose(self, token_ids: list[int], k: int) -> list[int]:
        """Return at most `k` ids that followed the newest tokens earlier in the text."""
        context = as_context(token_ids)
        index = context.notes.setdefault(self, _Index())
        index.extend(context)
        for size in SIZES:
            follower = index.followers.get(tuple(context[-size:]))
            if follower is not None:
                draft = context[follower : follower + k]
                while len(draft) < k:  # the text repeats itself, up to its end
                    draft += context[follower : follower + k - len(draft)]
                return draft
        return []


class _Index:
    """For each n-gram of a text, the position after its latest occurrence that is followed by a token."""

    def __init__(self):
        self.followers: dict[tuple[int, ...], int] = {}
        self.end = 1

    def extend(self, token_ids: list[int]) -> None:
        """Add the n-grams that were not added before."""
        for end in range(self.end, len(token_ids)):
            for size in SIZES:
                if size <= end:
                    self.followers[tuple(token_ids[end - size : end])] = end
        self.end = max(self.end, len(token_ids))
