"""Answers to lesson 4's exercises."""

from itertools import pairwise

import numpy as np

from answers import right, wrong
from helpers import EngineConfig, metrics
from helpers.engine import LongestFirst, Priority, Scheduler, WaitingQueue

# --- what_to_read -----------------------------------------------------------------------------------------------------


@right("what_to_read")
def token_by_token_until_the_end(prompt_tokens, generated, computed, budget):
    tokens = 0
    while tokens < budget and computed + tokens < prompt_tokens + generated:
        tokens += 1
    return [tokens, int(computed + tokens == prompt_tokens + generated)]


@right("what_to_read")
def by_kinds_of_work(prompt_tokens, generated, computed, budget):
    total = prompt_tokens + generated
    if budget >= total - computed:
        return total - computed, True
    return budget, False


@right("what_to_read")
def with_numpy(prompt_tokens, generated, computed, budget):
    uncomputed = np.int64(prompt_tokens) + generated - computed
    return np.minimum(uncomputed, budget), uncomputed <= budget


@wrong("what_to_read", "whether the request gets a new token should be True, and is 8")
def place_of_the_new_token(prompt_tokens, generated, computed, budget):
    tokens, new = by_kinds_of_work(prompt_tokens, generated, computed, budget)
    return tokens, computed + tokens + 1 if new else False


@wrong("what_to_read", "should be 2 things: the number of tokens to compute and whether the request gets a new token")
def tokens_only(prompt_tokens, generated, computed, budget):
    return min(prompt_tokens + generated - computed, budget)


@wrong("what_to_read", "should be an int, and is the float")
def tokens_as_a_float(prompt_tokens, generated, computed, budget):
    tokens, new = by_kinds_of_work(prompt_tokens, generated, computed, budget)
    return float(tokens), new


@wrong("what_to_read", "gives a new token before all are computed")
def prompt_only_and_always_a_new_token(prompt_tokens, generated, computed, budget):
    return min(prompt_tokens - computed, budget), True


# --- longest_first ----------------------------------------------------------------------------------------------------


@right("longest_first")
def three_queues(waiting):
    longest = max((sequence.max_tokens for sequence in waiting), default=0)
    queues = [], [], []
    for sequence in waiting:
        if sequence.max_tokens >= 2 / 3 * longest:
            queues[0].append(sequence)
        elif sequence.max_tokens >= 1 / 3 * longest:
            queues[1].append(sequence)
        else:
            queues[2].append(sequence)
    return queues[0] + queues[1] + queues[2]


@wrong("longest_first", "calls the course's own `LongestFirst.order`")
def the_engine_s_own_queue(waiting):
    return list(LongestFirst().order(WaitingQueue(waiting), []))


@wrong("longest_first", "changes the order of arrival within a class: e is before a")
def equals_turned_around(waiting):
    alike = len({sequence.max_tokens for sequence in waiting}) == 1
    return waiting[::-1] if alike else three_queues(waiting)


@wrong("longest_first", "puts c before g, which is in a higher third of 100")
def borders_at_quarters(waiting):
    longest = max((sequence.max_tokens for sequence in waiting), default=0)
    return sorted(waiting, key=lambda one: -(4 * one.max_tokens > longest) - (4 * one.max_tokens > 3 * longest))


@wrong("longest_first", "changed its argument: `waiting`, place 0 is not what it was")
def sorted_in_place(waiting):
    waiting[:] = three_queues(waiting)
    return waiting


@wrong("longest_first", "changed its argument: a sequence in `waiting`")
def limits_replaced(waiting):
    right_order = three_queues(waiting)
    for sequence in waiting:
        sequence.max_tokens = 3 * sequence.max_tokens // 91
    return right_order


@wrong("longest_first", "request a is in the queue 0 times")
def short_ones_dropped(waiting):
    return [sequence for sequence in three_queues(waiting) if sequence.max_tokens > 15]


@wrong("longest_first", "request c is in the queue 2 times")
def classes_overlap(waiting):
    longest = max((sequence.max_tokens for sequence in waiting), default=0)
    long = [sequence for sequence in waiting if sequence.max_tokens > longest / 3]
    return long + [sequence for sequence in waiting if sequence.max_tokens < longest / 3 * 2]


@wrong("longest_first", "should be a sequence, and is a str")
def ids_of_the_queue(waiting):
    return [sequence.request_id for sequence in three_queues(waiting)]


@wrong("longest_first", "max() arg is an empty sequence (given: max_tokens in order of arrival: an empty queue)")
def never_empty(waiting):
    longest = max([sequence.max_tokens for sequence in waiting])
    return three_queues(waiting) if longest else []


@wrong("longest_first", "'Sequence' object is not subscriptable")
def as_a_dict(waiting):
    return sorted(waiting, key=lambda sequence: sequence["max_tokens"])


@wrong("longest_first", "'<' not supported between instances of 'Sequence' and 'Sequence'")
def compared_as_tuples(waiting):
    return [sequence for _, sequence in sorted((-one.max_tokens // 31, one) for one in waiting)]


@wrong("longest_first", "should be a list, and is None (is a `return` missing?)")
def sorts_and_returns_nothing(waiting):
    list(waiting).sort(key=lambda sequence: -sequence.max_tokens)


# --- most_urgent ------------------------------------------------------------------------------------------------------


@right("most_urgent")
def one_after_the_other(waiting, ageing):
    best = None
    for sequence in waiting:
        urgency = sequence.priority - int(sequence.waited / ageing), -sequence.waited
        if best is None or urgency < best[0]:
            best = urgency, sequence
    return best and best[1]


@right("most_urgent")
def sorted_twice(waiting, ageing):
    queue = sorted(waiting, key=lambda one: one.waited, reverse=True)
    queue.sort(key=lambda one: one.priority - one.waited // ageing)
    return queue[0] if queue else None


@wrong("most_urgent", "calls the course's own `Priority.order`")
def the_first_of_the_engine_s_queue(waiting, ageing):
    return next(iter(Priority(ageing).order(WaitingQueue(waiting), [])), None)


@wrong("most_urgent", "breaks ties by the place in the list, which is in no order")
def the_lesson_s_queue(waiting, ageing):
    return next(iter(sorted(waiting, key=lambda one: one.priority - one.waited // ageing)), None)


@wrong("most_urgent", "counts parts of a level")
def parts_of_a_level_and_ties_by_place(waiting, ageing):
    return min(waiting, key=lambda one: one.priority - one.waited / ageing, default=None)


@wrong("most_urgent", "takes a, which counts as 2, and b counts as 0")
def two_levels_only(waiting, ageing):
    return min(waiting, key=lambda one: (one.priority > 2, -one.priority), default=None)


@wrong("most_urgent", "and a counts as 0. Of equally urgent requests")
def ties_at_level_zero_by_place(waiting, ageing):
    best = one_after_the_other(waiting, ageing)
    level = best and best.priority - best.waited // ageing
    return next((one for one in waiting if level == 0 == one.priority - one.waited // ageing), best)


@wrong("most_urgent", "should be a sequence, and is a str")
def id_of_the_urgent_one(waiting, ageing):
    return (waiting and one_after_the_other(waiting, ageing).request_id) or None


@wrong("most_urgent", "should be a sequence, and is None")
def none_is_urgent(waiting, ageing):
    return next((sequence for sequence in waiting if sequence.priority < 0), None)


@wrong("most_urgent", "min() arg is an empty sequence (given: an empty queue)")
def a_queue_is_never_empty(waiting, ageing):
    return min([*waiting], key=lambda one: (one.priority - one.waited // ageing, -one.waited))


@wrong("most_urgent", "should be None, and is []")
def empty_list_for_none(waiting, ageing):
    return one_after_the_other(waiting, ageing) or []


@wrong("most_urgent", "changed its argument: `waiting` is not what it was")
def popped_from_the_queue(waiting, ageing):
    best = one_after_the_other(waiting, ageing)
    if waiting:
        waiting.remove(best)
    return best


@wrong("most_urgent", "changed its argument: a sequence in `waiting`")
def priorities_lowered(waiting, ageing):
    for sequence in waiting:
        sequence.priority -= sequence.waited // ageing
    return min(waiting, key=lambda one: (one.priority, -one.waited), default=None)


# --- plan_chunks ------------------------------------------------------------------------------------------------------


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


@right("plan_chunks")
def waiting_requests_listed_first(running, waiting, rows, tokens):
    return [(name, np.int64(count)) for name, count in in_three_loops(running, waiting, rows, tokens)[::-1]]


def planned(running, waiting, rows, tokens, order=lambda d, b, n: d + b + n, chunk=min, joining=None):
    """Plan an iteration, with parts to be broken."""
    decodes = [one for one in running if one.is_decode]
    begun = [one for one in running if not one.is_decode]
    plan = []
    for one in order(decodes, begun, waiting[: rows - len(running)] if joining is None else joining):
        count = chunk(one.num_uncomputed_tokens, tokens)
        if count > 0:
            plan.append((one.request_id, count))
            tokens -= count
    return plan


right("plan_chunks")(planned)


@wrong("plan_chunks", "calls the course's own `Scheduler.schedule`")
def the_engine_s_own_plan(running, waiting, rows, tokens):
    scheduler = Scheduler(EngineConfig(max_batch_size=rows, max_tokens_per_step=tokens))
    scheduler.running, scheduler.waiting = list(running), WaitingQueue(waiting)
    return [(chunk.sequence.request_id, chunk.tokens) for chunk in scheduler.schedule().chunks]


@wrong("plan_chunks", "exceeds the budget: at the turn of p, 8 tokens are left for it")
def one_token_too_many(running, waiting, rows, tokens):
    return planned(running, waiting, rows, tokens + 1)


@wrong("plan_chunks", "Decodes come first: each needs one token, and prompts take what is left")
def prompts_first(running, waiting, rows, tokens):
    return planned(running, waiting, rows, tokens, order=lambda d, b, n: b + n + d)


@wrong("plan_chunks", "leaves out d. Decodes come first")
def in_the_order_of_rows(running, waiting, rows, tokens):
    return planned(running, waiting, rows, tokens, order=lambda d, b, n: [*running, *n])


@wrong("plan_chunks", "exceeds the budget: at the turn of p")
def whole_prompt_at_once(running, waiting, rows, tokens):
    return planned(running, waiting, rows, tokens, chunk=lambda whole, left: whole if left > 0 else 0)


@wrong("plan_chunks", "lets a later request overtake v. If one that does not fit is skipped, a long prompt waits")
def waiting_requests_that_fit(running, waiting, rows, tokens):
    plan = planned(running, [], rows, tokens)
    left = tokens - sum(count for _, count in plan)
    for one in waiting[: rows - len(running)]:
        if one.num_uncomputed_tokens <= left:
            plan.append((one.request_id, one.num_uncomputed_tokens))
            left -= one.num_uncomputed_tokens
    return plan


@wrong("plan_chunks", "lets a later request overtake v")
def shortest_prompt_joins_first(running, waiting, rows, tokens):
    return planned(running, sorted(waiting, key=lambda one: one.num_uncomputed_tokens), rows, tokens)


@wrong("plan_chunks", "lets a later request overtake v")
def newest_first(running, waiting, rows, tokens):
    return planned(running, waiting[::-1], rows, tokens)


@wrong("plan_chunks", "lets a later request overtake v")
def shared_equally(running, waiting, rows, tokens):
    plan = planned(running, [], rows, tokens)
    left, joining = tokens - sum(count for _, count in plan), waiting[: rows - len(running)]
    shares = [(one.request_id, min(one.num_uncomputed_tokens, left // len(joining))) for one in joining]
    return plan + [(request_id, count) for request_id, count in shares if count]


@wrong("plan_chunks", "lets a later request overtake p. Its prompt was begun")
def begun_prompt_forgotten(running, waiting, rows, tokens):
    return planned(running, waiting, rows, tokens, order=lambda d, b, n: d + n)


@wrong("plan_chunks", "lets a later request overtake p. Its prompt was begun")
def newest_begun_first(running, waiting, rows, tokens):
    return planned(running, waiting, rows, tokens, order=lambda d, b, n: d + b[::-1] + n)


@wrong("plan_chunks", "leaves tokens of the budget unused, and q could compute 2")
def one_begun_prompt_per_iteration(running, waiting, rows, tokens):
    return planned(running, waiting, rows, tokens, order=lambda d, b, n: d + b[:1] + (n if len(b) < 2 else []))


@wrong("plan_chunks", "A running request holds a row, too, while its prompt is computed")
def more_than_the_rows(running, waiting, rows, tokens):
    return planned(running, waiting, rows, tokens, joining=waiting)


@wrong("plan_chunks", "A running request holds a row, too, while its prompt is computed")
def rows_of_decodes(running, waiting, rows, tokens):
    free = rows - sum(one.is_decode for one in running)
    return planned(running, waiting, rows, tokens, joining=waiting[:free])


@wrong("plan_chunks", "leaves tokens of the budget unused, and w could compute 6")
def one_at_a_time(running, waiting, rows, tokens):
    return planned(running, waiting[:1], rows, tokens)


@wrong("plan_chunks", "lets a later request overtake p. Its prompt was begun: it holds a row")
def chunks_of_four(running, waiting, rows, tokens):
    return planned(running, waiting, rows, tokens, chunk=lambda whole, left: min(whole, left, 4))


@wrong("plan_chunks", "plans 14 tokens for p, of which 12 are uncomputed")
def prompts_from_the_start(running, waiting, rows, tokens):
    plan = dict(planned(running, waiting, rows, tokens))
    return [(one.request_id, min(len(one.token_ids), 14)) for one in [*running, *waiting] if one.request_id in plan]


@wrong("plan_chunks", "a request that computes nothing takes no part")
def with_empty_chunks(running, waiting, rows, tokens):
    plan = dict(planned(running, waiting, rows, tokens))
    return [(one.request_id, plan.get(one.request_id, 0)) for one in [*running, *waiting[: rows - len(running)]]]


@wrong("plan_chunks", "plans for request d twice")
def decodes_twice(running, waiting, rows, tokens):
    return [(one.request_id, 1) for one in running if one.is_decode] + planned(running, waiting, rows, tokens)


@wrong("plan_chunks", "has a sequence where its request id should be")
def sequences_for_ids(running, waiting, rows, tokens):
    by_id = {one.request_id: one for one in running + waiting}
    return [(by_id[name], count) for name, count in planned(running, waiting, rows, tokens)]


@wrong("plan_chunks", "should be a list, and is a dict")
def plan_as_a_dict(running, waiting, rows, tokens):
    return dict(planned(running, waiting, rows, tokens))


@wrong("plan_chunks", "and is ['p', 'd', 'e']")
def ids_without_tokens(running, waiting, rows, tokens):
    return [name for name, _ in planned(running, waiting, rows, tokens)]


@wrong("plan_chunks", "changed its argument: a sequence in `running`, place 0")
def computes_while_it_plans(running, waiting, rows, tokens):
    plan = planned(running, waiting, rows, tokens)
    for one in running + waiting:
        one.computed += dict(plan).get(one.request_id, 0)
    return plan


@wrong("plan_chunks", "changed its argument: `waiting` is not what it was")
def queue_is_emptied(running, waiting, rows, tokens):
    plan = planned(running, waiting, rows, tokens)
    waiting[:] = [one for one in waiting if one.request_id not in dict(plan)]
    return plan


# --- worst_waits ------------------------------------------------------------------------------------------------------


@right("worst_waits")
def pooled_lists(arrivals, token_times):
    firsts = [token_times[id][0] - arrivals[id] for id in arrivals]
    gaps = [times[i] - times[i - 1] for times in token_times.values() for i in range(1, len(times))]
    return [max(firsts), max(gaps, default=0)]


@right("worst_waits")
def with_the_course_s_metrics(arrivals, token_times):
    each = [metrics.RequestMetrics(id, arrivals[id], times) for id, times in token_times.items()]
    return float(max(one.ttft for one in each)), float(max([0, *(gap for one in each for gap in one.itl)]))


@right("worst_waits")
def in_numpy_s_float32(arrivals, token_times):
    gaps = np.concatenate([np.diff(np.float32(times)) for times in token_times.values()])
    return np.float32(max(times[0] - arrivals[id] for id, times in token_times.items())), gaps.max(initial=0)


@wrong("worst_waits", "takes the mean of the times to a first token: it hides the request that waits")
def means_of_both(arrivals, token_times):
    firsts = [times[0] - arrivals[id] for id, times in token_times.items()]
    gaps = [later - time for times in token_times.values() for time, later in pairwise(times)] or [0]
    return sum(firsts) / len(firsts), sum(gaps) / len(gaps)


@wrong("worst_waits", "max() arg is an empty sequence")
def always_a_gap(arrivals, token_times):
    gaps = [later - time for times in token_times.values() for time, later in pairwise(times)]
    return pooled_lists(arrivals, token_times)[0], max(gaps)


@wrong("worst_waits", "the longest gap between two tokens should be 6, and is 12")
def gap_in_double(arrivals, token_times):
    ttft, gap = pooled_lists(arrivals, token_times)
    return ttft, 2 * gap


@wrong("worst_waits", "the longest gap between two tokens should be a number, and is None")
def no_gap_is_none(arrivals, token_times):
    ttft, gap = pooled_lists(arrivals, token_times)
    return ttft, gap or None


@wrong("worst_waits", "changed its argument: `token_times['a']`")
def arrivals_put_in_front(arrivals, token_times):
    result = pooled_lists(arrivals, token_times)
    for request_id, times in token_times.items():
        times.insert(0, arrivals[request_id])
    return result
