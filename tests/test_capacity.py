"""The design of a server: counts come from the course's own scheduler and blocks, and each number matters."""

import pytest

from helpers.checks.capacity import BLOCK_SIZE, BLOCKS, REQUESTS, run_design, trace


def test_every_trace_has_the_same_lengths_in_another_order():
    first, second = (trace(seed) for seed in (0, 1))
    assert len(first) == REQUESTS and first != second
    for part in (1, 2):
        assert sorted(request[part] for request in first) == sorted(request[part] for request in second)
    assert [request[0] for request in first] == sorted(request[0] for request in first)
    assert max(prompt + output for _, prompt, output in first) < BLOCKS * BLOCK_SIZE


def test_every_request_is_in_time_or_has_a_reason():
    counts = run_design(24, 128, 1)
    assert counts.in_time + counts.refused + counts.late + counts.stalled >= REQUESTS
    assert counts.in_time + counts.refused <= REQUESTS
    assert counts.recomputed > 0, "24 rows do not fit into the memory"
    assert run_design(8, 128, 1).recomputed == 0


def test_each_number_can_spoil_the_design():
    good = run_design(14, 128, 1)
    assert good.in_time >= 0.7 * REQUESTS and good.stalled <= 0.05 * REQUESTS
    for design in [(8, 128, 1), (24, 128, 1), (14, 32, 1), (14, 512, 1), (14, 128, 240)]:
        assert run_design(*design).in_time < 0.7 * REQUESTS, design
    assert run_design(14, 512, 1).stalled > 0.05 * REQUESTS


@pytest.mark.parametrize("seed", [1, 2])
def test_a_good_design_is_good_on_other_traces(seed):
    assert run_design(14, 128, 1, seed).in_time >= 0.7 * REQUESTS
    assert run_design(14, 128, 240, seed).in_time < 0.7 * REQUESTS
