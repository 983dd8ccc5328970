"""What a request's parameters do to the logits of its next token, in the order of vLLM's sampler.

Where transformers has a processor for a parameter, it is used. The others are here. A processor is a function of the
tokens so far, so a token can be chosen again after an interrupt or a rejected draft, with the same result.
"""

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..engine import SamplingParams, TokenRules


class AllowedTokens(LogitsProcessor):
    """Excludes all tokens but these ids."""

    def __init__(self, token_ids: tuple[int, ...]):
        self.token_ids = torch.tensor(token_ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, self.token_ids] = scores[:, self.token_ids]
        return allowed


class BadWords(LogitsProcessor):
    """Excludes a token that would complete a bad word in the output.

    Like vLLM's, it looks at the output only. transformers' `NoBadWordsLogitsProcessor` also looks at the prompt, and
    before version 5 it misses words at the very beginning.

    Args:
        words: the token ids of each word.
        prompt_tokens: how many tokens of the sequence are the prompt.
    """

    def __init__(self, words: tuple[tuple[int, ...], ...], prompt_tokens: int):
        self.words, self.prompt_tokens = words, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        longest = max(map(len, self.words)) - 1
        output = tuple(input_ids[0, max(self.prompt_tokens, input_ids.shape[1] - longest) :].tolist())
        excluded = [word[-1] for word in self.words if output[max(0, len(output) - len(word) + 1) :] == word[:-1]]
        return scores.index_fill(1, torch.tensor(excluded, dtype=torch.long), -torch.inf)


class FrequencyPenalties(LogitsProcessor):
    """Subtracts OpenAI's frequency and presence penalties, which count the tokens of the output, not of the prompt."""

    def __init__(self, frequency: float, presence: float, prompt_tokens: int):
        self.frequency, self.presence, self.prompt_tokens = frequency, presence, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self.prompt_tokens :], minlength=scores.shape[1])
        return scores - self.frequency * counts - self.presence * (counts > 0)


def make_processors(params: SamplingParams, prompt_tokens: int, rules: TokenRules) -> LogitsProcessorList:
    """Return what applies to greedy and random choices alike; empty if the parameters leave the logits as they are.

    Args:
        params: the request's parameters.
        prompt_tokens: how many tokens of the sequence are the prompt.
        rules: the token ids behind the parameters.
    """
    processors = LogitsProcessorList()
    if params.allowed_token_ids is not None:
        processors.append(AllowedTokens(params.allowed_token_ids))
    if rules.bad_words:
        processors.append(BadWords(rules.bad_words, prompt_tokens))
    if params.min_tokens > 0 and rules.end_token_ids:
        end = sorted(rules.end_token_ids)
        processors.append(MinNewTokensLengthLogitsProcessor(prompt_tokens, int(params.min_tokens), end))
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[id], bias] for id, bias in params.logit_bias.items()]))
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.frequency_penalty or params.presence_penalty:
        frequency, presence = float(params.frequency_penalty), float(params.presence_penalty)
        processors.append(FrequencyPenalties(frequency, presence, prompt_tokens))
    return processors


def make_warpers(params: SamplingParams) -> LogitsProcessorList:
    """Return what applies to random choices only: temperature and truncation; empty for greedy choices."""
    warpers = LogitsProcessorList()
    if params.temperature > 0:
        # Below 0.01, logits can overflow, and the best token is drawn in any case.
        warpers.append(TemperatureLogitsWarper(max(float(params.temperature), 0.01)))
        if params.top_k > 0:
            warpers.append(TopKLogitsWarper(int(params.top_k)))
        if params.top_p < 1:
            warpers.append(TopPLogitsWarper(float(params.top_p)))
        if params.min_p > 0:
            warpers.append(MinPLogitsWarper(float(params.min_p)))
    return warpers
