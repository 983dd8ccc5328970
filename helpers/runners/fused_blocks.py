"""All blocks of GPT-2 in one call of a kernel, for an iteration in which a few sequences decode.

The lean forward makes a dozen calls per block, and memory waits for them. With one row, they take 12 to 20% of an
iteration of GPT-2 124M (AMD EPYC, Zen 5). On a GPU, CUDA graphs solve the same problem.

The one call is made only where the compiled kernels would compute every operation, and it gives the same bits.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers.activations import NewGELUActivation

from .. import kernels
from .attention import AttentionMetadata, AttentionSettings
from .kv_pool import KVPool
from .linear import FastLinear

MAX_ROWS = 8  # with more, the kernel for linear layers reads the weights several times


class FusedBlocks:
    """The blocks of a GPT-2, as the kernel reads them.

    Norms and biases are read where they are, so writing into them changes what is computed. They must not be replaced.

    Args:
        blocks: transformers' modules.
        settings: what each layer asks of attention.
        pool: the keys and values of all layers.
    """

    def __init__(self, blocks: nn.ModuleList, settings: Sequence[AttentionSettings], pool: KVPool):
        self.pool, self._settings, self._blocks = pool, settings, blocks
        self._norms = [norm for block in blocks for norm in (block.ln_1, block.ln_2)]
        self._linears = [layer for block in blocks for layer in linears_of(block)]
        self._rows = [rows for rows in range(1, MAX_ROWS + 1) if self._has_kernels(rows)]
        if self._rows:
            self._array = (kernels.GPT2Block * len(blocks))(*map(self._describe, range(len(blocks))))
            self._weights = [layer.weight for layer in self._linears]
            self._tensors = [parameter.detach() for parameter in blocks.parameters()]  # they keep the memory
            self._state = self._state_of_weights()

    def can_compute(self, rows: int) -> bool:
        """Return whether the kernel can compute this number of decodes, with the weights as they are now."""
        return rows in self._rows and self._state_of_weights() == self._state

    def __call__(self, hidden: torch.Tensor, row: AttentionMetadata) -> torch.Tensor:
        """Add the updates of all blocks but the last to the hidden states [rows, size]; return the last update."""
        first, segments = self._blocks[0], row.kernel_segments(with_chunks=False)
        sizes = self.pool.num_slots, first.mlp.c_fc.nf, first.attn.num_heads
        return kernels.gpt2_blocks(self._array, hidden, row.slots, segments, *sizes)

    def _has_kernels(self, rows: int) -> bool:
        """Return whether kernels compute every operation for this number of rows, as each layer asks for it."""
        tensors = [tensor for layer in self.pool.layers.values() for tensor in layer]
        tensors += [tensor for norm in self._norms for tensor in (norm.weight, norm.bias)]
        dtype, dim = self._linears[0].weight.dtype, self._blocks[0].attn.head_dim
        return (
            all(isinstance(one, FastLinear) and one.packed_weight(rows) and one.is_unchanged() for one in self._linears)
            and all(is_tanh_gelu(block.mlp.act) for block in self._blocks)
            and all(one.window is None and one.softcap is None and one.sinks is None for one in self._settings)
            and all(tensor.dtype is dtype and tensor.is_contiguous() for tensor in tensors)
            and not any(layer.inputs % 2 for layer in self._linears)  # or bfloat16 inputs would have to be padded
            and dim <= kernels.MAX_HEAD_DIM
        )

    def _state_of_weights(self) -> list[tuple[int, int]]:
        """Return what changes when a weight is written to or moved: then the packed copies are of other numbers.

        Only this is looked up at every iteration. Reading the weights of a model evicts Python's objects from the
        caches, so looking up all modules and parameters would take 5% of the time of a decode of GPT-2 124M.
        """
        return [(weight._version, weight.data_ptr()) for weight in self._weights]

    def _describe(self, layer: int) -> kernels.GPT2Block:
        """Return where the kernel finds the numbers of a block."""
        block, scale = self._blocks[layer], self._settings[layer].scaling
        c_attn, attention_c_proj, c_fc, mlp_c_proj = (
            (one.packed_weight(self._rows[0]).panels, one.bias) for one in linears_of(block)
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
