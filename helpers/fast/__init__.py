"""The same results sooner on a CPU: kernels, the forward pass written out, and the fastest product for each layer.

Nothing here decides what is computed. Without this folder, every model runs as PyTorch and transformers run it.

acceleration.py       makes a runner fast, with all of these
attention.py          attention of all sequences in one call of a kernel, where it is faster
decoder_blocks.py     what the decoder blocks of a family of models consist of
recognition.py        which models are run by these descriptions
executor.py           their forward pass
plain_executor.py     computes the blocks one operation after the other
fused_executor.py     computes all blocks in one call
adapter_tables.py     describes the adapters of a pass for this call
linear.py             linear layers, quantized ones too, that use the fastest backend
linear_backends.py    the backends
linear_choice.py      which of them is fastest, by measurement
quantized_linear.py   the kernels for quantized layers
batch_invariant.py    the same bits in every batch, on request
"""

from .quantized_linear import use_kernels

use_kernels()
