"""A simulated replica for long runs: the engine's scheduler and memory on a clock, without outputs and without a trace.

An iteration is the engine's: schedule, run, update. Unlike a `Simulator`, a replica records only the times and lengths
of each request. Successive iterations that only decode become a stretch (`stretch.py`). It is run once the clock has
passed its end. If a request arrives earlier, only the iterations that begin before the arrival are run. With blocks,
there are no stretches.

A replica can fail. Its unfinished sequences then lose their keys and values, and keep their tokens: another replica
computes these again and continues, as in `features/resumption.py`.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from math import inf

from ..engine import EngineConfig, SamplingParams, Sequence
from ..metrics import RequestMetrics
from .cost_model import CostModel
from .simulator import TOKEN, Simulator
from .stretch import Stretch, find_stretch

MOST_TOKENS = 10_000_000  # of a prompt or an output: a list with more of them might not fit in memory


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A finished request: when it arrived, when its first and its last token were available, and its lengths."""

    request_id: Hashable
    arrival: float
    first_token: float
    last_token: float
    prompt_tokens: int
    output_tokens: int

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival

    @property
    def e2e(self) -> float:
        return self.last_token - self.arrival

    tpot = RequestMetrics.tpot


@dataclass
class FleetClock:
    """The time at which a router looks at replicas, which all share this object."""

    now: float = 0.0


class SimulatedReplica:
    """Runs requests of known lengths in simulated time; a `cluster.routing.RoutableReplica`.

    Args:
        config: as for `Simulator`.
        cost: the seconds of each iteration.
        clock: the time to which `outstanding_tokens` and `free_rows` refer.

    Attributes:
        iterations: how many iterations were run.
        preemptions: how often a sequence was preempted.
        computed_tokens: how many tokens passed through the layers.
        busy_seconds: the seconds of all iterations.
        finished: the requests that have finished; the caller may empty the list.

    Raises:
        ValueError: a setting is outside its range, or drafts are configured: without a model, there are no tokens to
            guess.
    """

    def __init__(self, config: EngineConfig, cost: CostModel, clock: FleetClock | None = None):
        if config.speculative is not None:
            raise ValueError("A replica without a model has no tokens to guess: use speculative=None.")
        core = Simulator(config, cost)
        self.scheduler, self._runner, self._validator = core.scheduler, core.runner, core.validator
        self._cost, self._clock = cost, clock or FleetClock()
        self._stretch: Stretch | None = None
        self._outstanding = 0  # when the stretch begins
        self._prefills: dict[Sequence, int] = {}  # tokens that count as outstanding until the next output token
        self.iterations = self.preemptions = self.computed_tokens = 0
        self.busy_seconds = 0.0
        self.finished: list[FinishedRequest] = []

    @property
    def time(self) -> float:
        """When the next iteration that is not run yet begins."""
        return self._runner.time

    @property
    def busy_until(self) -> float:
        """The time until which `advance` has nothing to do; infinity without requests."""
        if self._stretch is not None:
            return self._stretch.end
        return self.time if self.scheduler.unfinished else inf

    # --- what a router reads ------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The time at which the router looks."""
        return self._clock.now

    @property
    def outstanding_tokens(self) -> int:
        """How many tokens its unfinished requests may still compute; a prompt counts until its first output token."""
        if self._stretch is None:
            return self._outstanding
        return self._outstanding - len(self.scheduler.running) * self._stretch.begun_before(self._clock.now)

    @property
    def free_rows(self) -> int:
        """Its rows minus its unfinished requests. No request finishes within a stretch."""
        return self.scheduler.max_rows - len(self.scheduler.unfinished)

    def cached_tokens(self, prompt_token_ids: list[int], salt: bytes = b"") -> int:
        """Return how many tokens of a prompt, from the first, the replica need not compute."""
        return self.scheduler.memory.cached_tokens(Sequence("", prompt_token_ids, 1, salt=salt))

    # --- requests and time --------------------------------------------------------------------------------------

    def check(self, prompt_tokens: int, output_tokens: int, may_move: bool = False) -> None:
        """Refuse a request that can never run.

        Args:
            prompt_tokens, output_tokens: its lengths.
            may_move: whether it may have to continue on another replica, which computes all of its tokens again.

        Raises:
            ValueError: it is longer than the settings or MOST_TOKENS allow, or it has no tokens.
        """
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError(
                f"A request has at least 1 prompt token and 1 output token, not {prompt_tokens} and {output_tokens}."
            )
        if max(prompt_tokens, output_tokens) > MOST_TOKENS:
            raise ValueError(
                f"A request has at most {MOST_TOKENS} prompt tokens and output tokens, not {prompt_tokens} and "
                f"{output_tokens}."
            )
        self._validator.check_counts(prompt_tokens, _params(output_tokens))
        if may_move:
            self._validator.check_recomputation(prompt_tokens, output_tokens)

    def add(self, sequence: Sequence, now: float) -> None:
        """Add a sequence, whether new or from another replica, after all iterations that begin before `now`.

        `check` has accepted its lengths, and `now` does not decrease from call to call. Its `computed` tokens are
        those whose keys and values arrive with it; only a `DecodeReplica` can use them.
        """
        self._run_before(now)
        if not self.scheduler.unfinished:
            self._runner.time = max(self._runner.time, now)
        self._prefills[sequence] = 0 if sequence.computed else len(sequence.token_ids)
        self._outstanding += self._prefills[sequence] + sequence.max_tokens - sequence.generated
        self.scheduler.add(sequence)

    def fail(self, now: float) -> list[Sequence]:
        """Fail at the end of the iteration in progress, and return the unfinished sequences.

        The replica must not be used afterwards, except for its counts and its `time`.
        """
        self._run_before(now)
        return list(self.scheduler.unfinished)

    def advance(self, time: float = inf) -> None:
        """Run all iterations that begin before `time`; by default, until all requests have finished."""
        while self.scheduler.unfinished:
            if self._stretch is not None:
                if time <= self._stretch.end:
                    return  # a request may still arrive before the rest of the stretch
                self._run_stretch(None)
            if time <= self._runner.time:
                return
            self._iterate()

    def _run_before(self, time: float) -> None:
        """Run all iterations that begin before `time`, even if a stretch is in progress."""
        self.advance(time)
        self._run_stretch(None if self._stretch is None else self._stretch.begun_before(time))

    def _iterate(self) -> None:
        """Run one iteration: the engine's, but for its outputs and its trace."""
        plan = self.scheduler.schedule()
        output = self._runner.run(plan, lambda: self._runner.time)
        finished = self.scheduler.update(plan, output)
        self.iterations += 1
        self.preemptions += len(plan.preempted)
        self.computed_tokens += plan.tokens
        for forward_pass in output.passes:
            self.busy_seconds += forward_pass.seconds
            self._outstanding -= len(forward_pass.sampled)
            if self._prefills:
                self._outstanding -= sum(self._prefills.pop(sequence, 0) for sequence in forward_pass.sampled)
        for sequence in finished:
            times = sequence.token_times
            self.finished.append(
                FinishedRequest(
                    sequence.request_id,
                    sequence.request.arrival,
                    times[0],
                    times[-1],
                    sequence.prompt_tokens,
                    sequence.generated,
                )
            )
        # In a stretch, a running sequence counts 1 less per token, so its prompt must have left the count already.
        if self._prefills.keys().isdisjoint(self.scheduler.running):
            self._stretch = find_stretch(self.scheduler, plan, self._cost, self._runner.time)

    def _run_stretch(self, iterations: int | None) -> None:
        """Run the stretch, or its first iterations, and forget what is left of it."""
        if self._stretch is None:
            return
        stretch, self._stretch = self._stretch, None
        iterations = len(stretch.ends) if iterations is None else iterations
        self._runner.time = stretch.run(iterations, TOKEN)
        self.iterations += iterations
        self.busy_seconds += self._runner.time - stretch.start
        self.computed_tokens += iterations * len(self.scheduler.running)
        self._outstanding -= iterations * len(self.scheduler.running)


@cache
def _params(output_tokens: int) -> SamplingParams:
    return SamplingParams(output_tokens, ignore_eos=True)
