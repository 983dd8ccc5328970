"""The front's side of replicas, without Ray: engines of this process stand for those of other processes."""

import asyncio
import os
from dataclasses import replace

import pytest

from helpers import EngineConfig, SamplingParams, StructuredOutputs
from helpers.cluster.fleet_description import FleetDescription
from helpers.cluster.replica import Replica
from helpers.engine.hooks import Feature
from helpers.server.http_errors import EngineFailed
from helpers.simulator import Simulator
from tests.support.gated_thread import in_loop, wait_until
from tests.support.local_replicas import ENOUGH, http_client, is_empty, let, next_report, running, submit, tokens


@in_loop
async def test_requests_run_on_all_replicas_and_their_rows_add_up():
    async with running(shut=True) as client:
        streams = [await submit(client, [0, 1], 6, f"r{number}") for number in range(4)]
        assert client.capacity == 2 * 2 + 8 and client.engine.config.max_batch_size == 4
        for replica in client.started:
            let(replica, 2)  # the first of these iterations may have begun with a single request
        await wait_until(lambda: client._snapshot(()).num_running == 4)
        for replica in client.started:
            let(replica, ENOUGH)
        assert [await tokens(stream) for stream in streams] == [[2, 3, 4, 5, 6, 7]] * 4
        assert max(snapshot.num_running for _, snapshot in client.seen) == 4
        passes = [forward_pass for _, snapshot in client.seen for forward_pass in snapshot.passes]
        assert {len(forward_pass.row_steps) for forward_pass in passes} == {2}  # its own rows, not the others'
        assert {snapshot.replica for _, snapshot in client.seen if snapshot.passes} == client.replicas.keys()
        assert [(replica["state"], replica["rows"]) for replica in client.replicas_in_view] == [("ready", 2)] * 2
        assert sum(row.new_tokens for forward_pass in passes for row in forward_pass.row_steps) == 24
        await wait_until(lambda: is_empty(client))


@pytest.mark.parametrize("how", ["lose", "hang"])
@in_loop
async def test_streams_go_on_when_a_replica_is_lost_and_another_takes_its_place(how):
    async with running(shut=True, timeout=1.2) as client:
        first, second = client.started
        streams = [await submit(client, [0, 1], 9, f"r{number}") for number in range(4)]
        let(first, 3), let(second, 2)
        await wait_until(lambda: sum(len(output.new_token_ids) for outputs, _ in client.seen for output in outputs) > 7)
        getattr(first, how)()
        let(second, ENOUGH)
        assert [await tokens(stream) for stream in streams] == [list(range(2, 11))] * 4
        await wait_until(lambda: list(client.replicas) == ["r1", "r2"])
        assert first.killed
        assert client.num_lost == 1 and client.num_resumed == 2
        await wait_until(lambda: is_empty(client))


@in_loop
async def test_requests_go_on_when_an_engine_stops_and_the_log_says_which_and_why(caplog):
    async with running(shut=True) as client:
        first, second = client.started
        streams = [await submit(client, [0, 1], 9, f"r{number}") for number in range(2)]
        let(first, 1)
        await wait_until(lambda: client.seen)
        first.replica.engine.step = lambda: 1 / 0
        let(first, 2), let(second, ENOUGH)  # the first of these has begun
        assert [await tokens(stream) for stream in streams] == [list(range(2, 11))] * 2
        assert client.num_lost == 1 and first.killed and client.num_resumed > 0
        description = f"Replica r0 (process {os.getpid()} on {os.uname().nodename})"
        assert f"{description} is lost: its engine has stopped: ZeroDivisionError: division by zero." in caplog.text


@in_loop
async def test_an_iteration_that_takes_too_long_is_a_hung_replica_although_it_reports():
    async with running(shut=True, timeout=0.5) as client:
        stream = await submit(client, [0, 1], 4)
        assert await tokens(stream) == [2, 3, 4, 5]
        assert client.started[0].killed and client.num_lost == client.num_resumed == 2, "the second one hung, too"


@in_loop
async def test_a_request_that_cannot_be_sent_leaves_nothing_behind():
    async with running(shut=True) as client:
        client.started[1].add = lambda *_: 1 / 0
        with pytest.raises(ZeroDivisionError):
            await client.submit("r", [[0], [1], [2]], SamplingParams(9, n=2, temperature=1.0))
        let(client.started[0], ENOUGH)
        await wait_until(lambda: is_empty(client))


@in_loop
async def test_the_error_that_stops_the_front_end_is_logged(caplog):
    async with running() as client:
        client.observers.append(lambda outputs, snapshot: 1 / 0)
        with pytest.raises(EngineFailed, match="ZeroDivisionError"):
            await tokens(await submit(client, [0, 1], 4))
        assert client.crashed and "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("num_replicas", [1, 2])
@in_loop
async def test_all_requests_without_a_replica_fail_if_one_of_them_stops_the_front_end(num_replicas, monkeypatch):
    async with running(num_replicas, shut=True) as client:
        streams = [await submit(client, [0, 1], 4, f"r{number}") for number in range(4)]
        monkeypatch.setattr(Replica, "add", lambda *_: 1 / 0)
        client.started[-1].add = Replica.add
        client.started[0].lose()
        for stream in streams:
            with pytest.raises(EngineFailed, match="ZeroDivisionError"):
                await tokens(stream)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@in_loop
async def test_a_request_that_causes_the_losses_ends_alone(num_replicas):
    async with running(num_replicas=num_replicas, all_shut=True) as client:
        good = [await submit(client, [0, 1], 3, f"r{number}") for number in range(3)]
        bad = await submit(client, [0, 1], 3, "bad")

        async def be_lost_or_go_on() -> None:
            while True:
                await asyncio.sleep(0.005)
                request = client.dispatcher.requests.get("bad")
                for replica in client.started:
                    if request is not None and replica.name == request.replica:
                        replica.lose()
                    elif replica.name in client.replicas and not replica.permits._value:  # never enough for all tokens
                        let(replica, 1)

        going_on = asyncio.create_task(be_lost_or_go_on())
        with pytest.raises(EngineFailed, match="3 replicas were lost while they worked on this request"):
            await tokens(bad)
        assert [await tokens(stream) for stream in good] == [[2, 3, 4]] * 3
        assert client.num_lost == 3
        going_on.cancel()
        await wait_until(lambda: is_empty(client))


@in_loop
async def test_a_request_that_no_other_replica_could_resume_is_refused():
    async with running(num_replicas=1) as client:
        config = EngineConfig(max_tokens_per_step=8, chunked_prefill=False)
        info = replace(client.started[0].info, config=config, num_blocks=None)
        validator = FleetDescription(info, 2).validator
        assert validator.validate([0, 1], SamplingParams(7)) == ([0, 1], 7)
        with pytest.raises(ValueError, match="on another replica, the request may have to compute 9 tokens at once"):
            validator.validate([0, 1], SamplingParams(8))


@in_loop
async def test_a_request_gets_a_free_row_although_a_replica_without_one_has_less_to_do():
    async with running(2, shut=True) as client:
        for number, (max_tokens, replica) in enumerate([(20, "r0"), (4, "r1"), (4, "r1"), (4, "r0"), (4, "r1")]):
            await submit(client, [0, 1], max_tokens, str(number))
            assert client.dispatcher.requests[str(number)].replica == replica


@in_loop
async def test_slow_motion_reaches_all_replicas_and_those_that_come_later():
    async with running() as client:
        client.pace = 0.125
        client.started[0].lose()
        await wait_until(lambda: "r2" in client.replicas)
        assert [replica.replica.pace for replica in client.started] == [0.125] * 3


@in_loop
async def test_the_same_front_lists_the_replicas_and_has_their_metrics():
    async with running() as client, http_client(client) as http:
        response = await http.post("/v1/completions", json={"prompt": [0, 1], "max_tokens": 3})
        assert response.json()["usage"]["completion_tokens"] == 3
        listed = (await http.get("/replicas")).json()
        assert [replica["name"] for replica in listed] == ["r0", "r1"]
        counts = [(replica["rows"], replica["running"], replica["outstanding_tokens"]) for replica in listed]
        assert counts == [(2, 0, 0)] * 2
        metrics = (await http.get("/metrics")).text
        assert 'replica_running{replica="r1"} 0.0' in metrics and "\nreplicas 2.0\n" in metrics
        assert "\nengine_rows 4.0\n" in metrics and "\nengine_generated_tokens_total 3.0\n" in metrics
        refused = await http.post("/v1/completions", json={"prompt": [0] * 50})
        assert refused.status_code == 400 and "context is 40" in refused.json()["error"]["message"]


@in_loop
async def test_a_replica_compiles_structured_outputs_beside_its_engine_which_goes_on():
    replica = Replica(Simulator(EngineConfig(max_batch_size=4), lambda plan: 1.0, context_length=40, next_token=len))
    compiled, ended, validator = asyncio.Event(), {}, replica.engine.validator
    compiler = type("Compiler", (Feature,), {"name": "structured_outputs", "end": lambda self: None})()
    validator.features = (*(feature for feature in validator.features if feature.name != compiler.name), compiler)

    async def compile_slowly(prompts, params) -> None:
        await compiled.wait()
        if params.structured_outputs.regex == "refused":
            raise ValueError("regex is too complex")

    replica.prompt_tokenizer.validate = compile_slowly
    replica.start()

    async def read_until(*ids: str) -> None:
        while not ended.keys() >= {*ids}:
            outputs = (await next_report(replica)).outputs
            ended.update({output.request_id: output for output in outputs if output.finish_reason})

    try:
        for id in ("aborted", "refused", "matches"):
            replica.add(id, [0, 1], SamplingParams(4, structured_outputs=StructuredOutputs(regex=id)), 0, {0: []})
        replica.add("plain", [0, 1], SamplingParams(9), 0, {0: []})
        await read_until("plain")
        assert list(ended) == ["plain"]
        replica.abort("aborted")
        compiled.set()
        await read_until("aborted", "refused", "matches")
        assert [ended[id].finish_reason for id in ("aborted", "refused", "matches")] == ["abort", "error", "length"]
        assert "too complex" in ended["refused"].error
    finally:
        await replica.stop()
