"""Load a model and its tokenizer: the embedded one by default, any causal language model by name or folder.

Every model that `load_model` returns can be batched exactly by the four verbs. Other models are refused with a reason:
no KV cache, an encoder, or positions that count the padding. SUPPORT.md lists the families for which this is tested.
"""

import functools
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from .capabilities import HINT, require_exact_batching

EMBEDDED = Path(__file__).resolve().parents[1] / "tiny_model"


def load_model(name: str | os.PathLike | None = None, device: str | None = None, dtype: torch.dtype | None = None):
    """Return `(model, tokenizer)`, ready for the four verbs: eval mode, left padding, a pad token.

    Args:
        name: a folder in the Hugging Face format or a Hub id such as "openai-community/gpt2". Without a name, the
            default pair: the embedded model, or the one that the environment variable COURSE_MODEL names. The default
            pair is loaded only once for each device and dtype.
        device: "cpu", "cuda", ...; by default CUDA if available, otherwise the CPU.
        dtype: float32 by default, the precision in which batching changes no token.

    Raises:
        ValueError: there is no such folder, and the Hub does not know the name or cannot be reached; the files cannot
            be loaded as a causal language model; or the model has an encoder or no KV cache, or counts padding as
            positions.
    """
    if name is None:
        return _load_default(os.environ.get("COURSE_MODEL") or str(EMBEDDED), device, dtype)
    return _load(str(name), device, dtype)


def default_pair(model=None, tokenizer=None):
    """Return the given model and tokenizer, or `load_model()`'s default pair if neither is given.

    Raises:
        ValueError: only one of them is given, or the model cannot be batched exactly.
    """
    if (model is None) != (tokenizer is None):
        raise ValueError("Give both a model and its tokenizer, or neither to use load_model()'s default pair.")
    if model is None:
        return load_model()
    if isinstance(model, PreTrainedModel):  # a model written for a lesson is not checked
        require_exact_batching(model)
    return model, tokenizer


def _load(name: str, device: str | None, dtype: torch.dtype | None):
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"Cannot load {name!r}: it is not a model folder on this machine, and the Hugging Face Hub does not know "
            f"it or cannot be reached ({reason}). {HINT}"
        ) from error
    if config.is_encoder_decoder:
        raise ValueError(
            f"{name!r} ({config.model_type}) is an encoder-decoder; this course batches decoder-only models. {HINT}"
        )
    bar = logging.is_progress_bar_enabled()
    if Path(name).is_dir():  # a local folder loads too quickly for a bar
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
