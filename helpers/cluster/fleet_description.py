"""All replicas as one engine, as far as the server needs it: what can be asked of them. It runs nothing."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

from ..engine import EngineConfig, SamplingParams
from ..engine.block_manager import BlockManager
from ..engine.hooks import Feature, attach_features
from ..engine.validation import RequestValidator
from .replica import ReplicaInfo


class ResumableValidator(RequestValidator):
    """Also refuses requests that another replica could not resume."""

    def check_counts(self, prompt_tokens: int, params: SamplingParams) -> int:
        max_tokens = super().check_counts(prompt_tokens, params)
        self.check_recomputation(prompt_tokens, max_tokens)
        return max_tokens


class FleetAdapters(Feature):
    """Names the adapters that all replicas have loaded."""

    name, options = "adapters", frozenset({"adapter"})

    def __init__(self, loaded: Mapping[str, bytes]):
        self.loaded = loaded


class FleetDescription:
    """Describes all replicas as if they were one engine: with its settings, tokenizer, validator and blocks.

    Args:
        info: what one of the replicas says about itself; all have the same model and settings.
        num_replicas: how many there may be.

    Attributes:
        info: of that replica.
        rows: of one replica.
    """

    def __init__(self, info: ReplicaInfo, num_replicas: int):
        config = info.config
        self.info, self.rows = info, config.max_batch_size
        blocks = None
        if info.num_blocks is not None:
            blocks = BlockManager(info.num_blocks, info.block_size, config.prefix_caching)
        self.config: EngineConfig = replace(
            config,
            max_batch_size=num_replicas * config.max_batch_size,
            max_tokens_per_step=num_replicas * config.max_tokens_per_step,
        )
        self.tokenizer = info.tokenizer
        # A request has to fit into a single replica.
        self.validator = ResumableValidator(info.tokenizer, config, info.model_info, blocks)
        plain = replace(config, speculative=None, draft_model=None)
        unrun = SimpleNamespace(  # features check requests here, and do nothing else
            config=plain, tokenizer=info.tokenizer, model_info=info.model_info, validator=self.validator, scheduler=None
        )
        adapters = (FleetAdapters(info.adapters),) if info.adapters else ()
        self.validator.features = attach_features(unrun) + adapters
        self.block_manager = blocks and SimpleNamespace(num_blocks=num_replicas * info.num_blocks)
