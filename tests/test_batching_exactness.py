"""The claim on which the course rests: in whatever order requests join and leave, each one gets its own tokens.

Hypothesis applies the four verbs in random sequences to several batches at once. After every step, each row must hold
exactly the first tokens of what `model.generate` gives its prompt alone. A sequence that breaks the claim is printed as
code; add `Phase.shrink` to PHASES to get the shortest one, which takes some minutes.
"""

from collections import Counter

import pytest
from conftest import LONGEST, PROMPTS, alone, random_pair
from hypothesis import Phase, settings, stateful
from hypothesis import strategies as st

from helpers import Request, filter_batch, generate_next_token, init_batch, load_model, merge_batches

PHASES = [Phase.generate]
LISTS = ("request_ids", "responses", "token_ids", "tokens_remaining", "finish_reasons")
MAX_TOKENS = st.integers(1, 10) | st.integers(1, LONGEST)  # many rows finish while others run on
REQUESTS = st.lists(st.tuples(st.sampled_from(PROMPTS), MAX_TOKENS), min_size=1, max_size=3)
EVENTS = (
    "merges of unequal widths",
    "merges with finished rows",
    "merges with an empty batch",
    "filters that trim",
    "filters that empty a batch",
)
PAIRS = {"embedded": load_model, "gpt2": lambda: random_pair("gpt2"), "llama": lambda: random_pair("llama")}


def end_of(model, tokenizer, request: Request) -> tuple[list[int], str]:
    """Return the tokens that a request gets alone, and why they end."""
    ids = alone(model, tokenizer, request.prompt, request.max_tokens)
    return ids, "stop" if ids[-1] == tokenizer.eos_token_id else "length"


class BatchingMachine(stateful.RuleBasedStateMachine):
    """Runs up to four batches, and remembers one: the verbs are pure, so an old batch can be run again."""

    pair = staticmethod(load_model)
    events: Counter  # in all examples together

    def __init__(self):
        super().__init__()
        self.model, self.tokenizer = self.pair()
        self.requests: dict[int, Request] = {}
        self.alive: list[dict] = []
        self.old: dict | None = None

    # --- events ---

    @stateful.initialize(requests=REQUESTS)
    def begin(self, requests):
        self.init(requests, prefill=True)

    @stateful.precondition(lambda self: len(self.alive) < 4)
    @stateful.rule(requests=REQUESTS, prefill=st.booleans())
    def init(self, requests, prefill):
        requests = [Request(*request, len(self.requests) + row) for row, request in enumerate(requests)]
        self.requests |= {request.request_id: request for request in requests}
        batch = init_batch(requests, self.model, self.tokenizer)
        self.alive.append(self.run(batch) if prefill else batch)

    @stateful.precondition(lambda self: self.alive)
    @stateful.rule(which=st.integers(0, 3), steps=st.integers(1, 12), filtering=st.booleans())
    def generate(self, which, steps, filtering):
        batch = self.take(which)
        self.old = batch
        for _ in range(steps):
            batch = self.run(batch)
            if filtering:
                batch = self.filtered(batch)
        self.alive.append(batch)

    @stateful.precondition(lambda self: len([batch for batch in self.alive if "past_key_values" in batch]) > 1)
    @stateful.rule(first=st.integers(0, 3), second=st.integers(0, 3))
    def merge(self, first, second):
        first, second = self.take(first, prefilled=True), self.take(second, prefilled=True)
        self.alive.append(merge_batches(first, second))
        widths = [batch["attention_mask"].size(1) for batch in (first, second) if batch["request_ids"]]
        self.events["merges of unequal widths"] += len(set(widths)) > 1
        self.events["merges with finished rows"] += 0 in first["tokens_remaining"] + second["tokens_remaining"]
        self.events["merges with an empty batch"] += len(widths) < 2

    @stateful.precondition(lambda self: self.alive)
    @stateful.rule(which=st.integers(0, 3))
    def filter(self, which):
        self.alive.append(self.filtered(self.take(which)))

    @stateful.precondition(lambda self: self.old is not None)
    @stateful.rule(steps=st.integers(1, 4))
    def run_an_old_batch_again(self, steps):
        batch = self.old
        for _ in range(steps):
            batch = self.run(batch)
        self.check(batch)

    def teardown(self):
        """Merge all batches and run them to the end."""
        merged = {"request_ids": []}
        for batch in self.alive:
            merged = merge_batches(merged, batch if "past_key_values" in batch else self.run(batch))
        while merged["request_ids"]:
            merged, _ = filter_batch(merged)
            merged = self.run(merged)
            self.check(merged)

    # --- checks ---

    @stateful.invariant()
    def every_row_is_correct(self):
        for batch in self.alive:
            self.check(batch)

    def check(self, batch):
        for row, id in enumerate(batch["request_ids"]):
            ids, reason = end_of(self.model, self.tokenizer, self.requests[id])
            actual = batch["token_ids"][row]
            finished = len(actual) == len(ids)
            assert actual == ids[: len(actual)], f"request {id}, row {row}"
            assert batch["finish_reasons"][row] == (reason if finished else None)
            assert (batch["tokens_remaining"][row] == 0) == finished
        assert {len(batch[key]) for key in LISTS} == {len(batch["request_ids"])}
        if not batch["request_ids"]:
            return
        assert batch["attention_mask"][:, -1].all(), "the newest token is in the last column"
        assert batch["input_ids"].shape == batch["position_ids"].shape
        if "past_key_values" in batch:
            for row, left in enumerate(batch["tokens_remaining"]):
                if left > 0:
                    assert batch["input_ids"][row].tolist() == batch["token_ids"][row][-1:]
                    assert batch["position_ids"][row].item() == batch["attention_mask"][row].sum() - 1
            for layer in batch["past_key_values"].layers:
                rows, _, width, _ = layer.keys.shape
                assert layer.values.shape[:3] == layer.keys.shape[:3]
                assert batch["attention_mask"].shape == (rows, width + 1)
                assert rows == len(batch["request_ids"])

    # --- helpers ---

    def filtered(self, batch):
        filtered, removed = filter_batch(batch)
        assert removed == [row for row, reason in enumerate(batch["finish_reasons"]) if reason is not None]
        assert filtered["request_ids"] == [id for id, left in zip_rows(batch, "tokens_remaining") if left > 0]
        if removed and filtered["request_ids"]:
            assert filtered["attention_mask"][:, 0].any(), "padding that all rows share must be trimmed"
            self.events["filters that trim"] += filtered["attention_mask"].size(1) < batch["attention_mask"].size(1)
        self.events["filters that empty a batch"] += bool(removed) and not filtered["request_ids"]
        return filtered

    def run(self, batch):
        return generate_next_token(batch, self.model, self.tokenizer)

    def take(self, which, prefilled=False):
        """Remove and return one of the batches, or one of those that can be merged."""
        indices = [index for index, batch in enumerate(self.alive) if not prefilled or "past_key_values" in batch]
        return self.alive.pop(indices[which % len(indices)])


def zip_rows(batch, key):
    return zip(batch["request_ids"], batch[key], strict=True)


@pytest.mark.parametrize(("family", "examples"), [("embedded", 8), ("gpt2", 40), ("llama", 12)])
def test_in_whatever_order_requests_join_and_leave_each_one_gets_its_own_tokens(family, examples):
    attributes = {"pair": staticmethod(PAIRS[family]), "events": Counter()}
    machine = type(f"Batching_{family}", (BatchingMachine,), attributes)
    some = settings(max_examples=examples, stateful_step_count=30, phases=PHASES)
    stateful.run_state_machine_as_test(machine, settings=some)
    assert all(machine.events[event] >= 2 for event in EVENTS), machine.events
