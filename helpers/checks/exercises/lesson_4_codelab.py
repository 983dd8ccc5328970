"""The codelab: one schedule, judged three times, by the three rules in the task's text. Any schedule may be right.

A grade runs a race with other numbers. The other workloads stay the same: with other draws, luck would decide whether
a schedule stays within their small margin.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from random import Random

from ... import workloads
from ..exercise import JudgedExercise
from ..scheduling import SIGNATURE, ServerRequest, baseline, decide, first_come, measure, run_schedule, workload

MOST_LEFT_FREE = 0.1  # of the slot-steps, so that a row may wait briefly for a second request
MOST_OF_FIRST_COME = 0.91  # of its forward passes in the race: other orders than the longest first save a few, too
MOST_ABOVE_FIRST_COME = 1.05


def run_race(schedule: Callable, seed: int) -> dict:
    """Return what a race costs. Every race has four long requests, which leave enough rows for the short ones."""
    (requests, arrivals), name = workload("race"), "the race"
    if seed:
        draw = Random(seed)
        long, short, every = draw.randint(90, 100), draw.randint(8, 10), draw.choice((9, 10))
        requests = workloads.race(every=every, long=long, short=short)
        name = f"a race with max_tokens {long} for every {every}th request and {short} for the others"
    trace = run_schedule(schedule, requests, arrivals)
    return measure(trace, arrivals) | {"name": name}


def gives_rows_away(schedule: Callable, seed: int) -> str | None:
    """Judge decisions on a few small queues, then the rows that stay free in the race while requests wait."""
    requests = [ServerRequest(number, 7, 10 + 90 * (number == 2), number) for number in range(8)]
    busy = [replace(request, generated=3) for request in requests[5:]]
    for question in [(requests[:5], busy, 2), (requests[:5], busy, 0), ([], busy, 5), (requests[:2], [], 8)]:
        decide(schedule, *question)
    race = run_race(schedule, seed)
    if race["left_free"] <= MOST_LEFT_FREE:
        return None
    return (
        f"leaves rows free while requests wait: {race['left_free']:.1%} of the slot-steps of {race['name']}, where "
        f"at most {MOST_LEFT_FREE:.0%} are allowed. A free row can be given to a waiting request before the next "
        "pass."
    )


first_come_race = lru_cache(4)(partial(run_race, first_come))


def beats_first_come(schedule: Callable, seed: int) -> str | None:
    mine, theirs = run_race(schedule, seed), first_come_race(seed)
    most = int(MOST_OF_FIRST_COME * theirs["forward_passes"])
    if mine["forward_passes"] <= most:
        return None
    why = "Look at the end of its timeline: which requests still run there, next to empty rows"
    if mine["left_free"] > MOST_LEFT_FREE:
        why = f"It leaves {mine['left_free']:.0%} of the slot-steps free while requests wait: how many join at once"
    return (
        f"takes {mine['forward_passes']} forward passes for {mine['name']}, and at most {most} are allowed; first "
        f"come, first served takes {theirs['forward_passes']}. {why}?"
    )


def spares_the_others(schedule: Callable, seed: int) -> str | None:
    for name in ("mixed", "arriving"):
        requests, arrivals = workload(name)
        traces = run_schedule(schedule, requests, arrivals), baseline("first come, first served", name)
        mine, theirs = (measure(trace, arrivals) for trace in traces)
        for figure, what in [("forward_passes", "forward passes"), ("p95_latency", "forward passes of p95 latency")]:
            if mine[figure] > MOST_ABOVE_FIRST_COME * theirs[figure]:
                return (
                    f"costs {mine[figure]:.1f} {what} on the workload {name!r}; first come, first served costs "
                    f"{theirs[figure]:.1f}, and at most {MOST_ABOVE_FIRST_COME - 1:.0%} more is allowed."
                )
    return None


schedule, schedule_race, schedule_others = (
    JudgedExercise(SIGNATURE, idea, judge, name)
    for name, judge, idea in [
        ("schedule", gives_rows_away, "only waiting requests join, and few rows are left free while requests wait"),
        ("schedule_race", beats_first_come, "the race takes 9% fewer forward passes than first come, first served"),
        ("schedule_others", spares_the_others, "the shorter race does not slow down the other workloads"),
    ]
)
