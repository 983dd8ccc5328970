"""Lesson 1: right answers in other styles, and wrong ones that fail in ways of their own."""

import numpy as np
import torch
from transformers import DynamicCache

from answers import right, wrong

# --- greedy_step ----------------------------------------------------------------------------------------------------


@right("greedy_step")
def with_topk(logits):
    return logits[:, -1, :].topk(1).indices.squeeze(-1)


@right("greedy_step")
def with_a_softmax_and_a_loop(logits):
    return torch.tensor([int(torch.softmax(row[-1], dim=0).argmax()) for row in logits])


@right("greedy_step")
def sorted_descending(logits):
    return logits.select(1, logits.size(1) - 1).sort(dim=-1, descending=True).indices[:, 0]


@right("greedy_step")
def with_numpy(logits):
    return torch.from_numpy(logits.numpy()[:, -1].argmax(axis=-1))


@wrong("greedy_step", "should be a tensor, and is a list")
def as_a_list(logits):
    return logits[:, -1].argmax(dim=-1).tolist()


@wrong("greedy_step", "holds int32, and should hold int64")
def as_int32(logits):
    return logits[:, -1].argmax(dim=-1).int()


@wrong("greedy_step", "draws nothing at random")
def sampled(logits):
    return torch.multinomial(torch.softmax(3 * logits[:, -1], dim=-1), 1)[:, 0]


@wrong("greedy_step", "row 0: expected 3, got 1")
def best_of_the_first_row_s_vocabulary(logits):
    return logits[:, -1, :3].argmax(dim=-1)


# --- kv_cache_bytes and decode_floor --------------------------------------------------------------------------------


@right("kv_cache_bytes")
def as_a_numpy_scalar(layers, kv_heads, head_dim, number_bytes, tokens):
    return np.prod([2, layers, kv_heads, head_dim, number_bytes, tokens])


@wrong("kv_cache_bytes", "should be an int, and is the float")
def as_a_float(layers, kv_heads, head_dim, number_bytes, tokens):
    return 2.0 * layers * kv_heads * head_dim * number_bytes * tokens


@right("decode_floor")
def by_hand(weight_bytes, bandwidth, operations, rate):
    reading, arithmetic = weight_bytes / bandwidth, operations / rate
    return reading if reading > arithmetic else arithmetic


@right("decode_floor")
def in_float32(weight_bytes, bandwidth, operations, rate):
    return np.float32(max(weight_bytes / bandwidth, operations / rate))


@wrong("decode_floor", "should be 0.05, and is 50")
def in_milliseconds(weight_bytes, bandwidth, operations, rate):
    return 1000 * max(weight_bytes / bandwidth, operations / rate)


# --- stop -----------------------------------------------------------------------------------------------------------


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


@wrong("stop", "the reason is 'eos', and should be \"stop\"")
def other_word(token_ids, eos_id, max_tokens):
    kept, reason = token_by_token(token_ids, eos_id, max_tokens)
    return kept, "eos" if reason == "stop" else reason


@wrong("stop", "changed its argument")
def cuts_in_place(token_ids, eos_id, max_tokens):
    kept, reason = token_by_token(token_ids, eos_id, max_tokens)
    del token_ids[len(kept) :]
    return token_ids, reason


@wrong("stop", "returns the list that it was given")
def returned_as_it_is(token_ids, eos_id, max_tokens):
    kept, reason = token_by_token(token_ids, eos_id, max_tokens)
    return token_ids if kept == token_ids else kept, reason


@wrong("stop", "should be 2 things")
def no_reason(token_ids, eos_id, max_tokens):
    return token_by_token(token_ids, eos_id, max_tokens)[0]


@wrong("stop", "the token ids that are kept")
def an_id_of_0_is_no_eos(token_ids, eos_id, max_tokens):
    return token_by_token(token_ids, eos_id or None, max_tokens)


# --- cached_loop ----------------------------------------------------------------------------------------------------


@right("cached_loop")
def with_the_model_s_own_cache(model, prompt_ids, max_tokens):
    cache, ids, generated = None, prompt_ids, []
    while len(generated) < max_tokens:
        result = model(ids, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        generated.append(int(result.logits[0, -1].argmax()))
        ids = torch.tensor([[generated[-1]]], device=model.device)
    return generated


@right("cached_loop")
def prefill_apart_from_decode(model, prompt_ids, max_tokens):
    cache = DynamicCache()
    with torch.inference_mode():
        text = [model(input_ids=prompt_ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(dim=-1)]
        for position in range(prompt_ids.size(1), prompt_ids.size(1) + max_tokens - 1):
            position_ids = torch.tensor([[position]], device=model.device)
            result = model(input_ids=text[-1], past_key_values=cache, position_ids=position_ids, use_cache=True)
            text.append(result.logits[:, -1:].argmax(dim=-1))
    return torch.cat(text, dim=1)[0].tolist()


@wrong("cached_loop", "should be an int, and is a tensor of int64")
def list_of_tensors(model, prompt_ids, max_tokens):
    return [torch.tensor(token) for token in with_the_model_s_own_cache(model, prompt_ids, max_tokens)]


@wrong("cached_loop", "never calls the model")
def without_the_model(model, prompt_ids, max_tokens):
    return [0] * max_tokens


@wrong("cached_loop", "stopped with")
def a_token_without_its_dimension(model, prompt_ids, max_tokens):
    cache, ids, generated = DynamicCache(), prompt_ids, []
    for _ in range(max_tokens):
        ids = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1].argmax(dim=-1)
        generated.append(ids.item())
    return generated
