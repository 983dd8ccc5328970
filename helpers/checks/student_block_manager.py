"""Lesson 7, an engine in which a student's functions choose blocks and slots; no token changes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..engine import BlockManager, EngineConfig, Sequence
from ..model_engine import Engine


class StudentBlockManager(BlockManager):
    """A block manager that calls a student's `grow` and `release`; sequences share no blocks."""

    def __init__(self, num_blocks: int, block_size: int, grow: Callable, release: Callable):
        super().__init__(num_blocks, block_size, prefix_caching=False)
        self._grow, self._release = grow, release
        self.free_blocks = list(range(num_blocks))  # which the student's functions change

    def allocate(self, sequence: Sequence, tokens: int) -> bool:
        """Allocate memory for the next `tokens` tokens, or return False.

        Raises:
            ValueError: the student's function refuses although no sequence has a block: the engine would run forever.
        """
        total = sequence.computed + tokens
        new = self._grow(self.free_blocks, self.tables, sequence, total, self.block_size)
        if new is None and not self.tables:
            raise ValueError(
                f"`grow` refuses room for {total} tokens, although no request has any of the {self.num_blocks} "
                f"blocks. Free blocks: {self.free_blocks}. Does `release` return all blocks?"
            )
        return new is not None

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Share nothing, because the student's functions copy no shared block."""
        return False

    def free(self, sequence: Sequence) -> None:
        if sequence in self.tables:
            self._release(self.free_blocks, self.tables, sequence)
        sequence.computed = 0

    @property
    def available(self) -> int:
        return len(self.free_blocks)


def engine_with(grow: Callable, release: Callable, slices_of: Callable, config: EngineConfig) -> Engine:
    """Return an engine whose blocks and slots a student's functions choose.

    Args:
        grow, release, slices_of: the student's functions.
        config: the engine's configuration, with `num_blocks`; prefix caching is switched off.
    """
    engine = Engine(config=replace(config, execution="ragged", prefix_caching=False, speculative=None))
    blocks = engine.block_manager
    own = StudentBlockManager(blocks.num_blocks, blocks.block_size, grow, release)
    engine.block_manager = engine.scheduler.memory = engine.validator.block_manager = own
    engine.runner.slot_mapping = partial(_slots_by, slices_of)
    return engine


def _slots_by(slices_of: Callable, block_table: list[int], block_size: int, start: int, end: int) -> list[int]:
    slices = slices_of(block_table, start, end, block_size)
    return [slot for first, count in slices for slot in range(first, first + count)]
