"""Load a model and its tokenizer: the embedded one by default, any causal language model by name or folder.

The claim: whatever `load_model` returns can be batched exactly by the four verbs. What cannot be (no
key-value cache, an encoder beside the decoder, positions that count the padding) is refused here, with a reason,
and never run wrongly. The families for which this is proven are listed in SUPPORT.md.
"""

import functools
import inspect
import os
import weakref
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from . import kv_cache

EMBEDDED = Path(__file__).parent / "tiny_model"
HINT = "load_model() without a name loads the embedded model, which needs no network."


def load_model(name: str | os.PathLike | None = None, device: str | None = None, dtype: torch.dtype | None = None):
    """Return `(model, tokenizer)`, ready for the four verbs: eval mode, left padding, a pad token.

    Args:
        name: a folder in the Hugging Face format or a Hub id such as "openai-community/gpt2". Without a name, the
            default pair: the embedded model, or what the environment variable COURSE_MODEL names; loaded only once.
        device: "cpu", "cuda", ...; CUDA when there is one, else the CPU.
        dtype: float32 by default, the precision in which batching is proven to change no token.

    Raises:
        ValueError: there is no such folder and the Hub does not have (or cannot be asked for) that name, or the
            model has no key-value cache, counts padding as text or is not a decoder-only language model.
    """
    if name is None:
        return _load_default(os.environ.get("COURSE_MODEL") or str(EMBEDDED), device, dtype)
    return _load(str(name), device, dtype)


def default_pair(model=None, tokenizer=None):
    """The model and tokenizer given, or `load_model()`'s where neither is."""
    if (model is None) != (tokenizer is None):
        raise ValueError("Give both a model and its tokenizer, or neither to use load_model()'s default pair.")
    if model is None:
        return load_model()
    if isinstance(model, PreTrainedModel):  # a model that somebody wrote for a lesson is for them to judge
        require_exact_batching(model)
    return model, tokenizer


def _load(name: str, device: str | None, dtype: torch.dtype | None):
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"Cannot load {name!r}: it is no model folder on this machine, and the Hugging Face Hub does not know it "
            f"or cannot be reached ({reason}). {HINT}"
        ) from error
    if config.is_encoder_decoder:
        raise ValueError(
            f"{name!r} ({config.model_type}) is an encoder-decoder; this course batches decoder-only models. {HINT}"
        )
    bar = logging.is_progress_bar_enabled()
    if Path(name).is_dir():  # there is nothing to wait for
        logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype or torch.float32).to(device).eval()
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"Cannot load {name!r} ({config.model_type}) as a causal language model: {reason} {HINT}"
        ) from error
    finally:
        if bar:
            logging.enable_progress_bar()
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    require_exact_batching(model)
    return model, tokenizer


_load_default = functools.lru_cache(maxsize=2)(_load)


def run_model(model, **inputs):
    """Call the model with those inputs that its family knows.

    BLOOM and MPT take no `position_ids` (ALiBi reads the mask), some families no `logits_to_keep`.
    """
    accepted = inspect.signature(model.forward).parameters
    with torch.no_grad():
        return model(**{name: value for name, value in inputs.items() if name in accepted})


_found_exact = weakref.WeakSet()


def require_exact_batching(model) -> None:
    """Raise a ValueError unless the four verbs give every request the tokens it gets alone. A model is asked once.

    Asked of the model itself, by five short forward passes, and not of a list of names: whoever brings a new
    architecture gets an answer, too.
    """
    if model in _found_exact:
        return
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder, and this course batches decoder-only models. {HINT}"
        )
    require_kv_cache(model)
    require_exact_padding(model)
    _found_exact.add(model)


def require_kv_cache(model) -> None:
    """Raise a ValueError unless every layer of the model keeps keys and values of [B, kv heads, T, head dim].

    State-space and recurrent models (Mamba, RWKV, RecurrentGemma) and the hybrids of both are found out by what they
    leave in the cache.
    """
    cache = kv_cache.new()
    try:
        _run_probe(model, cache, tokens=2)
        widths = [layer.keys.shape[2] for layer in cache.layers]
    except Exception as error:  # whatever a model without this kind of cache does when it is handed one
        widths, cause = [], error
    else:
        cause = None
    config = model.config.get_text_config()
    # In Gemma 3n and 4 the last layers read the keys of earlier ones and keep none of their own.
    layers = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    if widths != [2] * layers:
        raise ValueError(
            f"{type(model).__name__} does not keep keys and values for every token in every layer, and continuous "
            f"batching moves just these between batches. {HINT}"
        ) from cause


def require_exact_padding(model) -> None:
    """Raise a ValueError unless the model answers the same alone and behind padding that grows, as a merge makes it.

    Finds out models that number the columns instead of a row's own tokens, pads included (the decoders of BART,
    Whisper and their relatives, RoFormer): they take no `position_ids`, and the wrong tokens come without an error.
    """
    alone, padded = (_probe_twice(model, pads, more_pads) for pads, more_pads in ((0, 0), (3, 2)))
    # Wrong positions move logits by 0.5% to 90% of their range; rounding by less than 0.0001% in fp32.
    tolerance = (0.001 if alone.dtype == torch.float32 else 0.05) * (alone.max() - alone.min())
    if (alone - padded).abs().max() > tolerance:
        raise ValueError(
            f"{type(model).__name__} gives other tokens behind left padding than without, because it counts the "
            f"padding as positions: its requests cannot share a batch exactly. {HINT}"
        )


def _probe_twice(model, pads: int, more_pads: int) -> torch.Tensor:
    """Logits [2, vocabulary] of a prefill behind `pads` pads, and of a decode step after a merge adds `more_pads`."""
    cache = kv_cache.new()
    first = _run_probe(model, cache, tokens=5, pads=pads)
    second = _run_probe(model, kv_cache.left_pad(cache, more_pads), tokens=1, pads=pads + more_pads, past=5)
    return torch.cat([first, second])


def _run_probe(model, cache, tokens: int, pads: int = 0, past: int = 0) -> torch.Tensor:
    """Logits [1, vocabulary] behind the newest of some arbitrary tokens: the next `tokens` of 1, 2, 3, ..."""
    positions = torch.arange(past, past + tokens, device=model.device)[None]
    columns = (0 if past else pads, 0)  # after the prefill, the pads are in the cache
    mask = torch.ones(1, past + tokens, dtype=torch.long, device=model.device)
    return run_model(
        model,
        input_ids=pad(positions + 1, columns),
        position_ids=pad(positions, columns),
        attention_mask=pad(mask, (pads, 0)),
        past_key_values=cache,
        use_cache=True,
    ).logits[:, -1]


def context_length(model) -> int | None:
    """The most tokens (prompt and output) a request may have, or None where positions have no end (ALiBi).

    Two architectures treat long texts in another way and look at the whole batch to tell whether it is long. They take
    requests up to that point only, or one request would change what the others get.
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
    """The ids that end a text: the generation config's, as in `model.generate`, else the tokenizer's."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = tokenizer.eos_token_id
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)
