"""`simulate`: what an engine would do with these requests, without a model and without waiting.

Prompts and output lengths determine every plan. A trace of a production service records no more than that, so its
requests can be run again under other settings. With a `CostModel` and unlimited memory, iterations that only decode are
not planned one by one (`stretch.py`): the trace is the same.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import inf

from ..engine import EngineConfig, Plan, SamplingParams, Sequence
from ..trace import Trace, TracedPass, record_iteration, shared_row_step
from .cost_model import CostModel
from .simulator import TOKEN, Simulator
from .stretch import find_stretch

MOST = 64  # iterations of a stretch: the next arrival may come before most of them


def simulate(
    requests: Seq[tuple[list[int], int]],
    config: EngineConfig | None = None,
    arrivals: Seq[float] | None = None,
    seconds: Callable[[Plan], float] = lambda plan: 1.0,
) -> Trace:
    """Run requests in simulated time, and return the trace of all iterations.

    Args:
        requests: for each request, its prompt as token ids and the number of tokens to generate.
        config: as for `Simulator`.
        arrivals: for each request, when it arrives, in simulated seconds; 0 if omitted.
        seconds: returns the simulated seconds that an iteration takes, given its plan; 1 by default, so that times
            count iterations.

    Returns:
        The trace. Its request ids are the positions in `requests`, and its times are on the clock of `arrivals`.

    Raises:
        ValueError: a request can never run, or the numbers of requests and arrivals differ.
    """
    arrivals = [0.0] * len(requests) if arrivals is None else arrivals
    if len(arrivals) != len(requests):
        raise ValueError(f"{len(requests)} requests, but {len(arrivals)} arrivals: give one for each.")
    simulator = _TraceOnly(config, seconds)
    sequences = []
    for number, (prompt, length) in enumerate(requests):
        params = SamplingParams(length, ignore_eos=True)
        features = simulator.validator.features_for(params)
        tokens = simulator.validator.validate(prompt, params)
        sequences.append(Sequence(number, *tokens, params=params, features=features))
    for sequence in sorted(sequences, key=lambda arriving: arrivals[arriving.request_id]):
        simulator.run_until(arrivals[sequence.request_id])
        sequence.request.arrival = simulator.now()
        simulator.scheduler.add(sequence)
    simulator.run_until()
    return simulator.trace


class _TraceOnly(Simulator):
    """A simulator without texts and outputs: they take half of its time, and `simulate` does not return them."""

    def __init__(self, config: EngineConfig | None, seconds: Callable[[Plan], float]):
        super().__init__(config, seconds)
        self._cost = seconds if isinstance(seconds, CostModel) else None

    def run_until(self, time: float = inf) -> None:
        while self.runner.time < time and self.scheduler.unfinished:
            plan = self.scheduler.schedule()
            output = self.runner.run(plan, self.now)
            finished = self.scheduler.update(plan, output)
            record_iteration(self.trace, self.steps, plan, output, finished)
            self.steps += 1
            if self._cost is not None:
                self._skip_ahead(plan, time)
        super().run_until(time)

    def _skip_ahead(self, last: Plan, time: float) -> None:
        """Run and record the iterations before `time` that only decode, as far as they follow from the last plan."""
        stretch = find_stretch(self.scheduler, last, self._cost, self.runner.time, MOST)
        iterations = 0 if stretch is None else stretch.begun_before(time)
        if iterations == 0:
            return
        rows = [shared_row_step("decode", sequence.label, 1, 0, 1, 0, 0) for sequence in self.scheduler.running]
        ends, seconds = stretch.ends, stretch.seconds
        self.trace.add(rows, stretch.start, seconds[0], self.steps)
        rows = self.trace.passes[-1].row_steps  # with those that are empty
        for number in range(1, iterations):
            self.trace.passes.append(TracedPass(rows, ends[number - 1], seconds[number], self.steps + number))
        self.steps += iterations
        self.runner.time = stretch.run(iterations, TOKEN)
