"""Lesson 4, an iteration is planned: which sequences compute how many tokens.

No model runs here. The right answer is the plan of `engine.Scheduler` for the same sequences, so the exercise and the
engine cannot drift apart.
"""

from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq

from ..engine import Chunk, EngineConfig, Scheduler, Sequence, WaitingQueue
from .attempt import Attempt
from .differences import Wrong, is_count, kind

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


def _ids(sequences: Seq[Sequence]) -> str:
    return ", ".join(str(sequence.request_id) for sequence in sequences)


def plan_chunks(attempt: Attempt) -> None:
    """Check iterations in which tokens, rows or neither are scarce, and one without any requests."""

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
    """Return the student's plan by sequence; raise `Wrong` if it is no plan."""
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
        if not is_count(tokens):
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
    """Return what is wrong if a request's own tokens are miscounted, whichever requests are beside it."""
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
    """Return what is wrong if a running request gets fewer tokens than it could."""
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


TASKS = {
    "plan_chunks(running, waiting, rows, tokens)": (
        plan_chunks,
        "nobody who decodes has to wait for a prompt, no iteration is too long, and nobody overtakes",
    ),
}
