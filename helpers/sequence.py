"""A sequence: the tokens of one request, and how many of them the model has read.

The claim: two counts are all that a scheduler has to know. Of its tokens (the prompt, then what was generated) a
sequence has `computed`, whose keys and values are in the cache; the rest it has yet to read. Prefill, a chunk of a
prefill, decode, and starting anew after a preemption are then one and the same thing: *read the next n tokens*. Who
has read them all gets a new one.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Sequence:
    """One answer in the making. Compared by identity, so that it can be a key.

    Attributes:
        request_id: whose answer this is; a request for several samples has several sequences.
        token_ids: the prompt, then what was generated.
        max_tokens: generate at most so many.
        index: which of the request's samples, from 0.
        priority: the smaller, the more urgent (for the policy that looks at it).
        parent: the sample whose prompt this one shares, or None.
        computed: tokens, from the first, whose keys and values are in the cache.
        waited: iterations spent in the queue.
        prompt_tokens: the length of the prompt.
    """

    request_id: Hashable
    token_ids: list[int]
    max_tokens: int
    index: int = 0
    priority: int = 0
    parent: "Sequence | None" = None
    computed: int = 0
    waited: int = 0
    prompt_tokens: int = field(init=False)

    def __post_init__(self):
        self.prompt_tokens = len(self.token_ids)

    @property
    def generated(self) -> int:
        """How many tokens it got so far."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def unread(self) -> int:
        """How many tokens the model has yet to read before there can be a new one."""
        return len(self.token_ids) - self.computed

    @property
    def decodes(self) -> bool:
        """Whether all that it has to read is the token it got last."""
        return self.unread == 1 and self.generated > 0
