"""A stretch: iterations that only decode, so their plans are known in advance and need not be made one by one.

From one arrival or end to the next, every running sequence gets one token per iteration. A stretch therefore does not
visit the sequences in every iteration: it advances each sequence once. Afterwards, the scheduler is as single
iterations would have left it, token times included. That requires unlimited memory: where it is short, sequences are
preempted, and with prefix caching, blocks are registered in each iteration.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

from ..engine import Plan, Scheduler, Static
from ..engine.block_manager import UnlimitedMemory
from .cost_model import CostModel, count_adapters


@dataclass
class Stretch:
    """The iterations ahead that only decode.

    Attributes:
        scheduler: its sequences move forward once the stretch is run.
        start: when the first iteration begins.
        seconds: how long each iteration takes.
        ends: when each iteration ends.
    """

    scheduler: Scheduler
    start: float
    seconds: list[float]
    ends: list[float]

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
        tokens, times = [token_id] * iterations, self.ends[:iterations]
        for sequence in self.scheduler.running:
            sequence.token_ids += tokens
            sequence.token_times += times
            sequence.computed += iterations
        self.scheduler.waiting.step += iterations
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
    if type(scheduler) is not Scheduler or scheduler.features or not isinstance(scheduler.memory, UnlimitedMemory):
        return None
    if not running or not all(sequence.is_decode for sequence in running) or not _none_is_admitted(scheduler, last):
        return None
    most = min(most, min(sequence.max_tokens - sequence.generated for sequence in running) - 1)  # the last token ends
    if most < 1:
        return None
    rows, keys = len(running), sum(len(sequence.token_ids) for sequence in running)
    adapters = count_adapters(running)
    seconds = [cost.seconds_for(1, 0, rows, rows, keys + iteration * rows, 0, adapters) for iteration in range(most)]
    return Stretch(scheduler, now, seconds, list(accumulate(seconds, initial=now))[1:])


def _none_is_admitted(scheduler: Scheduler, last: Plan) -> bool:
    """Return whether the next iterations admit no sequence, as long as all running ones decode and none of them ends.

    That is certain if none waits, no row is free, or the policy waits for the end of all. A scheduler without mixed
    batches remembers whether its last plan was a prefill, so there the last plan must have decoded, as these do.
    """
    if scheduler.waiting and len(scheduler.running) < scheduler.max_rows and type(scheduler.policy) is not Static:
        return False
    return scheduler.mixed or (
        len(last.chunks) == len(scheduler.running) and all(chunk.is_decode for chunk in last.chunks)
    )
