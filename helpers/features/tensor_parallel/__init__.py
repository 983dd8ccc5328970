"""Tensor parallelism: one model on several processes, each with its share of every large matrix (Shoeybi et al., 2019).

Megatron-LM splits a pair of matrices so that a block needs one sum after each pair. The first is split by columns: a
process computes some of the heads, or some of the MLP's inner numbers. The second is split by rows: it multiplies just
these numbers, and the sum over the processes is the result. Keys and values stay where their heads are.

split.py    which layers of a family are split by columns, by rows or by vocabulary; one process's share of a model
worker.py   the process that holds a share, and sums its results with the others'
group.py    starts the processes, sends passes to them, notices that one has failed, and ends them
runner.py   a ragged runner whose forward pass is computed by the group

The scheduler, the choice of tokens and all features stay in the engine's process. A pass sends token ids, positions,
slots and block tables to the processes, and each of them returns the logits of its share of the vocabulary.
"""

from ...engine import EngineCore, Feature


class TensorParallelism(Feature):
    """Lets requests go on after a failure: the keys and values of all sequences are lost with the processes."""

    name, in_all_requests = "tensor_parallel", True

    def __init__(self, engine: EngineCore):
        self.engine = engine

    def finished(self, sequence):
        runner = self.engine.runner
        if getattr(runner, "has_lost_keys", False):
            runner.has_lost_keys = False
            self.engine.forget_keys()


def attach(engine: EngineCore) -> TensorParallelism | None:
    """Attach the feature to an engine whose model is split."""
    return TensorParallelism(engine) if engine.config.tensor_parallel_size > 1 else None
