"""Choose how a model is run: ragged where the model can be, padded everywhere else; on a CPU with prepacked weights."""

from transformers import PreTrainedModel

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
    if isinstance(model, PreTrainedModel):
        shell = own_shell(model)  # what is changed from here on is the engine's alone
        weights = sum(parameter.nbytes for parameter in model.parameters())
        wanted = weights <= MAX_PREPACKED_BYTES if config.prepack is None else config.prepack
        packed = wanted and prepack(shell)
        model = shell if ragged or packed else model
    return RaggedExecution(model, blocks) if ragged else PaddedExecution(model, tokenizer)


def _blocks(model, config: EngineConfig) -> BlockManager:
    """As many blocks as were asked for, or as all rows need at their longest, if there is memory for that."""
    count = config.num_blocks
    if count is None:
        longest = context_length(model) or MAX_KV_BYTES
        needed = -(-longest // config.block_size) * config.max_batch_size
        count = max(1, min(needed, MAX_KV_BYTES // (config.block_size * bytes_per_token(model))))
    return BlockManager(count, config.block_size, config.prefix_caching)
