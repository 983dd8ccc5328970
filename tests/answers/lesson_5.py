"""Answers to lesson 5's exercises."""

from answers import ALMOST, WRONG, right, solutions
from helpers.checks.edits import edited

planned = solutions.plan_chunks


@right("next_chunk")
def token_by_token_until_the_end(prompt_tokens, generated, computed, budget):
    tokens = 0
    while tokens < budget and computed + tokens < prompt_tokens + generated:
        tokens += 1
    return [tokens, int(computed + tokens == prompt_tokens + generated)]


ALMOST["next_chunk"] |= {
    "should be True, but is 8": lambda result, p, g, c, b: (result[0], result[1] and c + result[0] + 1),
}


@right("plan_chunks")
def in_three_loops(running, waiting, rows, tokens):
    plan, queue = [], list(waiting)
    for sequence in running:
        if sequence.is_decode:
            plan.append([sequence.request_id, 1])
            tokens -= 1
    for sequence in running:
        if not sequence.is_decode and tokens:
            plan.append([sequence.request_id, min(tokens, sequence.num_uncomputed_tokens)])
            tokens -= plan[-1][1]
    free = rows - len(running)
    while queue and free and tokens:
        joining = queue.pop(0)
        plan.append([joining.request_id, min(tokens, len(joining.token_ids) - joining.computed)])
        tokens, free = tokens - plan[-1][1], free - 1
    return plan


def in_order(order):
    return edited(planned, f"decodes + begun + joining -> {order}")


def with_empty_chunks(plan, running, waiting, rows, tokens):
    return [
        (sequence.request_id, dict(plan).get(sequence.request_id, 0))
        for sequence in [*running, *waiting[: rows - len(running)]]
    ]


def sequences_for_ids(plan, running, waiting, *_):
    sequences = {sequence.request_id: sequence for sequence in running + waiting}
    return [(sequences[name], count) for name, count in plan]


def computes_while_it_plans(plan, running, *_):
    for sequence in running:
        sequence.computed += dict(plan).get(sequence.request_id, 0)
    return plan


WRONG["plan_chunks"] |= {
    "exceeds the budget: at the turn of p, only 8": lambda r, w, rows, tokens: planned(r, w, rows, tokens + 1),
    "leaves out d. Decodes come first": in_order("begun + joining + decodes"),
    "lets a later request overtake v. If": in_order("decodes + begun + joining[::-1]"),
    "lets a later request overtake p. Its prompt": in_order("decodes + joining"),
    "although q could compute 2 tokens": in_order("decodes + begun[:1] + (joining if len(begun) < 2 else [])"),
    "lets one request join per iteration": lambda r, w, rows, tokens: planned(r, w[:1], rows, tokens),
    "caps the chunks": edited(planned, "min(uncomputed, tokens) -> min(uncomputed, tokens, 8)"),
    "than there are free rows (2)": lambda r, w, rows, tokens: planned(r, w, 99, tokens),
    "also holds a row": lambda r, w, rows, tokens: planned(
        r, w, rows + sum(not sequence.is_decode for sequence in r), tokens
    ),
    "which has only 4 uncomputed tokens": edited(planned, "sequence.num_uncomputed_tokens -> len(sequence.token_ids)"),
}
ALMOST["plan_chunks"] |= {
    "('e', 1), ('v', 0), ('w', 0)]": with_empty_chunks,
    "('d', 1), ('d', 1),": lambda plan, *_: [(name, 1) for name, _ in plan] + plan,
    "plans for 'a', which is not": lambda plan, *_: [*plan, ("a", 1)],
    "which is not the id of a request": sequences_for_ids,
    "changed its argument: a sequence in `running`, place 0": computes_while_it_plans,
}
