"""Traces of batches written by hand, compared with the exact row steps expected. A trace needs no model."""

import pytest
import torch

from helpers.trace import RowStep, Trace


def fresh(**prompt_tokens: int) -> dict:
    """Return a batch before its prefill: request name = number of its prompt's tokens."""
    width = max(prompt_tokens.values())
    mask = [[0] * (width - n) + [1] * n for n in prompt_tokens.values()]
    return {
        "request_ids": list(prompt_tokens),
        "input_ids": torch.zeros(len(mask), width, dtype=torch.long),
        "attention_mask": torch.tensor(mask),
        "tokens_remaining": [9] * len(mask),
    }


def running(**tokens_remaining: int) -> dict:
    """Return a batch after its prefill: request name = tokens that it may still generate."""
    rows = len(tokens_remaining)
    return {
        "request_ids": list(tokens_remaining),
        "input_ids": torch.zeros(rows, 1, dtype=torch.long),
        "attention_mask": torch.ones(rows, 7, dtype=torch.long),
        "tokens_remaining": list(tokens_remaining.values()),
        "past_key_values": ...,
    }


def prefill(id, tokens, new_tokens=1, padding=0):
    return RowStep("prefill", id, tokens, padding, new_tokens)


def decode(id):
    return RowStep("decode", id, tokens=1, new_tokens=1)


def row_steps(trace: Trace) -> list[list[RowStep]]:
    return [list(iteration.row_steps) for iteration in trace.passes]


def rows(trace: Trace) -> list[list[tuple]]:
    return [[(row.request_id, row.work) for row in iteration] for iteration in row_steps(trace)]


def test_drafts_are_counted_and_every_accepted_one_has_the_time_of_its_pass():
    trace = Trace(rows=2)
    trace.add([prefill("a", 4), prefill("b", 2)], 0.0, 1.0, 0)
    assert trace.acceptance is None
    steps = [
        RowStep("decode", "a", 4, new_tokens=3, drafted=3, accepted=2),
        RowStep("decode", "b", 2, new_tokens=1, drafted=1),
    ]
    trace.add(steps, 1.0, 0.5, 1)
    assert (trace.drafted_tokens, trace.accepted_tokens, trace.acceptance) == (4, 2, 0.5)
    assert trace.output_tokens == 6
    assert trace.token_times == {"a": [1.0, 1.5, 1.5, 1.5], "b": [1.0, 1.5]}
    assert trace.wasted_slot_steps == 0


@pytest.fixture
def continuous() -> Trace:
    """Three rows, four requests, and one iteration per second that takes half a second."""
    trace = Trace(rows=3)
    steps = [
        (fresh(a=4, b=2), running(a=2, b=1)),  # prefill; the third row has no request
        (running(a=2, b=1), running(a=1, b=0)),  # b is finished
        (fresh(c=3, d=1), running(c=1, d=0)),  # c and d join while a waits; d finishes at once
        (running(a=1, c=1), running(a=0, c=0)),
    ]
    for second, (before, after) in enumerate(steps):
        trace.record_pass(before, after, start=float(second), seconds=0.5)
    return trace


def test_a_continuous_run_has_the_row_steps_counts_and_times_computed_by_hand(continuous):
    assert row_steps(continuous) == [
        [prefill("a", 4), prefill("b", 2, padding=2), RowStep("empty")],
        [decode("a"), decode("b"), RowStep("empty")],
        # c takes the row that b left, d the one that was empty.
        [RowStep("stalled", "a"), prefill("c", 3), prefill("d", 1, padding=2)],
        [decode("a"), decode("c"), RowStep("empty")],
    ]
    assert (continuous.forward_passes, continuous.slot_steps, continuous.wasted_slot_steps) == (4, 12, 4)
    assert continuous.work == {"prefill": 4, "decode": 4, "stalled": 1, "empty": 3}
    assert (continuous.output_tokens, continuous.prompt_tokens, continuous.prompt_padding) == (8, 10, 4)
    # A token is available when its iteration ends.
    assert continuous.token_times == {"a": [0.5, 1.5, 3.5], "b": [0.5, 1.5], "c": [2.5, 3.5], "d": [2.5]}
    assert continuous.seconds == 3.5


def test_a_finished_row_of_a_static_batch_is_computed_and_yields_nothing():
    trace = Trace(rows=2)
    trace.record_pass(fresh(a=1, b=3), running(a=0, b=1), 0.0, 1.0)
    trace.record_pass(running(a=0, b=1), running(a=0, b=0), 1.0, 1.0)
    trace.record_pass(fresh(c=2), running(c=0), 2.0, 1.0)
    assert row_steps(trace)[1:] == [
        [RowStep("finished", "a", tokens=0, padding=1), decode("b")],
        [prefill("c", 2), RowStep("empty")],
    ]
    assert (trace.output_tokens, trace.prompt_padding) == (4, 2)  # the input of a finished row is no pad of a prompt


# --- as an engine records: forward passes over a few rows each, several per step -----------------------------------


def test_what_an_engine_records_is_assigned_to_rows():
    trace = Trace(rows=3)
    trace.add([prefill("a", 2), prefill("b", 4, new_tokens=0)], 0.0, 1.0, step=0)
    trace.add([decode("a")], 1.0, 1.0, step=1)
    trace.add([prefill("b", 3)], 2.0, 1.0, step=1)  # the rest of its prompt, in the same step
    trace.free(["a"])
    trace.add([decode("b")], 3.0, 1.0, step=4)  # in steps 2 and 3 no request had anything to compute
    assert rows(trace) == [
        [("a", "prefill"), ("b", "prefill"), (None, "empty")],
        [("a", "decode"), ("b", "stalled"), (None, "empty")],
        [("a", "stalled"), ("b", "prefill"), (None, "empty")],
        [(None, "empty"), ("b", "decode"), (None, "empty")],
    ]
    assert (trace.steps, trace.forward_passes, trace.slot_steps) == (3, 4, 12)
    # A chunk reads tokens and yields none yet.
    assert (trace.output_tokens, trace.prompt_tokens) == (4, 9)
    assert trace.token_times == {"a": [1.0, 2.0], "b": [3.0, 4.0]}


def test_retimed_the_iterations_follow_each_other_and_keep_their_counts(continuous):
    retimed = continuous.retimed()
    assert [iteration.start for iteration in retimed.passes] == [0, 1, 2, 3]
    assert row_steps(retimed) == row_steps(continuous) and retimed.steps == continuous.steps == 4
    assert retimed.token_times == {"a": [1, 2, 4], "b": [1, 2], "c": [3, 4], "d": [3]}
    assert continuous.retimed(lambda iteration: iteration.tokens).seconds == 8 + 2 + 6 + 2
    assert continuous.seconds == 3.5, "the trace itself has changed"


def test_a_trace_may_forget_all_but_the_last_iterations():
    """It remembers which request holds which row, and its counts cover the iterations that it keeps."""
    trace, whole = Trace(rows=2, keep=3), Trace(rows=2)
    for recording in (trace, whole):
        recording.add([prefill("a", 2)], 0.0, 1.0, step=0)
        recording.add([decode("a"), prefill("b", 3)], 1.0, 1.0, step=1)
        recording.free(["a"])
        for step in range(2, 9):
            recording.add([decode("b")], float(step), 1.0, step=step)
    assert list(trace.passes) == list(whole.passes)[-3:] and whole.forward_passes == 9
    assert (trace.forward_passes, trace.steps, trace.slot_steps, trace.output_tokens) == (3, 3, 6, 3)
    assert rows(trace) == [[(None, "empty"), ("b", "decode")]] * 3
    assert trace.token_times == {"b": [7.0, 8.0, 9.0]} and trace.seconds == 9.0
    assert trace.retimed().forward_passes == 3
