"""`Simulator`: an `EngineCore` whose runner computes nothing, so thousands of iterations take a second.

Scheduler, block manager, outputs and trace are the engine's own. So a simulated run plans exactly what an engine plans
for the same requests, provided that both generate as many tokens per request. The simulator does not know a model's
EOS tokens: its requests end after `max_tokens`.
"""

from collections.abc import Callable

from ..engine import EngineConfig, EngineCore, ForwardPass, ModelInfo, Plan, RunnerOutput, SampledToken
from ..engine.runner import Clock

TOKEN = 0  # every generated token


class Simulator(EngineCore):
    """Runs requests without a model, in simulated time.

    Args:
        config: as for `Engine`. Without `num_blocks`, a sequence needs only a row and no memory.
        seconds: returns the simulated seconds that an iteration takes, given its plan; 1 by default, so that times
            count iterations.
        context_length: the most tokens (prompt and output) of a request; None for no limit.

    Raises:
        ValueError: a setting is outside its range.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        seconds: Callable[[Plan], float] = lambda plan: 1.0,
        context_length: int | None = None,
    ):
        config = config or EngineConfig()
        runner = SimulatedRunner(config.num_blocks, config.block_size, seconds)
        info = ModelInfo(vocab_size=2**31, context_length=context_length)
        super().__init__(runner, _NoText(), info, config, clock=lambda: runner.time)


class SimulatedRunner:
    """A `Runner` for which every forward pass succeeds and every sampled token is TOKEN.

    Args:
        num_blocks, block_size: as for every runner.
        seconds: returns the simulated seconds of an iteration, given its plan.

    Attributes:
        time: the simulated seconds since the runner was made.
    """

    name, not_ragged_because = "simulated", None

    def __init__(
        self,
        num_blocks: int | None = None,
        block_size: int = 1,
        seconds: Callable[[Plan], float] = lambda plan: 1.0,
    ):
        self.num_blocks, self.block_size, self._seconds, self.time = num_blocks, block_size, seconds, 0.0

    def run(self, plan: Plan, clock: Clock) -> RunnerOutput:
        if not plan.chunks:
            return RunnerOutput()
        start, seconds = clock(), self._seconds(plan)
        self.time += seconds
        sampled = {chunk.sequence: SampledToken(TOKEN) for chunk in plan.chunks if chunk.samples_token}
        return RunnerOutput([ForwardPass(plan.chunks, [0] * len(plan.chunks), sampled, start, seconds)])


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
