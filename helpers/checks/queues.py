"""Offer requests to a student's queue, let them leave, and report the first promise that the queue breaks."""

import inspect
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from numbers import Integral, Real

from .comparing import kind


@dataclass(frozen=True)  # a tuple would come back from the sandbox without its names
class Step:
    """What a queue did when a request was offered or left."""

    event: str  # "offer" or "leave"; "" for a new queue
    request_id: Hashable
    running: list  # the ids of the running requests, sorted, because their order makes no difference
    waiting: list  # the ids of the waiting requests, in the queue's order
    returned: object = 0  # by `offer`


def run_story(make: Callable, rows: int, max_queue: int, seconds: float, story: list[tuple[str, Hashable]]) -> dict:
    """Return a queue's steps, the seconds that it told refused requests, and what makes it unusable, if anything."""
    queue = make(rows, max_queue, seconds)
    for method in ("offer", "leave"):
        try:
            inspect.signature(getattr(queue, method)).bind(0)
        except (AttributeError, TypeError):
            return {"problem": f"should make an object with the method `{method}(request_id)`, but made {kind(queue)}"}
    steps = []
    for event, request_id in [("", None), *story]:
        returned = getattr(queue, event)(request_id) if event else 0
        if problem := _missing_attribute(queue):
            return {"problem": problem}
        running, waiting = sorted(queue.running, key=str), list(queue.waiting)
        steps.append(Step(event, request_id, running, waiting, returned if event == "offer" else 0))
    retry_after = [step.returned for step in steps if step.returned != 0]
    return {"problem": None, "Retry-After": retry_after, "steps": steps}


def _missing_attribute(queue) -> str | None:
    for name in ("running", "waiting"):
        value = getattr(queue, name, None)
        if not isinstance(value, list | deque | dict | set | tuple):
            return f"should keep the ids of the {name} requests in `self.{name}`, a list, but that is {kind(value)}"
    return None


def first_mistake(steps: list[Step], right: list[Step], rows: int) -> str | None:
    """Return the first promise that is broken, in words."""
    if steps[0].running or steps[0].waiting:
        return (
            f"has {steps[0].running} running and {steps[0].waiting} waiting when it is new. Does it share its lists "
            "with another queue? `__init__` must make new ones"
        )
    for step, before, wanted in zip(steps[1:], right, right[1:], strict=False):
        if message := _wrong_places(step, before, rows) or _wrong_offer(step, wanted) or _wrong_order(step, wanted):
            happened = "is offered" if step.event == "offer" else "leaves"
            return f"{message}. Running {before.running}, waiting {before.waiting}, then {step.request_id} {happened}"
    return None


def _wrong_places(step: Step, before: Step, rows: int) -> str | None:
    name, ids, ids_before = step.request_id, step.running + step.waiting, before.running + before.waiting
    if step.event == "leave" and name in step.running:
        return f"keeps the row of {name}, which has left: the row would stay busy forever"
    if step.event == "leave" and name in step.waiting:
        why = "a request whose client disconnects while it waits leaves, too"
        return f"keeps the place of {name}, which has left: {why}"
    if lost := [request_id for request_id in ids_before if request_id != name and request_id not in ids]:
        how = f"drops {lost[0]} to make room for {name}" if name in ids else f"loses {lost[0]}"
        return f"{how}: a request that was accepted keeps its place until it leaves"
    return f"runs {len(step.running)} requests in {rows} rows" if len(step.running) > rows else None


def _wrong_offer(step: Step, wanted: Step) -> str | None:
    name, told, inside = step.request_id, step.returned, step.request_id in step.running + step.waiting
    if step.event == "leave":
        return None
    if isinstance(told, bool) or not isinstance(told, Real):
        return f"`offer` should return seconds, 0 for an accepted request, but returned {kind(told)}"
    if wanted.returned == 0 and told != 0:
        room = "a row is free" if name in wanted.running else "there is a place in the queue"
        return f"refuses {name}, because `offer` returns {told}, although {room}"
    if wanted.returned == 0:
        return None if inside else f"returns 0, which accepts {name}, but has it neither running nor waiting"
    if inside:
        return f"refuses {name}, but keeps it" if told else f"accepts {name} although all places are taken"
    if told == 0:
        return f"returns 0, which means accepted, but does not take {name} in. Less than a second is rounded up"
    if told < 0 or not isinstance(told, Integral):
        return f"returns {told!r}: the header `Retry-After` takes whole seconds, so return an int"
    return None


def _wrong_order(step: Step, wanted: Step) -> str | None:
    if len(step.running) < len(wanted.running):
        return f"leaves a row empty although {step.waiting[0]} waits: a waiting request gets a free row at once"
    if step.running != wanted.running:
        return "gives the row to another request than the one that has waited longest"
    if step.waiting != wanted.waiting:
        return f"has {step.waiting} waiting: requests wait in their order of arrival, {wanted.waiting}"
    return None
