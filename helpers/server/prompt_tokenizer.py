"""Prompts become token ids on threads, off the event loop: one thread for short prompts, one for long ones.

Tokenizing a megabyte takes about a second. So a prompt with more characters than the model's context can hold is
refused first, as in vLLM (`max_chars_per_token`). Other long prompts still take a while, and short requests would wait
behind them. With a thread of their own, short requests wait only behind each other, because the tokenizers library can
run on both threads at once. Each thread takes its prompts in the order in which they arrive, so none waits forever.

The descriptions of structured outputs are compiled before, unless they are small or were compiled lately. That takes a
millisecond for most, and seconds for some. So a third thread gives each a tenth of a second, and one that needs more
is compiled on a fourth. A description therefore waits for others in proportion to the time that it takes itself.
"""

import asyncio
import math
from collections.abc import Callable, Sized
from concurrent.futures import ThreadPoolExecutor

from ..engine import EngineCore, Prompt, SamplingParams

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
        vocabulary = getattr(engine.tokenizer, "get_vocab", dict)()
        self._most_characters_per_token = max(map(len, vocabulary), default=math.inf)

    async def validate(self, prompts: list[PromptSource], params: SamplingParams) -> list[tuple[list[int], int]]:
        """Return the token ids of each prompt, and how many tokens it may get.

        Raises:
            ValueError: a prompt that can never run with these parameters.
        """
        for feature in self._compilers() if params.structured_outputs is not None else ():
            if not feature.is_ready(params) and not await self._run(self._quick, feature.check_quickly, params):
                await self._run(self._slow, feature.check, params)
        length = sum(len(prompt) if isinstance(prompt, Sized) else LONG for prompt in prompts)
        is_short = length + PER_WORD * len(params.bad_words) < LONG
        return await self._run(self._short if is_short else self._long, self._validate, prompts, params)

    async def _run(self, thread: ThreadPoolExecutor, function: Callable, *arguments):
        return await asyncio.get_running_loop().run_in_executor(thread, function, *arguments)

    def _compilers(self) -> list:
        return [feature for feature in self._engine.validator.features if feature.name == "structured_outputs"]

    def _validate(self, prompts: list[PromptSource], params: SamplingParams) -> list[tuple[list[int], int]]:
        return [self._engine.validator.validate(self._make(prompt), params) for prompt in prompts]

    def _make(self, source: PromptSource) -> Prompt:
        """Return a prompt whose characters may fit into the model's context."""
        prompt = source() if callable(source) else source
        if isinstance(prompt, str):
            self.check_length(prompt)
        return prompt

    def check_length(self, text: str) -> None:
        """Refuse a text that no tokens, however long, could fit into the model's context.

        Raises:
            ValueError: the text is too long.
        """
        context = self._engine.validator.model.context_length
        if context is not None and len(text) > context * self._most_characters_per_token:
            raise ValueError(
                f"The prompt's {len(text)} characters are more tokens than the model's context has, {context}: "
                "shorten the prompt."
            )

    def shutdown(self) -> None:
        """End the threads once they have validated what they have begun with; compilation is cancelled."""
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
        for feature in self._compilers():
            feature.end()
        for thread in self._threads:
            thread.shutdown()
