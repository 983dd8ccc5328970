"""Functions for the codelabs, and designs: schedules, choices of a block to evict, three numbers."""

from dataclasses import replace

import numpy as np

from answers import RIGHT, WRONG, right


@right("schedule", "schedule_others")
def first_come_first_served(waiting, running, free_rows):
    return waiting[:free_rows]


@right("schedule")
def shortest_first(waiting, running, free_rows):
    waiting.sort(key=lambda request: (request.max_tokens, request.arrived))
    return tuple(waiting[: max(0, free_rows)])


@right("schedule_race", "schedule_others")
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
    "which is not waiting": lambda waiting, running, free: (running + waiting)[:free],
    "but returned an int": lambda waiting, running, free: [request.request_id for request in waiting[:free]],
    "but returned a ServerRequest": lambda waiting, running, free: waiting[0] if waiting and free else [],
    "although none is running": lambda waiting, running, free: [],
    "list index out of range (given: 0 waiting": lambda waiting, running, free: [waiting[0]] if free else [],
}
WRONG["schedule_race"] |= {
    "takes 400 forward passes for the race, and at most 120 are allowed": static_batches,
    "how many join at once": lambda waiting, running, free: sorted(waiting, key=lambda request: -request.max_tokens)[
        : min(1, free)
    ][: len(running) < 3],
    "takes 132 forward passes for the race": first_come_first_served,
    "takes 130 forward passes for the race": shortest_first,
    "first come, first served takes 132. It leaves": lambda *case: [] if case[1] else long_ones_then_the_others(*case),
    "although none is running": lambda waiting, running, free: [],
}
WRONG["schedule_others"] |= {
    "on the workload 'mixed'; first come, first served costs 134": static_batches,
    "on the workload 'arriving'; first come, first served costs 139": long_ones_wait,
}


# --- eviction -------------------------------------------------------------------------------------------------------


@right("evict", "evict_chats")
def least_recently_used(blocks, now):
    return blocks[0]


@right("evict", "evict_bound")
def used_once_first(blocks, now):
    return min(blocks, key=lambda block: (block.uses > 1, block.last_used, -block.index))


@right("evict", "evict_bound", "evict_chats")
def ends_of_questions_first(blocks, now):
    known = {block.name: block for block in blocks}

    def continued(block):
        return continued(known[block.previous]) if block.uses == 1 and block.previous in known else block.followers

    blocks.sort(key=lambda block: block.uses > 1 or continued(block) < 2)
    return blocks[0]


def first_in(blocks, now):
    return min(blocks, key=lambda block: (block.computed, -block.index))


WRONG["evict"] |= {
    "computes no fewer prompt tokens than FIFO": first_in,
    "should return one of `blocks` as it is, but returned an int": lambda blocks, now: blocks[0].name,
    "but returned block -1": lambda blocks, now: replace(blocks[0], name=-1),
    "but returned None": lambda blocks, now: blocks.clear(),
    "stopped with IndexError": lambda blocks, now: blocks[now],
}
WRONG["evict_bound"] |= {
    "closes less than a third of the distance": least_recently_used,
    "(FIFO 5,620, LRU 4,872, Belady's bound 3,300)": lambda blocks, now: blocks[-1],
}
WRONG["evict_chats"] |= {"the next turn needs them": used_once_first, "belong to conversations that are over": first_in}

# --- design ---------------------------------------------------------------------------------------------------------

RIGHT["design"] |= {"few_rows": lambda: (8, 128, 0), "numpy_s_numbers": lambda: [np.int64(14), 128, np.int32(1)]}
RIGHT["design_in_time"] |= {"fourteen_rows": lambda: (14, 128, 1), "no_queue": lambda: (14, 150, 0)}
WRONG["design"] |= {
    "Most of the others stall for more than 4 units": lambda: (14, 512, 1),
    "requests stall for more than 4 units": lambda: (20, 150, 1),
    "serves 23 of 240 requests in time, where 50% are asked for": lambda: (1, 20, 0),
    "serves 27 of 240 requests": lambda: (24, 24, 240),
    "serves 105 of 240 requests in time": lambda: (24, 64, 100),  # 50% on a third of the other traces
    "tokens is a float": lambda: (14, 128.0, 1),
    "max_queue is a bool": lambda: (14, 128, True),
    "should return three ints": lambda: (14, 128),
    "returns 100000 for max_queue, which should be between 0 and 1024": lambda: (14, 128, 100000),
    "returns 0 for rows": lambda: (0, 128, 1),
    "allows 8 tokens per iteration for 14 rows": lambda: (14, 8, 1),
}
WRONG["design_in_time"] |= {
    "wait for more than 40 units": lambda: (14, 128, 240),
    "are refused": lambda: (8, 128, 0),
    "Most of the others stall": lambda: (14, 300, 0),
    "do so many rows fit": lambda: (24, 128, 1),
}
