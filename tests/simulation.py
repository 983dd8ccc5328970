"""What the scheduler's tests share: a simulation without a model, a memory of some tokens, and a count of operations.

The scheduler is the engine's. The runner is the simulator's, which computes nothing. In every iteration, `Simulation`
checks what every plan must respect.
"""

import gc
import sys
from collections.abc import Callable, Iterable

from helpers.engine import EngineConfig, Plan, RunnerOutput, Scheduler, Sequence, Static, UnlimitedMemory
from helpers.engine.policies import WaitingQueue
from helpers.features.parallel_sampling import SharedPrompt
from helpers.simulator import SimulatedRunner


def by_arrival(sequence: Sequence, longest: int) -> int:
    return 0


# What each policy's order amounts to if the whole queue is sorted; equal keys in order of arrival. `longest` is the
# largest max_tokens in the queue.
KEYS: dict[str, Callable[[Sequence, int], int]] = {
    "fcfs": by_arrival,
    "static": by_arrival,
    "balanced": by_arrival,
    "shortest_first": lambda sequence, longest: sequence.max_tokens,
    "longest_first": lambda sequence, longest: -(3 * sequence.max_tokens // (longest + 1)),
    "priority": lambda sequence, longest: sequence.priority - sequence.waited // 50,
}


def run_without_a_model(plan: Plan) -> RunnerOutput:
    """Return the results of a plan for which every chunk succeeds and every sampled token is 0."""
    return SimulatedRunner().run(plan, clock=lambda: 0.0)


def queue_of(sequences: Iterable[Sequence]) -> WaitingQueue:
    """Return a queue of sequences in this order, each of which has waited for as long as it says."""
    queue = WaitingQueue()
    for number, sequence in enumerate(sequences):
        sequence.number, queue.step = number, -sequence.waited
        queue.add(sequence)
    queue.step = 0
    return queue


class TokenMemory(UnlimitedMemory):
    """Memory for a number of tokens, shared by all sequences.

    Attributes:
        allocated: how many tokens each sequence has memory for.
    """

    def __init__(self, tokens: int):
        self.tokens, self.allocated = tokens, {}

    def allocate(self, sequence, tokens):
        assert tokens > 0
        if sum(self.allocated.values()) + tokens > self.tokens:
            return False
        self.allocated[sequence] = self.allocated.get(sequence, 0) + tokens
        assert self.allocated[sequence] == sequence.computed + tokens, "memory for tokens that it does not compute"
        return True

    def free(self, sequence):
        assert self.allocated.pop(sequence, 0) >= sequence.computed
        super().free(sequence)


class Simulation:
    """A scheduler whose plans cost nothing to run.

    Attributes:
        plans: for every iteration, its chunks as (request id, tokens).
        finished: the sequences that have ended, in the order of their end.
        num_preemptions: how many sequences were preempted.
    """

    def __init__(self, policy="fcfs", rows: int = 1, tokens: int = 64, memory=None, mixed=True, chunked=True):
        config = EngineConfig(
            max_batch_size=rows, max_tokens_per_step=tokens, policy=policy, mixed_batches=mixed, chunked_prefill=chunked
        )
        self.scheduler, self.config = Scheduler(config, memory), config
        self._sharing = SharedPrompt(self)
        self.plans, self.finished, self.num_preemptions = [], [], 0
        self._added: list[Sequence] = []
        self._prefilled_last = False

    def add(self, prompt_tokens: int, max_tokens: int, name="", priority=0, parent=None) -> Sequence:
        if parent is None:
            sequence = Sequence(name, [0] * prompt_tokens, max_tokens, priority=priority, features=(self._sharing,))
        else:
            sequence = Sequence(name, [0] * prompt_tokens, max_tokens, request=parent.request)
        self._added.append(sequence)
        self.scheduler.add(sequence)
        if parent is not None and not self._sharing.may_join(parent):
            self._sharing.hold_until_computed(sequence)
        return sequence

    def step(self) -> Plan:
        scheduler = self.scheduler
        running, waiting = list(scheduler.running), self.check_queue()
        decoding = [sequence for sequence in running if sequence.is_decode]
        plan = scheduler.schedule()
        self.check_plan(plan, running, decoding, waiting)
        self.plans.append([(chunk.sequence.request_id, chunk.tokens) for chunk in plan.chunks])
        self.num_preemptions += len(plan.preempted)
        self.finished += scheduler.update(plan, run_without_a_model(plan))
        return plan

    def run(self, most: int = 2000) -> list:
        """Step until all sequences have ended; return their request ids in the order of their end."""
        while self.scheduler.unfinished:
            self.step()
            assert len(self.plans) < most, "a sequence waits forever"
        return [sequence.request_id for sequence in self.finished]

    def check_queue(self) -> list[Sequence]:
        """Check the queue against plain lists and sorts, and return it."""
        scheduler, policy = self.scheduler, self.config.policy
        waiting = list(scheduler.waiting)
        unfinished = [sequence for sequence in self._added if sequence.finish_reason is None]
        assert list(scheduler.unfinished) == unfinished
        assert set(scheduler.requests) == {sequence.request_id for sequence in unfinished}
        in_order_of_arrival = [sequence for sequence in unfinished if sequence in scheduler.waiting]
        assert waiting == in_order_of_arrival
        assert not set(waiting) & set(scheduler.running)
        if policy in KEYS:
            longest = max((sequence.max_tokens for sequence in waiting), default=0)
            ranked = sorted(waiting, key=lambda sequence: KEYS[policy](sequence, longest))
            assert list(scheduler.policy.order(scheduler.waiting, scheduler.running)) in (ranked, [])
        return waiting

    def check_plan(self, plan: Plan, running: list, decoding: list, waiting: list) -> None:
        """Check a plan against the sequences that ran, decoded and waited before it was made."""
        config, planned = self.config, plan.sequences
        admitted = [sequence for sequence in planned if sequence not in running]
        assert len(set(planned)) == len(planned), "a row is used twice"
        assert not set(planned) & set(plan.preempted), "a preempted sequence takes part"
        assert len(set(plan.preempted)) == len(plan.preempted)
        assert set(plan.preempted) <= set(running) and set(admitted) <= set(waiting)
        assert set(plan.preempted) <= set(plan.released)
        stay = [sequence for sequence in running if sequence not in plan.preempted]
        assert self.scheduler.running == stay + admitted and len(stay + admitted) <= config.max_batch_size
        assert plan.tokens == sum(chunk.tokens for chunk in plan.chunks) <= config.max_tokens_per_step
        assert all(0 < chunk.tokens <= chunk.sequence.num_uncomputed_tokens for chunk in plan.chunks)
        assert plan.chunks or not running, "an iteration in which no sequence advances"
        ran_before = [sequence for sequence in planned if sequence in running]
        assert planned == ran_before + admitted, "running sequences come first"

        # The newest are preempted, so the oldest always advances: that is why no sequence waits forever for memory.
        assert stay + plan.preempted[::-1] == running
        assert not (plan.preempted and admitted), "a sequence is preempted for want of memory, and another is admitted"
        if not config.chunked_prefill:
            assert all(chunk.samples_token for chunk in plan.chunks)
        if isinstance(self.scheduler.policy, Static) and running:
            assert not admitted
        decodes = [sequence for sequence in planned if sequence in decoding]
        still_decoding = [sequence for sequence in decoding if sequence not in plan.preempted]
        if config.mixed_batches:
            assert decodes == still_decoding, "a decode was delayed"
        elif decodes:
            assert planned == decodes == still_decoding, "not in turns"
        if not config.mixed_batches and self._prefilled_last and decoding:
            assert decodes, "two prefills in a row while a sequence could decode"
        self._prefilled_last = bool(planned) and not decodes


def operations(function: Callable[[], object]) -> int:
    """Return how many bytecode instructions a call executes: a cost that is the same on every machine.

    It grows with every loop over a queue or over blocks. What C code does, such as moving a list's tail, is free.
    """
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()  # a collection calls functions of libraries
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        gc.enable()
    return count
