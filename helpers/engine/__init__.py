"""One plain request, from `add_request` to its last output, in an order in which it can be read.

core.py           add_request, abort_request, step, generate, stream
validation.py     refuses requests that can never run
sequence.py       the tokens of one output, and how many of them are computed
plan.py           the work of one iteration: chunks of sequences; what a runner does with it
scheduler.py      plans how many tokens each sequence computes, and applies the results
policies.py       the order in which waiting requests are admitted, and their queue
block_manager.py  the blocks of the KV cache: block tables, prefix sharing, eviction
outputs.py        what is new for each request, and which caller gets it
hooks.py          where features attach

Nothing here imports torch, transformers or numpy. `../runners/` executes the plans on a model.
"""

from ..engine_config import EngineConfig
from ..sampling_params import SamplingParams
from .block_manager import BlockManager, UnlimitedMemory
from .core import EngineCore
from .hooks import Feature, LogitsRule
from .outputs import RequestOutput
from .plan import Chunk, ForwardPass, ModelInfo, Plan, Runner, RunnerOutput, SampledToken
from .policies import POLICIES, Balanced, FirstComeFirstServed, LongestFirst, Policy, Priority, ShortestFirst, Static
from .scheduler import Scheduler
from .sequence import EngineRequest, Prompt, Sequence
