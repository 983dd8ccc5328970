"""Replicas in lock-step: counts of the routing policies, and streams that survive the loss of replicas."""

import itertools
import random
from collections import defaultdict
from dataclasses import replace

import pytest
from conftest import PROMPTS, alone
from test_routing import CacheAlone

from helpers import Engine
from helpers.cluster.dispatcher import DispatchedRequest, Dispatcher
from helpers.cluster.lockstep import LockstepReplicas
from helpers.cluster.routing import ROUTERS, PrefixAware, RoundRobin
from helpers.engine import EngineConfig, SamplingParams
from helpers.features.structured_outputs import StructuredOutputs
from helpers.server.output_delta import OutputDelta
from helpers.simulator import Simulator

BLOCK, PREFIX = 16, 128  # tokens


def simulators(number: int, num_blocks: int = 200) -> list[Simulator]:
    config = EngineConfig(max_batch_size=8, max_tokens_per_step=128, num_blocks=num_blocks, block_size=BLOCK)
    return [Simulator(config) for _ in range(number)]


def shared_prefixes(num_prefixes: int, popular: float = 0.0, number: int = 120) -> list[list[int]]:
    """Prompts with a prefix of 128 tokens each; `popular` is the share of them that begin with the first prefix."""
    draw = random.Random(0)
    prefixes = [[draw.randrange(1000) for _ in range(PREFIX)] for _ in range(num_prefixes)]
    return [
        prefixes[0 if draw.random() < popular else draw.randrange(num_prefixes)]
        + [draw.randrange(1000) for _ in range(draw.randint(8, 48))]
        for _ in range(number)
    ]


def generate(replicas: LockstepReplicas, prompts: list, params, arrivals=None, kills=()) -> list[OutputDelta]:
    """Run requests until all are finished, and return all outputs, joined, in the order of the prompts.

    Args:
        replicas: the replicas.
        prompts: texts or lists of token ids.
        params: one for all prompts, or one for each.
        arrivals: for each prompt, the step before which its request arrives; 0 if omitted.
        kills: for the number of a step, the replica that is killed before it.
    """
    params = params if isinstance(params, list) else [params] * len(prompts)
    arrivals, parts = arrivals or [0] * len(prompts), defaultdict(list)
    for step in itertools.count():
        for number in (number for number, arrival in enumerate(arrivals) if arrival == step):
            replicas.add_request(prompts[number], params[number], number)
        if step in kills:
            for request in replicas.dispatcher.remove_replica(kills[step]):
                replicas.send(request)
        if step >= max(arrivals) and not replicas.has_unfinished_requests():
            return [OutputDelta.join(parts[key]) for key in sorted(parts)]
        for output in replicas.step():
            parts[output.request_id, output.index].append(output)


def run(router, prompts: list[list[int]], num_replicas: int = 4) -> LockstepReplicas:
    """Run prompts, two of which arrive in every step."""
    replicas = LockstepReplicas(simulators(num_replicas), router)
    generate(replicas, prompts, SamplingParams(max_tokens=16), [index // 2 for index in range(len(prompts))])
    return replicas


def computed_tokens(replicas: LockstepReplicas) -> list[int]:
    """Return how many tokens each replica computed."""
    return [sum(forward_pass.tokens for forward_pass in engine.trace.passes) for engine in replicas.engines]


def imbalance(replicas: LockstepReplicas) -> float:
    """Return the largest load of a replica over the mean."""
    computed = computed_tokens(replicas)
    return max(computed) * len(computed) / sum(computed)


# --- counts ---------------------------------------------------------------------------------------------------------


def test_prefix_aware_routing_computes_each_shared_prefix_once_and_round_robin_once_per_replica():
    prompts = shared_prefixes(num_prefixes=6)
    own = sum(len(prompt) - PREFIX for prompt in prompts)
    assert sum(run(CacheAlone(), prompts).prompt_tokens) == own + 6 * PREFIX
    assert sum(run(RoundRobin(), prompts).prompt_tokens) == own + 4 * 6 * PREFIX


def test_one_popular_prefix_overloads_a_replica_and_the_weight_of_the_load_prevents_that():
    prompts = shared_prefixes(num_prefixes=6, popular=0.8)
    herd, balanced = run(CacheAlone(), prompts), run(PrefixAware(), prompts)
    assert imbalance(herd) > 2.5 and imbalance(balanced) < 1.25
    assert sum(balanced.prompt_tokens) < 1.2 * sum(herd.prompt_tokens) < sum(run(RoundRobin(), prompts).prompt_tokens)


# --- killed replicas ------------------------------------------------------------------------------------------------


GREEDY = [SamplingParams(max_tokens=1 + 7 * index % 30) for index in range(len(PROMPTS))]


def engines(pair, number: int = 3, **settings) -> list[Engine]:
    config = EngineConfig(**({"max_batch_size": 3, "max_tokens_per_step": 12, "block_size": 4} | settings))
    return [Engine(*pair, config) for _ in range(number)]


def random_kills(seed: int, num_replicas: int, steps: int = 12) -> dict[int, int]:
    """Return which replicas are killed before which steps: all but one."""
    draw = random.Random(seed)
    steps = draw.sample(range(1, steps), num_replicas - 1)
    return dict(zip(steps, draw.sample(range(num_replicas), num_replicas - 1), strict=True))


@pytest.mark.parametrize(
    ("seed", "settings"),
    [(0, {}), (1, {"execution": "padded"}), (2, {"speculative": "ngram"}), (3, {"num_blocks": 32})],
)
def test_greedy_tokens_are_those_of_each_request_alone_whichever_replicas_are_killed(random_pairs, seed, settings):
    model, tokenizer = random_pairs
    replicas = LockstepReplicas(engines(random_pairs, **settings), list(ROUTERS.values())[seed % len(ROUTERS)]())
    outputs = generate(replicas, PROMPTS, GREEDY, kills=random_kills(seed, 3))
    for prompt, params, output in zip(PROMPTS, GREEDY, outputs, strict=True):
        expected = alone(model, tokenizer, prompt, params.max_tokens)
        assert (output.new_token_ids, output.num_tokens) == (expected, len(expected))
    assert len(replicas.dispatcher.replicas) == 1
    assert not replicas.dispatcher.requests and not replicas.has_unfinished_requests()


SEEDED = SamplingParams(max_tokens=24, temperature=1.2, top_p=0.95, seed=11, logprobs=2)
KINDS = {
    "seeded": SEEDED,
    "several outputs": replace(SEEDED, n=3),
    "penalties": replace(SEEDED, frequency_penalty=0.7, repetition_penalty=1.2, min_tokens=6, ignore_eos=True),
    "a stop string": replace(SEEDED, stop=["e "]),
    "prompt logprobs": replace(SEEDED, prompt_logprobs=1),
    "a pattern": replace(SEEDED, structured_outputs=StructuredOutputs(regex="([a-z]+ ){3,5}end")),
    "speculation": SEEDED,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_output_is_the_one_without_a_break(embedded, kind):
    settings = {"speculative": "ngram"} if kind == "speculation" else {}
    (reference,) = engines(embedded, 1, **settings)
    expected = [reference.generate(prompt, KINDS[kind]) for prompt in PROMPTS[:5]]
    replicas = LockstepReplicas(engines(embedded, **settings), RoundRobin())
    joined = iter(generate(replicas, PROMPTS[:5], KINDS[kind], kills={3: 1, 9: 0}))
    for outputs in expected:
        for output in outputs:
            resumed = next(joined)
            assert resumed.new_token_ids == output.token_ids
            assert resumed.new_text == output.text
            assert resumed.finish_reason == output.finish_reason
            assert [set(scores) for scores in resumed.new_logprobs] == [set(scores) for scores in output.logprobs]
            assert (resumed.prompt_logprobs is None) == (output.prompt_logprobs is None)
            assert len(resumed.prompt_logprobs or []) == len(output.prompt_logprobs or [])


# --- the dispatcher -------------------------------------------------------------------------------------------------


def delta(request_id: str, index: int, token_ids: list[int], finish_reason: str | None = None) -> OutputDelta:
    return OutputDelta(request_id, index, "", token_ids, None, len(token_ids), finish_reason)


def dispatched(n: int = 1) -> tuple[Dispatcher, DispatchedRequest]:
    dispatcher = Dispatcher(RoundRobin())
    dispatcher.add_replica("first", BLOCK, 8)
    request = DispatchedRequest("a", [1, 2, 3], SamplingParams(temperature=1, n=n), max_tokens=8)
    dispatcher.assign(request)
    return dispatcher, request


def test_outputs_of_a_replica_that_no_longer_has_the_request_are_dropped():
    dispatcher, request = dispatched()
    assert dispatcher.accept("first", [delta("a", 0, [5])])
    dispatcher.add_replica("second", BLOCK, 8)
    assert dispatcher.remove_replica("first") == [request] and request.replica is None
    assert dispatcher.assign(request) == "second"
    assert dispatcher.accept("first", [delta("a", 0, [6])]) == []
    dispatcher.add_replica("third", BLOCK, 8)
    assert dispatcher.accept("third", [delta("a", 0, [6])]) == []
    assert dispatcher.accept("second", [delta("a", 0, [7]), delta("unknown", 0, [1])]) == [delta("a", 0, [7])]
    assert request.generated == {0: [5, 7]} and request.token_ids == [1, 2, 3, 5, 7]
    assert dispatcher.replicas["second"].outstanding_tokens == 6


# --- what an engine refuses to resume -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generated", "message"),
    [
        ({0: [1] * 5}, "Output 0 has 5 of at most 5 tokens already: resume unfinished outputs only"),
        ({0: [10**6]}, "Token ids in generated must be below"),
        ({0: [5, 0]}, "Output 0 ended with token 0: resume unfinished outputs only"),
    ],
)
def test_tokens_that_a_request_cannot_have_generated_are_refused(embedded, generated, message):
    (engine,) = engines(embedded, 1)
    with pytest.raises(ValueError, match=message):
        engine.add_request("Once", SamplingParams(max_tokens=5), generated=generated)
    assert not engine.has_unfinished_requests()
