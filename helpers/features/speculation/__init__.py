"""Speculative decoding: several guessed tokens of a sequence are verified in the pass that computes its newest token.

speculation.py  how many draft tokens a sequence gets, and the contract with what proposes them
ngram.py        drafts that are copied from the sequence's own text
draft_model.py  a smaller model that guesses the next tokens
"""

from ...engine import EngineCore
from .ngram import NgramProposer as NgramProposer
from .speculation import Context as Context
from .speculation import Proposer as Proposer
from .speculation import Speculation as Speculation


def attach(engine: EngineCore) -> Speculation | None:
    """Return the speculation that an engine's settings ask for.

    Raises:
        ValueError: the model does not run ragged, or there is no draft model.
    """
    config, proposer = engine.config, engine.config.speculative
    if proposer is None:
        return None
    if engine.runner.not_ragged_because:
        raise ValueError(
            f"Speculative decoding requires ragged execution, because a padded decode computes one token, but "
            f"{engine.runner.not_ragged_because}. Use speculative=None."
        )
    if proposer == "ngram":
        proposer = NgramProposer()
    elif proposer == "draft":
        if not hasattr(engine, "model"):
            raise ValueError('speculative="draft" runs a draft model: use `helpers.Engine`, or give a proposer.')
        from .draft_model import make_draft_proposer  # only here: a simulator has no model, and no torch

        proposer = make_draft_proposer(engine.model, engine.tokenizer, config, engine.make_runner)
    return Speculation(engine.scheduler, proposer, config.num_speculative_tokens, engine.model_info.vocab_size)
