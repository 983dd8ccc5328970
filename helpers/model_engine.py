"""`Engine`: a `BaseEngine` that chooses a runner for a model, and finds out what the core needs to know about it."""

import copy
import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from .base_engine import BaseEngine
from .engine import EngineConfig, EngineRequest, ModelInfo, Prompt, Sequence
from .models import (
    WeightUpdate,
    clone_sharing_weights,
    context_length,
    default_pair,
    eos_token_ids,
    quantize,
    round_inputs,
)
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
        if config.compute is not None:
            model = round_inputs(model)
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
        self._pending_update: WeightUpdate | None = None
        self._old_requests: set[EngineRequest] = set()  # with the old weights, while an update is pending
        self._held_back: list[Sequence] = []
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
        if self._pending_update is not None:
            self._finish_update()
        if [weight._version for weight in self._weights] != self._versions:
            self._forget_computed()
        super().iterate()

    def update_weights(self, weights, running: str = "recompute") -> None:
        """Write new weights into `engine.model`, between two iterations; adapters stay as they are.

        Cached prefixes are forgotten, and all copies of the weights (reordered, quantized) are made anew. A model that
        was given to the engine shares these tensors, unless the configuration has a `dtype`; with quantized weights,
        it shares all but those of the linear layers.

        Args:
            weights: a model of the same kind, or its `state_dict`, with all weights. Other dtypes are cast.
            running: "recompute" lets unfinished requests go on with the new weights: they compute the keys and values
                of their tokens again, and get the tokens that an engine made now would give them after these. "finish"
                lets requests that run, or that have tokens already, finish with the old weights. Meanwhile, all others
                wait. A later call takes the place of one that still waits.

        Raises:
            ValueError: a name is unknown, or a weight is missing or has another shape. Nothing has then changed.
        """
        if running not in ("recompute", "finish"):
            raise ValueError(f'running must be "recompute" or "finish", not {running!r}.')
        update, old = WeightUpdate(self.model, weights), set()
        if running == "finish":
            running_now = set(self.scheduler.running)
            begun = (
                sequence for sequence in self.scheduler.unfinished if sequence in running_now or sequence.generated
            )
            old = {sequence.request for sequence in begun}
        if old:
            update.snapshot()
        self._pending_update, self._old_requests = update, old
        self._finish_update()

    def _finish_update(self) -> None:
        """Write the pending weights, or hold new requests back while old ones run."""
        if any(sequence.request in self._old_requests for sequence in self.scheduler.unfinished):
            for sequence in list(self.scheduler.waiting):
                if sequence.request not in self._old_requests:
                    self._held_back.append(sequence)  # first: an interrupt after the next line would lose it
                    self.scheduler.hold(sequence)
            return
        with self.undisturbed():
            self._pending_update.write()
            self._pending_update = None
            while self._held_back:
                self.scheduler.resume(self._held_back.pop())
            self._forget_computed()

    def _forget_computed(self) -> None:
        """Use nothing any more that was computed with other weights."""
        versions = [weight._version for weight in self._weights]
        with self.undisturbed():
            self.forget_keys()
            for sequence in self.scheduler.unfinished:
                for feature in sequence.request.features:
                    feature.weights_changed(sequence.request)
            self._versions = versions

    def forget_keys(self) -> None:
        """Use no keys and values any more: running requests compute theirs again, and cached prefixes are forgotten."""
        for sequence in reversed(list(self.scheduler.running)):
            self.scheduler.preempt(sequence)
            self.trace.free([sequence.label])
        if self.block_manager is not None:
            self.block_manager.forget_cached()

    @staticmethod
    def make_runner(model, tokenizer, config: EngineConfig) -> PaddedRunner | RaggedRunner:
        """Return a runner for a model: the one that it supports, made fast where that is possible.

        Raises:
            ValueError: the model cannot be run as configured, or a setting needs a part of the package that is missing.
        """
        runner = make_runner(model, tokenizer, config)
        if config.kv_cache != "auto" and _is_installed("quantized_kv_cache"):
            from .features.quantized_kv_cache.pool import quantize_kv_cache

            quantize_kv_cache(runner, model, config)
        if config.tensor_parallel_size > 1 and _is_installed("tensor_parallel"):
            from .features.tensor_parallel.runner import split_runner

            return split_runner(runner, model, config, make_fast)
        return make_fast(runner, config)

    def load_adapter(self, name: str, folder: str | os.PathLike) -> None:
        """Load a LoRA adapter, with which requests then run that name it: `add_request(..., adapter=name)`.

        All adapters share the model's weights and every forward pass. Except for near ties, and in float32, a request
        gets the tokens of the model with its adapter merged. It shares no cached prefix with another adapter.

        Args:
            name: a name that no loaded adapter has.
            folder: has `adapter_config.json` and `adapter_model.safetensors`, as the library PEFT writes them.

        Raises:
            ValueError: the adapter cannot be read, is for another model, changes more than linear layers, or has a name
                that is in use; the model runs padded, or batch-invariant. Nothing has then changed.
        """
        self._adapters("load_adapter").load(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Let no new request use an adapter. Those that have it finish with it; then its memory is freed.

        Raises:
            ValueError: no adapter of this name is loaded.
        """
        self._adapters("unload_adapter").unload(name)

    def _adapters(self, method: str) -> Any:
        for feature in self.validator.features:
            if feature.name == "adapters":
                return feature
        raise ValueError(f"{method} needs helpers/features/adapters, which is missing.")

    def beam_search(self, prompt: Prompt, *args, **settings):
        """Search for the most probable continuations of a prompt; see `features/beam_search.py`."""
        try:
            from .features.beam_search import beam_search
        except ImportError as error:
            raise ValueError(f"beam_search needs a part of helpers/features that is missing: {error}.") from error
        return beam_search(self, prompt, *args, **settings)


def make_fast(runner: PaddedRunner | RaggedRunner, config: EngineConfig) -> PaddedRunner | RaggedRunner:
    """Return a runner that gives the same results sooner, with `helpers/fast` if it is there.

    Raises:
        ValueError: the configuration requires what is missing here.
    """
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


def _is_installed(feature: str) -> bool:
    """Return whether a feature is there; `check_needs` refuses the settings of missing ones."""
    return all(find_spec(f"{__package__}.{part}") is not None for part in ("features", f"features.{feature}"))
