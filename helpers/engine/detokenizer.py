"""The text of an output while it grows.

Text that has been returned is never withdrawn. The newest token may end in the middle of a character, and the text may
end with the beginning of a stop string. Such text is held back until later tokens complete it. After `finish`, the text
is exactly what `text_of` returns for all tokens, cut before the first stop string.
"""

import re
from collections.abc import Sequence

from .stop_strings import StopStringSearch

REPLACEMENT_CHARACTER = "\ufffd"  # what an incomplete character is decoded to


def letter_ids(tokenizer) -> list[int]:
    """Return a letter's tokens, to decode others after them: sentencepiece drops the space before a first word."""
    return tokenizer("a", add_special_tokens=False)["input_ids"]  # some tokenizers make it " a"


def text_of(token_ids: list[int], tokenizer) -> str:
    """Return the text of generated tokens as it follows a prompt, without special tokens such as EOS.

    All tokens are decoded together, because a character may span several, and after a letter, which is then removed.
    """
    letter = letter_ids(tokenizer)
    before, text = (
        tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for ids in (letter, letter + token_ids)
    )
    return text[len(before) :]


class IncrementalDetokenizer:
    """Decodes one token after another and returns text as soon as it is certain.

    Args:
        tokenizer: the model's tokenizer.
        stop: the stop strings, which end the output.
        min_tokens: stop strings that are complete within this many tokens are ignored.

    Attributes:
        text: the text that is certain; it only grows.
        stopped: whether a stop string has appeared; `text` ends before it.
    """

    def __init__(self, tokenizer, stop: Sequence[str] = (), min_tokens: int = 0):
        self.text, self.stopped = "", False
        self._tokenizer, self._stop, self._search = tokenizer, stop, StopStringSearch(stop)
        self._decoded = ""  # `text` and what is held back after it
        self._min_tokens, self._ignored = min_tokens, 0  # stop strings do not count in the first characters
        self._token_ids: list[int] = []
        self._bytes: list[int] = []  # a run of byte tokens that may continue
        # The tokenizers library decodes incrementally. It starts after a letter, as `text_of` does.
        self._backend, self._stream = getattr(tokenizer, "backend_tokenizer", None), None
        if self._backend is not None:
            from tokenizers.decoders import DecodeStream  # only here: scheduling needs no tokenizer

            self._stream = DecodeStream(ids=letter_ids(tokenizer), skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        """Append a token and return the text that has become certain."""
        if self.stopped:
            return ""
        self._token_ids.append(token_id)
        new = self._decode(token_id)
        self._decoded += new
        if len(self._token_ids) <= self._min_tokens:
            self._ignored = len(self._decoded)
        stop = self._search.extend(new, self._ignored)
        return self._show(len(self._decoded) - self._search.num_held_back, stop)

    def finish(self) -> str:
        """Return the text that was held back, now that no tokens follow; nothing if a stop string has appeared."""
        if self.stopped:
            return ""
        self._decoded = text_of(self._token_ids, self._tokenizer)
        if len(self._token_ids) <= self._min_tokens:
            self._ignored = len(self._decoded)
        shown = len(self.text)
        stop = StopStringSearch(self._stop).extend(self._decoded[shown:], self._ignored - shown)
        return self._show(len(self._decoded), None if stop is None else shown + stop)

    def _decode(self, token_id: int) -> str:
        """Return the text that a token adds; nothing while a character is incomplete."""
        if self._is_byte(token_id) or (self._bytes and token_id in self._tokenizer.all_special_ids):
            self._bytes.append(token_id)
            return ""
        token_ids, self._bytes = [*self._bytes, token_id], []
        if self._stream is not None:
            try:
                return self._stream.step(self._backend, token_ids) or ""
            except Exception:  # "Invalid prefix": the decoder changed earlier text; continue without it
                self._stream = None
        text = text_of(self._token_ids, self._tokenizer)
        return "" if text.endswith(REPLACEMENT_CHARACTER) else text[len(self._decoded) :]

    def _is_byte(self, token_id: int) -> bool:
        """Return whether the token is a single byte such as `<0xE2>`.

        Sentencepiece encodes rare characters as bytes. One invalid byte makes the whole run of bytes invalid, so a run
        is decoded once it ends.
        """
        return re.fullmatch("<0x[0-9A-F]{2}>", self._tokenizer.convert_ids_to_tokens(token_id) or "") is not None

    def _show(self, end: int, stop: int | None) -> str:
        """Extend the text to `end`, or to the beginning of a stop string, and return the new part."""
        if stop is not None:
            end, self.stopped = stop, True
        new = self._decoded[len(self.text) : end]
        self.text += new
        return new
