"""Outputs: each holds what is new, and every request's outputs go to one reader, in order and without a loss."""

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
    sequences = list(map(sequence, names))
    for one in sequences:
        collector.add(one)
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
