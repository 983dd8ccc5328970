"""A runner whose model adds the products of adapters, in the rows of the sequences that have one.

Where all decoder blocks are computed in one call (`fast/fused_executor.py`), that call adds them. Elsewhere the linear
layers are called as usual, whatever product was chosen for them and however their weights are stored, and then the
small products are added to what they return.
"""

import copy
from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ...engine import Plan, RunnerOutput
from ...engine.plan import Clock
from ...models.quantization import QuantizedLinear, sizes_of
from ...runners import RaggedRunner
from ...runners.kv_pool import KVPool
from ...runners.trial import BLOCK_SIZE, NUM_BLOCKS, trial_passes
from .grouped_products import AdapterStack, RowGroups
from .peft_folder import Adapter, LayerInfo


class AdaptedRunner:
    """A `Runner` that runs another one, and adds the products of adapters meanwhile.

    Args:
        runner: a ragged runner, which is changed: its linear layers call this object.
        model: the model whose clone it runs.

    Attributes:
        layers: the linear layers that an adapter may change, by their paths in the model.
    """

    def __init__(self, runner: RaggedRunner, model: nn.Module):
        self.runner = runner
        self.layers = _adaptable_layers(runner, model)
        self._adapted: dict[str, _AdaptedLayer] = {}
        self._slots: list[Adapter | None] = []
        self._rank = 0
        self._chunks: list[tuple[Adapter | None, int]] | None = None  # the adapter and the tokens of each one of a pass
        self._groups: RowGroups | None = None

    def __getattr__(self, name: str):
        if name == "runner":  # not set yet, while a copy is made
            raise AttributeError(name)
        return getattr(self.runner, name)

    def run(self, plan: Plan, clock: Clock) -> RunnerOutput:
        """Compute a plan's chunks, each with its sequence's adapter."""
        chunks = [(chunk.sequence.request.notes.get("adapters"), chunk.tokens) for chunk in plan.chunks]
        if not any(adapter for adapter, _ in chunks):
            return self.runner.run(plan, clock)
        try:
            self._begin_pass(chunks)
            return self.runner.run(plan, clock)
        finally:
            self._begin_pass(None)

    def _begin_pass(self, chunks: list[tuple[Adapter | None, int]] | None) -> None:
        self._chunks, self._groups = chunks, None
        if hasattr(self.runner.call_model, "adapters"):  # the written-out forward pass
            self.runner.call_model.adapters = chunks

    def adapt(self, adapter: Adapter) -> None:
        """Let the layers that an adapter changes ask for its products."""
        for path in adapter.matrices:
            if path not in self._adapted:
                layer = self.runner.model.get_submodule(path)
                self._adapted[path] = _AdaptedLayer(layer, self.layers[path], self._rows)

    def forget(self, adapter: Adapter) -> None:
        """Free the memory that an adapter takes here; the other adapters are stacked anew when they run."""
        if adapter in self._slots:
            self._slots = []
            for layer in self._adapted.values():
                layer.stack = None

    # --- slots ------------------------------------------------------------------------------------------------------

    def _rows(self) -> RowGroups | None:
        """Return the rows of a pass with adapters, grouped when its first layer is called; None for other passes."""
        if self._groups is None and self._chunks is not None:
            self._groups = self._group(self._chunks)
        return self._groups

    def _group(self, chunks: list[tuple[Adapter | None, int]]) -> RowGroups:
        """Give each adapter of a pass a slot, and group the rows by slots."""
        wanted = dict.fromkeys(adapter for adapter, _ in chunks if adapter is not None)
        rank, missing = max(adapter.rank for adapter in wanted), wanted.keys() - set(self._slots)
        if missing:
            free = [slot for slot, adapter in enumerate(self._slots) if adapter not in wanted]
            if rank > self._rank or len(missing) > len(free):
                self._restack(list(wanted))
            else:
                for slot, adapter in zip(free, (added for added in wanted if added in missing), strict=False):
                    self._put(slot, adapter)
        slot_of = {adapter: slot for slot, adapter in enumerate(self._slots) if adapter is not None}
        parts = [(slot_of.get(adapter), tokens) for adapter, tokens in chunks]
        return RowGroups(parts, rank, self.runner.model.device)

    def _restack(self, wanted: list[Adapter]) -> None:
        """Make stacks for the adapters of a pass: with twice the slots, if there were too few for them."""
        self._rank = max(adapter.rank for adapter in wanted)
        num_slots = max(len(self._slots), 1)
        while num_slots < len(wanted):
            num_slots *= 2
        self._slots = [None] * num_slots
        for layer in self._adapted.values():
            layer.stack = AdapterStack(layer.info, num_slots, self._rank)
        for slot, adapter in enumerate(wanted):
            self._put(slot, adapter)

    def _put(self, slot: int, adapter: Adapter) -> None:
        self._slots[slot] = adapter
        for path, layer in self._adapted.items():
            if layer.stack is None:  # adapted since the others were stacked
                layer.stack = AdapterStack(layer.info, len(self._slots), self._rank)
            layer.stack.put(slot, adapter.matrices.get(path))


class _AdaptedLayer:
    """Takes the place of a linear layer's `forward`, and adds the products of adapters to its outputs.

    Args:
        rows: returns which rows have which adapter, or None outside of passes with adapters.

    Attributes:
        stack: the matrices of the adapters; None while no pass has needed them.
    """

    def __init__(self, layer: nn.Module, info: LayerInfo, rows: Callable[[], RowGroups | None]):
        self.info, self.stack, self._rows = info, None, rows
        self._usual: Callable[[torch.Tensor], torch.Tensor] = layer.forward
        layer.forward = self.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's outputs [..., out] for inputs [..., in]."""
        y, rows = self._usual(x), self._rows()
        if rows is None or self.stack is None or self.stack.filled.isdisjoint(rows.slots):
            return y
        inputs, y = x.reshape(-1, x.shape[-1]), y.contiguous()
        if len(inputs) != rows.num_rows:
            raise RuntimeError(f"A layer was called with {len(inputs)} of {rows.num_rows} rows.")
        self.stack.add_products(inputs, y.view(-1, y.shape[-1]), rows)
        return y


# --- which layers can be adapted --------------------------------------------------------------------------------------


def _adaptable_layers(runner: RaggedRunner, model: nn.Module) -> dict[str, LayerInfo]:
    """Return the linear layers that are called with all rows of a pass, in their order, by path.

    A layer with other inputs, such as an expert to which only some tokens are routed, could not tell whose they are. A
    layer that is never called, because other code reads its weight, could not add anything. A trial shows both.
    """
    named = model.named_modules()
    paths = [path for path, layer in named if type(layer) in (nn.Linear, Conv1D) or isinstance(layer, QuantizedLinear)]
    candidates = {path: runner.model.get_submodule(path) for path in paths}
    candidates = {path: layer for path, layer in candidates.items() if "forward" not in vars(layer)}  # replaced
    calls = {path: [] for path in candidates}
    pass_sizes: list[int] = []
    trial_runner = copy.copy(runner)
    trial_runner.pool, trial_runner.block_size = KVPool(NUM_BLOCKS, BLOCK_SIZE), BLOCK_SIZE

    def note_size(token_ids: torch.Tensor, *others) -> torch.Tensor:
        pass_sizes.append(len(token_ids))
        return runner.call_model(token_ids, *others)

    def note_call(path: str, _layer: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        calls[path].append((len(pass_sizes), inputs[0].numel() // inputs[0].shape[-1]))

    trial_runner.call_model = note_size
    hooks = [layer.register_forward_pre_hook(partial(note_call, path)) for path, layer in candidates.items()]
    try:
        for _ in trial_passes(trial_runner.forward):
            pass
    finally:
        for hook in hooks:
            hook.remove()
    return {path: _info(model.get_submodule(path)) for path in candidates if _saw_all(calls[path], pass_sizes)}


def _saw_all(calls: Collection[tuple[int, int]], pass_sizes: list[int]) -> bool:
    """Return whether a layer was called in every pass, and always with as many rows as the pass has tokens."""
    passes = {number for number, _ in calls}
    return len(passes) == len(pass_sizes) and all(rows == pass_sizes[number - 1] for number, rows in calls)


def _info(layer: nn.Linear | Conv1D | QuantizedLinear) -> LayerInfo:
    outputs, inputs = sizes_of(layer)
    if isinstance(layer, QuantizedLinear):
        return LayerInfo(inputs, outputs, layer.dtype, layer.words.device)
    return LayerInfo(inputs, outputs, layer.weight.dtype, layer.weight.device)
