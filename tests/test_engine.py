"""The engine's promises one by one: outputs and their order, counts, refusals, and what goes wrong when something does.

That everybody gets its own tokens in any company is test_engine_exactness.py.
"""

import itertools
import math

import pytest
import torch
from conftest import PROMPTS, CountingModel, alone, letter_tokenizer, random_pair

from helpers import Engine, EngineConfig, SamplingParams, generate_continuous, generate_static
from helpers.batching import text_of
from helpers.scheduler import POLICIES, FirstComeFirstServed
from tests import families

pytestmark = pytest.mark.usefixtures("one_thread")

EXECUTIONS = pytest.mark.parametrize("execution", ["padded", "auto"])


def letters_engine(context=40, eos=0, **config):
    """Says the next letter after each: all outputs can be foretold."""
    return Engine(CountingModel(context, eos), letter_tokenizer(), EngineConfig(**{"execution": "padded"} | config))


def params(*max_tokens, **others):
    return [SamplingParams(max_tokens=most, **others) for most in max_tokens]


def ends(outputs):
    return {output.request_id: (output.text, output.finish_reason) for output in outputs if output.finish_reason}


def run(engine) -> list:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


# --- every step tells what moved ------------------------------------------------------------------------------------


def test_every_output_of_a_small_run():
    engine = letters_engine(max_batch_size=2, max_tokens_per_step=4)
    a, b, c = (
        engine.add_request(prompt, one) for prompt, one in zip(["ab", "defg", "c"], params(3, 9, 1), strict=True)
    )
    steps = []
    while engine.has_unfinished_requests():
        steps.append([(o.request_id, o.new_text, o.text, o.finish_reason) for o in engine.step()])
    assert (a, b, c) == (0, 1, 2)
    assert steps == [
        [(a, "c", "c", None)],  # and two letters of b, which says nothing yet
        [(a, "d", "cd", None), (b, "h", "h", None)],
        [(a, "e", "cde", "length"), (b, "i", "hi", None)],
        [(b, "", "hi", "stop"), (c, "d", "d", "length")],  # EOS is a token without a text
    ]
    assert engine.step() == []


def test_what_an_output_holds():
    times = itertools.count()
    engine = Engine(CountingModel(), letter_tokenizer(), EngineConfig(execution="padded"), clock=lambda: next(times))
    engine.add_request([6, 7], SamplingParams(9), request_id="my own name")
    outputs = run(engine)
    assert [output.token_ids for output in outputs] == [[8], [8, 9], [8, 9, 0]]
    assert [output.new_token_ids for output in outputs] == [[8], [9], [0]]
    last = outputs[-1]
    assert (last.request_id, last.prompt, last.text, last.finish_reason) == ("my own name", [6, 7], "hi", "stop")
    assert last.index == 0 and last.error is None and last.logprobs is None
    assert last.metrics.request_id == "my own name" and last.metrics.ttft == last.token_times[0] - last.arrival > 0
    assert len(last.token_times) == 3 and last.metrics.e2e > last.metrics.ttft
    assert last.token_times == engine.trace.token_times["my own name"]
    assert outputs[0].token_ids == [8], "an output that was given out does not change"


def test_text_and_ids_of_a_prompt_are_the_same_request(random_pairs):
    model, tokenizer = random_pairs
    ids = tokenizer(PROMPTS[3])["input_ids"]
    by_text, by_ids = Engine(model, tokenizer).generate([PROMPTS[3], ids], SamplingParams(20))
    assert by_text.token_ids == by_ids.token_ids == alone(model, tokenizer, PROMPTS[3], 20)
    assert (by_text.prompt, by_ids.prompt) == (PROMPTS[3], ids)


def test_an_engine_without_arguments_runs_the_embedded_model(embedded):
    (output,) = Engine().generate(PROMPTS[0], SamplingParams(8))
    assert output.token_ids == alone(*embedded, PROMPTS[0], 8)


# --- policies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mixed", "chunked"), [*itertools.product([True, False], repeat=2)])
@pytest.mark.parametrize("policy", POLICIES)
@EXECUTIONS
def test_no_policy_changes_a_token(random_pairs, policy, mixed, chunked, execution):
    model, tokenizer = random_pairs
    config = EngineConfig(
        max_batch_size=3,
        max_tokens_per_step=20 if chunked else 128,
        policy=policy,
        mixed_batches=mixed,
        chunked_prefill=chunked,
        execution=execution,
    )
    most = [1 + 5 * row % 17 for row in range(len(PROMPTS))]
    outputs = Engine(model, tokenizer, config).generate(PROMPTS, params(*most), arrivals=[3 * n % 8 for n in most])
    for prompt, max_tokens, output in zip(PROMPTS, most, outputs, strict=True):
        assert output.token_ids == alone(model, tokenizer, prompt, max_tokens)
        assert output.prompt == prompt, "answers come in the order of the prompts"


RACE = {
    ("fcfs", True): (130, 135),
    ("fcfs", False): (132, 132),
    ("longest_first", True): (100, 106),
    ("longest_first", False): (106, 106),
    ("static", True): (400, 400),
    ("static", False): (400, 400),
}


@pytest.mark.parametrize(("policy", "mixed"), RACE)
def test_the_race_takes_so_many_steps_and_forward_passes(policy, mixed):
    engine = letters_engine(128, 99, policy=policy, mixed_batches=mixed)  # nobody ends early
    outputs = engine.generate(["abcdefg"] * 32, params(*(100 if n % 8 == 0 else 10 for n in range(32))))
    assert (engine.trace.steps, engine.trace.forward_passes) == RACE[policy, mixed]
    assert engine.trace.output_tokens == sum(len(output.token_ids) for output in outputs) == 680
    assert engine.trace.work["finished"] == 0 and engine.trace.prompt_tokens == 32 * 7


def test_two_policies_are_the_two_loops_of_the_lessons():
    # The same requests in the same order: an engine is these loops with a scheduler in the place of their conditions.
    pair = CountingModel(128, eos_token_id=99), letter_tokenizer()
    requests = [(request, 37 if n % 5 == 0 else 3 + n % 4) for n, request in enumerate(["ab", "cdefg", "h"] * 10)]
    prompts, most = zip(*requests, strict=True)
    for policy, loop in (("fcfs", generate_continuous), ("static", generate_static)):
        engine = letters_engine(128, 99, policy=policy, mixed_batches=False)
        outputs, generation = engine.generate(prompts, params(*most)), loop(requests, 8, *pair)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in generation.outputs]
        assert engine.trace.forward_passes == generation.trace.forward_passes
        assert engine.trace.output_tokens == generation.trace.output_tokens


def test_the_urgent_go_first():
    engine = letters_engine(max_batch_size=1, policy="priority")
    for name, priority in (("later", 1), ("soon", 0), ("now", -1)):
        engine.add_request("ab", SamplingParams(2), name, priority)
    assert list(ends(run(engine))) == ["now", "soon", "later"]


def test_a_policy_of_ones_own_is_an_object():
    class LastComeFirstServed(FirstComeFirstServed):
        def queue(self, waiting, running):
            return list(waiting)[::-1]

    engine = letters_engine(max_batch_size=1, policy=LastComeFirstServed())
    for name in "abc":
        engine.add_request(name, SamplingParams(2), name)
    assert list(ends(run(engine))) == ["c", "b", "a"]


# --- coming and going -----------------------------------------------------------------------------------------------


def test_an_aborted_request_ends_where_it_is_and_costs_the_others_nothing():
    engine = letters_engine(max_batch_size=2, max_tokens_per_step=4)
    for name, prompt in (("runs", "a"), ("reads", "abcdefgh"), ("waits", "bc"), ("stays", "c")):
        engine.add_request(prompt, SamplingParams(5), name)
    engine.step()
    assert all(engine.abort_request(name) for name in ("runs", "reads", "waits"))
    assert not engine.abort_request("runs") and not engine.abort_request("nobody")
    outputs = engine.step()
    assert ends(outputs) == {"runs": ("b", "abort"), "reads": ("", "abort"), "waits": ("", "abort")}
    assert [output.request_id for output in outputs] == ["runs", "reads", "waits", "stays"]  # a row was free at once
    assert ends(run(engine)) == {"stays": ("defgh", "length")}


def test_a_request_of_several_answers_is_aborted_whole():
    engine = letters_engine(max_batch_size=2)
    engine.add_request("ab", SamplingParams(5, temperature=1.0, ignore_eos=True, n=3), "several")
    engine.step()
    assert engine.abort_request("several")
    assert {(output.index, output.finish_reason) for output in engine.step()} == {(n, "abort") for n in range(3)}
    assert not engine.has_unfinished_requests()


def test_an_id_can_be_used_again_when_its_request_has_ended():
    engine = letters_engine()
    for _ in range(2):
        assert engine.add_request("ab", SamplingParams(2), "name") == "name"
        with pytest.raises(ValueError, match="unfinished request 'name'"):
            engine.add_request("c", SamplingParams(2), "name")
        assert ends(run(engine)) == {"name": ("cd", "length")}


def test_numbers_as_ids_do_not_get_into_each_others_way():
    engine = letters_engine()
    assert engine.add_request("ab", SamplingParams(1), 1) == 1
    assert [engine.add_request("ab", SamplingParams(2)) for _ in range(3)] == [0, 2, 3]
    engine.add_request("a", SamplingParams(1), 4)
    assert engine.abort_request(4)  # its end has not been told yet: the next number is another, or it would be mixed up
    assert [output.text for output in engine.generate(["b", "c"], SamplingParams(2))] == ["cd", "de"]
    assert ends(run(engine))[4] == ("", "abort")


def test_generate_in_the_company_of_others_leaves_their_outputs_to_the_next_step():
    engine = letters_engine(max_batch_size=2)
    engine.add_request("a", SamplingParams(3), "short")
    engine.add_request("b", SamplingParams(7), "long")
    engine.step()
    outputs = engine.generate(["c", "d"], params(2, 4))
    assert [output.text for output in outputs] == ["de", "efgh"]
    told = engine.step() + run(engine)
    for name, text in (("short", "bcd"), ("long", "cdefghi")):
        pieces = [output.new_text for output in told if output.request_id == name]
        assert text[0] + "".join(pieces) == text, "a piece was lost or came twice"
    assert ends(told) == {"short": ("bcd", "length"), "long": ("cdefghi", "length")}


def test_requests_arrive_when_they_are_said_to():
    engine = letters_engine(max_batch_size=4)
    outputs = engine.generate(["a", "b", "c"], params(6, 2, 3), arrivals=[2, 0, 9])
    assert [output.text for output in outputs] == ["bcdefg", "cd", "def"]
    first_steps = {}
    for iteration in engine.trace.iterations:
        for slot in iteration.slots:
            first_steps.setdefault(slot.request_id, iteration.step)
    assert [first_steps[output.request_id] for output in outputs] == [2, 0, 9]  # 8 had nothing to do
    assert outputs[1].arrival < outputs[0].arrival < outputs[2].arrival


def test_generate_takes_a_text_or_several_and_settings_for_all_or_for_each():
    engine = letters_engine()
    assert [output.text for output in engine.generate("ab", SamplingParams(2))] == ["cd"]
    assert [output.text for output in engine.generate(["ab", [3]], SamplingParams(2))] == ["cd", "de"]
    assert [output.text for output in engine.generate(["ab", "c"], params(1, 2))] == ["c", "de"]
    assert [output.text for output in engine.generate(["fg"])] == ["hi"]
    assert engine.generate([]) == []
    for wrong in ({"params": params(1, 2, 3)}, {"params": SamplingParams(1), "arrivals": [0]}):
        with pytest.raises(ValueError, match=r"2 prompts, but . params and . arrivals"):
            engine.generate(["ab", "c"], **wrong)


def test_a_progress_bar_counts_answers_on_request(capsys):
    letters_engine().generate(["ab", "c"], SamplingParams(2))
    assert capsys.readouterr() == ("", "")
    letters_engine().generate(["ab", "c"], SamplingParams(2), progress=True)
    assert "2/2" in capsys.readouterr().err


def test_an_engine_says_who_waits_and_who_runs_by_their_names_in_the_trace():
    engine = letters_engine(max_batch_size=2)
    assert (engine.waiting, engine.running, engine.steps) == ([], [], 0)
    for name, most in (("a", 3), ("b", 2), ("c", 9)):
        engine.add_request("ab", SamplingParams(most), name)
    engine.add_request("d", SamplingParams(2, temperature=1.0, ignore_eos=True, n=2), "two")
    assert (engine.waiting, engine.running) == (["a", "b", "c", ("two", 0), ("two", 1)], [])
    engine.step()
    assert (engine.waiting, engine.running) == (["c", ("two", 0), ("two", 1)], ["a", "b"])
    engine.step()  # b ends
    engine.abort_request("c")
    assert (engine.waiting, engine.running, engine.steps) == ([("two", 0), ("two", 1)], ["a"], 2)
    engine.step()
    assert (engine.waiting, engine.running) == ([("two", 1)], [("two", 0)])
    run(engine)
    assert (engine.waiting, engine.running) == ([], [])
    names = {slot.request_id for iteration in engine.trace.iterations for slot in iteration.slots}
    assert names == {None, "a", "b", ("two", 0), ("two", 1)}


def test_an_engine_for_ever_remembers_its_last_iterations_only():
    short, whole = letters_engine(128, 99, trace_length=5), letters_engine(128, 99)
    for engine in (short, whole):
        for _ in range(3):
            engine.generate(["ab", "cde", "f"], params(4, 9, 7))
    assert len(whole.trace.iterations) > 20 and short.steps == whole.steps
    shown = [[one.slots for one in engine.trace.iterations][-5:] for engine in (short, whole)]
    assert shown[0] == shown[1] and len(short.trace.iterations) == 5
    assert short.trace.iterations[-1].step == short.steps - 1
    for wrong in (0, -1, 2.5):
        with pytest.raises(ValueError, match="trace_length is a whole number of at least 1"):
            EngineConfig(trace_length=wrong)


# --- streams --------------------------------------------------------------------------------------------------------


def test_a_stream_gives_a_piece_for_every_token():
    pieces = list(letters_engine().stream("ef", SamplingParams(9)))
    assert [(piece.new_text, piece.finish_reason) for piece in pieces] == [
        ("g", None),
        ("h", None),
        ("i", None),
        ("", "stop"),
    ]


def test_two_streams_take_turns_and_share_the_steps():
    engine = letters_engine()
    streams = [engine.stream("a", SamplingParams(5)), engine.stream("bc", SamplingParams(4))]
    texts = ["", ""]
    for turn in range(20):
        piece = next(streams[turn % 2], None)
        texts[turn % 2] += piece.new_text if piece else ""
    assert texts == ["bcdef", "defg"]
    assert engine.trace.steps == 5 and not engine.has_unfinished_requests()


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_whoever_stops_listening_takes_the_request_back(pieces):
    engine = letters_engine()
    engine.add_request("a", SamplingParams(6), "other")
    stream = engine.stream("b", SamplingParams(7))
    heard = list(itertools.islice(stream, pieces))
    assert len(heard) == pieces
    stream.close()
    outputs = run(engine)
    assert {output.request_id for output in outputs} == {"other"}
    assert ends(outputs) == {"other": ("bcdefg", "length")}


def test_a_stream_of_several_answers_ends_with_the_last_of_them(random_pairs):
    engine = Engine(*random_pairs, EngineConfig(max_batch_size=2))
    some = SamplingParams(6, temperature=1.0, seed=1, n=3)
    pieces = list(engine.stream("The fox", some))
    texts = ["".join(piece.new_text for piece in pieces if piece.index == n) for n in range(3)]
    assert texts == [output.text for output in Engine(*random_pairs).generate("The fox", some)]
    assert sum(piece.finish_reason is not None for piece in pieces) == 3 and pieces[-1].finish_reason


def test_a_stream_ends_when_somebodys_step_told_the_end():
    engine = letters_engine()
    stream = engine.stream("a", SamplingParams(3))
    assert next(stream).text == "b"
    assert ends(run(engine)) == {0: ("bcd", "length")}
    assert list(stream) == []


def test_an_aborted_stream_says_so():
    engine = letters_engine()
    stream = engine.stream("a", SamplingParams(3))
    engine.abort_request(next(stream).request_id)
    assert [(piece.text, piece.finish_reason) for piece in stream] == [("b", "abort")]


def test_a_stream_is_refused_when_it_is_asked_for_and_not_when_it_is_read():
    with pytest.raises(ValueError, match="has no tokens"):
        letters_engine().stream("")


# --- what can never run is refused, and nothing else is lost ---------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "prompt", "max_tokens", "message"),
    [
        ({}, "", 3, "has no tokens"),
        ({}, [], 3, "has no tokens"),
        ({}, [1, 10**6], 3, "Token ids are whole numbers from 0 to"),
        ({}, [1, -1], 3, "Token ids are whole numbers"),
        ({}, [1.0], 3, "Token ids are whole numbers"),
        ({}, [[1, 2]], 3, "Token ids are whole numbers"),
        ({}, None, 3, "A prompt is a text or a list of token ids, not None"),
        ({}, "\ud800", 3, "cannot be encoded"),
        ({}, "abcdefghi", 8, "9 prompt tokens and max_tokens 8, 17 in all, but the model's context is 16"),
        ({}, "abcdefgh" * 2, None, "16 prompt tokens, but the model's context is 16"),
        ({"max_input_tokens": 3}, "abcd", 2, "4 tokens, and this engine takes 3"),
        ({"max_output_tokens": 3}, "abcd", 4, "an answer of this engine has 3 tokens at most"),
        ({"chunked_prefill": False, "max_tokens_per_step": 8}, "abcdefghi", 2, "chunked_prefill is off"),
    ],
)
def test_a_request_that_cannot_run_is_refused_before_any_step(config, prompt, max_tokens, message):
    engine = letters_engine(16, **config)
    engine.add_request("ab", SamplingParams(3), "other")
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, SamplingParams(max_tokens))
    with pytest.raises(ValueError, match=message):
        engine.generate(["abc", prompt], SamplingParams(max_tokens and min(max_tokens, 16)))
    assert len(engine._waiting + engine._running) == 1, "none of a call's requests starts if one cannot run"
    assert ends(run(engine)) == {"other": ("cde", "length")}


def test_the_largest_request_that_is_not_refused_runs():
    exact = letters_engine(16, max_input_tokens=4, max_output_tokens=3).generate("abcd", SamplingParams(3))
    assert [output.text for output in exact] == ["efg"]
    whole = letters_engine(16, chunked_prefill=False, max_tokens_per_step=9).generate("abcdefghi", SamplingParams(7))
    assert [len(output.token_ids) for output in whole] == [1]  # EOS


@EXECUTIONS
def test_without_max_tokens_an_answer_may_fill_the_context_to_the_last_token(random_pairs, execution):
    model, tokenizer = random_pairs
    ids = tokenizer(PROMPTS[3])["input_ids"]
    outputs = Engine(model, tokenizer, EngineConfig(execution=execution)).generate(
        [ids, ids[:127], ids], [SamplingParams(ignore_eos=True), SamplingParams(ignore_eos=True), SamplingParams(5)]
    )
    sizes = [len(ids) + len(output.token_ids) for output in outputs]
    assert sizes == [128, 128, len(ids) + 5] and outputs[0].finish_reason == "length"
    inputs = torch.tensor([ids], device=model.device)
    expected = model.generate(inputs, do_sample=False, max_length=128, eos_token_id=10**6, pad_token_id=0)
    assert outputs[0].token_ids == expected[0, len(ids) :].tolist()


def test_max_output_tokens_is_the_limit_of_an_answer_that_sets_none():
    engine = letters_engine(16, eos=99, max_output_tokens=4)
    assert [len(output.token_ids) for output in engine.generate(["ab", "abcdefghiabcde"])] == [4, 2]


def test_a_model_whose_context_has_no_end_needs_a_limit():
    model = families.build(next(family for family in families.FAMILIES if family.name == "bloom"))
    pair = model, families.tokenizer()
    with pytest.raises(ValueError, match="context has no end: set max_tokens"):
        Engine(*pair).add_request("The quick brown fox")
    (output,) = Engine(*pair).generate("The quick brown fox", SamplingParams(3, ignore_eos=True))
    assert len(output.token_ids) == 3
    (output,) = Engine(*pair, EngineConfig(max_output_tokens=2)).generate(
        "The quick brown fox", SamplingParams(ignore_eos=True)
    )
    assert len(output.token_ids) == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_batch_size": 0}, "row|max_batch_size"),
        ({"max_tokens_per_step": 4}, "8 rows that all decode read 8 tokens"),
        ({"policy": "sjf"}, "no policy 'sjf'"),
        ({"execution": "fast"}, "execution is"),
        ({"max_input_tokens": 0}, "max_input_tokens"),
    ],
)
def test_settings_without_a_meaning_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        letters_engine(**config)


def test_a_model_that_cannot_be_batched_exactly_is_refused():
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match="does not keep keys and values"):
        Engine(model, letter_tokenizer())


# --- faults ---------------------------------------------------------------------------------------------------------


class Faulty(CountingModel):
    """Raises in the forward passes of these numbers, counted from `arm`."""

    def __init__(self, error):
        super().__init__(40, 99)
        self.error, self.passes, self.faults = error, -1, ()

    def arm(self, *faults):
        self.passes, self.faults = -1, faults

    def forward(self, input_ids, position_ids, attention_mask, past_key_values):
        self.passes += 1
        if self.passes in self.faults:
            raise self.error
        return super().forward(input_ids, position_ids, attention_mask, past_key_values)


def faulty_engine(error=None, **config):
    model = Faulty(error or RuntimeError("out of memory"))
    return Engine(model, letter_tokenizer(), EngineConfig(**{"execution": "padded"} | config)), model


def test_a_failed_forward_pass_ends_who_took_part_and_nobody_else():
    engine, model = faulty_engine(max_batch_size=2)
    for name, prompt in (("a", "ab"), ("b", "cde"), ("later", "fg")):
        engine.add_request(prompt, SamplingParams(4), name)
    engine.step()
    model.arm(0)
    outputs = engine.step()
    assert ends(outputs) == {"a": ("c", "error"), "b": ("f", "error")}
    assert {output.error for output in outputs} == {"RuntimeError: out of memory"}
    assert ends(run(engine)) == {"later": ("hia", "length")}  # between i and a comes token 0, which has no text
    engine.add_request("abc", SamplingParams(2), "a")
    assert ends(run(engine)) == {"a": ("de", "length")}


def test_a_fault_in_the_middle_of_a_plan_ends_those_who_had_not_had_their_turn():
    # Decodes, then newcomers, then a chunk: with 4 rows, passes 0, 1 and 2 of the second step.
    for fault, failed in ((0, {"old", "new", "part"}), (1, {"new", "part"}), (2, {"part"})):
        engine, model = faulty_engine(max_batch_size=4, max_tokens_per_step=6)
        engine.add_request("a", SamplingParams(6), "old")
        engine.add_request("bcdefghi", SamplingParams(3), "part")
        engine.step()  # all of old, 5 letters of part; 3 are left
        engine.add_request("de", SamplingParams(3), "new")
        model.arm(fault)
        outputs = engine.step()
        assert {id for id, (_, reason) in ends(outputs).items() if reason == "error"} == failed
        expected = {"old": ("bcdefg", "length"), "new": ("fgh", "length"), "part": ("", "")}
        assert ends(run(engine)) == {name: end for name, end in expected.items() if name not in failed}
        assert engine.step() == [] and engine.execution._decoding["request_ids"] == []
        assert [output.text for output in engine.generate("abc", SamplingParams(3))] == ["def"]


def test_a_fault_in_the_sampling_of_one_request_is_no_other_requests_problem(monkeypatch):
    engine = letters_engine()
    for name in ("a", "b", "c"):
        engine.add_request(name, SamplingParams(4), name)
    engine.step()

    def choose(*_):
        raise ArithmeticError("no token is left")

    monkeypatch.setattr(engine._running[1].sampler, "choose", choose)
    outputs = engine.step()
    assert ends(outputs) == {"b": ("c", "error")}
    assert [output.error for output in outputs] == [None, "ArithmeticError: no token is left", None]
    assert ends(run(engine)) == {"a": ("bcde", "length"), "c": ("defg", "length")}


def test_logits_that_are_not_numbers_end_a_sampled_request_with_an_error(monkeypatch):
    plain = CountingModel.forward

    def no_numbers_behind_b(self, input_ids, position_ids, attention_mask, past_key_values):
        output = plain(self, input_ids, position_ids, attention_mask, past_key_values)
        output.logits[input_ids == 2] = math.nan
        return output

    monkeypatch.setattr(CountingModel, "forward", no_numbers_behind_b)
    with pytest.warns(UserWarning, match="2 of 3 answers failed"):
        outputs = letters_engine().generate(["a", "b", "c"], SamplingParams(3, temperature=0.01, seed=1))
    assert [(output.text, output.finish_reason) for output in outputs] == [
        ("b", "error"),
        ("", "error"),
        ("def", "length"),
    ]
    assert all("probability tensor contains" in output.error for output in outputs[:2])


def test_generate_answers_everybody_and_warns_of_those_that_failed():
    engine, model = faulty_engine(max_batch_size=2)
    model.arm(1)
    with pytest.warns(UserWarning, match="2 of 4 answers failed: RuntimeError: out of memory"):
        outputs = engine.generate(["ab", "c", "d", "ef"], params(3, 3, 3, 2))
    assert [(output.text, output.finish_reason) for output in outputs] == [
        ("c", "error"),
        ("d", "error"),
        ("efg", "length"),
        ("gh", "length"),
    ]


def test_an_interrupted_step_ends_what_it_interrupted_and_the_engine_goes_on():
    engine, model = faulty_engine(KeyboardInterrupt(), max_batch_size=2)
    for name, prompt in (("a", "ab"), ("b", "cde"), ("later", "fg"), ("back", "a")):
        engine.add_request(prompt, SamplingParams(2), name)
    engine.step()
    engine.abort_request("back")
    model.arm(0)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    for name in ("a", "b", "back"):
        engine.add_request("h", SamplingParams(1), name)
    told = engine.step()
    # What had been waiting to be told is told, and the ids can be used again at once.
    assert ends(told[:3]) == {"back": ("", "abort"), "a": ("c", "error"), "b": ("f", "error")}
    assert [output.error for output in told[:3]] == [None, "KeyboardInterrupt: ", "KeyboardInterrupt: "]
    rest = ends(told[3:] + run(engine))
    assert rest == {"later": ("hi", "length")} | dict.fromkeys(("a", "b", "back"), ("i", "length"))


def test_generate_interrupted_takes_its_requests_back_and_leaves_the_others_alone():
    engine, model = faulty_engine(KeyboardInterrupt(), max_batch_size=2, policy="priority")
    engine.add_request("abc", SamplingParams(4), "other", priority=5)
    model.arm(3)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["ab", "cd", "e", "f"], SamplingParams(9), arrivals=[0, 0, 0, 50])
    assert [output.text for output in engine.generate(["ab", "c"], SamplingParams(2))] == ["cd", "de"]
    outputs = run(engine)
    assert {output.request_id for output in outputs} == {"other"}, "nobody waits for the others any more"
    assert ends(outputs) == {"other": ("defg", "length")}


@EXECUTIONS
def test_a_real_model_that_fails_once_goes_on_exactly(random_pairs, execution, monkeypatch):
    model, tokenizer = random_pairs
    engine = Engine(model, tokenizer, EngineConfig(max_batch_size=3, max_tokens_per_step=24, execution=execution))
    for prompt in PROMPTS:
        engine.add_request(prompt, SamplingParams(15), prompt)
    outputs = [output for _ in range(6) for output in engine.step()]
    broken = engine.execution.model.lm_head
    handle = broken.register_forward_pre_hook(lambda *_: 1 / 0)
    outputs += engine.step()
    handle.remove()
    outputs += run(engine)
    last = {output.request_id: output for output in outputs if output.finish_reason}
    assert set(last) == set(PROMPTS)
    failed = [output for output in last.values() if output.error]
    assert 1 <= len(failed) <= 3 and all("ZeroDivisionError" in output.error for output in failed)
    for prompt, output in last.items():
        expected = alone(model, tokenizer, prompt, 15)
        assert output.token_ids == (expected[: len(output.token_ids)] if output.error else expected)


@pytest.mark.parametrize("when", ["before", "in the middle", "after"])
@EXECUTIONS
def test_a_policy_that_fails_ends_everybody_and_the_engine_goes_on_exactly(random_pairs, execution, when):
    """Nobody knows for whom it had planned, and given memory to, before it failed."""

    class Failing(FirstComeFirstServed):
        fails = False

        def _admit(self, plan, queue, budget, free_rows):
            if self.fails and when == "before":
                raise LookupError("no plan")
            super()._admit(plan, queue[:1] if self.fails and when == "in the middle" else queue, budget, free_rows)
            if self.fails and when == "in the middle":
                raise LookupError("no plan")

        def schedule(self, waiting, running, budget):
            plan = super().schedule(waiting, running, budget)
            if self.fails and when == "after":
                raise LookupError("no plan")
            return plan

    model, tokenizer = random_pairs
    policy = Failing()
    config = EngineConfig(max_batch_size=4, max_tokens_per_step=40, policy=policy, execution=execution)
    engine = Engine(model, tokenizer, config)
    some = SamplingParams(20, temperature=1.0, seed=1, ignore_eos=True, n=2)
    engine.add_request(PROMPTS[3], SamplingParams(20, ignore_eos=True), "long")
    engine.add_request(PROMPTS[0], some, "two")
    engine.step()
    for prompt in PROMPTS[4:7]:
        engine.add_request(prompt, SamplingParams(20), prompt)
    engine.step()
    assert engine.running and engine.waiting
    engine.abort_request("two")
    policy.fails = True
    with pytest.raises(LookupError, match="no plan"):
        engine.step()
    assert engine.waiting == engine.running == []
    outputs = engine.step()  # nobody is there, so there is nothing to plan
    assert [output.finish_reason for output in outputs[:2]] == ["abort", "abort"], "what was to be told is told"
    assert {output.request_id for output in outputs[2:]} == {"long", *PROMPTS[4:7]} and len(outputs) == 6
    assert {(output.finish_reason, output.error) for output in outputs[2:]} == {("error", "LookupError: no plan")}
    assert not engine.has_unfinished_requests() and engine.waiting == engine.running == [] and not engine._unfinished
    if blocks := getattr(engine.execution, "blocks", None):
        assert blocks.used == 0 and not blocks.tables and not any(blocks.references)
    policy.fails = False
    for _ in range(2):  # the second time with what the prefix cache has kept
        for output, prompt in zip(engine.generate(PROMPTS, SamplingParams(15)), PROMPTS, strict=True):
            assert output.token_ids == alone(model, tokenizer, prompt, 15)


# --- precision ------------------------------------------------------------------------------------------------------


@EXECUTIONS
def test_another_dtype_runs_a_copy_and_the_model_stays_as_it_is(execution):
    model, tokenizer = random_pair("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = Engine(model, tokenizer, EngineConfig(dtype=torch.bfloat16, execution=execution))
    outputs = engine.generate(PROMPTS[:3], SamplingParams(8, logprobs=1))
    assert engine.model.dtype == engine.execution.model.dtype == torch.bfloat16 and engine.model is not model
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, before[name])
    # Tokens may differ in bf16; those it did choose are about as likely to the model in fp32.
    for prompt, output in zip(PROMPTS[:3], outputs, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([ids + output.token_ids], device=model.device)).logits[0, len(ids) - 1 : -1]
        assert 1 <= len(output.token_ids) <= 8
        lead = (
            logits.max(dim=-1).values
            - logits.gather(1, torch.tensor(output.token_ids)[:, None].to(logits.device))[:, 0]
        )
        assert (lead / (logits.amax(dim=-1) - logits.amin(dim=-1))).max() < 0.1


def test_the_dtype_it_has_already_makes_no_copy(embedded):
    model, tokenizer = embedded
    assert Engine(model, tokenizer, EngineConfig(dtype=torch.float32)).model is model


# --- text -----------------------------------------------------------------------------------------------------------


def test_the_text_is_that_of_all_tokens(random_pairs):
    # Random models say half characters all the time.
    model, tokenizer = random_pairs
    outputs = Engine(model, tokenizer, EngineConfig(max_batch_size=4)).generate(PROMPTS, SamplingParams(25))
    for output in outputs:
        words = output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
        assert output.text == text_of(words, tokenizer)
    assert {output.finish_reason for output in outputs} == {"stop", "length"}
