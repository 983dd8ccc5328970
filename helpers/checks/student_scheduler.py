"""Lesson 5, a scheduler that follows the plans of a student's function."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial

from ..engine import Chunk, EngineConfig, Plan, Scheduler, Sequence


def planned_by(plan_chunks: Callable) -> Callable[..., Scheduler]:
    """Return a `scheduler_cls` for `EngineConfig` whose plans come from a student's `plan_chunks`."""
    return partial(_PlannedBy, plan_chunks)


class _PlannedBy(Scheduler):
    def __init__(self, plan_chunks: Callable, config: EngineConfig, *args):
        super().__init__(replace(config, mixed_batches=True), *args)  # so that `_admit` runs in every iteration
        self._plan_chunks = plan_chunks

    def _advance(self, plan: Plan, sequences: Seq[Sequence]) -> None:
        """Plan nothing here: the student's plan includes running sequences."""

    def _admit(self, plan: Plan) -> None:
        """Take the student's plan.

        Raises:
            ValueError: the plan is empty although requests wait or run: the engine would run forever.
        """
        running, waiting = list(self.running), list(self.waiting)
        sequences = {sequence.request_id: sequence for sequence in [*running, *waiting]}
        for request_id, tokens in self._plan_chunks(running, waiting, self.max_rows, self.max_tokens_per_step):
            self._add_chunk(plan, sequences[request_id], tokens)
        if sequences and not plan.chunks:
            raise ValueError(
                f"The plan is empty although {len(sequences)} requests wait or run: no token would ever be computed."
            )

    def _add_chunk(self, plan: Plan, sequence: Sequence, tokens: int) -> None:
        """Plan a sequence's next tokens if there is memory for them; admit the sequence if it waits."""
        waits = sequence in self.waiting
        if waits:  # a cached prefix need not be computed
            tokens = min(tokens, len(sequence.token_ids) - self.memory.cached_tokens(sequence))
        if not self.memory.allocate(sequence, tokens):
            return
        plan.chunks.append(Chunk(sequence, tokens, self.memory.block_table(sequence)))
        if waits:
            self.waiting.remove(sequence)
            self.running.append(sequence)
