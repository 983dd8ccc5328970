"""Tokenization of the server's prompts: short requests do not wait for long ones, and long ones are refused early."""

import asyncio
import threading
from concurrent.futures import wait

import httpx
import pytest
from conftest import random_pair

from helpers import Engine, EngineConfig
from helpers.server.prompt_tokenizer import LONG
from tests.support.gated_thread import in_loop, is_empty, running, submit, texts
from tests.support.gated_thread import wait_until as wait_in_loop
from tests.support.serving import (
    OWL,
    PATIENCE,
    BackgroundRequest,
    RawConnection,
    body,
    error_of,
    post,
    serving,
    wait_until,
)


@in_loop
async def test_a_short_request_does_not_wait_while_long_ones_are_tokenized():
    async with running() as thread:
        validate, begun, proceed = thread.engine.validator.validate, threading.Event(), threading.Event()

        def slow(prompt, params):
            if len(prompt) >= LONG or params.bad_words:
                begun.set()
                proceed.wait(PATIENCE)
            return validate(prompt, params)

        thread.engine.validator.validate = slow
        long = [asyncio.ensure_future(submit(thread, [[1] * LONG], 2, str(n))) for n in range(3)]
        long.append(asyncio.ensure_future(submit(thread, ["a"], 2, "words", bad_words=["b"] * 1000)))
        await wait_in_loop(begun.is_set)
        assert await texts(await submit(thread, "a", 2)) == {0: "bc"}
        assert not any(future.done() for future in long)
        proceed.set()
        *refused, with_words = await asyncio.gather(*long, return_exceptions=True)
        assert all(isinstance(error, ValueError) for error in refused)
        await texts(with_words)
        assert is_empty(thread)


def test_the_prompts_of_clients_that_have_left_are_not_tokenized():
    with serving() as server:
        tokenizer, tokenized, proceed = server.thread.prompt_tokenizer, [], threading.Event()
        validate = tokenizer._validate

        def slow(prompts, *others):
            tokenized.extend(prompts)
            assert proceed.wait(PATIENCE)
            return validate(prompts, *others)

        tokenizer._validate = slow

        def num_tasks() -> int:
            return server.evaluate(lambda: len(server.server.server_state.tasks))

        try:
            leaving = []
            for prompt in "abc":
                leaving.append(RawConnection.posting(server, {"prompt": prompt}))
                wait_until(lambda: num_tasks() == len(leaving) and tokenized == ["a"])
            for connection in leaving:
                connection.close()
            wait_until(lambda: num_tasks() == 0)
            assert server.num_in_flight() == 0
        finally:
            proceed.set()
        assert post(server, prompt="d").status_code == 200
        assert tokenized == ["a", "d"]
        server.assert_empty()


@pytest.mark.parametrize("template", [None, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"])
def test_megabytes_that_the_context_cannot_hold_are_refused_before_they_are_tokenized(monkeypatch, template):
    model, tokenizer = random_pair("gpt2")
    tokenizer.chat_template = template
    with serving(Engine(model, tokenizer, EngineConfig(max_batch_size=2, trace_length=1000))) as server:
        monkeypatch.setattr(type(tokenizer), "__call__", lambda *_, **__: pytest.fail("it was tokenized"))
        text = "x" * (2**20 - 200)
        chat = {"messages": [{"role": "user", "content": text}]}
        for path, sent in (("/v1/completions", body(text)), ("/v1/chat/completions", chat)):
            response = httpx.post(server.url + path, json=sent, timeout=PATIENCE)
            message = error_of((response.status_code, response.json()), 400)["message"]
            assert "than the model's context has, 128: shorten the prompt" in message
        server.assert_empty()


@pytest.fixture
def endless_compilation(monkeypatch, tmp_path):
    """Workers that never answer, and are given ten minutes."""
    (tmp_path / "endless.py").write_text(
        "import time\ninput()\nprint('ready', flush=True)\ninput()\ntime.sleep(10**6)\n"
    )
    monkeypatch.setattr("helpers.features.structured_outputs.worker.PROGRAM", str(tmp_path / "endless.py"))
    monkeypatch.setattr("helpers.features.structured_outputs.compilation.DEADLINE", 600)


DESCRIBED = body(OWL, 2, structured_outputs={"json": {"type": "integer"}})


def compiler_of(server):
    tokenizer = server.thread.prompt_tokenizer
    (feature,) = tokenizer._compilers()
    return feature.compiler


def is_compiling(server) -> bool:
    return server.thread.prompt_tokenizer._slow._work_queue.empty() and compiler_of(server).worker._lock.locked()


def test_what_is_compiled_in_a_moment_waits_for_nothing_that_takes_long_and_clients_may_leave(
    endless_compilation, monkeypatch
):
    known, quick, small = ({"json": {"type": "boolean"}}, {"json": {"type": "null"}}, {"choice": ["a", "b"]})
    with serving() as server:
        with monkeypatch.context() as patch:
            patch.setattr(compiler_of(server).quick_worker, "check", lambda *_: True)
            assert post(server, **body(OWL, 2, structured_outputs=known)).status_code == 200
        leaving = [RawConnection.posting(server, DESCRIBED, "/v1/completions") for _ in range(3)]
        wait_until(lambda: is_compiling(server))
        monkeypatch.setattr(compiler_of(server).quick_worker, "check", lambda *_: True)
        for described in (known, quick, small):
            assert post(server, **body(OWL, 2, structured_outputs=described)).status_code == 200
        assert post(server, **body(OWL, 2)).status_code == 200
        for connection in leaving:
            connection.close()
        server.assert_empty()


def test_compilation_does_not_delay_the_end_of_a_server(endless_compilation):
    with serving() as server:
        staying = [BackgroundRequest(server, **DESCRIBED) for _ in range(2)]
        wait_until(lambda: compiler_of(server).worker._lock.locked())
        worker = compiler_of(server).worker
        server.server.config.timeout_graceful_shutdown = 1  # second, after which what still waits is given up
        server.end()
        assert worker._process is None or worker._process.poll() is not None
        assert not wait([request._running for request in staying], PATIENCE).not_done
        assert all(request.response is None or request.response.status_code >= 400 for request in staying)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tokenizer")]
