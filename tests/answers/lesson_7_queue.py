"""Lesson 7, a bounded queue: right answers in other styles, and wrong ones that break one promise each."""

import contextlib
import math
from collections import deque
from types import SimpleNamespace
from typing import ClassVar

import numpy as np

from answers import right, wrong


@right("BoundedQueue")
class OneLineOfAll:
    """The first of the line run; when a request leaves, all behind it move up."""

    def __init__(self, rows, max_queue, seconds):
        self.rows, self.places, self.pause = rows, rows + max_queue, max(1, math.ceil(seconds / rows))
        self.line = {}

    @property
    def running(self):
        return list(self.line)[: self.rows]

    @property
    def waiting(self):
        return tuple(self.line)[self.rows :]

    def offer(self, name):
        if len(self.line) == self.places:
            return np.int64(self.pause) if self.pause > 3 else self.pause
        self.line[name] = True
        return 0

    def leave(self, name):
        self.line.pop(name, None)


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


class Bounded:
    """A queue with parts to be broken."""

    def __init__(self, rows, max_queue, seconds):
        self.rows, self.max_queue, self.seconds = rows, max_queue, seconds
        self.running, self.waiting = [], []

    def offer(self, request_id):
        if not self.has_room():
            return self.retry_after()
        self.take_in(request_id)
        return 0

    def leave(self, request_id):
        if request_id in self.waiting:
            self.waiting.remove(request_id)
        elif request_id in self.running:
            self.running.remove(request_id)
            self.fill()

    def has_room(self):
        return len(self.running) < self.rows or len(self.waiting) < self.max_queue

    def retry_after(self):
        return math.ceil(self.seconds / self.rows)

    def take_in(self, request_id):
        (self.running if len(self.running) < self.rows else self.waiting).append(request_id)

    def fill(self):
        if self.waiting:
            self.running.append(self.waiting.pop(0))


def broken(message, **parts):
    """Note a queue in which one method is another."""
    wrong("BoundedQueue", message)(type("Broken" + "".join(parts).title(), (Bounded,), parts))


full = "although all are taken"
broken(full, has_room=lambda self: True)
broken(full, has_room=lambda self: len(self.waiting) <= self.max_queue)
broken("although there is a place in the queue", has_room=lambda self: len(self.running) < self.rows)
broken("although a row is free", has_room=lambda self: len(self.waiting) < self.max_queue)
whole_seconds = "the header `Retry-After` takes whole seconds, so return an int"
broken(whole_seconds, retry_after=lambda self: self.seconds / self.rows)
broken(whole_seconds, retry_after=lambda self: -1)
broken("returns 0, which means accepted", retry_after=lambda self: 0)
broken("returned None", retry_after=lambda self: None)
broken("returned a bool", retry_after=lambda self: True)
broken("leaves a row empty although", take_in=lambda self, name: self.waiting.append(name))
broken("has 4 running, and 3 rows", take_in=lambda self, name: self.running.append(name))
broken("would never be answered", take_in=lambda self, name: None)
broken("drops d to make room for c", take_in=lambda self, name: setattr(self, "running", [name]))
broken("leaves a row empty although b waits", fill=lambda self: None)
broken("than the one that has waited longest", fill=lambda self: self.running.append(self.waiting.pop()))
broken("has b twice", fill=lambda self: self.running.extend(self.waiting[:1]))
broken("loses b", fill=lambda self: self.waiting.pop(0))
broken("is not written yet", offer=lambda self, name: _not_written())
broken("the method `leave(request_id)`", leave=lambda self: None)


def _not_written():
    raise NotImplementedError


@wrong("BoundedQueue", "decides which is next")
class NewestFirst(Bounded):
    def take_in(self, request_id):
        if len(self.running) < self.rows:
            self.running.append(request_id)
        else:
            self.waiting.insert(0, request_id)


@wrong("BoundedQueue", "decides which is next")
class SortedByName(Bounded):
    def take_in(self, request_id):
        super().take_in(request_id)
        self.waiting.sort(key=str)


@wrong("BoundedQueue", "a request whose client disconnects while it waits leaves, too")
class OnlyRunningRequestsLeave(Bounded):
    def leave(self, request_id):
        if request_id in self.running:
            super().leave(request_id)


@wrong("BoundedQueue", "keeps the row of c, which has left")
class OnlyWaitingRequestsLeave(Bounded):
    def leave(self, request_id):
        if request_id in self.waiting:
            super().leave(request_id)


@wrong("BoundedQueue", "given: a refused request leaves")
class KeysAreThere(Bounded):
    def leave(self, request_id):
        places = dict.fromkeys(self.running + self.waiting)
        del places[request_id]
        super().leave(request_id)


@wrong("BoundedQueue", full)
class RefusedFreesAPlace(Bounded):
    """Counts free places; a refused request that leaves frees one that it never had."""

    def __init__(self, rows, max_queue, seconds):
        super().__init__(rows, max_queue, seconds)
        self.free = rows + max_queue

    def has_room(self):
        return self.free > 0

    def take_in(self, request_id):
        self.free -= 1
        super().take_in(request_id)

    def leave(self, request_id):
        self.free += 1
        super().leave(request_id)


@wrong("BoundedQueue", "although there is a place in the queue")
class OnceRefusedAlwaysRefused(Bounded):
    def offer(self, request_id):
        self.refused = getattr(self, "refused", set())
        answer = self.retry_after() if request_id in self.refused else super().offer(request_id)
        if answer:
            self.refused.add(request_id)
        return answer


@wrong("BoundedQueue", "refuses e and keeps it")
class RefusedButKept(Bounded):
    def offer(self, request_id):
        answer = super().offer(request_id)
        if answer:
            self.waiting.append(request_id)
        return answer


@wrong("BoundedQueue", "drops a to make room for e: a request that was accepted keeps its place")
class OldestMakesRoom(Bounded):
    def offer(self, request_id):
        if not self.has_room() and self.waiting:
            self.waiting.pop(0)
        return super().offer(request_id)


@wrong("BoundedQueue", "keeps the place of 0, which has left")
class AnIdOf0IsNone(Bounded):
    def leave(self, request_id):
        if request_id:
            super().leave(request_id)


@wrong("BoundedQueue", "Are these another queue's lists?")
class ListsOfTheClass(Bounded):
    running: ClassVar = []
    waiting: ClassVar = []

    def __init__(self, rows, max_queue, seconds):
        self.rows, self.max_queue, self.seconds = rows, max_queue, seconds


@wrong("BoundedQueue", "should make an object with the method `offer(request_id)`, and made a Half")
class Half:
    def __init__(self, rows, max_queue, seconds):
        self.running, self.waiting = [], []


@wrong("BoundedQueue", "in `self.running`, a list, and it has `self.active`, `self.queue`")
class OtherNames:
    def __init__(self, rows, max_queue, seconds):
        self.active, self.queue = [], []

    def offer(self, request_id):
        return 0

    def leave(self, request_id):
        pass


@wrong("BoundedQueue", "in `self.running`, a list, and that is an int")
class NumbersOnly(Bounded):
    def __init__(self, rows, max_queue, seconds):
        super().__init__(rows, max_queue, seconds)
        self.running = self.waiting = 0


@wrong("BoundedQueue", "is called as BoundedQueue(rows, max_queue, seconds)")
class TwoSettings(Bounded):
    def __init__(self, rows, max_queue):
        super().__init__(rows, max_queue, 1)
