"""Lesson 5, chunked prefill: the plan of an iteration, and the next chunk of a request."""

from ..exercise import Exercise
from .lesson_4_order import sequence_of

IN_CHUNKS = "A prompt that does not fit is computed in chunks, in this iteration and in later ones"
STARVING = "If requests that do not fit are skipped, a long prompt waits for as long as short ones keep arriving"
BEGUN = "Its prompt was begun: it holds a row, and gets no token until the prompt is computed"
HOLDS_A_ROW = "A running request also holds a row while its prompt is computed"


@Exercise.declare(
    "no decode waits for a prompt, no iteration exceeds its budget, and no request overtakes",
    forbidden=["helpers.engine.scheduler:Scheduler.schedule"],
)
def plan_chunks(running, waiting, rows, tokens):
    """Plan an iteration. The engine's `Scheduler` plans the same."""
    decodes, begun = ([sequence for sequence in running if sequence.is_decode is yes] for yes in (True, False))
    joining, plan = waiting[: rows - len(running)], []
    for sequence in decodes + begun + joining:
        uncomputed = 1 if sequence.is_decode else sequence.num_uncomputed_tokens
        count = min(uncomputed, tokens)
        if count > 0:
            plan.append((sequence.request_id, count))
            tokens -= count
    return plan


plan_chunks.add_misconceptions({
    "leaves part of the budget unused. A prompt need not be computed in one iteration: the part that fits is "
    "computed now.": "min(uncomputed, tokens) -> uncomputed if uncomputed <= tokens else 0",
    "lets one request join per iteration, although more rows and tokens are free.": "+ joining -> + joining[:1]",
    "treats every request that has generated tokens as a decode. A preempted request has lost its cache, and its "
    "tokens must be recomputed.": "sequence.is_decode -> (sequence.generated > 0)",
    "counts only the prompt. The tokens that a preempted request had generated are recomputed, too.":
        "sequence.num_uncomputed_tokens -> sequence.prompt_tokens - sequence.computed",
    "caps the chunks: only what is left of the budget limits a chunk.":
        [f"min(uncomputed, tokens) -> min(uncomputed, tokens, {most})" for most in (*range(1, 7), 8, 10, 16, 32, 64)],
    "does not count decodes against the budget. Each computes one token, which counts like any other.":
        "tokens -= count -> tokens -= 0 if sequence.is_decode else count",
    "gives every request the whole budget. The tokens that one request computes are not available to the next.":
        "tokens -= count -> pass",
})  # fmt: skip


@plan_chunks.cases
def _(random):
    def prompts(**tokens):
        return [sequence_of(name, prompt) for name, prompt in tokens.items()]

    def drawn(names):
        names = random.sample(names, len(names))  # requests do not arrive in the order of their names
        return [sequence_of(name, random.randint(2, 20), random.choice([0, 0, 3])) for name in names]

    d, e, f = (sequence_of(name, 5, generated=4, computed=8) for name in "def")
    p, q = sequence_of("p", 20, computed=8), sequence_of("q", 9, computed=3)
    scenes = [
        ([p, d, e], prompts(v=5, w=3), 6, 10), ([d], prompts(v=7, w=4), 4, 8),
        ([d, sequence_of("p", 20, computed=16), e], prompts(v=12, w=3, x=2), 6, 16),
        ([d, sequence_of("p", 20, computed=17), e], prompts(v=4, w=6, x=2, y=5), 5, 32),
        ([d, sequence_of("p", 9, computed=3), q], prompts(v=4), 4, 9),
        ([sequence_of("r", 6, 4, computed=4), d], [sequence_of("s", 5, generated=3), *prompts(v=4)], 4, 16),
        ([d, e, f], prompts(v=3), 3, 12), ([], prompts(v=6, w=9, x=2), 8, 64), ([], [], 4, 16),
        ([d, e], [sequence_of("s", 9, generated=6), *prompts(v=2)], 5, 8),  # preempted, under a tight budget
        ([sequence_of("r", 6, 4), q, d], prompts(v=2), 5, 7),  # requests that get no token
        ([d, p, sequence_of("q", 9, computed=8), e], prompts(v=1), 8, 8),
        ([d, sequence_of("p", 9, computed=1), sequence_of("q", 5, computed=4)], prompts(v=3), 4, 6),
        ([q, sequence_of("p", 9, computed=7), d], prompts(v=2, w=3), 4, 20),
        ([d], [*prompts(v=3), sequence_of("s", 5, generated=4), *prompts(w=2)], 4, 32),  # preempted, and second
        ([d], prompts(v=3, w=300), 4, 257),  # a long second prompt
        ([], prompts(v=2, w=2, x=2, y=2, z=2), 4, 64),  # several join at once
        ([sequence_of("p", 400, computed=8)], prompts(v=5), 4, 380),
    ]  # fmt: skip
    for _ in range(2):
        running, waiting = drawn("pqrs"[: random.randint(1, 4)]), drawn("vwxyz"[: random.randint(2, 5)])
        for sequence in running:
            sequence.computed = random.choice([len(sequence.token_ids) - 1, random.randrange(len(sequence.token_ids))])
        rows = len(running) + random.randint(1, 3)
        scenes.append((running, waiting, rows, random.randint(rows, 30)))
    for running, waiting, rows, tokens in scenes:
        given = f"running: {told(running)}; waiting: {told(waiting)}; {rows} rows, {tokens} tokens"
        yield (running, waiting, rows, tokens), given


def told(sequences):
    work = (
        "decodes" if sequence.is_decode else f"with {sequence.num_uncomputed_tokens} uncomputed"
        for sequence in sequences
    )
    return ", ".join(f"{sequence.request_id} {what}" for sequence, what in zip(sequences, work, strict=True)) or "none"


@plan_chunks.ignoring
def order_of_the_list(result, arguments):
    """Sort the plan's entries: their order makes no difference."""
    turns = {sequence.request_id: turn for turn, sequence in enumerate([*arguments[0], *arguments[1]])}
    return sorted(result, key=lambda pair: turns.get(pair[0], -1)) if isinstance(result, list) else result


@plan_chunks.rule
def is_a_plan(arguments, outcome, right):
    running, waiting, rows, tokens = arguments
    known = {sequence.request_id: sequence for sequence in [*running, *waiting]}
    for name, count in outcome.result:
        if name not in known:
            return f"plans for {name!r}, which is not the id of a request"
        if count > known[name].num_uncomputed_tokens:
            return (
                f"plans {count} tokens for {name}, which has only {known[name].num_uncomputed_tokens} uncomputed tokens"
            )
    plan, due, free = dict(outcome.result), dict(right.result), rows - len(running)
    if sum(sequence.request_id in plan for sequence in waiting) > free:
        return f"lets more requests join than there are free rows ({free}). {HOLDS_A_ROW}"
    order = sorted(known, key=lambda name: (name not in due, [*due, name].index(name)))
    for turn, name in enumerate(order):
        if plan.get(name, 0) > due.get(name, 0):
            return f"exceeds the budget: at the turn of {name}, only {due.get(name, 0)} tokens are left. {IN_CHUNKS}"
        if plan.get(name, 0) < due.get(name, 0):
            if known[name].is_decode:
                return f"leaves out {name}. Decodes come first: each needs one token, and prompts take what is left"
            if name in plan and sum(plan.values()) < tokens:
                return f"plans {plan[name]} tokens for {name}, although {due[name]} fit: only the budget limits a chunk"
            if set(order[turn + 1 :]) & set(plan):
                why = STARVING if known[name] in waiting else BEGUN
                return f"lets a later request overtake {name}. {why}"
            return f"leaves part of the budget unused, although {name} could compute {due[name]} tokens. {IN_CHUNKS}"
    return None


@Exercise.declare(
    "prefill, chunk, decode and recomputation are one operation: compute the next tokens, as far as the budget allows",
    names=("the number of tokens to compute", "whether the request gets a new token"),
)
def next_chunk(prompt_tokens, generated, computed, budget):
    p, g, c = prompt_tokens, generated, computed
    uncomputed = p + g - c
    tokens = min(uncomputed, budget)
    return tokens, tokens == uncomputed


next_chunk.table([
    (7, 0, 0, 100), (20, 0, 0, 8), (20, 0, 8, 8), (20, 0, 16, 8), (20, 0, 12, 8),  # a prompt, whole and in chunks
    (7, 3, 9, 8), (9, 1, 9, 1),  # decodes
    (7, 3, 0, 100), (7, 3, 0, 8), (7, 3, 8, 8), (6, 5, 4, 4), (7, 3, 7, 2),  # after a preemption
    (7, 0, 0, 0), (7, 3, 9, 0), (12, 5, 16, 0),  # other requests have used the budget
    (4000, 300, 512, 257), (4000, 300, 4299, 256),
], lambda random: [
    (random.randint(12, 40), random.randint(1, 9), random.randint(1, 10), budget)
    for budget in (64, random.randint(1, 8))
])  # fmt: skip

DONE = "tokens == uncomputed"
SAME_PASS = "Once all of its tokens are computed, a request gets a new one from that same pass"
next_chunk.add_misconceptions({
    "treats every request that has generated tokens as a decode. A preempted request has lost its cache: its "
    "tokens must be recomputed before it gets a new one.": "p + g - c -> 1 if g else p - c",
    "computes one token too few: the newest token was sampled, but its key and value are not in the cache yet.":
        "p + g - c -> p + g - c - (g > 0)",
    "counts only the prompt. After a preemption, the model has to recompute the generated tokens, too.":
        [" + g -> ", "p + g - c -> 1 if g and c >= p else p - c"],
    "ignores the budget: a prompt that does not fit is computed in chunks.": "min(uncomputed, budget) -> uncomputed",
    f"reports no new token after the last chunk of a prompt. {SAME_PASS}: another has nothing to compute.":
        [f"{DONE} -> g > 0", *(f"{DONE} -> {DONE} and {more}" for more in ("g > 0", "(c == 0 or g > 0)"))],
    f"reports no new token if the budget is exactly used up. {SAME_PASS}.": f"{DONE} -> uncomputed < budget",
    "reports a new token too early: it would follow the chunk, but the text continues after the chunk.":
        [f"{DONE} -> tokens > 0", f"{DONE} -> True"],
    "reports a new token once the prompt is computed. A preempted request must also recompute its generated "
    "tokens: before that, the model would repeat them.": f"{DONE} -> tokens > 0 and c + tokens >= p",
})  # fmt: skip
