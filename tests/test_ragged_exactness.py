"""Ragged execution changes no token: not by preemption, caching, chunks or sharing, on any family that it supports.

Every such family of families.py is served with few tokens per iteration and too few blocks, so that all of this
happens; the tests count the events. test_engine_exactness.py lets requests arrive and leave at random, on three models.
"""

import pytest
import torch
from conftest import spied

from helpers import Engine, EngineConfig, SamplingParams
from helpers.fast.linear_backends import available_backends
from helpers.runners.kv_pool import KVPool
from tests.support.families import FAMILIES, by_name, reference, serve_ragged, skip_unless_ragged, tokenizer

of_every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name, indirect=True)


@pytest.fixture
def family(request):
    """A family that runs ragged."""
    skip_unless_ragged(request.param)
    return request.param


@of_every_family
def test_chunks_preemptions_and_caching_change_no_token(family):
    """The families take the linear backends in turn. With "pytorch", PyTorch computes attention, too."""
    backends = available_backends(torch.float32)
    alone = reference(family)
    requests, expected = alone.requests[:8] * 2, alone.tokens[:8] * 2  # every request arrives twice
    backend = backends[FAMILIES.index(family) % len(backends)]
    settings = {"kernels": False if backend == "pytorch" else None, "linear_backend": backend}
    tokens, engine = serve_ragged(alone.model, requests, seed=0, **settings)
    assert tokens == expected
    events = engine.scheduler
    assert events.num_preempted > 3 and events.num_partial_chunks > 10 and events.num_cached_tokens > 20
    assert engine.block_manager.used == 0


@pytest.mark.parametrize("family", [by_name("gpt2"), by_name("gemma3n_text"), by_name("deepseek_v3")], indirect=True)
def test_samples_that_share_their_prompt_equal_those_of_single_requests(family, monkeypatch):
    """In caches of equal layers, of layers that share keys, and of compressed keys."""
    model, copies = reference(family).model, []
    monkeypatch.setattr(KVPool, "copy_block", spied(KVPool.copy_block, copies))
    prompt = tokenizer()(reference(family).requests[0].prompt)["input_ids"][:22]  # the last block is half full
    config = EngineConfig(execution="ragged", max_batch_size=4, block_size=4)
    settings = {"max_tokens": 8, "temperature": 0.8, "top_k": 20, "ignore_eos": True}
    shared = Engine(model, tokenizer(), config).generate([prompt], SamplingParams(n=3, seed=5, **settings))
    assert len(copies) == 2
    params = [SamplingParams(seed=5 + index, **settings) for index in range(3)]
    single = Engine(model, tokenizer(), config).generate([prompt] * 3, params)
    assert [output.token_ids for output in shared] == [output.token_ids for output in single]
    assert len({tuple(output.token_ids) for output in shared}) == 3
