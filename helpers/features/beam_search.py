"""Beam search: several continuations of a prompt grow side by side, and in each round the most probable ones stay.

Greedy decoding takes the best token, and so misses a better text that begins with another one. Beam search (Lowerre,
The HARPY Speech Recognition System, 1976) keeps several continuations, its *beams*. In a round, every beam computes one
token. The best extensions of all beams are the next beams, so some beams have several successors, and others none.

A beam is a sequence of the engine and shares its iterations with all other requests. The prompt is computed once. A
beam with several successors is forked: they share its blocks, and a block is copied when one of them writes to it.
Outputs, order and scores are those of transformers' `generate(num_beams=..., num_return_sequences=...)`.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field

from ..base_engine import BaseEngine
from ..detokenizer import text_of
from ..engine import EngineCore, Prompt, Sequence
from ..sampling_params import SamplingParams
from ..settings import Bound
from .parallel_sampling import SharedPrompt


@dataclass(frozen=True)
class BeamOutput:
    """A continuation of a prompt that a beam search has found.

    Attributes:
        token_ids: the generated tokens, including the EOS that ended them.
        text: what follows the prompt, without EOS.
        score: the sum of the tokens' log-probabilities, divided by their number to the power of `length_penalty`.
    """

    token_ids: list[int]
    text: str
    score: float


@dataclass
class BeamRules:
    """Chooses the next beams and decides when a search ends, as transformers does.

    Attributes:
        width, max_tokens, length_penalty, early_stopping: see `beam_search`.
        eos_token_ids: the tokens that end a beam.
        totals: for each running beam, best first, the sum of its log-probabilities.
        finished: (score, token ids) of the best finished beams, best first; at most `width`.
    """

    width: int
    max_tokens: int
    length_penalty: float
    early_stopping: bool | str
    eos_token_ids: frozenset[int]
    totals: list[float] = field(default_factory=lambda: [0.0])
    finished: list[tuple[float, list[int]]] = field(default_factory=list)

    def extend(self, beams: list[list[int]], logprobs: list[dict[int, float]]) -> list[tuple[int, int]]:
        """Choose the best extensions of all running beams.

        Args:
            beams: the generated tokens of each beam, in the order of `totals`; all have the same length.
            logprobs: for each beam, the log-probabilities of its best next tokens: at least as many as `width` and the
                EOS tokens together.

        Returns:
            For each of the next beams, best first, the index of the beam that it extends and its new token. An empty
            list ends the search.
        """
        extensions = (
            (total + logprob, beam, token_id)
            for beam, total in enumerate(self.totals)
            for token_id, logprob in logprobs[beam].items()
        )
        # Among so many extensions, at least `width` do not end with EOS.
        most = self.width * (1 + len(self.eos_token_ids))
        best = heapq.nlargest(most, extensions, key=lambda extension: extension[0])
        length = len(beams[0]) + 1
        at_end = length == self.max_tokens
        for total, beam, token_id in best[: self.width]:
            if at_end or token_id in self.eos_token_ids:
                self.finished.append((self._score(total, length), [*beams[beam], token_id]))
        self.finished = heapq.nlargest(self.width, self.finished, key=lambda scored: scored[0])
        running = [extension for extension in best if extension[2] not in self.eos_token_ids][: self.width]
        self.totals = [total for total, _, _ in running]
        return [] if at_end or self._has_ended(length) else [(beam, token_id) for _, beam, token_id in running]

    def _has_ended(self, length: int) -> bool:
        """Return whether the running beams are not expected to improve the finished ones."""
        if len(self.finished) < self.width:
            return False
        if self.early_stopping is True or self.width == 1:  # a single beam is greedy decoding, which EOS ends
            return True
        grows = self.early_stopping == "never" and self.length_penalty > 0
        return self._score(self.totals[0], self.max_tokens if grows else length) <= self.finished[-1][0]

    def _score(self, total: float, length: int) -> float:
        return total / length**self.length_penalty


def beam_search(
    engine: BaseEngine,
    prompt: Prompt,
    beam_width: int = 4,
    max_tokens: int | None = None,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    **options,
) -> list[BeamOutput]:
    """Search for the most probable continuations of a prompt, while all other requests go on.

    The parameters are those of transformers' `generate`. If rows or memory are short, the beams of a round compute in
    turn and may recompute tokens. So they do on a padded runner, where sequences share no memory.

    Args:
        prompt: text, or token ids.
        beam_width: the number of beams, and of outputs; 1 is greedy decoding.
        max_tokens: generate at most this many tokens; None for as many as the model's context has room for.
        length_penalty: the power of the length by which a sum of log-probabilities is divided: the larger, the better
            are the scores of long outputs.
        early_stopping: when to stop once `beam_width` beams have finished. True stops at once. False stops if no
            running beam has a better score at its present length; "never", if none can have one at any length.
        options: what other features take beyond parameters, such as `adapter`.

    Returns:
        The `beam_width` best outputs, best first.

    Raises:
        ValueError: an argument is outside its range, or the request can never run.
        RuntimeError: a forward pass failed.
    """
    for name, value in (("beam_width", beam_width), ("max_tokens", 1 if max_tokens is None else max_tokens)):
        Bound(1, integer=True).check(name, value)
    Bound(-10, 10).check("length_penalty", length_penalty)
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise ValueError(f'early_stopping must be True, False or "never", not {early_stopping!r}.')
    eos_token_ids, vocab_size = engine.model_info.eos_token_ids, engine.model_info.vocab_size
    num_logprobs = beam_width + len(eos_token_ids)
    if num_logprobs > vocab_size:
        raise ValueError(
            f"beam_width is {beam_width}, but the model has only {vocab_size - len(eos_token_ids)} tokens beside EOS: "
            f"use fewer beams."
        )
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=num_logprobs)
    no_reader = deque(maxlen=0)  # single beams have none
    try:
        request_id = engine.add_subscribed(no_reader, prompt, params, beam_width=beam_width, **options)
        sequences = list(engine.scheduler.requests[request_id])
        rules = BeamRules(beam_width, sequences[0].max_tokens, length_penalty, early_stopping, eos_token_ids)
        _run_rounds(engine, sequences, rules)
    finally:
        try:
            engine.abandon_all(no_reader)
        finally:
            engine.abandon_all(no_reader)  # an interrupt may have ended the first call before it could defer it
    texts = (text_of([id for id in ids if id not in eos_token_ids], engine.tokenizer) for _, ids in rules.finished)
    return [BeamOutput(ids, text, score) for (score, ids), text in zip(rules.finished, texts, strict=True)]


def _run_rounds(engine: EngineCore, sequences: list[Sequence], rules: BeamRules) -> None:
    """Run iterations until the search ends. In the first round, one sequence computes the prompt for all of them."""
    beams, length = sequences[:1], 0
    while beams:
        engine.iterate()
        with engine.undisturbed():
            for sequence in sequences:
                if sequence.error is not None:
                    raise RuntimeError(f"The beam search failed: {sequence.error}")
                if sequence.generated > length and sequence.finish_reason is None:
                    engine.scheduler.hold(sequence)  # until all beams have a new token
            if all(sequence.generated > length for sequence in beams):
                generated = [sequence.token_ids[sequence.prompt_tokens : -1] for sequence in beams]
                extensions = rules.extend(generated, [sequence.logprobs[-1] for sequence in beams])
                beams, length = _extend(engine, sequences, beams, extensions), length + 1


def _extend(
    engine: EngineCore, sequences: list[Sequence], beams: list[Sequence], extensions: list[tuple[int, int]]
) -> list[Sequence]:
    """Let each extension of a beam continue in a sequence, and return these sequences in the same order."""
    extended = {beams[beam] for beam, _ in extensions}
    unused = [sequence for sequence in sequences if sequence not in extended]
    successors: list[Sequence] = []
    for beam, _ in extensions:
        sequence = beams[beam]
        if sequence in successors:  # a beam's first extension continues in its own sequence, the others in forks
            sequence = unused.pop()
            _fork(engine, beams[beam], sequence)
        successors.append(sequence)
    for sequence, (_, token_id) in zip(successors, extensions, strict=True):
        sequence.token_ids[-1] = token_id  # instead of the one that was sampled
        engine.scheduler.resume(sequence)
    return successors


def _fork(engine: EngineCore, parent: Sequence, child: Sequence) -> None:
    """Let a sequence continue from the tokens of another one, and share its memory if that is possible."""
    scheduler = engine.scheduler
    if child in scheduler.running and not scheduler.memory.fork(parent, child):
        scheduler.preempt(child)  # it recomputes these tokens
        engine.trace.free([child.label])
    child.token_ids[:], child.block_hashes[:] = parent.token_ids, parent.block_hashes


class Beams(SharedPrompt):
    """Attaches the beams of a search: the first one computes the prompt, and shares it even while it is held back."""

    name, options = "beam_search", frozenset({"beam_width"})

    def __init__(self, engine: EngineCore):
        super().__init__(engine)
        self.validator = engine.validator

    def prepare(self, request):
        self.validator.check_recomputation(request.prompt_tokens, request.max_tokens)
        request.indices = tuple(range(request.options["beam_width"]))
        request.notes["speculation"] = False  # a search chooses its tokens itself

    def may_join(self, first):
        return super().may_join(first) or first in self.scheduler.held


attach = Beams
