"""The settings of an engine: its rows, its budgets, its policy, and how its iterations are computed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .settings import Bound, needed, note_needs

AT_LEAST_ONE = Bound(1, integer=True)


@dataclass(frozen=True)
class EngineConfig:
    """The settings of an engine.

    Attributes:
        max_batch_size: the number of rows: how many sequences run at once.
        max_tokens_per_step: the most tokens that an iteration computes, decodes and prefills together.
        policy: a name in `engine.POLICIES`, or an object with a method `order`.
        mixed_batches: whether prefills and decodes share an iteration; otherwise they take turns.
        chunked_prefill: whether a prompt may be computed in chunks; otherwise it is computed in a single iteration.
        execution: "ragged" computes no padding and requires a model that supports it; "padded" computes left-padded
            batches, as the four verbs do; "auto" is ragged where possible, otherwise padded.
        block_size: tokens per block of the KV cache, in ragged execution.
        num_blocks: the number of blocks, in ragged execution; None for as many as all rows need at the model's context
            length, up to 1 GiB.
        prefix_caching: whether a request reuses the keys and values of an earlier one with the same prefix.
        linear_backend: what computes the linear layers on a CPU: "auto" chooses by measurement
            (`fast/linear_choice.py`); "pytorch", "compiled" or "compiled_unpacked" computes all of them. "compiled"
            keeps second copies of the weights, in an order that is read faster. "auto" does so only in models of up to
            1 GiB or an eighth of the machine's memory.
        kernels: on a CPU, whether to compile the kernels in `kernels/` for attention and elementwise operations; None
            does so where possible, False uses PyTorch's operators, True raises an error if the kernels are unavailable.
            Linear layers are set by `linear_backend`; "auto" may compile a kernel for them, too. With False and
            `linear_backend="pytorch"`, the model's own modules run, and nothing of `fast/` does.
        batch_invariant: whether a request's logits must not depend on its batch, bit for bit
            (`fast/batch_invariant.py`). It requires a CPU, a C++ compiler and a model that runs ragged.
        dtype: the torch dtype of the engine's copy of the model; None to run the model as it is.
        weights: "int8" or "int4" to store the weights of the linear layers as integers (`models/quantization.py`). A
            decode then reads fewer bytes. In float32, and except for near ties, the engine generates the tokens of
            `dequantized(model, weights)`. None stores the weights in the model's dtype.
        compute: "int8" to round the inputs of these layers, too, and multiply integers by integers, which takes less
            time where many rows are computed (`models/integer_products.py`). It requires int8 weights. The engine
            generates the tokens of `integer_reference(model)`, except for near ties. None multiplies floats.
        kv_cache: "int8" stores keys and values as integers with a scale per token and KV head, so that the same memory
            holds about twice the tokens (`features/quantized_kv_cache/`). In float32, and except for near ties, the
            engine generates the tokens of `model.generate(..., past_key_values=RoundedKVCache())`. It requires a model
            that runs ragged. "auto" stores them in the model's dtype.
        tensor_parallel_size: over how many processes the model is split (`features/tensor_parallel/`), each with its
            share of the weights and of the KV cache. More than 1 requires a model that runs ragged, and whose heads can
            be shared equally.
        trace_length: how many of the latest forward passes the trace keeps, for an engine that never stops; None for
            all of them.
        speculative: what proposes drafts for speculative decoding (`features/speculation/`): "ngram" looks them up in
            the request's own text, "draft" runs a smaller model, and an object with a method `propose(token_ids, k)` is
            asked as it is; None for no drafts. It requires a model that runs ragged.
        num_speculative_tokens: the most draft tokens of a sequence in one iteration.
        draft_model: for "draft": a model, or a name or folder for `load_model`; it needs the tokenizer of the large
            one. None for the draft model that comes with the embedded model.
        scheduler_cls: a subclass of `Scheduler`, or another callable that takes the same arguments and returns a
            scheduler; None for `Scheduler`.

    Raises:
        ValueError: a value is outside its range.
    """

    max_batch_size: int = 8
    max_tokens_per_step: int = 512
    policy: str | Any = "fcfs"
    mixed_batches: bool = True
    chunked_prefill: bool = True
    execution: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    prefix_caching: bool = True
    linear_backend: str = "auto"
    kernels: bool | None = None
    batch_invariant: bool = False
    dtype: Any = None
    weights: str | None = None
    compute: str | None = None
    kv_cache: str = field(default="auto", metadata=needed("quantized_kv_cache"))
    tensor_parallel_size: int = field(default=1, metadata=needed("tensor_parallel"))
    trace_length: int | None = None
    speculative: str | Any | None = field(default=None, metadata=needed("speculation"))
    num_speculative_tokens: int = 4
    draft_model: Any = None
    scheduler_cls: Callable[..., Any] | None = None

    def __post_init__(self):
        counts = (
            "max_batch_size",
            "max_tokens_per_step",
            "block_size",
            "tensor_parallel_size",
            "num_speculative_tokens",
        )
        limits = ("num_blocks", "trace_length")
        for name in counts + tuple(name for name in limits if getattr(self, name) is not None):
            AT_LEAST_ONE.check(name, getattr(self, name))
        for name in ("mixed_batches", "chunked_prefill", "prefix_caching", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        if self.kernels is not None and not isinstance(self.kernels, bool):
            raise ValueError(f"kernels must be True, False or None, not {self.kernels!r}.")
        if self.max_tokens_per_step < self.max_batch_size:
            raise ValueError(
                f"{self.max_batch_size} rows that all decode compute {self.max_batch_size} tokens per iteration, but "
                f"max_tokens_per_step is {self.max_tokens_per_step}: allow more tokens or fewer rows."
            )
        if self.execution not in ("auto", "ragged", "padded"):
            raise ValueError(f'execution must be "auto", "ragged" or "padded", not {self.execution!r}.')
        if self.weights not in (None, "int8", "int4"):
            raise ValueError(f'weights must be "int8", "int4" or None, not {self.weights!r}.')
        if self.compute not in (None, "int8"):
            raise ValueError(f'compute must be "int8" or None, not {self.compute!r}.')
        if self.compute is not None and self.weights != "int8":
            raise ValueError(f'compute="int8" needs weights="int8", not {self.weights!r}: set both, or neither.')
        if self.kv_cache not in ("auto", "int8"):
            raise ValueError(f'kv_cache must be "auto" or "int8", not {self.kv_cache!r}.')
        is_proposer = callable(getattr(self.speculative, "propose", None))
        if self.speculative not in (None, "ngram", "draft") and not is_proposer:
            raise ValueError(
                f'speculative must be "ngram", "draft", an object with a method `propose(token_ids, k)`, or None, '
                f"not {self.speculative!r}."
            )
        if self.draft_model is not None and self.speculative != "draft":
            raise ValueError('A draft_model has no effect unless speculative is "draft": set that, too.')
        note_needs(self)
