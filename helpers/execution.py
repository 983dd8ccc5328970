"""Choose how a model is run: ragged where the model can be, padded everywhere else; on a CPU with prepacked weights.

Compiled kernels make both faster, where they can be had.
"""

from transformers import PreTrainedModel

from . import kernels
from .block_manager import BlockManager
from .engine_config import EngineConfig
from .kv_cache import bytes_per_token
from .models import context_length
from .padded import PaddedExecution
from .prepacked import prepack
from .ragged import RaggedExecution, own_shell, supports_ragged

MAX_KV_BYTES = 2**30  # what an engine sets aside for keys and values, unless it is told how many blocks
MAX_PREPACKED_BYTES = 2**30  # larger models are not copied, unless the engine is told to


def make_execution(model, tokenizer, config: EngineConfig) -> PaddedExecution | RaggedExecution:
    """How this model is run: ragged if it is wished or can be, else padded."""
    ragged = config.execution != "padded" and supports_ragged(model)
    if config.execution == "ragged" and not ragged:
        raise ValueError(
            f"{type(model).__name__} does not hand its attention to transformers' attention interface, or answers "
            f'otherwise there, so it cannot be run ragged: use execution="padded" or "auto".'
        )
    blocks = _blocks(model, config) if ragged else None
    compiled = _compiled(model, config)
    if isinstance(model, PreTrainedModel):
        shell = own_shell(model)  # what is changed from here on is the engine's alone
        weights = sum(parameter.nbytes for parameter in model.parameters())
        wanted = weights <= MAX_PREPACKED_BYTES if config.prepack is None else config.prepack
        packed = wanted and prepack(shell, compiled=compiled)
        model = shell if ragged or packed else model
    if not ragged:
        return PaddedExecution(model, tokenizer)
    return RaggedExecution(model, blocks, compiled)


def _compiled(model, config: EngineConfig) -> bool:
    """Whether the kernels are wished and can be had; they are compiled if this is the first time that somebody asks."""
    if config.kernels is False or not isinstance(model, PreTrainedModel):
        return False
    problem = kernels.unavailable(model.dtype, model.device)
    if problem and config.kernels:
        raise ValueError(f"No kernels can be compiled here: {problem}. With kernels=None, PyTorch does their work.")
    return problem is None


def _blocks(model, config: EngineConfig) -> BlockManager:
    """As many blocks as were asked for, or as all rows need at their longest, if there is memory for that."""
    count = config.num_blocks
    if count is None:
        longest = context_length(model) or MAX_KV_BYTES
        needed = -(-longest // config.block_size) * config.max_batch_size
        count = max(1, min(needed, MAX_KV_BYTES // (config.block_size * bytes_per_token(model))))
    return BlockManager(count, config.block_size, config.prefix_caching)
