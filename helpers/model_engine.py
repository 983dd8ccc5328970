"""`Engine`: a `BaseEngine` that chooses a runner for a model, and finds out what the core needs to know about it."""

import copy
import time
from collections.abc import Callable
from importlib.util import find_spec

import torch

from .base_engine import BaseEngine
from .engine import EngineConfig, ModelInfo, Prompt
from .models import clone_sharing_weights, context_length, default_pair, eos_token_ids, quantize
from .runners import PaddedRunner, RaggedRunner, make_runner


class Engine(BaseEngine):
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
        runner = self.make_runner(model, tokenizer, config)
        self._weights = [weight for weight in model.parameters() if not weight.is_inference()]  # these have no version
        self._versions = [weight._version for weight in self._weights]
        super().__init__(runner, tokenizer, info, config, clock)

    def iterate(self) -> None:
        """Run one iteration with the weights as they are now.

        If they were changed in place since the last one (`load_state_dict`, an optimizer's step), nothing computed with
        the old ones is used: cached prefixes are forgotten, and running requests compute their tokens' keys and values
        again. From then on, each request gets the tokens that an engine made now would give it after its tokens so far.
        A write through `weight.data` bypasses PyTorch's version counters, so it is not noticed; write to the weight
        itself, under `torch.no_grad()`. With `EngineConfig(dtype=...)` or `weights=...`, the engine has weights of its
        own: those of `engine.model`.
        """
        versions = [weight._version for weight in self._weights]
        if versions != self._versions:
            self._forget_computed()
            self._versions = versions
        super().iterate()

    def _forget_computed(self) -> None:
        with self.undisturbed():
            for sequence in reversed(list(self.scheduler.running)):
                self.scheduler.preempt(sequence)
                self.trace.free([sequence.label])
            for sequence in self.scheduler.unfinished:
                for feature in sequence.request.features:
                    feature.weights_changed(sequence.request)
            if self.block_manager is not None:
                self.block_manager.forget_cached()

    @staticmethod
    def make_runner(model, tokenizer, config: EngineConfig) -> PaddedRunner | RaggedRunner:
        """Return a runner for a model: the one that it supports, made fast where that is possible.

        Raises:
            ValueError: the model cannot be run as configured, or a setting needs a part of the package that is missing.
        """
        runner = make_runner(model, tokenizer, config)
        if config.kernels is False and config.linear_backend == "pytorch" and not config.batch_invariant:
            return runner  # the model's own modules
        if find_spec(f"{__package__}.fast") is not None:
            from .fast.acceleration import accelerate

            return accelerate(runner, config)
        if config.kernels or config.batch_invariant or config.linear_backend not in ("auto", "pytorch"):
            raise ValueError(
                f"kernels={config.kernels}, batch_invariant={config.batch_invariant} or linear_backend="
                f"{config.linear_backend!r} needs helpers/fast, which is missing: leave out what is not the default."
            )
        return runner

    def beam_search(self, prompt: Prompt, *args, **settings):
        """Search for the most probable continuations of a prompt; see `features/beam_search.py`."""
        try:
            from .features.beam_search import beam_search
        except ImportError as error:
            raise ValueError(f"beam_search needs a part of helpers/features that is missing: {error}.") from error
        return beam_search(self, prompt, *args, **settings)
