"""Lesson 18, the simulation: an event loop that keeps time, and the count that a cost model lacks."""

import math

import numpy as np

from ..exercise import Exercise

finish_times = Exercise(
    "finish_times(requests, rows, constant, per_row)",
    "only an iteration and an idle engine move the clock, and it never runs back",
)


def _drawn_requests(random):
    # Exact: no rounding decides which arrival is due.
    return [(arrival / 8, random.randint(1, 4)) for arrival in sorted(random.choices(range(97), k=8))]


finish_times.table(
    [
        ([(0.0, 2), (0.5, 1), (10.0, 1)], 2, 1.0, 0.5), ([(0.0, 1), (0.25, 1), (0.5, 1)], 2, 2.0, 0.25),
        ([(3.0, 1)], 4, 0.5, 0.25), ([(0.0, 2), (1.5, 1), (3.0, 2)], 2, 1.0, 0.5),
        ([(0.0, 4), (0.125, 1), (0.25, 1), (0.375, 2)], 2, 1.0, 0.25), ([(0.0, 1), (0.0, 3), (0.0, 2)], 8, 1.0, 1.0),
        # A queue for few rows, with outputs of unequal length.
        ([(0.0, 5), (0.0, 2), (0.0, 6), (0.0, 1), (0.0, 3), (0.0, 1)], 2, 1.0, 0.5),
        ([(0.0, 3), (0.5, 7), (0.5, 1), (1.0, 4), (1.0, 1), (20.0, 2), (20.0, 1), (21.0, 1)], 2, 0.5, 0.25),
        ([(0.0, 9), (1.0, 1), (1.0, 5), (2.0, 1), (2.0, 1)], 1, 1.0, 0.0),
        ([(0.0, 1), (1.5, 1), (2.0, 1), (7.0, 1)], 1, 1.0, 0.5),  # arrivals exactly when an iteration ends
        ([], 2, 1.0, 0.5),
    ],
    lambda random: [(_drawn_requests(random), 3, 0.75, 0.125)],
    given="(arrival, tokens) {}, {} rows, an iteration takes {} + {} per row",
)  # fmt: skip


@finish_times.reference
def on_a_virtual_clock(
    requests,
    rows,
    constant,
    per_row,
    idle=lambda now, arrival, constant: max(now, arrival),
    is_due=lambda arrival, now, end: arrival <= now,
    may_join=lambda running, rows, was_idle: running < rows,
    takes=lambda constant, per_row, running, joined, rows: constant + per_row * running,
    tokens_of=lambda tokens: tokens,
    result=lambda start, end, arrival: end,
):
    """Play requests, with replaceable parts: idle time, which requests join, and what an iteration takes."""
    now, running, times = 0.0, {}, [0.0] * len(requests)
    to_come = list(range(len(requests)))
    while to_come or running:
        was_idle, joined = not running, 0
        if was_idle:
            now = idle(now, requests[to_come[0]][0], constant)
        while to_come and may_join(len(running), rows, was_idle):
            arrival, tokens = requests[to_come[0]]
            if running and not is_due(arrival, now, now + constant + per_row * len(running)):
                break
            running[to_come.pop(0)] = tokens_of(tokens)
            joined += 1
        start, now = now, now + takes(constant, per_row, len(running), joined, rows)
        for number in list(running):
            running[number] -= 1
            if running[number] <= 0:
                times[number] = result(start, now, requests[number][0])
                del running[number]
    return times


finish_times.add_misconceptions({
    "sets the clock back: after an iteration, a request that arrived meanwhile starts now, and not at its arrival.":
        {"idle": lambda now, arrival, constant: arrival},
    "serves a request before it has arrived: an idle engine moves its clock to the next arrival.":
        {"idle": lambda now, arrival, constant: now},
    "runs empty iterations while the engine is idle. The clock moves straight to the next arrival, and the request "
    "starts there.":
        {"idle": lambda now, arrival, constant: now + constant * max(0, math.ceil((arrival - now) / constant))},
    "lets a request join an iteration that has begun: it waits for the next one.":
        {"is_due": lambda arrival, now, end: arrival <= end},
    "lets a request wait that arrives exactly when an iteration begins: it can join that iteration.":
        {"is_due": lambda arrival, now, end: arrival < now},
    "lets requests join only when the engine is idle: a free row can be taken before every iteration.":
        {"may_join": lambda running, rows, was_idle: running < rows and was_idle},
    "runs more requests than there are rows.": {"may_join": lambda running, rows, was_idle: True},
    "leaves a row empty: as many requests can run as there are rows.":
        {"may_join": lambda running, rows, was_idle: running < max(1, rows - 1)},
    "ignores how many rows run: each makes the iteration longer.": {"takes": lambda c, p, running, joined, rows: c},
    "pays for all rows: only those that run make the iteration longer.":
        {"takes": lambda c, p, running, joined, rows: c + p * rows},
    "computes an iteration's time before requests join: they are computed in it, too.":
        {"takes": lambda c, p, running, joined, rows: c + p * (running - joined)},
    "pays the constant for every row: all rows of an iteration share it.":
        {"takes": lambda c, p, running, joined, rows: (c + p) * running},
    "gives no token in the first iteration of a request: a prefill yields the first token.":
        {"tokens_of": lambda tokens: tokens + 1},
    "ends a request one iteration too early.": {"tokens_of": lambda tokens: tokens - 1},
    "returns when the last iteration of a request begins: its token is available at the end.":
        {"result": lambda start, end, arrival: start},
    "returns latencies: the task asks for the time on the clock.":
        {"result": lambda start, end, arrival: end - arrival},
})  # fmt: skip


@finish_times.misconception("returns the times in the order in which requests end: it should be that of the requests.")
def in_order_of_their_end(*case):
    return sorted(on_a_virtual_clock(*case))


missing_count = Exercise(
    "missing_count(counts, times)",
    "what a cost model cannot explain has a pattern, and a count with that pattern explains it",
    names=("the count", "its coefficient"),
)


@missing_count.cases
def _(random):
    yield (
        ({"tokens": [1, 2, 3, 4, 5], "rows": [1, 1, 2, 2, 1], "keys": [5, 10, 5, 10, 20]}, [2.0, 3.0, 3.0, 4.0, 5.5]),
        "the counts of five iterations, and times that grow with the keys",
    )
    for missing, coefficient, noise in [
        ("keys", 0.004, 0.05), ("rows", 0.3, 0.05), ("pairs", 0.0005, 0.1), ("keys", 0.0006, 0.02),
        ("rows", 0.03, 0.02),
    ]:  # fmt: skip
        counts = _drawn_counts(random)
        times = [
            round(4 + 0.05 * tokens + coefficient * more + random.gauss(0, noise), 3)
            for tokens, more in zip(counts["tokens"], counts[missing], strict=True)
        ]
        yield (counts, times), f"the counts of {len(times)} iterations, and their times"


def _drawn_counts(random):
    """Return the counts of iterations with a few rows that decode, and sometimes a prefill; the counts are related."""
    counts = {"tokens": [], "rows": [], "keys": [], "pairs": []}
    for _ in range(40):
        decodes = random.randint(1, 16)
        prompt = random.choice([0, 0, random.randint(10, 120)])
        counts["rows"].append(decodes + (prompt > 0))
        counts["tokens"].append(decodes + prompt)
        counts["keys"].append(sum(random.randint(20, 400) for _ in range(decodes)) + prompt)
        counts["pairs"].append(prompt * (prompt + 1) // 2)
    return counts


def least_squares(columns, times):
    """Return the coefficients of columns, and the errors that they leave."""
    columns = np.array(columns, dtype=float).T
    coefficients, *_ = np.linalg.lstsq(columns, np.array(times, dtype=float), rcond=None)
    return coefficients, columns @ coefficients - np.array(times, dtype=float)


@missing_count.reference
def by_what_is_left(
    counts,
    times,
    base=lambda counts, times: [[1.0] * len(times), counts["tokens"]],
    score=lambda coefficients, errors, column, times: (errors**2).sum(),
    coefficient=lambda coefficients: coefficients[-1],
    names=lambda counts: [name for name in counts if name != "tokens"],
):
    """Try each count, with replaceable parts: the columns beside it, what is compared, what is returned."""
    best = None
    for name in names(counts):
        coefficients, errors = least_squares([*base(counts, times), counts[name]], times)
        found = score(coefficients, errors, counts[name], times), name, coefficient(coefficients)
        if best is None or found[0] < best[0] - 1e-12:
            best = found
    return best[1], float(best[2])


def _correlation(one, other):
    return abs(np.corrcoef(one, other)[0, 1])


missing_count.add_misconceptions({
    "leaves out the constant: an iteration takes time even if it computes hardly anything.":
        {"base": lambda counts, times: [counts["tokens"]]},
    "leaves out the tokens: the third count has to explain what the first two do not.":
        {"base": lambda counts, times: [[1.0] * len(times)]},
    "fits each count alone.": {"base": lambda counts, times: []},
    "chooses the count that resembles the times. It may do so only because it grows with the tokens: compare what each "
    "fit leaves unexplained.": {"score": lambda coefficients, errors, column, times: -_correlation(column, times)},
    "chooses the largest coefficient. Coefficients have different units: seconds per key cannot be compared with "
    "seconds per row.": {"score": lambda coefficients, errors, column, times: -coefficients[-1]},
    "chooses the fit that leaves most: the smallest sum of squares explains most.":
        {"score": lambda coefficients, errors, column, times: -(errors**2).sum()},
    "returns the coefficient of the tokens: it should be that of the missing count.":
        {"coefficient": lambda coefficients: coefficients[1]},
    "returns the constant: it should be the coefficient of the missing count.":
        {"coefficient": lambda coefficients: coefficients[0]},
})  # fmt: skip


@missing_count.misconception(
    "fits the count to what the first two leave over. Fit all three together: with the third one, the coefficients of "
    "the first two change, too."
)
def to_the_errors_of_two(counts, times):
    _, errors = least_squares([[1.0] * len(times), counts["tokens"]], times)
    return by_what_is_left(counts, -errors, base=lambda counts, times: [])


@missing_count.misconception(
    "minimizes relative errors, as the lesson does: here, the errors of the times themselves are squared."
)
def to_relative_errors(counts, times):
    def relative(column):
        return [value / time for value, time in zip(column, times, strict=True)]

    ones = [1.0] * len(times)
    divided = {name: relative(column) for name, column in counts.items()}
    return by_what_is_left(divided, ones, base=lambda counts, times: [relative(ones), counts["tokens"]])


@missing_count.misconception(
    "takes the coefficient from a fit of all counts at once: fit each count in turn, with the constant and the tokens "
    "only."
)
def with_all_counts(counts, times):
    name, _ = by_what_is_left(counts, times)
    coefficients, _ = least_squares([[1.0] * len(times), *counts.values()], times)
    return name, float(coefficients[1 + list(counts).index(name)])
