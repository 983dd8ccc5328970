"""Load models, call them, find out what they support, quantize them, and clone them without copying their weights.

loading.py             a model and its tokenizer, by name or folder
capabilities.py        what a model supports, asked of the model
running.py             one call for every family
cloning.py             a copy that shares the weights
quantization.py        linear layers that store integers
integer_products.py    linear layers that multiply integers by integers
compressed_tensors.py  folders of quantized weights
weight_update.py       new weights, all or none
"""

from .capabilities import (
    bytes_per_token,
    context_length,
    eos_token_ids,
    require_exact_batching,
    require_exact_logits,
    require_kv_cache,
    same_logits,
)
from .cloning import clone_sharing_weights
from .integer_products import integer_reference, round_inputs, unrounded_inputs
from .loading import EMBEDDED, default_pair, load_model
from .quantization import dequantized, quantize
from .running import run_model
from .weight_update import WeightUpdate
