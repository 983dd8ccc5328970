"""How a planned iteration is executed on a model: forward passes, and the tokens chosen from them.

ragged_or_padded.py  chooses a runner: ragged where the model supports it, otherwise padded, with the reason
ragged.py            all tokens of an iteration in one row, without padding
attention.py         attention of each sequence over its own keys and values
kv_pool.py           the tensors behind the blocks
padded.py            left-padded batches, for every other model
sampling.py          chooses the tokens, greedily or at random, for all sequences at once
layer_masks.py       which tokens a model's layers attend to
trial.py             a short run that compares two ways to run a model
"""

from .attention import attend
from .padded import PaddedRunner
from .ragged import RaggedRunner
from .ragged_or_padded import make_runner, why_not_ragged
