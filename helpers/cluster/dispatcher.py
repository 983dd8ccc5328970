"""The dispatcher: which replica has which request, and how far each output is. It sends and receives nothing itself.

The dispatcher keeps every token that was delivered. If a replica is lost, its requests are assigned to other replicas,
which continue after these tokens (`features/resumption.py`). What the lost replica had computed but not delivered is
computed again. Outputs that arrive late, from a replica that no longer has the request, are dropped. So every token is
delivered exactly once.
"""

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field

from ..engine import SamplingParams
from ..server.output_delta import OutputDelta
from .replica_state import ReplicaState
from .routing import Router, with_salt


class NoReplicas(Exception):
    """There is no replica that could take a request."""


@dataclass(eq=False)
class DispatchedRequest:
    """A request that some replica works on.

    Attributes:
        request_id: an id that is not in use.
        prompt_token_ids: the prompt.
        params: how to continue it.
        max_tokens: the most tokens of an output.
        priority: as for `EngineCore.add_request`.
        adapter: the adapter whose model continues the prompt; None for the model itself.
        salt: starts the hashes of its blocks.
        generated: the tokens delivered so far of each unfinished output, by index.
        replica: the replica that has the request; None if none has it now.
        num_losses: how many replicas were lost while they had the request.
    """

    request_id: Hashable
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    priority: int = 0
    adapter: str | None = None
    salt: bytes = b""
    generated: dict[int, list[int]] = field(init=False)
    replica: Hashable = field(default=None, init=False)
    num_losses: int = field(default=0, init=False)

    def __post_init__(self):
        self.generated = {index: [] for index in range(self.params.n)}

    @property
    def token_ids(self) -> list[int]:
        """The tokens that the next replica has to compute before it can continue the first unfinished output."""
        return self.prompt_token_ids + next(iter(self.generated.values()), [])

    @property
    def max_new_tokens(self) -> int:
        """The most tokens that its outputs may still get, all together."""
        return sum(self.max_tokens - len(token_ids) for token_ids in self.generated.values())


class Dispatcher:
    """Assigns requests to replicas and keeps track of their outputs.

    Args:
        router: chooses among the replicas.

    Attributes:
        replicas: what is known of each replica, by its name. A name is never used again.
        requests: all unfinished requests, by id.
    """

    def __init__(self, router: Router):
        self.router = router
        self.replicas: dict[Hashable, ReplicaState] = {}
        self.requests: dict[Hashable, DispatchedRequest] = {}

    def add_replica(self, name: Hashable, block_size: int | None, rows: int) -> None:
        """Let a replica take requests. `block_size` is None if it does not cache prefixes."""
        self.replicas[name] = ReplicaState(block_size, rows)

    def remove_replica(self, name: Hashable) -> list[DispatchedRequest]:
        """Forget a replica, and return its unfinished requests, which now need another one."""
        self.replicas.pop(name, None)
        orphans = [request for request in self.requests.values() if request.replica == name]
        for request in orphans:
            request.replica = None
        return orphans

    @property
    def waiting(self) -> list[DispatchedRequest]:
        """The unfinished requests that no replica has now, in the order of their arrival."""
        return [request for request in self.requests.values() if request.replica is None]

    def assign(self, request: DispatchedRequest, avoided: Collection[Hashable] = ()) -> Hashable:
        """Choose a replica for a request, whether new or from a lost replica, and return the replica's name.

        Raises:
            NoReplicas: there is none but those to be avoided; the request stays as it is.
        """
        names, token_ids = [name for name in self.replicas if name not in avoided], request.token_ids
        if not names:
            raise NoReplicas(f"Of the replicas {list(self.replicas)}, none can take the request.")
        seen = with_salt([self.replicas[name] for name in names], request.salt)
        name = names[self.router.choose(token_ids, seen)]
        self.replicas[name].add(
            request.request_id, token_ids, request.max_new_tokens, len(request.generated), request.salt
        )
        self.requests[request.request_id] = request
        request.replica = name
        return name

    def accept(
        self, name: Hashable, outputs: Iterable[OutputDelta], cache_events: Iterable[tuple[bytes, bool]] = ()
    ) -> list[OutputDelta]:
        """Record what a replica reports, and return the outputs to deliver: those of requests that it still has."""
        if name not in self.replicas:
            return []
        self.replicas[name].report(cache_events)
        accepted = []
        for output in outputs:
            request = self.requests.get(output.request_id)
            if request is None or request.replica != name or output.index not in request.generated:
                continue
            accepted.append(output)
            request.generated[output.index] += output.new_token_ids
            self.replicas[name].advance(output.request_id, len(output.new_token_ids))
            if output.finish_reason is not None:
                unused = request.max_tokens - len(request.generated.pop(output.index))
                self.replicas[name].end_output(output.request_id, unused)
                if not request.generated:
                    self.forget(request)
        return accepted

    def forget(self, request: DispatchedRequest) -> None:
        """Forget a request that has finished or was ended."""
        self.requests.pop(request.request_id, None)
        if (state := self.replicas.get(request.replica)) is not None:
            state.remove(request.request_id)
