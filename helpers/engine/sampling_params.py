"""Sampling parameters: how a request's tokens are chosen, and when its output ends."""

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from numbers import Integral, Real

from .structured_outputs import StructuredOutputs


@dataclass(frozen=True)
class Bound:
    """The range of a parameter.

    Attributes:
        low, high: the smallest and the largest value.
        integer: whether it must be an integer.
        exclusive_low: whether `low` itself is excluded.
    """

    low: float
    high: float = math.inf
    integer: bool = False
    exclusive_low: bool = False

    def check(self, name: str, value) -> None:
        """Raise a ValueError that names the parameter and its range, unless the value is within the range."""
        kind = Integral if self.integer else Real
        if (
            not isinstance(value, kind)
            or isinstance(value, bool)
            or abs(value) == math.inf  # unlike math.isinf, also for integers beyond the largest float
            or not self.low <= value <= self.high
            or (self.exclusive_low and value == self.low)
        ):
            raise ValueError(f"{name} must be {self}, not {value!r}.")

    def __str__(self) -> str:
        kind = "an integer" if self.integer else "a number"
        above = "above" if self.exclusive_low else "of at least"
        if math.isinf(self.high):
            return f"{kind} {above} {self.low}"
        return f"{kind} {f'above {self.low} and up to' if self.exclusive_low else f'from {self.low} to'} {self.high}"


BOUNDS = {
    "max_tokens": Bound(1, integer=True),
    "temperature": Bound(0),
    "top_k": Bound(0, integer=True),
    "top_p": Bound(0, 1, exclusive_low=True),
    "min_p": Bound(0, 1),
    "repetition_penalty": Bound(0, exclusive_low=True),
    "seed": Bound(0, 2**63 - 1, integer=True),
    "logprobs": Bound(0, integer=True),
    "n": Bound(1, integer=True),
}
# Stop strings are searched for at every token, so their number and length are bounded. OpenAI's API accepts 4, and
# text-generation-inference by default, too (`max_stop_sequences`); vLLM accepts any number. Some benchmarks, such as
# HumanEval, use 5 or more.
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 16, 256
OPTIONAL = ("max_tokens", "seed", "logprobs")  # None is allowed, too


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    Names and meanings are vLLM's. The defaults of two parameters are not: temperature is 0, and max_tokens is None.

    Attributes:
        max_tokens: generate at most this many tokens; None for as many as the model's context (or the engine's limit)
            has room for.
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
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Seq[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self):
        if isinstance(self.stop, str) or not isinstance(self.stop, Iterable):
            object.__setattr__(self, "stop", () if self.stop is None else (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        for name, bound in BOUNDS.items():
            value = getattr(self, name)
            if value is not None or name not in OPTIONAL:
                bound.check(name, value)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(
                f"stop has {len(self.stop)} texts, and at most {MAX_STOP_STRINGS} are allowed: give fewer."
            )
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop must be one or more non-empty texts, not {self.stop!r}.")
        if (length := max(map(len, self.stop), default=0)) > MAX_STOP_LENGTH:
            raise ValueError(
                f"A stop string has {length} characters, and at most {MAX_STOP_LENGTH} are allowed: shorten it."
            )
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, not {self.ignore_eos!r}.")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"{self.n} greedy outputs would all be the same: set a temperature above 0, or leave n at 1."
            )
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise ValueError(f"structured_outputs must be StructuredOutputs, not {self.structured_outputs!r}.")
        if self.structured_outputs is not None and self.ignore_eos:
            raise ValueError("Leave out ignore_eos or structured_outputs: an output that is complete must end.")
