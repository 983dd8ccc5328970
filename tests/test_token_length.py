"""How much text a token can hold: a lower bound on a text's tokens, which refuses long prompts before tokenization."""

import pytest
from conftest import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_detokenizer import TOKENIZERS, Slow, tokenizer_of
from tokenizers import AddedToken, normalizers

from helpers import Engine, EngineConfig, SamplingParams
from helpers.server.prompt_length import TokenLength, check_length

LONG = (
    st.text(max_size=30)
    | st.text("aé \u0301e🦊", max_size=60)
    | st.sampled_from(["  " * 40, "e\u0301" * 40, "the " * 9])
)
NORMALIZERS = {"none": None, "NFC": normalizers.NFC(), "shorter": normalizers.Replace("aa", "")}


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("kind", ["embedded", "bytes", "sentencepiece"])
def test_no_text_has_fewer_tokens_than_the_bound(kind, normalizer):
    tokenizer = TOKENIZERS[kind]()
    if NORMALIZERS[normalizer] is not None:
        tokenizer.backend_tokenizer.normalizer = NORMALIZERS[normalizer]
    length = TokenLength(tokenizer)
    assert length.max_characters == max(map(len, tokenizer.get_vocab()))

    @settings(max_examples=150)
    @given(LONG.map(lambda text: text.encode(errors="ignore").decode()))
    def check(text):
        assert length.least_tokens(text) <= len(tokenizer(text, add_special_tokens=False)["input_ids"])

    check()


@pytest.mark.parametrize("normalizer", [normalizers.Prepend("\u2581"), normalizers.NFKD()], ids=["Prepend", "NFKD"])
def test_special_tokens_that_a_normalizer_would_lengthen_are_within_the_bound(normalizer):
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizer
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("<\ufb01\ufb01m>", normalized=False)])  # ligatures
    for text in ("<\ufb01\ufb01m>", "<\ufb01\ufb01m>" * 40, "a<\ufb01\ufb01m> a"):
        assert 0 < TokenLength(tokenizer).least_tokens(text) <= len(tokenizer(text)["input_ids"])


def test_a_tokenizer_that_may_lose_characters_has_no_bound():
    letters, spaces = tokenizer_of("letters"), byte_tokenizer()  # unknown characters have no token in `letters`
    spaces.backend_tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert len(spaces(" " * 500 + "<mask>")["input_ids"]) < 5
    for unbounded in (letters, spaces, Slow(byte_tokenizer()), None):
        assert TokenLength(unbounded).max_characters is None
        assert TokenLength(unbounded).least_tokens("x" * 1000) == 0


# --- what the engine refuses ------------------------------------------------------------------------------------------


class CountingTokenizer:
    """A tokenizer that counts the characters of the texts that it tokenizes."""

    def __init__(self, tokenizer):
        self._tokenizer, self.characters = tokenizer, 0

    def __call__(self, text, **options):
        self.characters += len(text)
        return self._tokenizer(text, **options)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


def counting_engine(embedded, **config):
    engine = Engine(embedded[0], CountingTokenizer(embedded[1]), EngineConfig(**config))
    engine.tokenizer.characters = 0
    return engine


@pytest.mark.parametrize(
    ("config", "length", "message"),
    [
        ({}, 10**6, r"at least 76924 tokens\. The request has 76924.*the model's context is 512"),
        ({"num_blocks": 3}, 4000, r"at least 308 tokens\. 308 prompt.*this engine has 3 in all"),
    ],
)
def test_a_prompt_of_too_many_characters_is_refused_before_it_is_tokenized(embedded, config, length, message):
    engine = counting_engine(embedded, **config)
    with pytest.raises(ValueError, match=f"The prompt's {length} characters are {message}"):
        check_length(engine.validator, "x" * length, SamplingParams(10))
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        check_length(engine.validator, "x" * length + "\ud800", SamplingParams(10))
    assert engine.tokenizer.characters == 0


def test_a_list_of_too_many_token_ids_is_refused_before_its_items_are_checked(embedded):
    with pytest.raises(ValueError, match="1001 prompt tokens"):
        check_length(counting_engine(embedded).validator, ["not an id"] * 1001, SamplingParams(10))


def test_the_longest_prompt_that_fits_is_accepted(embedded):
    engine, longest_token = counting_engine(embedded), "<|endoftext|>"
    check_length(engine.validator, longest_token * 511, SamplingParams(1))
    assert len(engine.validator.validate(longest_token * 511, SamplingParams(1))[0]) == 511
    assert engine.tokenizer.characters > 0
    engine.tokenizer.characters = 0
    with pytest.raises(ValueError, match="at least 512 tokens"):
        check_length(engine.validator, longest_token * 511 + "x", SamplingParams(1))
    assert engine.tokenizer.characters == 0
