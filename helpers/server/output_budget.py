"""A bound on the memory of outputs that clients have not read: large responses are promised one after another.

The engine never waits for a client, so what a client has not read waits in the server. Log-probabilities make that
large: 64 outputs of 500 tokens with 20 log-probabilities each take 60 MB, and many clients may read slowly. A request
is therefore accepted only if there is room for the largest response that it can get. Its room is free again once the
response has been sent, or its client has left. Small responses need no room: the number of connections bounds them.
"""

from collections.abc import Iterable

from ..engine import SamplingParams
from .http_errors import QueueFull

SMALL = 1024  # values of a response that needs no room
MAX_VALUES = 2_000_000  # token ids and log-probabilities that may wait to be read, of about 100 bytes each


class OutputBudget:
    """Counts the values, token ids and log-probabilities, of the responses that were promised and not yet sent."""

    def __init__(self):
        self.num_reserved = 0

    def reserve(self, num_values: int) -> int:
        """Reserve room for a response, and return how many values to release in the end.

        Raises:
            ValueError: the response is too large for this server.
            QueueFull: there is room only once other responses have been sent.
        """
        if num_values <= SMALL:
            return 0
        if num_values > MAX_VALUES:
            raise ValueError(
                f"The response may have {num_values} tokens and log-probabilities, but this server holds at most "
                f"{MAX_VALUES} at a time: ask for fewer tokens, log-probabilities, choices or prompts."
            )
        if self.num_reserved + num_values > MAX_VALUES:
            raise QueueFull(
                f"Responses of {self.num_reserved} tokens and log-probabilities have not been read, and this one may "
                f"have {num_values}: this server holds at most {MAX_VALUES}. Try again later."
            )
        self.num_reserved += num_values
        return num_values

    def release(self, num_values: int) -> None:
        """Free the room of a response."""
        self.num_reserved -= num_values


def most_values(requests: Iterable[tuple[list[int], int]], params: SamplingParams) -> int:
    """Return how many values a response can have, for the token ids of each prompt and the most tokens to generate."""
    per_token = 1 if params.logprobs is None else 2 + params.logprobs
    per_prompt_token = 0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs
    return params.n * sum(len(ids) * per_prompt_token + max_tokens * per_token for ids, max_tokens in requests)
