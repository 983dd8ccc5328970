"""Lesson 4, the order of the queue: longest first, and by priority with ageing, so that no request starves.

The right answers are those of the engine's policies. No check asks for an order that is a matter of taste.
"""

from collections.abc import Callable

from ..engine import LongestFirst, Priority, Sequence, WaitingQueue
from .attempt import Attempt
from .differences import Wrong, kind
from .planning import HINTS, sequence_of


def longest_first(attempt: Attempt) -> None:
    """Three classes with two requests and more in each; all alike; short requests only; nobody."""
    for what, limits in [
        ("unequal requests", {"a": 10, "b": 70, "c": 45, "d": 90, "e": 20, "f": 50, "g": 85}),
        ("all alike", dict.fromkeys("pqrst", 40)),
        ("short requests only", {"v": 1, "w": 5, "x": 8, "y": 9}),
        ("nobody waits", {}),
    ]:
        prompts = [9, 3, 5, 4, 12, 6, 8]
        waiting = [sequence_of(id, prompt, max_tokens=limits[id]) for id, prompt in zip(limits, prompts, strict=False)]
        given = f"{what}, max_tokens in the order of arrival: {', '.join(f'{i} {limits[i]}' for i in limits)}"
        given = given if waiting else what
        hints = {"empty": "A queue may be empty."}
        right = list(LongestFirst().order(WaitingQueue(waiting), []))
        got = attempt(list(waiting), given=given, hints=HINTS | hints)
        if not isinstance(got, list | tuple):
            raise Wrong(f"should return a list of sequences; it returned {kind(got)} ({given}).")
        for one in got:
            if not isinstance(one, Sequence):
                ids = " Wanted are the sequences themselves." if one in limits else ""
                raise Wrong(f"should return the sequences in a new order, and {kind(one)} is among them.{ids}")
        if list(got) != right:
            _explain_queue(list(got), right, waiting, given)


def _explain_queue(got: list[Sequence], right: list[Sequence], waiting: list[Sequence], given: str) -> None:
    for one in waiting:
        if got.count(one) != 1:
            times = "is missing" if one not in got else "stands there twice"
            raise Wrong(f"request {one.request_id} {times} in the queue: everybody must get a turn, one ({given}).")
    if len(got) != len(waiting):
        raise Wrong(f"returns {len(got)} sequences, and {len(waiting)} wait ({given}).")

    longest = max(one.max_tokens for one in waiting)
    classes = {one: 3 * one.max_tokens // (longest + 1) for one in waiting}
    in_classes = [classes[one] for one in got] == [classes[one] for one in right]
    by_limit = [one.max_tokens for one in got]
    by_prompt = [one.prompt_tokens for one in got]
    if len(set(by_limit)) == 1:
        why = (
            "changes the order of requests that are all alike. Who came first goes first, unless there is a reason: "
            "otherwise somebody may wait for ever"
        )
    elif got == waiting and longest < 10:  # in the first case, it had three
        why = (
            f"has one class only, but the longest in this queue may get {longest} tokens: the classes are thirds of "
            f"the largest limit of those who wait"
        )
    elif got == waiting:
        why = "leaves the order of arrival as it is: a long request that begins last runs alone at the end"
    elif by_limit == sorted(by_limit, reverse=True):
        why = (
            "sorts by max_tokens alone. Within a class the order of arrival stays: a limit is no promise, and a "
            "slightly higher one is no reason to go first"
        )
    elif by_limit == sorted(by_limit) or [classes[one] for one in got] == [classes[one] for one in right[::-1]]:
        why = "puts the shortest first. The long ones then begin last, and the server runs on for them with empty rows"
    elif by_prompt in (sorted(by_prompt), sorted(by_prompt, reverse=True)):
        why = "goes by the prompts. A prompt is read in one pass or a few; max_tokens says how many can follow"
    elif in_classes:
        why = "has the classes right, but within a class the order of arrival must stay"
    else:
        place = next(place for place in range(len(got)) if classes[got[place]] != classes[right[place]])
        one, other = got[place], right[place]
        why = (
            f"puts {one.request_id} (max_tokens {one.max_tokens}) before {other.request_id} ({other.max_tokens}), but "
            f"they are in different thirds of {longest}, the largest limit in this queue"
        )
    raise Wrong(f"{why} ({given}).")


def most_urgent(attempt: Attempt) -> None:
    """Queues in which each wrong idea of priority, ageing and ties chooses somebody else."""
    cases = [
        (50, [("a", 2, 9), ("b", 0, 5), ("c", 1, 2)]),
        (10, [("a", 2, 29), ("b", 1, 20), ("c", 3, 16), ("d", 0, 16)]),
        (50, [("a", 3, 130), ("b", 2, 100), ("c", 1, 50), ("d", 1, 15)]),
        (50, [("a", 1, 50), ("b", 2, 50), ("c", 0, 15), ("d", 0, 0)]),
        (50, [("a", 2, 40), ("b", 1, 40)]),
    ]
    got, right, queues, told = [], [], [], []
    for ageing, requests in cases:
        queue = [sequence_of(id, 4, priority=priority, waited=waited) for id, priority, waited in requests]
        asked = ", ".join(f"{id} with priority {priority} and waited {waited}" for id, priority, waited in requests)
        given = f"{asked}; ageing {ageing}"
        right.append(next(iter(Priority(ageing).order(WaitingQueue(queue), []))))
        one = attempt(list(queue), ageing, given=given, hints=HINTS)
        if one is None:
            raise Wrong(f"returns None although {len(queue)} requests wait ({given}).")
        if not isinstance(one, Sequence):
            ids = " Wanted is the sequence itself." if isinstance(one, str) and one in "abcd" else ""
            raise Wrong(f"should return one of the waiting sequences; it returned {kind(one)} ({given}).{ids}")
        if one not in queue:
            raise Wrong(f"returns a sequence that does not wait ({given}).")
        got, queues, told = [*got, one], [*queues, (ageing, queue)], [*told, given]

    def first(urgency: Callable[[Sequence, int], float], backwards: bool = False) -> list[Sequence]:
        """Whom a rule takes in each case."""
        queue_of = (lambda queue: queue[::-1]) if backwards else list
        return [min(queue_of(queue), key=lambda one: urgency(one, ageing)) for ageing, queue in queues]

    for result, message in [
        (
            first(lambda one, ageing: -(one.priority - one.waited // ageing)),
            "takes the largest number. Here the smaller number is the more urgent, as in a queue: 0 is served before 1",
        ),
        (
            first(lambda one, ageing: -one.priority - one.waited // ageing),
            "takes the largest number. Here the smaller number is the more urgent, as in a queue: 0 is served before 1",
        ),
        (
            first(lambda one, ageing: one.priority + one.waited // ageing),
            "lets whoever waits become less urgent. Smaller numbers are more urgent, so waiting has to lower them",
        ),
        (
            first(lambda one, ageing: one.priority),
            "never looks at `waited`: as long as urgent requests keep coming, the others wait for ever",
        ),
        (
            first(lambda one, ageing: one.priority - one.waited * ageing),
            "lets waiting count too much: a level is gained after `ageing` iterations, not `ageing` levels in each one",
        ),
        (
            first(lambda one, ageing: 0),
            "takes whoever came first, whatever their priority: that is first come, first served",
        ),
        (
            first(lambda one, ageing: one.priority - one.waited / ageing),
            "counts parts of a level. Only every *full* `ageing` iterations are worth one, and among equals the first "
            "to come goes first",
        ),
        (
            first(lambda one, ageing: one.priority - round(one.waited / ageing)),
            "rounds to the nearest level. Only every *full* `ageing` iterations are worth one",
        ),
        (
            first(lambda one, ageing: max(one.priority - one.waited // ageing, 0)),
            "stops at level 0: who has waited long enough is more urgent than a newcomer of priority 0",
        ),
        (
            first(lambda one, ageing: one.priority - (one.waited >= ageing)),
            "counts one level at most: every full `ageing` iterations are worth another one",
        ),
        (
            first(lambda one, ageing: one.priority - (one.waited - 1) // ageing),
            "is off by one where a level begins: `ageing` iterations are worth one, and one iteration less is not",
        ),
        (
            first(lambda one, ageing: one.priority - one.waited // ageing, backwards=True),
            "takes the last among equals. The queue is in the order of arrival, and who came first has waited longer",
        ),
    ]:
        if got == result != right:
            case = next(case for case in range(len(cases)) if got[case] != right[case])
            raise Wrong(f"{message} ({told[case]}).")
    for one, wanted, (ageing, _), given in zip(got, right, queues, told, strict=True):
        if one != wanted:
            levels = [sequence.priority - sequence.waited // ageing for sequence in (one, wanted)]
            tie = ": among equals, the first to come goes first" if levels[0] == levels[1] else ""
            raise Wrong(
                f"takes {one.request_id}, which counts as {levels[0]}, and {wanted.request_id} counts as {levels[1]}"
                f"{tie} ({given})."
            )
    nobody = attempt([], 50, given="nobody waits", hints=HINTS | {"empty": "Then there is nobody to take: None."})
    if nobody is not None:
        raise Wrong(f"should return None when nobody waits; it returned {kind(nobody)}.")


TASKS = {
    "longest_first(waiting)": (
        longest_first,
        "who takes longest begins first, and within a class nobody overtakes",
    ),
    "most_urgent(waiting, ageing)": (
        most_urgent,
        "the smallest number goes first, and waiting lowers it, so everybody is served in the end",
    ),
}
