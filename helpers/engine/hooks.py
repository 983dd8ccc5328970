"""The hooks: where a feature attaches to the engine. The core calls them, and knows none of the features.

A feature is an object that an engine is given when it is made (`helpers/features/`). It takes part in the requests that
name one of its parameters or options, or in all of them. For these, the core calls its methods: when the request is
added, while iterations are planned, where tokens are chosen, and when results are settled. Every method here does
nothing, so a feature defines only those that it needs.
"""

import importlib
from importlib.util import find_spec
from typing import Any, Protocol

from ..sampling_params import SamplingParams
from .plan import Chunk, ForwardPass, Plan
from .sequence import EngineRequest, Sequence


class Feature:
    """The base of all features.

    Attributes:
        name: the file or folder in `helpers/features/`. Fields of `SamplingParams` and `EngineConfig` name the feature
            that they need.
        options: further arguments of `EngineCore.add_request` that the feature takes.
        in_all_requests: whether it takes part in every request, whatever its parameters.
    """

    name: str
    options: frozenset[str] = frozenset()
    in_all_requests = False

    # --- a request is added -------------------------------------------------------------------------------------

    def check(self, params: SamplingParams) -> None:
        """Refuse parameters with which a request can never run. A server calls this on a thread of its own.

        Raises:
            ValueError: it says what to do.
        """

    def check_options(self, options: dict[str, Any]) -> None:
        """Refuse options with which a request can never run, before it is added; `prepare` refuses them, too.

        Raises:
            ValueError: it says what to do.
        """

    def prepare(self, request: EngineRequest) -> None:
        """Complete a new request, which has no sequences yet: its `indices`, `end_token_ids`, `notes`, `salt`.

        Raises:
            ValueError: the request can never run.
        """

    def begin(self, request: EngineRequest) -> None:
        """Complete the new sequences of a request, which have not joined the queue yet.

        Raises:
            ValueError: the request can never run.
        """

    def joined(self, request: EngineRequest) -> None:
        """Take note that the sequences of a request are in the queue, and perhaps hold some of them back."""

    # --- an iteration is planned --------------------------------------------------------------------------------

    def num_reusable_tokens(self, sequence: Sequence) -> int:
        """Return how many of the first tokens need not be computed if their keys and values are cached."""
        return len(sequence.token_ids)

    def change_chunk(self, chunk: Chunk) -> None:
        """Change a chunk that is about to be planned: whether it samples a token, and the logits that it needs."""

    def extend_plan(self, plan: Plan) -> None:
        """Add to the plan, within the budgets. Called for features that are in all requests, once per iteration."""

    # --- a token is chosen --------------------------------------------------------------------------------------

    def logits_rule(self, sequence: Sequence) -> "LogitsRule | None":
        """Return what changes the logits of a sequence's next tokens. A runner asks once per sequence."""

    def read_logits(self, chunk: Chunk, logits) -> Any:
        """Return what the feature needs of a chunk's logits, a tensor [`num_logits`, vocabulary], for `settle`."""

    # --- results are settled ------------------------------------------------------------------------------------

    def settle(self, chunk: Chunk, forward_pass: ForwardPass) -> None:
        """Take note of a chunk that was computed; its tokens are appended already."""

    def preempted(self, sequence: Sequence) -> None:
        """Take note that a sequence has lost its row and its memory, before it returns to the queue."""

    def weights_changed(self, request: EngineRequest) -> None:
        """Take note that the model has other weights than when an unfinished request's tokens were computed."""

    def finished(self, sequence: Sequence) -> None:
        """Take note that a sequence has finished."""


class LogitsRule(Protocol):
    """Changes the logits of one sequence. It is a function of the tokens so far, so tokens can be chosen again.

    Attributes:
        is_last: whether it comes after other rules, because it looks at what they have left.
    """

    is_last: bool

    def allows(self, token_ids: list[int], next_id: int) -> bool | None:
        """Return whether the rule lets the best token be chosen; None if only `change` can tell.

        Args:
            token_ids: the prompt and the tokens generated so far.
            next_id: the token with the largest logit.
        """

    def change(self, token_ids: list[int], scores) -> None:
        """Change the scores of the next token in place; minus infinity excludes a token.

        Args:
            token_ids: the prompt and the tokens generated so far.
            scores: a tensor, float32 [vocabulary], on the CPU.

        Raises:
            ValueError: no token is left.
        """


def attach_features(engine) -> tuple[Feature, ...]:
    """Attach the features in `helpers/features/` that an engine needs, and return them; none without that folder."""
    package = __package__.rpartition(".")[0] + ".features"
    attached = [attach(engine) for attach in importlib.import_module(package).installed()] if find_spec(package) else []
    return tuple(feature for feature in attached if feature is not None)
