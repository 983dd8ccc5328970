"""Everything that the lessons import. `import helpers` loads no model; `load_model()` does, once."""

from .batching import Request, filter_batch, generate_next_token, init_batch, merge_batches
from .generation import Generation, RequestOutput, generate_alone, generate_continuous, generate_static
from .models import load_model
from .trace import Trace

__all__ = [
    "Generation",
    "Request",
    "RequestOutput",
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
