"""Load a model and its tokenizer: the embedded one by default, any causal language model by name or folder.

Every model that `load_model` returns can be batched exactly by the four verbs. Other models are refused with a reason:
no KV cache, an encoder, or positions that count the padding. SUPPORT.md lists the families for which this is tested.
"""

import contextlib
import functools
import os
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from . import compressed_tensors
from .capabilities import HINT, require_exact_batching
from .quantization import check_format, quantize

EMBEDDED = Path(__file__).resolve().parents[1] / "tiny_model"
# Settings of a generation config that change the greedy tokens of `model.generate`, with the values that change none.
CHANGES_GREEDY_TOKENS = {
    "bad_words_ids": [], "begin_suppress_tokens": [], "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0, "exponential_decay_length_penalty": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "guidance_scale": 1.0, "min_length": 0, "min_new_tokens": 0,
    "no_repeat_ngram_size": 0, "num_beams": 1, "repetition_penalty": 1.0, "sequence_bias": {}, "suppress_tokens": [],
    "watermarking_config": None,
}  # fmt: skip
log = logging.get_logger(__name__)

if hasattr(os, "register_at_fork"):
    # A forked process has none of PyTorch's threads, and would wait for them forever. One thread needs no others.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def load_model(
    name: str | os.PathLike | None = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    weights: str | None = None,
):
    """Return `(model, tokenizer)`, ready for the four verbs: eval mode, left padding, a pad token.

    Args:
        name: a folder in the Hugging Face format, or a Hub id such as "openai-community/gpt2". Without a name, the
            default pair: the embedded model, or the one that the environment variable COURSE_MODEL names. The default
            pair is loaded only once for each device, dtype and format of weights.
        device: "cpu", "cuda", ...; by default CUDA if available, otherwise the CPU.
        dtype: float32 by default, the precision in which batching changes no token.
        weights: "int8" or "int4" to quantize the linear layers, one after the other (`quantization.py`). Memory then
            never holds more than the float weights and one quantized layer. Integers from a file stay as they are
            (`compressed_tensors.py`), and memory never holds more than these and one layer.

    Raises:
        ValueError: `weights` is unknown, or the integers of a file are of another format; there is no such folder, and
            the Hub does not know the name or cannot be reached; a file or a weight is missing or damaged; the files
            cannot be loaded as a causal language model; or the model has an encoder or no KV cache, or counts padding
            as positions.
    """
    if weights is not None:
        check_format(weights)
    if name is None:
        return _load_default(os.environ.get("COURSE_MODEL") or str(EMBEDDED), device, dtype, weights)
    return _load(str(name), device, dtype, weights)


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


def _load(name: str, device: str | None, dtype: torch.dtype | None, weights: str | None):
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    config = _load_config(name)
    if config.is_encoder_decoder:
        raise ValueError(
            f"{name!r} ({config.model_type}) is an encoder-decoder; this course batches decoder-only models. {HINT}"
        )
    tokenizer = _load_tokenizer(name)
    bar = logging.is_progress_bar_enabled()
    if Path(name).exists():  # a local folder loads too quickly for a bar
        logging.disable_progress_bar()
    try:
        model = _load_weights(name, config, dtype or torch.float32)
    except Exception as error:  # damaged files make torch, safetensors and transformers raise errors of many types
        raise _refusal(name, f" ({config.model_type}) as a causal language model", error) from error
    finally:
        if bar:
            logging.enable_progress_bar()
    model = model.to(device).eval()  # outside of the above: a device without memory is not a damaged file
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    require_exact_batching(model)
    settings = model.generation_config.to_dict()
    if ignored := [name for name, none in CHANGES_GREEDY_TOKENS.items() if settings.get(name) not in (None, none)]:
        log.warning(
            "The generation config of %r sets %s, which `model.generate` applies. Here only its EOS tokens apply: set "
            "what you need in each request's SamplingParams.", name, " and ".join(ignored),
        )  # fmt: skip
    return model if weights is None else quantize(model, weights), tokenizer


_load_default = functools.lru_cache(maxsize=2)(_load)


def _load_weights(name: str, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    quantization = getattr(config, "quantization_config", None)
    if quantization is None or quantization.get("quant_method") != compressed_tensors.METHOD:
        model, report = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, output_loading_info=True)
        if report["missing_keys"]:  # transformers draws them at random and only warns
            raise ValueError(f"it has no tensor for {min(report['missing_keys'])}, which {type(model).__name__} needs")
        return model
    model = compressed_tensors.load_compressed(name, config, dtype)
    with contextlib.suppress(OSError):  # without the file, the configuration's settings apply
        model.generation_config = GenerationConfig.from_pretrained(name)
    return model


def _load_config(name: str) -> PretrainedConfig:
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"Cannot load {name!r}: config.json does not exist in this folder, so it has no model. {HINT}")
    if not folder.is_dir() and (folder.is_absolute() or name.startswith((".", "~"))):
        raise ValueError(f"Cannot load {name!r}: there is no such folder. {HINT}")
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers and huggingface_hub check a file's values with errors of their own
        if folder.is_dir():
            advice = "Correct it, or copy the folder again."
            raise _refusal(name, ": its config.json cannot be used", error, advice) from error
        unknown = (
            ": it is not a model folder on this machine, and the Hugging Face Hub does not know it or is out of reach"
        )
        raise _refusal(name, unknown, error) from error


def _load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", trust_remote_code=False)
        if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):  # what transformers makes of no files at all
            raise ValueError("there are no tokens")
    except Exception as error:  # the tokenizers library raises plain exceptions
        advice = "It needs tokenizer.json and tokenizer_config.json: tokenizer.save_pretrained(folder) writes both."
        raise _refusal(name, ": its tokenizer is missing or damaged", error, advice) from error
    return tokenizer


def _refusal(name: str, problem: str, error: Exception, advice: str = HINT) -> ValueError:
    if "trust_remote_code" in str(error):
        return ValueError(
            f"Cannot load {name!r}: it needs code from its own folder, which is not run here. Take a model whose "
            f"family transformers has, such as a successor: SUPPORT.md lists them."
        )
    is_bare = isinstance(error, LookupError | TypeError | AttributeError)  # their texts alone say too little
    reason = " ".join((f"{type(error).__name__}: {error}" if is_bare else str(error)).split())
    return ValueError(f"Cannot load {name!r}{problem} ({reason[:300].rstrip('.')}). {advice}")
