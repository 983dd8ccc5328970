"""What every iteration did: the one record from which all counts, timelines and latencies are taken.

An *iteration* is one forward pass. A server has a fixed number of rows, and in every iteration each row did one of
five things. Two of them yield a token; the other three are what this course is about getting rid of.

    prefill   read a prompt and yielded the first token
    decode    read one token and yielded the next
    finished  was computed although its request is done: it waits for the longest in its batch
    stalled   was not computed: its request waits while others are prefilled
    empty     had no request

Counts are facts, the same on every machine; seconds illustrate them.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

WORK = ("prefill", "decode", "finished", "stalled", "empty")


@dataclass(frozen=True)
class Slot:
    """One row in one iteration.

    Attributes:
        work: one of WORK.
        request_id: whose row this is; None if empty.
        tokens: real tokens that the forward pass read in this row.
        padding: tokens that it read for nothing: pads, and the input of a finished row.
        new_tokens: output tokens that it yielded.
    """

    work: str = "empty"
    request_id: Hashable = None
    tokens: int = 0
    padding: int = 0
    new_tokens: int = 0


@dataclass(frozen=True)
class Iteration:
    """One forward pass: what each row did, when it began (seconds since the run's start) and how long it took."""

    slots: tuple[Slot, ...]
    start: float
    seconds: float


class Trace:
    """All iterations of a run on `rows` rows. A request keeps its row from its prefill until it is done."""

    def __init__(self, rows: int):
        self.rows = rows
        self.iterations: list[Iteration] = []
        self._holders: list[Hashable] = [None] * rows
        self._done: set[Hashable] = set()

    def record(self, before: dict, after: dict, start: float, seconds: float) -> None:
        """Note the forward pass that turned the batch `before` into the batch `after`."""
        ids = before["request_ids"]
        self._holders = [None if held in self._done and held not in ids else held for held in self._holders]
        for request_id in ids:
            if request_id not in self._holders:
                self._holders[self._holders.index(None)] = request_id

        kind = "decode" if "past_key_values" in before else "prefill"
        width = before["input_ids"].size(1)
        real = before["attention_mask"][:, -width:].sum(dim=1).tolist()
        computed = {}
        for row, request_id in enumerate(ids):
            if before["tokens_remaining"][row] == 0:
                computed[request_id] = Slot("finished", request_id, padding=width)
            else:
                computed[request_id] = Slot(kind, request_id, real[row], width - real[row], new_tokens=1)
        self._done |= {id for id, left in zip(ids, after["tokens_remaining"], strict=True) if left == 0}

        slots = (computed.get(held, Slot("stalled", held) if held is not None else Slot()) for held in self._holders)
        self.iterations.append(Iteration(tuple(slots), start, seconds))

    # --- counts: the same on every machine -------------------------------------------------------------------

    @property
    def forward_passes(self) -> int:
        return len(self.iterations)

    @property
    def slot_steps(self) -> int:
        """Rows times forward passes: what the run could have yielded, one token each."""
        return self.rows * len(self.iterations)

    @property
    def work(self) -> Counter:
        """How many slot-steps went into each kind of work; the sum is `slot_steps`."""
        return Counter(slot.work for iteration in self.iterations for slot in iteration.slots)

    @property
    def output_tokens(self) -> int:
        return sum(slot.new_tokens for iteration in self.iterations for slot in iteration.slots)

    @property
    def wasted_slot_steps(self) -> int:
        """Slot-steps that yielded no token."""
        return self.slot_steps - self.output_tokens

    @property
    def prompt_tokens(self) -> int:
        return sum(slot.tokens for iteration in self.iterations for slot in iteration.slots if slot.work == "prefill")

    @property
    def prompt_padding(self) -> int:
        """Pad tokens that prefills read beside the prompts' own tokens."""
        return sum(slot.padding for iteration in self.iterations for slot in iteration.slots if slot.work == "prefill")

    # --- seconds: illustration -------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        return self.iterations[-1].start + self.iterations[-1].seconds if self.iterations else 0.0

    @property
    def token_times(self) -> dict[Hashable, list[float]]:
        """For each request, when each of its tokens was there, in seconds since the run's start."""
        times: dict[Hashable, list[float]] = {}
        for iteration in self.iterations:
            for slot in iteration.slots:
                if slot.new_tokens:
                    times.setdefault(slot.request_id, []).append(iteration.start + iteration.seconds)
        return times
