"""Compute all blocks of a decoder in one call of a kernel (`kernels/blocks.cpp`).

The plain executor makes a dozen calls per block, and memory waits for them. On a GPU, CUDA graphs solve the same
problem. The one call gives the bits that the kernels give in many calls.

It is made only where a compiled kernel exists for every operation, and only up to the number of rows for which the
kernels multiply most of the weights fastest (`linear_choice.py`). Other backends may multiply the rest a bit faster,
but the many calls around their products would take longer.
"""

import copy
import math
import operator
from collections.abc import Sequence

import torch
from torch import nn

from ..models.integer_products import IntegerLinear, rounds_inputs
from ..models.quantization import QuantizedLinear, weight_of
from ..runners.attention import AttentionMetadata, AttentionSettings
from ..runners.kv_pool import KVPool
from . import kernels
from .adapter_tables import AdapterTables
from .attention import kernel_segments, kernel_wins_chunks
from .decoder_blocks import Decoder, activation_kind, epsilon
from .linear import FastLinear, is_plain
from .linear_backends import bytes_of, kind_of
from .linear_choice import ROWS
from .plain_executor import Rotary
from .quantized_linear import packed

Weight = kernels.PackedWeight | kernels.QuantizedWeight


class FusedExecutor:
    """The blocks of a decoder, as the kernel reads them.

    Norms, biases and integers are read where they are, so writing into them changes what is computed.

    Args:
        decoder: the modules.
        settings: what each layer asks of attention.
        pool: the keys and values of all layers.

    Attributes:
        adapters: describes those of a pass.
        max_rows: the most rows that one call computes; 0 if there are operations without a kernel.
    """

    def __init__(self, decoder: Decoder, settings: Sequence[AttentionSettings], pool: KVPool):
        self.decoder, self.settings, self._max_rows = decoder, settings, 0
        linears = [layer for block in decoder.blocks for layer in block.linears]
        max_rows = most_rows([layer for layer in linears if isinstance(layer, FastLinear)])
        packed = _pack(linears) if max_rows else []
        self._packed = dict(zip(linears, packed, strict=True)) if packed else {}
        if packed:
            self._max_rows = max_rows
            norms = [norm for block in decoder.blocks for norm in block.norms.values()]
            self._parameters = _Parameters([getattr(layer, "layer", layer) for layer in linears], norms)
            self._rounds = packed[0].rounds
            self.adapters = AdapterTables(decoder, decoder.final_norm.weight.dtype)
        self.use(pool)

    def use(self, pool: KVPool) -> None:
        """Read and write the keys and values of another pool from now on."""
        self.pool, blocks = pool, self.decoder.blocks
        self.max_rows = self._max_rows if self._has_kernels(list(self._packed.values())) else 0
        if self.max_rows:
            self._blocks = (kernels.Block * len(blocks))(*map(self._describe, range(len(blocks))))
            self._sizes = self._common_sizes()

    def __deepcopy__(self, memo: dict) -> "FusedExecutor":
        """Describe the copied blocks and pool: addresses cannot be copied."""
        return type(self)(*(copy.deepcopy(part, memo) for part in (self.decoder, self.settings, self.pool)))

    def is_outdated(self) -> bool:
        """Return whether weights have changed since they were packed, and can be packed anew.

        They can once every layer has made its products anew, which it does when it is called for the first time.
        """
        if self._parameters.are_unchanged():
            return False
        return all(layer.is_unchanged() for layer in self._packed if isinstance(layer, FastLinear))

    def renewed(self) -> "FusedExecutor":
        """Return the same with the weights as they are now."""
        return type(self)(self.decoder, self.settings, self.pool)

    def can_compute(self, hidden: torch.Tensor, row: AttentionMetadata) -> bool:
        """Return whether one call can compute this row. It cannot once a parameter has been replaced.

        Reading the weights of a model evicts Python's objects from the caches, so little is looked up here.
        """
        rows = len(hidden)
        if not 0 < rows <= self.max_rows or hidden.dtype is not self.pool.layers[0][0].dtype:
            return False
        if self._rounds and not rounds_inputs():  # a trial
            return False
        slots = row.slots.tolist()  # PyTorch's operators raise an error for wrong ones, and the kernel would crash
        if len(slots) != rows or min(slots) < 0 or max(slots) >= self.pool.num_slots:
            return False
        return (len(row.segments) == rows or self._wins_chunks(hidden.dtype)) and self._parameters.are_unchanged()

    def __call__(
        self,
        hidden: torch.Tensor,
        rotary: Rotary | None,
        row: AttentionMetadata,
        adapted: Sequence[kernels.AdaptedRows] = (),
    ) -> torch.Tensor:
        """Add the updates of all blocks but the last to the hidden states [rows, size]; return the last update.

        `adapted` describes the rows that have adapters.
        """
        segments = kernel_segments(row, with_chunks=True)
        self._sizes.rotated = rotary[0].shape[2] if rotary else 0
        return kernels.compute_blocks(self._blocks, self._sizes, hidden, rotary, row.slots, segments, adapted)

    def _wins_chunks(self, dtype: torch.dtype) -> bool:
        return kernel_wins_chunks(self.decoder.heads, self.decoder.kv_heads, self.decoder.head_dim, dtype)

    def _common_sizes(self) -> kernels.Sizes:
        decoder, last = self.decoder, self._packed[self.decoder.blocks[0].mlp_output]
        return kernels.Sizes(
            size=last.outputs,
            inner=last.inputs,
            heads=decoder.heads,
            kv_heads=decoder.kv_heads,
            dim=decoder.head_dim,
            slots=self.pool.num_slots,
            activation=activation_kind(decoder.blocks[0].activation),
            gated=decoder.family.is_gated,
            parallel=decoder.family.is_parallel,
            interleaved=decoder.family.is_interleaved,
        )

    def _has_kernels(self, packed: list[Weight]) -> bool:
        """Return whether kernels compute every operation as each layer asks for it."""
        if not packed:
            return False
        decoder, dtype = self.decoder, self.decoder.final_norm.weight.dtype
        biases = [layer.bias for layer in self._packed if layer.bias is not None]
        floats = [weight for weight in packed if isinstance(weight, kernels.PackedWeight)]
        norms = [norm for block in decoder.blocks for norm in block.norms.values()]
        weights = [tensor for norm in norms for tensor in norm._parameters.values() if tensor is not None]
        cache = (decoder.kv_heads, self.pool.num_slots, decoder.head_dim)
        query = torch.empty(decoder.heads, 1, decoder.head_dim, dtype=dtype)
        activations = {activation_kind(block.activation) for block in decoder.blocks}
        return (
            # Odd bfloat16 inputs are padded.
            all(weight.panels.dtype is dtype and weight.inputs % 2 == 0 for weight in floats)
            and len({weight.rounds for weight in packed}) == 1  # neighbors have the same inputs
            and all(tensor.dtype is dtype and tensor.is_contiguous() for tensor in weights + biases)
            and all(attention.softcap is None and attention.sinks is None for attention in self.settings)
            and len(activations) == 1
            and None not in activations
            and all(vectors.shape == cache for layer in self.pool.layers.values() for vectors in layer)
            and all(kernels.is_supported(query, *layer) for layer in self.pool.layers.values())
            and [(weight.inputs, weight.outputs) for weight in packed] == self._shapes(packed) * len(decoder.blocks)
        )

    def _shapes(self, packed: list[Weight]) -> list[tuple[int, int]]:
        """Return the (inputs, outputs) of a block's linear layers, given those of the first block."""
        decoder, family, last = self.decoder, self.decoder.family, packed[len(self.decoder.blocks[0].linears) - 1]
        size, inner = last.outputs, last.inputs
        qkv = [count * decoder.head_dim for count in (decoder.heads, decoder.kv_heads, decoder.kv_heads)]
        mlp = [inner] * (1 + family.is_gated)
        qkv, mlp = (
            sizes if len(sizes) == len(names) else [sum(sizes)]
            for sizes, names in ((qkv, family.qkv), (mlp, family.mlp_inputs))
        )
        inputs = [(size, outputs) for outputs in qkv], [(size, outputs) for outputs in mlp]
        return [*inputs[0], (decoder.heads * decoder.head_dim, size), *inputs[1], (inner, size)]

    def _describe(self, layer: int) -> kernels.Block:
        """Return where the kernel finds the numbers of a block."""
        block, settings = self.decoder.blocks[layer], self.settings[layer]

        def linears(*modules: nn.Module) -> list[kernels.Linear]:
            return [self._packed[module].describe(module.bias) for module in modules]

        kind = self.decoder.family.norm_kind
        norms = {
            name: kernels.Norm.from_tensors(norm.weight, getattr(norm, "bias", None), epsilon(norm), kind)
            for name, norm in block.norms.items()
        }
        return kernels.Block(
            **norms,
            qkv=(kernels.Linear * 3)(*linears(*block.qkv)),
            attention_output=linears(block.attention_output)[0],
            mlp_inputs=(kernels.Linear * 2)(*linears(*block.mlp_inputs)),
            mlp_output=linears(block.mlp_output)[0],
            keys=kernels.Cache.from_vectors(self.pool.layers[layer][0]),
            values=kernels.Cache.from_vectors(self.pool.layers[layer][1]),
            scale=self.decoder.head_dim**-0.5 if settings.scaling is None else settings.scaling,
            window=kernels.NO_WINDOW if settings.window is None else settings.window,
            rotation=self.decoder.rotations[layer],
        )


class _Parameters:
    """The tensors of layers and norms, which are read where they are, except for float weights, which were copied."""

    def __init__(self, layers: list[nn.Module], norms: list[nn.Module]):
        kept = [tensors for module in layers + norms for tensors in (module._parameters, module._buffers)]
        self._where = [(tensors, name) for tensors in kept for name in tensors]
        self._parameters = [parameters[name] for parameters, name in self._where]
        # While these tensors exist, nothing else gets their addresses.
        self._memory = [tensor.detach() for tensor in self._parameters if tensor is not None]
        self._weights = [layer.weight for layer in layers if not isinstance(layer, QuantizedLinear)]
        self._state = self._addresses_and_versions()

    def are_unchanged(self) -> bool:
        """Return whether no parameter was replaced or moved, and no copied weight was written to."""
        now = [parameters[name] for parameters, name in self._where]
        return all(map(operator.is_, now, self._parameters)) and self._addresses_and_versions() == self._state

    def _addresses_and_versions(self) -> tuple[list[int], list[int]]:
        addresses = [tensor.data_ptr() for tensor in self._parameters if tensor is not None]
        return addresses, [weight._version for weight in self._weights]


def _pack(linears: list[nn.Module]) -> list[Weight]:
    """Return the weights of all layers as the kernel reads them; an empty list if it cannot read some."""
    if not all(map(can_be_read, linears)):
        return []
    layers = [getattr(layer, "layer", layer) for layer in linears]
    kinds = {kind_of(layer)[:2] for layer in layers}
    if len(kinds) > 1 or kernels.unavailable(*kinds.pop()):
        return []
    return list(map(_weight, linears, layers))


def _weight(module: nn.Module, layer: nn.Module) -> Weight:
    """Return the weight of a layer; `module` may be a `FastLinear` around it that has a copy already."""
    if isinstance(layer, QuantizedLinear):
        return packed(layer, isinstance(layer, IntegerLinear))
    kept = module.packed_weight() if isinstance(module, FastLinear) else None
    return kept or kernels.pack(weight_of(layer))


def can_be_read(layer: nn.Module) -> bool:
    """Return whether a linear layer has a weight that the kernel can read."""
    if isinstance(layer, FastLinear):
        return layer.is_unchanged()
    return is_plain(layer) or type(layer) in (QuantizedLinear, IntegerLinear)


def most_rows(layers: list[FastLinear]) -> float:
    """Return for how many rows the kernels compute most of the weights of layers that are large enough for a choice."""
    size = sum(bytes_of(layer.layer) for layer in layers)
    for index, rows in enumerate(ROWS):
        if 2 * sum(bytes_of(layer.layer) for layer in layers if layer.backends[index] == "compiled") <= size:
            return math.isqrt(ROWS[index - 1] * rows) if index else 0  # others have the choice for the nearest number
    return math.inf
