"""Stop strings, found in a text while it grows.

A token extends the text by a few characters, and only these are examined. For each stop string, the search remembers
how many of its characters the end of the text already matches. That is the algorithm of Knuth, Morris and Pratt ("Fast
pattern matching in strings", 1977). It examines a number of characters that is linear in the text, however long the
stop strings are.
"""

import functools
from collections.abc import Sequence


class StopStringSearch:
    """Searches a growing text for the first stop string.

    Args:
        stops: the stop strings, none of them empty.

    Attributes:
        num_held_back: how many characters at the end of the text may be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str]):
        self.num_held_back = 0
        self._text_length = 0
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._matched = [0] * len(stops)  # how many characters of each stop string the end of the text matches

    def extend(self, text: str, ignored: int = 0) -> int | None:
        """Append text, and return where the first stop string begins in the whole text; None if none is complete.

        Args:
            text: what to append.
            ignored: stop strings that end within this many characters of the whole text do not count.
        """
        starts = []
        for number, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[number]
            for length, character in enumerate(text, start=self._text_length + 1):
                while stop[matched] != character and matched:
                    matched = borders[matched - 1]
                matched += stop[matched] == character
                if matched == len(stop):
                    start, matched = length - matched, borders[-1]
                    if length > ignored:
                        starts.append(start)
                        break
            self._matched[number] = matched
        self._text_length += len(text)
        self.num_held_back = max(self._matched, default=0)
        return min(starts, default=None)


@functools.lru_cache(maxsize=256)  # the outputs of a request share their stop strings
def _borders(stop: str) -> tuple[int, ...]:
    """Return, for each beginning of a stop string, the length of its longest proper beginning that is also its end."""
    borders, matched = [0], 0
    for character in stop[1:]:
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        matched += stop[matched] == character
        borders.append(matched)
    return tuple(borders)
