"""Sampling: how the next token of each sequence is chosen from the logits.

A seeded request gets the same tokens whichever other requests run. Each sequence has a random generator of its own, on
the CPU, and draws from it exactly once per token. A token that an interrupt has lost is drawn again, with the same
result. Drafts are verified by the same draws, so speculation changes no token either. Greedy decoding (temperature 0)
takes the best token.
"""

from weakref import WeakKeyDictionary

import torch

from ..engine import Chunk, SampledToken, Sequence, accept_drafts
from .grammar_state import GrammarState
from .logits_processors import make_processors, make_warpers


class BatchSampler:
    """Samples the tokens of all sequences in a forward pass, and keeps a sampler for each sequence."""

    def __init__(self):
        self._samplers: WeakKeyDictionary[Sequence, Sampler] = WeakKeyDictionary()

    def sample(self, chunks: list[Chunk], logits: torch.Tensor) -> dict[Sequence, list[SampledToken] | Exception]:
        """Return new tokens for every chunk with `samples_token`: one, and one more for each accepted draft.

        Args:
            chunks: the chunks of a forward pass.
            logits: [sum of `num_logits`, vocabulary], in the order of the chunks.

        Returns:
            The tokens of each of these sequences, or the exception raised while sampling the first one: the parameters
            of one request must not make others fail.
        """
        best = logits.float().argmax(dim=-1).tolist()  # for all rows at once; in bfloat16 it would be slow on a CPU
        sampled: dict[Sequence, list[SampledToken] | Exception] = {}
        end = 0
        for chunk in chunks:
            end += chunk.num_logits
            if chunk.samples_token:
                rows = slice(end - 1 - len(chunk.draft_token_ids), end)
                sampled[chunk.sequence] = self._sample_chunk(chunk, logits[rows], best[rows])
        return sampled

    def _sample_chunk(self, chunk: Chunk, logits: torch.Tensor, best: list[int]) -> list[SampledToken] | Exception:
        """Sample a chunk's tokens: each is chosen as without drafts, after the tokens that were chosen before it."""
        token_ids, drafts = chunk.sequence.token_ids, chunk.draft_token_ids

        def choose(accepted: int) -> SampledToken:
            sampler = self.for_sequence(chunk.sequence)
            if accepted == 0:
                sampler.forget_before(len(token_ids))
            chosen_before = token_ids + drafts[:accepted] if accepted else token_ids
            return sampler.choose(chosen_before, logits[accepted], best[accepted])

        return accept_drafts(drafts, choose)

    def for_sequence(self, sequence: Sequence) -> "Sampler":
        """Return the sequence's sampler, which keeps its random generator across preemptions."""
        if sequence not in self._samplers:
            self._samplers[sequence] = Sampler(sequence)
        return self._samplers[sequence]


class Sampler:
    """Samples the tokens of one sequence, with its request's parameters and a random generator of its own.

    Args:
        sequence: is read, but not kept: with a reference to it, `BatchSampler` would never forget it. With a seed, the
            first draw follows those of tokens that another engine has generated.
    """

    def __init__(self, sequence: Sequence):
        params = sequence.params
        self.params, self.grammar = params, GrammarState.of(sequence)
        self.processors = make_processors(params, sequence.prompt_tokens, sequence.token_rules)
        self.warpers = make_warpers(params)
        self.generator = torch.Generator()
        if params.seed is None:
            self.generator.seed()  # any draws will do
        else:
            self.generator.manual_seed((int(params.seed) + sequence.index) % 2**63)  # the outputs of a request differ
        self._to_skip = 0 if params.seed is None else sequence.generated
        self._states: dict[int, torch.Tensor] = {}  # of the generator before the draw at each of the newest places

    def choose(self, token_ids: list[int], logits: torch.Tensor, best: int) -> SampledToken:
        """Return the next token of a sequence.

        Args:
            token_ids: the prompt and the tokens generated so far.
            logits: float [vocabulary], on any device.
            best: the index of the largest logit, which `BatchSampler` computes for all rows at once.

        Returns:
            The token. If the request asks for log-probabilities, those of this token and of the `logprobs` best ones
            are included. They are computed from the model's logits, before penalties, temperature and truncation.

        Raises:
            ValueError: the parameters exclude every token.
        """
        is_best = not self.processors and not self.warpers and self.params.logprobs is None
        if is_best and (self.grammar is None or self.grammar.allows(token_ids, best)):
            return SampledToken(best)
        raw = logits.float().cpu()[None]
        scores = self.processors(torch.tensor([token_ids]), raw.clone())
        if self.grammar is not None:
            scores = self.grammar.mask(token_ids, scores)
        elif self.processors and scores.max() == -torch.inf:
            raise ValueError("Parameters such as bad_words and allowed_token_ids exclude every token here: relax them.")
        if self.warpers:
            probabilities = self.warpers(None, scores).softmax(dim=-1)
            token = self._draw(probabilities, len(token_ids))
        else:
            token = int(scores.argmax())
        if self.params.logprobs is None:
            return SampledToken(token)
        logprobs = raw[0].log_softmax(dim=-1)
        top = logprobs.topk(min(self.params.logprobs, len(logprobs))).indices.tolist()
        return SampledToken(token, {id: float(logprobs[id]) for id in dict.fromkeys([token, *top])})

    def forget_before(self, place: int) -> None:
        """Forget how the tokens before a place were drawn; the sequence has got them."""
        self._states = {drawn: state for drawn, state in self._states.items() if drawn >= place}

    def _draw(self, probabilities: torch.Tensor, place: int) -> int:
        """Draw the token at a place in the sequence; drawing again at the same place gives the same number."""
        if self._to_skip:
            skip_draws(self._to_skip, probabilities, self.generator)
            self._to_skip = 0
        if place in self._states:
            self.generator.set_state(self._states[place])
        else:
            self._states[place] = self.generator.get_state()
        return int(torch.multinomial(probabilities, 1, generator=self.generator))


def skip_draws(number: int, probabilities: torch.Tensor, generator: torch.Generator) -> None:
    """Move a generator as far as draws would, at least one. Their probabilities do not matter, only how many they are.

    In torch 2.13, a draw takes one 64-bit number per token of the vocabulary. The first draw shows whether that is so;
    then the other draws need not be repeated. Taking the numbers alone is several times as fast.

    Args:
        number: how many draws.
        probabilities: float [1, vocabulary].
        generator: on the CPU.
    """
    other = torch.Generator()
    other.set_state(generator.get_state())
    torch.multinomial(probabilities, 1, generator=generator)
    numbers = torch.empty(probabilities.shape, dtype=torch.int64).random_(generator=other)
    is_same = torch.equal(generator.get_state(), other.get_state())
    for _ in range(number - 1):
        if is_same:
            numbers.random_(generator=generator)
        else:
            torch.multinomial(probabilities, 1, generator=generator)
