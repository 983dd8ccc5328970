"""Text that grows, on every kind of tokenizer: what has been shown stays, and in the end it is what `text_of` says.

Hypothesis pushes any ids at all: a model may say half a character and never the rest. The judge is `text_of`, which
decodes all tokens together and only once.
"""

import functools

import pytest
from conftest import PROMPTS, byte_tokenizer, letter_tokenizer, wrapped
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import Unigram

from helpers import load_model
from helpers.batching import text_of
from helpers.text_stream import BROKEN, TextStream

TEXTS = [
    "a fox 🦊 who said “né?” 👩‍👩‍👧 in 北京 — and left.",
    "  two  spaces,\n\n\ttabs and newlines \n",
    "Ω≈ç√∫ 🇩🇪🇫🇷 x́ ﷽ é",
    "\ufffd is a character, too: \ufffd",
    *PROMPTS[:3],
]


def sentencepiece_tokenizer():
    """As in Llama 2 and Gemma: "▁" is a space, and what has no token is spelled in bytes, `<0xE2>`."""
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
    """A tokenizer that is not of the tokenizers library: it has all that text needs, and no `backend_tokenizer`."""

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


def grown(tokenizer, ids, stop=()):
    """The stream, and what it had shown after each token. It takes no more once it has stopped, like the engine."""
    stream, shown, pieces = TextStream(tokenizer, stop), [], ""
    for id in ids:
        pieces += stream.push(id)
        shown.append(stream.text)
        assert pieces == stream.text
        if stream.stopped:
            break
    pieces += stream.finish()
    assert pieces == stream.text
    return stream, shown


@of_every_kind
def test_what_is_shown_stays_and_in_the_end_it_is_the_text_of_all_tokens(kind):
    tokenizer = tokenizer_of(kind)

    @settings(derandomize=True, deadline=None, max_examples=60, phases=[Phase.explicit, Phase.generate])
    @given(ids_for(kind))
    @example([])
    @example(
        tokenizer("a" if kind == "letters" else "🦊", add_special_tokens=False)["input_ids"][:-1]
    )  # ends in the middle of a character
    def check(ids):
        whole = text_of(ids, tokenizer)
        stream, shown = grown(tokenizer, ids)
        assert stream.text == whole
        assert not stream.stopped
        for text in shown:  # so no broken character was shown that later was whole, either
            assert whole.startswith(text)

    check()


@of_every_kind
def test_text_is_shown_as_soon_as_it_is_certain(kind):
    # Holding everything back until the end would pass the test above.
    tokenizer = tokenizer_of(kind)
    ids = tokenizer(
        "a big hedge hid a fig bag" if kind == "letters" else "the rain in spain falls", add_special_tokens=False
    )["input_ids"]
    _, shown = grown(tokenizer, ids)
    assert shown == [text_of(ids[: n + 1], tokenizer) for n in range(len(ids))]


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "slow bytes"])
def test_a_character_of_several_tokens_is_shown_whole_or_not_at_all(kind):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer("a 🦊 b", add_special_tokens=False)["input_ids"]
    _, shown = grown(tokenizer, ids)
    assert not any(BROKEN in text for text in shown)
    before, fox = (next(n for n, text in enumerate(shown) if text.endswith(end)) for end in (" ", ("🦊", "🦊 ")))
    assert fox - before >= 4, "a fox is four bytes"


def test_a_run_of_bytes_is_held_back_until_it_ends_since_a_bad_one_spoils_it_all():
    # What makes this kind of tokenizer special; without it, the euro sign would be shown and then taken back.
    tokenizer = tokenizer_of("sentencepiece")
    euro = tokenizer.convert_tokens_to_ids(["<0xE2>", "<0x82>", "<0xAC>"])
    bad, letter = tokenizer.convert_tokens_to_ids(["<0xFF>", "b"])
    assert (text_of(euro, tokenizer), text_of([*euro, bad], tokenizer)) == ("€", 4 * BROKEN)
    assert grown(tokenizer, [*euro, letter])[1] == ["", "", "", "€b"]
    _, shown = grown(tokenizer, [*euro, bad, letter, letter])
    assert shown == ["", "", "", "", 4 * BROKEN + "b", 4 * BROKEN + "bb"]
    assert grown(tokenizer, [*euro, tokenizer.eos_token_id, bad, letter])[0].text == 4 * BROKEN + "b"


def test_a_decoder_that_takes_back_what_it_said_does_not_end_the_stream():
    # WordPiece closes up "do n't" when it sees the second half. There is no right answer then, but there is one.
    tokenizer = letter_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "x")])
    stream, shown = grown(tokenizer, [3, 1, 2, 4])  # "c", "ca", "cx", "cxd"
    assert shown[:2] == ["c", "ca"]
    assert shown == sorted(shown, key=len) and stream.text.startswith("ca") and stream.text.endswith("d")


# --- stop strings ---------------------------------------------------------------------------------------------------

STOPS = st.lists(st.text("ab🦊 e", min_size=1, max_size=4), max_size=3)


@pytest.mark.parametrize("kind", ["bytes", "embedded", "sentencepiece", "slow bytes"])
def test_a_stop_string_ends_the_text_before_it_and_no_part_of_it_was_ever_shown(kind):
    tokenizer = tokenizer_of(kind)
    stopped = {True: 0, False: 0}

    @settings(derandomize=True, deadline=None, max_examples=150, phases=[Phase.generate])
    @given(st.text("ab🦊 e", max_size=12), STOPS)
    def check(text, stops):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        whole = text_of(ids, tokenizer)
        stream, shown = grown(tokenizer, ids, stops)
        found = any(stop in whole for stop in stops)
        stopped[found] += 1
        assert found == (stream.text != whole)
        if found:
            assert any(whole.startswith(stream.text + stop) for stop in stops)
            assert not any(stop in stream.text for stop in stops)
        for text in shown:  # where the stop string begins, the text ends: no part of it was shown before, either
            assert stream.text.startswith(text)

    check()
    assert min(stopped.values()) > 20


def shown_after_each(text, *stop):
    tokenizer = tokenizer_of("bytes")
    stream, shown = grown(tokenizer, tokenizer(text)["input_ids"], stop)
    return [*shown, stream.text], stream.stopped


def test_the_beginning_of_a_stop_string_is_held_back_and_given_out_when_it_is_none():
    assert shown_after_each("x\n\ny", "\n\n") == (["x", "x", "x", "x"], True)
    assert shown_after_each("x\ny", "\n\n") == (["x", "x", "x\ny", "x\ny"], False)
    assert shown_after_each("x\n", "\n\n") == (["x", "x", "x\n"], False)  # the end shows that it is none
    assert shown_after_each("aab", "ab") == (["", "a", "a", "a"], True)  # a new beginning within the old one


def test_of_two_stop_strings_the_one_that_is_there_first_ends_the_text():
    assert shown_after_each("xaby", "ab", "abc") == (["x", "x", "x", "x"], True)  # one begins like the other
    assert shown_after_each("xabdy", "abc", "bd") == (["x", "x", "x", "xa", "xa"], True)
    assert shown_after_each("xy", "y", "xy") == (["", "", ""], True)


def test_after_the_end_nothing_is_added():
    stream = TextStream(tokenizer_of("bytes"), ["b"])
    for id in tokenizer_of("bytes")("abc")["input_ids"][:2]:
        stream.push(id)
    assert stream.stopped and stream.finish() == "" and stream.finish() == ""
    assert stream.text == "a"
