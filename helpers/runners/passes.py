"""The forward passes of a plan, one after the other, up to the first one that fails."""

from collections.abc import Iterable

from ..engine import ForwardPass, RunnerOutput


def run_passes(passes: Iterable[ForwardPass]) -> RunnerOutput:
    """Collect the forward passes that an iterator yields, up to the first one that raises an Exception."""
    done = []
    try:
        for forward_pass in passes:
            done.append(forward_pass)
    except Exception as error:
        return RunnerOutput(done, error)
    return RunnerOutput(done)
