"""Lesson 10, overload: a bounded queue."""

from math import ceil

from ..exercise import Exercise
from ..queues import first_mistake, run_story

BoundedQueue = Exercise(
    "BoundedQueue(rows, max_queue, seconds)",
    "the queue holds no more requests than can be served in time, and a request leaves once, for whatever reason",
    observe=run_story,
)


@BoundedQueue.cases
def _(random):
    """Yield stories, in which a minus precedes a request that leaves. Ids are in no order, and one of them is 0."""
    letters = random.sample("abcdefghijklmnopqrstuvwxyz", 9)
    drawn = " ".join(random.choice(["", "-"]) + random.choice(letters) for _ in range(60))
    for what, rows, max_queue, seconds, story in [
        ("requests that fill the rows and the queue", 3, 2, 10, "d c b a 0 e f"),
        ("a running request leaves", 2, 3, 6, "d c b a -c"),
        ("a waiting request leaves", 2, 3, 6, "d c b 0 -0 a -b -d e"),
        ("a refused request leaves", 1, 2, 7.25, "d c b a -a 0 e"),
        ("a request leaves twice", 2, 3, 5.5, "d c b -c -c a 0 -a -a e f g"),
        ("a refused request is offered again", 4, 1, 1, "f e d c b 0 -c 0 -b g"),
        ("no places in the queue", 1, 0, 3, "b a -a -b c 0 b"), ("an empty queue", 3, 2, 10, "-z f -d -f -f a"),
        ("a long story", 2, 3, 6, "d c b a 0 e f -b f g -g h -e i -e j -d -d k l -c -a -f -i -k m -m n o p"),
        ("a long story", random.randint(1, 3), random.randint(0, 3), random.choice([1, 2.5, 7, 40]), drawn),
    ]:  # fmt: skip
        steps, here = [], []
        for step in story.split():
            name = 0 if step.strip("-") == "0" else step.strip("-")
            if step[0] == "-" or name not in here:  # a request that has a place is not offered again
                steps.append(("leave" if step[0] == "-" else "offer", name))
                here = [one for one in here if one != name]
                here += [name] if step[0] != "-" and len(here) < rows + max_queue else []
        yield (rows, max_queue, seconds, steps), f"{what}; rows {rows}, max_queue {max_queue}, seconds {seconds:g}"


class Bounded:
    """The reference, with the number of seconds as a replaceable part."""

    def __init__(self, rows, max_queue, seconds, retry_after=lambda queue: ceil(queue.seconds / queue.rows)):
        self.rows, self.max_queue, self.seconds, self.retry_after = rows, max_queue, seconds, retry_after
        self.running, self.waiting = [], []

    def offer(self, request_id):
        if len(self.running) < self.rows:
            self.running.append(request_id)
        elif len(self.waiting) < self.max_queue:
            self.waiting.append(request_id)
        else:
            return self.retry_after(self)
        return 0

    def leave(self, request_id):
        if request_id in self.waiting:
            self.waiting.remove(request_id)
        elif request_id in self.running:
            self.running.remove(request_id)
            self.running += self.waiting[:1]
            del self.waiting[:1]


BoundedQueue.reference(Bounded)


@BoundedQueue.misconception(
    "assumes that a request that leaves has a place. It may have left before, or may have been refused: then "
    "nothing happens."
)
class TakesPlacesForGranted(Bounded):
    def leave(self, request_id):
        if request_id not in self.waiting + self.running:
            self.running.remove(request_id)
        super().leave(request_id)


ROW = "Each row is busy for `seconds`, but there are several, and any of them will do."
EARLY = "A client that retries too early is refused again."
PLACE = "Each request that finishes makes room for another: a client need not wait until the queue is empty."

BoundedQueue.add_misconceptions({
    f"returns the time until one particular row is free. {ROW}": lambda queue: ceil(queue.seconds),
    f"multiplies by the number of rows. {ROW}": lambda queue: ceil(queue.seconds * queue.rows),
    f"rounds down. {EARLY}": lambda queue: max(1, int(queue.seconds / queue.rows)),
    f"rounds to the nearest second. {EARLY}": lambda queue: max(1, round(queue.seconds / queue.rows)),
    "adds a second even to a whole number of seconds, which needs no rounding.":
        lambda queue: int(queue.seconds / queue.rows) + 1,
    f"returns the time until all waiting requests have started. {PLACE}":
        lambda queue: max(1, ceil(len(queue.waiting) * queue.seconds / queue.rows)),
    f"returns the time until all waiting requests and one more have started. {PLACE}":
        lambda queue: ceil((len(queue.waiting) + 1) * queue.seconds / queue.rows),
    f"returns the time until all requests have finished. {PLACE}":
        lambda queue: ceil(len(queue.waiting + queue.running) * queue.seconds / queue.rows),
    "returns 1 second, however fast the server is: it depends on `seconds` and on the rows.": lambda queue: 1,
}, part="retry_after")  # fmt: skip


@BoundedQueue.rule
def keeps_its_promises(arguments, outcome, right):
    """Report what makes a queue unusable, or the first step after which it is wrong."""
    if outcome.result["problem"]:
        return outcome.result["problem"]
    return first_mistake(outcome.result["steps"], right.result["steps"], arguments[0])
