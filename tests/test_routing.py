"""Routing policies, what they know of the replicas, and the reports by which they know it."""

import random

from helpers.cluster.replica_state import ReplicaState
from helpers.cluster.routing import FreeRowsFirst, LeastOutstandingTokens, PrefixAware, RoundRobin
from helpers.engine import EngineConfig, SamplingParams, Sequence
from helpers.simulator import Simulator

PROMPT = list(range(40))


class CacheAlone(PrefixAware):
    """Considers the cache alone."""

    weight = 0


class Known:
    """A replica of which a test states all facts."""

    def __init__(self, outstanding_tokens: int = 0, cached: int = 0, free_rows: int = 1):
        self.outstanding_tokens, self.cached, self.free_rows = outstanding_tokens, cached, free_rows

    def cached_tokens(self, prompt_token_ids) -> int:
        return min(self.cached, len(prompt_token_ids) - 1)


# --- policies -------------------------------------------------------------------------------------------------------


def test_round_robin_goes_on_in_turn_when_a_replica_is_lost():
    router = RoundRobin()
    assert [router.choose(PROMPT, [Known()] * 3) for _ in range(4)] == [0, 1, 2, 0]
    assert [router.choose(PROMPT, [Known()] * 2) for _ in range(3)] == [0, 1, 0]


def test_least_outstanding_tokens_takes_the_least_loaded_replica_and_the_first_of_equal_ones():
    assert LeastOutstandingTokens().choose(PROMPT, [Known(5), Known(3, cached=0), Known(3), Known(9, cached=39)]) == 1


def test_prefix_aware_follows_the_cache_until_the_load_outweighs_it():
    router = PrefixAware()
    assert router.choose(PROMPT, [Known(), Known(0, cached=20)]) == 1
    assert router.choose(PROMPT, [Known(), Known(79, cached=20)]) == 1
    assert router.choose(PROMPT, [Known(), Known(81, cached=20)]) == 0, "20 cached tokens are worth 20 / 0.25"
    assert CacheAlone().choose(PROMPT, [Known(), Known(10**6, cached=4)]) == 1
    assert CacheAlone().choose(PROMPT, [Known(7, cached=8), Known(3, cached=8), Known(0)]) == 1


def test_the_policy_chooses_among_the_replicas_with_a_free_row_and_among_all_if_there_are_none():
    router = FreeRowsFirst(LeastOutstandingTokens())
    assert router.choose(PROMPT, [Known(1, free_rows=0), Known(9, free_rows=7), Known(5)]) == 2
    assert router.choose(PROMPT, [Known(9, free_rows=0), Known(5, free_rows=-3), Known(7, free_rows=0)]) == 1


# --- what a router knows --------------------------------------------------------------------------------------------


def test_the_cached_tokens_that_a_router_knows_are_those_of_the_block_manager():
    draw = random.Random(0)
    engine, state = Simulator(EngineConfig(max_batch_size=4, num_blocks=24, block_size=4)), ReplicaState(block_size=4)
    assert engine.block_manager.take_cache_events() == []  # from here on, they are recorded
    prompts = [[draw.randrange(3) for _ in range(4)] * draw.randint(1, 8) for _ in range(60)]
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, SamplingParams(max_tokens=5), number)
        for _ in range(draw.randint(1, 4)):
            engine.step()
        state.report(engine.block_manager.take_cache_events())
        assert state.cached_tokens(prompt) == cached_in(engine, prompt)
    while engine.has_unfinished_requests():
        engine.step()
    state.report(engine.block_manager.take_cache_events())
    assert any(state.cached_tokens(prompt) for prompt in prompts)
    assert all(state.cached_tokens(prompt) == cached_in(engine, prompt) for prompt in prompts)
    assert len(state._registered) <= 24, "the router's memory is bounded by the replica's blocks"


def cached_in(engine: Simulator, prompt: list[int]) -> int:
    return engine.block_manager.cached_tokens(Sequence("asked", list(prompt), 1))


def test_a_prompt_on_its_way_counts_as_cached_until_it_leaves():
    state = ReplicaState(block_size=4)
    state.add("a", PROMPT, 10)
    state.add("b", PROMPT[:20] + [99] * 20, 10)
    assert state.cached_tokens(PROMPT) == 36, "the last token is always computed"
    state.remove("a")
    assert state.cached_tokens(PROMPT) == 20
    state.remove("b")
    assert state.cached_tokens(PROMPT) == 0
    assert not state._expected and not state._requests


def test_outstanding_tokens_are_what_requests_may_still_compute():
    state = ReplicaState(block_size=4)
    state.add("a", PROMPT, 10)
    assert state.outstanding_tokens == 40 + 10
    state.add("b", PROMPT, 5)
    assert state.outstanding_tokens == 50 + 4 + 5, "36 tokens of the prompt are shared"
    state.advance("a", 1)
    assert state.outstanding_tokens == 9 + 9
    state.remove("b")
    state.remove("a")
    state.remove("a")
    assert state.outstanding_tokens == 0


def test_each_unfinished_output_takes_a_row():
    state = ReplicaState(block_size=4, rows=4)
    state.add("a", PROMPT, 30, outputs=3)
    state.add("b", PROMPT, 10)
    assert state.free_rows == 0
    state.end_output("a", 4)
    assert (state.free_rows, state.num_requests) == (1, 2)
    state.remove("a")
    state.remove("b")
    assert (state.free_rows, state.outstanding_tokens, state.num_requests) == (4, 0, 0)
