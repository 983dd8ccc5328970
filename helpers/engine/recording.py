"""Recording: what an iteration did becomes an entry per row in the trace."""

from collections.abc import Iterable
from functools import lru_cache

from ..trace import RowStep, Trace
from .plan import Chunk, Plan
from .runner import RunnerOutput
from .sequence import Sequence
from .speculation import num_matching

shared_row_step = lru_cache(maxsize=4096)(RowStep)  # most are equal to an earlier one, and a trace may hold millions


def record(trace: Trace, step: int, plan: Plan, output: RunnerOutput, finished: Iterable[Sequence]) -> None:
    """Record an iteration in the trace. A row is free once its sequence has finished or was preempted."""
    trace.free(sequence.label for sequence in plan.preempted)
    for done in output.passes:
        row_steps = [_row_step(*pair) for pair in zip(done.chunks, done.padding, strict=True)]
        trace.add(row_steps, done.start, done.seconds, step)
        trace.free(chunk.sequence.label for chunk in done.chunks if chunk.sequence.finish_reason is not None)
    trace.free(sequence.label for sequence in finished)  # also those whose pass failed


def _row_step(chunk: Chunk, padding: int) -> RowStep:
    work, sequence, drafts = "decode" if chunk.is_decode else "prefill", chunk.sequence, chunk.draft_token_ids
    new = sequence.token_ids[chunk.end :] if chunk.samples_token else []
    accepted = num_matching(new, drafts) if drafts else 0
    return shared_row_step(work, sequence.label, chunk.tokens, padding, len(new), len(drafts), accepted)
