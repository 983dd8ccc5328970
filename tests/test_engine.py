"""The engine's promises one by one: outputs and their order, counts, refusals, and what happens when something fails.

That every request gets its own tokens in any company is test_engine_exactness.py.
"""

import gc
import itertools
import math
import weakref

import pytest
import torch
from conftest import PROMPTS, CountingModel, alone, letter_tokenizer, random_pair

from helpers import Engine, EngineConfig, SamplingParams
from helpers.base_engine import BaseEngine
from helpers.engine import POLICIES, FirstComeFirstServed, ModelInfo, Scheduler
from helpers.simulator import SimulatedRunner
from tests.simulation import operations
from tests.support import families
from tests.support.context_runner import check_nothing_is_left
from tests.support.engine_machine import failing

EXECUTIONS = pytest.mark.parametrize("execution", ["padded", "auto"])


def letters_engine(context=40, eos=0, **config):
    """Return an engine that continues every letter with the next one, so that all outputs are known beforehand."""
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


# --- every step returns what is new ---------------------------------------------------------------------------------


def test_every_output_of_a_small_run():
    engine = letters_engine(max_batch_size=2, max_tokens_per_step=4)
    a, b, c = map(engine.add_request, ["ab", "defg", "c"], params(3, 9, 1))
    steps = []
    while engine.has_unfinished_requests():
        steps.append([(o.request_id, o.new_text, o.text, o.finish_reason) for o in engine.step()])
    assert (a, b, c) == (0, 1, 2)
    assert steps == [
        [(a, "c", "c", None)],  # and two letters of b, which yield nothing yet
        [(a, "d", "cd", None), (b, "h", "h", None)],
        [(a, "e", "cde", "length"), (b, "i", "hi", None)],
        [(b, "", "hi", "stop"), (c, "d", "d", "length")],  # EOS is a token without a text
    ]
    assert engine.step() == []


def test_an_output_holds_tokens_text_and_times():
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
    assert outputs[0].token_ids == [8], "an output that was returned does not change"


# --- policies -------------------------------------------------------------------------------------------------------


RACE = {
    ("fcfs", True): (130, 135),
    ("fcfs", False): (132, 132),
    ("longest_first", True): (100, 106),
    ("longest_first", False): (106, 106),
    ("static", True): (400, 400),
    ("static", False): (400, 400),
}


@pytest.mark.parametrize(("policy", "mixed"), RACE)
def test_the_race_takes_the_expected_numbers_of_steps_and_forward_passes(policy, mixed):
    engine = letters_engine(128, 99, policy=policy, mixed_batches=mixed)  # no request ends early
    outputs = engine.generate(["abcdefg"] * 32, params(*(100 if n % 8 == 0 else 10 for n in range(32))))
    assert (engine.trace.steps, engine.trace.forward_passes) == RACE[policy, mixed]
    assert engine.trace.output_tokens == sum(len(output.token_ids) for output in outputs) == 680
    assert engine.trace.work["finished"] == 0 and engine.trace.prompt_tokens == 32 * 7


def test_urgent_requests_run_first():
    engine = letters_engine(max_batch_size=1, policy="priority")
    for name, priority in (("later", 1), ("soon", 0), ("now", -1)):
        engine.add_request("ab", SamplingParams(2), name, priority)
    assert list(ends(run(engine))) == ["now", "soon", "later"]


def test_a_policy_and_a_scheduler_can_be_ones_own():
    class LastComeFirstServed:
        def order(self, waiting, running):
            return list(waiting)[::-1]

    class OneAtATime(Scheduler):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.max_rows = 1

    engine = letters_engine(policy=LastComeFirstServed(), scheduler_cls=OneAtATime)
    for name in "abc":
        engine.add_request(name, SamplingParams(2), name)
    assert list(ends(run(engine))) == ["c", "b", "a"]


# --- requests arrive and leave --------------------------------------------------------------------------------------


@EXECUTIONS
def test_an_engine_keeps_nothing_of_requests_that_have_ended(execution):
    config = EngineConfig(max_batch_size=3, max_tokens_per_step=24, execution=execution, block_size=8, num_blocks=14)
    engine = Engine(*random_pair("llama"), config)
    for prompt in PROMPTS[:6]:
        engine.add_request(prompt, SamplingParams(9, temperature=1.0, n=2), prompt)
    sequences = [weakref.ref(sequence) for sequence in engine.scheduler.unfinished]
    engine.step(), engine.step()
    engine.abort_request(PROMPTS[0]), engine.abort_request(PROMPTS[5])
    assert len({output.request_id for output in run(engine)}) == 6 and len(sequences) == 12
    engine.step()
    gc.collect()
    assert not any(sequence() for sequence in sequences)


def test_an_id_can_be_reused_when_its_request_has_ended():
    engine = letters_engine()
    for _ in range(2):
        assert engine.add_request("ab", SamplingParams(2), "name") == "name"
        with pytest.raises(ValueError, match="unfinished request 'name'"):
            engine.add_request("c", SamplingParams(2), "name")
        assert ends(run(engine)) == {"name": ("cd", "length")}


def test_an_automatic_id_is_no_number_in_use():
    engine = letters_engine()
    assert engine.add_request("ab", SamplingParams(1), 1) == 1
    assert [engine.add_request("ab", SamplingParams(2)) for _ in range(3)] == [0, 2, 3]


def test_requests_arrive_before_the_given_iterations():
    engine = letters_engine(max_batch_size=4)
    outputs = engine.generate(["a", "b", "c"], params(6, 2, 3), arrivals=[2, 0, 9])
    assert [output.text for output in outputs] == ["bcdefg", "cd", "def"]
    first_steps = {}
    for iteration in engine.trace.passes:
        for row in iteration.row_steps:
            first_steps.setdefault(row.request_id, iteration.step)
    assert [first_steps[output.request_id] for output in outputs] == [2, 0, 9]  # 8 had nothing to do
    assert outputs[1].arrival < outputs[0].arrival < outputs[2].arrival


def test_generate_takes_one_text_or_several_and_params_for_all_or_for_each():
    engine = letters_engine()
    assert [output.text for output in engine.generate("ab", SamplingParams(2))] == ["cd"]
    assert [output.text for output in engine.generate(["ab", [3]], SamplingParams(2))] == ["cd", "de"]
    assert [output.text for output in engine.generate(["ab", "c"], params(1, 2))] == ["c", "de"]
    assert [output.text for output in engine.generate(["fg"])] == ["hi"]
    assert engine.generate([]) == []
    engine.add_request("a", SamplingParams(6), "other")
    engine.generate("b", SamplingParams(2))
    assert engine.running == ["other"], "it waits for its own outputs only"
    for wrong in ({"params": params(1, 2, 3)}, {"params": SamplingParams(1), "arrivals": [0]}):
        with pytest.raises(ValueError, match=r"2 prompts, but . params and . arrivals"):
            engine.generate(["ab", "c"], **wrong)


# --- streams --------------------------------------------------------------------------------------------------------


def test_a_stream_that_is_read_late_does_not_cancel_or_read_a_later_request_with_its_id():
    engine = letters_engine()
    stream = engine.stream("a", SamplingParams(3))
    while engine.has_unfinished_requests():
        assert engine.step() == []
    with pytest.raises(ValueError, match="request 0"):
        engine.add_request("c", SamplingParams(3), 0)
    assert [piece.text for piece in stream] == ["b", "bc", "bcd"]
    engine.add_request("c", SamplingParams(3), 0)
    assert list(stream) == []
    assert ends(run(engine)) == {0: ("def", "length")}


def test_a_stream_is_refused_when_it_is_requested_and_not_when_it_is_read():
    with pytest.raises(ValueError, match="has no tokens"):
        letters_engine().stream("")


# --- a request that can never run is refused, and costs no other request anything ------------------------------------


@pytest.mark.parametrize(
    ("config", "prompt", "max_tokens", "message"),
    [
        ({}, "", 3, "has no tokens"),
        ({}, [], 3, "has no tokens"),
        ({}, [1, 10**6], 3, "Token ids must be integers from 0 to"),
        ({}, [1, -1], 3, "Token ids must be integers"),
        ({}, [[1, 2]], 3, "Token ids must be integers"),
        ({}, None, 3, "A prompt must be a text or a list of token ids, not None"),
        ({}, "\ud800", 3, "cannot be encoded"),
        ({}, "abcdefghi", 8, "9 prompt tokens and max_tokens 8, 17 in all, but the model's context is 16"),
        ({}, "abcdefgh" * 2, None, "16 prompt tokens, but the model's context is 16"),
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
    assert len(engine.scheduler.unfinished) == 1, "none of a call's requests starts if one cannot run"
    assert ends(run(engine)) == {"other": ("cde", "length")}


def test_the_largest_requests_that_are_not_refused_run():
    whole = letters_engine(16, chunked_prefill=False, max_tokens_per_step=9).generate("abcdefghi", SamplingParams(7))
    assert [len(output.token_ids) for output in whole] == [1]  # EOS


@EXECUTIONS
def test_without_max_tokens_an_output_may_fill_the_context_to_the_last_token(random_pairs, execution):
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


def test_a_model_whose_context_has_no_end_needs_a_limit():
    model = families.build(next(family for family in families.FAMILIES if family.name == "bloom"))
    pair = model, families.tokenizer()
    with pytest.raises(ValueError, match="context has no end: set max_tokens"):
        Engine(*pair).add_request("The quick brown fox")
    (output,) = Engine(*pair).generate("The quick brown fox", SamplingParams(3, ignore_eos=True))
    assert len(output.token_ids) == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"trace_length": 0}, "trace_length must be an integer of at least 1"),
        ({"max_batch_size": 0}, "max_batch_size must be an integer of at least 1, not 0"),
        ({"max_tokens_per_step": 7}, "8 rows that all decode compute 8 tokens per iteration, but .* is 7"),
        ({"policy": "sjf"}, "no policy 'sjf'"),
        ({"execution": "fast"}, "execution must be"),
        ({"num_blocks": 0}, "num_blocks must be an integer of at least 1, not 0"),
        ({"mixed_batches": "no"}, "mixed_batches must be True or False, not 'no'"),
        ({"kv_cache": "fp8"}, 'kv_cache must be "auto" or "int8", not .fp8.'),
        (
            {"kv_cache": "int8", "execution": "padded"},
            'kv_cache=.int8. requires ragged execution, .*Use kv_cache="auto"',
        ),
        ({"dtype": "bfloat16"}, r"a floating-point torch dtype such as torch\.bfloat16, not 'bfloat16'"),
    ],
)
def test_settings_outside_their_range_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        letters_engine(**config)


def test_a_model_that_cannot_be_batched_exactly_is_refused():
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match="does not keep keys and values"):
        Engine(model, letter_tokenizer())


# --- faults ---------------------------------------------------------------------------------------------------------


def test_a_fault_in_the_middle_of_a_plan_ends_the_requests_of_this_and_later_passes():
    # Decodes, then prompts that begin, then a chunk: passes 0, 1 and 2 of the second step.
    for fault, failed in ((0, {"old", "new", "part"}), (1, {"new", "part"}), (2, {"part"})):
        engine = letters_engine(40, 99, max_batch_size=4, max_tokens_per_step=6)
        engine.add_request("a", SamplingParams(6), "old")
        engine.add_request("bcdefghi", SamplingParams(3), "part")
        engine.step()  # all of old, 5 letters of part; 3 are left
        engine.add_request("de", SamplingParams(3), "new")
        with failing(engine.runner.model, fault):
            outputs = engine.step()
        assert {id for id, (_, reason) in ends(outputs).items() if reason == "error"} == failed
        assert {output.error for output in outputs} - {None} == {"ForwardFailed: on purpose"}
        expected = {"old": ("bcdefg", "length"), "new": ("fgh", "length"), "part": ("", "")}
        assert ends(run(engine)) == {name: end for name, end in expected.items() if name not in failed}
        assert engine.step() == [] and engine.runner._decoding is None and not engine.runner._prefilling
        assert [output.text for output in engine.generate("abc", SamplingParams(3))] == ["def"]


def test_logits_that_are_not_numbers_end_a_sampled_request_with_an_error(monkeypatch):
    plain = CountingModel.forward

    def no_numbers_behind_b(self, input_ids, position_ids, attention_mask, past_key_values):
        output = plain(self, input_ids, position_ids, attention_mask, past_key_values)
        output.logits[input_ids == 2] = math.nan
        return output

    monkeypatch.setattr(CountingModel, "forward", no_numbers_behind_b)
    with pytest.warns(UserWarning, match="2 of 3 outputs failed"):
        outputs = letters_engine().generate(["a", "b", "c"], SamplingParams(3, temperature=0.01, seed=1))
    assert [(output.text, output.finish_reason) for output in outputs] == [
        ("b", "error"),
        ("", "error"),
        ("def", "length"),
    ]
    assert all("logits are not numbers" in output.error for output in outputs[:2])


def test_a_policy_that_fails_ends_all_requests_and_the_engine_continues_exactly():
    class FailsInTheMiddle(FirstComeFirstServed):
        """Raises once the first sequence in the queue has been admitted, and its memory allocated."""

        fails = False

        def order(self, waiting, running):
            for index, sequence in enumerate(waiting):
                if index and self.fails:
                    raise LookupError("no plan")
                yield sequence

    model, tokenizer = random_pair("llama")
    policy = FailsInTheMiddle()
    engine = Engine(model, tokenizer, EngineConfig(max_batch_size=4, max_tokens_per_step=40, policy=policy))
    engine.add_request(PROMPTS[3], SamplingParams(20, ignore_eos=True), "running")
    engine.step()
    for prompt in PROMPTS[4:7]:
        engine.add_request(prompt, SamplingParams(20), prompt)
    policy.fails = True
    with pytest.raises(LookupError, match="no plan"):
        engine.step()
    outputs = engine.step()  # no request is left, so the policy is not asked
    assert {output.request_id for output in outputs} == {"running", *PROMPTS[4:7]} and len(outputs) == 4
    assert {(output.finish_reason, output.error) for output in outputs} == {("error", "LookupError: no plan")}
    check_nothing_is_left(engine)
    policy.fails = False
    for output, prompt in zip(engine.generate(PROMPTS, SamplingParams(15)), PROMPTS, strict=True):
        assert output.token_ids == alone(model, tokenizer, prompt, 15)


# --- costs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_costs_no_more_when_thousands_of_requests_wait(policy):
    def cost(waiting: int) -> tuple[int, int]:
        config = EngineConfig(max_batch_size=4, policy=policy, trace_length=1)
        engine = BaseEngine(SimulatedRunner(), letter_tokenizer(), ModelInfo(10, 1000), config)
        for number in range(4 + waiting):
            engine.add_request([1, 2], SamplingParams(900 + number % 5), priority=number % 3)
        engine.step(), engine.step()
        assert (engine.num_running, engine.num_waiting) == (4, waiting)
        full = operations(engine.step)
        engine.abort_request(engine.running[1])
        return full, operations(engine.step)

    few, many = cost(20), cost(2000)
    assert many[0] == few[0], "no row is free"
    assert many[1] <= 1.5 * few[1], "one request is admitted, which takes binary searches"


# --- precision ------------------------------------------------------------------------------------------------------


def test_another_dtype_runs_a_copy_and_leaves_the_model_unchanged(embedded):
    model, tokenizer = embedded
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = Engine(model, tokenizer, EngineConfig(dtype=torch.bfloat16))
    outputs = engine.generate(PROMPTS[:3], SamplingParams(8))
    assert engine.model.dtype == engine.runner.model.dtype == torch.bfloat16 and engine.model is not model
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, before[name])
    for prompt, output in zip(PROMPTS[:3], outputs, strict=True):
        families.count_near_ties(model, prompt, output.token_ids, families.BF16_MARGIN)


# --- what else an engine takes --------------------------------------------------------------------------------------


def test_a_priority_that_is_not_an_integer_is_refused():
    engine = letters_engine(policy="priority")
    for wrong in ("high", 1.5, None):
        with pytest.raises(ValueError, match="priority must be an integer"):
            engine.add_request("a", SamplingParams(2), "a", wrong)
    assert not engine.has_unfinished_requests()
