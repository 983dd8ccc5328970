"""A stretch: iterations that only decode, so their plans are known in advance and need not be made one by one.

From one arrival, end or preemption to the next, every running sequence gets one token per iteration. Only the blocks
change: a sequence takes a new one each time its last one is full. A stretch therefore does not visit the sequences in
every iteration. It allocates the same blocks in the same order, then advances each sequence once. Afterwards, the
scheduler is as single iterations would have left it, block tables and token times included. That requires memory
without prefix caching: a cache registers the blocks that fill up in each iteration.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

from ..engine import BlockManager, FirstComeFirstServed, LongestFirst, Plan, Scheduler, ShortestFirst, Static
from ..engine.block_manager import UnlimitedMemory
from .cost_model import CostModel

ORDER_IS_FIXED = (FirstComeFirstServed, LongestFirst, ShortestFirst)  # while no sequence arrives, however long it waits


@dataclass
class Stretch:
    """The iterations ahead that only decode.

    Attributes:
        scheduler: its sequences and its memory move forward once the stretch is run.
        start: when the first iteration begins.
        seconds: how long each iteration takes.
        ends: when each iteration ends.
        events: (iteration, row) of each block that is allocated, in the order of allocation.
    """

    scheduler: Scheduler
    start: float
    seconds: list[float]
    ends: list[float]
    events: list[tuple[int, int]]

    @property
    def end(self) -> float:
        """When the last iteration ends."""
        return self.ends[-1]

    def begun_before(self, time: float) -> int:
        """Return how many of the iterations begin before `time`."""
        if time <= self.start:
            return 0
        return 1 + bisect_left(self.ends, time, hi=len(self.ends) - 1)

    def run(self, iterations: int, token_id: int) -> float:
        """Run the first iterations of the stretch, in which each sequence gets this token; return when they end."""
        if iterations == 0:
            return self.start
        scheduler = self.scheduler
        running, memory = scheduler.running, scheduler.memory
        before = [sequence.computed for sequence in running]
        tokens, times = [token_id] * iterations, self.ends[:iterations]
        for sequence in running:
            sequence.token_ids += tokens
            sequence.token_times += times
        for iteration, row in self.events:
            if iteration >= iterations:
                break
            sequence = running[row]
            sequence.computed = before[row] + iteration
            if not memory.allocate(sequence, 1):
                raise AssertionError("A stretch was planned with more blocks than there are.")
        for sequence, computed in zip(running, before, strict=True):
            sequence.computed = computed + iterations
        scheduler.waiting.step += iterations
        return times[-1]


def find_stretch(scheduler: Scheduler, last: Plan, cost: CostModel, now: float, most: int = 4096) -> Stretch | None:
    """Return the iterations ahead that only decode; None if the next one may do anything else.

    Args:
        scheduler: a scheduler without EOS tokens, whose sequences have no other stop conditions than `max_tokens`.
        last: the plan of its latest iteration, after which no request has arrived or left.
        cost: the seconds of each iteration.
        now: when the next iteration begins.
        most: at most this many iterations.
    """
    running = scheduler.running
    if type(scheduler) is not Scheduler or scheduler.features:
        return None
    if getattr(scheduler.memory, "prefix_caching", False):
        return None
    if not running or not all(sequence.is_decode for sequence in running) or not _none_is_admitted(scheduler, last):
        return None
    most = min(most, min(sequence.max_tokens - sequence.generated for sequence in running) - 1)  # the last token ends
    most, events = _allocations(scheduler, most)
    if most < 1:
        return None
    rows, keys = len(running), sum(len(sequence.token_ids) for sequence in running)
    seconds = [cost.of(1, rows, keys + iteration * rows, 0) for iteration in range(most)]
    return Stretch(scheduler, now, seconds, list(accumulate(seconds, initial=now))[1:], events)


def _none_is_admitted(scheduler: Scheduler, last: Plan) -> bool:
    """Return whether the next iterations admit no sequence, as long as all running ones decode and none of them ends.

    That is certain if none waits or no row is free. It is also certain if the last iteration tried to admit the first
    sequence in the queue, and it did not fit. It still does not fit: decodes free no memory.
    """
    policy = type(scheduler.policy)
    only_decodes = len(last.chunks) == len(scheduler.running) and all(chunk.is_decode for chunk in last.chunks)
    if not scheduler.waiting or len(scheduler.running) == scheduler.max_rows or policy is Static:
        return scheduler.mixed or only_decodes
    was_tried = scheduler.mixed and only_decodes and not last.preempted
    return was_tried and policy in ORDER_IS_FIXED


def _allocations(scheduler: Scheduler, iterations: int) -> tuple[int, list[tuple[int, int]]]:
    """Return how many iterations the free memory suffices for, at most those given, and their allocations in order."""
    memory = scheduler.memory
    if isinstance(memory, UnlimitedMemory):
        return iterations, []
    if not isinstance(memory, BlockManager):
        return 0, []
    size = memory.block_size
    events = sorted(
        (iteration, row)
        for row, sequence in enumerate(scheduler.running)
        for iteration in range(-sequence.computed % size, iterations, size)
    )
    if len(events) > memory.available:
        iterations = events[memory.available][0]
        events = [event for event in events if event[0] < iterations]
    return iterations, events
