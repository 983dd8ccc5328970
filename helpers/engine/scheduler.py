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
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

from .block_manager import BlockManager, UnlimitedMemory
from .config import EngineConfig
from .plan import Chunk, Plan
from .policies import make_policy
from .sequence import Sequence
from .speculation import Speculation
from .stop_conditions import finish_reason
from .waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from .runner import ForwardPass, RunnerOutput, SampledToken


class Scheduler:
    """Plans iterations, and owns the queue, the rows and the memory.

    An unfinished sequence runs in a row, waits in the queue, or stays beside the queue. A further sample of a prompt
    stays there until the prompt is computed (`parent`). A beam that lost its row stays there until the other beams have
    finished their round (`paused`).

    Args:
        config: the rows, the token budget, the policy and the two settings above.
        memory: allocates the KV cache; if None, a sequence needs only a row.
        eos_token_ids: the tokens that end an output.

    Attributes:
        policy: orders the waiting sequences.
        memory: the engine's block manager, or an `UnlimitedMemory`.
        waiting: sequences that may get a row; iterates in order of arrival.
        running: sequences with a row, in the order in which they got it.
        unfinished: all sequences that wait or run, in order of arrival.
        requests: the same by request id.
        speculation: proposes drafts for decodes; None for none.

    Raises:
        ValueError: the policy is unknown, or it has no method `order`.
    """

    def __init__(
        self,
        config: EngineConfig,
        memory: BlockManager | UnlimitedMemory | None = None,
        eos_token_ids: Iterable[int] = frozenset(),
    ):
        self.max_rows, self.max_tokens_per_step = config.max_batch_size, config.max_tokens_per_step
        self.mixed, self.chunked = config.mixed_batches, config.chunked_prefill
        self.policy = make_policy(config.policy)
        self.memory, self.eos_token_ids = memory or UnlimitedMemory(), frozenset(eos_token_ids)
        self.speculation: Speculation | None = None
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.unfinished: dict[Sequence, None] = {}  # as an ordered set
        self.requests: dict[Hashable, list[Sequence]] = {}
        self._siblings: dict[Sequence, list[Sequence]] = {}  # they wait until their parent's prompt is computed
        self._paused: set[Sequence] = set()  # beams that were preempted after their round; no policy sees them
        self._released: list[Sequence] = []
        self._numbers = itertools.count()
        self._prefilled_last = False

    # --- requests arrive and end --------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence to the queue; one with a parent joins once the parent's prompt is computed."""
        sequence.number = next(self._numbers)
        self.unfinished[sequence] = None
        self.requests.setdefault(sequence.request_id, []).append(sequence)
        self.waiting.register(sequence)
        self._enqueue(sequence)

    def finish(self, sequence: Sequence, reason: str, error: BaseException | None = None) -> None:
        """Finish a waiting or running sequence, and free its row and memory."""
        sequence.end(reason, error)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self._paused:
            self._paused.remove(sequence)
        else:
            self._siblings[sequence.parent].remove(sequence)
        self.waiting.forget(sequence)
        self._release(sequence)
        self._enqueue_siblings(sequence)
        del self.unfinished[sequence]
        samples = self.requests[sequence.request_id]
        samples.remove(sequence)
        if not samples:
            del self.requests[sequence.request_id]

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Let a sequence continue from the tokens of another one, and share its memory if that is possible.

        Returns:
            Whether the child still has its row. Without memory to share, it returns to the queue and recomputes.
        """
        is_running = child in self.running
        if is_running and not self.memory.fork(parent, child):
            self._preempt(Plan(), child)  # between two iterations, so no plan names it
            is_running = False
        child.token_ids[:], child.block_hashes[:] = parent.token_ids, parent.block_hashes
        return is_running

    def resume(self, sequence: Sequence) -> None:
        """Let a paused sequence compute tokens again; if it was preempted meanwhile, it returns to the queue."""
        sequence.paused = False
        if sequence in self._paused:
            self._paused.remove(sequence)
            self._enqueue(sequence)

    def recover(self, sequences: Iterable[Sequence]) -> None:
        """Rebuild the queue, the rows and the memory after an interrupt, which may have come between any two changes.

        Only the sequences themselves are trusted. All of them wait again, and their tokens are recomputed.

        Args:
            sequences: those that have not finished, in order of arrival.
        """
        unfinished = dict.fromkeys(sequences)
        self._released += {**self.unfinished, **unfinished}  # the runner may have computed any of them
        self.memory.clear()
        self.waiting.clear(unfinished)
        self.unfinished, self.running, self.requests, self._siblings = unfinished, [], {}, {}
        self._paused = set()
        self._prefilled_last = False
        for sequence in unfinished:
            sequence.computed = 0
            self.requests.setdefault(sequence.request_id, []).append(sequence)
        for sequence in unfinished:
            self._enqueue(sequence)

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
        while not plan.chunks and self.running and all(sequence.paused for sequence in self.running):
            self._preempt(plan, self.running[-1])  # they wait for a sequence that has no row or no memory beside them
            self._admit(plan)
        if self.speculation is not None:
            self._add_drafts(plan, self.speculation)
        self.waiting.step += 1
        plan.released = list(self._released)
        plan.block_copies = self.memory.take_copies()
        return plan

    def choose_chunks(self, plan: Plan) -> None:
        """Choose which sequences compute how many tokens: running ones first, then those that are admitted."""
        decoding, prefilling = [], []
        for sequence in self.running:
            (decoding if sequence.is_decode else prefilling).append(sequence)
        decode_only = not self.mixed and self._prefilled_last and bool(decoding)
        if not decode_only:
            if self.mixed:
                self._advance(plan, decoding)
            self._advance(plan, prefilling)
            if not plan.preempted:  # after a preemption, there is no memory for another sequence
                self._admit(plan)
        self._prefilled_last = bool(plan.chunks)
        if not self.mixed and not plan.chunks:  # the decodes' turn, or there is nothing to prefill
            self._advance(plan, [one for one in decoding if one not in plan.preempted])

    def _advance(self, plan: Plan, sequences: list[Sequence]) -> None:
        """Schedule the next tokens of running sequences; preempt the newest where memory is short."""
        left = self.max_tokens_per_step - plan.tokens
        for sequence in sequences:
            tokens = min(sequence.num_uncomputed_tokens, left)
            if tokens == 0 or (tokens < sequence.num_uncomputed_tokens and not self.chunked):
                continue
            while sequence not in plan.preempted and not self.memory.allocate(sequence, tokens):
                self._preempt(plan, self.running[-1])
                left = self.max_tokens_per_step - plan.tokens  # it may have been planned already
            if sequence not in plan.preempted:
                plan.chunks.append(Chunk(sequence, tokens, self.memory.block_table(sequence)))
                left -= tokens

    def _preempt(self, plan: Plan, newest: Sequence) -> None:
        """Free a sequence's row and memory, and return it to the queue, ahead of later arrivals."""
        self.running.remove(newest)
        self._release(newest)
        self._enqueue(newest)
        for sibling in self.requests[newest.request_id]:
            if sibling.parent is newest and sibling in self.waiting:  # there is nothing to share until newest is back
                self.waiting.remove(sibling)
                self._enqueue(sibling)
        plan.preempted.append(newest)
        plan.chunks = [chunk for chunk in plan.chunks if chunk.sequence is not newest]

    def _admit(self, plan: Plan) -> None:
        """Admit sequences in the policy's order until one does not fit: a later one must not overtake it."""
        free_rows, left, admitted = self.max_rows - len(self.running), self.max_tokens_per_step - plan.tokens, []
        if free_rows <= 0 or not self.waiting:
            return
        for sequence in itertools.islice(self.policy.order(self.waiting, self.running), free_rows):
            if sequence not in self.waiting or sequence in admitted:
                raise ValueError(f"The policy admits sequence {sequence.label!r}, which is not waiting.")
            uncomputed = len(sequence.token_ids) - self.memory.cached_tokens(sequence)
            tokens = min(uncomputed, left)
            if tokens == 0 or (tokens < uncomputed and not self.chunked):
                break
            if not self.memory.allocate(sequence, tokens):
                break
            admitted.append(sequence)
            plan.chunks.append(Chunk(sequence, tokens, self.memory.block_table(sequence)))
            left -= tokens
        for sequence in admitted:
            self.waiting.remove(sequence)
        self.running += admitted

    def _add_drafts(self, plan: Plan, speculation: Speculation) -> None:
        """Add drafts to decodes, within what is left of the token budget and of the free blocks."""
        chunks = [chunk for chunk in plan.chunks if chunk.is_decode and not chunk.sequence.is_beam]
        sequences = [chunk.sequence for chunk in chunks]
        limits = [sequence.max_tokens - sequence.generated - 1 for sequence in sequences]
        drafts = speculation.propose(sequences, limits, self.max_tokens_per_step - plan.tokens)
        for chunk, token_ids in zip(chunks, drafts, strict=True):
            if not chunk.sequence.params.ignore_eos:  # nothing follows EOS
                token_ids = list(itertools.takewhile(lambda token_id: token_id not in self.eos_token_ids, token_ids))
            if token_ids:
                chunk.add_drafts(token_ids[: self.memory.allocate_drafts(chunk.sequence, len(token_ids))])

    def update(self, plan: Plan, output: "RunnerOutput") -> list[Sequence]:
        """Apply the results of an iteration: computed tokens, sampled tokens and errors.

        Returns:
            The sequences that finished, in the order in which they did.
        """
        if output.passes or output.error is None:  # otherwise the runner may not have dropped their rows
            del self._released[: len(plan.released)]
        finished = []
        for done in output.passes:
            for chunk in done.chunks:
                if self._enter(chunk, done):
                    finished.append(chunk.sequence)
        if output.error is not None:
            computed = {chunk.sequence for done in output.passes for chunk in done.chunks}
            for sequence in plan.sequences:
                if sequence not in computed:
                    self.finish(sequence, "error", output.error)
                    finished.append(sequence)
        return finished

    def _enter(self, chunk: Chunk, done: "ForwardPass") -> bool:
        """Apply the results of a forward pass to one sequence, and return whether it finished."""
        sequence, drafted = chunk.sequence, len(chunk.draft_token_ids)
        sequence.computed = chunk.end
        if sequence in done.prompt_logprobs:
            sequence.add_prompt_logprobs(chunk.scored.start, done.prompt_logprobs[sequence])
        if sequence.prompt_is_computed:
            self._enqueue_siblings(sequence)
        if sequence.max_tokens == 0 and sequence.prompt_is_computed:
            self.finish(sequence, "length")
        sampled = done.sampled.get(sequence)
        if isinstance(sampled, Exception):
            self.finish(sequence, "error", sampled)
        elif sampled is not None:
            if drafted:
                self.speculation.observe(sequence, drafted, len(sampled) - 1)
            try:
                for number, token in enumerate(sampled):
                    sequence.computed = chunk.end + number  # this many drafts are accepted, and so computed
                    self._append(sequence, token, done.start + done.seconds)
                    if sequence.finish_reason is not None:
                        break  # the other tokens would follow the end
            except Exception as error:  # a token that the tokenizer cannot decode
                self.finish(sequence, "error", error)
        if drafted and sequence.finish_reason is None:
            self.memory.trim(sequence)
        return sequence.finish_reason is not None

    def _append(self, sequence: Sequence, sampled: "SampledToken", now: float) -> None:
        """Append a new token, and finish the sequence if it meets a stop condition."""
        sequence.token_times.append(now)
        if sequence.logprobs is not None:
            sequence.logprobs.append(sampled.logprobs)
        sequence.token_ids.append(sampled.token_id)  # last: from here on, an interrupt does not take the token back
        reason = self.detokenize(sequence, sampled.token_id)
        if reason is not None:
            self.finish(sequence, reason)

    def detokenize(self, sequence: Sequence, token_id: int) -> str | None:
        """Extend a sequence's text by a token, and return why the sequence finishes with it; None if it continues."""
        is_eos = token_id in self.eos_token_ids and not sequence.params.ignore_eos
        stopped = is_eos or token_id in sequence.token_rules.stop_token_ids  # these tokens have no text
        if sequence.detokenizer is not None and not stopped:
            sequence.detokenizer.push(token_id)
            stopped = sequence.detokenizer.stopped
        return finish_reason(stopped, sequence.max_tokens - sequence.generated)

    def _release(self, sequence: Sequence) -> None:
        self.memory.free(sequence)
        self._released.append(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        """Put a sequence into the queue, unless it is paused.

        A further sample of a prompt waits beside the queue until the prompt is computed.
        """
        parent = sequence.parent
        if sequence.paused:
            self._paused.add(sequence)
        elif parent is None or parent.finish_reason is not None or parent.prompt_is_computed or parent.paused:
            self.waiting.add(sequence)
        else:
            self._siblings.setdefault(parent, []).append(sequence)

    def _enqueue_siblings(self, parent: Sequence) -> None:
        """Queue the sequences that share a parent's prompt, once it is computed or the parent has finished."""
        for sibling in self._siblings.pop(parent, ()):
            self.waiting.add(sibling)
