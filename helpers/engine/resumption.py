"""Resumption: an output that another engine has begun continues from its tokens so far.

A sequence needs nothing but its tokens. Their keys and values are computed again, as after a preemption; the text, the
place in a grammar and the state of the random generator follow from the tokens and the seed. So a resumed output gets
the tokens that it would have got without a break, greedy or seeded, and its next output begins after the old tokens.
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq

from .sampling_params import TOKEN_ID
from .scheduler import Scheduler
from .sequence import Sequence
from .validation import RequestValidator


def check_indices(indices: Collection[int], n: int) -> Collection[int]:
    """Return the indices of the outputs to resume.

    Raises:
        ValueError: there are none, or a request with `n` outputs has none with such an index.
    """
    if not indices:
        raise ValueError("generated has no output: give the tokens of each unfinished output, by index.")
    for index in indices:
        if not (isinstance(index, int) and 0 <= index < n):
            raise ValueError(f"generated has tokens for output {index!r}, but the request has {n}, numbered from 0.")
    return indices


def resume(sequence: Sequence, token_ids: Seq[int], scheduler: Scheduler, validator: RequestValidator) -> None:
    """Append the tokens that were generated elsewhere to a new sequence.

    They count as available from the sequence's arrival, and their log-probabilities are not known here.

    Raises:
        ValueError: the output would have ended with these tokens, or it may become too long to compute them again.
    """
    vocab_size = validator.model.vocab_size
    validator.check_recomputation(sequence.prompt_tokens, sequence.max_tokens)
    for token_id in token_ids:
        TOKEN_ID.check(f"A token id of output {sequence.index} in generated", token_id)
        if token_id >= vocab_size:
            raise ValueError(f"Token ids in generated must be below {vocab_size}, not {token_id}.")
        sequence.token_ids.append(token_id)
        reason = scheduler.detokenize(sequence, token_id)
        if reason == "length":
            raise ValueError(
                f"Output {sequence.index} has {len(token_ids)} of at most {sequence.max_tokens} tokens already: resume "
                "unfinished outputs only."
            )
        if reason is not None:
            raise ValueError(f"Output {sequence.index} ended with token {token_id}: resume unfinished outputs only.")
    sequence.token_times += [sequence.arrival] * len(token_ids)
    if sequence.logprobs is not None:
        sequence.logprobs += [{} for _ in token_ids]
