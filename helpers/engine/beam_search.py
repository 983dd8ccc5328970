"""Beam search: several continuations of a prompt grow side by side, and after each token the most probable ones stay.

Greedy decoding takes the best token, and may miss a better text that begins with another one. Beam search (Lowerre, The
HARPY speech recognition system, 1976) keeps the `beam_width` most probable continuations, its *beams*. In each round,
all beams compute one token, and the best extensions of all of them become the next beams. Some beams then have several
extensions, and others have none.

A beam is a sequence of the engine, so it shares iterations with all other requests. The prompt is computed once. A beam
with several extensions is forked: the copies share its blocks, and a block is copied once one of them writes to it.
The outputs, their order and their scores are those of transformers' `generate(num_beams=beam_width)`.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .detokenizer import text_of
from .sampling_params import Bound, SamplingParams
from .sequence import Prompt, Sequence

if TYPE_CHECKING:
    from .engine import EngineCore

BOUNDS = {"beam_width": Bound(1, integer=True), "length_penalty": Bound(-10, 10)}


@dataclass(frozen=True)
class BeamOutput:
    """One of the best continuations of a prompt.

    Attributes:
        token_ids: the generated tokens, including the EOS that ended them.
        text: what follows the prompt, without EOS.
        score: the sum of the tokens' log-probabilities, divided by their number to the power of `length_penalty`.
    """

    token_ids: list[int]
    text: str
    score: float


@dataclass
class Beams:
    """Which extensions become the next beams, which ones are finished, and when the search ends: transformers' rules.

    Attributes:
        width, max_tokens, length_penalty, early_stopping: see `beam_search`.
        eos_token_ids: the tokens that end a beam.
        scores: the sum of log-probabilities of each running beam, best first.
        finished: (score, token ids) of the best finished beams, best first; at most `width`.
    """

    width: int
    max_tokens: int
    length_penalty: float
    early_stopping: bool | str
    eos_token_ids: frozenset[int]
    scores: list[float] = field(default_factory=lambda: [0.0])
    finished: list[tuple[float, list[int]]] = field(default_factory=list)

    def extend(self, beams: list[list[int]], logprobs: list[dict[int, float]]) -> list[tuple[int, int]]:
        """Choose the best extensions of all beams.

        Args:
            beams: the generated tokens of each running beam, in the order of `scores`; all have the same length.
            logprobs: for each of them, the log-probabilities of at least `width` next tokens and all EOS tokens.

        Returns:
            For each of the next beams, best first, the index of the beam that it extends and the new token; an empty
            list if the search has ended.
        """
        candidates = (
            (score + logprob, index, token_id)
            for index, (score, tokens) in enumerate(zip(self.scores, logprobs, strict=True))
            for token_id, logprob in tokens.items()
        )
        # At most one EOS per kind and beam can precede the extensions that run on.
        num_needed = self.width * (1 + len(self.eos_token_ids))
        best = heapq.nlargest(num_needed, candidates, key=lambda candidate: candidate[0])
        length = len(beams[0]) + 1
        if length == self.max_tokens:
            ended, running = best[: self.width], []
        else:
            ended = [one for one in best[: self.width] if one[2] in self.eos_token_ids]
            running = [one for one in best if one[2] not in self.eos_token_ids][: self.width]
        self.finished += [(self._normalized(score, length), [*beams[beam], token]) for score, beam, token in ended]
        self.finished = sorted(self.finished, key=lambda one: -one[0])[: self.width]
        self.scores = [score for score, _, _ in running]
        return [] if self._has_ended(length) else [(beam, token) for _, beam, token in running]

    def _has_ended(self, length: int) -> bool:
        """Return whether no running beam can still be among the outputs, as far as `early_stopping` estimates that."""
        if length == self.max_tokens:
            return True
        if len(self.finished) < self.width:
            return False
        if self.early_stopping is True or self.width == 1:  # one beam is greedy decoding, which ends with EOS
            return True
        longest = self.early_stopping == "never" and self.length_penalty > 0
        best_possible = self._normalized(self.scores[0], self.max_tokens if longest else length)
        return best_possible <= self.finished[-1][0]

    def _normalized(self, score: float, length: int) -> float:
        return score / length**self.length_penalty


def beam_search(
    engine: "EngineCore",
    prompt: Prompt,
    beam_width: int = 4,
    max_tokens: int | None = None,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> list[BeamOutput]:
    """Return the `beam_width` best continuations of a prompt that a beam search finds, best first.

    The names and their meaning are those of transformers' `generate`. Other requests run on meanwhile. The search is
    fastest if all beams have a row and memory; otherwise, beams take turns and recompute tokens.

    Args:
        prompt: text, or token ids.
        beam_width: how many continuations are kept; 1 for greedy decoding.
        max_tokens: generate at most this many tokens; None for as many as the model's context has room for.
        length_penalty: the power of the length by which a score is divided; above 0 favors long outputs, below 0 short
            ones.
        early_stopping: when to stop once `beam_width` outputs are finished: True for at once, False if the best running
            beam would not be among them at its present length, "never" if it could not be at any length.

    Raises:
        ValueError: the request can never run, or an argument is outside its range.
        RuntimeError: a forward pass failed.
    """
    for name, value in (("beam_width", beam_width), ("length_penalty", length_penalty)):
        BOUNDS[name].check(name, value)
    if early_stopping not in (True, False, "never"):
        raise ValueError(f'early_stopping must be True, False or "never", not {early_stopping!r}.')
    eos_token_ids, vocab_size = engine.scheduler.eos_token_ids, engine.validator.model.vocab_size
    num_logprobs = beam_width + len(eos_token_ids)
    if num_logprobs > vocab_size:
        raise ValueError(
            f"{beam_width} beams need as many different tokens, and the model has {vocab_size - len(eos_token_ids)} "
            f"beside EOS: use a smaller beam_width."
        )
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=num_logprobs)
    request_id = engine._new_id()
    try:
        engine.outputs.subscribe(request_id, deque(maxlen=0))  # nothing reads the outputs of single beams
        engine._add(prompt, params, request_id, beam_width=beam_width)
        sequences = list(engine.scheduler.requests[request_id])
        beams = Beams(beam_width, sequences[0].max_tokens, length_penalty, bool(early_stopping), eos_token_ids)
        beams.early_stopping = early_stopping
        _run(engine, sequences, beams)
    finally:
        engine._leave(request_id)
    return [
        BeamOutput(
            token_ids,
            text_of([id for id in token_ids if id not in eos_token_ids], engine.tokenizer),
            score,
        )
        for score, token_ids in beams.finished
    ]


def _run(engine: "EngineCore", sequences: list[Sequence], beams: Beams) -> None:
    """Run iterations until the search has ended. The first sequence computes the prompt for all."""
    running, length = sequences[:1], 0
    while True:
        engine._iterate()
        for sequence in sequences:
            if sequence.error is not None:
                raise RuntimeError(f"The beam search failed: {sequence.error}")
        for sequence in running:
            sequence.paused = sequence.generated > length
        if not all(sequence.paused for sequence in running):
            continue
        # Each sequence has sampled its best token. That is replaced by the token that continues the beam.
        generated = [sequence.token_ids[sequence.prompt_tokens : -1] for sequence in running]
        extensions = beams.extend(generated, [sequence.logprobs[-1] for sequence in running])
        if not extensions:
            return
        running, length = _continue(engine, sequences, running, extensions), length + 1


def _continue(
    engine: "EngineCore", sequences: list[Sequence], running: list[Sequence], extensions: list[tuple[int, int]]
) -> list[Sequence]:
    """Append a token to each of the next beams, and return their sequences in the order of `extensions`."""
    extended = {running[index] for index, _ in extensions}
    unused = [sequence for sequence in sequences if sequence not in extended]
    continued = []
    for index, _ in extensions:
        sequence = running[index]
        if sequence in continued:  # its first extension continues in place, and each further one in a fork
            parent, sequence = sequence, unused.pop()
            if not engine.scheduler.fork(parent, sequence):
                engine.trace.free([sequence.label])
        continued.append(sequence)
    for sequence, (_, token_id) in zip(continued, extensions, strict=True):
        sequence.token_ids[-1] = token_id
        sequence.paused = False
    return continued
