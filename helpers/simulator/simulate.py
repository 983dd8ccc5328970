"""`simulate`: what an engine would do with these requests, without a model and without waiting.

Prompts and output lengths determine every plan. A trace of a production service records no more than that, so its
requests can be run again under other settings.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from ..engine import EngineConfig, Plan, SamplingParams, Sequence
from ..engine.recording import record
from ..trace import Trace
from .simulator import Simulator


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
        sequences.append(Sequence(number, *simulator.validator.validate(prompt, params), params=params))
    for sequence in sorted(sequences, key=lambda one: arrivals[one.request_id]):
        simulator.run_until(arrivals[sequence.request_id])
        sequence.arrival = simulator.now()
        simulator.scheduler.add(sequence)
    simulator.run_until()
    return simulator.trace


class _TraceOnly(Simulator):
    """A simulator without texts and outputs: they take half of its time, and `simulate` does not return them."""

    def _iterate(self) -> None:
        plan = self.scheduler.schedule()
        output = self.runner.run(plan, self.now)
        finished = self.scheduler.update(plan, output)
        record(self.trace, self.steps, plan, output, finished)
        self.steps += 1
