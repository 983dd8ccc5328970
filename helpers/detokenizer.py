"""The text of an output while it grows.

Text that has been returned is never withdrawn. The newest token may end in the middle of a character, and the text may
end with the beginning of a stop string. Such text is held back until later tokens complete it. After `finish`, the text
is exactly what `text_of` returns for all tokens, cut before the first stop string.
"""

import re
from collections.abc import Sequence

REPLACEMENT_CHARACTER = "\ufffd"  # what an incomplete character is decoded to
BYTE = re.compile("<0x[0-9A-F]{2}>")


def letter_ids(tokenizer) -> list[int]:
    """Return a letter's tokens, to decode others after them: sentencepiece drops the space before a first word."""
    return tokenizer("a", add_special_tokens=False)["input_ids"]  # some tokenizers make it " a"


def text_of(token_ids: list[int], tokenizer) -> str:
    """Return the text of generated tokens as it follows a prompt, without special tokens such as EOS.

    All tokens are decoded together, because a character may span several, and after a letter, which is then removed.
    """
    letter, how = letter_ids(tokenizer), {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    before, text = (tokenizer.decode(ids, **how) for ids in (letter, letter + token_ids))
    return text[len(before) :]


def check_encoding(text: str) -> None:
    """Raise a ValueError if a text contains half of a surrogate pair, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The prompt cannot be encoded: character {error.start + 1}, {text[error.start]!a}, is half of a "
            f"surrogate pair. Remove or replace it."
        ) from error


class IncrementalDetokenizer:
    """Decodes one token after another and returns text as soon as it is certain.

    Args:
        tokenizer: the model's tokenizer.

    Attributes:
        text: the text that is certain; it only grows.
        stopped: whether a stop string has appeared; `text` ends before it.
    """

    def __init__(self, tokenizer):
        self.text, self.stopped = "", False
        self._tokenizer = tokenizer
        self._held_back = ""  # what is decoded after `text`, but may be the beginning of a stop string
        self._token_ids: list[int] = []
        self._bytes: list[int] = []  # a run of byte tokens that may continue
        # The tokenizers library decodes incrementally. It starts after a letter, as `text_of` does.
        self._backend, self._stream = getattr(tokenizer, "backend_tokenizer", None), None
        if self._backend is not None:
            from tokenizers.decoders import DecodeStream  # only here: scheduling needs no tokenizer

            self._stream = DecodeStream(ids=letter_ids(tokenizer), skip_special_tokens=True)

    def push(self, token_id: int) -> None:
        """Append a token, and the text that becomes certain with it."""
        self._token_ids.append(token_id)
        self.text += self._decode(token_id)

    def finish(self) -> None:
        """Append the text that was held back, now that no tokens follow; nothing if a stop string has appeared."""
        self.text += text_of(self._token_ids, self._tokenizer)[len(self.text) :]

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
        return self._decode_all()

    def _decode_all(self) -> str:
        """Return the text that the newest token adds, where no decoder goes on from the text so far."""
        text = text_of(self._token_ids, self._tokenizer)
        return "" if text.endswith(REPLACEMENT_CHARACTER) else text[len(self.text + self._held_back) :]

    def _is_byte(self, token_id: int) -> bool:
        """Return whether the token is a single byte such as `<0xE2>`.

        Sentencepiece encodes rare characters as bytes. One invalid byte makes the whole run of bytes invalid, so a run
        is decoded once it ends.
        """
        return BYTE.fullmatch(self._tokenizer.convert_ids_to_tokens(token_id) or "") is not None


class StoppingDetokenizer(IncrementalDetokenizer):
    """A detokenizer that stops before the first stop string.

    Args:
        tokenizer: the model's tokenizer.
        stop: the stop strings, which end the output.
        min_tokens: stop strings that are complete within this many tokens are ignored.
    """

    def __init__(self, tokenizer, stop: Sequence[str], min_tokens: int = 0):
        super().__init__(tokenizer)
        self._stop, self._search = stop, StopStringSearch(stop)
        self._min_tokens, self._ignored = min_tokens, 0  # stop strings do not count in the first characters

    def push(self, token_id: int) -> None:
        if self.stopped:
            return
        self._token_ids.append(token_id)
        new = self._decode(token_id)
        decoded = self.text + self._held_back + new
        if len(self._token_ids) <= self._min_tokens:
            self._ignored = len(decoded) + self._num_pending_characters()
        stop = self._search.extend(new, self._ignored)
        self._show(decoded, len(decoded) - self._search.num_held_back, stop)

    def finish(self) -> None:
        if self.stopped:
            return
        decoded, shown = text_of(self._token_ids, self._tokenizer), len(self.text)
        if len(self._token_ids) <= self._min_tokens:
            self._ignored = len(decoded)
        stop = StopStringSearch(self._stop).extend(decoded[shown:], self._ignored - shown)
        self._show(decoded, len(decoded), None if stop is None else shown + stop)

    def _num_pending_characters(self) -> int:
        """Return how many characters are complete in the run of byte tokens, whose text follows when it ends."""
        pieces = (
            self._tokenizer.convert_ids_to_tokens(token_id) for token_id in self._bytes if self._is_byte(token_id)
        )
        return len(bytes(int(piece[3:5], 16) for piece in pieces).decode("utf-8", errors="ignore"))

    def _show(self, decoded: str, end: int, stop: int | None) -> None:
        """Extend the text to `end`, or to the beginning of a stop string."""
        self.stopped, end = stop is not None, end if stop is None else stop
        self.text, self._held_back = self.text + decoded[len(self.text) : end], decoded[end:]


def make_detokenizer(tokenizer, stop: Sequence[str], min_tokens: int) -> IncrementalDetokenizer:
    """Return a detokenizer for an output; see `StoppingDetokenizer`."""
    return StoppingDetokenizer(tokenizer, stop, min_tokens) if stop else IncrementalDetokenizer(tokenizer)


class StopStringSearch:
    """Searches a growing text for the first stop string.

    A token extends the text by a few characters. The search reads only these and the characters before them that may be
    the beginning of a stop string. No other text can be part of one, so the search remembers no more.

    Args:
        stops: the stop strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops, self._longest = stops, max(map(len, stops), default=0)
        self._begun = ""  # the longest end of the text that a stop string may continue
        self._text_length = 0

    @property
    def num_held_back(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        return len(self._begun)

    def extend(self, text: str, ignored: int = 0) -> int | None:
        """Append text, and return where the first stop string begins in the whole text; None if none is complete.

        Args:
            text: what to append.
            ignored: stop strings that end within this many characters of the whole text do not count.
        """
        tail, start = self._begun + text, self._text_length - len(self._begun)
        excluded = max(ignored, self._text_length) - start  # no stop string ends within these characters of the tail
        found = [tail.find(stop, max(0, excluded + 1 - len(stop))) for stop in self._stops]
        self._text_length += len(text)
        # The next beginning of a stop string lies in the tail, which is short, so few ends are compared.
        ends = (tail[index:] for index in range(max(0, len(tail) + 1 - self._longest), len(tail)))
        self._begun = next((end for end in ends if any(_begins(stop, end) for stop in self._stops)), "")
        return min((start + index for index in found if index >= 0), default=None)


def _begins(stop: str, text: str) -> bool:
    return stop.startswith(text) and stop != text
