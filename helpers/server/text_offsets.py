"""Where each token begins in the text of a completion: the `text_offset` in OpenAI's log-probabilities.

A token that is part of a character begins where the character does. A special token of an output has no text, so it
begins where the text ends.
"""

from functools import cached_property

from ..detokenizer import REPLACEMENT_CHARACTER, IncrementalDetokenizer, letter_ids
from ..engine import Prompt

MAX_BYTES = 4  # of a character in UTF-8


class TextOffsets:
    """The offsets of tokens that continue a text.

    Args:
        tokenizer: decodes the tokens.
        start: the length of the text that they continue.
    """

    def __init__(self, tokenizer, start: int = 0):
        self._start, self._detokenizer = start, IncrementalDetokenizer(tokenizer)

    def push(self, token_ids: list[int]) -> list[int]:
        """Append tokens, and return where each of them begins."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._start + len(self._detokenizer.text))
            self._detokenizer.push(token_id)
        return offsets


class EchoedPrompt:
    """A prompt that its choices begin with.

    Args:
        prompt: as the client sent it. Token ids are decoded with all special tokens.
        token_ids: its tokens.
        tokenizer: the model's tokenizer.
    """

    def __init__(self, prompt: Prompt, token_ids: list[int], tokenizer):
        self.token_ids, self._prompt, self._tokenizer = token_ids, prompt, tokenizer

    @property
    def text(self) -> str:
        """The text of the prompt."""
        return self._prompt if isinstance(self._prompt, str) else self._decoded[0]

    @cached_property
    def offsets(self) -> list[int]:
        """Where each token begins in the text."""
        if not isinstance(self._prompt, str) or not getattr(self._tokenizer, "is_fast", False):
            return self._decoded[1]
        offsets, end = [], 0
        for first, last in self._tokenizer(self._prompt, return_offsets_mapping=True)["offset_mapping"]:
            # Some tokenizers leave the space before a word out of its token. A special token that the prompt does not
            # contain is reported as the empty range (0, 0).
            offsets.append(end if first == last else min(first, end))
            end = max(end, last)
        return offsets

    @cached_property
    def _decoded(self) -> tuple[str, list[int]]:
        """The text and the offsets of the tokens, decoded one character after another."""
        decode, letter = self._tokenizer.decode, letter_ids(self._tokenizer)
        text, offsets, character = "", [], []
        for num_tokens, token_id in enumerate(self.token_ids, start=1):
            offsets.append(len(text))
            character.append(token_id)
            before = letter if text else []
            whole = decode(before + character, clean_up_tokenization_spaces=False)
            is_complete = not whole.endswith(REPLACEMENT_CHARACTER) or len(character) == MAX_BYTES
            if is_complete or num_tokens == len(self.token_ids):
                text += whole[len(decode(before)) :]
                character = []
        return text, offsets
