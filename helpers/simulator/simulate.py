"""`simulate`: what an engine would do with these requests, without a model and without waiting.

Prompts and output lengths determine every plan. A trace of a production service records no more than that, so its
requests can be run again under other settings.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from ..engine import EngineConfig, OutputDelta, Plan, SamplingParams
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
    simulator = Simulator(config, seconds)
    simulator.outputs.output_type = OutputDelta  # the outputs are not read, and these are the smaller ones
    params = [SamplingParams(length, ignore_eos=True) for _, length in requests]
    for (prompt, _), one in zip(requests, params, strict=True):
        simulator.validator.validate(prompt, one)
    for number in sorted(range(len(requests)), key=lambda number: arrivals[number]):
        simulator.run_until(arrivals[number])
        simulator.add_request(requests[number][0], params[number], request_id=number)
    simulator.run_until()
    return simulator.trace
