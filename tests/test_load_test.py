"""The load generator measures servers whose pauses are known: its figures match them and leave out no waiting.

A pause is a lower bound of what a client can measure, however busy the machine is. Most bounds are therefore lower
ones, and upper bounds are far away.
"""

import asyncio
import itertools
import json
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from aiohttp import ClientSession, web

from helpers import plots
from helpers.load_test import (
    MIXES,
    LoadResult,
    RequestResult,
    arrival_times,
    capacity,
    lengths,
    run_load,
    sweep,
    texts,
    token_ids,
)
from helpers.load_test.__main__ import main
from helpers.load_test.client import ChunkReader
from helpers.load_test.sweep import table
from helpers.request import Request
from tests.support.serving import PATIENCE, wait_until

ROOT = Path(__file__).parents[1]
run_load = partial(run_load, timeout=PATIENCE)


# --- a server of known slowness --------------------------------------------------------------------------------------


class Stub:
    """An OpenAI-compatible server in a thread of its own; all of its tokens are "word ".

    Args:
        pause: seconds before each token.
        lanes: the number of concurrent requests; further requests queue.
        handle: a function that replaces `respond`; it takes the stub, the HTTP request and its JSON.
        models: the names of the models that the server lists.
        key: the API key that the server requires.

    Attributes:
        bodies: the JSON of all requests.
        gone: the number of clients that disconnected before the end of their response.
    """

    def __init__(self, pause=0.0, lanes=1000, handle=None, models=("stub",), key=None):
        self.pause, self.models, self.key = pause, models, key
        self.handle = handle or Stub.respond
        self.bodies, self.gone = [], 0
        self._lanes = asyncio.Semaphore(lanes)

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    async def _start(self):
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/completions", self._post)
        app.router.add_post("/v1/chat/completions", self._post)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _list(self, request):
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "key"}}, status=401)
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def _post(self, request):
        body = await request.json()
        self.bodies.append(body)
        try:
            async with self._lanes:
                return await self.handle(self, request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.gone += 1
            raise

    async def respond(self, request, body):
        response = await self.headers(request)
        count = body["max_tokens"]
        for number in range(count):
            await asyncio.sleep(self.pause)
            await self.say(response, "word ", "length" if number == count - 1 else None, "messages" in body)
        usage = {"prompt_tokens": prompt_tokens(body), "completion_tokens": count}
        await self.event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def headers(self, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        return response

    async def say(self, response, text, reason=None, chat=False):
        content = {"delta": {"content": text}} if chat else {"text": text}
        # The other fields that the official client requires in a chunk.
        more = {"id": "x", "created": 0, "model": "stub", "object": "text_completion"}
        await self.event(response, {"choices": [{"index": 0, **content, "finish_reason": reason}], **more})

    async def event(self, response, chunk):
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())


def prompt_tokens(body):
    """Count tokens as the stub's tokenizer does: three tokens per two words."""
    prompt = body.get("prompt") or body["messages"][0]["content"]
    return len(prompt.split()) * 3 // 2 if isinstance(prompt, str) else len(prompt)


def some(count, max_tokens=1):
    return [(f"prompt {number}", max_tokens) for number in range(count)]


# --- the load --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cv", [0, 0.5, 1, 3])
def test_gaps_have_the_stated_mean_and_variation(cv):
    gaps = np.diff(arrival_times(20001, rate=4, cv=cv, seed=7))
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.25, abs=1e-9)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_a_seed_gives_the_same_arrivals_again_and_another_rate_the_same_pattern():
    slow, again, fast, other = (arrival_times(50, rate, 1, seed) for rate, seed in [(2, 0), (2, 0), (8, 0), (2, 1)])
    assert slow == again != other
    assert np.array(slow) == pytest.approx(4 * np.array(fast))
    assert slow[0] == 0 and slow[-1] == pytest.approx(49 / 2)
    assert arrival_times(0, 1) == [] and arrival_times(1, 1) == [0.0]


def test_lengths_follow_their_distribution():
    assert lengths("fixed:32", 3) == [32, 32, 32]
    uniform = lengths("uniform:8-12", 5000)
    assert set(uniform) == {8, 9, 10, 11, 12} and np.mean(uniform) == pytest.approx(10, rel=0.02)
    exponential = lengths("exponential:64-1000", 5000)
    assert min(exponential) == 1 and max(exponential) <= 1000
    assert np.mean(exponential) == pytest.approx(64.5, rel=0.05)
    assert np.percentile(exponential, 50) == pytest.approx(64 * np.log(2), rel=0.1)
    lognormal = lengths("lognormal:40-160-10000", 5000)
    assert np.percentile(lognormal, 50) == pytest.approx(40.5, rel=0.05)
    assert np.percentile(lognormal, 95) == pytest.approx(160, rel=0.1)
    assert max(lengths("exponential:64-70", 1000)) == 70 and max(lengths("lognormal:40-160-160", 1000)) == 160
    assert lengths("uniform:1-99", 50, 1) == lengths("uniform:1-99", 50, 1) != lengths("uniform:1-99", 50, 2)
    assert all(len(lengths(spec, 10)) == 10 for mix in MIXES.values() for spec in mix)


@pytest.mark.parametrize("spec", ["", "32", "gauss:1-2", "fixed:", "fixed:0", "fixed:1-2", "uniform:9-8", "uniform:-8",
                                  "exponential:64", "lognormal:40-20-100", "fixed:1.5"])  # fmt: skip
def test_a_length_that_means_nothing_says_what_would(spec):
    with pytest.raises(ValueError, match=r"uniform:LOW-HIGH|is not"):
        lengths(spec, 1)


def test_prompts_have_their_length_and_no_beginning_in_common():
    prompts = texts([40] * 50, tokens_per_word=2)
    assert {len(prompt.split()) for prompt in prompts} == {20}
    assert len({prompt[:40] for prompt in prompts}) == 50
    assert prompts == texts([40] * 50, 2) != texts([40] * 50, 2, seed=1)
    assert [len(ids) for ids in token_ids([1, 30, 7])] == [1, 30, 7]


# --- one response ----------------------------------------------------------------------------------------------------


def read(*chunks):
    reader = ChunkReader()
    for number, chunk in enumerate(chunks):
        reader.read(json.dumps(chunk), number)
    reader.end()
    return reader


def completion(text, reason=None):
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def chat(delta, reason=None):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def usage(output_tokens):
    return {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": output_tokens}}


@pytest.mark.parametrize(
    ("chunks", "times", "tokens"),
    [
        ([completion("a"), completion("b", "length"), usage(2)], [0, 1], 2),
        ([completion("a"), completion("b", "length")], [0, 1], 2),  # the server does not count: one token per chunk
        ([completion("abc"), completion("de", "length"), usage(5)], [0, 1], 5),  # several tokens per chunk
        ([completion(""), completion("ö"), completion("", "stop"), usage(3)], [0, 1, 2], 3),  # half an ö; then EOS
        ([completion("a"), completion("", "stop"), usage(1)], [0], 1),  # the finish reason in a chunk of its own
        ([chat({"role": "assistant", "content": ""}), chat({"content": "a"}), chat({}, "stop"), usage(2)], [1, 2], 2),
        ([chat({"role": "assistant", "content": "a"}), chat({}, "stop"), usage(1)], [0], 1),
        ([chat({"role": "assistant", "content": ""}, "stop"), usage(1)], [0], 1),  # EOS is the only token
        ([chat({"role": "assistant"}), chat({}, "stop"), usage(0)], [1], 0),
        ([chat({"reasoning_content": "hm"}), chat({"content": "a"}, "stop"), usage(2)], [0, 1], 2),
    ],
)
def test_the_chunks_that_hold_tokens_count(chunks, times, tokens):
    reader = read(*chunks)
    assert reader.times == times
    assert reader.output_tokens == tokens
    assert reader.finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([usage(0)], "no token"),
        ([{"error": "plain"}], "plain"),
    ],
)
def test_counts_alone_or_an_error_that_is_a_plain_text_are_no_response(chunks, message):
    with pytest.raises(ValueError, match=message):
        read(*chunks)


# --- no coordinated omission -----------------------------------------------------------------------------------------


def test_latencies_grow_like_the_queue_of_a_slow_server_and_a_closed_loop_does_not_see_it():
    """The server runs one request at a time for `service` seconds; requests arrive regularly and twice as fast.

    The k-th request to finish (from 0) cannot finish before (k + 1) * service, and the last request is due at
    (count - 1) * gap, so the length of the queue follows by arithmetic. The user of the closed loop sends a request
    only when the server is idle, and finds it fast regardless of the load that users would have offered.
    """
    count, service, gap = 24, 0.025, 0.0125
    with Stub(pause=service, lanes=1) as stub:
        opened = run_load(stub.url, some(count), rate=1 / gap, cv=0)
        closed = run_load(stub.url, some(count), users=1)
    assert len(opened.ok) == len(closed.ok) == count
    finished = sorted(request.token_times[-1] for request in opened.ok)
    assert all(time >= 0.999 * (k + 1) * service for k, time in enumerate(finished))
    queue = [(k + 1) * service - k * gap for k in range(count)]  # the least latencies, first come, first served
    assert sum(opened.latencies("e2e")) >= 0.999 * sum(queue)
    assert opened.percentile("e2e", 100) >= 0.999 * queue[-1] > 12 * service
    assert min(closed.latencies("e2e")) >= 0.999 * service
    assert closed.percentile("e2e", 50) < opened.percentile("e2e", 50) / 2
    # Measured from the send times of the open loop, the same requests would have these latencies:
    meant = [request.token_times[-1] - number * gap for number, request in enumerate(closed.requests)]
    assert sum(meant) >= 0.999 * sum(queue)


def test_a_late_load_generator_includes_its_lag_and_reports_it(monkeypatch):
    """Each send blocks the event loop for 50 ms, so the last of five requests is sent at least 0.2 s late."""
    post = ClientSession.post

    def slow_post(*args, **kwargs):
        time.sleep(0.05)
        return post(*args, **kwargs)

    monkeypatch.setattr(ClientSession, "post", slow_post)
    with Stub() as stub:
        result = run_load(stub.url, some(5), rate=1000, cv=0)
    lags = sorted(request.sent - request.arrival for request in result.ok)
    assert all(lag >= 0.999 * (number * 0.05 - 0.004) for number, lag in enumerate(lags))
    assert sorted(result.latencies("e2e"))[-1] >= 0.24
    assert result.lag == lags[-1]
    assert "The load generator was up to" in str(result)


def test_requests_are_sent_when_they_are_due_however_slow_the_server_is():
    """The server responds once all requests have arrived: more than a hundred, aiohttp's default limit."""

    async def handle(stub, request, body):
        while len(stub.bodies) < 150:
            await asyncio.sleep(0.01)
        return await stub.respond(request, body)

    with Stub(handle=handle) as stub:
        result = run_load(stub.url, some(150), rate=1000)
    assert len(result.ok) == 150
    assert max(request.sent for request in result.ok) < min(request.ended for request in result.ok)


def test_users_of_a_closed_loop_wait_for_their_responses():
    running, most = 0, 0

    async def handle(stub, request, body):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return await stub.respond(request, body)

    with Stub(handle=handle) as stub:
        result = run_load(stub.url, some(9), users=3)
    assert most <= 3
    assert [request.request_id for request in result.requests] == list(range(9))
    assert result.duration >= 3 * 0.02
    assert result.rate is None and "3 users" in str(result)


def test_a_user_who_is_refused_waits_for_as_long_as_the_server_says():
    """Without this pause, a few users who are refused would use up all requests within moments."""
    served = itertools.count()

    async def handle(stub, request, body):
        if next(served) < 2:
            return web.json_response({"error": {"message": "full"}}, status=429, headers={"Retry-After": "1"})
        return await stub.respond(request, body)

    with Stub(handle=handle) as stub:
        result = run_load(stub.url, some(4), users=2)
    assert [request.status for request in result.requests] == ["refused", "refused", "ok", "ok"]
    assert min(request.sent for request in result.ok) >= 1


# --- what is sent ----------------------------------------------------------------------------------------------------


def test_a_request_is_what_openai_clients_send():
    with Stub() as stub:
        run_load(stub.url + "/v1/", [Request("Look", 3), ([7, 8], 2)], 100, cv=0, body={"temperature": 0})
        run_load(stub.url, [("Look", 3)], 1, chat=True)
    shared = {"model": "stub", "stream": True, "stream_options": {"include_usage": True}}
    assert {"prompt": "Look", "max_tokens": 3, "temperature": 0, **shared} in stub.bodies
    assert {"prompt": [7, 8], "max_tokens": 2, "temperature": 0, **shared} in stub.bodies
    assert {"messages": [{"role": "user", "content": "Look"}], "max_tokens": 3, **shared} in stub.bodies


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_every_outcome_of_a_request_is_counted_and_no_request_is_sent_twice():
    messages = {
        "refused": "429: the queue is full",
        "broken": "500: Internal Server Error",
        "slow": "timed out after 2 s",
        "error event": "the engine stopped",
        "hangs": "timed out after 2 s",
        "disconnects": "Client|Error",
        "ends": "broke off",
    }

    async def handle(stub, request, body):
        kind = body["prompt"]
        if kind == "refused":
            error = {"error": {"message": "the queue is full"}}
            return web.json_response(error, status=429, headers={"Retry-After": "3"})
        if kind == "broken":
            return web.Response(text="Internal  Server\nError", status=500)
        if kind == "slow":
            await asyncio.sleep(PATIENCE)
        response = await stub.headers(request)
        await stub.say(response, "word")
        if kind == "error event":
            await stub.event(response, {"error": {"message": "the engine stopped"}})
        if kind == "hangs":
            await asyncio.sleep(PATIENCE)
        if kind == "disconnects":
            request.transport.close()
        if kind == "ok":
            await stub.say(response, "", "stop")
        return response

    kinds = ["ok", *messages]
    with Stub(handle=handle) as stub:
        result = run_load(stub.url, [(kind, 5) for kind in kinds], rate=1000, timeout=2)
        wait_until(lambda: stub.gone == 2)
    results = dict(zip(kinds, result.requests, strict=True))

    assert len(stub.bodies) == len(kinds)
    assert {kind for kind in kinds if results[kind].status == "ok"} == {"ok"}
    assert {kind for kind in kinds if results[kind].status == "refused"} == {"refused"}
    assert results["refused"].retry_after == 3
    for kind, words in messages.items():
        assert re.search(words, results[kind].error), results[kind]
    assert results["hangs"].text == "word" and len(results["hangs"].token_times) == 1
    assert results["slow"].http_status is None and results["hangs"].http_status == 200
    assert stub.gone == 2  # requests that time out disconnect
    assert result.duration >= 1.99
    assert result.request_throughput == 1 / result.duration
    assert "8: 1 ok, 1 refused, 6 failed" in str(result) and "2 not completed: timed out after 2 s" in str(result)


def test_figures_without_a_completed_request():
    async def refuse(stub, request, body):
        return web.json_response({"error": {"message": "full"}}, status=429)

    with Stub(handle=refuse) as stub:
        result = run_load(stub.url, some(4), rate=100, limits={"ttft": 1})
        with pytest.raises(ValueError, match="no capacity: 429: full"):
            capacity(stub.url, lambda number: some(4))
    assert result.goodput == result.request_throughput == result.output_throughput == 0
    assert result.percentile("ttft", 50) is None
    assert "4: 0 ok, 4 refused, 0 failed" in str(result)
    assert "knee" not in table([result])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either a rate"),
        ({"rate": 1, "users": 1}, "either a rate"),
        ({"rate": 0}, "rate is"),
        ({"rate": float("inf")}, "rate is"),
        ({"rate": 1, "cv": -1}, "cv is"),
        ({"users": 0}, "users is"),
        ({"rate": 1, "timeout": 0}, "timeout"),
        ({"rate": 1, "requests": []}, "no requests to send"),
        ({"rate": 1, "limits": {"itl": 1}}, "no limit 'itl'"),
        ({"rate": 1, "url": "localhost:8000"}, "looks like http"),
        ({"rate": 1, "model": "other"}, "no model 'other'; it has stub"),
    ],
)
def test_an_invalid_setting_is_an_error_before_anything_is_sent(settings, message):
    with Stub() as stub:
        with pytest.raises(ValueError, match=message):
            run_load(**{"url": stub.url, "requests": some(3)} | settings)
        assert stub.bodies == []


def test_a_server_that_is_absent_or_requires_a_key_is_an_error():
    with Stub(key="secret") as stub:
        with pytest.raises(PermissionError, match="API key"):
            run_load(stub.url, some(1), 1)
        result = run_load(stub.url, some(1), 1, api_key="secret")
        assert len(result.ok) == 1
    with pytest.raises(ConnectionError, match="No server answers at"):
        run_load(stub.url, some(1), 1)
    with Stub(models=()) as stub:
        with pytest.raises(ValueError, match="lists no model"):
            run_load(stub.url, some(1), 1)
        assert len(run_load(stub.url, some(1), 1, model="any").ok) == 1


# --- figures ---------------------------------------------------------------------------------------------------------


def test_the_figures_are_the_servers_pauses():
    with Stub(pause=0.02) as stub:
        result = run_load(stub.url, some(6, max_tokens=5), rate=50, seed=5, limits={"e2e": 30, "ttft": 30})
    assert all(request.text == "word " * 5 and request.finish_reason == "length" for request in result.ok)
    assert 0.02 <= min(result.latencies("ttft")) < 2
    assert 0.1 <= min(result.latencies("e2e")) < 10
    assert 0 <= result.percentile("tpot", 50) < 2
    assert len(result.latencies("itl")) == 6 * 4
    assert result.duration == max(request.ended for request in result.requests) >= 0.2
    assert result.output_throughput * result.duration == pytest.approx(30)
    assert result.goodput == result.request_throughput
    assert "6 ok" in str(result) and "with e2e <= 30 s, ttft <= 30 s (100% of all)" in str(result)
    assert [len(request.token_times) for request in result.requests] == [5] * 6


def test_the_timeline_of_a_request_shows_its_latencies():
    picture = plots.request_timeline(RequestResult(0, 1.0, [1.2, 1.25, 1.4], 1.01, 1.4, output_tokens=3))
    assert "3 chunks of tokens, sent after 10 ms: TTFT 200 ms; E2E 400 ms; longest gap (ITL) 150 ms." in picture.alt
    assert "TTFT 200 ms; E2E 200 ms." in plots.request_timeline(RequestResult(0, 1.0, [1.2], 1.0, 1.2)).alt


def made(rate, e2e, throughput):
    """Return a result of 10 requests, all of the same latency, that took 10 / throughput seconds."""
    end = 10 / throughput
    requests = [RequestResult(n, end - e2e, [end - e2e / 2, end], end - e2e, end, output_tokens=2) for n in range(10)]
    return LoadResult({"rate": rate}, requests)


def test_a_table_of_a_sweep_marks_the_knee():
    results = [made(1, 1, 1), made(4, 1.1, 4), made(8, 1.5, 6), made(16, 4, 6.8)]
    assert ["<- knee" in line for line in table(results).splitlines()] == [False, False, False, True, False]


def test_a_sweep_of_a_server_with_two_lanes_finds_its_capacity_and_overload():
    """Each request takes 20 ms in one of two lanes: at most 100 requests per second on any machine."""
    asked = []

    def requests(number):
        asked.append(number)
        return some(6)

    with Stub(pause=0.02, lanes=2) as stub:
        most = capacity(stub.url, requests, progress=False)
        assert 0 < most <= 100
        results = sweep(stub.url, [most * 4, most / 4], requests, cv=0)
        found = sweep(stub.url, None, requests, cv=0)
    slow, fast = results
    assert slow.rate == fast.rate / 16 == pytest.approx(most / 4)
    assert fast.percentile("e2e", 100) >= 3 * 0.02 - 5 / fast.rate
    assert len(found) == 7 and found[-1].rate == pytest.approx(8 * found[0].rate)
    assert len(set(asked[-7:])) == 7


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_command_line_measures(capsys):
    options = ["--requests", "6", "--prompt", "fixed:40", "--output", "uniform:2-4", "--body", '{"ignore_eos": true}']
    with Stub() as stub:
        assert main(["--url", stub.url, "--rate", "100", *options, "--limit", "ttft=5"]) == 0
    assert {prompt_tokens(body) for body in stub.bodies} == {45}, "30 words, and the stub has 3 tokens for 2 words"
    assert all(2 <= body["max_tokens"] <= 4 and body["ignore_eos"] for body in stub.bodies)
    output = capsys.readouterr()
    assert "6: 6 ok" in output.out and "with ttft <= 5 s (100% of all)" in output.out
    assert output.err == ""


def test_the_command_line_sweeps_with_new_texts_of_the_same_lengths(capsys):
    with Stub(pause=0.001) as stub:
        assert main(["--url", stub.url, "--sweep", "50", "100", "--requests", "5", "--mix", "write"]) == 0
    first, second = stub.bodies[:5], stub.bodies[5:]
    for key, same in ("max_tokens", True), ("prompt", False):
        one, other = (sorted(body[key] for body in bodies) for bodies in (first, second))
        assert (one == other) is same
    assert capsys.readouterr().out.count("<- knee") == 1


def test_the_command_line_as_a_closed_loop_of_chats_and_with_token_ids(capsys):
    with Stub() as stub:
        options = ["--url", stub.url, "--requests", "4", "--output", "fixed:2"]
        assert main([*options, "--closed", "2", "--chat", "--body", '{"temperature": 1}']) == 0
        assert main([*options, "--rate", "100", "--prompt", "fixed:9", "--token-ids"]) == 0
    chats, ids = stub.bodies[:4], stub.bodies[4:]
    assert all(body["messages"] and body["temperature"] == 1 for body in chats)
    assert [len(body["prompt"]) for body in ids] == [9] * 4
    assert "2 users" in capsys.readouterr().out


def test_a_failed_request_is_the_exit_status_and_a_refused_one_is_not(capsys):
    async def handle(stub, request, body, status):
        if len(stub.bodies) == 2:
            return web.json_response({"error": {"message": "no"}}, status=status)
        return await stub.respond(request, body)

    for status, code in (429, 0), (500, 1):
        with Stub(handle=partial(handle, status=status)) as stub:
            assert main(["--url", stub.url, "--rate", "50", "--requests", "5", "--output", "fixed:1"]) == code
        assert f"1 not completed: {status}: no" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rate", "1", "--closed", "2"], "--rate and --closed exclude each other"),
        (["--chat", "--token-ids"], "cannot be combined with --chat"),
        (["--output", "gauss:5"], "There is no distribution 'gauss:5'; there are fixed:N, uniform:LOW-HIGH"),
        (["--limit", "ttft=soon"], "not 'ttft=soon'"),
        (["--body", "[]"], "give a JSON object"),
        (["--requests", "0"], "--requests is at least 1"),
        (["--model", "other"], "The server has no model 'other'; it has stub"),
    ],
)
def test_a_bad_setting_is_an_error_of_one_line(capsys, argv, message):
    with Stub() as stub, pytest.raises(SystemExit) as end:
        main(["--url", stub.url, *argv])
    (error,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and error.startswith("python -m helpers.load_test: ") and message in error


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to send")
def test_ctrl_c_disconnects_and_exits():
    with Stub(pause=PATIENCE) as stub:
        command = [sys.executable, "-m", "helpers.load_test", "--url", stub.url, "--closed", "3", "--token-ids"]

        def interruptible():  # even if SIGINT is ignored here, as in a shell's background job
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=ROOT, stderr=pipe, text=True, preexec_fn=interruptible) as process:
            wait_until(lambda: len(stub.bodies) == 3 or process.poll() is not None)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=PATIENCE)
        wait_until(lambda: stub.gone == 3)
    assert process.returncode == 130
    assert "Traceback" not in error
