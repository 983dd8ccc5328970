"""The engine as a server that any OpenAI client can use: `python -m helpers.server`.

    app.py                the HTTP application
    addresses.py          which address does what
    adapters.py           adapters as models, loaded and unloaded by clients where that is allowed
    protocol.py           OpenAI's requests, validated (strict.py: unknown parameters are refused)
    chat.py               the prompt that a chat template makes of messages
    structured_fields.py  what an output must match, as requests describe it
    responses.py          a request's outputs as one JSON body or as a stream of events
    formats.py            OpenAI's response bodies; text_offsets.py says where their tokens begin
    middleware.py         what is checked before a request's body is read: key and length
    http_errors.py        why requests are refused or end early, and the status of each error
    engine_client.py      accepts requests or refuses them, and hands each output to its stream
    engine_thread.py      the thread that runs the engine; the event loop submits, reads and cancels
    worker_thread.py      a thread that loads the model and then computes
    prompt_tokenizer.py   the threads that turn prompts into token ids
    output_delta.py       what is new in an output
    response_stream.py    the outputs of one request on their way to its client
    output_budget.py      how much of all responses may wait for clients to read
    connections.py        how long the server waits for a client
    live_view.py          what the engine does, for people: the page's events (snapshot.py: what they are made of)
    server_metrics.py     the same for monitoring: Prometheus metrics
    options.py            the options of the command line
    launch.py             a server in its own process, for lessons and load tests

The server never decides which request runs when. That is the task of the engine's scheduler (lesson 4).
"""

from .launch import launch

__all__ = ["launch"]
