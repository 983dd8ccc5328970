"""Prompts become token ids on two threads, off the event loop: one thread for short prompts, one for long ones.

A prompt with too many characters for the model's context is refused before it is tokenized (`engine/validation.py`).
Other long prompts still take a while, and short requests would wait behind them. With a thread of their own, short
requests wait only behind each other, because the tokenizers library can run on both threads at once. Each thread
takes its prompts in the order in which they arrive, so no prompt waits forever.
"""

import asyncio
from collections.abc import Callable, Sized
from concurrent.futures import ThreadPoolExecutor

from ..engine import EngineCore, Prompt, SamplingParams

LONG = 8192  # characters or token ids of a request: about 10 ms of tokenization
PromptSource = Prompt | Callable[[], Prompt]  # a function makes a prompt on the tokenizer's thread


class PromptTokenizer:
    """Validates and tokenizes the prompts of HTTP requests.

    Args:
        engine: its validator refuses requests that can never run.
    """

    def __init__(self, engine: EngineCore):
        self._engine = engine
        self._short, self._long = ThreadPoolExecutor(1, "tokenizer-short"), ThreadPoolExecutor(1, "tokenizer-long")

    async def validate(self, prompts: list[PromptSource], params: SamplingParams) -> list[list[int]]:
        """Return the token ids of each prompt.

        Raises:
            ValueError: a prompt that can never run with these parameters.
        """
        described = 0 if params.structured_outputs is None else params.structured_outputs.length
        return await self._run(self._validate, prompts, params, length=described)

    async def tokenize(self, prompt: PromptSource) -> list[int]:
        """Return the token ids of a prompt that is not to be continued.

        Raises:
            ValueError: a prompt whose characters cannot fit into the model's context.
        """
        return await self._run(self._tokenize, [prompt])

    async def _run(self, function: Callable, prompts: list[PromptSource], *arguments, length: int = 0):
        length += sum(len(prompt) if isinstance(prompt, Sized) else LONG for prompt in prompts)
        thread = self._short if length < LONG else self._long
        return await asyncio.get_running_loop().run_in_executor(thread, function, prompts, *arguments)

    def _validate(self, prompts: list[PromptSource], params: SamplingParams) -> list[list[int]]:
        made = (prompt() if callable(prompt) else prompt for prompt in prompts)
        return [self._engine.validator.validate(prompt, params)[0] for prompt in made]

    def _tokenize(self, prompts: list[PromptSource]) -> list[int]:
        (made,) = (prompt() if callable(prompt) else prompt for prompt in prompts)
        self._engine.validator.check_length(made)
        return self._engine.tokenizer(made)["input_ids"] if isinstance(made, str) else made

    def shutdown(self) -> None:
        """End the threads once they have validated what was submitted."""
        self._short.shutdown()
        self._long.shutdown()
