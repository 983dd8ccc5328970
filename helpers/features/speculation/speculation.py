"""Speculative decoding: several guessed tokens of a sequence are verified in the pass that computes its newest token.

A pass over a few tokens takes hardly longer than a pass over one, because it reads the same weights (Leviathan et al.,
ICML 2023; Chen et al., 2023). A *proposer* guesses the next tokens of a sequence. Its guess is a *draft*, a list of
*draft tokens*. The sequence's chunk contains them, so the pass yields logits after each. Tokens are then sampled one
after the other, as without a draft, until one differs from the draft token in its position. Every token is sampled
from the logits that it would have without a draft, with the same random numbers. So no token changes, whatever the
proposer: drafts save passes, and decide nothing.

A rejected draft token costs the time to compute it. Reading the weights takes as long as computing `FREE_TOKENS`
tokens, and rows share that cost, so a wrong guess is cheap beside one row and expensive beside many. Here each draft
token has to be worth its cost. The estimate is the share of draft tokens that were accepted lately, per sequence.
Speculation therefore fades as the number of rows rises, and where a proposer guesses badly.
"""

import itertools
import random
import warnings
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from ...engine import Feature, Plan, Scheduler, Sequence

FREE_TOKENS = 8  # on the CPUs measured, 8 rows take 1.5 times as long as one, and 16 take 2.6 times as long
DECAY, DECAY_OVERALL = 0.8, 0.98  # how much of the old counts an estimate keeps at each verification
EXPLORED = 1 / 64  # the share of decodes that get a draft token although none is expected to pay


class Context(list):
    """The prompt and the tokens generated so far, as a proposer sees them.

    For each sequence, it is the same list in every call, extended by the new tokens.

    Attributes:
        notes: what each proposer keeps about this sequence between calls. They disappear with the sequence.
    """

    def __init__(self, token_ids: Iterable[int] = ()):
        super().__init__(token_ids)
        self.notes: dict[Hashable, Any] = {}


def as_context(token_ids: list[int]) -> Context:
    """Return the ids as a context: the same object if they are one, otherwise a copy without notes."""
    return token_ids if isinstance(token_ids, Context) else Context(token_ids)


class Proposer(Protocol):
    """Guesses the next tokens of a sequence. If it fails for one, no sequence has drafts in that pass.

    A proposer may also have a method `propose_batch(token_ids: list[list[int]], k: list[int]) -> list[list[int]]`,
    which proposes for several sequences at once.
    """

    def propose(self, token_ids: list[int], k: int) -> list[int]:
        """Return at most `k` ids that may follow `token_ids`; an empty list for no guess.

        Args:
            token_ids: the prompt and the tokens generated so far, a `Context` if an engine asks.
            k: the most ids that can be verified.
        """


class Speculation(Feature):
    """Decides how many draft tokens each sequence gets, and asks the proposer for them.

    Args:
        scheduler: plans the iterations that drafts are added to.
        proposer: guesses tokens. If it fails, or returns too many or invalid ids, the pass has no drafts.
        num_tokens: the most draft tokens of a sequence in one pass.
        vocab_size: the number of token ids.
    """

    name, in_all_requests = "speculation", True

    def __init__(self, scheduler: Scheduler, proposer: Proposer, num_tokens: int, vocab_size: int):
        self.scheduler, self.proposer, self.num_tokens, self.vocab_size = scheduler, proposer, num_tokens, vocab_size
        self._drafting: WeakKeyDictionary[Sequence, Drafting] = WeakKeyDictionary()
        self._overall = Acceptance(4, 5)
        self._random = random.Random(0)
        self._warned = False

    def extend_plan(self, plan: Plan) -> None:
        """Add drafts to decodes, within what is left of the token budget and of the free blocks."""
        chunks = [
            chunk for chunk in plan.chunks if chunk.is_decode and chunk.sequence.request.notes.get(self.name, True)
        ]
        sequences = [chunk.sequence for chunk in chunks]
        limits = [sequence.max_tokens - sequence.generated - 1 for sequence in sequences]
        drafts = self.propose(sequences, limits, self.scheduler.max_tokens_per_step - plan.tokens)
        for chunk, token_ids in zip(chunks, drafts, strict=True):
            ends = chunk.sequence.request.end_token_ids  # nothing follows these
            token_ids = list(itertools.takewhile(lambda token_id, ends=ends: token_id not in ends, token_ids))
            if token_ids:
                chunk.add_drafts(token_ids[: self.scheduler.memory.allocate_drafts(chunk.sequence, len(token_ids))])

    def settle(self, chunk, forward_pass):
        if chunk.draft_token_ids:
            self.observe(chunk.sequence, len(chunk.draft_token_ids), len(forward_pass.sampled[chunk.sequence]) - 1)
            self.scheduler.memory.free_rejected_drafts(chunk.sequence)

    def propose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int) -> list[list[int]]:
        """Return a draft, which may be empty, for each of the sequences; all of them decode.

        Args:
            sequences: the sequences.
            limits: the most draft tokens that each of them has room for.
            budget: the most draft tokens of all sequences together.
        """
        for sequence in sequences:
            if sequence not in self._drafting:
                self._drafting[sequence] = Drafting(Acceptance(2 * self._overall.rate, 2))
        counts = dict(zip(sequences, self._choose_counts(sequences, limits, budget), strict=True))
        chosen = [sequence for sequence in sequences if counts[sequence] > 0]
        proposals = self._ask(
            [self._context(sequence) for sequence in chosen], [counts[sequence] for sequence in chosen]
        )
        drafts = dict(zip(chosen, proposals, strict=True))
        return [drafts.get(sequence, []) for sequence in sequences]

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Learn how many of a sequence's draft tokens were accepted in a pass."""
        verified = min(accepted + 1, drafted)  # nothing is known about draft tokens after the first wrong one
        self._drafting[sequence].acceptance.update(accepted, verified, DECAY)
        self._overall.update(accepted, verified, DECAY_OVERALL)

    def _context(self, sequence: Sequence) -> Context:
        """Return a copy of a sequence's tokens: a proposer that writes into it cannot damage the sequence."""
        context = self._drafting[sequence].context
        context += sequence.token_ids[len(context) :]
        return context

    def _choose_counts(self, sequences: Seq[Sequence], limits: Seq[int], budget: int) -> list[int]:
        """Choose the number of draft tokens: the most promising ones first, while they raise the tokens per time.

        A pass takes time in proportion to FREE_TOKENS + its tokens. The next draft token pays if its probability is
        above the expected tokens per such unit of time so far.
        """
        counts, candidates = [0] * len(sequences), []
        tokens = expected = len(sequences)
        at_least = expected / (FREE_TOKENS + tokens)  # a token that pays raises this, so none below it ever pays
        for index, (sequence, limit) in enumerate(zip(sequences, limits, strict=True)):
            rate = probability = self._drafting[sequence].acceptance.rate
            for _ in range(min(self.num_tokens, limit)):
                if probability <= at_least:
                    break
                candidates.append((probability, -index))
                probability *= rate
        for probability, index in sorted(candidates, reverse=True):
            if tokens - len(sequences) == budget or probability * (FREE_TOKENS + tokens) <= expected:
                break
            counts[-index] += 1
            tokens, expected = tokens + 1, expected + probability
        left = budget - sum(counts)
        for index, limit in enumerate(limits):
            if counts[index] == 0 < min(left, limit) and self._random.random() < EXPLORED:
                counts[index], left = 1, left - 1
        return counts

    def _ask(self, contexts: list[Context], counts: list[int]) -> list[list[int]]:
        if not contexts:
            return []
        try:
            if hasattr(self.proposer, "propose_batch"):
                proposals = self.proposer.propose_batch(contexts, counts)
            else:
                proposals = [self.proposer.propose(*pair) for pair in zip(contexts, counts, strict=True)]
            return [self._checked(*pair) for pair in zip(proposals, counts, strict=True)]
        except Exception as error:
            self._warn(error)
            return [[] for _ in contexts]

    def _checked(self, proposal, count: int) -> list[int]:
        ids = list(proposal)
        if len(ids) > count:
            raise ValueError(f"{len(ids)} ids, although at most {count} were asked for")
        for token_id in ids:
            if not isinstance(token_id, Integral) or not 0 <= token_id < self.vocab_size:
                raise ValueError(f"{token_id!r} is not a token id from 0 to {self.vocab_size - 1}")
        return [int(token_id) for token_id in ids]

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"The proposer {type(self.proposer).__name__} made no usable proposal, so tokens are generated without "
                f"drafts ({type(error).__name__}: {error}). Later failures cause no warning.",
                stacklevel=2,
            )


class Acceptance:
    """Counts of accepted and of verified draft tokens, in which old ones fade."""

    def __init__(self, accepted: float, verified: float):
        self.accepted, self.verified = accepted, verified

    def update(self, accepted: int, verified: int, decay: float) -> None:
        """Add new counts, after old ones have faded."""
        self.accepted, self.verified = decay * self.accepted + accepted, decay * self.verified + verified

    @property
    def rate(self) -> float:
        """The share of draft tokens that were accepted."""
        return self.accepted / self.verified


@dataclass
class Drafting:
    """What speculation knows about a sequence: how its drafts fared, and its tokens as the proposer sees them."""

    acceptance: Acceptance
    context: Context = field(default_factory=Context)
