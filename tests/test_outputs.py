"""Outputs that are sent to another process: each holds only what is new, and they join to the whole.

What the callers of an engine receive is test_engine_exactness.py.
"""

from types import SimpleNamespace

from helpers.engine import Chunk, Plan, Sequence
from helpers.engine.outputs import OutputCollector
from helpers.server.output_delta import OutputDelta


def test_a_delta_holds_only_what_is_new_and_deltas_join_to_the_whole():
    collector, sequence = OutputCollector(), Sequence("a", [1, 2], 9)
    sequence.detokenizer, sequence.logprobs = SimpleNamespace(text=""), []
    sequence.request.notes["prompt_logprobs"] = prompt_logprobs = [None, {2: -1.0}]
    collector.output_type = OutputDelta
    collector.add(sequence)
    deltas = []
    for text, sequence.finish_reason in (("x", None), ("yz", None), ("", "abort")):
        sequence.detokenizer.text += text
        sequence.token_ids += map(ord, text)
        sequence.logprobs += [{ord(letter): -1.0} for letter in text]
        collector.collect(Plan([Chunk(sequence, 1)]), [sequence])
        deltas += collector.take_pending()
    assert [(delta.request_id, delta.new_text, delta.finish_reason) for delta in deltas] == [
        ("a", "x", None),
        ("a", "yz", None),
        ("a", "", "abort"),
    ]
    assert [delta.new_token_ids for delta in deltas] == [[ord("x")], [ord("y"), ord("z")], []]
    assert [len(delta.new_logprobs) for delta in deltas] == [1, 2, 0]
    assert [delta.num_tokens for delta in deltas] == [1, 3, 3]
    assert [delta.prompt_logprobs for delta in deltas] == [prompt_logprobs, None, None]
    whole = OutputDelta.join(deltas)
    assert (whole.new_text, whole.new_logprobs, whole.num_tokens) == ("xyz", sequence.logprobs, 3)
    assert (whole.new_token_ids, whole.finish_reason) == (sequence.token_ids[2:], "abort")
    assert whole.prompt_logprobs == prompt_logprobs
    assert OutputDelta.join(deltas[:1]) == deltas[0]
