"""Adapters: in any company, a request gets the tokens of the model with its adapter merged, and shares no block.

The layers that are called add their adapters' products themselves. One call that computes all blocks adds all products;
test_fused_executor.py compares it with many calls.
"""

import copy
import functools
import gc
import random
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
from conftest import LONGEST, PROMPTS, alone, random_pair, spied
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from test_executor import RECOGNIZED
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from helpers import Engine, EngineConfig, Request, SamplingParams, dequantized
from helpers.fast import attention, kernels
from helpers.fast.fused_executor import FusedExecutor
from helpers.fast.linear_backends import available_backends
from helpers.features import adapters as feature
from helpers.features.adapters.grouped_products import AdapterStack
from tests.support.adapters import TARGETS, merged, write_adapter
from tests.support.families import FAMILIES, CountingScheduler, build, by_name, lead, skip_unless_ragged, tokenizer
from tests.support.families import generate as generate_alone

NUM_ADAPTERS = 16
RANKS = [4, 1, 8, 3, 16, 2]
TINY = {"max_batch_size": 5, "max_tokens_per_step": 24, "block_size": 4}
GREEDY = SamplingParams(max_tokens=20)
ONE_CALL = {"linear_backend": "compiled", "num_blocks": 400}
needs_kernels = pytest.mark.skipif(bool(kernels.unavailable()), reason=f"no compiled kernels: {kernels.unavailable()}")


def in_one_call(**config):
    """Return a parameter that lets one call compute all blocks, with these settings, too."""
    return pytest.param(ONE_CALL | config, marks=needs_kernels)


class Company:
    """A base model and 16 adapters of all kinds, with the models that they stand for."""

    def __init__(self, family: str):
        self.model, self.tokenizer = random_pair(family)
        self.folders, self.folder = {None: None}, tempfile.TemporaryDirectory()
        for number in range(NUM_ADAPTERS):
            targets, rank = TARGETS[family][number % 4], RANKS[number % 6]
            patterns = {} if isinstance(targets, str) else {targets[0]: 5}
            more = [{}, {"use_rslora": True}, {"lora_alpha": 5}, {"rank_pattern": patterns}][number // 4]
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


company_of = functools.cache(Company)


@pytest.fixture(scope="session", params=["gpt2", "llama"])
def company(request):
    return company_of(request.param)


@pytest.fixture(scope="session")
def llamas():
    """One company, for what no family does differently."""
    return company_of("llama")


@pytest.fixture(autouse=True)
def calls(monkeypatch) -> list[int]:
    """How many groups of neighboring rows with one adapter each call for all blocks has. Calls compute chunks, too."""
    calls, compute = [], FusedExecutor.__call__

    def call(*args, adapted=()):
        calls.append(len(adapted))
        return compute(*args, adapted=adapted)

    monkeypatch.setattr(attention, "_measure", lambda *_: True)
    monkeypatch.setattr(FusedExecutor, "__call__", call)
    return calls


@pytest.fixture
def stacked(monkeypatch) -> list[tuple]:
    """The products that are added to the output of a layer that is called."""
    stacked = []
    monkeypatch.setattr(AdapterStack, "add_products", spied(AdapterStack.add_products, stacked))
    return stacked


def warmed_up(company, **config) -> Engine:
    """Return an engine after its first pass, which writes the first keys and cannot be one call."""
    engine = company.engine(**config)
    engine.generate([[5, 6, 7]], SamplingParams(1))
    return engine


def adapters_of(engine: Engine):
    """Return the feature that knows the adapters."""
    return next(feature for feature in engine.validator.features if feature.name == "adapters")


def token_ids(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def last_tokens(engine: Engine) -> list[int]:
    """Run an engine to its end and return the tokens of its last output."""
    while engine.has_unfinished_requests():
        outputs = engine.step()
    return outputs[-1].token_ids


# --- exact ------------------------------------------------------------------------------------------------------------


ONLY_DECODES = {"linear_backend": "compiled"}  # in one call, because PyTorch computes the attention of chunks


@pytest.mark.parametrize(
    "config",
    [
        {"kernels": False, "linear_backend": "pytorch"},
        *({"linear_backend": name} for name in available_backends(torch.float32) if name != "pytorch"),
        {"num_blocks": 40, "scheduler_cls": CountingScheduler, "speculative": "ngram"},
        {"mixed_batches": False, "chunked_prefill": False, "prefix_caching": False, "max_tokens_per_step": 120},
        {"max_batch_size": 17, "max_tokens_per_step": 512, "num_blocks": 400},
        in_one_call(num_blocks=40, scheduler_cls=CountingScheduler),
        in_one_call(max_batch_size=17, max_tokens_per_step=512),
        in_one_call(speculative="ngram"),
    ],
    ids=str,
)
def test_every_request_gets_the_tokens_of_its_merged_model(company, config, calls, stacked, always_drafts, monkeypatch):
    """Requests arrive at random, with all adapters and none."""
    monkeypatch.setattr(attention, "_measure", lambda *_: config != ONLY_DECODES)
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
    if config.get("linear_backend") == "compiled":
        assert max(calls) > 1
        layered = {id(rows) for *_, rows in stacked}
        assert len(layered) <= 1 or config == ONLY_DECODES, "only the pass that writes the first keys calls layers"


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
    for path in folders:
        engine.load_adapter(path.name, path)
    references = [model, *(merged(model, path) for path in folders)]
    prompts = [tokenizer().decode(range(start, start + 11)) for start in (40, 50, 70)]
    requests = [Request(prompt, 12) for prompt in prompts]
    expected = [generate_alone(reference, request) for reference, request in zip(references, requests, strict=True)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=12), adapter=[None, "0", "1"])
    is_clear = [lead(logits) > 1e-4 for _, logits in expected]
    assert sum(is_clear) >= 2
    for clear, output, (tokens, _) in zip(is_clear, outputs, expected, strict=True):
        assert not clear or output.token_ids == tokens


@needs_kernels
@pytest.mark.parametrize("name", sorted(RECOGNIZED))
def test_every_recognized_family_runs_adapters_of_all_its_layers_in_one_call(name, calls, tmp_path):
    check_all_layers(build(by_name(name)), tmp_path, linear_backend="compiled")
    assert calls.count(2) > 4


@needs_kernels
def test_sizes_that_fill_no_vector_are_multiplied_to_the_end(calls, tmp_path):
    _, byte_tokenizer = random_pair("gpt2")
    config = GPT2Config(
        vocab_size=len(byte_tokenizer), n_positions=64, n_embd=20, n_inner=42, n_head=2, n_layer=2,
        initializer_range=0.5, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).eval()
    engine = Engine(model, byte_tokenizer, EngineConfig(**TINY, linear_backend="compiled"))
    folder = write_adapter(tmp_path / "a", model, "all-linear", 0, 5, 0.7)
    engine.load_adapter("a", folder)
    outputs = engine.generate(PROMPTS[:3], GREEDY, adapter=["a", None, "a"])
    models = merged(model, folder), model, merged(model, folder)
    assert token_ids(outputs) == [
        alone(reference, byte_tokenizer, prompt, 20) for reference, prompt in zip(models, PROMPTS[:3], strict=True)
    ]
    assert 2 in calls


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_adapters_run_on_quantized_weights(company, weights):
    engine = company.engine(weights=weights)
    names = company.names[:5]
    outputs = engine.generate([PROMPTS[3]] * 5, GREEDY, adapter=names)
    base = dequantized(company.model, weights)
    for name, output in zip(names, outputs, strict=True):
        model = merged(base, company.folders[name])
        assert output.token_ids == alone(model, company.tokenizer, PROMPTS[3], 20)


# --- with other features ----------------------------------------------------------------------------------------------


def merged_engine(company, name: str, **config) -> Engine:
    return Engine(company.merged[name], company.tokenizer, EngineConfig(**TINY | config))


def test_streams_beams_scores_and_continued_outputs_are_those_of_the_merged_model(company):
    name = company.names[7]
    engine, own = company.engine(), merged_engine(company, name)
    engine.add_request(PROMPTS[2], GREEDY, adapter=company.names[2])  # company
    streamed = [token for output in engine.stream(PROMPTS[0], GREEDY, adapter=name) for token in output.new_token_ids]
    assert streamed == company.alone(name, PROMPTS[0], 20)
    found, expected = engine.beam_search(PROMPTS[1], 3, 10, adapter=name), own.beam_search(PROMPTS[1], 3, 10)
    assert token_ids(found) == token_ids(expected)
    torch.testing.assert_close(prompt_scores(engine, [name]), prompt_scores(own, [None]), rtol=0, atol=1e-3)
    params = SamplingParams(20, ignore_eos=True)
    whole = own.generate(PROMPTS[3], params)[0].token_ids
    engine.add_request(PROMPTS[3], params, adapter=name, generated={0: whole[:4]})
    assert last_tokens(engine) == whole


def prompt_scores(engine: Engine, names: list[str | None]) -> torch.Tensor:
    """Return the log-probabilities [names, tokens] of a prompt's tokens."""
    params = SamplingParams(0, prompt_logprobs=0)
    outputs = engine.generate([PROMPTS[3]] * len(names), params, adapter=names)
    return torch.tensor([[next(iter(scores.values())) for scores in output.prompt_logprobs[1:]] for output in outputs])


@pytest.mark.parametrize(
    "config", [{}, in_one_call(max_batch_size=16, max_tokens_per_step=1000)], ids=["layers", "one call"]
)
def test_in_bfloat16_scores_are_closer_to_those_of_the_merged_model_than_to_any_others(company, config, calls):
    """Rounding moves scores; those of another adapter differ by much more."""
    engine, names = warmed_up(company, dtype=torch.bfloat16, **config), company.names[:6]
    actual = prompt_scores(engine, names)
    for number, name in enumerate(names):
        expected = prompt_scores(merged_engine(company, name, dtype=torch.bfloat16), [None])
        distances = (actual - expected).abs().mean(1)
        assert distances.argmin() == number
        assert distances[number] < 0.2 * distances.sort().values[1]
    assert not config or max(calls) == 5


# --- isolation, and what a pass does ----------------------------------------------------------------------------------


def test_blocks_are_shared_within_an_adapter_and_never_across(llamas):
    engine, (first, second) = llamas.engine(num_blocks=400), llamas.names[1:3]
    computed = []
    for name in (first, first, second, None, None, second, first):
        before = engine.trace.prompt_tokens
        engine.generate(PROMPTS[3], GREEDY, adapter=name)
        computed.append(engine.trace.prompt_tokens - before)
    whole, rest = computed[0], computed[1]
    assert computed == [whole, rest, whole, whole, rest, rest, rest] and rest < whole / 4


def test_another_adapter_under_an_old_name_finds_no_blocks_of_the_old_one(llamas):
    engine, (name, other) = llamas.engine(), llamas.names[1:3]
    engine.generate(PROMPTS[3], GREEDY, adapter=name)
    engine.unload_adapter(name)
    engine.load_adapter(name, llamas.folders[other])
    assert token_ids(engine.generate(PROMPTS[3], GREEDY, adapter=name)) == [llamas.alone(other, PROMPTS[3], 20)]


def test_a_failed_pass_fails_its_requests_and_leaves_no_adapters_behind(llamas, monkeypatch):
    engine, name = warmed_up(llamas, linear_backend="pytorch"), llamas.names[1]
    with monkeypatch.context() as context:
        context.setattr(AdapterStack, "add_products", lambda *_, **__: 1 / 0)
        with pytest.warns(UserWarning, match="failed"):
            (failed,) = engine.generate(PROMPTS[0], GREEDY, adapter=name)
    assert failed.finish_reason == "error"
    for adapter in (None, name):
        outputs = engine.generate(PROMPTS[0], GREEDY, adapter=adapter)
        assert token_ids(outputs) == [llamas.alone(adapter, PROMPTS[0], 20)]


# --- one call ---------------------------------------------------------------------------------------------------------


@needs_kernels
def test_nothing_reads_the_matrices_of_a_freed_adapter(llamas, calls):
    """They are overwritten with NaN, and so is memory that new adapters might get."""
    engine = warmed_up(llamas, **ONE_CALL)
    engine.generate(PROMPTS[:3], GREEDY, adapter=llamas.names[1:4])
    tables = engine.runner.call_model.fused.adapters._tables
    assert len(tables) == 3
    old = [matrix for table in tables.values() for matrix in table._copies]
    for name in llamas.names[1:4]:
        engine.unload_adapter(name)
    engine.generate(PROMPTS[0], GREEDY)  # the engine refers to the requests of the latest pass
    gc.collect()
    assert not tables
    with torch.inference_mode():
        for matrix in old:
            matrix.fill_(torch.nan)
    for name, other in zip(llamas.names[1:4], llamas.names[4:7], strict=True):
        engine.load_adapter(name, llamas.folders[other])
    calls.clear()
    outputs = engine.generate(PROMPTS[:3], GREEDY, adapter=llamas.names[1:4])
    expected = zip(llamas.names[4:7], PROMPTS[:3], strict=True)
    assert token_ids(outputs) == [llamas.alone(name, prompt, 20) for name, prompt in expected]
    assert 3 in calls


@pytest.mark.parametrize("backend", [pytest.param("compiled", marks=needs_kernels), "pytorch"])
@pytest.mark.parametrize("running", ["recompute", "finish", "in place"])
def test_adapters_run_on_the_weights_of_their_iteration(llamas, running, backend, calls):
    """After an update or a change in place, a running request goes on with the new weights, or finishes on the old."""
    name, params = llamas.names[3], SamplingParams(16, ignore_eos=True)
    model, other = copy.deepcopy(llamas.model), copy.deepcopy(llamas.model)
    with torch.no_grad():
        for weight in other.parameters():
            weight *= 0.9
    engine = Engine(model, llamas.tokenizer, EngineConfig(**TINY | ONE_CALL | {"linear_backend": backend}))
    engine.load_adapter(name, llamas.folders[name])
    old, new = merged_engine(llamas, name), Engine(merged(other, llamas.folders[name]), llamas.tokenizer)
    engine.add_request(PROMPTS[1], params, adapter=name)
    for _ in range(6):
        engine.step()
    (sequence,) = engine.scheduler.running
    begun = sequence.token_ids[-sequence.generated :]
    if running == "in place":
        model.load_state_dict(other.state_dict())
    else:
        engine.update_weights(other, running=running)
    judge = old if running == "finish" else new
    judge.add_request(PROMPTS[1], params, generated={0: begun})
    assert 0 < len(begun) < 16 and last_tokens(engine) == last_tokens(judge)
    after = engine.generate(PROMPTS[1], params, adapter=name)
    assert token_ids(after) == token_ids(new.generate(PROMPTS[1], params))
    assert calls[-1:] == [1] * (backend == "compiled")


# --- loading and unloading while requests run -------------------------------------------------------------------------


def test_an_unknown_adapter_or_another_number_of_adapters_than_prompts_is_refused(llamas):
    engine, name = llamas.engine(), llamas.names[1]
    for names, message in (([name, "x"], "no adapter 'x'"), ([name] * 3, "2 prompts, but 3 values of adapter")):
        with pytest.raises(ValueError, match=message):
            engine.generate([PROMPTS[0], PROMPTS[1]], GREEDY, adapter=names)
    assert not engine.has_unfinished_requests()


def test_an_engine_that_runs_padded_or_batch_invariant_refuses_adapters(llamas):
    padded = Engine(llamas.model, llamas.tokenizer, EngineConfig(execution="padded"))
    with pytest.raises(ValueError, match="require ragged execution, but the configuration says"):
        padded.load_adapter("a", llamas.folders["adapter 0"])
    if not kernels.unavailable():
        invariant = Engine(llamas.model, llamas.tokenizer, EngineConfig(batch_invariant=True))
        with pytest.raises(ValueError, match="use batch_invariant=False"):
            invariant.load_adapter("a", llamas.folders["adapter 0"])


def test_there_may_be_only_so_many_adapters(llamas, monkeypatch):
    engine = llamas.engine()
    monkeypatch.setattr(feature, "MAX_ADAPTERS", NUM_ADAPTERS)
    with pytest.raises(ValueError, match="16 adapters are loaded"):
        engine.load_adapter("one more", llamas.folders["adapter 0"])


class Routed(nn.Module):
    """A layer that gets some of the tokens, as an expert does."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.expert = layer

    def forward(self, x):
        y, is_routed = x.new_zeros(*x.shape[:-1], self.expert.out_features), x[..., 0] > 0
        y[is_routed] = self.expert(x[is_routed])
        return y


def test_a_layer_that_gets_some_of_the_tokens_cannot_be_adapted(tmp_path):
    model, own_tokenizer = copy.deepcopy(random_pair("llama"))
    mlp = model.model.layers[1].mlp
    mlp.down_proj = Routed(mlp.down_proj)
    engine = Engine(model, own_tokenizer, EngineConfig(execution="ragged", **TINY))
    with pytest.raises(ValueError, match=r"down_proj\.expert, a Linear that LlamaForCausalLM does not call with all"):
        engine.load_adapter("expert", write_adapter(tmp_path, model, "all-linear"))


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
        self.loaded, self.requests, self.finished, self.adapters = {}, {}, {}, []

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
            self.adapters.append(weakref.ref(adapters_of(self.engine).loaded[name]))

    @precondition(lambda self: self.loaded)
    @rule(which=st.integers(0, 9))
    def unload(self, which):
        name = list(self.loaded)[which % len(self.loaded)]
        self.engine.unload_adapter(name)
        del self.loaded[name]
        with pytest.raises(ValueError, match="There is no adapter"):
            self.engine.add_request(PROMPTS[0], GREEDY, adapter=name)

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
        for name in self.loaded:
            self.engine.unload_adapter(name)
        self.engine.generate(PROMPTS[0], SamplingParams(1))  # the engine refers to the requests of the latest pass
        gc.collect()
        assert not any(adapter() for adapter in self.adapters), "their memory is free"
        assert all(layer.stack is None for layer in getattr(self.engine.runner, "_adapted", {}).values())


def test_adapters_come_and_go_at_random(company):
    machine = type("Machine", (AdapterMachine,), {"company": company})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=20))
