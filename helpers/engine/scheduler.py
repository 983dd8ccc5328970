"""The scheduler: it plans how many tokens each sequence computes in an iteration, and applies the results.

A new plan for every iteration is Orca's idea (Yu et al., OSDI 2022). The scheduler owns the queue, the running
sequences and the blocks of the KV cache. It knows nothing about the model, so plans can be tested without one and can
drive a simulator.

Running sequences are scheduled first. Then waiting ones are admitted in the policy's order, within the budgets of rows,
tokens and memory. Two settings determine what a plan may contain. Sarathi-Serve's ablation study (Agrawal et al., OSDI
2024) compares them:

    mixed     prefills share an iteration with decodes; otherwise the two take turns
    chunked   a prompt may be computed in chunks that fit the token budget; otherwise in a single iteration
"""

import itertools
from collections.abc import Hashable

from ..engine_config import EngineConfig
from .block_manager import BlockManager, UnlimitedMemory
from .hooks import Feature
from .plan import Chunk, ForwardPass, Plan, RunnerOutput
from .policies import WaitingQueue, make_policy
from .sequence import Sequence


class Scheduler:
    """Plans iterations, and owns the queue, the rows and the memory.

    An unfinished sequence runs in a row or waits in the queue. A feature can hold it back: then it computes nothing,
    and if it has no row, it stays beside the queue.

    Args:
        config: the rows, the token budget, the policy and the two settings above.
        memory: allocates the KV cache; if None, a sequence needs only a row.

    Attributes:
        features: those that take part in every request, and may extend each plan.
        policy: orders the waiting sequences.
        memory: the engine's block manager, or an `UnlimitedMemory`.
        waiting: sequences that may get a row; iterates in order of arrival.
        running: sequences with a row, in the order in which they got it.
        held: sequences that a feature holds back, with and without a row.
        unfinished: all sequences that wait or run, in order of arrival.
        requests: the same by request id.

    Raises:
        ValueError: the policy is unknown, or it has no method `order`.
    """

    def __init__(self, config: EngineConfig, memory: BlockManager | UnlimitedMemory | None = None):
        self.max_rows, self.max_tokens_per_step = config.max_batch_size, config.max_tokens_per_step
        self.mixed, self.chunked = config.mixed_batches, config.chunked_prefill
        self.policy, self.memory = make_policy(config.policy), memory or UnlimitedMemory()
        self.features: tuple[Feature, ...] = ()
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.held: set[Sequence] = set()
        self.unfinished: dict[Sequence, None] = {}  # as an ordered set
        self.requests: dict[Hashable, list[Sequence]] = {}
        self._released: list[Sequence] = []
        self._numbers = itertools.count()
        self._prefilled_last = False

    # --- sequences arrive, wait and end -------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence to the queue."""
        sequence.number = next(self._numbers)
        self.unfinished[sequence] = None
        self.requests.setdefault(sequence.request_id, []).append(sequence)
        self.waiting.add(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Hold a sequence back until `resume`: it computes no tokens, and without a row it leaves the queue."""
        self.held.add(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Let a sequence compute tokens again; if it has no row, it returns to the queue."""
        if sequence in self.held:
            self.held.remove(sequence)
            if sequence not in self.running:
                self.waiting.add(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Free a sequence's row and memory, and return it to the queue, ahead of later arrivals."""
        self.running.remove(sequence)
        self._release(sequence)
        for feature in sequence.request.features:
            feature.preempted(sequence)
        if sequence not in self.held:
            self.waiting.add(sequence)

    def finish(self, sequence: Sequence, reason: str, error: BaseException | None = None) -> None:
        """Finish a waiting or running sequence, and free its row and memory."""
        sequence.end(reason, error)
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.held.discard(sequence)
        self.waiting.forget(sequence)
        self._release(sequence)
        del self.unfinished[sequence]
        self.requests[sequence.request_id].remove(sequence)
        if not self.requests[sequence.request_id]:
            del self.requests[sequence.request_id]
        for feature in sequence.request.features:
            feature.finished(sequence)

    # --- one iteration ------------------------------------------------------------------------------------------

    def schedule(self) -> Plan:
        """Plan the next iteration.

        Returns:
            A plan of at most `max_tokens_per_step` tokens, whose memory is allocated. If a running sequence needs a
            block and none is free, the newest running sequence is preempted. The oldest one always proceeds, so no
            iteration is without progress.
        """
        plan = Plan()
        self.choose_chunks(plan)
        while not plan.chunks and self.running and self.held.issuperset(self.running):
            self._preempt(plan, self.running[-1])  # no row or memory is left for the sequence they wait for
            self._admit(plan)
        for feature in self.features:
            feature.extend_plan(plan)
        self.waiting.step += 1
        plan.released = list(self._released)
        plan.block_copies = self.memory.take_copies()
        return plan

    def choose_chunks(self, plan: Plan) -> None:
        """Choose which sequences compute how many tokens: running ones first, then those that are admitted."""
        decoding = [sequence for sequence in self.running if sequence.is_decode and sequence not in self.held]
        prefilling = [sequence for sequence in self.running if not sequence.is_decode and sequence not in self.held]
        if not self.mixed:
            self._take_turns(plan, decoding, prefilling)
            return
        self._advance(plan, decoding + prefilling)
        if not plan.preempted:  # after a preemption, there is no memory for another sequence
            self._admit(plan)

    def _take_turns(self, plan: Plan, decoding: list[Sequence], prefilling: list[Sequence]) -> None:
        """Prefill, unless the last iteration did and there is something to decode."""
        if not (self._prefilled_last and decoding):
            self._advance(plan, prefilling)
            if not plan.preempted:
                self._admit(plan)
        self._prefilled_last = bool(plan.chunks)
        if not plan.chunks:
            self._advance(plan, [sequence for sequence in decoding if sequence not in plan.preempted])

    def _advance(self, plan: Plan, sequences: list[Sequence]) -> None:
        """Schedule the next tokens of running sequences; preempt the newest where memory is short."""
        left = self.max_tokens_per_step - plan.tokens
        for sequence in sequences:
            tokens = self._num_tokens(sequence.num_uncomputed_tokens, left)
            while tokens and sequence not in plan.preempted and not self.memory.allocate(sequence, tokens):
                self._preempt(plan, self.running[-1])
                left = self.max_tokens_per_step - plan.tokens  # it may have been planned already
            if tokens and sequence not in plan.preempted:
                plan.chunks.append(Chunk(sequence, tokens, self.memory.block_table(sequence)))
                left -= tokens

    def _num_tokens(self, uncomputed: int, left: int) -> int:
        """Return how many tokens a sequence may compute within the rest of the budget."""
        return min(uncomputed, left) if self.chunked or uncomputed <= left else 0

    def _preempt(self, plan: Plan, newest: Sequence) -> None:
        """Preempt a sequence while a plan is made."""
        self.preempt(newest)
        plan.preempted.append(newest)
        plan.chunks = [chunk for chunk in plan.chunks if chunk.sequence is not newest]

    def _admit(self, plan: Plan) -> None:
        """Admit sequences in the policy's order until one does not fit: a later one must not overtake it."""
        free_rows, left = self.max_rows - len(self.running), self.max_tokens_per_step - plan.tokens
        if free_rows <= 0 or not self.waiting:
            return
        for sequence in list(itertools.islice(self.policy.order(self.waiting, self.running), free_rows)):
            if sequence not in self.waiting:
                raise ValueError(f"The policy admits sequence {sequence.label!r}, which is not waiting.")
            tokens = self._num_tokens(len(sequence.token_ids) - self.memory.cached_tokens(sequence), left)
            if tokens == 0 or not self.memory.allocate(sequence, tokens):
                break
            self.waiting.remove(sequence)
            self.running.append(sequence)
            plan.chunks.append(Chunk(sequence, tokens, self.memory.block_table(sequence)))
            left -= tokens

    def update(self, plan: Plan, output: RunnerOutput) -> list[Sequence]:
        """Apply the results of an iteration: computed tokens, new tokens and errors.

        Returns:
            The sequences that finished, in the order in which they did.
        """
        if output.passes or output.error is None:  # otherwise the runner may not have dropped their rows
            del self._released[: len(plan.released)]
        finished = []
        for forward_pass in output.passes:
            for chunk in forward_pass.chunks:
                self._settle(chunk, forward_pass)
                finished += [chunk.sequence] if chunk.sequence.finish_reason is not None else []
        return finished if output.error is None else finished + self._fail(plan, output)

    def _fail(self, plan: Plan, output: RunnerOutput) -> list[Sequence]:
        """Finish the sequences that were not computed because of an error, and return them."""
        computed = {chunk.sequence for forward_pass in output.passes for chunk in forward_pass.chunks}
        failed = [sequence for sequence in plan.sequences if sequence not in computed]
        for sequence in failed:
            self.finish(sequence, "error", output.error)
        return failed

    def _settle(self, chunk: Chunk, forward_pass: ForwardPass) -> None:
        """Apply the results of a forward pass to one sequence."""
        sequence, reason, error = chunk.sequence, None, None
        sequence.computed = chunk.end
        try:
            for number, token in enumerate(forward_pass.sampled.get(sequence, [])):
                if isinstance(token, Exception):
                    raise token
                sequence.computed = chunk.end + number  # this many drafts are accepted, and so computed
                reason = sequence.append(token.token_id, forward_pass.start + forward_pass.seconds, token.logprobs)
                if reason is not None:
                    break  # the other tokens would follow the end
        except Exception as failure:  # also of the tokenizer, which may not know the token
            reason, error = "error", failure
        for feature in sequence.request.features:
            feature.settle(chunk, forward_pass)
        if reason is not None and sequence.finish_reason is None:
            self.finish(sequence, reason, error)

    def _release(self, sequence: Sequence) -> None:
        self.memory.free(sequence)
        self._released.append(sequence)
