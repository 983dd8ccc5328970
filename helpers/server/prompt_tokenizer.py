"""Prompts become token ids on threads, off the event loop: one thread for short prompts, one for long ones.

A prompt with too many characters for the model's context is refused before it is tokenized (`engine/validation.py`).
Other long prompts still take a while, and short requests would wait behind them. With a thread of their own, short
requests wait only behind each other, because the tokenizers library can run on both threads at once. Each thread
takes its prompts in the order in which they arrive, so no prompt waits forever.

The descriptions of structured outputs are compiled before, unless they are small or were compiled lately. That takes a
millisecond for most, and seconds for some. So a third thread gives each a tenth of a second, and one that needs more
is compiled on a fourth. A description therefore waits for others in proportion to the time that it takes itself.
"""

import asyncio
from collections.abc import Callable, Sized
from concurrent.futures import ThreadPoolExecutor

from ..engine import EngineCore, Prompt, SamplingParams
from ..engine.sequence import GREEDY
from .prompt_length import check_length

LONG = 8192  # characters or token ids of a request: about 10 ms of tokenization
PER_WORD = 32  # a bad word takes as long as that many characters
PromptSource = Prompt | Callable[[], Prompt]  # a function makes a prompt on the tokenizer's thread


class PromptTokenizer:
    """Validates and tokenizes the prompts of HTTP requests.

    Args:
        engine: its validator refuses requests that can never run.
    """

    def __init__(self, engine: EngineCore):
        self._engine = engine
        self._threads = [ThreadPoolExecutor(1, f"tokenizer-{kind}") for kind in ("short", "long", "quick", "slow")]
        self._short, self._long, self._quick, self._slow = self._threads

    async def validate(self, prompts: list[PromptSource], params: SamplingParams) -> list[tuple[list[int], int]]:
        """Return the token ids of each prompt, and how many tokens it may get.

        Raises:
            ValueError: a prompt that can never run with these parameters.
        """
        for feature in self._compilers() if params.structured_outputs is not None else ():
            if not feature.is_ready(params) and not await self._run(self._quick, feature.check_quickly, params):
                await self._run(self._slow, feature.check, params)
        thread = self._thread_for(prompts, PER_WORD * len(params.bad_words))
        return await self._run(thread, self._validate, prompts, params)

    async def tokenize(self, prompt: PromptSource) -> list[int]:
        """Return the token ids of a prompt that is not to be continued.

        Raises:
            ValueError: a prompt whose characters cannot fit into the model's context.
        """
        return await self._run(self._thread_for([prompt]), self._tokenize, prompt)

    def _thread_for(self, prompts: list[PromptSource], others: int = 0) -> ThreadPoolExecutor:
        length = others + sum(len(prompt) if isinstance(prompt, Sized) else LONG for prompt in prompts)
        return self._short if length < LONG else self._long

    async def _run(self, thread: ThreadPoolExecutor, function: Callable, *arguments):
        return await asyncio.get_running_loop().run_in_executor(thread, function, *arguments)

    def _compilers(self) -> list:
        return [feature for feature in self._engine.validator.features if feature.name == "structured_outputs"]

    def _validate(self, prompts: list[PromptSource], params: SamplingParams) -> list[tuple[list[int], int]]:
        return [self._engine.validator.validate(self._make(prompt, params), params) for prompt in prompts]

    def _tokenize(self, prompt: PromptSource) -> list[int]:
        made = self._make(prompt)
        return self._engine.tokenizer(made)["input_ids"] if isinstance(made, str) else made

    def _make(self, source: PromptSource, params: SamplingParams = GREEDY) -> Prompt:
        """Return a prompt whose characters may fit into the model's context."""
        prompt = source() if callable(source) else source
        check_length(self._engine.validator, prompt, params)
        return prompt

    def shutdown(self) -> None:
        """End the threads once they have validated what they have begun with; compilation is cancelled."""
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
        for feature in self._compilers():
            feature.end()
        for thread in self._threads:
            thread.shutdown()
