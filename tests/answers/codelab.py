"""Schedules for the codelab."""

from answers import WRONG, right


@right("schedule", "schedule_others")
def first_come_first_served(waiting, running, free_rows):
    return waiting[:free_rows]


@right("schedule", "schedule_race")
def shortest_first(waiting, running, free_rows):
    waiting.sort(key=lambda request: (request.max_tokens, request.arrived))
    return tuple(waiting[: max(0, free_rows)])


@right("schedule_race", "schedule_floor", "schedule_others")
def long_ones_then_the_others(waiting, running, free_rows):
    long = [request for request in waiting if request.max_tokens >= 50]
    return (long + [request for request in waiting if request not in long])[:free_rows]


@right("schedule", "schedule_others")
def two_or_more_at_once(waiting, running, free_rows):
    return waiting[:free_rows] if free_rows > 1 or len(waiting) == 1 or not running else []


def static_batches(waiting, running, free_rows):
    return [] if running else waiting[:free_rows]


def long_ones_wait(waiting, running, free_rows):
    short = [request for request in waiting if request.max_tokens < 97]
    return (short or (waiting if not running else []))[:free_rows]


WRONG["schedule"] |= {
    "leaves rows free while requests wait: 59.1% of the slot-steps of the race": static_batches,
    "leaves rows free while requests wait: 43.0%": lambda waiting, running, free: (
        waiting[:free] if free >= 7 or not running else []
    ),
    "lets 5 requests join": lambda waiting, running, free: waiting,
    "twice: a request has one row": lambda waiting, running, free: waiting[:1] * min(2, free),
    "which is already running": lambda waiting, running, free: (running + waiting)[:free],
    "but returned an int": lambda waiting, running, free: [request.request_id for request in waiting[:free]],
    "but returned a ServerRequest": lambda waiting, running, free: waiting[0] if waiting and free else [],
    "although none is running": lambda waiting, running, free: [],
    "list index out of range (given: 0 waiting": lambda waiting, running, free: [waiting[0]] if free else [],
}
WRONG["schedule_race"] |= {
    "takes 400 forward passes for the race; first come, first served takes 132": static_batches,
    "takes 132 forward passes for the race": first_come_first_served,
    "although none is running": lambda waiting, running, free: [],
}
WRONG["schedule_floor"] |= {
    "300.0% above its floor of 100; at most 15% are allowed": static_batches,
    "30.0% above its floor of 100": shortest_first,
}
WRONG["schedule_others"] |= {
    "on the workload 'mixed'; first come, first served costs 134": static_batches,
    "on the workload 'arriving'; first come, first served costs 139": long_ones_wait,
}
