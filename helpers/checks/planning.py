"""Lesson 4, an iteration is planned: which sequences compute how many tokens.

No model runs here. The right answer is the plan of `engine.Scheduler` for the same sequences, so the exercises and the
engine cannot drift apart. `planned_by` lets a student's plan drive an engine.
"""

from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Seq
from functools import partial

from ..engine import Chunk, EngineConfig, Plan, Scheduler, Sequence, WaitingQueue
from .attempt import Attempt
from .differences import Wrong, expect_pair, kind

HINTS = {
    "not subscriptable": "A sequence is no dict: what it knows stands behind a dot.",
    "instances of 'Sequence'": "Two are equal in what you compare, so Python compares the sequences themselves.",
}


def sequence_of(request_id: str, prompt: int, generated: int = 0, computed: int = 0, max_tokens: int = 50, **known):
    """Return a sequence with the given numbers of tokens; the first `computed` are in the cache."""
    sequence = Sequence(request_id, [7] * prompt, max_tokens, **known)
    sequence.token_ids += [8] * generated
    sequence.computed = computed
    return sequence


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# --- what one request reads ---------------------------------------------------------------------------------------


def what_to_read(attempt: Attempt) -> None:
    """Whole prompts, chunks, decodes, and starting anew after a preemption, with budgets that cut and that just fit."""
    for case, what in [
        ((7, 0, 0, 100), "a prompt that fits"),
        ((20, 0, 0, 8), "a prompt's first chunk"),
        ((20, 0, 8, 8), "a chunk in the middle"),
        ((20, 0, 16, 8), "a prompt's last chunk"),
        ((7, 3, 9, 8), "a decode"),
        ((7, 3, 0, 100), "preempted, so nothing is in the cache"),
        ((7, 3, 0, 8), "preempted, and the budget cuts"),
        ((7, 3, 8, 8), "the rest after a preemption"),
        ((20, 0, 12, 8), "a last chunk that takes the whole budget"),
        ((9, 1, 9, 1), "a decode that takes the whole budget"),
        ((7, 0, 0, 0), "others have used up the budget"),
    ]:
        names = ("prompt_tokens", "generated", "computed", "budget")
        given = f"{what}: " + ", ".join(f"{name} {value}" for name, value in zip(names, case, strict=True))
        got = attempt(*case, given=given)
        expect_pair(got, "the tokens that are read and whether there is a new one")
        tokens, new = got
        if not _is_count(tokens):
            hint = " Are the two in the wrong order?" if isinstance(tokens, bool) else ""
            raise Wrong(f"the first result should be a number of tokens, and is {kind(tokens)} ({given}).{hint}")
        if not isinstance(new, bool | int) or new not in (0, 1):
            raise Wrong(f"the second result should be True or False, and is {new!r} ({given}).")
        _explain_read(tokens, *case, given)
        _explain_new(tokens, bool(new), *case, given)


def _explain_read(tokens: int, prompt: int, generated: int, computed: int, budget: int, given: str) -> None:
    uncomputed = prompt + generated - computed
    right = min(uncomputed, budget)
    if tokens == right:
        return
    if tokens < 0:
        why = f"reads {tokens} tokens: the generated ones have to be read as well as the prompt"
    elif computed and tokens in (min(prompt + generated, budget), prompt + generated):
        why = f"begins at the start again: keys and values of the first {computed} tokens are in the cache already"
    elif tokens > budget:
        why = (
            f"reads {tokens} tokens in an iteration that has room for {budget}. What does not fit is read in pieces, "
            f"the next ones in later iterations"
        )
    elif generated and tokens == 1:
        why = (
            f"takes every request that has generated something for a decode. This one was preempted and lost its "
            f"cache: {uncomputed} tokens have to be read again before there can be a new one"
        )
    elif tokens == min(uncomputed - 1, budget):
        why = "reads one token too few: the newest one was chosen by the model, but not read by it yet"
    elif generated and tokens == min(max(prompt - computed, 0), budget):
        why = "counts the prompt only. What was generated belongs to the text, and the model reads it like a prompt"
    else:
        why = f"reads {tokens} tokens, and should read {right}"
    raise Wrong(f"{why} ({given}).")


def _explain_new(tokens: int, new: bool, prompt: int, generated: int, computed: int, budget: int, given: str) -> None:
    uncomputed = prompt + generated - computed
    if new == (tokens == uncomputed):
        return
    if not new:
        work = "the whole prompt" if computed == 0 else "the last chunk" if uncomputed > 1 else "a decode"
        why = (
            f"{work} yields no token. Whoever has read everything gets a new token from the very pass that read it: "
            f"another pass would have nothing to read"
        )
    elif tokens == 0:
        why = "gives a new token to a request that reads nothing: without a forward pass there are no logits"
    elif generated and computed + tokens >= prompt:
        why = (
            f"gives a new token once the prompt has been read. This request has generated {generated} tokens before it "
            f"was preempted, and until they are read, too, the model would say again what it has said"
        )
    else:
        why = (
            f"gives a new token after {computed + tokens} of {prompt + generated} tokens: what the model says there "
            f"would follow the piece, not the whole text"
        )
    raise Wrong(f"{why} ({given}).")


# --- who reads how much -------------------------------------------------------------------------------------------


def _ids(sequences: Seq[Sequence]) -> str:
    return ", ".join(str(sequence.request_id) for sequence in sequences)


def plan_chunks(attempt: Attempt) -> None:
    """Iterations in which tokens are scarce, rows are scarce, neither, or nobody is there."""

    def decoding(id: str) -> Sequence:
        return sequence_of(id, 5, generated=4, computed=8)

    def waiting(**prompts: int) -> list[Sequence]:
        return [sequence_of(id, prompt) for id, prompt in prompts.items()]

    for running, queue, rows, tokens in [
        ([sequence_of("p", 20, computed=8), decoding("d"), decoding("e")], waiting(v=5, w=3), 6, 10),
        ([decoding("d")], waiting(v=7, w=4), 4, 8),
        ([decoding("d"), sequence_of("p", 20, computed=16), decoding("e")], waiting(v=12, w=3, x=2), 6, 16),
        ([decoding("d"), sequence_of("p", 20, computed=17), decoding("e")], waiting(v=4, w=6, x=2, y=5), 5, 32),
        ([decoding("d"), sequence_of("p", 9, computed=3), sequence_of("q", 9, computed=3)], waiting(v=4), 4, 9),
        (
            [sequence_of("r", 6, generated=4, computed=4), decoding("d")],
            [sequence_of("s", 5, generated=3), *waiting(v=4)],
            4,
            16,
        ),
        ([decoding("d"), decoding("e"), decoding("f")], waiting(v=3), 3, 12),
        ([], waiting(v=6, w=9, x=2), 8, 64),
        ([], [], 4, 16),
    ]:
        scene = _scene(running, queue, rows, tokens)
        right = {chunk.sequence: chunk.tokens for chunk in _planned_chunks(running, queue, rows, tokens)}
        got = attempt(list(running), list(queue), rows, tokens, given=scene, hints=HINTS)
        plan = _as_plan(got, [*running, *queue], scene)
        if plan != right:
            _explain_plan(plan, right, running, queue, rows, tokens, scene)


def _planned_chunks(running: Seq[Sequence], waiting: Seq[Sequence], rows: int, tokens: int) -> list[Chunk]:
    """Return the chunks that the engine's scheduler plans for these sequences."""
    scheduler = Scheduler(EngineConfig(max_batch_size=rows, max_tokens_per_step=tokens))
    scheduler.running, scheduler.waiting = list(running), WaitingQueue(waiting)
    return scheduler.schedule().chunks


def _scene(running: Seq[Sequence], waiting: Seq[Sequence], rows: int, tokens: int) -> str:
    def told(one: Sequence) -> str:
        if one.is_decode:
            return f"{one.request_id} decodes"
        return f"{one.request_id} with {one.num_uncomputed_tokens} uncomputed"

    return (
        f"running: {', '.join(map(told, running)) or 'nobody'}; waiting: {', '.join(map(told, waiting)) or 'nobody'}; "
        f"{rows} rows, {tokens} tokens"
    )


def _as_plan(got, sequences: Seq[Sequence], scene: str) -> dict[Sequence, int]:
    """What came, by sequence, if it is a plan at all."""
    if not isinstance(got, list):
        raise Wrong(f"should return a list of (request id, tokens); it returned {kind(got)}.")
    by_id, plan = {one.request_id: one for one in sequences}, {}
    for pair in got:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise Wrong(f"should return a list of (request id, tokens), and {kind(pair)} is among them ({scene}).")
        request_id, tokens = pair
        if isinstance(request_id, Sequence):
            raise Wrong("has a sequence where its request id should be: a plan names who reads how much.")
        if not isinstance(request_id, Hashable) or request_id not in by_id:
            raise Wrong(f"plans for {request_id!r}, and there is no such request ({scene}).")
        if not _is_count(tokens):
            raise Wrong(f"the tokens of request {request_id} should be a whole number, not {kind(tokens)} ({scene}).")
        if tokens < 1:
            raise Wrong(
                f"plans {tokens} tokens for request {request_id}: who reads nothing takes no part, and a newcomer "
                f"would hold a row for it ({scene})."
            )
        if by_id[request_id] in plan:
            raise Wrong(f"plans for request {request_id} twice: an iteration reads one piece of it ({scene}).")
        plan[by_id[request_id]] = tokens
    return plan


def _explain_plan(
    plan: dict[Sequence, int],
    right: dict[Sequence, int],
    running: Seq[Sequence],
    waiting: Seq[Sequence],
    rows: int,
    tokens: int,
    scene: str,
) -> None:
    decodes = [one for one in running if one.is_decode]
    begun = [one for one in running if not one.is_decode]
    newcomers = [one for one in waiting if one in plan]
    total = sum(plan.values())
    for why in (
        _misread(plan, right),
        _beyond_the_budget(plan, [*decodes, *begun, *waiting], len(decodes), tokens),
        _beyond_the_rows(newcomers, running, begun, rows),
        _starved(plan, right, decodes, begun, newcomers, total, tokens),
        _overtaken(plan, [*begun, *waiting]),
        _unused(plan, right, running, total, tokens),
    ):
        if why:
            raise Wrong(f"{why} ({scene}).")
    one = next(one for one in [*running, *waiting] if plan.get(one) != right.get(one))
    raise Wrong(f"plans {plan.get(one, 0)} tokens for {one.request_id}, and should plan {right.get(one, 0)} ({scene}).")


def _misread(plan: Mapping, right: Mapping) -> str | None:
    """Somebody's own tokens were counted wrongly, whoever else is there."""
    for one, tokens in plan.items():
        if tokens > one.num_uncomputed_tokens and one.computed:
            return (
                f"plans {tokens} tokens for {one.request_id}, which has {one.num_uncomputed_tokens} to read: the first "
                f"{one.computed} are in the cache already"
            )
        if tokens > one.num_uncomputed_tokens:
            return f"plans {tokens} tokens for {one.request_id}, which has {one.num_uncomputed_tokens}"
        if one.generated and not one.is_decode and tokens == 1 < right.get(one, 0):
            return (
                f"takes {one.request_id} for a decode because it has generated something. It was preempted and lost "
                f"its cache: {one.num_uncomputed_tokens} tokens have to be read again"
            )
        if one.generated and not one.is_decode and tokens == one.prompt_tokens - one.computed < right.get(one, 0):
            return (
                f"counts {one.request_id}'s prompt only: what it had generated when it was preempted has to be read "
                f"again, too"
            )
    return None


def _beyond_the_budget(plan: Mapping, order: Seq[Sequence], decodes: int, tokens: int) -> str | None:
    total = sum(plan.values())
    if total <= tokens:
        return None
    if decodes > 1 and total - tokens == decodes:
        return f"reads {total} tokens: each of the {decodes} decodes reads one, and it counts like any other"
    if total == tokens + 1:
        return f"reads {total} tokens, one more than the budget allows"
    left = tokens
    for one in order:
        if plan.get(one, 0) > left:
            if left > 0 and plan[one] == one.num_uncomputed_tokens:
                return (
                    f"lets {one.request_id} read its {one.num_uncomputed_tokens} tokens at once, when {left} of the "
                    f"budget are left. A prompt that does not fit is read in pieces, so that no iteration takes longer "
                    f"than the others"
                )
            return (
                f"reads {total} tokens in all: when {one.request_id}'s turn comes, {left} of the budget are left, and "
                f"it is given {plan[one]}. What one reads, the next ones cannot have"
            )
        left -= plan.get(one, 0)
    return None


def _beyond_the_rows(newcomers: Seq, running: Seq, begun: Seq, rows: int) -> str | None:
    free = rows - len(running)
    if len(newcomers) <= free:
        return None
    if begun and len(newcomers) == free + len(begun):
        return (
            f"lets {len(newcomers)} requests join where {free} rows are free: {_ids(begun)} holds a row, too, although "
            f"its prompt is not read yet"
        )
    return f"lets {len(newcomers)} requests join where {free} rows are free: every running request holds one"


def _starved(
    plan: Mapping, right: Mapping, decodes: Seq, begun: Seq, newcomers: Seq, total: int, tokens: int
) -> str | None:
    """Somebody who runs reads less than they could."""
    if missing := [one for one in decodes if one not in plan]:
        if total == tokens:
            return (
                f"has no tokens left for {_ids(missing)}, whose next token somebody waits for. Decodes come first: "
                f"they read one token each, and prompts take what is left"
            )
        return f"forgets {_ids(missing)}: who decodes takes part in every iteration, one token each"
    for one in begun:
        if plan.get(one, 0) >= right.get(one, 0):
            continue
        if one not in plan and one.num_uncomputed_tokens <= tokens - total:
            return f"forgets {one.request_id}, whose prompt has been begun: there is room for {right[one]} tokens of it"
        if newcomers:
            left_out = "nothing" if one not in plan else f"{plan[one]} tokens"
            return (
                f"lets {_ids(newcomers)} join while {one.request_id}, whose prompt has been begun, reads {left_out}. "
                f"It holds a row, and yields nothing before its prompt is read: it comes before the newcomers"
            )
    return None


def _overtaken(plan: Mapping, prompts: Seq) -> str | None:
    for place, one in enumerate(prompts):
        after = [other for other in prompts[place + 1 :] if other in plan]
        if not after or plan.get(one) == one.num_uncomputed_tokens:
            continue
        if one in plan and all(plan[other] < other.num_uncomputed_tokens for other in after):
            return (
                f"lets {_ids([one, *after])} share the tokens. Prompts that are half read have yielded nothing yet, "
                f"one that is read has: they are read one after the other, in the order of arrival"
            )
        return (
            f"lets {_ids(after)} overtake {one.request_id}. If whoever does not fit is passed over, a long prompt "
            f"waits for as long as short ones keep coming"
        )
    return None


def _unused(plan: Mapping, right: Mapping, running: Seq, total: int, tokens: int) -> str | None:
    left = tokens - total
    for one, could in right.items():
        if left == 0 or plan.get(one, 0) >= could:
            continue
        if one in plan:
            return f"lets {one.request_id} read {plan[one]} tokens, and {left} of the budget stay unused"
        if one.num_uncomputed_tokens > left:
            return (
                f"leaves {left} tokens of the budget unused, and {one.request_id} has {one.num_uncomputed_tokens} to "
                f"read. A prompt need not be read at once: what fits is read now"
            )
        return (
            f"lets {one.request_id} wait, and there are a free row and {left} tokens that nobody uses"
            if one not in running
            else f"forgets {one.request_id}, and {left} tokens of the budget stay unused"
        )
    return None


class StudentScheduler(Scheduler):
    """A scheduler some of whose decisions are a student's."""

    def add_chunk(self, plan: Plan, sequence: Sequence, tokens: int) -> None:
        """Plan a sequence's next tokens if there is memory for them; admit the sequence if it waits."""
        waits = sequence in self.waiting
        if waits:  # a cached prefix need not be computed
            tokens = min(tokens, len(sequence.token_ids) - self.memory.cached_tokens(sequence))
        if not self.memory.allocate(sequence, tokens):
            return
        plan.chunks.append(Chunk(sequence, tokens, self.memory.block_table(sequence)))
        if waits:
            self.waiting.remove(sequence)
            self.running.append(sequence)


def planned_by(plan_chunks: Callable) -> Callable[..., Scheduler]:
    """Return what makes a scheduler whose plans are a student's: `EngineConfig(scheduler_cls=planned_by(plan_chunks))`.

    Args:
        plan_chunks: the student's function.
    """
    return partial(_PlannedBy, plan_chunks)


class _PlannedBy(StudentScheduler):
    """A scheduler whose plans come from a student's `plan_chunks`."""

    def __init__(self, plan_chunks: Callable, *args):
        super().__init__(*args)
        self._plan_chunks = plan_chunks

    def schedule(self) -> Plan:
        """Plan the next iteration.

        Raises:
            ValueError: the plan is empty although there are requests: the engine would run forever.
        """
        running, waiting = list(self.running), list(self.waiting)
        sequences = {one.request_id: one for one in [*running, *waiting]}
        plan = Plan()
        for request_id, tokens in self._plan_chunks(running, waiting, self.max_rows, self.max_tokens):
            self.add_chunk(plan, sequences[request_id], tokens)
        if sequences and not plan.chunks:
            raise ValueError(f"The plan is empty although {len(sequences)} requests are there.")
        self.waiting.step += 1
        plan.released, self._released = self._released, []
        plan.block_copies = self.memory.take_copies()
        return plan


TASKS = {
    "what_to_read(prompt_tokens, generated, computed, budget)": (
        what_to_read,
        "prefill, chunk, decode and starting anew are one thing: compute the next tokens, as far as the budget goes",
    ),
    "plan_chunks(running, waiting, rows, tokens)": (
        plan_chunks,
        "nobody who decodes has to wait for a prompt, no iteration is too long, and nobody overtakes",
    ),
}
