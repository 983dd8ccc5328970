"""Adapters: in any company, a request gets the tokens of the model with its adapter merged, and shares no block."""

import copy
import functools
import gc
import random
import tempfile
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import LONGEST, PROMPTS, alone, random_pair, spied
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import nn

from helpers import Engine, EngineConfig, Request, SamplingParams, StructuredOutputs, dequantized
from helpers.fast import kernels
from helpers.fast.linear_backends import available_backends
from helpers.features import adapters as feature
from helpers.features.adapters.grouped_products import AdapterStack
from helpers.runners.kv_pool import KVPool
from tests.support.adapters import TARGETS, linears, merged, write_adapter
from tests.support.families import FAMILIES, CountingScheduler, build, lead, skip_unless_ragged, tokenizer
from tests.support.families import generate as generate_alone

NUM_ADAPTERS = 16
RANKS = [4, 1, 8, 3, 16, 2]
TINY = {"max_batch_size": 5, "max_tokens_per_step": 24, "block_size": 4}
GREEDY = SamplingParams(max_tokens=20)


class Company:
    """A base model and 16 adapters of all kinds, with the models that they stand for."""

    def __init__(self, family: str):
        self.model, self.tokenizer = random_pair(family)
        self.folders, self.folder = {None: None}, tempfile.TemporaryDirectory()
        for number in range(NUM_ADAPTERS):
            targets, rank = TARGETS[family][number % 4], RANKS[number % 6]
            more = [{}, {"use_rslora": True}, {"lora_alpha": 5}, {"rank_pattern": {targets[0]: 5}}][number // 4]
            if isinstance(targets, str):
                more = more if "rank_pattern" not in more else {"alpha_pattern": {r"layers\.1\..*|h\.0\..*": 3}}
            path = Path(self.folder.name, str(number))
            self.folders[f"adapter {number}"] = write_adapter(path, self.model, targets, number, rank, 0.7, **more)
        self.names = list(self.folders)
        self.merged = {name: merged(self.model, path) for name, path in self.folders.items()}

    def engine(self, **config) -> Engine:
        engine = Engine(self.model, self.tokenizer, EngineConfig(**TINY | {"num_blocks": 60} | config))
        for name in self.names[1:]:
            engine.load_adapter(name, self.folders[name])
        return engine

    def alone(self, name: str | None, prompt: str, max_tokens: int) -> list[int]:
        return alone(self.merged[name], self.tokenizer, prompt, max_tokens)


company_of = functools.cache(Company)  # test_adapters_in_one_call.py has it, too


@pytest.fixture(scope="session", params=["gpt2", "llama"])
def company(request):
    return company_of(request.param)


def adapters_of(engine: Engine):
    """Return the feature that knows the adapters."""
    return next(feature for feature in engine.validator.features if feature.name == "adapters")


def token_ids(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


# --- exact ------------------------------------------------------------------------------------------------------------


def settings_of_all_kinds() -> list[dict]:
    return [
        {"kernels": False, "linear_backend": "pytorch"},
        *({"linear_backend": name} for name in available_backends(torch.float32)),
        {"num_blocks": 40, "scheduler_cls": CountingScheduler},
        {"mixed_batches": False},
        {"chunked_prefill": False, "max_tokens_per_step": 120},
        {"prefix_caching": False, "max_tokens_per_step": 7},
        {"max_batch_size": 17, "max_tokens_per_step": 512, "num_blocks": 400},
        {"speculative": "ngram"},
    ]


@pytest.mark.parametrize("config", settings_of_all_kinds(), ids=str)
def test_every_request_gets_the_tokens_of_its_merged_model(company, config, always_drafts):
    check_random_company(company, config)


def check_random_company(company, config: dict) -> None:
    """Run requests that arrive at random, with all adapters and none, and compare their tokens."""
    draw = random.Random(str(config))
    engine = company.engine(**config)
    requests = [
        (name, PROMPTS[(number + 5 * again) % len(PROMPTS)], draw.randint(1, LONGEST))
        for number, name in enumerate(company.names)
        for again in range(2)  # few prompts for each model, whose outputs alone take most of the time
    ]
    draw.shuffle(requests)
    outputs = engine.generate(
        [prompt for _, prompt, _ in requests],
        [SamplingParams(max_tokens=max_tokens) for _, _, max_tokens in requests],
        arrivals=[draw.randint(0, 60) for _ in requests],
        adapter=[name for name, _, _ in requests],
    )
    assert token_ids(outputs) == [company.alone(*request) for request in requests]
    assert engine.block_manager.used == 0
    if "scheduler_cls" in config:
        assert engine.scheduler.num_preempted > 3 and engine.scheduler.num_partial_chunks > 3


def test_adapters_change_the_tokens_of_most_requests(company):
    texts = Counter(tuple(company.alone(name, PROMPTS[3], 20)) for name in company.names)
    assert len(texts) > NUM_ADAPTERS / 2


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_runs_adapters_of_all_its_layers_or_refuses_them(family, tmp_path):
    skip_unless_ragged(family)
    try:
        check_all_layers(build(family), tmp_path)
    except ValueError as error:  # experts that get some of the tokens
        assert "does not call with all tokens of a pass" in str(error)


def check_all_layers(model, folder, **config) -> None:
    """Compare the tokens of two adapters of all layers, and of none, with those of merged models."""
    engine = Engine(model, tokenizer(), EngineConfig(**TINY | config))
    folders = [write_adapter(folder / str(seed), model, "all-linear", seed, 3 + 4 * seed, 0.3) for seed in (0, 1)]
    for one in folders:
        engine.load_adapter(one.name, one)
    models = [model, *(merged(model, one) for one in folders)] * 2
    prompts = [tokenizer().decode(range(start, start + 11)) for start in range(40, 100, 10)]
    expected = [generate_alone(one, Request(prompt, 12)) for one, prompt in zip(models, prompts, strict=True)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=12), adapter=[None, "0", "1"] * 2)
    is_clear = [lead(logits) > 1e-4 for _, logits in expected]
    assert sum(is_clear) >= 4
    for clear, output, (tokens, _) in zip(is_clear, outputs, expected, strict=True):
        assert not clear or output.token_ids == tokens


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_adapters_run_on_quantized_weights(company, weights):
    engine = company.engine(weights=weights)
    names = company.names[:5]
    outputs = engine.generate([PROMPTS[3]] * 5, GREEDY, adapter=names)
    base = dequantized(company.model, weights)
    for name, output in zip(names, outputs, strict=True):
        model = merged(base, company.folders[name])
        assert output.token_ids == alone(model, company.tokenizer, PROMPTS[3], 20)


def test_adapters_follow_weights_that_change():
    llamas = company_of("llama")
    engine = llamas.engine()
    name = llamas.names[3]
    before = engine.generate(PROMPTS[3], GREEDY, adapter=name)
    weight = llamas.model.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        weight *= 0.5
    try:
        after = engine.generate(PROMPTS[3], GREEDY, adapter=name)
        model = merged(llamas.model, llamas.folders[name])
        assert token_ids(after) == [alone(model, llamas.tokenizer, PROMPTS[3], 20)] != token_ids(before)
    finally:
        with torch.no_grad():
            weight *= 2


# --- with other features ----------------------------------------------------------------------------------------------


def merged_engine(company, name: str, **config) -> Engine:
    return Engine(company.merged[name], company.tokenizer, EngineConfig(**TINY | config))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=12, temperature=0.8, seed=3, n=3),
        SamplingParams(max_tokens=12, temperature=1.2, top_p=0.9, seed=4),
        SamplingParams(max_tokens=12, repetition_penalty=1.2),
        SamplingParams(max_tokens=12, structured_outputs=StructuredOutputs(regex="[a-f]{3,9}")),
    ],
    ids=["samples", "seed", "penalty", "structured"],
)
def test_samples_rules_and_structures_are_those_of_the_merged_model(company, params):
    engine = company.engine()
    for name in company.names[1:5]:
        engine.add_request(PROMPTS[2], GREEDY, adapter=name)  # company
    for name in company.names[2:8:2]:
        outputs = engine.generate(PROMPTS[1], params, adapter=name)
        assert token_ids(outputs) == token_ids(merged_engine(company, name).generate(PROMPTS[1], params))


def test_samples_of_one_request_share_the_blocks_of_their_prompt(company, monkeypatch):
    copies = []
    monkeypatch.setattr(KVPool, "copy_block", spied(KVPool.copy_block, copies))
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=1, n=3, ignore_eos=True)
    company.engine().generate([[5] * 22], params, adapter=company.names[1])  # the last block is half full
    assert len(copies) == 2


def test_beams_are_those_of_the_merged_model(company):
    engine, name = company.engine(), company.names[3]
    engine.add_request(PROMPTS[2], GREEDY, adapter=company.names[2])
    found = engine.beam_search(PROMPTS[1], 3, 10, adapter=name)
    expected = merged_engine(company, name).beam_search(PROMPTS[1], 3, 10)
    assert [beam.token_ids for beam in found] == [beam.token_ids for beam in expected]


def test_scores_and_continued_outputs_are_those_of_the_merged_model(company):
    engine, name = company.engine(), company.names[7]
    params = SamplingParams(0, prompt_logprobs=0)
    (scored,) = engine.generate(PROMPTS[3], params, adapter=name)
    (expected,) = merged_engine(company, name).generate(PROMPTS[3], params)
    for scores, own in zip(scored.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert scores == pytest.approx(own, abs=1e-3)
    params = SamplingParams(20, ignore_eos=True)
    whole = merged_engine(company, name).generate(PROMPTS[3], params)[0].token_ids
    engine.add_request(PROMPTS[3], params, adapter=name, generated={0: whole[:4]})
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[-1].token_ids == whole


def prompt_scores(engine: Engine, names: list[str | None]) -> torch.Tensor:
    """Return the log-probabilities [names, tokens] of a prompt's tokens."""
    params = SamplingParams(0, prompt_logprobs=0)
    outputs = engine.generate([PROMPTS[3]] * len(names), params, adapter=names)
    return torch.tensor([[next(iter(one.values())) for one in output.prompt_logprobs[1:]] for output in outputs])


def check_bfloat16(company, engine: Engine) -> None:
    """Rounding moves scores; those of another adapter differ by much more."""
    names = company.names[:6]
    actual = prompt_scores(engine, names)
    for number, name in enumerate(names):
        expected = prompt_scores(merged_engine(company, name, dtype=torch.bfloat16), [None])
        distances = (actual - expected).abs().mean(1)
        assert distances.argmin() == number
        assert distances[number] < 0.2 * distances.sort().values[1]


def test_in_bfloat16_scores_are_closer_to_those_of_the_merged_model_than_to_any_others(company):
    check_bfloat16(company, company.engine(dtype=torch.bfloat16))


def test_a_stream_runs_with_an_adapter(company):
    name = company.names[2]
    stream = company.engine().stream(PROMPTS[0], GREEDY, adapter=name)
    assert [token for output in stream for token in output.new_token_ids] == company.alone(name, PROMPTS[0], 20)


# --- isolation, and what a pass does ----------------------------------------------------------------------------------


def test_blocks_are_shared_within_an_adapter_and_never_across(company):
    engine, (one, other) = company.engine(num_blocks=400), company.names[1:3]
    computed = []
    for name in (one, one, other, None, None, other, one):
        before = engine.trace.prompt_tokens
        engine.generate(PROMPTS[3], GREEDY, adapter=name)
        computed.append(engine.trace.prompt_tokens - before)
    whole, rest = computed[0], computed[1]
    assert computed == [whole, rest, whole, whole, rest, rest, rest] and rest < whole / 4


def test_another_adapter_under_an_old_name_finds_no_blocks_of_the_old_one(company):
    engine, (name, other) = company.engine(), company.names[1:3]
    engine.generate(PROMPTS[3], GREEDY, adapter=name)
    engine.unload_adapter(name)
    engine.load_adapter(name, company.folders[other])
    assert token_ids(engine.generate(PROMPTS[3], GREEDY, adapter=name)) == [company.alone(other, PROMPTS[3], 20)]


def test_a_pass_calls_every_base_layer_once_and_multiplies_by_each_stack_once(company, monkeypatch):
    engine = company.engine(max_batch_size=16, num_blocks=400, kernels=False, linear_backend="pytorch")
    for name in company.names[1:]:
        engine.add_request(PROMPTS[2], GREEDY, adapter=name)
    engine.step()
    base, products = Counter(), []
    for path, layer in linears(engine.runner.model).items():
        layer.register_forward_pre_hook(lambda *_, path=path: base.update([path]))
    monkeypatch.setattr(AdapterStack, "add_products", spied(AdapterStack.add_products, products))
    engine.step()
    assert set(base.values()) == {1} and len(base) == len(linears(company.model))
    assert len(products) <= len(base)


def test_the_model_itself_stays_as_it_is(company):
    before = [weight.clone() for weight in company.model.parameters()]
    engine = company.engine()
    engine.generate(PROMPTS[0], GREEDY, adapter=company.names[1])
    assert all(torch.equal(*pair) for pair in zip(before, company.model.parameters(), strict=True))
    assert all("forward" not in vars(layer) for layer in company.model.modules())
    assert token_ids(engine.generate(PROMPTS[0], GREEDY)) == [company.alone(None, PROMPTS[0], 20)]


def test_a_failed_pass_fails_its_requests_and_the_next_ones_run(company, monkeypatch):
    engine, name = company.engine(), company.names[1]
    with monkeypatch.context() as context:
        context.setattr(AdapterStack, "add_products", lambda *_: 1 / 0)
        with pytest.warns(UserWarning, match="failed"):
            (failed,) = engine.generate(PROMPTS[0], GREEDY, adapter=name)
    assert failed.finish_reason == "error"
    outputs = engine.generate([PROMPTS[0]] * 2, GREEDY, adapter=[name, None])
    assert token_ids(outputs) == [company.alone(one, PROMPTS[0], 20) for one in (name, None)]


# --- loading and unloading while requests run -------------------------------------------------------------------------


def test_running_requests_finish_with_an_unloaded_adapter_and_new_ones_are_refused(company):
    engine, name = company.engine(), company.names[1]
    request_id = engine.add_request(PROMPTS[0], GREEDY, adapter=name)
    waiting = [engine.add_request(prompt, GREEDY, adapter=name) for prompt in PROMPTS[1:8]]  # some have no row yet
    other = engine.add_request(PROMPTS[0], GREEDY, adapter=company.names[2])
    for _ in range(3):
        engine.step()
    loaded = weakref.ref(adapters_of(engine).loaded[name])
    engine.unload_adapter(name)
    with pytest.raises(ValueError, match="There is no adapter"):
        engine.add_request(PROMPTS[0], GREEDY, adapter=name)
    outputs = {}
    while engine.has_unfinished_requests():
        assert loaded() is not None or all(id in outputs for id in (request_id, *waiting))
        for output in engine.step():
            if output.finish_reason:
                outputs[output.request_id] = output.token_ids
    expected = [company.alone(name, prompt, 20) for prompt in PROMPTS[:8]]
    assert [outputs[id] for id in (request_id, *waiting)] == expected
    assert outputs[other] == company.alone(company.names[2], PROMPTS[0], 20)
    gc.collect()
    assert loaded() is None, "its memory is free"


def test_the_memory_of_an_adapter_is_free_once_it_is_unloaded_and_unused(company):
    engine = company.engine()
    engine.generate(PROMPTS[0], GREEDY, adapter=company.names[1])
    for name in company.names[1:]:
        engine.unload_adapter(name)
    assert all(layer.stack is None for layer in engine.runner._adapted.values())


def test_a_refused_request_leaves_no_user_behind(company):
    engine, name = company.engine(), company.names[1]
    with pytest.raises(ValueError, match="generated"):
        engine.add_request(PROMPTS[0], GREEDY, adapter=name, generated={7: []})
    with pytest.raises(ValueError, match="no adapter 'x'"):
        engine.generate([PROMPTS[0], PROMPTS[1]], GREEDY, adapter=[name, "x"])
    with pytest.raises(ValueError, match="2 prompts, but 3 values of adapter"):
        engine.generate([PROMPTS[0], PROMPTS[1]], GREEDY, adapter=[name, None, None])
    assert not engine.has_unfinished_requests()
    loaded = weakref.ref(adapters_of(engine).loaded[name])
    engine.unload_adapter(name)
    gc.collect()
    assert loaded() is None


def test_an_engine_that_runs_padded_or_batch_invariant_refuses_adapters(company, embedded):
    padded = Engine(company.model, company.tokenizer, EngineConfig(execution="padded"))
    with pytest.raises(ValueError, match="require ragged execution, but the configuration says"):
        padded.load_adapter("a", company.folders["adapter 0"])
    if not kernels.unavailable():
        invariant = Engine(company.model, company.tokenizer, EngineConfig(batch_invariant=True))
        with pytest.raises(ValueError, match="use batch_invariant=False"):
            invariant.load_adapter("a", company.folders["adapter 0"])


def test_there_may_be_only_so_many_adapters(company, monkeypatch):
    engine = company.engine()
    monkeypatch.setattr(feature, "MAX_ADAPTERS", NUM_ADAPTERS)
    with pytest.raises(ValueError, match="16 adapters are loaded"):
        engine.load_adapter("one more", company.folders["adapter 0"])


class Routed(nn.Module):
    """A layer whose tokens go to one of two experts."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.experts = nn.ModuleList([layer, layer.__class__(layer.in_features, layer.out_features, bias=False)])

    def forward(self, x):
        first = x[..., :1] > 0
        one, other = (expert(x[mask[..., 0]]) for expert, mask in zip(self.experts, (first, ~first), strict=True))
        y = x.new_empty(*x.shape[:-1], one.shape[-1])
        y[first[..., 0]], y[~first[..., 0]] = one, other
        return y


def test_a_layer_that_gets_some_of_the_tokens_cannot_be_adapted(tmp_path):
    model, tokens = copy.deepcopy(random_pair("llama"))
    model.model.layers[1].mlp.down_proj = Routed(model.model.layers[1].mlp.down_proj)
    engine = Engine(model, tokens, EngineConfig(execution="ragged", **TINY))
    engine.load_adapter("attention", write_adapter(tmp_path / "a", model, ["q_proj"]))
    with pytest.raises(
        ValueError, match=r"down_proj\.experts\.[01], a Linear that LlamaForCausalLM does not call with all"
    ):
        engine.load_adapter("experts", write_adapter(tmp_path / "b", model, "all-linear"))


# --- at random --------------------------------------------------------------------------------------------------------


class AdapterMachine(RuleBasedStateMachine):
    """Requests of all adapters arrive and are cancelled, and adapters come and go, with hardly any memory."""

    company: Company

    @initialize(
        rows=st.integers(2, 6), tokens=st.integers(6, 40), blocks=st.integers(30, 34), caching=st.booleans(),
        kernels=st.sampled_from([None, False]),
    )  # fmt: skip
    def begin(self, rows, tokens, blocks, caching, kernels):
        config = EngineConfig(rows, tokens, num_blocks=blocks, block_size=4, prefix_caching=caching, kernels=kernels)
        self.engine = Engine(self.company.model, self.company.tokenizer, config)
        self.loaded, self.requests, self.finished = {}, {}, {}

    @precondition(lambda self: len(self.loaded) < 6)
    @rule(number=st.integers(0, NUM_ADAPTERS - 1), which=st.integers(0, 3))
    def load(self, number, which):
        name = f"name {which}"
        if name in self.loaded:
            with pytest.raises(ValueError, match="loaded already"):
                self.engine.load_adapter(name, self.company.folders[f"adapter {number}"])
        else:
            self.engine.load_adapter(name, self.company.folders[f"adapter {number}"])
            self.loaded[name] = f"adapter {number}"

    @precondition(lambda self: self.loaded)
    @rule(which=st.integers(0, 9))
    def unload(self, which):
        name = list(self.loaded)[which % len(self.loaded)]
        self.engine.unload_adapter(name)
        del self.loaded[name]

    @rule(requests=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(PROMPTS), st.integers(1, 20)), max_size=5))
    def add(self, requests):
        for which, prompt, max_tokens in requests:
            name = [None, *self.loaded][which % (1 + len(self.loaded))]
            request_id = self.engine.add_request(prompt, SamplingParams(max_tokens=max_tokens), adapter=name)
            self.requests[request_id] = (self.loaded.get(name), prompt, max_tokens)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 20))
    def abort(self, which):
        self.engine.abort_request(list(self.requests)[which % len(self.requests)])

    @rule(steps=st.integers(1, 12))
    def step(self, steps):
        for _ in range(steps):
            for output in self.engine.step():
                if output.finish_reason is not None:
                    self.finished[output.request_id] = output

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.engine.has_unfinished_requests():
                break
            self.step(1)
        for request_id, request in self.requests.items():
            output, expected = self.finished[request_id], self.company.alone(*request)
            assert output.token_ids == expected[: len(output.token_ids)]
            assert output.finish_reason == "abort" or output.token_ids == expected
        assert self.engine.block_manager.used == 0
        assert not adapters_of(self.engine)._users


def test_adapters_come_and_go_at_random(company):
    machine = type("Machine", (AdapterMachine,), {"company": company})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=20))
