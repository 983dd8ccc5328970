"""The token ids behind a request's parameters, which only the model's vocabulary and tokenizer can tell.

`SamplingParams` name stop tokens, EOS (by `ignore_eos` and `min_tokens`) and bad words. A runner needs ids. They are
found and checked when a request is added, so a mistake is an error before the request takes a row.
"""

import functools
from collections.abc import Collection
from dataclasses import dataclass

from ...engine import ModelInfo, SamplingParams


@dataclass(frozen=True)
class TokenRules:
    """What a runner needs to know about a request's tokens beside its `SamplingParams`.

    Attributes:
        eos_token_ids, stop_token_ids: the model's EOS tokens and the request's stop tokens; none of them can be chosen
            before `min_tokens`.
        bad_words: the token ids of each spelling of each bad word.
    """

    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def end_token_ids(self) -> frozenset[int]:
        """EOS and the stop tokens together."""
        return self.eos_token_ids | self.stop_token_ids


class TokenRulesMaker:
    """Makes the `TokenRules` of requests.

    Args:
        tokenizer: spells bad words.
        model: the vocabulary and the EOS tokens of the model.
    """

    def __init__(self, tokenizer, model: ModelInfo):
        self.tokenizer, self.model = tokenizer, model
        self._spell = functools.lru_cache(maxsize=32)(self._spellings)  # a server asks twice, on different threads

    def make(self, params: SamplingParams) -> TokenRules:
        """Return the rules for a request.

        Raises:
            ValueError: an id is outside the vocabulary, a bad word has no tokens, or no token could be chosen.
        """
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            self._check_vocabulary(name, getattr(params, name) or ())
        stop_token_ids, bad_words = frozenset(params.stop_token_ids), self._spell(params.bad_words)
        rules = TokenRules(frozenset(self.model.eos_token_ids), stop_token_ids, bad_words)
        if params.allowed_token_ids is not None:
            banned = {word[0] for word in rules.bad_words if len(word) == 1}
            banned |= rules.end_token_ids if params.min_tokens > 0 else set()
            if banned.issuperset(params.allowed_token_ids):
                raise ValueError(
                    "No token could be chosen: bad_words and min_tokens exclude all of allowed_token_ids. Allow more."
                )
        return rules

    def _check_vocabulary(self, name: str, token_ids: Collection[int]) -> None:
        if outside := [token_id for token_id in token_ids if token_id >= self.model.vocab_size]:
            raise ValueError(
                f"The token ids in {name} must be from 0 to {self.model.vocab_size - 1}, not {outside[0]}."
            )

    def _spellings(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each word at the beginning of a text and after a space, as vLLM does.

        The second spelling is left out if it ends with the first, which then matches in both places. (vLLM also leaves
        it out if the two have different numbers of tokens, and so misses words that are one token after a space only.)
        """
        spellings: dict[tuple[int, ...], None] = {}
        for word in words:
            first, spaced = (
                tuple(self.tokenizer(before + word.lstrip(), add_special_tokens=False)["input_ids"])
                for before in ("", " ")
            )
            if not first:
                raise ValueError(f"The text {word!r} in bad_words has no tokens: leave it out.")
            spellings[first] = None
            if spaced[-len(first) :] != first:
                spellings[spaced] = None
        return tuple(spellings)
