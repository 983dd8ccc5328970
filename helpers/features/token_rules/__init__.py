"""Token rules: which tokens a request may not get, which end it, and which become more or less likely.

rules.py   the token ids behind a request's parameters, which only the model's vocabulary and tokenizer can tell
logits.py  what they do to the logits of the next token
"""

from ...engine import EngineCore, Feature
from .rules import TokenRules as TokenRules
from .rules import TokenRulesMaker


class TokenRulesFeature(Feature):
    """Applies penalties, biases, stop tokens, bad words and allowed tokens."""

    name = "token_rules"

    def __init__(self, engine: EngineCore):
        self.maker = TokenRulesMaker(engine.tokenizer, engine.model_info)

    def check(self, params):
        self.maker.make(params)

    def prepare(self, request):
        request.notes[self.name] = rules = self.maker.make(request.params)
        request.end_token_ids |= rules.stop_token_ids

    def logits_rule(self, sequence):
        from .logits import TokenScores  # only here: a simulator has no logits, and no NumPy

        rule = TokenScores(sequence.params, sequence.prompt_tokens, sequence.request.notes[self.name])
        return rule if rule.changes_scores else None


attach = TokenRulesFeature
