"""The search for stop strings, compared with one that reads the whole text again after every extension."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.detokenizer import StopStringSearch

texts = st.text("ab", min_size=1, max_size=6)  # with two letters, beginnings and repetitions are frequent


def first_stop(text, stops):
    """Return where the first stop string begins; None if there is none."""
    return min((text.find(stop) for stop in stops if stop in text), default=None)


def length_of_begun_stop(text, stops):
    """Return how many characters at the end of a text are the beginning of a stop string."""
    ends = range(1, len(text) + 1)
    return max((n for n in ends if any(stop.startswith(text[-n:]) for stop in stops)), default=0)


@settings(max_examples=1000)
@given(st.lists(texts | st.just(""), max_size=12), st.lists(texts, max_size=4))
@example(["aabaab", "aaab"], ["aabaaa"])  # falls back twice
@example(["ab"], ["b", "ab"])  # both end at the same character
def test_the_search_finds_and_holds_back_what_a_search_of_the_whole_text_does(pieces, stops):
    search, text = StopStringSearch(stops), ""
    for piece in pieces:
        text += piece
        found = search.extend(piece)
        assert found == first_stop(text, stops)
        if found is not None:
            return
        assert search.num_held_back == length_of_begun_stop(text, stops)


def test_stop_strings_that_end_within_the_ignored_characters_do_not_count():
    search = StopStringSearch(["ab", "bca"])
    assert search.extend("abab", ignored=4) is None and search.num_held_back == 1
    assert search.extend("ca", ignored=4) == 3  # it begins within them
    assert StopStringSearch(["ab"]).extend("abxab", ignored=2) == 3
    assert StopStringSearch(["ab"]).extend("abxab", ignored=5) is None
