"""Schedules for the codelab."""

from answers import right, wrong


@right("schedule")
@right("schedule_others")
def first_come_first_served(waiting, running, free_rows):
    return waiting[:free_rows]


@right("schedule")
@right("schedule_race")
def shortest_first(waiting, running, free_rows):
    waiting.sort(key=lambda request: (request.max_tokens, request.arrived))
    return tuple(waiting[: max(0, free_rows)])


@right("schedule")
@right("schedule_others")
def two_or_more_at_once(waiting, running, free_rows):
    return waiting[:free_rows] if free_rows > 1 or len(waiting) == 1 or not running else []


@right("schedule_race")
@right("schedule_floor")
@right("schedule_others")
def long_ones_then_the_others(waiting, running, free_rows):
    long = [request for request in waiting if request.max_tokens >= 50]
    return (long + [request for request in waiting if request not in long])[:free_rows]


@wrong("schedule_race", "takes 400 forward passes for the race, where first come, first served takes 132")
@wrong("schedule_floor", "300.0% above its floor of 100, where 15% are allowed")
@wrong("schedule_others", "forward passes on the workload 'mixed', where first come, first served costs 134")
@wrong("schedule", "leaves rows free while requests wait: 59.1% of the slot-steps of the race")
def static_batches(waiting, running, free_rows):
    return [] if running else waiting[:free_rows]


@wrong("schedule", "leaves rows free while requests wait: 43.0% of the slot-steps of the race")
def hardly_better_than_static(waiting, running, free_rows):
    return waiting[:free_rows] if free_rows >= 7 or not running else []


@wrong("schedule", "leaves rows free while requests wait")
def nearly_alone(waiting, running, free_rows):
    return waiting[:1] if len(running) < 2 else []


wrong("schedule_race", "takes 132 forward passes for the race")(first_come_first_served)
wrong("schedule_floor", "32.0% above its floor of 100")(first_come_first_served)
wrong("schedule_floor", "30.0% above its floor of 100")(shortest_first)


@wrong("schedule_others", "forward passes on the workload 'arriving', where first come, first served costs 139")
def long_ones_wait(waiting, running, free_rows):
    short = [request for request in waiting if request.max_tokens < 97]
    return (short or (waiting if not running else []))[:free_rows]


@wrong("schedule", "lets 5 requests join: every running request holds a row")
def more_than_rows(waiting, running, free_rows):
    return waiting


@wrong("schedule", "twice: a request has one row")
def the_same_twice(waiting, running, free_rows):
    return [waiting[0]] * min(2, free_rows) if waiting else []


@wrong("schedule", "which is already running (given: 5 waiting, 3 running, 2 free rows)")
def those_that_run(waiting, running, free_rows):
    return (running + waiting)[:free_rows]


@wrong("schedule", "should return waiting requests as they are, and returned an int")
def ids_of_requests(waiting, running, free_rows):
    return [request.request_id for request in waiting[:free_rows]]


@wrong("schedule", "although none is running: the server would stall for ever")
@wrong("schedule_race", "although none is running: the server would stall for ever")
def never_any(waiting, running, free_rows):
    return []


@wrong("schedule", "empty if none joins, and returned a ServerRequest")
def a_single_one(waiting, running, free_rows):
    return waiting[0] if waiting and free_rows else []


@wrong("schedule", "list index out of range (given: 0 waiting, 3 running, 5 free rows)")
def none_waits(waiting, running, free_rows):
    return [waiting[0]] if free_rows else []


@wrong("schedule", "is called as schedule(waiting, running, free_rows), and your function does not take that")
def without_rows(waiting, running):
    return waiting[:1]
