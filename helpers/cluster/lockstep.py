"""Replicas in lock-step: several engines in one process, behind a router, without a network.

In each step, every replica makes one iteration. What happens depends on nothing but the requests, the router and the
seeds, so all counts are the same on every machine, such as the prompt tokens that all replicas compute.
"""

import itertools
from collections.abc import Hashable
from collections.abc import Sequence as Seq

from ..engine import EngineCore, Prompt, SamplingParams
from ..server.output_delta import OutputDelta
from .dispatcher import DispatchedRequest, Dispatcher
from .routing import Router


class LockstepReplicas:
    """Runs requests on several engines, which nothing else may use.

    Args:
        engines: the replicas, with the same model; they are named by their index. `Simulator`s need no model.
        router: chooses the replica of each request.

    Attributes:
        engines: all engines.
        dispatcher: which replica has which request. A replica that is removed from it makes no more iterations.

    Raises:
        ValueError: there are no engines.
    """

    def __init__(self, engines: Seq[EngineCore], router: Router):
        if not engines:
            raise ValueError("There are no engines: give at least one.")
        self.engines, self.dispatcher = list(engines), Dispatcher(router)
        self._ids = itertools.count()
        for name, engine in enumerate(self.engines):
            engine.outputs.output_type = OutputDelta
            blocks = engine.block_manager
            block_size = blocks.block_size if blocks is not None and blocks.prefix_caching else None
            self.dispatcher.add_replica(name, block_size, engine.config.max_batch_size)
            self.dispatcher.accept(name, [], _cache_events(engine))

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: Hashable = None
    ) -> Hashable:
        """Send a request to the replica that the router chooses, and return its id.

        Raises:
            ValueError: the request can never run, or its id is in use.
        """
        params = params or SamplingParams()
        if request_id is None:
            request_id = next(id for id in self._ids if id not in self.dispatcher.requests)
        elif request_id in self.dispatcher.requests:
            raise ValueError(f"There is an unfinished request {request_id!r}: give this one another id, or none.")
        token_ids, max_tokens = self.engines[0].validator.validate(prompt, params)
        self.send(DispatchedRequest(request_id, token_ids, params, max_tokens))
        return request_id

    def send(self, request: DispatchedRequest) -> None:
        """Send a request to the replica that the router chooses; it continues after the tokens delivered so far."""
        generated = dict(request.generated)
        engine = self.engines[self.dispatcher.assign(request)]
        try:
            engine.add_request(
                request.prompt_token_ids, request.params, request.request_id, request.priority, generated=generated
            )
        except BaseException:
            self.dispatcher.forget(request)
            raise

    def step(self) -> list[OutputDelta]:
        """Let every replica make an iteration, and return the new outputs."""
        outputs = []
        for name in self.dispatcher.replicas:
            engine = self.engines[name]
            if engine.has_unfinished_requests():
                outputs += self.dispatcher.accept(name, engine.step(), _cache_events(engine))
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Return whether a step would have anything to compute or to deliver."""
        return any(self.engines[name].has_unfinished_requests() for name in self.dispatcher.replicas)

    @property
    def prompt_tokens(self) -> list[int]:
        """How many tokens the prefills of each replica computed."""
        return [engine.trace.prompt_tokens for engine in self.engines]


def _cache_events(engine: EngineCore) -> list[tuple[bytes, bool]]:
    return [] if engine.block_manager is None else engine.block_manager.take_cache_events()
