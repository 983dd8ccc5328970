"""The events of the page, and what they say about finished requests."""

from contextlib import ExitStack
from functools import partial

import httpx

from helpers.server.live_view import MAX_LISTENERS, LiveView
from tests.support.gated_thread import in_loop, running, submit, texts
from tests.support.serving import OWL, PATIENCE, body, error_of, events_of, post, serving, wait_until


def iterations_until(server, num_finished: int) -> list[int]:
    """Follow a server's events until as many requests have finished; return the numbers of the iterations."""
    messages = []
    with httpx.stream("GET", server.url + "/events", timeout=PATIENCE) as watched:
        for message in events_of(watched.iter_lines()):
            messages.append(message)
            if sum(len(message["finished"]) for message in messages) >= num_finished:
                return [iteration["n"] for message in messages for iteration in message["iterations"]]


def test_a_listener_that_comes_later_gets_the_last_iterations_and_then_new_ones_without_a_gap():
    with serving() as server:
        for number in (1, 2):  # the second one comes after a time without listeners
            post(server, **body(OWL, 10, ignore_eos=True)).raise_for_status()
            assert iterations_until(server, number) == list(range(10 * number))


def test_more_listeners_than_allowed_are_503_until_one_leaves():
    with serving() as server, httpx.Client(timeout=PATIENCE) as client, ExitStack() as stack:
        watch = partial(client.stream, "GET", server.url + "/events")
        streams = [stack.enter_context(watch()) for _ in range(MAX_LISTENERS)]
        assert {stream.status_code for stream in streams} == {200}
        refused = httpx.get(server.url + "/events")
        error = error_of(refused, 503)
        assert error["code"] == "too_many_listeners" and f"{MAX_LISTENERS} pages" in error["message"]
        assert refused.headers["retry-after"] == "1"
        assert post(server, **body(OWL, 2)).status_code == 200, "other requests are not affected"
        streams.pop().close()

        def again():
            with watch() as stream:
                return stream.status_code == 200

        wait_until(again)
        stack.close()
        server.assert_empty()


@in_loop
async def test_a_listener_that_has_read_nothing_for_a_while_gets_all_iterations_in_one_event():
    async with running() as thread:
        events = LiveView(thread).events()
        await anext(events)
        await texts(await submit(thread, "a", 9))
        (event,) = events_of([await anext(events)])
        assert [iteration["n"] for iteration in event["iterations"]] == list(range(9))
