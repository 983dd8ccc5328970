"""Free blocks: against a model that searches a set, and at a cost that does not grow with the number of blocks."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from helpers.engine.block_manager import FreeBlocks
from tests.simulation import operations


def naive_take(free: set[int], after: int | None) -> int:
    """Take a block as `FreeBlocks` must, by looking at all of them."""
    block = after + 1 if after is not None and after + 1 in free else None
    if block is None:
        gaps = []
        for start in sorted(free):
            if start - 1 not in free:
                end = start
                while end in free:
                    end += 1
                gaps.append((start, end))
        start, end = max(gaps, key=lambda gap: gap[1] - gap[0])  # the first of the largest
        block = (start + end) // 2 if start > 0 else 0
    free.remove(block)
    return block


@settings(max_examples=300, phases=[Phase.generate])
@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 39)), max_size=120))
def test_every_block_is_the_one_that_a_search_of_all_finds_and_the_heap_stays_small(count, actions):
    blocks, free, allocated = FreeBlocks(count), set(range(count)), []
    for is_take, which in actions:
        if is_take and free:
            # Behind an allocated block, or with none to be near.
            after = allocated[which % len(allocated)] if allocated and which < 30 else None
            allocated.append(blocks.take(after))
            assert allocated[-1] == naive_take(free, after)
        elif allocated:
            block = allocated.pop(which % len(allocated))
            blocks.put(block)
            free.add(block)
        assert len(blocks) == len(free) and bool(blocks) == bool(free)
        assert len(blocks._largest) <= count + 18, "gaps that no longer exist are dropped from the heap"
    while free:
        assert blocks.take() == naive_take(free, None)
    with pytest.raises(IndexError):
        blocks.take()


def test_a_block_that_comes_and_goes_leaves_no_history_in_the_heap():
    blocks = FreeBlocks(1000)
    assert [blocks.take(after) for after in (None, *range(899))] == list(range(900))
    for _ in range(500):
        blocks.put(500)
        assert blocks.take(after=499) == 500
    assert len(blocks._largest) < 20, "one gap is left"


def test_a_block_costs_no_more_among_a_hundred_thousand_than_among_a_thousand():
    def cost(count: int) -> int:
        blocks = FreeBlocks(count)
        for after in (None, *range(count - 1)):
            blocks.take(after)
        for block in range(0, count, 2):  # as many gaps as there can be
            blocks.put(block)

        def work():
            for block in range(1, 200, 2):
                blocks.put(count // 2 + block)  # closes the space between two gaps
            for _ in range(100):
                blocks.take()
            for block in range(1, 200, 2):
                blocks.take(after=block)

        return operations(work)

    assert cost(100_000) <= 1.1 * cost(1000)
