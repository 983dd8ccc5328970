"""Run requests until all are finished, each from the iteration of its arrival on, beside all other requests."""

import itertools
from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING

from .outputs import RequestOutput
from .sampling_params import SamplingParams
from .sequence import Prompt

if TYPE_CHECKING:
    from .engine import EngineCore


def run_to_end(
    engine: "EngineCore", prompts: list[Prompt], params: list[SamplingParams], arrivals: list[int], progress: bool
) -> list[RequestOutput]:
    """Return the complete outputs of valid requests, in the order of the prompts; see `EngineCore.generate`."""
    from tqdm.auto import tqdm  # only here: an engine that steps needs nothing but Python, and runs in a browser

    arriving = deque(sorted(range(len(prompts)), key=arrivals.__getitem__))
    place_of: dict[Hashable, int] = {}
    undelivered: deque[RequestOutput] = deque()
    ended: dict[tuple[int, int], RequestOutput] = {}
    expected = sum(one.n for one in params)
    try:
        with tqdm(total=expected, unit="output", disable=not progress) as bar:
            for iteration in itertools.count():
                while arriving and arrivals[arriving[0]] <= iteration:
                    place = arriving.popleft()
                    request_id = engine.new_id()
                    place_of[request_id] = place  # first, so that an interrupt leaves no request behind
                    engine.outputs.subscribe(request_id, undelivered)
                    engine.add_sequences(prompts[place], params[place], request_id)
                if len(ended) == expected:
                    break
                engine.iterate()
                while undelivered:
                    output = undelivered.popleft()
                    if output.finish_reason is not None:
                        ended[place_of[output.request_id], output.index] = output
                        bar.update()
    finally:
        for request_id in place_of:  # cancels a request only if an exception ends this call
            engine.leave(request_id)
    return [ended[place] for place in sorted(ended)]
