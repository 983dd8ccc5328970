"""Lesson 1: right answers in other styles, and wrong ones that fail in ways of their own."""

import numpy as np
import torch
from transformers import DynamicCache

from answers import ALMOST, RIGHT, WRONG, right, solutions

loop = solutions.cached_loop

RIGHT["greedy_step"] |= {
    "with_topk": lambda logits: logits[:, -1, :].topk(1).indices.squeeze(-1),
    "of_all_positions": lambda logits: logits.argmax(dim=-1)[:, -1],
}
WRONG["greedy_step"] |= {"should be a tensor, but is a list": lambda logits: logits[:, -1].argmax(dim=-1).tolist()}

RIGHT["kv_cache_bytes"] |= {
    "as_a_numpy_scalar": lambda windows, *shape: (
        2 * np.minimum([shape[-1] if w is None else w for w in windows], shape[-1]).sum() * np.prod(shape[:3])
    )
}
ALMOST["kv_cache_bytes"] |= {"should be an int, but is the float": lambda result, *shape: float(result)}


@right("stop")
def token_by_token(token_ids, eos_id, max_tokens):
    kept = []
    for token in token_ids:
        kept.append(token)
        if token == eos_id:
            return kept, "stop"
        if len(kept) == max_tokens:
            return kept, "length"
    return kept, None


ALMOST["stop"] |= {
    "the reason should be 'stop', but is 'eos'": lambda result, *case: (result[0], result[1] and "eos"),
    "should be 2 values, the token ids that are kept and": lambda result, *case: result[0],
    "changed its argument: `token_ids`": lambda result, ids, *case: ids.clear() or result,
}
WRONG["stop"] |= {"the token ids that are kept": lambda ids, eos_id, n: token_by_token(ids, eos_id or None, n)}


@right("cached_loop")
def what_the_cache_lacks(model, turns, max_tokens):
    """The text so far, cut at the length of the cache; positions are given."""
    cache, text, outputs = DynamicCache(), turns[0][:, :0], []
    with torch.inference_mode():
        for turn in turns:
            text = torch.cat([text, turn], dim=1)
            for _ in range(max_tokens):
                start = cache.get_seq_length()
                ids, positions = text[:, start:], torch.arange(start, text.size(1), device=model.device)[None]
                result = model(input_ids=ids, past_key_values=cache, position_ids=positions, use_cache=True)
                text = torch.cat([text, result.logits[:, -1:].argmax(dim=-1)], dim=1)
            outputs.append(text[0, text.size(1) - max_tokens :].tolist())
    return outputs


def two_tokens_per_pass(model, turns, max_tokens):
    cache, text, outputs = DynamicCache(), turns[0][:, :0], []
    for turn in turns:
        text = torch.cat([text, turn], dim=1)
        for number in range(max_tokens):
            cache.crop(-1 if number else 0)  # the last of the cached tokens, which is computed again
            ids = text[:, cache.get_seq_length() :]
            token = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(dim=-1)
            text = torch.cat([text, token], dim=1)
        outputs.append(text[0, text.size(1) - max_tokens :].tolist())
    return outputs


WRONG["cached_loop"] |= {
    "`token ids` should be [[": lambda model, turns, max_tokens: [[0] * max_tokens for _ in turns],
    "`forward passes`": two_tokens_per_pass,
    "stopped with": lambda model, turns, n: loop(model, [turn[0] for turn in turns], n),
}
