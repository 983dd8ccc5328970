"""Replicas that run vLLM: the conversion of its outputs with a vLLM that is made up, and streams with the real one."""

import os
import signal
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import httpx
import pytest
from conftest import letter_tokenizer

from benchmarks.install import python_of
from helpers import EngineConfig, SamplingParams
from helpers.block_hashes import hash_blocks
from helpers.cluster.fleet_description import FleetDescription
from helpers.cluster.replica import Replica
from helpers.cluster.vllm_replica import UNSUPPORTED, VLLMEngine, check_python, load
from helpers.features.structured_outputs import StructuredOutputs
from helpers.server import launch
from tests.support.gated_thread import in_loop
from tests.support.local_replicas import next_report
from tests.support.serving import embedded_engine, error_of, wait_until

EOS, BLOCK = 0, 2


@dataclass
class Scheduler:
    """The parts of vLLM's scheduler that a replica reads."""

    requests: dict = field(default_factory=dict)
    kv_event_publisher: SimpleNamespace = field(default_factory=SimpleNamespace)

    def get_request_counts(self):
        return len(self.requests), 0

    def get_kv_cache_usage(self):
        return 0.5


class LLM:
    """A vLLM that generates the numbers after the prompt's last token, two per step."""

    def __init__(self, arguments):
        if arguments.get("model") == "missing":
            raise OSError("no such model")
        self.arguments, self.scheduler, self.aborted = arguments, Scheduler(), []
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self.scheduler))
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=41, block_size=BLOCK, enable_prefix_caching=True),
            model_config=SimpleNamespace(
                max_model_len=40, get_vocab_size=lambda: 10, try_get_generation_config=lambda: {"eos_token_id": EOS}
            ),
            scheduler_config=SimpleNamespace(
                max_num_seqs=arguments.get("max_num_seqs", 2),
                max_num_batched_tokens=arguments.get("max_num_batched_tokens", 512),
            ),
        )

    def add_request(self, name, prompt, params, priority=0):
        self.scheduler.requests[name] = SimpleNamespace(
            prompt=prompt["prompt_token_ids"], params=params, priority=priority, new=[]
        )

    def abort_request(self, names):
        self.aborted += names
        for name in names:
            self.scheduler.requests.pop(name, None)

    def step(self):
        outputs = []
        for name, request in list(self.scheduler.requests.items()):
            before, params, reason = len(request.new), request.params, None
            while reason is None and len(request.new) < before + 2:
                request.new.append((request.prompt[-1] + len(request.new) + 1) % 10)
                reason = "length" if len(request.new) == params["max_tokens"] else reason
                ended = request.new[-1] in params["stop_token_ids"] or request.new[-1] == EOS
                reason = "stop" if ended and not params["ignore_eos"] else reason
            new = request.new[before:]
            logprobs = params["logprobs"] is not None and [{id: SimpleNamespace(logprob=-0.5)} for id in new]
            one = SimpleNamespace(token_ids=tuple(new), logprobs=logprobs or None, finish_reason=reason)
            outputs.append(SimpleNamespace(request_id=name, outputs=[one]))
            if reason is not None:
                del self.scheduler.requests[name]
        return outputs


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """Modules with what a replica uses of vLLM."""
    llm_engine = SimpleNamespace(from_engine_args=LLM)
    modules = {
        "vllm": SimpleNamespace(EngineArgs=dict, LLMEngine=llm_engine, SamplingParams=dict),
        "vllm.config": SimpleNamespace(KVEventsConfig=dict),
        "vllm.sampling_params": SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta")),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def engine() -> VLLMEngine:
    return VLLMEngine(LLM({}), letter_tokenizer(), EngineConfig(max_batch_size=2, trace_length=10))


def vllm_requests(engine) -> dict:
    return engine._llm.scheduler.requests


def finish(engine) -> tuple[list, list[int], str]:
    """Run the engine to the end; return the deltas of a single output, its tokens and its text."""
    deltas = []
    while engine.has_unfinished_requests():
        deltas += engine.step()
    token_ids = [token_id for delta in deltas for token_id in delta.new_token_ids]
    return deltas, token_ids, "".join(delta.new_text for delta in deltas)


def test_vllms_outputs_become_deltas_with_the_text_of_the_courses_detokenizer(engine):
    engine.add_request([1], SamplingParams(max_tokens=5, logprobs=0), "a")
    deltas, token_ids, text = finish(engine)
    assert token_ids == [2, 3, 4, 5, 6] and text == "bcdef"
    assert [delta.num_tokens for delta in deltas] == [2, 4, 5]
    assert [delta.finish_reason for delta in deltas] == [None, None, "length"]
    assert deltas[0].request_id == "a" and deltas[0].new_logprobs == [{2: -0.5}, {3: -0.5}]


def test_an_end_token_ends_the_output_and_has_no_text(engine):
    engine.add_request([7], SamplingParams(max_tokens=9), "a")
    deltas, token_ids, text = finish(engine)
    assert token_ids == [8, 9, EOS] and text == "hi" and deltas[-1].finish_reason == "stop"
    engine.add_request([7], SamplingParams(max_tokens=9, stop_token_ids=[9]), "b")
    deltas, token_ids, text = finish(engine)
    assert token_ids == [8, 9] and text == "h" and deltas[-1].finish_reason == "stop"


def test_a_stop_string_ends_the_output_and_frees_vllms_request(engine):
    engine.add_request([1], SamplingParams(max_tokens=20, ignore_eos=True, stop="de"), "a")
    engine.step()
    assert engine.has_unfinished_requests()
    deltas, token_ids, text = finish(engine)
    assert token_ids == [4, 5] and text == "" and deltas[-1].finish_reason == "stop"
    assert engine._llm.aborted == ["a/0"] and not vllm_requests(engine)


def test_a_resumed_output_continues_from_its_tokens_even_within_a_stop_string(engine):
    engine.add_request([1], SamplingParams(max_tokens=9, min_tokens=3, stop="de"), "a", generated={0: [2, 3, 4]})
    (request,) = vllm_requests(engine).values()
    assert request.prompt == [1, 2, 3, 4] and request.params["max_tokens"] == 6 and request.params["min_tokens"] == 0
    deltas, token_ids, text = finish(engine)
    assert token_ids == [5] and text == "" and deltas[-1].num_tokens == 4 and deltas[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    "params",
    [{"seed": 1, "temperature": 1.0}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"bad_words": "a"}],
)
def test_an_output_whose_next_token_depends_on_more_than_its_tokens_is_not_resumed(engine, params):
    params = SamplingParams(max_tokens=5, **params)
    engine.add_request([1], params, "new", generated={0: []})
    with pytest.raises(ValueError, match="vLLM cannot continue an output with"):
        engine.add_request([1], params, "old", generated={0: [2]})
    assert list(vllm_requests(engine)) == ["new/0"]


def test_the_outputs_of_one_prompt_differ_in_their_seeds_and_end_each_for_itself(engine):
    engine.add_request([1], SamplingParams(max_tokens=3, n=2, temperature=1.0, seed=2**63 - 1), "a")
    assert [request.params["seed"] for request in vllm_requests(engine).values()] == [2**63 - 1, 0]
    deltas, *_ = finish(engine)
    ends = [(delta.index, delta.finish_reason) for delta in deltas]
    assert ends == [(0, None), (1, None), (0, "length"), (1, "length")]


@in_loop
async def test_a_replica_of_vllm_reports_outputs_errors_and_aborts(engine):
    replica = Replica(engine)
    replica.start()
    assert replica.info.unsupported == UNSUPPORTED and replica.info.num_blocks == 40
    replica.add("left", [1], SamplingParams(max_tokens=9), 0, {0: []})
    replica.abort("left")
    replica.add("lost", [1], SamplingParams(max_tokens=9, seed=1), 0, {0: [2]})
    replica.add("a", [1], SamplingParams(max_tokens=3), 0, {0: []})
    found = {}

    async def read():
        for output in (await next_report(replica)).outputs:
            found.setdefault(output.request_id, []).append(output)

    while len({id for id, outputs in found.items() if outputs[-1].finish_reason}) < 3:
        await read()
    await replica.stop()
    assert found["left"][-1].finish_reason == "abort" and not vllm_requests(engine)
    assert found["lost"][-1].finish_reason == "error" and "vLLM cannot continue" in found["lost"][-1].error
    assert [id for output in found["a"] for id in output.new_token_ids] == [2, 3, 4]


@pytest.mark.parametrize("params", [{"structured_outputs": StructuredOutputs(regex="a")}, {"prompt_logprobs": 1}])
def test_the_front_refuses_what_vllm_replicas_do_not_support(engine, params):
    front = FleetDescription(Replica(engine).info, 2)
    assert front.validator.validate("a", SamplingParams(max_tokens=3)) == ([1], 3)
    with pytest.raises(ValueError, match=f"The replicas' engine does not support {next(iter(params))}: leave it out"):
        front.validator.validate("a", SamplingParams(max_tokens=3, **params))


def test_the_router_learns_vllms_cached_blocks_under_its_own_hashes(engine):
    stored = lambda names, parent, ids: SimpleNamespace(  # noqa: E731
        block_hashes=names, parent_block_hash=parent, token_ids=ids, block_size=BLOCK
    )
    publish = engine._llm.scheduler.kv_event_publisher.publish
    digests = list(hash_blocks([1, 2, 3, 4, 5, 6], BLOCK))
    publish(SimpleNamespace(events=[stored(["x", "y"], None, [1, 2, 3, 4]), stored(["z"], "y", [5, 6])]))
    publish(SimpleNamespace(events=[stored(["q"], "unknown", [7, 8]), SimpleNamespace(block_hashes=["y", "unknown"])]))
    taken = engine.block_manager.take_cache_events()
    assert taken == [*((digest, True) for digest in digests), (digests[1], False)]
    publish(SimpleNamespace(events=[SimpleNamespace()]))  # all blocks were cleared
    assert engine.block_manager.take_cache_events() == [(digests[0], False), (digests[2], False)]


def test_what_vllm_refuses_to_load_is_a_value_error_with_its_reason():
    with pytest.raises(ValueError, match="vLLM cannot load 'missing': OSError: no such model"):
        load("missing", "torch.float32", EngineConfig(), {})


def test_a_replica_has_the_rows_of_its_vllm_which_further_arguments_may_set(monkeypatch):
    tokenizers = SimpleNamespace(from_pretrained=lambda model: letter_tokenizer())
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=tokenizers))
    for arguments, expected in [({}, (3, 9)), ({"max_num_seqs": 7, "max_num_batched_tokens": 30}, (7, 30))]:
        config = load("one", "torch.float32", EngineConfig(max_batch_size=3, max_tokens_per_step=9), arguments).config
        assert (config.max_batch_size, config.max_tokens_per_step) == expected


@pytest.mark.slow  # as all tests that need Ray, which only `make test-slow` installs
def test_an_interpreter_without_vllm_is_refused_with_the_reason():
    pytest.importorskip("ray")
    with pytest.raises(ValueError, match="has no vLLM: install it there, or name another interpreter with --python"):
        check_python(sys.executable)
    with pytest.raises(ValueError, match="cannot import Ray: install `ray=="):
        check_python("/no/such/python")


@pytest.mark.slow
@pytest.mark.skipif(not python_of("vllm").exists(), reason="`python -m benchmarks.install vllm` has not been run")
@pytest.mark.timeout(600)
def test_streams_of_two_vllm_replicas_have_the_courses_tokens_and_survive_the_loss_of_one(monkeypatch, tmp_path):
    pytest.importorskip("ray")
    import test_cluster

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    options = ("--replicas", "2", "--engine", "vllm", "--python", str(python_of("vllm")), "--replica-timeout", "60")
    quick = ("--engine-args", '{"enforce_eager": true}')  # otherwise vLLM compiles the model, which takes a minute
    expected = embedded_engine().generate(test_cluster.PROMPT, SamplingParams(**test_cluster.GREEDY))[0].text
    with launch(*options, *quick, "--pace", "0.02", module="helpers.cluster") as front:
        readers = [test_cluster.Reader(front, "greedy") for _ in range(6)]
        wait_until(lambda: all(len(one.chunks) > 5 for one in readers), "a stream did not begin")
        listed = test_cluster.replicas(front)
        victim = max(listed.values(), key=lambda one: one["running"])
        assert min(one["running"] for one in listed.values()) > 0
        os.kill(victim["pid"], signal.SIGKILL)
        assert [one.text for one in readers] == [expected] * 6
        assert test_cluster.metric(front, "requests_resumed") >= victim["running"]
        body = {"prompt": "a", "structured_outputs": {"regex": "a"}}
        refused = httpx.post(f"{front.url}/v1/completions", json=body)
        assert "does not support structured_outputs" in error_of(refused, 400)["message"]
