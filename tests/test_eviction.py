"""The eviction contest: counts are those of the block manager, and no function computes fewer than Belady's bound."""

from itertools import count

import pytest
from answers import RIGHT

from helpers.checks.eviction import (
    BLOCK_SIZE,
    BLOCKS,
    TRACES,
    _Evicting,
    baselines,
    belady_bound,
    computed_tokens,
    distance_closed,
    least_recent,
    prompts,
)
from helpers.engine import BlockManager, Sequence


def with_the_engine_s_own_eviction(trace):
    manager, computed = BlockManager(BLOCKS, BLOCK_SIZE), 0
    for number, prompt in enumerate(prompts(trace)):
        sequence = Sequence(number, list(prompt), 1)
        tokens = len(prompt) - manager.cached_tokens(sequence)
        assert manager.allocate(sequence, tokens)
        sequence.computed = len(prompt)
        manager.free(sequence)
        computed += tokens
    return computed


@pytest.mark.parametrize("trace", TRACES)
def test_lru_is_what_the_course_s_block_manager_does(trace):
    assert computed_tokens(least_recent, trace) == with_the_engine_s_own_eviction(trace)
    assert computed_tokens(lambda blocks, now: blocks[0], trace) == computed_tokens(least_recent, trace)


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("seed", [0, 1])
def test_no_function_goes_below_the_bound_and_lru_is_between_it_and_fifo(trace, seed):
    known = baselines(trace, seed)
    assert known["Belady's bound"] == belady_bound(trace, seed) < known["LRU"] < known["FIFO"]
    for evict in (*RIGHT["evict"].values(), *RIGHT["evict_bound"].values(), lambda blocks, now: blocks[-1]):
        assert computed_tokens(evict, trace, seed) > belady_bound(trace, seed)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_thresholds_tell_the_policies_apart_on_other_traces(seed):
    once, both = (RIGHT["evict_bound"][name] for name in ("used_once_first", "ends_of_questions_first"))
    for evict in (once, both):
        assert distance_closed(computed_tokens(evict, "assistants", seed), "assistants", seed) > 0.4
    lru = baselines("chats", seed)["LRU"]
    assert computed_tokens(both, "chats", seed) < 1.06 * lru < 1.2 * lru < computed_tokens(once, "chats", seed)


def test_a_block_says_who_had_it_and_what_followed_it():
    """Three prompts that begin alike; then a prompt that needs the whole memory."""
    seen = []

    def evict(blocks, now):
        seen.append({block.name: block for block in blocks})
        return blocks[0]

    ids = count(100)
    memory, beginning = _Evicting(evict), [1, 2, 3, 4]
    for number in range(3):
        assert memory.run(number, beginning + [next(ids) for _ in range(5)]) == (9 if number == 0 else 5)
    memory.run(3, [next(ids) for _ in range(BLOCKS * BLOCK_SIZE - 2)])
    first, second = seen[0][0], seen[0][1]

    assert (first.index, first.previous, first.uses, first.last_used, first.followers) == (0, None, 3, 2, 3)
    assert (second.index, second.previous, second.uses, second.last_used, second.followers) == (1, 0, 1, 0, 0)
    assert [len(blocks) for blocks in seen] == [4, 3, 2, 1]
