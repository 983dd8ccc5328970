"""Stop strings, found in a text while it grows.

A token extends the text by a few characters. The search reads only these and the characters before them that may be the
beginning of a stop string. No other text can be part of one, so the search remembers no more.
"""

from collections.abc import Sequence


class StopStringSearch:
    """Searches a growing text for the first stop string.

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
        done = max(ignored, self._text_length) - start  # no stop string ends within these characters of the tail
        found = [tail.find(stop, max(0, done + 1 - len(stop))) for stop in self._stops]
        self._text_length += len(text)
        # The next beginning of a stop string lies in the tail, which is short, so few ends are compared.
        ends = (tail[place:] for place in range(max(0, len(tail) + 1 - self._longest), len(tail)))
        self._begun = next((end for end in ends if any(_begins(stop, end) for stop in self._stops)), "")
        return min((start + place for place in found if place >= 0), default=None)


def _begins(stop: str, text: str) -> bool:
    return stop.startswith(text) and stop != text
