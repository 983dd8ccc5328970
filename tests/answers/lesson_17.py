"""Answers to the exercises of lesson 17."""

import numpy as np

from answers import ALMOST, RIGHT, WRONG, right


@right("resume")
def with_arrays(prompt, outputs, max_tokens):
    unfinished = [index for index, (_, finished) in enumerate(outputs) if not finished]
    lengths = np.array([len(outputs[index][0]) for index in unfinished], dtype=int)
    return [
        (index, prompt + outputs[index][0], left, length)
        for index, left, length in zip(unfinished, max_tokens - lengths, lengths, strict=True)
    ]


ALMOST["resume"] |= {
    "should be [(0, [5, 6, 7], 3, 1)], but is [(0, [5, 6, 7], 3)]": lambda resumed, *_: [
        output[:3] for output in resumed
    ],
    "changed its argument: `prompt`": lambda resumed, prompt, *_: prompt.append(1) or resumed,
}


@right("deliver")
def with_the_owner_of_each_request(events):
    streams, owner = {}, {}
    for event in events:
        if event[0] == "assign":
            _, request, owner[request] = event
            streams.setdefault(request, [])
        elif event[0] == "lost":
            owner = {request: replica for request, replica in owner.items() if replica != event[1]}
        elif owner.get(event[2]) == event[1]:
            streams[event[2]].extend(event[3])
    return streams


ALMOST["deliver"] |= {
    "should be a dict, but is a list": lambda streams, *_: list(streams.items()),
    "changed its argument: `events`": lambda streams, events: events.pop() and streams,
}


def most_cached(length, replicas):
    return max(range(len(replicas)), key=lambda index: (replicas[index].cached, -replicas[index].outstanding))


def least_loaded(length, replicas):
    return min(range(len(replicas)), key=lambda index: replicas[index].outstanding)


@right("route")
def in_numpy(length, replicas):
    return np.argmax([replica.cached - 200 * replica.waiting - 0.01 * replica.outstanding for replica in replicas])


def by_outstanding_tokens_alone(length, replicas):
    return max(range(len(replicas)), key=lambda index: replicas[index].cached - 0.5 * replicas[index].outstanding)


WRONG["route"] |= {
    "lets requests wait: the p95 of TTFT is 41.0 iterations on 'popular'": most_cached,
    "computes 11,469 prompt tokens on 'even'": least_loaded,
    "prompt tokens on 'long'. The least loaded replica for each request": by_outstanding_tokens_alone,
    "should return the index of a replica, an int, but returned a KnownReplica": lambda length, replicas: replicas[0],
    "should return an index from 0 to 3, but returned 4": lambda length, replicas: 4,
    "should return the index of a replica, an int, but returned None": lambda length, replicas: None,
    "lets requests wait: the p95 of TTFT is": lambda length, replicas: 0,
}
RIGHT["route"] |= {
    "by_waiting_requests_first": lambda length, replicas: min(
        range(4), key=lambda index: (replicas[index].waiting, -replicas[index].cached, replicas[index].outstanding)
    )
}
