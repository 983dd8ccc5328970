"""What a request's parameters do to the logits of its next token, in the order of vLLM's sampler.

Only a few tokens are concerned at a time, so only their scores are changed. What penalties count is kept from token to
token: a step reads the tokens that are new, however long the text is.
"""

from collections import Counter

import numpy as np

from ...engine import SamplingParams
from .rules import TokenRules


class TokenScores:
    """Changes the scores of one sequence's next token; a `LogitsRule`, for greedy and random choices alike.

    Args:
        params: the request's parameters.
        prompt_tokens: how many tokens of the sequence are the prompt.
        rules: the token ids behind the parameters.
    """

    is_last = False

    def __init__(self, params: SamplingParams, prompt_tokens: int, rules: TokenRules):
        self.params, self.prompt_tokens, self.rules = params, prompt_tokens, rules
        self._allowed = None if params.allowed_token_ids is None else np.array(params.allowed_token_ids)
        self._ends = sorted(rules.end_token_ids)
        self._bias_ids = list(params.logit_bias or ())
        self._biases = np.array(list((params.logit_bias or {}).values()), dtype=np.float32)
        self._repetition = float(params.repetition_penalty)
        self._frequency, self._presence = float(params.frequency_penalty), float(params.presence_penalty)
        self._read: list[int] = []  # the tokens that are counted
        self._in_text, self._in_output = Counter(), Counter()

    @property
    def changes_scores(self) -> bool:
        """Whether the parameters change any score; stop tokens alone, for example, do not."""
        ending = self.params.min_tokens > 0 and bool(self._ends)
        return bool(
            self._allowed is not None or self.rules.bad_words or ending or self._bias_ids or self._has_penalties
        )

    @property
    def _has_penalties(self) -> bool:
        return self._repetition != 1 or self._frequency != 0 or self._presence != 0

    def allows(self, token_ids, next_id):
        return None

    def change(self, token_ids, scores):
        values = scores.numpy()
        if self._allowed is not None:
            kept = values[self._allowed]
            values[:] = -np.inf
            values[self._allowed] = kept
        if self.rules.bad_words:
            values[self._last_tokens_of_bad_words(token_ids)] = -np.inf
        if len(token_ids) - self.prompt_tokens < self.params.min_tokens:
            values[self._ends] = -np.inf
        values[self._bias_ids] += self._biases
        if self._has_penalties:
            self._count(token_ids)
            self._penalize(values)

    def _last_tokens_of_bad_words(self, token_ids: list[int]) -> list[int]:
        """Return the tokens that would complete a bad word in the output.

        Like vLLM's, the search reads the output only. transformers' `NoBadWordsLogitsProcessor` also reads the prompt.
        """
        longest = max(map(len, self.rules.bad_words)) - 1
        output = tuple(token_ids[max(self.prompt_tokens, len(token_ids) - longest) :])
        return [word[-1] for word in self.rules.bad_words if output[max(0, len(output) - len(word) + 1) :] == word[:-1]]

    def _count(self, token_ids: list[int]) -> None:
        """Count the tokens that are new; those of a choice that was taken back are no longer counted."""
        while self._read and self._read[-1:] != token_ids[len(self._read) - 1 : len(self._read)]:
            removed = Counter([self._read.pop()])
            self._in_text -= removed
            if len(self._read) >= self.prompt_tokens:
                self._in_output -= removed
        self._in_output.update(token_ids[max(len(self._read), self.prompt_tokens) :])
        self._in_text.update(token_ids[len(self._read) :])
        self._read += token_ids[len(self._read) :]

    def _penalize(self, values: np.ndarray) -> None:
        """Apply the repetition penalty to prompt and output, and OpenAI's penalties to the output alone."""
        if self._repetition != 1:
            ids = np.fromiter(self._in_text, dtype=np.int64, count=len(self._in_text))
            found = values[ids]
            values[ids] = np.where(found < 0, found * self._repetition, found / self._repetition)
        if self._in_output and (self._frequency or self._presence):
            ids = np.fromiter(self._in_output, dtype=np.int64, count=len(self._in_output))
            counts = np.fromiter(self._in_output.values(), dtype=np.float32, count=len(self._in_output))
            values[ids] -= self._frequency * counts + self._presence
