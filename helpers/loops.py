"""The three loops: one request at a time, static batches, continuous batching.

All three give every request the same tokens. They differ in when a request may join and leave, and therefore in the
number of forward passes for the same work. Each returns a `Trace`, from which that can be counted.
"""

import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from tqdm.auto import tqdm

from .batching import filter_batch, generate_next_token, init_batch, merge_batches
from .engine import RequestOutput
from .models import default_pair
from .request import Request, as_requests
from .trace import Trace


@dataclass(frozen=True)
class Generation:
    """The outputs of a run, in the order of its requests, and the trace of its iterations."""

    outputs: list[RequestOutput]
    trace: Trace


def generate_alone(
    requests: Sequence[Request | tuple[str, int]], model=None, tokenizer=None, progress=False
) -> Generation:
    """Run one request after another, each in a batch of its own: the tokens that every other loop must reproduce."""
    return generate_static(requests, 1, model, tokenizer, progress)


def generate_static(
    requests: Sequence[Request | tuple[str, int]], max_batch_size: int = 8, model=None, tokenizer=None, progress=False
) -> Generation:
    """Fill a batch, run it until its longest request has finished, then fill the next one.

    Args:
        requests: `Request`s or `(prompt, max_tokens)` tuples, served in this order.
        max_batch_size: rows in a batch.
        model, tokenizer: `load_model()`'s default pair if omitted.
        progress: show a tqdm bar that counts finished requests.

    Raises:
        ValueError: `init_batch` refuses a request, or max_batch_size is below 1.
    """
    run = _Run(requests, max_batch_size, model, tokenizer, progress)
    while run.waiting:
        batch = run.admit(max_batch_size)
        while any(left > 0 for left in batch["tokens_remaining"]):
            batch = run.step(batch)
    return run.result()


def generate_continuous(
    requests: Sequence[Request | tuple[str, int]], max_batch_size: int = 8, model=None, tokenizer=None, progress=False
) -> Generation:
    """Decide before every iteration which requests run: when one finishes, the next one takes its row at once.

    This is iteration-level scheduling (Yu et al., Orca, OSDI 2022). Arguments and errors as for `generate_static`.
    """
    run = _Run(requests, max_batch_size, model, tokenizer, progress)
    running = {"request_ids": []}  # empty
    while run.waiting or running["request_ids"]:
        free = max_batch_size - len(running["request_ids"])
        if run.waiting and free:
            joining = run.step(run.admit(free))  # prefill
            running, _ = filter_batch(merge_batches(running, joining))
        running = run.step(running)  # decode
        running, _ = filter_batch(running)
    return run.result()


class _Run:
    """The state that the loops share: queue, trace, finished requests, progress bar."""

    def __init__(self, requests, rows: int, model, tokenizer, progress: bool):
        if rows < 1:
            raise ValueError(f"max_batch_size is at least 1, not {rows}.")
        self.requests = as_requests(requests)
        self.prompts = {request.request_id: request.prompt for request in self.requests}
        self.model, self.tokenizer = default_pair(model, tokenizer)
        # Refuse requests that cannot run before any of them runs.
        init_batch(self.requests, self.model, self.tokenizer)
        self.waiting = deque(self.requests)
        self.trace = Trace(rows)
        self.outputs: dict[Hashable, RequestOutput] = {}
        self.bar = tqdm(total=len(self.requests), unit="request", disable=not progress)
        self.start = time.perf_counter()

    def admit(self, rows: int) -> dict:
        """Return a new batch of the next `rows` waiting requests, or of all of them if there are fewer."""
        joining = [self.waiting.popleft() for _ in range(min(rows, len(self.waiting)))]
        return init_batch(joining, self.model, self.tokenizer)

    def step(self, batch: dict) -> dict:
        """Run and trace one iteration, and make the outputs of the requests that it finishes."""
        if not batch["request_ids"]:
            return batch
        start = time.perf_counter()
        after = generate_next_token(batch, self.model, self.tokenizer)
        self.trace.record_pass(batch, after, start - self.start, time.perf_counter() - start)
        for row, request_id in enumerate(after["request_ids"]):
            if after["tokens_remaining"][row] == 0 and request_id not in self.outputs:
                prompt = self.prompts[request_id]
                text = after["responses"][row].removeprefix(prompt)
                self.outputs[request_id] = RequestOutput(
                    request_id, prompt, text, after["token_ids"][row], after["finish_reasons"][row]
                )
                self.bar.update()
        return after

    def result(self) -> Generation:
        self.bar.close()
        return Generation([self.outputs[request.request_id] for request in self.requests], self.trace)
