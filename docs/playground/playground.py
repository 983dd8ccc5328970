"""The course's engine in a browser: Pyodide runs this file, and the page shows what it returns.

The engine is `helpers.simulator.Simulator`: scheduler, block manager and trace are the course's own files. Only the
model is missing. Requests arrive at fixed iterations, so a run depends on nothing but the settings.
"""

import json
from dataclasses import replace

from helpers.engine import EngineConfig, Plan, SamplingParams, Scheduler
from helpers.engine.scheduler import Chunk
from helpers.simulator import Simulator

BLOCK_SIZE = 4
SETTINGS = {  # name: (least, most, default)
    "rows": (1, 8, 4),
    "blocks": (16, 64, 40),
    "token_budget": (8, 64, 32),
    "requests": (2, 16, 10),
    "prompt": (2, 40, 8),
    "output": (2, 24, 6),
    "long_every": (0, 8, 4),
    "gap": (0, 6, 1),
    "shared_prefix": (0, 24, 0),
}
PRESETS = {
    "Static batching (lesson 3)": {"policy": "static", "gap": 0},
    "Continuous batching (lesson 3)": {"policy": "fcfs", "gap": 0},
    "Longest first (lesson 4)": {"policy": "longest_first", "gap": 0},
    "Long prompts delay decodes (lesson 5)": {
        "prompt": 40,
        "token_budget": 64,
        "chunked": False,
        "gap": 3,
        "blocks": 64,
    },
    "Chunked prefill (lesson 5)": {"prompt": 40, "token_budget": 12, "gap": 3, "blocks": 64},
    "Too little memory: preemption (lesson 7)": {"blocks": 16, "output": 16, "gap": 0},
    "A shared prefix (lesson 8)": {"shared_prefix": 24, "prompt": 4, "blocks": 40},
}
DEFAULTS = {name: default for name, (_, _, default) in SETTINGS.items()}
DEFAULTS |= {"policy": "fcfs", "chunked": True, "mixed": True, "prefix_caching": True}


def config(settings: dict) -> EngineConfig:
    """Return the engine's configuration.

    Raises:
        ValueError: the settings contradict each other.
    """
    return EngineConfig(
        max_batch_size=settings["rows"],
        max_tokens_per_step=settings["token_budget"],
        policy=settings["policy"],
        chunked_prefill=settings["chunked"],
        mixed_batches=settings["mixed"],
        prefix_caching=settings["prefix_caching"],
        block_size=BLOCK_SIZE,
        num_blocks=settings["blocks"],
    )


def requests(settings: dict) -> list[tuple[list[int], int, int]]:
    """Return each request's prompt (token ids from 1 to 400), its number of output tokens and its arrival's iteration.

    Prompt lengths alternate around the setting. One output in `long_every` is three times as long as the others.
    """
    made = []
    shared = list(range(1, settings["shared_prefix"] + 1))
    for number in range(settings["requests"]):
        length = max(1, settings["prompt"] + (-1, 0, 1)[number % 3])
        own = [100 + (37 * number + position) % 300 for position in range(length)]
        is_long = settings["long_every"] and number % settings["long_every"] == 0
        made.append((shared + own, settings["output"] * (3 if is_long else 1), number * settings["gap"]))
    return made


def planned(plan: Plan) -> dict:
    """Return a plan as plain data: the chunks with their blocks, and the preempted requests."""

    def described(chunk: Chunk) -> dict:
        work = "decode" if chunk.is_decode else "prefill"
        request = chunk.sequence.request_id
        return {
            "request": request,
            "work": work,
            "start": chunk.start,
            "tokens": chunk.tokens,
            "blocks": chunk.block_table,
        }

    return {
        "chunks": [described(chunk) for chunk in plan.chunks],
        "preempted": [sequence.request_id for sequence in plan.preempted],
    }


class RecordingScheduler(Scheduler):
    """The engine's scheduler, which also keeps its plans as plain data."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.plans = []

    def schedule(self) -> Plan:
        plan = super().schedule()
        self.plans.append(json.loads(json.dumps(planned(plan))))  # a copy: block tables change
        return plan


class Playground:
    """A run that the page steps through.

    Args:
        settings: changes of DEFAULTS.

    Raises:
        ValueError: the settings contradict each other, or a request can never run with them.
    """

    def __init__(self, settings: dict | None = None):
        self.settings = DEFAULTS | (settings or {})
        self.requests = requests(self.settings)
        self.engine = Simulator(replace(config(self.settings), scheduler_cls=RecordingScheduler))
        for prompt, tokens, _ in self.requests:  # refuse now what could never run
            self.engine.validator.validate(prompt, self._params(tokens))
        self.iteration, self.preemptions, self.outputs = 0, 0, {}

    @staticmethod
    def _params(tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=tokens, ignore_eos=True)

    @property
    def finished(self) -> bool:
        """Whether all requests have arrived and finished."""
        return all(arrival < self.iteration for _, _, arrival in self.requests) and not self.engine.scheduler.unfinished

    def step(self) -> dict:
        """Run one iteration, and return what the page shows of it."""
        for number, (prompt, tokens, arrival) in enumerate(self.requests):
            if arrival == self.iteration:
                self.engine.add_request(prompt, self._params(tokens), request_id=number)
        passes = self.engine.trace.forward_passes
        for output in self.engine.step():
            self.outputs[output.request_id] = output
        plan = self.engine.scheduler.plans[-1]
        self.preemptions += len(plan["preempted"])
        self.iteration += 1
        steps = self.engine.trace.passes[-1].row_steps if self.engine.trace.forward_passes > passes else ()
        return {
            "iteration": self.iteration,
            "plan": plan,
            "rows": [{"work": step.work, "request": step.request_id, "tokens": step.tokens} for step in steps],
            "waiting": self.engine.waiting,
            "running": [self._progress(sequence) for sequence in self.engine.scheduler.running],
            "blocks": self._blocks(),
            "counts": self._counts(),
            "finished": self.finished,
        }

    def _progress(self, sequence) -> dict:
        return {
            "request": sequence.request_id,
            "computed": sequence.computed,
            "prompt": sequence.prompt_tokens,
            "generated": sequence.generated,
            "max_tokens": sequence.max_tokens,
        }

    def _blocks(self) -> list[list[int] | str]:
        """Return for each block the requests that use it, or "cached", or "free"."""
        manager = self.engine.block_manager
        users: dict[int, list[int]] = {}
        for sequence, table in manager.tables.items():
            for block in table:
                users.setdefault(block, []).append(sequence.request_id)
        cached = manager.cached_blocks
        return [users.get(block) or ("cached" if block in cached else "free") for block in range(manager.num_blocks)]

    def _counts(self) -> dict[str, float | int]:
        trace = self.engine.trace
        ended = [output for output in self.outputs.values() if output.finish_reason is not None]
        firsts = trace.token_times
        arrivals = [arrival for _, _, arrival in self.requests]
        waits = [times[0] - arrivals[request] for request, times in firsts.items()]
        return {
            "finished requests": f"{len(ended)} of {len(self.requests)}",
            "output tokens": trace.output_tokens,
            "tokens computed in prefills": trace.prompt_tokens,
            "row-steps without work": trace.work["empty"] + trace.work["stalled"],
            "preemptions": self.preemptions,
            "iterations from arrival to first token, mean": round(sum(waits) / len(waits), 1) if waits else "",
        }


def run(settings: dict | None = None, most: int = 2000) -> list[dict]:
    """Run to the end, and return all plans."""
    playground = Playground(settings)
    while not playground.finished and playground.iteration < most:
        playground.step()
    return playground.engine.scheduler.plans
