"""The text of an answer while it grows.

The claim: what has been shown never has to be taken back. A token may end in the middle of a character, and a text may
have begun a stop string that is not complete yet: both are held back until it is clear what they become. The whole
text is, to the letter, what `text_of` makes of all the tokens.
"""

import re
from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from .batching import text_of

BROKEN = "\ufffd"  # what half a character is decoded to


class TextStream:
    """Grows by tokens, and shows what is certain.

    Args:
        tokenizer: the model's.
        stop: the texts that end the answer.

    Attributes:
        text: what can be shown: it only ever grows.
        stopped: whether a stop string has appeared; `text` ends before it.
    """

    def __init__(self, tokenizer, stop: Sequence[str] = ()):
        self.text, self.stopped = "", False
        self._tokenizer, self._stop = tokenizer, stop
        self._decoded = ""  # text and what is held back behind it
        self._token_ids: list[int] = []
        # The tokenizers library can go on from where it was. It is started behind a letter, as `text_of` is.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        letter = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._stream = DecodeStream(ids=letter, skip_special_tokens=True) if self._backend else None
        self._bytes: list[int] = []  # a run of byte tokens that has not ended

    def push(self, token_id: int) -> str:
        """One more token; returns what can be shown in addition."""
        self._token_ids.append(token_id)
        self._decoded += self._decode(token_id)
        return self._show(len(self._decoded) - self._begun_stop())

    def finish(self) -> str:
        """No more tokens: what was held back turns out to be text, unless a stop string came. Returns it."""
        if self.stopped:
            return ""
        self._decoded = text_of(self._token_ids, self._tokenizer)
        return self._show(len(self._decoded))

    def _decode(self, token_id: int) -> str:
        """What the token adds to the text; nothing while a character is incomplete."""
        if self._is_byte(token_id) or (self._bytes and token_id in self._tokenizer.all_special_ids):
            self._bytes.append(token_id)
            return ""
        token_ids, self._bytes = [*self._bytes, token_id], []
        if self._stream is not None:
            try:
                return self._stream.step(self._backend, token_ids) or ""
            except Exception:  # "Invalid prefix": a decoder that takes back what it said; on without the library
                self._stream = None
        text = text_of(self._token_ids, self._tokenizer)
        return "" if text.endswith(BROKEN) else text[len(self._decoded) :]

    def _is_byte(self, token_id: int) -> bool:
        """Sentencepiece spells rare characters in bytes, as `<0xE2>`. One bad byte spoils a whole run of them, so that
        only its end tells how it reads."""
        return re.fullmatch("<0x[0-9A-F]{2}>", self._tokenizer.convert_ids_to_tokens(token_id) or "") is not None

    def _show(self, end: int) -> str:
        """Make the text longer, up to `end` or to the first stop string, which is in what was held back."""
        found = [place for stop in self._stop if (place := self._decoded.find(stop, len(self.text))) >= 0]
        if found:
            end, self.stopped = min(found), True
        new = self._decoded[len(self.text) : end]
        self.text += new
        return new

    def _begun_stop(self) -> int:
        """How many characters at the end could be the beginning of a stop string."""
        begun = (
            length
            for stop in self._stop
            for length in range(min(len(stop) - 1, len(self._decoded)), 0, -1)
            if stop.startswith(self._decoded[-length:])
        )
        return max(begun, default=0)
