"""The engine as a server that any OpenAI client can use: `python -m helpers.server`.

    engine_thread.py    one thread runs the engine; the event loop submits, listens and takes back
    protocol.py         OpenAI's requests, checked
    answers.py          OpenAI's answers, made from the engine's outputs
    app.py              the HTTP front: which address does what, and what goes wrong with which status
    watch.py            what the engine does, for people: the page's events
    measures.py         the same for machines: Prometheus metrics
    launch.py           a server in a process of its own, for lessons and load tests

Nothing here decides which request runs when: that is the scheduler's, and the engine below is the one of lesson 6.
"""

from .launch import launch

__all__ = ["launch"]
