"""One iteration of an LLM server, stage by stage, without a model: nothing here imports torch, transformers or numpy.

engine.py            add_request, abort_request, step, generate, stream
validation.py        refuses requests that can never run
token_rules.py       the token ids behind a request's parameters
token_length.py      how much text a token can hold, and so the least number of tokens of a text
plan.py              the work of one iteration: chunks of sequences
scheduler.py         plans how many tokens each sequence computes, and applies the results
policies.py          the order in which waiting requests are admitted
waiting_queue.py     the queue that policies order
block_manager.py     the blocks of the KV cache: block tables, prefix sharing, eviction
block_hashes.py      the hashes by which cached blocks are recognized
free_blocks.py       the free blocks
sequence.py          the tokens of one output, and how many of them are computed
run_to_end.py        runs requests until all are finished, for `generate`
beam_search.py       beam search: beams are sequences, and a beam with several successors is forked
runner.py            the contract between an engine and its runner
grammar.py           structured outputs, compiled for a vocabulary
schema_recursion.py  finds JSON schemas that no finite text can match
speculation.py       how many drafts a sequence gets, and how they are verified
proposer.py          the contract between speculation and its proposers
ngram.py             drafts that are copied from the sequence's own text
stop_conditions.py   the conditions that end an output
stop_strings.py      the search for stop strings
recording.py         what an iteration did, for the trace
recovery.py          what is derived again after an interrupt
resumption.py        continues outputs that another engine has begun
outputs.py           what is new for each request, and which caller gets it
detokenizer.py       the text of an output, as far as it is certain
config.py            the settings of an engine
sampling_params.py   the settings of a request
structured_outputs.py  what an output must match
"""

from .beam_search import BeamOutput
from .block_manager import BlockManager, UnlimitedMemory
from .config import EngineConfig
from .engine import EngineCore
from .grammar import Grammar
from .ngram import NgramProposer
from .outputs import OutputDelta, RequestOutput
from .plan import Chunk, Plan
from .policies import POLICIES, Balanced, FirstComeFirstServed, LongestFirst, Policy, Priority, ShortestFirst, Static
from .proposer import Context, Proposer
from .runner import ForwardPass, ModelInfo, Runner, RunnerOutput, SampledToken
from .sampling_params import SamplingParams
from .scheduler import Scheduler
from .sequence import Prompt, Sequence
from .speculation import accept_drafts
from .structured_outputs import StructuredOutputs
from .token_rules import TokenRules
from .waiting_queue import WaitingQueue

__all__ = [
    "POLICIES",
    "Balanced",
    "BeamOutput",
    "BlockManager",
    "Chunk",
    "Context",
    "EngineConfig",
    "EngineCore",
    "FirstComeFirstServed",
    "ForwardPass",
    "Grammar",
    "LongestFirst",
    "ModelInfo",
    "NgramProposer",
    "OutputDelta",
    "Plan",
    "Policy",
    "Priority",
    "Prompt",
    "Proposer",
    "RequestOutput",
    "Runner",
    "RunnerOutput",
    "SampledToken",
    "SamplingParams",
    "Scheduler",
    "Sequence",
    "ShortestFirst",
    "Static",
    "StructuredOutputs",
    "TokenRules",
    "UnlimitedMemory",
    "WaitingQueue",
    "accept_drafts",
]
