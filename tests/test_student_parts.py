"""The engine with a student's functions: no token changes, and what is lost ends in an error."""

import pytest
from answers import solutions

from helpers import EngineConfig, SamplingParams, generate_continuous, workloads
from helpers.checks import engine_with


@pytest.mark.parametrize("blocks, passes", [(48, 12), (12, 18)])
def test_a_student_s_blocks_run_the_engine_and_change_no_token(blocks, passes):
    requests = workloads.race(4, every=1, long=12)
    config = EngineConfig(num_blocks=blocks, block_size=4, max_batch_size=4)
    engine = engine_with(solutions.grow, solutions.release, solutions.slices_of, config)
    params = [SamplingParams(max_tokens=request.max_tokens) for request in requests]
    outputs = engine.generate([request.prompt for request in requests], params)
    expected = generate_continuous(requests).outputs
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert engine.trace.forward_passes == passes
    assert sorted(engine.block_manager.free_blocks) == list(range(blocks)), "all of them are free again"


@pytest.mark.parametrize("forgetful", [lambda *arguments: None, lambda free, tables, *rest: free.clear()])
def test_a_function_that_refuses_every_request_does_not_run_the_engine_for_ever(forgetful):
    engine = engine_with(forgetful, solutions.release, solutions.slices_of, EngineConfig(num_blocks=8))
    with pytest.raises(ValueError, match="although no request has any of the 8 blocks"):
        engine.generate(["Look", "Many hands"], SamplingParams(max_tokens=2))
