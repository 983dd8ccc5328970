"""The contract between speculation and a proposer: a sequence's tokens go in, guesses at the next ones come out."""

from collections.abc import Hashable, Iterable
from typing import Any, Protocol


class Context(list):
    """The prompt and the tokens generated so far, as a proposer sees them.

    For each sequence, it is the same list in every call, extended by the new tokens.

    Attributes:
        notes: what each proposer keeps about this sequence between calls. They disappear with the sequence.
    """

    def __init__(self, token_ids: Iterable[int] = ()):
        super().__init__(token_ids)
        self.notes: dict[Hashable, Any] = {}

    @classmethod
    def of(cls, token_ids: list[int]) -> "Context":
        """Return the ids as a context: the same object if they are one, otherwise a copy without notes."""
        return token_ids if isinstance(token_ids, cls) else cls(token_ids)


class Proposer(Protocol):
    """Guesses the next tokens of a sequence.

    A proposer may also have a method `propose_batch(token_ids: list[list[int]], k: list[int]) -> list[list[int]]`,
    which proposes for several sequences at once.
    """

    def propose(self, token_ids: list[int], k: int) -> list[int]:
        """Return at most `k` ids that may follow `token_ids`; an empty list for no guess.

        Args:
            token_ids: the prompt and the tokens generated so far, a `Context` if an engine asks.
            k: the most ids that can be verified.
        """
