"""How an engine runs: its rows, its budgets, its policy, and the way in which it executes an iteration."""

from dataclasses import dataclass

import torch

from .scheduler import FirstComeFirstServed


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs.

    Attributes:
        max_batch_size: rows: how many sequences run at once.
        max_tokens_per_step: how many tokens an iteration reads at most, in decodes and prefills together.
        max_input_tokens, max_output_tokens: longer requests are refused; None for whatever the model's context holds.
        policy: a name of `scheduler.POLICIES`, or an object that schedules.
        mixed_batches: prefills and decodes share an iteration, else they take turns.
        chunked_prefill: a prompt may be read in pieces, else whole or not at all.
        execution: "ragged", without any padding, for models that can be run so; "padded", on the four verbs, for all
            others; "auto" takes the first where it can.
        block_size: tokens in a block of the KV cache, in ragged execution.
        num_blocks: blocks in all; None for as many as all rows need at their longest, up to 1 GiB of them.
        prefix_caching: prompts that begin like an earlier one need not read that part again.
        prepack: on a CPU, keep a second copy of the weights, in the order that is read fastest (`prepacked.py`); None
            does so for weights of up to 1 GiB.
        kernels: on a CPU, compile the two loops in `kernels/`, once, for linear layers that are prepacked and for the
            attention of decodes in ragged execution; None does so where it can be, False leaves all to PyTorch, and
            with True an engine that cannot have them is refused.
        dtype: run a copy of the model in this dtype; None for the model as it is.
        trace_length: remember only the last so many iterations, for an engine that runs for ever; None for all.

    Raises:
        ValueError: a value that has no meaning.
    """

    max_batch_size: int = 8
    max_tokens_per_step: int = 512
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    policy: str | FirstComeFirstServed = "fcfs"
    mixed_batches: bool = True
    chunked_prefill: bool = True
    execution: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    prefix_caching: bool = True
    prepack: bool | None = None
    kernels: bool | None = None
    dtype: torch.dtype | None = None
    trace_length: int | None = None

    def __post_init__(self):
        counts = ("max_batch_size", "max_tokens_per_step", "block_size")
        limits = ("max_input_tokens", "max_output_tokens", "num_blocks", "trace_length")
        for name in counts + tuple(name for name in limits if getattr(self, name) is not None):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} is a whole number of at least 1, not {getattr(self, name)!r}.")
        if self.execution not in ("auto", "ragged", "padded"):
            raise ValueError(f'execution is "auto", "ragged" or "padded", not {self.execution!r}.')
