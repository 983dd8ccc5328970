"""Sampling parameters: how a request's tokens are chosen, and when its output ends."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from .settings import Bound, needed, note_needs

BOUNDS = {
    "max_tokens": Bound(0, integer=True),
    "temperature": Bound(0),
    "top_k": Bound(0, integer=True),
    "top_p": Bound(0, 1, exclusive_low=True),
    "min_p": Bound(0, 1),
    "repetition_penalty": Bound(0, exclusive_low=True),
    "seed": Bound(0, 2**63 - 1, integer=True),
    "logprobs": Bound(0, integer=True),
    "n": Bound(1, integer=True),
    "presence_penalty": Bound(-2, 2),
    "frequency_penalty": Bound(-2, 2),
    "min_tokens": Bound(0, integer=True),
    "prompt_logprobs": Bound(0, integer=True),
}
TOKEN_ID = Bound(0, integer=True)
BIAS = Bound(-100, 100)
# Stop strings are searched for at every token, so their number and length are bounded. OpenAI's API accepts 4, and
# text-generation-inference by default, too (`max_stop_sequences`); vLLM accepts any number. Some benchmarks, such as
# HumanEval, use 5 or more.
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 16, 256
MAX_BAD_WORDS, MAX_BAD_CHARACTERS = 1000, 2**14  # each word costs a comparison per token, and all are tokenized
OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")  # None is allowed, too


def checked_logit_bias(logit_bias: Mapping[int, float] | None) -> dict[int, float] | None:
    """Return a copy of a logit bias with integers as keys, which may be texts, as in JSON; None if it is empty.

    Raises:
        ValueError: a key is not a token id, or a bias is outside its range.
    """
    if not isinstance(logit_bias, Mapping | None):
        raise ValueError(f"logit_bias must map token ids to numbers, not {logit_bias!r}.")
    checked = {}
    for token_id, bias in (logit_bias or {}).items():
        if isinstance(token_id, str) and token_id.isascii() and token_id.isdecimal() and len(token_id) <= 10:
            token_id = int(token_id)
        TOKEN_ID.check("A token id in logit_bias", token_id)
        if type(bias) is not float or not BIAS.low <= bias <= BIAS.high:
            BIAS.check(f"The bias of token {token_id} in logit_bias", bias)
        checked[int(token_id)] = float(bias)
    return checked or None


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    Names and meanings are vLLM's. The defaults of two parameters are not: temperature is 0, and max_tokens is None.

    Attributes:
        max_tokens: generate at most this many tokens; None for as many as the model's context has room for. 0 only
            scores the prompt and requires `prompt_logprobs`.
        temperature: 0 takes the best token; above 0, logits are divided by it before a token is drawn.
        top_k: draw from the k best tokens only; 0 for all.
        top_p: draw from the smallest set of best tokens whose probabilities add up to at least p.
        min_p: draw from tokens that are at least p times as probable as the best one.
        repetition_penalty: above 1, tokens that are already in the prompt or the output become less likely.
        seed: makes the random draws repeatable, whichever other requests run; None for a random seed.
        stop: strings that end the output as soon as one appears; the output does not include it. At most
            `MAX_STOP_STRINGS` of at most `MAX_STOP_LENGTH` characters.
        ignore_eos: continue to max_tokens even if the model generates EOS.
        logprobs: report the log-probability of each token and of the k best ones; None for no report.
        n: how many outputs to generate for the prompt.
        presence_penalty: subtracted from the logit of every token that has been generated; from -2 to 2.
        frequency_penalty: subtracted as many times as the token has been generated; from -2 to 2.
        logit_bias: added to the logits of these token ids, which may be texts as in JSON; from -100 to 100.
        stop_token_ids: tokens that end the output, like EOS; its text does not include them.
        min_tokens: before this many tokens, neither EOS nor a stop token can be chosen, and stop strings are ignored.
        allowed_token_ids: choose from these tokens only; None for all.
        bad_words: texts that cannot be generated: the token that would complete one cannot be chosen. Another
            spelling in tokens is possible. At most `MAX_BAD_WORDS` of at most `MAX_STOP_LENGTH` characters, and of
            `MAX_BAD_CHARACTERS` together.
        prompt_logprobs: report the log-probability of each prompt token but the first, and of the k best ones in its
            place; None for no report.
        structured_outputs: what the text must match. EOS is possible only where the text is complete. An output that
            max_tokens or a stop string ends may be incomplete.

    Raises:
        ValueError: a value is outside its range.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = field(default=1.0, metadata=needed("token_rules"))
    seed: int | None = None
    stop: Seq[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = field(default=1, metadata=needed("parallel_sampling"))
    presence_penalty: float = field(default=0.0, metadata=needed("token_rules"))
    frequency_penalty: float = field(default=0.0, metadata=needed("token_rules"))
    logit_bias: dict[str, float] | None = field(  # kept as dict[int, float]
        default=None, hash=False, metadata=needed("token_rules")
    )
    stop_token_ids: Seq[int] = field(default=(), metadata=needed("token_rules"))
    min_tokens: int = field(default=0, metadata=needed("token_rules"))
    allowed_token_ids: Seq[int] | None = field(default=None, metadata=needed("token_rules"))
    bad_words: Seq[str] = field(default=(), metadata=needed("token_rules"))
    prompt_logprobs: int | None = field(default=None, metadata=needed("prompt_scoring"))
    structured_outputs: Any = field(default=None, metadata=needed("structured_outputs"))

    def __post_init__(self):
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _texts(getattr(self, name)))
        for name, bound in BOUNDS.items():
            value = getattr(self, name)
            if value is not None or name not in OPTIONAL:
                bound.check(name, value)
        _check_texts("stop", self.stop, MAX_STOP_STRINGS)
        _check_texts("bad_words", self.bad_words, MAX_BAD_WORDS)
        if (length := sum(map(len, self.bad_words))) > MAX_BAD_CHARACTERS:
            raise ValueError(f"bad_words have {length} characters, and at most {MAX_BAD_CHARACTERS} are allowed.")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, not {self.ignore_eos!r}.")
        object.__setattr__(self, "logit_bias", checked_logit_bias(self.logit_bias))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:  # an empty list allows no token
            object.__setattr__(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids is empty, so no token could be chosen: allow at least one.")
        self._check_combinations()
        note_needs(self)

    def _check_combinations(self) -> None:
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError(
                "max_tokens is 0, so no token would be generated: set max_tokens to at least 1, or prompt_logprobs to "
                "score the prompt."
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}: lower it.")
        if self.n > 1 and self.max_tokens == 0:
            raise ValueError(f"max_tokens is 0, so all {self.n} outputs would be empty: leave n at 1.")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"{self.n} greedy outputs would all be the same: set a temperature above 0, or leave n at 1."
            )
        if self.structured_outputs is not None and self.ignore_eos:
            raise ValueError("Leave out ignore_eos or structured_outputs: an output that is complete must end.")


def _texts(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return one text, several or None as a tuple."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        return () if given is None else (given,)
    return tuple(given)


def _check_texts(name: str, texts: tuple[str, ...], most: int) -> None:
    """Raise a ValueError if there are too many texts, or if one is empty or too long."""
    if len(texts) > most:
        raise ValueError(f"{name} has {len(texts)} texts, and at most {most} are allowed: give fewer.")
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{name} must be one or more non-empty texts, not {texts!r}.")
    if (length := max(map(len, texts), default=0)) > MAX_STOP_LENGTH:
        raise ValueError(
            f"A text in {name} has {length} characters, and at most {MAX_STOP_LENGTH} are allowed: shorten it."
        )


def _token_ids(name: str, given: Iterable[int] | None) -> tuple[int, ...]:
    """Return token ids as a tuple, each once; an empty one for None."""
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(f"{name} must be a list of token ids, not {given!r}.")
    token_ids = list(given)
    for token_id in token_ids:
        TOKEN_ID.check(f"A token id in {name}", token_id)
    return tuple(dict.fromkeys(map(int, token_ids)))
