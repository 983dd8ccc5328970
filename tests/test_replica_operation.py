"""Replicas are restarted, added and removed under load, and no request notices. There is no Ray (local_replicas.py)."""

import asyncio
import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from helpers.cluster import replica_client
from helpers.cluster.lifecycle import DRAINING, READY, STARTING
from helpers.server.http_errors import EngineFailed
from tests.support.autoscalers import with_window
from tests.support.gated_thread import in_loop, wait_until
from tests.support.local_replicas import ENOUGH, http_client, is_empty, let, running, submit, tokens

NEVER = 1e6  # seconds


def states(client) -> list[str]:
    return [member.state for member in client.pool.members]


@pytest.mark.parametrize("num_replicas", [1, 2])
@in_loop
async def test_a_rolling_restart_under_load_fails_no_request_and_changes_no_token(num_replicas):
    async with running(num_replicas, max_queue=20) as client:
        results, ready, restarted = [], [], asyncio.Event()

        async def user(number: int) -> None:
            while not restarted.is_set():
                results.append(await tokens(await submit(client, [0, 1], 9, f"{number}-{len(results)}")))
                await asyncio.sleep(0.01)

        client.observers.append(lambda *_: ready.append(client.pool.count(READY)))
        users = [asyncio.create_task(user(number)) for number in range(6)]
        await wait_until(lambda: len(results) > 10)
        assert client.pool.restart() == [f"r{number}" for number in range(num_replicas)]
        assert states(client) == [DRAINING, *[READY] * (num_replicas - 1), STARTING]
        new = [f"r{number}" for number in range(num_replicas, 2 * num_replicas)]
        await wait_until(lambda: sorted(client.replicas) == new and states(client) == [READY] * num_replicas)
        restarted.set()
        await asyncio.gather(*users)
        assert results == [list(range(2, 11))] * len(results)
        assert min(ready) >= num_replicas - 1
        assert client.num_lost == client.num_resumed == 0
        assert all(replica.killed for replica in client.started[:num_replicas])
        await wait_until(lambda: is_empty(client))


@in_loop
async def test_after_the_grace_requests_move_to_others_and_many_restarts_are_no_losses():
    async with running(num_replicas=1, all_shut=True, drain_grace=0.0) as client:
        stream = await submit(client, [0, 1], 9)
        for number in range(4):
            await wait_until(lambda number=number: f"r{number}" in client.replicas)
            let(client.started[number], 1)
            await wait_until(lambda number=number: client.started[number].replica.engine.steps >= 1)
            client.pool.restart()
        await wait_until(lambda: "r4" in client.replicas)
        let(client.started[4], ENOUGH)
        assert await tokens(stream) == list(range(2, 11))
        assert client.num_resumed == 4 and client.num_lost == 0
        await wait_until(lambda: is_empty(client))


@in_loop
async def test_replicas_are_added_for_a_queue_and_drained_after_it():
    autoscaler = with_window(1)(1, 3, target=2, interval=NEVER)
    async with running(1, all_shut=True, max_queue=20, most=3, autoscaler=autoscaler) as client:
        streams = [await submit(client, [0, 1], 6, f"r{number}") for number in range(6)]
        client.autoscale()
        assert states(client) == [READY, STARTING, STARTING]
        await wait_until(lambda: states(client) == [READY] * 3)
        streams += [await submit(client, [0, 1], 6, f"new-{number}") for number in range(2)]
        assert [replica.num_requests for replica in client.dispatcher.replicas.values()] == [6, 1, 1]
        for replica in client.started:
            let(replica, ENOUGH)
        assert [await tokens(stream) for stream in streams] == [[2, 3, 4, 5, 6, 7]] * 8
        client.autoscale()
        assert states(client) == [READY, DRAINING, DRAINING]
        await wait_until(lambda: list(client.replicas) == ["r0"])
        assert [replica.killed for replica in client.started] == [False, True, True]
        assert client.num_lost == client.num_resumed == 0


@in_loop
async def test_when_all_replicas_are_lost_requests_wait_for_the_next_one_in_their_order():
    async with running(1, all_shut=True, restarts=False, max_queue=20) as client:
        streams = [await submit(client, [0, 1], 4, f"r{number}") for number in range(9)]
        client.started[0].lose()
        await wait_until(lambda: not client.replicas)
        streams.append(await submit(client, [0, 1], 4, "r9"))
        assert client.alive and client._snapshot(()).num_waiting == 10
        client.may_start.release()
        await wait_until(lambda: "r1" in client.replicas)
        assert list(client.dispatcher.replicas["r1"]._requests) == [f"r{number}" for number in range(10)]
        let(client.started[1], ENOUGH)
        assert [await tokens(stream) for stream in streams] == [[2, 3, 4, 5]] * 10
        await wait_until(lambda: is_empty(client))


@in_loop
async def test_an_autoscaler_decides_again_and_again_and_stops_the_front_end_if_it_fails(caplog):
    divisors = iter([1, 0])
    autoscaler = SimpleNamespace(interval=0.01, desired=lambda unfinished: 1 // next(divisors))
    async with running(1, shut=True, autoscaler=autoscaler) as client:
        await wait_until(lambda: client.crashed)
        assert "The front end has stopped." in caplog.text and "ZeroDivisionError" in caplog.text
        with pytest.raises(EngineFailed):
            await submit(client, [0, 1], 4)


@in_loop
async def test_a_replica_with_another_model_than_the_first_is_reported(caplog):
    async with running(2, restarts=False) as client:
        assert "vocabulary" not in caplog.text
        client.engine.info = replace(client.engine.info, num_blocks=41)
        client.started[0].lose()
        client.may_start.release()
        await wait_until(lambda: "r2" in client.replicas)
        assert "Replica r2 has another vocabulary, context or number of blocks" in caplog.text


@in_loop
async def test_the_front_is_healthy_only_while_a_replica_is_ready():
    async with running(1, restarts=False) as client, http_client(client) as http:
        assert (await http.get("/health")).status_code == 200
        client.started[0].lose()
        await wait_until(lambda: not client.replicas)
        response = await http.get("/health")
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "No replica is ready: 1 of 1 are starting."
        (starting,) = (await http.get("/replicas")).json()
        assert {key: value for key, value in starting.items() if value is not None} == {"state": "starting"}
        metrics = (await http.get("/metrics")).text
        assert "\nreplicas 0.0\n" in metrics and "\nreplicas_starting 1.0\n" in metrics
        client.may_start.release()
        await wait_until(lambda: "r1" in client.replicas)
        assert (await http.get("/health")).status_code == 200
        (listed,) = (await http.get("/replicas")).json()
        assert listed["name"] == "r1" and listed["state"] == "ready" and listed.keys() == starting.keys()


@in_loop
async def test_a_restart_needs_the_key_the_name_of_the_server_and_a_json_object():
    async with running(2) as client, http_client(client, api_key="key", allowed_hosts=["front"]) as http:
        key = {"Authorization": "Bearer key"}
        assert (await http.post("/replicas/restart", json={})).status_code == 401
        foreign = await http.post("/replicas/restart", json={}, headers=key | {"Host": "evil.example"})
        assert foreign.status_code == 400
        text = await http.post("/replicas/restart", content="{}", headers=key | {"Content-Type": "text/plain"})
        assert text.status_code == 400, "a web page may send text to any server without asking it"
        assert client.pool._generation == 0
        response = await http.post("/replicas/restart", json={}, headers=key)
        assert response.status_code == 202 and response.json() == {"replaced": ["r0", "r1"]}
        await wait_until(lambda: list(client.replicas) == ["r2", "r3"])


@pytest.mark.parametrize("seed", range(3))
@in_loop
async def test_no_request_is_lost_whatever_is_done_to_the_replicas(seed):
    draw, ids, results, done = random.Random(seed), itertools.count(), [], False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_client, "MAX_LOSSES", 10**6)  # no request is the cause
        async with running(2, max_queue=100, most=3, drain_grace=0.0) as client:

            async def user() -> None:
                while not done:
                    stream = await submit(client, [0, 1], 9, f"r{next(ids)}")
                    await asyncio.sleep(draw.choice([0.001, 0.005]))
                    if draw.random() < 0.2:
                        client.cancel(stream)
                    else:
                        results.append(await tokens(stream))

            users = [asyncio.create_task(user()) for _ in range(8)]
            for _ in range(40):
                await asyncio.sleep(0.02)
                if (action := draw.choice(["lose", "restart", "scale"])) == "restart":
                    client.pool.restart()
                elif action == "scale":
                    client.pool.scale(draw.randint(1, 3))
                elif client.replicas:
                    client.replicas[draw.choice(list(client.replicas))].lose()
            await wait_until(lambda: len(results) > 40)
            done = True
            await asyncio.gather(*users)
            assert results == [list(range(2, 11))] * len(results)
            await wait_until(lambda: states(client) == [READY] * client.pool.wanted and is_empty(client))
