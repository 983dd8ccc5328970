"""Adapters on replicas: all of them have the same ones, requests move with theirs, and a router tells them apart."""

import pytest
from conftest import random_pair

from helpers import Engine, EngineConfig, SamplingParams
from helpers.cluster.replica import Replica
from tests.support import local_replicas
from tests.support.adapters import merged, write_adapter
from tests.support.gated_thread import in_loop, wait_until
from tests.support.local_replicas import LocalReplica, http_client, is_empty, running, tokens

PROMPT, CONFIG = list(range(40, 70)), EngineConfig(max_batch_size=2, num_blocks=100, block_size=4, trace_length=100)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Two adapters, which every replica loads."""
    model, tokenizer = random_pair("llama")
    folders = {name: write_adapter(tmp_path / name, model, "all-linear", seed) for seed, name in enumerate("ab")}

    class AdaptedReplica(LocalReplica):
        """A replica in this process that runs a model."""

        def __init__(self, name: str, shut: bool):
            super().__init__(name, shut)
            engine = Engine(model, tokenizer, CONFIG)
            for adapter, folder in folders.items():
                engine.load_adapter(adapter, folder)
            unused, self.replica = self.replica, Replica(engine)
            unused._inbox.put(None)
            self.replica.start()
            self.info = self.replica.info
            self.add, self.abort, self.set_pace = self.replica.add, self.replica.abort, self.replica.set_pace

    monkeypatch.setattr(local_replicas, "LocalReplica", AdaptedReplica)
    return folders


def alone(folder) -> list[int]:
    model, tokenizer = random_pair("llama")
    engine = Engine(merged(model, folder), tokenizer, CONFIG)
    return engine.generate([PROMPT], SamplingParams(40, ignore_eos=True))[0].token_ids


@in_loop
async def test_a_request_moves_to_another_replica_with_its_adapter(folders):
    async with running(2, max_queue=20) as client:
        params, streams = SamplingParams(40, ignore_eos=True), {}
        for name in (None, "a", "b"):
            streams[name], _ = await client.submit(f"request {name}", [PROMPT], params, adapter=name)
        await wait_until(lambda: any(request.generated[0] for request in client.dispatcher.requests.values()))
        client.started[0].lose()
        for name, stream in streams.items():
            assert await tokens(stream) == alone(folders.get(name))
        assert client.num_lost == 1
        await wait_until(lambda: is_empty(client))


@in_loop
async def test_the_front_end_lists_the_adapters_of_the_replicas_and_refuses_others(folders):
    async with running(1) as client, http_client(client) as http:
        names = [card["id"] for card in (await http.get("/v1/models")).json()["data"]]
        assert names == ["tiny-model", "a", "b"]
        body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}
        found = [(await http.post("/v1/completions", json=body | {"model": name})).json() for name in names]
        assert len({completion["choices"][0]["text"] for completion in found}) > 1
        assert (await http.post("/v1/completions", json=body | {"model": "c"})).status_code == 404
        assert (await http.post("/v1/load_lora_adapter", json={})).status_code == 404


@in_loop
async def test_what_replicas_report_as_cached_is_found_by_requests_with_the_same_adapter(folders):
    async with running(1) as client:
        stream, _ = await client.submit("request", [PROMPT], SamplingParams(2), adapter="a")
        await tokens(stream)
        await wait_until(lambda: is_empty(client))
        (state,), salts = client.dispatcher.replicas.values(), client.engine.info.adapters
        await wait_until(lambda: state.cached_tokens(PROMPT, salts["a"]) == 28)
        assert state.cached_tokens(PROMPT, salts["b"]) == state.cached_tokens(PROMPT) == 0
