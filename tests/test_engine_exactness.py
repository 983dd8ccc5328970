"""The engine's claim: whichever requests arrive, leave or fail, and whatever the policy, each one gets its own tokens.

Hypothesis drives an engine of random settings, most of them with few tokens per iteration and few blocks. A run that
breaks the claim is printed as code.
"""

import pytest

from tests.support.engine_machine import EVENTS, PAIRS, run_machine


@pytest.mark.parametrize("name", PAIRS)
def test_whatever_happens_every_request_gets_its_own_tokens_once(name):
    events = run_machine(f"Engine_{name}", 12, 20, names=(name,))
    assert all(events[event] > 5 for event in EVENTS), events
