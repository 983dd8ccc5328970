"""Lesson 4, scheduling: the order of the queue, and which requests are admitted."""

from ...engine import Sequence
from ..exercise import Exercise


def sequence_of(request_id, prompt, generated=0, computed=0, priority=0, waited=0) -> Sequence:
    """Return a sequence with these numbers of tokens; the first `computed` are in the cache."""
    sequence = Sequence(request_id, [7] * prompt, 50, priority=priority)
    sequence.computed, sequence.waited = computed, waited
    sequence.token_ids += [8] * generated
    return sequence


@Exercise.declare(
    "the smallest number goes first, and waiting lowers it, so no request starves",
    forbidden=["helpers.engine.policies:Priority.order"],
)
def most_urgent(waiting, aging):
    return min(
        waiting, key=lambda sequence: (sequence.priority - sequence.waited // aging, -sequence.waited), default=None
    )


def _drawn(random, aging):
    """Return requests that have all waited differently, so exactly one is next."""
    waited = random.sample(range(4 * aging), 6)
    return [(name, random.randint(0, 4), each) for name, each in zip("abcdef", waited, strict=True)], aging


most_urgent.table([
    ([("c", 1, 2), ("a", 2, 9), ("b", 0, 5)], 50), ([("d", 0, 16), ("a", 2, 29), ("b", 1, 20), ("c", 3, 17)], 10),
    ([("d", 1, 15), ("b", 2, 100), ("c", 1, 50), ("a", 3, 160)], 50),
    ([("d", 0, 0), ("a", 1, 50), ("c", 0, 15), ("b", 2, 51)], 50), ([("a", 2, 50), ("b", 1, 49)], 50),
    ([("a", 1, 60), ("b", 0, 40)], 50), ([("b", 1, 7), ("a", 1, 19), ("c", 1, 3)], 20),
    ([("b", 6, 3), ("a", 0, 2)], 2), ([("b", 6, 3), ("c", 1, 9)], 50),
    ([("e", 4, 27), ("a", 3, 26), ("d", 1, 13), ("b", 2, 20)], 7),
    ([("a", 0, 19), ("e", 9, 199), ("c", 4, 81)], 20), ([("c", 2, 59), ("b", 1, 58), ("a", 3, 61)], 20),
    ([("a", 3, 4), ("b", 300, 302), ("c", 4, 7)], 1), ([], 50),
], lambda random: [_drawn(random, aging) for aging in (7, 20, 50)],
   given="(request, priority, waited) {}; aging {}", build=lambda random, requests, aging: (
    [sequence_of(name, 4, priority=level, waited=waited) for name, level, waited in requests], aging))  # fmt: skip

LEVEL, LEVELS = "sequence.priority - sequence.waited // aging", "sequence.waited // aging"
WRONG_LEVELS = {
    "picks the largest number. A smaller number is more urgent: priority 0 goes before 1.":
        [f"{LEVEL} -> {LEVELS} - sequence.priority", f"{LEVEL} -> -{LEVEL}"],
    "makes waiting requests less urgent. Smaller numbers are more urgent, so waiting has to lower them.":
        [f"{LEVEL} -> sequence.priority + {LEVELS}"],
    "ignores `waited`: as long as urgent requests keep arriving, the others starve.": [f" - {LEVELS} -> "],
    "counts fractions of a level: only *full* spans count.": ["// -> /", f"{LEVELS} -> round(sequence.waited / aging)"],
    "stops at level 0: a request that has waited long enough is more urgent than a new one of priority 0.":
        [f"{LEVEL} -> max({LEVEL}, 0)"],
}  # fmt: skip
most_urgent.add_misconceptions({
    **{message: [(edit, *ties) for edit in edits for ties in ((), ("-sequence.waited -> 0",))]
       for message, edits in WRONG_LEVELS.items()},
    "breaks ties by priority. Among equally urgent requests, the one that has waited longest is next, however it "
    "reached its level.": "-sequence.waited -> sequence.priority",
})  # fmt: skip


@most_urgent.rule
def takes_the_lowest_level(arguments, outcome, right):
    (_, aging), taken, wanted = arguments, outcome.result, right.result
    if wanted is None or taken.request_id == wanted.request_id:
        return None
    level, best_level = (sequence.priority - sequence.waited // aging for sequence in (taken, wanted))
    why = ". Among equally urgent requests, the one that has waited longest is next" if level == best_level else ""
    return f"picks {taken.request_id}, which counts as {level}, and {wanted.request_id} counts as {best_level}{why}"


@Exercise.declare("a request joins if a row is free and its whole prompt fits, and none overtakes the one before it")
def admitted(running, waiting, rows, tokens):
    names, left = [], tokens - len(running)
    for sequence in waiting:
        need = sequence.num_uncomputed_tokens
        if len(running) + len(names) >= rows or need > left:
            break
        names.append(sequence.request_id)
        left -= need
    return names


def _queue(random, decoding, prompts, rows, tokens):
    """Return the arguments of a number of decodes, and of prompts; a pair is (prompt, generated) after a preemption."""
    running = [sequence_of(f"r{number}", 6, 3, computed=8) for number in range(decoding)]
    sizes = zip("cabfed", prompts, strict=False)
    waiting = [sequence_of(name, *(size if isinstance(size, tuple) else [size])) for name, size in sizes]
    return running, waiting, rows, tokens


admitted.table([
    (2, [5, 4, 3], 8, 64), (2, [5, 4, 3], 4, 64), (4, [5], 4, 64), (2, [5, 9, 3], 8, 12), (2, [30, 4], 8, 20),
    (0, [6, 6, 6], 8, 18), (0, [6, 6, 6], 8, 17), (3, [5, 2], 8, 10), (3, [5, 3], 8, 10), (1, [(5, 9), 2], 8, 14),
    (1, [(5, 9), 2], 8, 17), (2, [], 4, 9), (0, [], 4, 16), (0, [7], 1, 7), (2, [8, 1, 1, 1], 8, 9),
    (0, [4, 4, 4], 2, 64), (0, [90, 5], 8, 64), (0, [3, (5, 9)], 8, 16), (2, [9, 9, 9], 8, 4),
], lambda random: [(random.randint(1, 3), random.choices(range(2, 12), k=6), 6, random.randint(9, 26))],
   given="{} decode; c, a, b, f, ... wait with prompts of {} tokens, or (prompt, generated) tokens after a preemption; "
         "{} rows, {} tokens", build=_queue)  # fmt: skip

admitted.add_misconceptions({
    "skips a prompt that does not fit, and admits a later one: if requests overtake, a long prompt may wait forever.":
        "break -> continue",
    "forgets that each running request computes a token of the budget.": "tokens - len(running) -> tokens",
    "counts only the prompt: the tokens that a preempted request had generated are recomputed, too.":
        "num_uncomputed_tokens -> prompt_tokens",
    "forgets that running requests hold rows, too.": "len(running) + len(names) >= rows -> len(names) >= rows",
    "gives every request the whole budget: what one prompt takes is not available to the next.": "left -= need -> pass",
    "refuses a prompt that takes exactly what is left: it fits.": "need > left -> need >= left",
    "ignores the tokens: a prompt has to fit into what the iteration can still compute.":
        " or need > left -> ",
})  # fmt: skip
