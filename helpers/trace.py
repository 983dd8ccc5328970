"""What every iteration did: the one record from which all counts, timelines and latencies are taken.

An *iteration* is one forward pass; where prefills and decodes cannot share one, a *step* of the scheduler is two of
them or more. A server has a fixed number of rows, and in every iteration each row did one of five things. Two of them
yield a token; the other three are what this course is about getting rid of.

    prefill   read a prompt and yielded the first token, or read a chunk of it and yielded nothing yet
    decode    read one token and yielded the next
    finished  was computed although its request is done: it waits for the longest in its batch
    stalled   was not computed: its request waits while others are prefilled
    empty     had no request

Counts are facts, the same on every machine; seconds illustrate them.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace

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
    """One forward pass: what each row did, when it began (seconds since the run's start) and how long it took.

    `step` counts the scheduler's decisions: passes with the same one were planned together.
    """

    slots: tuple[Slot, ...]
    start: float
    seconds: float
    step: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that the forward pass computed, pads included."""
        return sum(slot.tokens + slot.padding for slot in self.slots)


class Trace:
    """The iterations of a run on `rows` rows. A request keeps its row from its prefill until it is done.

    Args:
        rows: how many there are.
        keep: remember only the last so many iterations, as a server must that runs for ever; None for all.
    """

    def __init__(self, rows: int, keep: int | None = None):
        self.rows = rows
        self.iterations: list[Iteration] | deque[Iteration] = [] if keep is None else deque(maxlen=keep)
        self._holders: list[Hashable] = [None] * rows
        self._done: set[Hashable] = set()

    def record(self, before: dict, after: dict, start: float, seconds: float) -> None:
        """Note the forward pass that turned the batch `before` into the batch `after`."""
        kind = "decode" if "past_key_values" in before else "prefill"
        width = before["input_ids"].size(1)
        real = before["attention_mask"][:, -width:].sum(dim=1).tolist()
        slots = []
        for row, request_id in enumerate(before["request_ids"]):
            if before["tokens_remaining"][row] == 0:
                slots.append(Slot("finished", request_id, padding=width))
            else:
                slots.append(Slot(kind, request_id, real[row], width - real[row], new_tokens=1))
        self.add(slots, start, seconds, step=self.forward_passes)
        self.free(id for id, left in zip(after["request_ids"], after["tokens_remaining"], strict=True) if left == 0)

    def add(self, slots: Iterable[Slot], start: float, seconds: float, step: int) -> None:
        """Note a forward pass in which some rows took part; whoever else holds a row was stalled."""
        computed = {slot.request_id: slot for slot in slots}
        self._done -= {id for id, slot in computed.items() if slot.work != "finished"}  # here again after a preemption
        self._holders = [None if held in self._done and held not in computed else held for held in self._holders]
        self._done.intersection_update(self._holders)
        for request_id in computed:
            if request_id not in self._holders:
                self._holders[self._holders.index(None)] = request_id
        slots = (computed.get(held, Slot("stalled", held) if held is not None else Slot()) for held in self._holders)
        self.iterations.append(Iteration(tuple(slots), start, seconds, step))

    def free(self, request_ids: Iterable[Hashable]) -> None:
        """These requests are done: their rows are free, unless a batch computes them all the same."""
        self._done.update(request_ids)

    def retimed(self, cost: Callable[[Iteration], float] = lambda iteration: 1) -> "Trace":
        """The same iterations on another clock: each takes as long as `cost` says, and none waits for another.

        Seconds differ from run to run; counts do not. With the default, time is counted in forward passes.
        """
        other, now = Trace(self.rows), 0.0
        for iteration in self.iterations:
            seconds = cost(iteration)
            other.iterations.append(replace(iteration, start=now, seconds=seconds))
            now += seconds
        return other

    # --- counts: the same on every machine -------------------------------------------------------------------

    @property
    def forward_passes(self) -> int:
        return len(self.iterations)

    @property
    def steps(self) -> int:
        """Decisions of the scheduler that led to a forward pass."""
        return len({iteration.step for iteration in self.iterations})

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
        """Tokens that prefills read, those that had to be read again after a preemption included."""
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
