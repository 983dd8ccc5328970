"""Find out what a model supports by running it, rather than from a list of names.

The checks take a few short forward passes. For a model that cannot be batched exactly, they raise a ValueError with the
reason, so they cover new architectures, too.
"""

import weakref

import torch
from torch.nn.functional import pad

from .. import kv_cache
from .integer_products import unrounded_inputs
from .running import run_model

HINT = "load_model() without a name loads the embedded model, which needs no network."


_found_exact = weakref.WeakSet()


@unrounded_inputs()
def require_exact_batching(model) -> None:
    """Raise a ValueError unless the four verbs give every request the tokens that it gets alone.

    The check takes eight short forward passes and runs once per model.
    """
    if model in _found_exact:
        return
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder, and this course batches decoder-only models. {HINT}"
        )
    require_kv_cache(model)
    require_exact_logits(model)
    _found_exact.add(model)


def require_kv_cache(model) -> None:
    """Raise a ValueError unless every layer of the model stores keys and values [B, kv heads, T, head dim].

    State-space and recurrent models (Mamba, RWKV, RecurrentGemma) and hybrids are recognized by what they leave in the
    cache.
    """
    cache, cause = kv_cache.new(), None
    try:
        _run_probe(model, cache, tokens=2)
        widths = [layer.keys.shape[2] for layer in cache.layers]
    except Exception as error:  # a model without this kind of cache may raise anything
        widths, cause = [], error
    config = model.config.get_text_config()
    # In Gemma 3n and 4, the last layers read the keys of earlier ones and store none of their own.
    layers = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    if widths != [2] * layers:
        message = str(cause).strip().partition("\n")[0].rstrip(".")
        failure = f" A forward pass with a cache of them failed: {message}." if cause else ""
        raise ValueError(
            f"{type(model).__name__} does not keep keys and values for every token in every layer, and continuous "
            f"batching moves exactly these between batches.{failure} {HINT}"
        ) from cause


def require_exact_logits(model) -> None:
    """Raise a ValueError unless logits stay the same with padding, and when they are computed from cached keys.

    The padding is on the left, and it grows as in a merge. The decoders of BART and Whisper and RoFormer take no
    `position_ids`. They number all columns, pads included, instead of a row's own tokens. In encoders such as BERT, a
    token attends to later ones, too, so its cached keys are no longer those of the longer text. All of these would give
    wrong tokens without an error.
    """
    alone, padded = (_probe_twice(model, pads, more_pads) for pads, more_pads in ((0, 0), (3, 2)))
    at_once = _run_probe(model, kv_cache.new(), tokens=6)[-1:]
    changed_by_padding = not same_logits(padded, alone)
    if alone.isnan().any():
        problem = (
            f"gives logits that are not numbers (NaN): its weights are damaged, or its numbers exceed the range of "
            f"{model.dtype}, and float32 would hold them"
        )
    elif changed_by_padding and model.training:
        problem = "is in training mode, in which dropout changes its tokens: call model.eval()"
    elif changed_by_padding:
        problem = (
            "generates other tokens behind left padding than without, because it counts the padding as positions: its "
            "requests cannot share a batch exactly"
        )
    elif not is_causal(model):
        problem = (
            "is no causal language model: a change of later tokens changes the logits of earlier ones, as in encoders"
        )
    elif not same_logits(alone[1:], at_once):
        problem = "generates other tokens from cached keys than from a whole text: its KV cache cannot be used"
    else:
        return
    raise ValueError(f"{type(model).__name__} {problem}. {HINT}")


def is_causal(model) -> bool:
    """Return whether the logits after a token stay the same when later tokens change, as they do not in encoders."""
    first, second = (_run_probe(model, kv_cache.new(), tokens=6, changed=changed)[:3] for changed in (0, 3))
    # Attention may be weak, so the tolerance is tighter than in `same_logits`. Most causal models give the same bits.
    # In a mixture of experts, the later tokens change the sizes of products, and with them the rounding.
    tolerance = (1e-5 if first.dtype == torch.float32 else 0.004) * (first.max() - first.min())
    return bool((first - second).abs().max() <= tolerance)


def same_logits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether logits are equal up to rounding; NaN equals nothing."""
    # Wrong positions change logits by 0.5% to 90% of their range, rounding by less than 0.0001% in float32.
    tolerance = (0.001 if expected.dtype == torch.float32 else 0.05) * (expected.max() - expected.min())
    return bool((actual - expected).abs().max() <= tolerance)


def _probe_twice(model, pads: int, more_pads: int) -> torch.Tensor:
    """Return logits [2, vocabulary]: of a prefill after `pads` pads, then of a decode after `more_pads` more."""
    cache = kv_cache.new()
    first = _run_probe(model, cache, tokens=5, pads=pads)
    second = _run_probe(model, kv_cache.left_pad(cache, more_pads), tokens=1, pads=pads + more_pads, past=5)
    return torch.cat([first[-1:], second])


def _run_probe(model, cache, tokens: int, pads: int = 0, past: int = 0, changed: int = 0) -> torch.Tensor:
    """Return logits [T, vocabulary] after each of the next T tokens of the sequence 1, 2, 3, ...

    T is `tokens`, plus `pads` in a prefill. The last `changed` tokens are 1 instead.
    """
    positions = torch.arange(past, past + tokens, device=model.device)[None]
    input_ids = torch.where(positions < past + tokens - changed, positions + 1, 1)
    columns = (0 if past else pads, 0)  # after the prefill, the pads are in the cache
    mask = torch.ones(1, past + tokens, dtype=torch.long, device=model.device)
    return run_model(
        model,
        input_ids=pad(input_ids, columns),
        position_ids=pad(positions, columns),
        attention_mask=pad(mask, (pads, 0)),
        past_key_values=cache,
        use_cache=True,
    ).logits[0]


def context_length(model) -> int | None:
    """Return the most tokens (prompt and output) of a request, or None if there is no limit (BLOOM).

    Two architectures treat long texts differently, and the whole batch decides whether its texts count as long. Their
    requests are limited to the length of short texts; otherwise one request would change the tokens of others.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        # Phi-3 (128k) and Phi-4-mini: past their original length the largest position of a batch changes the rotation
        # of all, and the keys in the cache keep the old one (huggingface/transformers#33129).
        return rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
    if getattr(config, "attn_temperature_tuning", False):
        # Llama 4: the temperature of attention rises with the column, pads included.
        return min(config.max_position_embeddings, int(config.floor_scale) - 1)
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)


def eos_token_ids(model, tokenizer) -> set[int]:
    """Return the ids of the EOS tokens: the generation config's, as in `model.generate`, else the tokenizer's."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = tokenizer.eos_token_id
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


def bytes_per_token(model) -> int:
    """Return how many bytes one token of a sequence takes in the KV cache: its keys and values in all layers.

    A forward pass measures this, so variants such as grouped-query attention are taken into account.
    """
    cache = kv_cache.new()
    _run_probe(model, cache, tokens=1)
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
