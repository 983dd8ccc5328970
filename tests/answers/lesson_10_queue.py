"""Lesson 10, a bounded queue: right answers in other styles, and wrong ones that break one promise each."""

import contextlib
import math
from collections import deque
from types import SimpleNamespace

from answers import WRONG, right, solutions

Bounded = solutions.BoundedQueue


@right("BoundedQueue")
def with_a_set_and_a_deque(rows, max_queue, seconds):
    queue = SimpleNamespace(running=set(), waiting=deque())

    def offer(name):
        if len(queue.running) < rows:
            queue.running.add(name)
            return 0
        if len(queue.waiting) < max_queue:
            queue.waiting.append(name)
            return 0
        return int(-(-seconds // rows))

    def leave(name):
        if name in queue.running:
            queue.running.discard(name)
            if queue.waiting:
                queue.running.add(queue.waiting.popleft())
        with contextlib.suppress(ValueError):
            queue.waiting.remove(name)

    queue.offer, queue.leave = offer, leave
    return queue


class Parts(Bounded):
    """A queue with parts to be broken."""

    def offer(self, name):
        if not self.has_room():
            return self.pause()
        self.take_in(name)
        return 0

    def leave(self, name):
        if name in self.waiting:
            self.waiting.remove(name)
        elif name in self.running:
            self.running.remove(name)
            self.fill()

    def has_room(self):
        return len(self.running) < self.rows or len(self.waiting) < self.max_queue

    def pause(self):
        return math.ceil(self.seconds / self.rows)

    def take_in(self, name):
        (self.running if len(self.running) < self.rows else self.waiting).append(name)

    def fill(self):
        self.running += self.waiting[:1]
        del self.waiting[:1]


def broken(**parts):
    return type("Broken", (Parts,), parts)


class OnceRefusedAlwaysRefused(Bounded):
    def offer(self, request_id):
        self.refused = getattr(self, "refused", {})
        if request_id not in self.refused and (seconds := super().offer(request_id)):
            self.refused[request_id] = seconds
        return self.refused.get(request_id, 0)


class RefusedFreesAPlace(Bounded):
    """A refused request that leaves makes room that it never took."""

    def leave(self, request_id):
        self.max_queue += request_id not in self.running + self.waiting
        super().leave(request_id)


class ListsOfTheClass(Bounded):
    lists = [], []

    def __init__(self, rows, max_queue, seconds):
        super().__init__(rows, max_queue, seconds)
        self.running, self.waiting = self.lists


def with_attributes(**attributes):
    return lambda rows, max_queue, seconds: SimpleNamespace(offer=lambda name: 0, leave=lambda name: 0, **attributes)


WRONG["BoundedQueue"] |= {
    "accepts 0 although all places are taken": RefusedFreesAPlace,
    "accepts e although all places are taken": broken(has_room=lambda self: len(self.waiting) <= self.max_queue),
    "although a row is free": broken(has_room=lambda self: len(self.waiting) < self.max_queue),
    "refuses a, because `offer` returns 4, although": broken(has_room=lambda self: len(self.running) < self.rows),
    "refuses 0, because `offer` returns 1, although": OnceRefusedAlwaysRefused,
    "refuses e, but keeps it": broken(
        offer=lambda self, n: (s := Parts.offer(self, n)) and (self.waiting.append(n) or s)
    ),
    "drops a to make": broken(has_room=lambda self: Parts.has_room(self) or (self.waiting and self.waiting.pop(0))),
    "returns 3.3333333333333335: the header": broken(pause=lambda self: self.seconds / self.rows),
    "returns 0, which means accepted": broken(pause=lambda self: 0),
    "returned None": broken(pause=lambda self: None),
    "returned a bool": broken(pause=lambda self: True),
    "leaves a row empty although d": broken(take_in=lambda self, name: self.waiting.append(name)),
    "runs 4 requests in 3 rows": broken(take_in=lambda self, name: self.running.append(name)),
    "has it neither running nor waiting": broken(take_in=lambda self, name: None),
    "gives the row to another request": broken(take_in=lambda self, name: self.running.extend([name, "x"])),
    "order of arrival": broken(take_in=lambda self, n: Parts.take_in(self, n) or self.waiting.sort(key=str)),
    "leaves a row empty although b": broken(fill=lambda self: None),
    "that has waited longest": broken(fill=lambda self: self.waiting and self.running.append(self.waiting.pop())),
    "loses b": broken(fill=lambda self: self.waiting and self.waiting.pop(0)),
    "keeps the row of c": broken(leave=lambda self, name: name in self.waiting and Parts.leave(self, name)),
    "a request whose client disconnects": broken(leave=lambda self, n: n in self.running and Parts.leave(self, n)),
    "keeps the place of 0": broken(leave=lambda self, name: name and Parts.leave(self, name)),
    "lists with another queue?": ListsOfTheClass,
    "with the method `leave(request_id)`": broken(leave=lambda self: None),
    "with the method `offer(request_id)`": lambda rows, max_queue, seconds: SimpleNamespace(),
    "in `self.running`, a list, but that is None": with_attributes(active=[], queue=[]),
}
