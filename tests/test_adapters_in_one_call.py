"""A pass with adapters computes all blocks in one call, which adds the adapters' products to the right rows.

The one call itself is compared with many calls in test_fused_executor.py.
"""

import copy
import gc

import pytest
import torch
from conftest import PROMPTS, alone, random_pair, spied
from test_adapters import (
    GREEDY,
    TINY,
    check_all_layers,
    check_bfloat16,
    check_random_company,
    company_of,
    merged_engine,
    prompt_scores,
    token_ids,
)
from test_executor import RECOGNIZED
from transformers import GPT2Config, GPT2LMHeadModel

from helpers import Engine, EngineConfig, SamplingParams
from helpers.fast import attention, kernels
from helpers.fast.fused_executor import FusedExecutor
from helpers.features.adapters.grouped_products import AdapterStack
from tests.support.adapters import merged, write_adapter
from tests.support.families import CountingScheduler, build, by_name

pytestmark = pytest.mark.skipif(
    bool(kernels.unavailable()), reason=f"there are no compiled kernels: {kernels.unavailable()}"
)
COMPILED = {"linear_backend": "compiled", "num_blocks": 400}
WIDE = {"max_batch_size": 16, "max_tokens_per_step": 1000}  # all prompts in one pass


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def company(request):
    return company_of(request.param)


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
    engine = company.engine(**COMPILED | config)
    engine.generate([[5, 6, 7]], SamplingParams(1))
    return engine


# --- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"num_blocks": 40, "scheduler_cls": CountingScheduler},  # with preemption
        {"prefix_caching": False, "max_tokens_per_step": 7},  # chunks
        {"max_batch_size": 17, "max_tokens_per_step": 512},
        {"speculative": "ngram"},
    ],
    ids=str,
)
def test_in_one_call_every_request_gets_the_tokens_of_its_merged_model(company, config, calls, stacked, always_drafts):
    check_random_company(company, COMPILED | config)
    assert max(calls) > 1
    assert not stacked or len({id(rows) for *_, rows in stacked}) == 1, "of the pass that writes the first keys"


@pytest.mark.parametrize("name", sorted(RECOGNIZED))
def test_every_recognized_family_runs_adapters_of_all_its_layers_in_one_call(name, calls, tmp_path):
    check_all_layers(build(by_name(name)), tmp_path, linear_backend="compiled")
    assert calls.count(4) + calls.count(3) > 4


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
        alone(one, byte_tokenizer, prompt, 20) for one, prompt in zip(models, PROMPTS[:3], strict=True)
    ]
    assert 2 in calls


def test_in_bfloat16_scores_are_closer_to_those_of_the_merged_model_than_to_any_others(company, calls):
    check_bfloat16(company, warmed_up(company, dtype=torch.bfloat16, **WIDE))
    assert max(calls) == 5


@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_changes_no_bit(company, threads, calls, request):
    request.addfinalizer(lambda: torch.set_num_threads(1))
    engine = warmed_up(company, prefix_caching=False, **WIDE)
    expected = prompt_scores(engine, company.names[:9])
    torch.set_num_threads(threads)
    calls.clear()
    for _ in range(20):
        assert torch.equal(prompt_scores(engine, company.names[:9]), expected)
    assert len(calls) >= 20


# --- when it is made --------------------------------------------------------------------------------------------------


def test_each_pass_with_adapters_is_one_call(company, calls, stacked):
    engine, names = warmed_up(company, **WIDE), [company.names[number] for number in (1, 1, 2, 0, 3, 1)]
    calls.clear()
    engine.generate(PROMPTS[:6], SamplingParams(6, ignore_eos=True), adapter=names)
    passes = len(engine.trace.passes) - 1
    assert len(calls) == passes and not stacked
    assert calls[-1] == 4, "neighboring rows of one adapter are multiplied together"


@pytest.mark.parametrize(
    "config",
    [{"kernels": False}, {"linear_backend": "pytorch"}, {"linear_backend": "auto", "weights": "int8"}],
    ids=str,
)
def test_where_no_call_can_compute_all_blocks_layers_are_called(company, config, calls, stacked):
    engine = warmed_up(company, **{"linear_backend": "pytorch"} | config)
    outputs = engine.generate([PROMPTS[0]] * 2, GREEDY, adapter=company.names[:2])
    assert not calls and stacked
    if "weights" not in config:  # test_adapters.py compares those
        assert token_ids(outputs) == [company.alone(name, PROMPTS[0], 20) for name in company.names[:2]]


def test_a_failed_call_leaves_no_adapters_behind(company, monkeypatch, calls):
    engine, name = warmed_up(company), company.names[1]
    with monkeypatch.context() as context:
        context.setattr(FusedExecutor, "__call__", lambda *_, **__: 1 / 0)
        with pytest.warns(UserWarning, match="failed"):
            engine.generate(PROMPTS[0], GREEDY, adapter=name)
    assert token_ids(engine.generate(PROMPTS[0], GREEDY)) == [company.alone(None, PROMPTS[0], 20)]
    assert set(calls) == {0}


def test_chunks_that_are_not_those_of_the_rows_are_an_error(company, monkeypatch, calls):
    engine = warmed_up(company)
    usual = engine.runner._begin_pass
    monkeypatch.setattr(engine.runner, "_begin_pass", lambda chunks: usual(chunks and chunks * 2))
    calls.clear()
    with pytest.warns(UserWarning, match="38"):
        engine.generate(PROMPTS[0], GREEDY, adapter=company.names[1])
    assert not calls


# --- while adapters and weights change --------------------------------------------------------------------------------


def test_nothing_reads_the_matrices_of_a_freed_adapter(company, calls):
    """They are overwritten with NaN, and so is memory that new adapters might get."""
    engine = warmed_up(company)
    engine.generate(PROMPTS[:3], GREEDY, adapter=company.names[1:4])
    tables = engine.runner.call_model.fused.adapters._tables
    assert len(tables) == 3
    old = [one for table in tables.values() for one in table._copies]
    for name in company.names[1:4]:
        engine.unload_adapter(name)
    engine.generate(PROMPTS[0], GREEDY)  # the engine refers to the requests of the latest pass
    gc.collect()
    assert not tables
    with torch.inference_mode():
        for matrix in old:
            matrix.fill_(torch.nan)
    for name, other in zip(company.names[1:4], company.names[4:7], strict=True):
        engine.load_adapter(name, company.folders[other])
    calls.clear()
    outputs = engine.generate(PROMPTS[:3], GREEDY, adapter=company.names[1:4])
    expected = zip(company.names[4:7], PROMPTS[:3], strict=True)
    assert token_ids(outputs) == [company.alone(name, prompt, 20) for name, prompt in expected]
    assert 3 in calls


@pytest.mark.parametrize("backend", ["compiled", "pytorch"])
@pytest.mark.parametrize("running", ["recompute", "finish"])
def test_adapters_run_on_the_weights_of_their_iteration(company, running, backend, calls):
    """After an update, a running request goes on with the new weights, or finishes on the old ones."""
    name, tokens = company.names[3], company.tokenizer
    model, other = copy.deepcopy(company.model), copy.deepcopy(company.model)
    with torch.no_grad():
        for weight in other.parameters():
            weight *= 0.9
    engine = Engine(model, tokens, EngineConfig(**TINY | COMPILED | {"linear_backend": backend}))
    engine.load_adapter(name, company.folders[name])
    params = SamplingParams(16, ignore_eos=True)
    engine.add_request(PROMPTS[1], params, adapter=name)
    for _ in range(6):
        engine.step()
    new_model = merged(other, company.folders[name])
    (sequence,) = engine.scheduler.running
    begun = sequence.token_ids[-sequence.generated :]
    engine.update_weights(other, running=running)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    if running == "recompute":
        fresh = Engine(new_model, tokens, EngineConfig(**TINY))
        fresh.add_request(PROMPTS[1], params, generated={0: begun})
        while fresh.has_unfinished_requests():
            expected = fresh.step()
    else:
        expected = merged_engine(company, name).generate(PROMPTS[1], params)
    assert 0 < len(begun) < 16 and outputs[-1].token_ids == expected[-1].token_ids
    after = engine.generate(PROMPTS[1], params, adapter=name)
    assert token_ids(after) == token_ids(Engine(new_model, tokens, EngineConfig(**TINY)).generate(PROMPTS[1], params))
    assert calls[-1:] == [1] * (backend == "compiled")
