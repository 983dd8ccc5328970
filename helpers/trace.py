"""A record of every forward pass, from which all counts, timelines and latencies are computed.

Most iterations take one forward pass. Where prefills and decodes cannot share one, an iteration takes two or more. A
server has a fixed number of rows, and in every forward pass each row does one of five things. Two of them yield tokens.
The other three are the waste that this course removes.

    prefill   computes a prompt and yields the first token, or computes a chunk of it and yields nothing yet
    decode    computes one token and yields the next; with drafts (`features/speculation/`), several
    finished  is computed although its request is finished: the row waits for the longest request in its batch
    stalled   is not computed: its request waits while others are prefilled
    empty     has no request

Counts are the same on every machine. Seconds differ from run to run, and only illustrate the counts.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

WORK = ("prefill", "decode", "finished", "stalled", "empty")


@dataclass(frozen=True)
class RowStep:
    """One row in one forward pass.

    Attributes:
        work: the kind of work, one of WORK.
        request_id: the request that holds the row, or the label of its sequence; None if the row is empty.
        tokens: real tokens that the forward pass computed in this row.
        padding: wasted tokens that it computed in this row: pads, and the input of a finished row.
        new_tokens: output tokens that the row yielded.
        drafted: draft tokens among `tokens`: guesses at the next ones.
        accepted: draft tokens that were right, and so are among the new tokens.
    """

    work: str = "empty"
    request_id: Hashable = None
    tokens: int = 0
    padding: int = 0
    new_tokens: int = 0
    drafted: int = 0
    accepted: int = 0


EMPTY = RowStep()  # a single one, because a trace may hold millions


class Traffic(NamedTuple):
    """What each process of a split model has sent in a forward pass (`features/tensor_parallel/`).

    Attributes:
        all_reduces: the sums over all processes.
        bytes: the sizes of the tensors that were summed.
    """

    all_reduces: int = 0
    bytes: int = 0


NO_TRAFFIC = Traffic()


@dataclass(frozen=True)
class TracedPass:
    """One forward pass: what each row did, when the pass began (seconds since the run's start) and how long it took.

    `step` numbers the iterations: forward passes with the same `step` were planned together. `traffic` is what the
    processes of a split model have sent.
    """

    row_steps: tuple[RowStep, ...]
    start: float
    seconds: float
    step: int = 0
    traffic: Traffic = NO_TRAFFIC

    @property
    def tokens(self) -> int:
        """The number of tokens that the forward pass computed, pads included."""
        return sum(row.tokens + row.padding for row in self.row_steps)


class Trace:
    """The forward passes of a run on a fixed number of rows. A request keeps its row from prefill until it finishes.

    Args:
        rows: the number of rows.
        keep: how many of the latest forward passes to keep, for a server that never stops; None keeps all of them.
    """

    def __init__(self, rows: int, keep: int | None = None):
        self.rows = rows
        self.passes: list[TracedPass] | deque[TracedPass] = [] if keep is None else deque(maxlen=keep)
        self._holders: list[Hashable] = [None] * rows
        self._done: set[Hashable] = set()

    def record_pass(self, before: dict, after: dict, start: float, seconds: float) -> None:
        """Record the forward pass that turned the batch `before` into the batch `after`."""
        kind = "decode" if "past_key_values" in before else "prefill"
        width = before["input_ids"].size(1)
        real = before["attention_mask"][:, -width:].sum(dim=1).tolist()
        row_steps = []
        for row, request_id in enumerate(before["request_ids"]):
            if before["tokens_remaining"][row] == 0:
                row_steps.append(RowStep("finished", request_id, padding=width))
            else:
                row_steps.append(RowStep(kind, request_id, real[row], width - real[row], new_tokens=1))
        self.add(row_steps, start, seconds, step=self.forward_passes)
        self.free(id for id, left in zip(after["request_ids"], after["tokens_remaining"], strict=True) if left == 0)

    def add(self, row_steps: Iterable[RowStep], start: float, seconds: float, step: int, traffic=NO_TRAFFIC) -> None:
        """Record a forward pass over some of the rows. Every other request that holds a row was stalled."""
        computed = {row.request_id: row for row in row_steps}
        # A request that is computed again after a preemption holds its row again.
        self._done -= {id for id, row in computed.items() if row.work != "finished"}
        self._holders = [None if held in self._done and held not in computed else held for held in self._holders]
        self._done.intersection_update(self._holders)
        for request_id in computed:
            if request_id not in self._holders:
                self._holders[self._holders.index(None)] = request_id
        rows = [computed.get(held) or (EMPTY if held is None else RowStep("stalled", held)) for held in self._holders]
        self.passes.append(TracedPass(tuple(rows), start, seconds, step, traffic))

    def free(self, request_ids: Iterable[Hashable]) -> None:
        """Free the rows of these requests. A finished request that its batch still computes keeps its row."""
        self._done.update(request_ids)

    def retimed(self, cost: Callable[[TracedPass], float] = lambda traced_pass: 1) -> "Trace":
        """Return the same forward passes on another clock, without gaps: `cost` gives the seconds of each.

        Measured seconds differ from run to run; a cost need not. By default, the clock counts forward passes.
        """
        other, now = Trace(self.rows), 0.0
        for traced_pass in self.passes:
            seconds = cost(traced_pass)
            other.passes.append(replace(traced_pass, start=now, seconds=seconds))
            now += seconds
        return other

    # --- counts: the same on every machine -------------------------------------------------------------------

    @property
    def forward_passes(self) -> int:
        """The number of forward passes."""
        return len(self.passes)

    @property
    def steps(self) -> int:
        """The number of scheduler steps that led to a forward pass."""
        return len({traced_pass.step for traced_pass in self.passes})

    @property
    def slot_steps(self) -> int:
        """Rows times forward passes: at one token each, the most tokens that the run could have yielded."""
        return self.rows * len(self.passes)

    @property
    def work(self) -> Counter:
        """The number of slot-steps spent on each kind of work; their sum is `slot_steps`."""
        return Counter(row.work for traced_pass in self.passes for row in traced_pass.row_steps)

    @property
    def output_tokens(self) -> int:
        """The number of tokens that all rows yielded."""
        return sum(row.new_tokens for traced_pass in self.passes for row in traced_pass.row_steps)

    @property
    def wasted_slot_steps(self) -> int:
        """The number of slot-steps that yielded no token."""
        return sum(row.new_tokens == 0 for traced_pass in self.passes for row in traced_pass.row_steps)

    @property
    def traffic(self) -> Traffic:
        """What each process of a split model has sent, in all forward passes."""
        return Traffic(
            *(sum(traced_pass.traffic[index] for traced_pass in self.passes) for index in range(len(NO_TRAFFIC)))
        )

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens that prefills computed, including those recomputed after a preemption."""
        return sum(row.tokens for traced_pass in self.passes for row in traced_pass.row_steps if row.work == "prefill")

    @property
    def prompt_padding(self) -> int:
        """The number of pad tokens that prefills computed in addition to the prompts' own tokens."""
        return sum(row.padding for traced_pass in self.passes for row in traced_pass.row_steps if row.work == "prefill")

    @property
    def drafted_tokens(self) -> int:
        """The number of draft tokens that were verified."""
        return sum(row.drafted for traced_pass in self.passes for row in traced_pass.row_steps)

    @property
    def accepted_tokens(self) -> int:
        """The number of draft tokens that were right."""
        return sum(row.accepted for traced_pass in self.passes for row in traced_pass.row_steps)

    @property
    def acceptance(self) -> float | None:
        """The share of draft tokens that were right; None without drafts."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    # --- seconds: illustration -------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """The time from the run's start to the end of the last forward pass, in seconds."""
        return self.passes[-1].start + self.passes[-1].seconds if self.passes else 0.0

    @property
    def token_times(self) -> dict[Hashable, list[float]]:
        """When each token of each request was available, in seconds since the run's start."""
        times: dict[Hashable, list[float]] = {}
        for traced_pass in self.passes:
            end = traced_pass.start + traced_pass.seconds
            for row in traced_pass.row_steps:
                if row.new_tokens:
                    times.setdefault(row.request_id, []).extend([end] * row.new_tokens)
        return times


shared_row_step = lru_cache(maxsize=4096)(RowStep)  # most are equal to an earlier one, and a trace may hold millions


def record_iteration(trace: Trace, step: int, plan, output, finished: Iterable) -> None:
    """Record an engine's iteration. A row is free once its sequence has finished or was preempted.

    Args:
        step: the number of the iteration.
        plan, output: the `Plan` and the `RunnerOutput` of `engine/plan.py`.
        finished: the sequences that finished.
    """
    trace.free(sequence.label for sequence in plan.preempted)
    for forward_pass in output.passes:
        row_steps = [_row_step(*pair) for pair in zip(forward_pass.chunks, forward_pass.padding, strict=True)]
        trace.add(row_steps, forward_pass.start, forward_pass.seconds, step, forward_pass.traffic)
        trace.free(chunk.sequence.label for chunk in forward_pass.chunks if chunk.sequence.finish_reason is not None)
    trace.free(sequence.label for sequence in finished)  # also those whose pass failed


def _row_step(chunk, padding: int) -> RowStep:
    work, sequence, drafts = "decode" if chunk.is_decode else "prefill", chunk.sequence, chunk.draft_token_ids
    new = sequence.token_ids[chunk.end :] if chunk.samples_token else []
    accepted = num_matching(new, drafts) if drafts else 0
    return shared_row_step(work, sequence.label, chunk.tokens, padding, len(new), len(drafts), accepted)


def num_matching(tokens: Sequence, others: Sequence) -> int:
    """Return the length of the longest common prefix."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((index for index, (token, other) in pairs if token != other), min(len(tokens), len(others)))
