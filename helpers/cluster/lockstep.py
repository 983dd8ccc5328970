"""Replicas in lock-step: several engines in one process, behind a router, without a network.

In each step, every replica makes one iteration. What happens depends on nothing but the requests, the router and the
seeds, so all counts are the same on every machine: the prompt tokens that all replicas compute, the imbalance of their
load, and the tokens that are computed again after a replica is killed.
"""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping
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
        engines: all engines, including those that were killed.
        alive: the names of the replicas that run.
        dispatcher: which replica has which request.

    Raises:
        ValueError: there are no engines.
    """

    def __init__(self, engines: Seq[EngineCore], router: Router):
        if not engines:
            raise ValueError("There are no engines: give at least one.")
        self.engines: list[EngineCore] = []
        self.dispatcher = Dispatcher(router)
        self.alive: list[int] = []
        self._ids = itertools.count()
        for engine in engines:
            self.add_replica(engine)

    # --- adding and killing replicas --------------------------------------------------------------------------------

    def add_replica(self, engine: EngineCore) -> int:
        """Add a replica and return its name."""
        engine.outputs.output_type = OutputDelta
        block_size = None
        if (blocks := engine.block_manager) is not None and blocks.prefix_caching:
            block_size = blocks.block_size
        self.engines.append(engine)
        self.alive.append(name := len(self.engines) - 1)
        self.dispatcher.add_replica(name, block_size, engine.config.max_batch_size)
        self.dispatcher.accept(name, [], _cache_events(engine))
        return name

    def kill(self, name: int) -> list[Hashable]:
        """Stop a replica for good, drop what it has computed, and return the ids of its requests, which others resume.

        Raises:
            ValueError: there is no such replica, or it is the last one.
        """
        if name not in self.alive or len(self.alive) == 1:
            raise ValueError(f"Replica {name} cannot be killed: the replicas {self.alive} run, and one must remain.")
        self.alive.remove(name)
        orphans = self.dispatcher.remove_replica(name)
        for request in orphans:
            self._send(request)
        return [request.request_id for request in orphans]

    # --- requests ---------------------------------------------------------------------------------------------------

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
        token_ids, max_tokens = self.engines[self.alive[0]].validator.validate(prompt, params)
        self._send(DispatchedRequest(request_id, token_ids, params, max_tokens))
        return request_id

    def _send(self, request: DispatchedRequest) -> None:
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
        for name in list(self.alive):
            engine = self.engines[name]
            if engine.has_unfinished_requests():
                outputs += self.dispatcher.accept(name, engine.step(), _cache_events(engine))
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Return whether a step would have anything to compute or to deliver."""
        return any(self.engines[name].has_unfinished_requests() for name in self.alive)

    def generate(
        self,
        prompts: Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        arrivals: Seq[int] | None = None,
        kills: Mapping[int, int] | None = None,
    ) -> list[OutputDelta]:
        """Run requests until all are finished.

        Args:
            prompts: texts or lists of token ids.
            params: one for all prompts, or one for each; greedy if omitted.
            arrivals: for each prompt, the step before which its request arrives; 0 if omitted.
            kills: for the number of a step, the replica that is killed before it.

        Returns:
            All outputs, joined, in the order of the prompts.
        """
        params = list(params) if isinstance(params, list | tuple) else [params or SamplingParams()] * len(prompts)
        arrivals, kills = [0] * len(prompts) if arrivals is None else list(arrivals), dict(kills or {})
        ids: dict[int, Hashable] = {}
        parts: defaultdict[tuple[Hashable, int], list[OutputDelta]] = defaultdict(list)
        for step in itertools.count():
            for number in range(len(prompts)):
                if arrivals[number] == step:
                    ids[number] = self.add_request(prompts[number], params[number])
            if step in kills:
                self.kill(kills[step])
            if len(ids) == len(prompts) and not self.has_unfinished_requests():
                break
            for output in self.step():
                parts[output.request_id, output.index].append(output)
        return [
            OutputDelta.join(parts[ids[number], index])
            for number in range(len(prompts))
            for index in range(params[number].n)
        ]

    # --- counts -----------------------------------------------------------------------------------------------------

    @property
    def prompt_tokens(self) -> list[int]:
        """How many tokens the prefills of each replica computed, those of resumed requests included."""
        return [engine.trace.prompt_tokens for engine in self.engines]


def _cache_events(engine: EngineCore) -> list[tuple[bytes, bool]]:
    return [] if engine.block_manager is None else engine.block_manager.take_cache_events()
