"""Incremental text, on every kind of tokenizer: text that was shown stays, and in the end it equals that of `text_of`.

Hypothesis pushes any ids at all: a model may generate half a character and never the rest. The judge is `text_of`,
which decodes all tokens together and only once.
"""

import functools

import pytest
from conftest import PROMPTS, byte_tokenizer, letter_tokenizer, wrapped
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import Unigram

from helpers import load_model
from helpers.detokenizer import StoppingDetokenizer, StopStringSearch, make_detokenizer, text_of

TEXTS = [
    "a fox 🦊 who said “né?” 👩‍👩‍👧 in 北京 — and left.",
    "  two  spaces,\n\n\ttabs and newlines \n",
    "Ω≈ç√∫ 🇩🇪🇫🇷 x́ ﷽ é",
    "\ufffd is a character, too: \ufffd",
    *PROMPTS[:3],
]


def sentencepiece_tokenizer():
    """As in Llama 2 and Gemma: "▁" is a space, and characters without a token are spelled in bytes, `<0xE2>`."""
    pieces = {"▁": -2.0, "▁the": -2.5, "ing": -2.5, "▁a": -2.5} | dict.fromkeys("abcdefghijklmnopqrstuvwxyz.,", -3.0)
    bytes_ = {f"<0x{byte:02X}>": -9.0 for byte in range(256)}
    vocabulary = [("<unk>", 0.0), ("<eos>", 0.0), *bytes_.items(), *pieces.items()]
    bare = Tokenizer(Unigram(vocabulary, unk_id=0, byte_fallback=True))
    bare.pre_tokenizer = pre_tokenizers.Metaspace()
    spaces = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    bare.decoder = decoders.Sequence([spaces[0], decoders.ByteFallback(), decoders.Fuse(), spaces[1]])
    bare.add_special_tokens(["<eos>"])
    return wrapped(bare)


class Slow:
    """A tokenizer from outside the tokenizers library: it has all that text needs, and no `backend_tokenizer`."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __call__(self, text, **options):
        return self._tokenizer(text, **options)

    def __len__(self):
        return len(self._tokenizer)

    def __getattr__(self, name):
        if name not in ("decode", "convert_ids_to_tokens", "all_special_ids"):
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


TOKENIZERS = {
    "embedded": lambda: load_model()[1],
    "bytes": byte_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
    "letters": letter_tokenizer,
    "slow bytes": lambda: Slow(byte_tokenizer()),
    "slow sentencepiece": lambda: Slow(sentencepiece_tokenizer()),
}
tokenizer_of = functools.cache(lambda name: TOKENIZERS[name]())
of_every_kind = pytest.mark.parametrize("kind", TOKENIZERS)


def ids_for(kind):
    """Real text, any tokens, and both in turn."""
    tokenizer = tokenizer_of(kind)
    texts = ["abc", "high"] if kind == "letters" else TEXTS
    real = st.sampled_from(texts).map(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
    anything = st.lists(st.integers(0, len(tokenizer) - 1), max_size=12)
    return st.lists(real | anything, max_size=3).map(lambda parts: [id for part in parts for id in part][:80])


def decoded(tokenizer, ids, stop=()):
    """Push tokens until a stop string appears, as the engine does.

    Returns:
        The detokenizer, and the text that it showed after each token.
    """
    detokenizer, shown = make_detokenizer(tokenizer, stop, 0), []
    for id in ids:
        detokenizer.push(id)
        shown.append(detokenizer.text)
        if detokenizer.stopped:
            break
    detokenizer.finish()
    return detokenizer, shown


@of_every_kind
def test_shown_text_stays_and_in_the_end_it_is_the_text_of_all_tokens(kind):
    tokenizer = tokenizer_of(kind)

    @settings(max_examples=60, phases=[Phase.explicit, Phase.generate])
    @given(ids_for(kind))
    @example([])
    def check(ids):
        whole = text_of(ids, tokenizer)
        detokenizer, shown = decoded(tokenizer, ids)
        assert detokenizer.text == whole
        assert not detokenizer.stopped
        for text in shown:  # half a character that is whole later would fail here
            assert whole.startswith(text)

    check()


@of_every_kind
def test_text_is_shown_as_soon_as_it_is_certain(kind):
    # Holding everything back until the end would pass the test above.
    tokenizer = tokenizer_of(kind)
    ids = tokenizer(
        "a big hedge hid a fig bag" if kind == "letters" else "the rain in spain falls", add_special_tokens=False
    )["input_ids"]
    _, shown = decoded(tokenizer, ids)
    assert shown == [text_of(ids[: n + 1], tokenizer) for n in range(len(ids))]


def test_a_stop_string_in_a_run_of_bytes_within_min_tokens_is_ignored():
    tokenizer = tokenizer_of("sentencepiece")
    letter, newline = tokenizer.convert_tokens_to_ids(["b", "<0x0A>"])
    euro = tokenizer.convert_tokens_to_ids(["<0xE2>", "<0x82>", "<0xAC>"])
    for ids, min_tokens, stop, stopped in (
        ([letter, newline, letter], 2, "\n", False),
        ([letter, newline, letter], 1, "\n", True),
        ([letter, newline, newline, letter], 2, "\n", True),  # the second newline is beyond
        ([newline, *euro, letter], 4, "€", False),
        ([newline, *euro, letter], 3, "€", True),  # it was not complete
        ([newline, *euro, letter], 3, "\n", False),
    ):
        detokenizer = StoppingDetokenizer(tokenizer, [stop], min_tokens)
        for token_id in ids:
            detokenizer.push(token_id)
        assert detokenizer.stopped == stopped, (ids, min_tokens, stop)


def test_the_space_before_a_first_word_is_text_unless_the_tokenizer_adds_it_to_every_text():
    tokenizer = tokenizer_of("sentencepiece")
    ids = tokenizer.convert_tokens_to_ids(["▁the", "ing", "▁a"])
    assert (tokenizer.decode(ids), text_of(ids, tokenizer)) == ("theing a", " theing a")
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert tokenizer.decode(tokenizer("a")["input_ids"]) == " a"
    assert text_of(tokenizer("fox")["input_ids"], tokenizer) == " fox"


# --- stop strings ---------------------------------------------------------------------------------------------------

# With two letters, beginnings and repetitions are frequent.
texts = st.text("ab", min_size=1, max_size=6)


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


STOPS = st.lists(st.text("ab🦊 e", min_size=1, max_size=4), max_size=3)


@pytest.mark.parametrize("kind", ["bytes", "embedded", "sentencepiece", "slow bytes"])
def test_a_stop_string_ends_the_text_before_it_and_no_part_of_it_is_ever_shown(kind):
    tokenizer = tokenizer_of(kind)
    stopped = {True: 0, False: 0}

    @settings(max_examples=150, phases=[Phase.generate])
    @given(st.text("ab🦊 e", max_size=12), STOPS)
    def check(text, stops):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        whole = text_of(ids, tokenizer)
        detokenizer, shown = decoded(tokenizer, ids, stops)
        found = any(stop in whole for stop in stops)
        stopped[found] += 1
        assert found == (detokenizer.text != whole)
        if found:
            assert any(whole.startswith(detokenizer.text + stop) for stop in stops)
            assert not any(stop in detokenizer.text for stop in stops)
        for text in shown:  # the text ends where the stop string begins, and did not reach further before
            assert detokenizer.text.startswith(text)

    check()
    assert min(stopped.values()) > 20


class CountingString(str):
    """A stop string that counts how often a search compares its beginning with the text."""

    comparisons = 0

    def startswith(self, beginning):
        CountingString.comparisons += 1
        return super().startswith(beginning)


@pytest.mark.parametrize("length", [10, 1000])
def test_the_cost_of_a_stop_string_is_linear_in_the_text_however_long_the_string_is(length):
    # The text always ends with the beginning of the stop string, and never contains all of it.
    tokenizer, text = tokenizer_of("bytes"), ("a" * (length - 1) + "b") * (2000 // length)
    detokenizer = StoppingDetokenizer(tokenizer, [CountingString("a" * length)])
    CountingString.comparisons = 0
    for id in tokenizer(text)["input_ids"]:
        detokenizer.push(id)
    assert not detokenizer.stopped
    assert len(text) <= CountingString.comparisons <= 4 * len(text)
