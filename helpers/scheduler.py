"""The scheduler: before every iteration, decide who takes part and how many tokens each one reads.

The idea of deciding anew for every iteration is Orca's (Yu et al., OSDI 2022). `schedule(waiting, running, budget)`
answers with a `Plan`; nothing here knows of a model, so a plan can be tested alone and drive a simulator.

A policy is one method: `queue`, who may join now, the best first. What all policies share is `schedule`: the running
go first, then the queue, within a budget of rows, tokens and memory. Two switches say how a plan is put together,
and together they are the ablation of Sarathi-Serve (Agrawal et al., OSDI 2024):

    mixed     prefills share an iteration with decodes, else the two take turns
    chunked   a prompt may be read in pieces, as many tokens as the budget has left, else whole or not at all
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from .sequence import Sequence


class Memory(Protocol):
    """What a scheduler asks of the KV cache: `block_manager.BlockManager` answers, or `Unlimited`."""

    def cached_tokens(self, sequence: Sequence) -> int:
        """How many tokens of a waiting sequence are there already and need not be read (never all of them)."""

    def allocate(self, sequence: Sequence, tokens: int) -> bool:
        """Make room for the next `tokens` tokens, or answer False and change nothing.

        For a sequence that joins, this also attaches what is cached and sets its `computed`.
        """

    def release(self, sequence: Sequence) -> None:
        """Take back all the room of a sequence, and set its `computed` to 0."""


class Unlimited:
    """Memory that never ends and shares nothing: a row costs nothing but a row."""

    def cached_tokens(self, sequence: Sequence) -> int:
        return 0

    def allocate(self, sequence: Sequence, tokens: int) -> bool:
        return True

    def release(self, sequence: Sequence) -> None:
        sequence.computed = 0


@dataclass(frozen=True)
class Budget:
    """What one iteration may use.

    Attributes:
        rows: sequences that can run at once.
        tokens: tokens that an iteration reads at most; at least one a row, so that everybody can decode.
        memory: room for keys and values.
    """

    rows: int
    tokens: int
    memory: Memory = field(default_factory=Unlimited)

    def __post_init__(self):
        if self.rows < 1:
            raise ValueError(f"A budget has at least 1 row, not {self.rows}.")
        if self.tokens < self.rows:
            raise ValueError(
                f"{self.rows} rows that all decode read {self.rows} tokens in an iteration, but the budget is "
                f"{self.tokens}: allow more tokens or fewer rows."
            )


@dataclass(frozen=True)
class Chunk:
    """In this iteration, the sequence reads its next `tokens` tokens."""

    sequence: Sequence
    tokens: int

    @property
    def completes(self) -> bool:
        """Whether the sequence then has read all of its tokens, so that it gets a new one."""
        return self.tokens == self.sequence.unread


@dataclass
class Plan:
    """One iteration: who reads how much, and who has to give up its memory and start anew."""

    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)


class FirstComeFirstServed:
    """In the order of arrival. Also what the other policies build on: they differ in `queue` alone."""

    def __init__(self, mixed: bool = True, chunked: bool = True):
        self.mixed, self.chunked = mixed, chunked
        self._prefilled_last = False

    def queue(self, waiting: Seq[Sequence], running: Seq[Sequence]) -> list[Sequence]:
        """Who may join in this iteration, the best first. `waiting` is in the order of arrival."""
        return list(waiting)

    def schedule(self, waiting: Seq[Sequence], running: Seq[Sequence], budget: Budget) -> Plan:
        """What the next iteration does.

        Args:
            waiting: sequences without a row, in the order of arrival.
            running: sequences with a row, in the order in which they got it.
            budget: what the iteration may use.

        Returns:
            A plan of at most `budget.tokens` tokens; running sequences first, then those that join. The budget's
            memory has been allocated for them. Where there is none left, the newest of the running are preempted:
            the oldest always gets on, so everybody does in the end.
        """
        decoding = [sequence for sequence in running if sequence.decodes]
        reading = [sequence for sequence in running if not sequence.decodes]
        decode_only = not self.mixed and self._prefilled_last and decoding
        plan = Plan()
        if not decode_only:
            if self.mixed:
                self._advance(plan, decoding, running, budget)
            self._advance(plan, reading, running, budget)
            if not plan.preempted:  # else there is no room for anybody else
                self._admit(plan, self.queue(waiting, running), budget, budget.rows - len(running))
        self._prefilled_last = bool(plan.chunks)
        if not self.mixed and not plan.chunks:  # the decodes' turn, or nobody to prefill
            self._advance(plan, [one for one in decoding if one not in plan.preempted], running, budget)
        return plan

    def _advance(self, plan: Plan, sequences: list[Sequence], running: Seq[Sequence], budget: Budget) -> None:
        """The next tokens of some running sequences; the newest of all have to make room where there is none."""
        for sequence in sequences:
            tokens = min(sequence.unread, budget.tokens - plan.tokens)
            if tokens == 0 or (tokens < sequence.unread and not self.chunked):
                continue
            while sequence not in plan.preempted and not budget.memory.allocate(sequence, tokens):
                newest = [one for one in running if one not in plan.preempted][-1]
                budget.memory.release(newest)
                plan.preempted.append(newest)
                plan.chunks = [chunk for chunk in plan.chunks if chunk.sequence is not newest]
            if sequence not in plan.preempted:
                plan.chunks.append(Chunk(sequence, tokens))

    def _admit(self, plan: Plan, queue: list[Sequence], budget: Budget, free_rows: int) -> None:
        """Sequences join in the queue's order until one does not fit: nobody overtakes, so nobody waits for ever."""
        for sequence in queue[:free_rows]:
            unread = len(sequence.token_ids) - budget.memory.cached_tokens(sequence)
            tokens = min(unread, budget.tokens - plan.tokens)
            if tokens == 0 or (tokens < unread and not self.chunked):
                return
            if not budget.memory.allocate(sequence, tokens):
                return
            plan.chunks.append(Chunk(sequence, tokens))


class Static(FirstComeFirstServed):
    """Static batching as a policy: nobody joins before everybody has left."""

    def queue(self, waiting, running):
        return [] if running else list(waiting)


class LongestFirst(FirstComeFirstServed):
    """The longest outputs first, in three classes (ColossalAI's request handler keeps three such queues).

    A long request alone needs an iteration for each of its tokens: whoever starts it last waits for it alone. The
    classes are thirds of the largest max_tokens in the queue; within a class, first come, first served. What is known
    is the limit, not the length: EOS may come sooner. Short requests can wait as long as longer ones keep coming.
    """

    def queue(self, waiting, running):
        longest = max((sequence.max_tokens for sequence in waiting), default=0)
        return sorted(waiting, key=lambda sequence: -(3 * sequence.max_tokens // (longest + 1)))


class ShortestFirst(FirstComeFirstServed):
    """The shortest outputs first: the best mean latency, as long as nobody minds that the long ones wait."""

    def queue(self, waiting, running):
        return sorted(waiting, key=lambda sequence: sequence.max_tokens)


class Priority(FirstComeFirstServed):
    """The most urgent first (the smallest number), and whoever waits becomes more urgent: nobody starves.

    Args:
        ageing: after so many iterations in the queue, a sequence counts as one level more urgent.
    """

    def __init__(self, mixed: bool = True, chunked: bool = True, ageing: int = 50):
        super().__init__(mixed, chunked)
        if ageing < 1:
            raise ValueError(f"ageing is a number of iterations of at least 1, not {ageing}.")
        self.ageing = ageing

    def queue(self, waiting, running):
        return sorted(waiting, key=lambda sequence: sequence.priority - sequence.waited // self.ageing)


class Balanced(FirstComeFirstServed):
    """Let the running decode in peace until enough others wait to make the interruption worth it.

    Both limits are text-generation-inference's (`waiting_served_ratio`, `max_waiting_tokens`).

    Args:
        waiting_served_ratio: join once there are so many times more waiting than running.
        max_waiting_tokens: or once somebody has waited for so many iterations.
    """

    def __init__(
        self, mixed: bool = True, chunked: bool = True, waiting_served_ratio: float = 0.3, max_waiting_tokens: int = 20
    ):
        super().__init__(mixed, chunked)
        self.waiting_served_ratio, self.max_waiting_tokens = waiting_served_ratio, max_waiting_tokens

    def queue(self, waiting, running):
        enough = len(waiting) >= self.waiting_served_ratio * len(running)
        overdue = any(sequence.waited >= self.max_waiting_tokens for sequence in waiting)
        return list(waiting) if enough or overdue else []


POLICIES = {
    "static": Static,
    "fcfs": FirstComeFirstServed,
    "longest_first": LongestFirst,
    "shortest_first": ShortestFirst,
    "priority": Priority,
    "balanced": Balanced,
}


def make_scheduler(policy: str | FirstComeFirstServed, mixed: bool = True, chunked: bool = True):
    """The policy of that name; an object that schedules is taken as it is.

    Raises:
        ValueError: there is no policy of that name.
    """
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"There is no policy {policy!r}: choose one of {', '.join(POLICIES)}.")
    return POLICIES[policy](mixed=mixed, chunked=chunked)
