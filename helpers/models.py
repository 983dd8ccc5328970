"""Load a model and its tokenizer: the embedded one by default, any causal language model by name or folder.

The claim: whatever `load_model` returns can be batched exactly by the four verbs. What cannot be (no
key-value cache, an encoder beside the decoder) is refused here, with a reason, and never run wrongly.
"""

import functools
import inspect
import os
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

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
            model has no key-value cache or is not a decoder-only language model.
    """
    if name is None:
        return _load_default(os.environ.get("COURSE_MODEL") or str(EMBEDDED), device, dtype)
    return _load(str(name), device, dtype)


def default_pair(model=None, tokenizer=None):
    """The model and tokenizer given, or `load_model()`'s where neither is."""
    if (model is None) != (tokenizer is None):
        raise ValueError("Give both a model and its tokenizer, or neither to use load_model()'s default pair.")
    return (model, tokenizer) if model is not None else load_model()


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
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"Cannot load {name!r} ({config.model_type}) as a causal language model: {reason} {HINT}"
        ) from error
    finally:
        if bar:
            logging.enable_progress_bar()
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    require_kv_cache(model)
    return model, tokenizer


_load_default = functools.lru_cache(maxsize=2)(_load)


def run_model(model, **inputs):
    """Call the model with those inputs that its family knows.

    BLOOM and MPT take no `position_ids` (ALiBi reads the mask), some families no `logits_to_keep`.
    """
    accepted = inspect.signature(model.forward).parameters
    with torch.no_grad():
        return model(**{name: value for name, value in inputs.items() if name in accepted})


def require_kv_cache(model) -> None:
    """Raise a ValueError unless every layer of the model keeps keys and values of [B, kv heads, T, head dim].

    Asked of the model itself, by one forward pass over two tokens: state-space and recurrent models (Mamba, RWKV,
    RecurrentGemma) and the hybrids of both are found out by what they leave in the cache, not by a list of names.
    """
    two = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    cache = DynamicCache()
    try:
        run_model(model, input_ids=two, attention_mask=torch.ones_like(two), past_key_values=cache, use_cache=True)
        shapes = [layer.keys.shape[2] for layer in cache.layers]
    except Exception as error:  # whatever a model without this kind of cache does when it is handed one
        shapes, cause = [], error
    else:
        cause = None
    layers = model.config.get_text_config().num_hidden_layers
    if shapes != [2] * layers:
        raise ValueError(
            f"{type(model).__name__} does not keep keys and values for every token in every layer, and continuous "
            f"batching moves just these between batches. {HINT}"
        ) from cause


def context_length(model) -> int | None:
    """The most tokens (prompt and output) a request may have, or None where positions have no end (ALiBi)."""
    config = model.config.get_text_config()
    return getattr(config, "max_position_embeddings", None)


def eos_token_ids(model, tokenizer) -> set[int]:
    """The ids that end a text: the generation config's, as in `model.generate`, else the tokenizer's."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = tokenizer.eos_token_id
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)
