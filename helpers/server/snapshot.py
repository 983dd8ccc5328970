"""The engine's state after a step, as the event loop's observers see it. Its size does not grow with the queue."""

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ..engine import EngineCore
from ..server.output_delta import OutputDelta
from ..trace import TracedPass

MAX_NAMED = 100  # waiting sequences whose labels a snapshot holds


@dataclass(frozen=True)
class Snapshot:
    """The engine after a step; labels as in the trace.

    Attributes:
        passes: the step's forward passes.
        waiting: labels of the first waiting sequences, at most `MAX_NAMED`.
        num_waiting, num_running: how many sequences wait, and how many hold a row.
        blocks_used, blocks_cached: blocks of the KV cache; 0 in an engine without blocks.
        replica: the name of the replica that made the step, if several serve as one engine.
    """

    passes: tuple[TracedPass, ...] = ()
    waiting: tuple[Hashable, ...] = ()
    num_waiting: int = 0
    num_running: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    replica: str | None = None

    @property
    def drafts(self) -> tuple[int, int]:
        """How many drafts the step verified, and how many of them it accepted."""
        rows = [row for forward_pass in self.passes for row in forward_pass.row_steps if row.drafted]
        return sum(row.drafted for row in rows), sum(row.accepted for row in rows)


Observer = Callable[[list[OutputDelta], Snapshot], None]


def take_snapshot(engine: EngineCore, stepped: bool = True) -> Snapshot:
    """Describe the engine. `stepped` is False if it has made no step since the last snapshot."""
    newest_first = reversed(engine.trace.passes)
    passes = (
        itertools.takewhile(lambda forward_pass: forward_pass.step == engine.steps - 1, newest_first) if stepped else ()
    )
    blocks = engine.block_manager
    return Snapshot(
        tuple(passes)[::-1],
        tuple(engine.waiting_labels(MAX_NAMED)),
        engine.num_waiting,
        engine.num_running,
        blocks.used if blocks else 0,
        blocks.cached if blocks else 0,
    )
