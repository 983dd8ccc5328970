"""Everything that the lessons import. `import helpers` loads no model; `load_model()` does, once."""

from .batching import Request, filter_batch, generate_next_token, init_batch, merge_batches
from .engine import Engine
from .engine_config import EngineConfig
from .generation import Generation, generate_alone, generate_continuous, generate_static
from .models import load_model
from .outputs import RequestOutput
from .sampling import SamplingParams
from .trace import Trace

__all__ = [
    "Engine",
    "EngineConfig",
    "Generation",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "Trace",
    "filter_batch",
    "generate_alone",
    "generate_continuous",
    "generate_next_token",
    "generate_static",
    "init_batch",
    "load_model",
    "merge_batches",
]
