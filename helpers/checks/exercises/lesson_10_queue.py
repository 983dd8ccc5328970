"""Lesson 10, overload: a bounded queue."""

from math import ceil

from ..edits import add_edits
from ..exercise import Exercise
from ..queues import first_mistake, run_story

BoundedQueue = Exercise(
    "BoundedQueue(rows, max_queue, seconds)",
    "the queue holds no more requests than can be served in time, and a request leaves once, for whatever reason",
    observe=run_story,
)


def _steps(rows, max_queue, seconds, story):
    """Return the arguments of a story in which a minus precedes a request that leaves. One of the ids is 0."""
    steps, here = [], []
    for step in story.split():
        name, leaves = 0 if step.strip("-") == "0" else step.strip("-"), step[0] == "-"
        if leaves or name not in here:  # a request that has a place is not offered again
            steps.append(("leave" if leaves else "offer", name))
            here = [one for one in here if one != name]
            here += [name] if not leaves and len(here) < rows + max_queue else []
    return rows, max_queue, seconds, steps


def _drawn(random):
    letters = random.sample("abcdefghijklmnopqrstuvwxyz", 9)
    story = " ".join(random.choice(["", "-"]) + random.choice(letters) for _ in range(60))
    return [("a long story", random.randint(1, 3), random.randint(0, 3), random.choice([1, 2.5, 7, 40]), story)]


BoundedQueue.table([
    ("requests that fill the rows and the queue", 3, 2, 10, "d c b a 0 e f"),
    ("a running request leaves", 2, 3, 6, "d c b a -c"), ("a waiting request leaves", 2, 3, 6, "d c b 0 -0 a -b -d e"),
    ("a refused request leaves", 1, 2, 7.25, "d c b a -a 0 e"),
    ("a request leaves twice", 2, 3, 5.5, "d c b -c -c a 0 -a -a e f g"),
    ("a refused request is offered again", 4, 1, 1, "f e d c b 0 -c 0 -b g"),
    ("no places in the queue", 1, 0, 3, "b a -a -b c 0 b"), ("an empty queue", 3, 2, 10, "-z f -d -f -f a"),
    ("a long story", 2, 3, 6, "d c b a 0 e f -b f g -g h -e i -e j -d -d k l -c -a -f -i -k m -m n o p"),
], _drawn, given="rows {}, max_queue {}, seconds {}", build=_steps)  # fmt: skip


@BoundedQueue.reference
class Bounded:
    def __init__(self, rows, max_queue, seconds):
        self.rows, self.max_queue, self.seconds = rows, max_queue, seconds
        self.running, self.waiting = [], []

    def offer(self, request_id):
        if len(self.running) < self.rows:
            self.running.append(request_id)
        elif len(self.waiting) < self.max_queue:
            self.waiting.append(request_id)
        else:
            return ceil(self.seconds / self.rows)
        return 0

    def leave(self, request_id):
        if request_id in self.waiting:
            self.waiting.remove(request_id)
        elif request_id in self.running:
            self.running.remove(request_id)
            self.running += self.waiting[:1]
            del self.waiting[:1]


RETRY = "ceil(self.seconds / self.rows)"
ROW = "Each row is busy for `seconds`, but there are several, and any of them will do."
EARLY = "A client that retries too early is refused again."
PLACE = "Each request that finishes makes room for another: a client need not wait until the queue is empty."
add_edits(BoundedQueue, {
    "assumes that a request that leaves has a place. It may have left before, or may have been refused: then "
    "nothing happens.": "elif request_id in self.running -> else",
    f"returns the time until one particular row is free. {ROW}": f"{RETRY} -> ceil(self.seconds)",
    f"multiplies by the number of rows. {ROW}": f"{RETRY} -> ceil(self.seconds * self.rows)",
    f"rounds down. {EARLY}": f"{RETRY} -> max(1, int(self.seconds / self.rows))",
    f"rounds to the nearest second. {EARLY}": f"{RETRY} -> max(1, round(self.seconds / self.rows))",
    f"returns the time until all waiting requests have started. {PLACE}":
        f"{RETRY} -> max(1, ceil(len(self.waiting) * self.seconds / self.rows))",
    f"returns the time until all requests have finished. {PLACE}":
        f"{RETRY} -> ceil(len(self.waiting + self.running) * self.seconds / self.rows)",
})  # fmt: skip


@BoundedQueue.rule
def keeps_its_promises(arguments, outcome, right):
    got = outcome.result
    return got["problem"] or first_mistake(got["steps"], right.result["steps"], arguments[0])
