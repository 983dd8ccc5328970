"""Resumption: an output that another engine has begun continues from its tokens so far.

A sequence needs nothing but its tokens. Their keys and values are computed again, as after a preemption; the text, the
place in a grammar and the random draws follow from the tokens and the seed. So a resumed output gets the tokens that it
would have got without a break, greedy or seeded, and its next output begins after the old tokens.
"""

from ..engine import EngineCore, Feature
from ..settings import Bound

TOKEN_ID = Bound(0, integer=True)


class Resumption(Feature):
    """Takes `generated`: the tokens so far of each unfinished output of a request, by index.

    They count as available from the request's arrival, and their log-probabilities are not known.
    """

    name, options = "resumption", frozenset({"generated"})

    def __init__(self, engine: EngineCore):
        self.validator, self.vocab_size = engine.validator, engine.model_info.vocab_size

    def prepare(self, request):
        generated, n = request.options["generated"], request.params.n
        if not generated:
            raise ValueError("generated has no output: give the tokens of each unfinished output, by index.")
        for index in generated:
            if not (isinstance(index, int) and 0 <= index < n):
                raise ValueError(f"generated has tokens for output {index!r}, but the request has {n}, from 0.")
        self.validator.check_recomputation(request.prompt_tokens, request.max_tokens)
        request.indices = tuple(generated)

    def begin(self, request):
        for sequence in request.sequences:
            token_ids = request.options["generated"][sequence.index]
            for token_id in token_ids:
                TOKEN_ID.check(f"A token id of output {sequence.index} in generated", token_id)
                if token_id >= self.vocab_size:
                    raise ValueError(f"Token ids in generated must be below {self.vocab_size}, not {token_id}.")
                reason = sequence.append(int(token_id), request.arrival)
                if reason == "length":
                    raise ValueError(
                        f"Output {sequence.index} has {len(token_ids)} of at most {sequence.max_tokens} tokens "
                        f"already: resume unfinished outputs only."
                    )
                if reason is not None:
                    raise ValueError(
                        f"Output {sequence.index} ended with token {token_id}: resume unfinished outputs only."
                    )


attach = Resumption
