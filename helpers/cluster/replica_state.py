"""What a router knows of a replica: its free rows, the tokens that its requests may still compute, its cached blocks.

The replica reports which blocks it registers and evicts, by their hashes, so the router's knowledge has no more entries
than the replica has blocks. Reports come late: a prompt's blocks are registered only once they are computed. So the
blocks of an unfinished request's prompt count as cached, too. Otherwise, requests that arrive together and share a
prefix would be sent to different replicas, each of which would compute the prefix.
"""

from collections import Counter
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ..block_hashes import hash_blocks


@dataclass
class _Outstanding:
    """The tokens that a request may still compute, its unfinished outputs, and the hashes of its prompt's blocks."""

    prompt: int
    output: int
    outputs: int
    hashes: list[bytes]


class ReplicaState:
    """The load and the cache of one replica, as far as they are known; a `routing.RoutableReplica`.

    Args:
        block_size: tokens per block of the replica's KV cache; None if it does not cache prefixes.
        rows: how many outputs it can generate at a time.

    Attributes:
        outstanding_tokens: how many tokens its unfinished requests may still compute: the uncached part of their
            prompts, and the rest of their `max_tokens`.
        free_rows: its rows minus its unfinished outputs.
    """

    def __init__(self, block_size: int | None = 16, rows: int = 8):
        self.block_size, self.free_rows = block_size, rows
        self.outstanding_tokens = 0
        self._requests: dict[Hashable, _Outstanding] = {}
        self._registered: set[bytes] = set()
        self._expected: Counter[bytes] = Counter()  # blocks of prompts that are not finished

    @property
    def num_requests(self) -> int:
        """How many requests it has not finished."""
        return len(self._requests)

    def cached_tokens(self, prompt_token_ids: Seq[int], salt: bytes = b"") -> int:
        """Return how many tokens of a prompt, from the first, need not be computed: at most all but the last one."""
        if self.block_size is None:
            return 0
        cached = 0
        for digest in hash_blocks(prompt_token_ids[:-1], self.block_size, salt):
            if digest not in self._registered and digest not in self._expected:
                break
            cached += self.block_size
        return cached

    def add(
        self, request_id: Hashable, prompt_token_ids: Seq[int], max_tokens: int, outputs: int = 1, salt: bytes = b""
    ) -> None:
        """Count a request that was sent to the replica.

        Args:
            request_id: an id that is not in use.
            prompt_token_ids: its prompt; for a resumed request, also the tokens generated so far.
            max_tokens: the most tokens that its outputs may still get, all together.
            outputs: how many outputs it still has to generate.
            salt: starts the hashes of its blocks.
        """
        computed = len(prompt_token_ids) - self.cached_tokens(prompt_token_ids, salt)
        hashes = [] if self.block_size is None else list(hash_blocks(prompt_token_ids, self.block_size, salt))
        self._requests[request_id] = _Outstanding(computed, max_tokens, outputs, hashes)
        self._expected.update(hashes)
        self.outstanding_tokens += computed + max_tokens
        self.free_rows -= outputs

    def advance(self, request_id: Hashable, num_tokens: int) -> None:
        """Count tokens that a request has generated. Its prompt is computed by then."""
        if (request := self._requests.get(request_id)) is not None:
            self.outstanding_tokens -= request.prompt + num_tokens
            request.prompt, request.output = 0, request.output - num_tokens

    def end_output(self, request_id: Hashable, num_unused: int) -> None:
        """Count an output that has finished, and the tokens up to its `max_tokens` that it did not use."""
        self.advance(request_id, num_unused)
        if (request := self._requests.get(request_id)) is not None:
            self.free_rows += 1
            request.outputs -= 1

    def remove(self, request_id: Hashable) -> None:
        """Forget a request that has finished, was cancelled or has moved to another replica."""
        if (request := self._requests.pop(request_id, None)) is not None:
            self.outstanding_tokens -= request.prompt + request.output
            self.free_rows += request.outputs
            self._expected.subtract(request.hashes)
            for digest in request.hashes:
                if not self._expected[digest]:
                    del self._expected[digest]

    def report(self, cache_events: Iterable[tuple[bytes, bool]]) -> None:
        """Apply the changes of the replica's cache in order: (hash, whether the block was registered or evicted)."""
        for digest, registered in cache_events:
            if registered:
                self._registered.add(digest)
            else:
                self._registered.discard(digest)
