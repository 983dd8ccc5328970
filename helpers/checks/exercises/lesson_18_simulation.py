"""Lesson 18, the simulation: an event loop that keeps time, and the count that a cost model lacks."""

import numpy as np

from ..edits import add_edits
from ..exercise import Exercise

finish_times = Exercise(
    "finish_times(requests, rows, constant, per_row)",
    "only an iteration and an idle engine move the clock, and it never runs back",
)
finish_times.table([
    ([(0.0, 2), (0.5, 1), (10.0, 1)], 2, 1.0, 0.5), ([(0.0, 1), (0.25, 1), (0.5, 1)], 2, 2.0, 0.25),
    ([(3.0, 1)], 4, 0.5, 0.25), ([(0.0, 2), (1.5, 1), (3.0, 2)], 2, 1.0, 0.5),
    ([(0.0, 4), (0.125, 1), (0.25, 1), (0.375, 2)], 2, 1.0, 0.25), ([(0.0, 1), (0.0, 3), (0.0, 2)], 8, 1.0, 1.0),
    # A queue for few rows, with outputs of unequal length.
    ([(0.0, 5), (0.0, 2), (0.0, 6), (0.0, 1), (0.0, 3), (0.0, 1)], 2, 1.0, 0.5),
    ([(0.0, 3), (0.5, 7), (0.5, 1), (1.0, 4), (1.0, 1), (20.0, 2), (20.0, 1), (21.0, 1)], 2, 0.5, 0.25),
    ([(0.0, 9), (1.0, 1), (1.0, 5), (2.0, 1), (2.0, 1)], 1, 1.0, 0.0),
    ([(0.0, 1), (1.5, 1), (2.0, 1), (7.0, 1)], 1, 1.0, 0.5),  # arrivals exactly when an iteration ends
    ([], 2, 1.0, 0.5),
], lambda random: [  # in eighths: no rounding decides which arrival is due
    ([(time / 8, random.randint(1, 4)) for time in sorted(random.choices(range(97), k=8))], 3, 0.75, 0.125)
], given="(arrival, tokens) {}, {} rows, an iteration takes {} + {} per row")  # fmt: skip


@finish_times.reference
def on_a_virtual_clock(requests, rows, constant, per_row):
    now, running, times, to_come = 0.0, {}, [0.0] * len(requests), list(range(len(requests)))
    while to_come or running:
        if not running:
            arrival = requests[to_come[0]][0]
            now = max(now, arrival)
        while to_come and len(running) < rows:
            arrival, tokens = requests[to_come[0]]
            if running and arrival > now:
                break
            running[to_come.pop(0)] = tokens
        now += constant + per_row * len(running)
        for number in list(running):
            running[number] -= 1
            if running[number] <= 0:
                del running[number]
                times[number] = now
    return times


add_edits(finish_times, {
    "sets the clock back: after an iteration, a request that arrived meanwhile starts now, and not at its arrival.":
        "max(now, arrival) -> arrival",
    "serves a request before it has arrived: an idle engine moves its clock to the next arrival.":
        "max(now, arrival) -> now",
    "runs empty iterations while the engine is idle. The clock moves straight to the next arrival, and the request "
    "starts there.": "max(now, arrival) -> now + constant * max(0, math.ceil((arrival - now) / constant))",
    "lets a request join an iteration that has begun: it waits for the next one.":
        "arrival > now -> arrival > now + constant + per_row * len(running)",
    "lets a request wait that arrives exactly when an iteration begins: it can join that iteration.":
        "arrival > now -> arrival >= now",
    "lets requests join only when the engine is idle: a free row can be taken before every iteration.":
        ("if not running: -> idle = not running\n        if idle:", "< rows -> < rows and idle"),
    "runs more requests than there are rows.": "len(running) < rows -> True",
    "ignores how many rows run: each makes the iteration longer.": "constant + per_row * len(running) -> constant",
    "pays for all rows: only those that run make the iteration longer.": "per_row * len(running) -> per_row * rows",
    "computes an iteration's time before requests join: they are computed in it, too.":
        ("if not running: -> before = len(running)\n        if not running:", "* len(running) -> * before"),
    "pays the constant for every row: all rows of an iteration share it.":
        "constant + per_row * len(running) -> (constant + per_row) * len(running)",
    "gives no token in the first iteration of a request: a prefill yields the first token.": "= tokens -> = tokens + 1",
    "ends a request one iteration too early.": "= tokens -> = tokens - 1",
    "returns when the last iteration of a request begins: its token is available at the end.":
        ("now += -> begin, now = now, now +", "times[number] = now -> times[number] = begin"),
})  # fmt: skip

missing_count = Exercise(
    "missing_count(counts, times)",
    "what a cost model cannot explain has a pattern, and a count with that pattern explains it",
    names=("the count", "its coefficient"),
)


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


def least_squares(columns, times):
    """Return the coefficients of columns, and the errors that they leave."""
    columns, times = np.array(columns, dtype=float).T, np.array(times, dtype=float)
    coefficients, *_ = np.linalg.lstsq(columns, times, rcond=None)
    return coefficients, columns @ coefficients - times


@missing_count.reference
def by_what_is_left(counts, times):
    ones, fits = np.ones(len(times)), {}
    for name in [name for name in counts if name != "tokens"]:
        coefficients, errors = least_squares([ones, counts["tokens"], counts[name]], times)
        fits[name] = (errors**2).sum(), float(coefficients[-1])
    name = min(fits, key=fits.get)
    return name, fits[name][1]


add_edits(missing_count, {
    "leaves out the constant: an iteration takes time even if it computes hardly anything.":
        '[ones, counts["tokens"], -> [counts["tokens"],',
    "leaves out the tokens: the third count has to explain what the first two do not.": ', counts["tokens"], -> ,',
    "chooses the count that resembles the times. It may do so only because it grows with the tokens: compare what each "
    "fit leaves unexplained.": "(errors**2).sum() -> -abs(np.corrcoef(counts[name], times)[0, 1])",
    "chooses the largest coefficient. Coefficients have different units: seconds per key cannot be compared with "
    "seconds per row.": "(errors**2).sum() -> -coefficients[-1]",
    "fits the count to what the first two leave over. Fit all three together: with the third one, the coefficients of "
    "the first two change, too.": (
        "{}\n -> {}\n    times = -least_squares([ones, counts['tokens']], times)[1]\n",
        '[ones, counts["tokens"], counts[name]] -> [counts[name]]'),
    "minimizes relative errors, as the lesson does: here, the errors of the times themselves are squared.": (
        "= least_squares( -> = least_squares(np.divide(", "counts[name]], times) -> counts[name]], times), ones)"),
    "takes the coefficient from a fit of all counts at once: fit each count in turn, with the constant and the tokens "
    "only.": "fits[name][1] -> float(least_squares([ones, *counts.values()], times)[0][1 + [*counts].index(name)])",
})  # fmt: skip
