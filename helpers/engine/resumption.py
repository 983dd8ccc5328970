"""Resumption: an output that another engine has begun continues from its tokens so far.

A sequence needs nothing but its tokens. Their keys and values are computed again, as after a preemption; the text, the
place in a grammar and the state of the random generator follow from the tokens and the seed. So a resumed output gets
the tokens that it would have got without a break, greedy or seeded, and its next output begins after the old tokens.
"""

from collections.abc import Sequence as Seq

from .runner import ModelInfo
from .sampling_params import TOKEN_ID
from .sequence import Sequence


def resume(sequence: Sequence, token_ids: Seq[int], model: ModelInfo) -> None:
    """Append the tokens that were generated elsewhere to a new sequence.

    They count as available from the sequence's arrival, and their log-probabilities are not known here.

    Raises:
        ValueError: the request has no output with this index, or it would have ended with these tokens.
    """
    if not (isinstance(sequence.index, int) and 0 <= sequence.index < sequence.params.n):
        raise ValueError(
            f"generated has tokens for output {sequence.index!r}, but the request has {sequence.params.n}, "
            f"numbered from 0."
        )
    if token_ids and len(token_ids) >= sequence.max_tokens:  # without tokens, it may be a prompt to score
        raise ValueError(
            f"Output {sequence.index} has {len(token_ids)} of at most {sequence.max_tokens} tokens already: "
            f"resume unfinished outputs only."
        )
    for token_id in token_ids:
        TOKEN_ID.check(f"A token id of output {sequence.index} in generated", token_id)
        if token_id >= model.vocab_size:
            raise ValueError(f"Token ids in generated must be below {model.vocab_size}, not {token_id}.")
        sequence.detokenizer.push(token_id)
    sequence.token_ids += token_ids
    sequence.token_times += [sequence.arrival] * len(token_ids)
    if sequence.logprobs is not None:
        sequence.logprobs += [{} for _ in token_ids]
