"""Parallel sampling: several outputs of one prompt. The prompt is computed once, and all outputs share its blocks.

The first sequence of the request computes the prompt. The others are held back until that is done, or until the first
one has finished. When they get a row, they find the prompt's blocks in the first one's table. If the first one is
preempted meanwhile, there is nothing to share, and they wait again.
"""

from ..engine import EngineCore, Feature, Sequence


class SharedPrompt(Feature):
    """Holds the further sequences of a request back until the first one has computed the prompt."""

    name = "parallel_sampling"

    def __init__(self, engine: EngineCore):
        self.scheduler = engine.scheduler
        self._need_prompt: set[Sequence] = set()  # held back until the first sequence has computed the prompt

    def prepare(self, request):
        request.indices = tuple(range(request.params.n))

    def joined(self, request):
        for sequence in request.sequences[1:]:
            self.hold_until_computed(sequence)

    def settle(self, chunk, forward_pass):
        if chunk.sequence.prompt_is_computed:
            self._resume_others(chunk.sequence)

    def finished(self, sequence):
        self._need_prompt.discard(sequence)
        self._resume_others(sequence)

    def preempted(self, sequence):
        first, *others = sequence.request.sequences
        if not self.may_join(first):
            lost = [other for other in others if other in self.scheduler.waiting] if sequence is first else [sequence]
            for other in lost:
                if other not in self.scheduler.held:
                    self.hold_until_computed(other)

    def may_join(self, first: Sequence) -> bool:
        """Return whether the other sequences may get a row."""
        return first.finish_reason is not None or first.prompt_is_computed

    def hold_until_computed(self, sequence: Sequence) -> None:
        """Hold a further sequence back until the first one of its request has computed the prompt."""
        self.scheduler.hold(sequence)
        self._need_prompt.add(sequence)

    def _resume_others(self, sequence: Sequence) -> None:
        first, *others = sequence.request.sequences
        for other in others if sequence is first else ():
            if other in self._need_prompt:
                self._need_prompt.remove(other)
                self.scheduler.resume(other)


attach = SharedPrompt
