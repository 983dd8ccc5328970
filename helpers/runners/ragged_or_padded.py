"""Choose how a model is run: ragged where the model supports it, otherwise padded, with the reason."""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from ..engine import EngineConfig
from ..models import bytes_per_token, clone_sharing_weights, context_length, same_logits, unrounded_inputs
from .layer_masks import UnsupportedAttention, check_layer_masks
from .padded import PaddedRunner
from .ragged import RaggedRunner
from .trial import BLOCK_SIZE, NUM_BLOCKS, trial_passes, trial_texts

MAX_KV_BYTES = 2**30  # size of the KV cache, unless the configuration sets num_blocks
log = logging.getLogger(__name__)
_found_ragged = weakref.WeakSet()  # the modules of models that passed their trial


def make_runner(model, tokenizer, config: EngineConfig) -> PaddedRunner | RaggedRunner:
    """Return the runner for a model.

    Raises:
        ValueError: the configuration requires ragged execution, but the model does not support it.
    """
    if config.execution == "padded":
        reason = 'the configuration says execution="padded"'
    elif reason := why_not_ragged(model):
        if config.execution == "ragged":
            raise ValueError(f'{type(model).__name__} cannot run ragged: {reason}. Use execution="padded" or "auto".')
        log.warning("%s runs padded, which is slower: %s.", type(model).__name__, reason)
    if reason:
        return PaddedRunner(model, tokenizer, reason)
    blocks = num_blocks(model, config, bytes_per_token)
    return RaggedRunner(clone_sharing_weights(model), blocks, config.block_size)


def num_blocks(model, config: EngineConfig, bytes_of: Callable[[Any], int]) -> int:
    """Return the configured number of blocks, or enough for all rows at full length, within MAX_KV_BYTES.

    Args:
        bytes_of: given the model, returns the bytes of a token's keys and values; called only if they are needed.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    longest = context_length(model) or MAX_KV_BYTES
    needed = -(-longest // config.block_size) * config.max_batch_size
    return max(1, min(needed, MAX_KV_BYTES // (config.block_size * bytes_of(model))))


@unrounded_inputs()
def why_not_ragged(model) -> str | None:
    """Return why a model cannot run ragged, or None if it can.

    Two prompts share the row of three short forward passes. One of them is computed in two chunks, so the second pass
    holds a decode and a prefill; the third one holds two decodes. Up to rounding, the logits must be those that the
    model gives each prompt alone. The prompts are shorter than most sliding windows, so `check_layer_masks` checks
    longer distances. A model that has passed is tried again only if it has new modules since.
    """
    if not isinstance(model, PreTrainedModel):
        return "it is not a transformers model"
    if _found_ragged.issuperset(model.modules()):
        return None
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # warnings about a mere trial would mislead
    try:
        check_layer_masks(model)
        ragged, alone = _try_ragged(model), _try_alone(model)
    except UnsupportedAttention as reason:
        return str(reason)
    except Exception as error:  # a model that cannot run this way may raise anything
        message = (str(error).strip().splitlines() or ["no message"])[0]
        return f"a trial on a few tokens failed with {type(error).__name__}: {message}"
    finally:
        transformers_logging.set_verbosity(verbosity)
    if same_logits(ragged, alone):
        _found_ragged.update(model.modules())
        return None
    difference = (ragged - alone).abs().max()
    return f"in one row with others, its logits differ by {difference:.2g} from those it gives alone"


def _try_ragged(model) -> torch.Tensor:
    """Return the logits of the trial, [5, vocabulary]."""
    runner = RaggedRunner(clone_sharing_weights(model), NUM_BLOCKS, BLOCK_SIZE)
    passes = []
    for logits in trial_passes(runner.forward):
        if not runner.pool.layers:
            raise UnsupportedAttention("its layers do not use transformers' attention interface")
        passes.append(logits)
    return torch.cat(passes)


def _try_alone(model) -> torch.Tensor:
    """Return logits [5, vocabulary] after the same tokens, each text in a forward pass of its own."""
    with torch.no_grad():
        return torch.cat([model(torch.tensor([text], device=model.device)).logits[0, -1:] for text in trial_texts()])
