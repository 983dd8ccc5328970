"""Check requests when they are added: those that can never run are refused, with an error that says what to do.

Without this check, a request that is too long would fail in an iteration, along with all requests in the same pass.
"""

import contextlib
import math
import operator
from collections.abc import Iterable
from typing import Any

from ..detokenizer import check_encoding
from ..engine_config import EngineConfig
from ..sampling_params import SamplingParams
from .block_manager import BlockManager
from .hooks import Feature
from .plan import ModelInfo
from .sequence import Prompt


class RequestValidator:
    """Checks requests against the limits of an engine.

    Args:
        tokenizer: turns text into token ids.
        config: the settings of the engine.
        model: the vocabulary and the context length of the model.
        block_manager: the blocks of the KV cache; None if a request needs only a row.

    Attributes:
        features: check the parameters that are theirs.
    """

    def __init__(self, tokenizer, config: EngineConfig, model: ModelInfo, block_manager: BlockManager | None = None):
        self.tokenizer, self.config, self.model, self.block_manager = tokenizer, config, model, block_manager
        self.features: tuple[Feature, ...] = ()
        slots = math.inf if block_manager is None else block_manager.num_blocks * block_manager.block_size
        self._holds_any_request = slots >= (model.context_length or math.inf)

    def validate(self, prompt: Prompt, params: SamplingParams) -> tuple[list[int], int]:
        """Return the prompt's token ids, and how many tokens the request may generate.

        Raises:
            ValueError: the prompt is empty, is not valid text or has token ids outside the vocabulary; the request is
                too long; or `params` is not a `SamplingParams`, needs a feature that is missing, or has values that a
                feature refuses.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, not {params!r}.")
        if params.needs:
            check_needs(params, self.features)
        for feature in self.features_for(params):
            feature.check(params)
        token_ids = self._token_ids(prompt)
        return token_ids, self.check_counts(len(token_ids), params)

    def features_for(self, params: SamplingParams, options: Iterable[str] = ()) -> tuple[Feature, ...]:
        """Return the features that take part in a request with these parameters, and options of these names.

        Raises:
            ValueError: an option belongs to no feature of this engine.
        """
        if unknown := set(options).difference(*(feature.options for feature in self.features)):
            raise ValueError(f"This engine has no feature that takes {sorted(unknown)[0]!r}: leave it out.")
        return tuple(
            feature
            for feature in self.features
            if feature.in_all_requests or feature.name in params.needs or not feature.options.isdisjoint(options)
        )

    def check_counts(self, prompt_tokens: int, params: SamplingParams) -> int:
        """Return how many tokens a request may generate, given the number of its prompt tokens.

        Raises:
            ValueError: the request is too long for the model's context or for the engine's memory.
        """
        wanted, room = params.max_tokens, (self.model.context_length or math.inf) - prompt_tokens
        if (1 if wanted is None else wanted) > room:
            raise ValueError(self._why_too_long(prompt_tokens, wanted))
        max_tokens = room if wanted is None else wanted
        if max_tokens == math.inf:
            raise ValueError("The model's context has no end: set max_tokens.")
        if params.min_tokens > max_tokens:
            raise ValueError(self._why_too_few(prompt_tokens, params.min_tokens, max_tokens))
        if not self._holds_any_request:
            self._check_memory(prompt_tokens, max_tokens)
        if not self.config.chunked_prefill:
            self._check_budget(prompt_tokens, max_tokens)
        return max_tokens

    def _token_ids(self, prompt: Prompt) -> list[int]:
        last = self.model.vocab_size - 1
        if isinstance(prompt, str):
            if not prompt.isascii():
                check_encoding(prompt)
            token_ids = self.tokenizer(prompt)["input_ids"] if prompt else []
            if max(token_ids, default=0) > last:  # the embeddings were not resized, for example
                raise ValueError(f"The model knows no tokens above {last}: remove {max(token_ids)} from the prompt.")
        else:
            token_ids = _integers(prompt, last)
        if not token_ids:
            raise ValueError(f"The prompt {prompt!r} has no tokens: give at least one word to continue.")
        return token_ids

    def _why_too_long(self, prompt_tokens: int, wanted: int | None) -> str:
        asked = "" if wanted is None else f" and max_tokens {wanted}, {prompt_tokens + wanted} in all"
        return (
            f"The request has {prompt_tokens} prompt tokens{asked}, but the model's context is "
            f"{self.model.context_length}: shorten the prompt or ask for fewer tokens."
        )

    def _why_too_few(self, prompt_tokens: int, min_tokens: int, max_tokens: int) -> str:
        return (
            f"min_tokens is {min_tokens}, but an output after {prompt_tokens} prompt tokens can have at most "
            f"{max_tokens} tokens: lower it, or shorten the prompt."
        )

    def _check_memory(self, prompt_tokens: int, max_tokens: int) -> None:
        tokens = prompt_tokens + max(max_tokens, 1) - 1  # the last token of an output is never computed
        needed, available = self.block_manager.blocks_for(tokens), self.block_manager.num_blocks
        if needed > available:
            raise ValueError(
                f"{prompt_tokens} prompt tokens and {max_tokens} new ones need {needed} blocks of "
                f"{self.block_manager.block_size} tokens, and this engine has {available} in all: shorten the "
                f"prompt, ask for fewer tokens, or set a larger num_blocks."
            )

    def _check_budget(self, prompt_tokens: int, max_tokens: int) -> None:
        """Refuse a request whose tokens do not fit in an iteration; prompts are not computed in chunks."""
        if prompt_tokens > self.config.max_tokens_per_step:
            raise ValueError(
                f"The prompt has {prompt_tokens} tokens, an iteration computes at most "
                f"{self.config.max_tokens_per_step}, and chunked_prefill is off: shorten the prompt, raise "
                f"max_tokens_per_step, or set chunked_prefill."
            )
        if self.block_manager is not None:  # so a sequence may be preempted
            self.check_recomputation(prompt_tokens, max_tokens)

    def check_recomputation(self, prompt_tokens: int, max_tokens: int) -> None:
        """Refuse a request that could not continue after a preemption or on another replica: chunked_prefill is off.

        Raises:
            ValueError: in the worst case, it has more tokens than an iteration computes.
        """
        tokens = prompt_tokens + max(max_tokens, 1) - 1
        if not self.config.chunked_prefill and tokens > self.config.max_tokens_per_step:
            raise ValueError(
                f"After a preemption, or on another replica, the request may have to compute {tokens} tokens at once, "
                f"but an iteration computes at most {self.config.max_tokens_per_step} and chunked_prefill is off: "
                f"raise max_tokens_per_step, ask for fewer tokens, or set chunked_prefill."
            )


def check_needs(settings, features: Iterable[Feature]) -> None:
    """Raise a ValueError if a setting of an `EngineConfig` or of `SamplingParams` needs a feature that is missing."""
    names = {feature.name for feature in features}
    for feature, setting in settings.needs.items():
        if feature not in names:
            value = getattr(settings, setting)
            raise ValueError(f"{setting}={value!r} needs helpers/features/{feature}, which is missing: leave it out.")


def _integers(prompt: Any, last: int) -> list[int]:
    """Return token ids, such as NumPy's, as Python's integers; raise a ValueError unless they are from 0 to `last`."""
    if not isinstance(prompt, Iterable):
        raise ValueError(f"A prompt must be a text or a list of token ids, not {prompt!r}.")
    token_ids = list(prompt)
    with contextlib.suppress(TypeError):  # not integers
        found = list(map(operator.index, token_ids))
        if not found or 0 <= min(found) <= max(found) <= last:
            return found
    shown = token_ids if len(token_ids) <= 5 else [*token_ids[:5], "..."]
    raise ValueError(f"Token ids must be integers from 0 to {last}, not {shown}.")
