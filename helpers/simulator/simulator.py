"""`Simulator`: a `BaseEngine` whose runner computes nothing, so thousands of iterations take a second.

Scheduler, block manager, outputs and trace are the engine's own. So a simulated run plans exactly what an engine plans
for the same requests, provided that both generate as many tokens per request. By default, requests end after
`max_tokens`, because the simulated token is not an EOS token.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from math import inf

from ..base_engine import BaseEngine
from ..engine import Chunk, EngineConfig, ForwardPass, ModelInfo, Plan, RunnerOutput, SampledToken
from ..engine.plan import Clock

TOKEN = 0  # every generated token, unless `next_token` says otherwise
shared_sampled_token = lru_cache(maxsize=4096)(SampledToken)


class Simulator(BaseEngine):
    """Runs requests without a model, in simulated time.

    Args:
        config: as for `Engine`. Without `num_blocks`, a sequence needs only a row and no memory.
        seconds: returns the simulated seconds that an iteration takes, given its plan; 1 by default, so that times
            count iterations.
        context_length: the most tokens (prompt and output) of a request; None for no limit.
        next_token: returns the token that follows a prompt and the tokens generated so far; TOKEN by default. It
            decides how many drafts are accepted.
        eos_token_ids: the tokens that end an output.

    Raises:
        ValueError: a setting is outside its range.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        seconds: Callable[[Plan], float] = lambda plan: 1.0,
        context_length: int | None = None,
        next_token: Callable[[list[int]], int] = lambda token_ids: TOKEN,
        eos_token_ids: Iterable[int] = (),
    ):
        config = config or EngineConfig()
        runner = SimulatedRunner(config.num_blocks, config.block_size, seconds, next_token)
        info = ModelInfo(2**31, context_length, frozenset(eos_token_ids))
        super().__init__(runner, _NoText(), info, config, clock=lambda: runner.time)
        self._start = 0.0  # simulated time begins with the simulator, not with its first request

    def run_until(self, time: float = inf) -> None:
        """Run all iterations that begin before `time`, and move an idle clock to `time` if it is finite."""
        while self.runner.time < time and self.scheduler.unfinished:
            self.step()
        if not self.scheduler.unfinished and time < inf:
            self.runner.time = max(self.runner.time, time)


class SimulatedRunner:
    """A `Runner` for which every forward pass succeeds, and which needs no model to choose a token.

    Args:
        num_blocks, block_size: as for every runner.
        seconds: returns the simulated seconds of an iteration, given its plan.
        next_token: returns the token that follows a prompt and the tokens generated so far; TOKEN by default.

    Attributes:
        time: the simulated seconds since the runner was made.
    """

    name, not_ragged_because = "simulated", None

    def __init__(
        self,
        num_blocks: int | None = None,
        block_size: int = 1,
        seconds: Callable[[Plan], float] = lambda plan: 1.0,
        next_token: Callable[[list[int]], int] = lambda token_ids: TOKEN,
    ):
        self.num_blocks, self.block_size, self._seconds, self.time = num_blocks, block_size, seconds, 0.0
        self._next_token = next_token

    def run(self, plan: Plan, clock: Clock) -> RunnerOutput:
        if not plan.chunks:
            return RunnerOutput()
        start, seconds = clock(), self._seconds(plan)
        self.time += seconds
        sampled = {chunk.sequence: self._sample(chunk) for chunk in plan.chunks if chunk.samples_token}
        return RunnerOutput([ForwardPass(plan.chunks, [0] * len(plan.chunks), sampled, start, seconds)])

    def _sample(self, chunk: Chunk) -> list[SampledToken]:
        known, sampled = chunk.sequence.token_ids, []
        for draft_token_id in [*chunk.draft_token_ids, None]:
            sampled.append(shared_sampled_token(self._next_token(known)))
            if sampled[-1].token_id != draft_token_id:
                break
            known = [*known, draft_token_id]
        return sampled


class _NoText:
    """A tokenizer whose tokens have no text, because a simulation has no vocabulary."""

    all_special_ids = ()

    def __call__(self, text: str, **_) -> dict[str, list[int]]:
        if text != "a":  # the letter after which `text_of` decodes
            raise ValueError(f"A simulator has no vocabulary: give the prompt as token ids, not as the text {text!r}.")
        return {"input_ids": []}

    def decode(self, token_ids: list[int], **_) -> str:
        return ""

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return ""
