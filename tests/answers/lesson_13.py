"""Answers to the exercises of lesson 13."""

import numpy as np

from answers import ALMOST, RIGHT, WRONG, right, solutions


@right("propose")
def backwards_in_numpy(token_ids, k, remaining):
    ids = np.array(token_ids)
    windows = {n: np.lib.stride_tricks.sliding_window_view(ids[:-1], n) for n in (1, 2, 3) if len(ids) > n}
    for n in sorted(windows, reverse=True):
        found = np.flatnonzero((windows[n] == ids[-n:]).all(axis=1))
        if len(found):
            return list(ids[found[-1] + n :][: min(k, remaining - 1)])
    return []


WRONG["propose"] |= {
    "should be a list, but is None": lambda ids, k, remaining: solutions.propose(ids, k, remaining) or None,
    "stopped with IndexError": lambda ids, k, remaining: [ids[len(ids) + index] for index in range(k)],
}
ALMOST["propose"] |= {"changed its argument: `token_ids`": lambda draft, ids, *_: ids.extend(draft) or draft}


@right("verify")
def token_by_token(drafts, chosen, eos):
    outputs, row = [], iter(chosen)
    for draft in drafts:
        output = []
        is_open = True
        for expected in [*draft, None]:
            token = next(row)  # also where nothing is accepted any more: the row holds it
            if is_open:
                output.append(token)
            is_open = is_open and token == expected and token != eos
        outputs.append(output)
    return outputs


ALMOST["verify"] |= {
    "should be a list, but is a generator": lambda outputs, *_: (tokens for tokens in outputs),
    "should be [[4]], but is []": lambda outputs, *_: [tokens for tokens in outputs if len(tokens) > 1],
    "changed its argument: `drafts`": lambda outputs, drafts, *_: drafts.clear() or outputs,
}


@right("best_k")
def in_numpy(acceptance, rows, seconds):
    times = np.array(seconds[rows::rows], dtype=float)
    return np.argmax(np.cumsum(acceptance ** np.arange(len(times))) * rows / times)


RIGHT["best_k"]["in_a_closed_form"] = lambda a, rows, seconds: max(
    range(len(seconds[rows::rows])),
    key=lambda k: (round((k + 1 if a == 1 else (1 - a ** (k + 1)) / (1 - a)) / seconds[rows * (k + 1)], 12), -k),
)
WRONG["best_k"] |= {
    "stopped with IndexError": lambda a, rows, seconds: max(range(9), key=lambda k: seconds[rows + k * rows])
}
