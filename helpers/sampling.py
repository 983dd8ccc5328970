"""Sampling: how a request's next token is chosen from the logits.

The claim: a seeded request gets the same tokens alone and in any company, because every sequence draws from a random
generator of its own, on the CPU, exactly one draw for each of its tokens. Greedy (temperature 0) is the default: what
this course can compare to the last token.
"""

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Names and meanings are vLLM's; the default temperature is 0.

    Attributes:
        max_tokens: generate at most so many tokens; None for as many as the model's context (or the engine's limit) has
            room for.
        temperature: 0 takes the best token; above, logits are divided by it before one is drawn.
        top_k: draw from the k best tokens only; 0 for all.
        top_p: draw from the smallest set of best tokens whose probabilities add up to p.
        min_p: draw from tokens that are at least p times as probable as the best one.
        repetition_penalty: above 1, tokens that the prompt or the answer has already become less likely.
        seed: for the same random choices every time, in whatever company.
        stop: texts that end the answer as soon as they appear; they are not part of it.
        ignore_eos: go on to max_tokens, whatever the model says.
        logprobs: report the log-probability of each token and of the k best ones; None for no report.
        n: how many answers.

    Raises:
        ValueError: a value that has no meaning.
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

    def __post_init__(self):
        if isinstance(self.stop, str) or not isinstance(self.stop, Iterable):
            object.__setattr__(self, "stop", () if self.stop is None else (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, low=1)
        _number("temperature", self.temperature, low=0)
        _whole("top_k", self.top_k, low=0)
        _number("top_p", self.top_p, low=0, high=1)
        _number("min_p", self.min_p, low=0, high=1)
        _number("repetition_penalty", self.repetition_penalty, low=0)
        if self.top_p == 0 or self.repetition_penalty == 0:
            raise ValueError("top_p and repetition_penalty are above 0; 1 switches them off.")
        if self.seed is not None:
            _whole("seed", self.seed, low=0, high=2**63 - 1)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop is a text or several, none of them empty, not {self.stop!r}.")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos is True or False, not {self.ignore_eos!r}.")
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, low=0)
        _whole("n", self.n, low=1)
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"{self.n} greedy answers would all be the same: set a temperature above 0, or n=1.")


class Sampler:
    """Chooses the tokens of one sequence: the settings of its request, and a random generator that is its own.

    Args:
        params: the request's settings.
        index: which of the request's answers; each draws its own tokens, from `seed + index`.
    """

    def __init__(self, params: SamplingParams, index: int = 0):
        self.params = params
        self.penalties, self.warpers = LogitsProcessorList(), LogitsProcessorList()
        if params.repetition_penalty != 1:
            self.penalties.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
        if params.temperature > 0:
            # Below that, logits overflow; and what is drawn is the best token anyway.
            self.warpers.append(TemperatureLogitsWarper(max(float(params.temperature), 0.01)))
            if params.top_k > 0:
                self.warpers.append(TopKLogitsWarper(int(params.top_k)))
            if params.top_p < 1:
                self.warpers.append(TopPLogitsWarper(float(params.top_p)))
            if params.min_p > 0:
                self.warpers.append(MinPLogitsWarper(float(params.min_p)))
        self.generator = torch.Generator()
        if params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed((int(params.seed) + index) % 2**63)

    def choose(self, token_ids: list[int], logits: torch.Tensor, best: int) -> tuple[int, dict[int, float] | None]:
        """The next token of a sequence.

        Args:
            token_ids: the prompt and what was generated so far.
            logits: float [vocabulary], on any device.
            best: where the logits are largest, since that can be asked for all rows of a batch at once.

        Returns:
            The token's id, and the log-probabilities of it and of the `logprobs` best tokens, as the model sees them:
            before penalty, temperature and the rest.
        """
        if not self.penalties and not self.warpers and self.params.logprobs is None:
            return best, None
        raw = logits.float().cpu()[None]
        scores = self.penalties(torch.tensor([token_ids]), raw.clone())
        if self.warpers:
            probabilities = self.warpers(None, scores).softmax(dim=-1)
            token = int(torch.multinomial(probabilities, 1, generator=self.generator))
        else:
            token = int(scores.argmax())
        if self.params.logprobs is None:
            return token, None
        logprobs = raw[0].log_softmax(dim=-1)
        top = logprobs.topk(min(self.params.logprobs, len(logprobs))).indices.tolist()
        return token, {id: float(logprobs[id]) for id in dict.fromkeys([token, *top])}


def _whole(name: str, value, low: int, high: float = math.inf) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} is a whole number {_range(low, high)}, not {value!r}.")


def _number(name: str, value, low: float, high: float = math.inf) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not low <= value <= high or math.isinf(value):
        raise ValueError(f"{name} is a number {_range(low, high)}, not {value!r}.")


def _range(low: float, high: float) -> str:
    return f"of at least {low}" if math.isinf(high) else f"from {low} to {high}"
