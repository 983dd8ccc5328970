"""Answers to the exercises of lesson 13."""

from itertools import accumulate, takewhile

import numpy as np

from answers import ALMOST, RIGHT, WRONG, right


@right("propose")
def with_a_dict_of_places(token_ids, k, remaining):
    """Remember where each n-gram ended last, as an engine does."""
    most = min(k, remaining - 1)
    for n in (3, 2, 1):
        places = {tuple(token_ids[end - n : end]): end for end in range(n, len(token_ids))}
        if len(token_ids) >= n and tuple(token_ids[-n:]) in places:
            end = places[tuple(token_ids[-n:])]
            return token_ids[end : end + most]
    return []


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
    "should be a list, but is None": lambda ids, k, remaining: with_a_dict_of_places(ids, k, remaining) or None,
    "stopped with IndexError": lambda ids, k, remaining: [ids[len(ids) + place] for place in range(k)],
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


@right("verify")
def with_borders(drafts, chosen, eos):
    borders = list(accumulate((len(draft) + 1 for draft in drafts), initial=0))
    outputs = []
    for draft, start in zip(drafts, borders, strict=False):
        agreed = list(takewhile(lambda pair: pair[0] == pair[1], zip(draft, chosen[start:], strict=False)))
        tokens = chosen[start : start + len(agreed) + 1]
        outputs.append(tokens[: tokens.index(eos) + 1] if eos in tokens else tokens)
    return outputs


ALMOST["verify"] |= {
    "should be a list, but is a generator": lambda outputs, *_: (tokens for tokens in outputs),
    "should be [[4]], but is []": lambda outputs, *_: [tokens for tokens in outputs if len(tokens) > 1],
    "changed its argument: `drafts`": lambda outputs, drafts, *_: drafts.clear() or outputs,
}


@right("best_k")
def with_a_loop(acceptance, rows, seconds):
    best, speed, tokens, k = 0, 0.0, 0.0, 0
    while rows * (k + 1) < len(seconds):
        tokens += acceptance**k
        if tokens / seconds[rows * (k + 1)] > speed * (1 + 1e-9):
            best, speed = k, tokens / seconds[rows * (k + 1)]
        k += 1
    return best


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
