"""Outputs: each holds what is new, and every request's outputs go to one reader, in order and without a loss."""

from collections import deque

import pytest

from helpers.engine import Chunk, Plan, Sequence
from helpers.engine.outputs import OutputCollector
from helpers.server.output_delta import OutputDelta


class Text:
    """In place of a detokenizer: every token is a letter."""

    def __init__(self, sequence):
        self.sequence = sequence

    @property
    def text(self) -> str:
        return "".join(map(chr, self.sequence.token_ids[self.sequence.prompt_tokens :]))


def sequence(name) -> Sequence:
    one = Sequence(name, [1, 2], 9)
    one.detokenizer = Text(one)
    return one


def expected(collector, *names) -> list[Sequence]:
    collector.add(sequences := list(map(sequence, names)))
    return sequences


def grow(one: Sequence, text: str, finish_reason: str | None = None) -> Plan:
    one.token_ids += map(ord, text)
    one.finish_reason = finish_reason
    return Plan([Chunk(one, 1)])


def pieces(outputs):
    return [(output.request_id, output.new_text, output.finish_reason) for output in outputs]


def collect(collector: OutputCollector, plan: Plan, finished: list[Sequence]) -> list:
    """Collect the outputs of an iteration, and return those without a subscriber."""
    collector.collect(plan, finished)
    return collector.take_pending()


@pytest.fixture
def collector():
    return OutputCollector()


def test_an_output_holds_everything_so_far_and_what_is_new(collector):
    (one,) = expected(collector, "a")
    (first,) = collect(collector, grow(one, "x"), [])
    (second,) = collect(collector, grow(one, "yz", "length"), [one])
    assert (first.text, first.new_text, first.token_ids) == ("x", "x", [ord("x")])
    assert (second.text, second.new_text, second.new_token_ids) == ("xyz", "yz", [ord("y"), ord("z")])
    assert not collector._emitted, "what is known of a sequence is dropped with its last output"


def test_a_delta_holds_only_what_is_new_and_deltas_join_to_the_whole(collector):
    collector.output_type = OutputDelta
    (one,) = expected(collector, "a")
    one.logprobs = []
    deltas = []
    for text, finish_reason in (("x", None), ("yz", None), ("", "abort")):
        one.logprobs += [{ord(letter): -1.0} for letter in text]
        deltas += collect(collector, grow(one, text, finish_reason), [one])
    assert pieces(deltas) == [("a", "x", None), ("a", "yz", None), ("a", "", "abort")]
    assert [delta.new_token_ids for delta in deltas] == [[ord("x")], [ord("y"), ord("z")], []]
    assert [len(delta.new_logprobs) for delta in deltas] == [1, 2, 0]
    assert [delta.num_tokens for delta in deltas] == [1, 3, 3]
    whole = OutputDelta.join(deltas)
    assert (whole.new_text, whole.new_logprobs, whole.num_tokens) == ("xyz", one.logprobs, 3)
    assert whole.new_token_ids == one.token_ids[2:] and whole.finish_reason == "abort"
    assert OutputDelta.join(deltas[:1]) == deltas[0]


def test_only_the_first_delta_holds_the_log_probabilities_of_the_prompt(collector):
    collector.output_type = OutputDelta
    (one,) = expected(collector, "a")
    one.request.notes["prompt_logprobs"] = [None, {2: -1.0}]
    deltas = [*collect(collector, grow(one, "x"), []), *collect(collector, grow(one, "yz", "length"), [one])]
    assert [delta.prompt_logprobs for delta in deltas] == [[None, {2: -1.0}], None]
    assert OutputDelta.join(deltas).prompt_logprobs == [None, {2: -1.0}]


def test_a_sequence_without_a_new_token_has_no_output_unless_it_ended(collector):
    one, other = expected(collector, "a", "b")
    plan = Plan([Chunk(one, 1), Chunk(other, 1)])
    assert collect(collector, plan, []) == []
    other.finish_reason = "error"
    assert pieces(collect(collector, plan, [other])) == [("b", "", "error")]


def test_outputs_are_in_the_order_of_the_plan_behind_earlier_ones(collector):
    one, other, aborted = expected(collector, "a", "b", "c")
    aborted.finish_reason = "abort"
    collector.put(aborted)
    grow(one, "x"), grow(other, "y", "length")
    plan = Plan([Chunk(one, 1), Chunk(other, 1)])
    outputs = collect(collector, plan, [other])
    assert pieces(outputs) == [("c", "", "abort"), ("a", "x", None), ("b", "y", "length")]


def test_a_subscriber_gets_the_outputs_of_its_request_and_no_others(collector):
    one, other = expected(collector, "a", "b")
    queue = deque()
    collector.subscribe("a", queue)
    assert collect(collector, grow(one, "x"), []) == []
    assert pieces(collect(collector, grow(other, "y"), [])) == [("b", "y", None)]
    assert collect(collector, grow(one, "z", "length"), [one]) == [] and not collector.pending
    assert pieces(queue) == [("a", "x", None), ("a", "z", "length")]


def test_requests_can_share_a_queue(collector):
    one, other = expected(collector, "a", "b")
    queue = deque()
    collector.subscribe("a", queue)
    collector.subscribe("b", queue)
    collect(collector, grow(one, "x"), []), collect(collector, grow(other, "y"), [])
    assert pieces(queue) == [("a", "x", None), ("b", "y", None)]


def test_undelivered_outputs_are_dropped_with_their_subscriber(collector):
    (one,) = expected(collector, "a")
    collector.subscribe("a", deque())
    collect(collector, grow(one, "x"), [])
    collector.unsubscribe("a")
    collector.unsubscribe("a")
    assert not collector.pending and not collector.holds("a")
    assert pieces(collect(collector, grow(one, "y"), [])) == [("a", "y", None)]


def test_a_request_is_held_until_its_outputs_are_delivered_and_its_subscriber_has_left(collector):
    (one,) = expected(collector, "a")
    assert not collector.holds("a") and not collector.has_subscriber("a")
    collector.put(one)
    assert collector.holds("a") and not collector.has_subscriber("a")
    collector.take_pending()
    assert not collector.holds("a")
    collector.subscribe("a", deque())
    assert collector.holds("a") and collector.has_subscriber("a")
    collector.unsubscribe("a")
    assert not collector.holds("a")
