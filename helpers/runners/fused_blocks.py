"""All blocks of GPT-2 in one call of a kernel, for an iteration in which a few sequences decode.

The lean forward makes a dozen calls per block, and memory waits for them. With one row, they take 12 to 20% of an
iteration of GPT-2 124M (AMD EPYC, Zen 5). On a GPU, CUDA graphs solve the same problem.

The one call is made only where a compiled kernel exists for every operation, and it gives the bits that these kernels
give in many calls. In each linear layer, the kernel must be the fastest for some number of rows up to `FEW_ROWS`. It
need not be for all of them: the measured times of a layer vary by more than a tenth, and one call saves that much. The
more rows there are, the smaller is the share that it saves. Up to `MAX_ROWS` rows, it is made if the kernel is the
fastest in all layers.
"""

import copy
from collections.abc import Sequence

import torch
from torch import nn
from transformers.activations import NewGELUActivation

from .. import kernels
from .attention import AttentionMetadata, AttentionSettings
from .kv_pool import KVPool
from .linear import FastLinear

FEW_ROWS = 8  # with more, the kernel for linear layers reads the weights several times
MAX_ROWS = 32  # the most that take the choice for 16


class FusedBlocks:
    """The blocks of a GPT-2, as the kernel reads them.

    Norms and biases are read where they are, so writing into them changes what is computed. Norms must not be replaced.

    Args:
        blocks: transformers' modules.
        settings: what each layer asks of attention.
        pool: the keys and values of all layers.

    Attributes:
        max_rows: the most rows that one call computes; 0 if there are operations without a kernel.
    """

    def __init__(self, blocks: nn.ModuleList, settings: Sequence[AttentionSettings], pool: KVPool):
        self.pool, self._settings, self._blocks = pool, settings, blocks
        self._norms = [norm for block in blocks for norm in (block.ln_1, block.ln_2)]
        self._linears = [layer for block in blocks for layer in linears_of(block)]
        self.max_rows = self._rows_of_kernels() if self._has_kernels() else 0
        if self.max_rows:
            self._array = (kernels.GPT2Block * len(blocks))(*map(self._describe, range(len(blocks))))
            self._tensors = [parameter.detach() for parameter in blocks.parameters()]  # they keep the memory

    def __deepcopy__(self, memo: dict) -> "FusedBlocks":
        """Describe the copied blocks and pool: addresses cannot be copied."""
        return type(self)(*(copy.deepcopy(one, memo) for one in (self._blocks, self._settings, self.pool)))

    def can_compute(self, rows: int) -> bool:
        """Return whether one call can compute this many decodes. It cannot once a linear layer's weight has changed.

        Only this is looked up at every iteration. Reading the weights of a model evicts Python's objects from the
        caches, so looking up all modules and parameters would take 5% of the time of a decode of GPT-2 124M.
        """
        return rows <= self.max_rows and all(layer.is_unchanged() for layer in self._linears)

    def __call__(self, hidden: torch.Tensor, row: AttentionMetadata) -> torch.Tensor:
        """Add the updates of all blocks but the last to the hidden states [rows, size]; return the last update."""
        segments, inner = row.kernel_segments(with_chunks=False), self._linears[-1].inputs
        heads, num_slots, _ = self.pool.layers[0][0].shape
        return kernels.gpt2_blocks(self._array, hidden, row.slots, segments, num_slots, inner, heads)

    def _has_kernels(self) -> bool:
        """Return whether kernels compute every operation as each layer asks for it."""
        packed = [isinstance(layer, FastLinear) and layer.packed_weight(FEW_ROWS) for layer in self._linears]
        if not all(packed) or not all(type(norm) is nn.LayerNorm for norm in self._norms):
            return False
        caches = [tensor for layer in self.pool.layers.values() for tensor in layer]
        norms = [tensor for norm in self._norms for tensor in (norm.weight, norm.bias) if tensor is not None]
        size, inner = packed[0].inputs, packed[-1].inputs
        shapes = [(size, 3 * size), (size, size), (size, inner), (inner, size)]
        return (
            all(layer.is_unchanged() for layer in self._linears)
            and all(is_tanh_gelu(block.mlp.act) for block in self._blocks)
            and all(one.window is None and one.softcap is None and one.sinks is None for one in self._settings)
            and all(one.dtype is packed[0].panels.dtype and one.is_contiguous() for one in caches + norms)
            and [(one.inputs, one.outputs) for one in packed] == shapes * len(self._blocks)
            and inner % 2 == 0  # or bfloat16 inputs would have to be padded
            and all(one.shape == caches[0].shape and kernels.is_supported(one, one, one) for one in caches)
        )

    def _rows_of_kernels(self) -> int:
        """Return the most rows that one call computes where all operations have kernels.

        Threads share attention by heads. Unequal shares matter more, the more rows there are.
        """
        heads, _, _ = self.pool.layers[0][0].shape
        products = [product for layer in self._linears for product in layer.products[FEW_ROWS + 1 : MAX_ROWS + 1]]
        wins = all(getattr(one, "func", None) is kernels.linear for one in products)
        return MAX_ROWS if wins and heads % torch.get_num_threads() == 0 else FEW_ROWS

    def _describe(self, layer: int) -> kernels.GPT2Block:
        """Return where the kernel finds the numbers of a block."""
        block, scale = self._blocks[layer], self._settings[layer].scaling
        c_attn, attention_c_proj, c_fc, mlp_c_proj = (
            (one.packed_weight(FEW_ROWS).panels, one.bias) for one in linears_of(block)
        )
        ln_1, ln_2 = ((norm.weight, norm.bias) for norm in (block.ln_1, block.ln_2))
        return kernels.gpt2_block(
            (ln_1, c_attn, attention_c_proj, ln_2, c_fc, mlp_c_proj),
            self.pool.layers[layer],
            (block.ln_1.eps, block.ln_2.eps),
            block.attn.head_dim**-0.5 if scale is None else scale,
        )


def linears_of(block: nn.Module) -> tuple[nn.Module, ...]:
    """Return the linear layers of a block, in the order in which they compute."""
    return block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj


def is_tanh_gelu(activation: nn.Module) -> bool:
    """Return whether an activation is GELU in the tanh form, which the kernels compute."""
    return type(activation) is NewGELUActivation or (type(activation) is nn.GELU and activation.approximate == "tanh")
