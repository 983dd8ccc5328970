"""`Engine`: an `EngineCore` that chooses a runner for a model, and finds out what the core needs to know about it."""

import copy
import time
from collections.abc import Callable

import torch

from .engine import EngineConfig, EngineCore, ModelInfo
from .engine.beam_search import beam_search
from .models import clone_sharing_weights, context_length, default_pair, eos_token_ids, quantize
from .runners import make_draft_proposer, make_runner


class Engine(EngineCore):
    """Runs requests on a model, one iteration at a time.

    Args:
        model, tokenizer: `load_model()`'s default pair if omitted.
        config: see `EngineConfig`.
        clock: returns seconds; times in outputs and in the trace are counted from the engine's first request.

    Attributes:
        model: the model, in the configured dtype and with the configured weights.
        runner: computes the iterations; `runner.not_ragged_because` is the reason if it is padded, otherwise None.

    Raises:
        ValueError: the model cannot be batched exactly, or a setting is outside its range or unavailable.
    """

    def __init__(
        self,
        model=None,
        tokenizer=None,
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        model, tokenizer = default_pair(model, tokenizer)
        config = config or EngineConfig()
        dtype = config.dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype must be a floating-point torch dtype such as torch.bfloat16, not {dtype!r}.")
        if config.weights is not None:  # before the dtype: bfloat16 would round the weights a second time
            model = quantize(clone_sharing_weights(model), config.weights)
        if dtype is not None and dtype != model.dtype:
            model = copy.deepcopy(model).to(dtype)  # the caller's model stays as it is
        self.model = model
        info = ModelInfo(
            vocab_size=model.config.get_text_config().vocab_size,
            context_length=context_length(model),
            eos_token_ids=frozenset(eos_token_ids(model, tokenizer)),
        )
        runner = make_runner(model, tokenizer, config)
        proposer = make_draft_proposer(model, tokenizer, config) if config.speculative == "draft" else None
        super().__init__(runner, tokenizer, info, config, clock, proposer)

    beam_search = beam_search  # in engine/beam_search.py
