"""The place of an output in its grammar: which tokens may come next.

The state is a function of the generated tokens: rejected drafts are taken back, and tokens that came from elsewhere are
read later. So a grammar needs nothing from the scheduler, and works with preemption and speculation.
"""

import numpy as np
import torch

from .compilation import reason
from .grammar import Grammar


class GrammarState:
    """The place of one sequence's output in its grammar; a `LogitsRule`.

    Args:
        grammar: what the output must match.
        prompt_tokens: how many tokens of the sequence are the prompt, which the grammar does not read.
    """

    is_last = True  # where other rules exclude all tokens, the output may end

    def __init__(self, grammar: Grammar, prompt_tokens: int):
        self.grammar, self.prompt_tokens = grammar, prompt_tokens
        self.matcher, self.num_read = grammar.start.deep_copy(), 0

    def allows(self, token_ids: list[int], next_id: int) -> bool:
        """Return whether a token may come next, which costs less than a mask.

        Args:
            token_ids: the prompt and the tokens generated so far.
            next_id: the next token. The state moves past it if it may come.
        """
        self._follow(token_ids)
        if next_id in self.grammar.eos_token_ids:
            return self.matcher.is_accepting()
        allowed = self.matcher.try_consume_tokens([next_id]) == 1
        self.num_read += allowed
        return allowed

    def change(self, token_ids: list[int], scores: torch.Tensor) -> None:
        """Set the scores of all tokens that may not come next to minus infinity.

        If other parameters exclude all of the others, the output ends where the grammar may end: `min_tokens` cannot
        extend a text that is complete.

        Args:
            token_ids: the prompt and the tokens generated so far.
            scores: float [vocabulary], on the CPU; changed in place.

        Raises:
            ValueError: no token is left, or the grammar has become too complex.
        """
        self._follow(token_ids)
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        values = scores.numpy()  # NumPy unpacks bits, and takes less time per operation than torch
        allowed = np.unpackbits(bits, bitorder="little", count=len(values)).view(bool)
        np.copyto(values, -np.inf, where=~allowed)
        if values.max() == -np.inf:
            if not self.matcher.is_accepting():
                raise ValueError("The structured output and parameters such as bad_words exclude every token here.")
            values[list(self.grammar.eos_token_ids)] = 0.0

    def _follow(self, token_ids: list[int]) -> None:
        """Move to the end of the generated tokens."""
        generated = len(token_ids) - self.prompt_tokens
        if self.num_read > generated:
            self.matcher.rollback(self.num_read - generated)
        elif self.num_read < generated:
            self.matcher.consume_tokens(token_ids[self.prompt_tokens + self.num_read :])
        self.num_read = generated
        self._check()

    def _check(self) -> None:
        if self.matcher.is_error():
            raise ValueError(f"The structured output cannot be continued: {reason(self.matcher)}")
