"""How a planned iteration is executed on a model: forward passes, and the tokens sampled from them.

choice.py             chooses a runner: ragged where the model supports it, otherwise padded, with the reason
ragged.py             all tokens of an iteration in one row, without padding
lean.py               the forward pass of GPT-2's and Llama's blocks, written out
lean_recognition.py   which models it is used for
fused_blocks.py       all blocks of GPT-2 in one call, for a few decodes
trial.py              a short run that compares two ways to run a model
attention.py          attention of each sequence over its own keys and values
attention_choice.py   whether the kernel or PyTorch computes it, by measurement
kv_pool.py            the tensors behind the blocks
layer_masks.py        which tokens a model's layers attend to
padded.py             left-padded batches, for every other model
sampling.py           samples the tokens, greedily or at random
drafts.py             a smaller model that guesses the next tokens
scoring.py            log-probabilities of the tokens of prompts
logits_processors.py  what a request's parameters do to the logits
grammar_state.py      which tokens the grammar of a structured output allows next
linear.py             linear layers, quantized ones too, that use the fastest backend
linear_backends.py    the backends
linear_choice.py      which of them is fastest, by measurement
linear_report.py      the measured times as a table
batch_invariant.py    the same bits in every batch, on request
"""

from .attention import attend
from .choice import make_runner, why_not_ragged
from .drafts import DraftModelProposer, make_draft_proposer
from .padded import PaddedRunner
from .ragged import RaggedRunner

__all__ = [
    "DraftModelProposer",
    "PaddedRunner",
    "RaggedRunner",
    "attend",
    "make_draft_proposer",
    "make_runner",
    "why_not_ragged",
]
