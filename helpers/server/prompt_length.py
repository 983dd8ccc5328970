"""How much text a token can hold: a text that is too long for a model is refused before it is tokenized.

Tokenizing a megabyte takes about a second. But no token holds more characters than the longest entry of the vocabulary,
so the length of a text gives a lower bound on its tokens. vLLM refuses long prompts by the same bound
(`max_chars_per_token`).

The bound requires a tokenizer that spells unknown characters in bytes, and special tokens that take no spaces beside
them. For any other one there is no bound, since one token may stand for a text of any length. We assume without a check
that the tokenizer uses its bytes for unknown characters, and that none of its stages strips or drops spaces.
"""

import functools
from collections.abc import Sized

from ..detokenizer import check_encoding
from ..engine.sequence import GREEDY, Prompt
from ..engine.validation import RequestValidator
from ..sampling_params import SamplingParams


def check_length(validator: RequestValidator, prompt: Prompt, params: SamplingParams = GREEDY) -> None:
    """Refuse a prompt that is certainly too long for the model's context, without looking at its tokens.

    Raises:
        ValueError: the prompt has too many token ids, or more characters than as many tokens can hold.
    """
    is_text, context = isinstance(prompt, str), validator.model.context_length
    if is_text:
        check_encoding(prompt)
    if not isinstance(prompt, Sized) or context is None or len(prompt) < context:
        return  # it is short enough to look at its tokens
    least = _token_length(validator.tokenizer).least_tokens(prompt) if is_text else len(prompt)
    try:
        validator.check_counts(least, params)
    except ValueError as error:
        if not is_text:
            raise
        raise ValueError(f"The prompt's {len(prompt)} characters are at least {least} tokens. {error}") from error


class TokenLength:
    """The longest token of a tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer, or any other, for which there is no bound.

    Attributes:
        max_characters: the most characters that one token holds; None if there is no bound.
    """

    def __init__(self, tokenizer):
        from tokenizers.pre_tokenizers import ByteLevel  # only here: scheduling needs no tokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)  # of the tokenizers library
        vocabulary = {} if backend is None else backend.get_vocab()
        spellings = set(ByteLevel.alphabet()), {f"<0x{byte:02X}>" for byte in range(256)}
        self._normalizer = None if backend is None else backend.normalizer
        self.max_characters: int | None = None
        added = [] if backend is None else backend.get_added_tokens_decoder().values()
        takes_spaces = any(token.lstrip or token.rstrip for token in added)
        if not takes_spaces and any(vocabulary.keys() >= spelling for spelling in spellings):
            # A token of bytes is spelled with one character per byte, and no character has less than a byte. Special
            # tokens are found before normalization, but `least_tokens` normalizes them, too.
            special = (self._normalized(token.content) for token in added)
            self.max_characters = max(map(len, [*vocabulary, *special]))

    def least_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens of a text; 0 if there is no bound."""
        if self.max_characters is None:
            return 0
        return -(-len(self._normalized(text)) // self.max_characters)

    def _normalized(self, text: str) -> str:
        """Normalize a text, which may shorten it; this takes a twentieth of the tokenizer's time."""
        return text if self._normalizer is None else self._normalizer.normalize_str(text)


@functools.lru_cache(maxsize=2)  # a server has one tokenizer
def _token_length(tokenizer) -> TokenLength:
    return TokenLength(tokenizer)
