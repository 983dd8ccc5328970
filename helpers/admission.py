"""What can never run is refused when it is added, with an error that says what to do.

A request that were found too long in the middle of an iteration would cost the others that share it.
"""

from collections.abc import Iterable, Sequence
from numbers import Integral

from .block_manager import BlockManager
from .engine_config import EngineConfig
from .models import context_length
from .sampling import SamplingParams

Prompt = str | Sequence[int]


class Admission:
    """The limits of an engine.

    Args:
        model, tokenizer: what runs the requests.
        config: the engine's.
        chunked: whether the scheduler reads prompts in pieces.
        blocks: the memory for keys and values; None where a row is all that a request needs.
    """

    def __init__(self, model, tokenizer, config: EngineConfig, chunked: bool, blocks: BlockManager | None):
        self.tokenizer, self.config, self.chunked, self.blocks = tokenizer, config, chunked, blocks
        self.context = context_length(model)
        self.vocabulary = model.config.get_text_config().vocab_size

    def check(self, prompt: Prompt, params: SamplingParams) -> tuple[list[int], int]:
        """The prompt's token ids, and how many tokens the request may generate.

        Raises:
            ValueError: no prompt, ids that the model does not know, a request that is too long.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params are SamplingParams, not {params!r}.")
        token_ids = self._tokens_of(prompt)
        max_tokens = self._room_for(len(token_ids), params)
        self._check_memory(len(token_ids), max_tokens)
        return token_ids, max_tokens

    def _tokens_of(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            try:
                token_ids = self.tokenizer(prompt)["input_ids"] if prompt else []
            except TypeError as error:  # half of a surrogate pair, which is no text
                raise ValueError(f"The prompt {prompt!r} cannot be encoded: {error}.") from error
        elif isinstance(prompt, Iterable):
            token_ids = list(prompt)
            if not all(isinstance(id, Integral) and 0 <= id < self.vocabulary for id in token_ids):
                shown = token_ids if len(token_ids) <= 5 else [*token_ids[:5], "..."]
                raise ValueError(f"Token ids are whole numbers from 0 to {self.vocabulary - 1}, not {shown}.")
            token_ids = [int(id) for id in token_ids]
        else:
            raise ValueError(f"A prompt is a text or a list of token ids, not {prompt!r}.")
        if not token_ids:
            raise ValueError(f"The prompt {prompt!r} has no tokens: give at least one word to continue.")
        return token_ids

    def _room_for(self, prompt_tokens: int, params: SamplingParams) -> int:
        config, wanted = self.config, params.max_tokens
        if config.max_input_tokens is not None and prompt_tokens > config.max_input_tokens:
            raise ValueError(
                f"The prompt has {prompt_tokens} tokens, and this engine takes {config.max_input_tokens}: shorten it."
            )
        if not self.chunked and prompt_tokens > config.max_tokens_per_step:
            raise ValueError(
                f"The prompt has {prompt_tokens} tokens, an iteration reads {config.max_tokens_per_step} at most, and "
                f"chunked_prefill is off: shorten the prompt, or allow chunks."
            )
        if config.max_output_tokens is not None and (wanted or 1) > config.max_output_tokens:
            raise ValueError(
                f"max_tokens is {wanted}, and an answer of this engine has {config.max_output_tokens} tokens at most: "
                f"ask for fewer."
            )
        if self.context is not None and prompt_tokens + (wanted or 1) > self.context:
            asked = "" if wanted is None else f" and max_tokens {wanted}, {prompt_tokens + wanted} in all"
            raise ValueError(
                f"The request has {prompt_tokens} prompt tokens{asked}, but the model's context is {self.context}: "
                f"shorten the prompt or ask for fewer tokens."
            )
        limits = [config.max_output_tokens, None if self.context is None else self.context - prompt_tokens]
        limits = [limit for limit in limits if limit is not None]
        if wanted is None and not limits:
            raise ValueError("The model's context has no end: set max_tokens, or the engine's max_output_tokens.")
        return min(limits) if wanted is None else wanted

    def _check_memory(self, prompt_tokens: int, max_tokens: int) -> None:
        if self.blocks is None:
            return
        tokens = prompt_tokens + max_tokens - 1  # the last token of an answer is never read
        needed = self.blocks.blocks_for(tokens)
        if needed > self.blocks.blocks:
            raise ValueError(
                f"{prompt_tokens} prompt tokens and {max_tokens} new ones need {needed} blocks of "
                f"{self.blocks.block_size} tokens, and this engine has {self.blocks.blocks} in all: shorten the "
                f"prompt, ask for fewer tokens, or set a larger num_blocks."
            )
        if not self.chunked and tokens > self.config.max_tokens_per_step:
            raise ValueError(
                f"The request may have to be read again after a preemption, {tokens} tokens at once, but an iteration "
                f"reads {self.config.max_tokens_per_step} at most and chunked_prefill is off: raise "
                f"max_tokens_per_step, ask for fewer tokens, or allow chunks."
            )
