"""Scoring: the log-probabilities of a prompt's tokens, for evaluations that compare given texts.

A prompt's forward pass yields logits after each of its tokens. They say how probable the next token was. Generation
needs the last of them only, so the others are computed on request: for chunks of prompts that are to be scored.
"""

import torch

from ..engine import Chunk, Sequence


def score_prompts(chunks: list[Chunk], logits: torch.Tensor) -> dict[Sequence, list[dict[int, float]]]:
    """Return the log-probabilities of the prompt tokens that a pass scores.

    Args:
        chunks: the chunks of a forward pass.
        logits: [sum of `num_logits`, vocabulary], in the order of the chunks.

    Returns:
        For each sequence with scored tokens, a dictionary by token id for each of them: first the token itself,
        then the best ones in its place, as many as the request's `prompt_logprobs`.
    """
    scores, first = {}, 0
    for chunk in chunks:
        if chunk.scored:
            token_ids = chunk.sequence.token_ids[chunk.scored.start : chunk.scored.stop]
            rows = logits[first : first + len(token_ids)].float().log_softmax(dim=-1).cpu()
            scores[chunk.sequence] = _by_token_id(rows, token_ids, chunk.sequence.params.prompt_logprobs)
        first += chunk.num_logits
    return scores


def _by_token_id(rows: torch.Tensor, token_ids: list[int], num_best: int) -> list[dict[int, float]]:
    own = rows.gather(1, torch.tensor(token_ids)[:, None]).tolist()
    best = rows.topk(min(num_best, rows.shape[1]))
    return [
        {token_id: logprob, **dict(zip(ids, values, strict=True))}
        for token_id, (logprob,), ids, values in zip(
            token_ids, own, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
