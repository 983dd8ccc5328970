"""A fleet in a browser: `simulate_fleet` on requests of `synthetic_trace`, once for each number of replicas.

Simulator, engine and routers are the course's own files. A run depends on nothing but the settings. So what the page
shows is what the same call returns anywhere, and what the command line prints where it has the same settings.
"""

import random
from collections.abc import Iterator
from functools import lru_cache

from helpers.cluster.routing import ROUTERS
from helpers.engine import EngineConfig
from helpers.simulator import CostModel, FleetResult, TimedRequest, simulate_fleet, synthetic_trace
from helpers.simulator.cost_model import MACHINES
from helpers.simulator.synthetic import TRACES

ROWS, TOKEN_BUDGET = 64, 2048  # the defaults of `python -m helpers.simulator`
BLOCK_SIZE, BLOCKS = 128, 512  # with shared prefixes: 65,536 tokens per replica
START_SECONDS = 2  # until another replica takes the place of one that failed; a real one takes longer to load a model
SHARE = 0.99  # of the requests, within the limits
SETTINGS = {  # name: (least, most, step, default)
    "replicas": (1, 16, 1, 4),
    "rate": (5, 100, 5, 60),
    "requests": (100, 800, 100, 400),
    "ttft_limit": (50, 2000, 50, 200),
    "tpot_limit": (5, 100, 5, 20),
    "shared_prefix": (0, 2048, 128, 0),
    "prefixes": (1, 64, 1, 16),
    "failure": (0, 90, 10, 0),
}
CHOICES = {"router": list(ROUTERS), "trace": list(TRACES), "machine": list(MACHINES)}
DEFAULTS = {name: default for name, (_, _, _, default) in SETTINGS.items()}
DEFAULTS |= {"router": "least_outstanding_tokens", "trace": "conversation", "machine": "h100_llama_8b"}
PREFIXES = {"trace": "code", "rate": 30, "requests": 200, "shared_prefix": 2048, "prefixes": 32}
PRESETS = {
    "How many replicas? (lesson 12)": {},
    "Bursts in turn (lesson 11)": {"trace": "bursts", "rate": 100, "router": "round_robin"},
    "Bursts by load (lesson 11)": {"trace": "bursts", "rate": 100},
    "Shared prefixes in turn (lesson 11)": PREFIXES | {"router": "round_robin"},
    "Shared prefixes stay together (lesson 11)": PREFIXES | {"router": "prefix_aware"},
    "A replica fails (lesson 11)": {"failure": 40},
}


class RecordingRouter:
    """A router that also keeps what it sees: the outstanding tokens of each replica, and the cached tokens of prompts.

    Args:
        router: the policy.
        size: the number of replicas; fewer are ready while the first one is replaced.
    """

    def __init__(self, router, size: int):
        self.router, self.size = router, size
        self.now, self.times, self.outstanding, self.choices = 0.0, [], [], []
        self.routed_tokens = self.cached_tokens = 0

    def choose(self, prompt_token_ids: list[int], replicas: list) -> int:
        missing = self.size - len(replicas)
        self.times.append(self.now)
        self.outstanding.append([0] * missing + [replica.outstanding_tokens for replica in replicas])
        index = self.router.choose(prompt_token_ids, replicas)
        self.choices.append(missing + index)
        self.routed_tokens += len(prompt_token_ids)
        self.cached_tokens += replicas[index].cached_tokens(prompt_token_ids)
        return index

    def watch(self, requests: list[TimedRequest]) -> Iterator[TimedRequest]:
        """Yield the requests. A decision is recorded at the time of the latest arrival."""
        for request in requests:
            self.now = request.arrival
            yield request


def config(settings: dict) -> EngineConfig:
    """Return the configuration of a replica, which caches prefixes if requests share them."""
    caches = settings["shared_prefix"] > 0
    return EngineConfig(
        max_batch_size=ROWS,
        max_tokens_per_step=TOKEN_BUDGET,
        block_size=BLOCK_SIZE,
        num_blocks=BLOCKS if caches else None,
        prefix_caching=caches,
    )


def requests(settings: dict) -> list[TimedRequest]:
    """Return the requests. Each one draws its shared prefix, which precedes a prompt of the trace."""
    trace = synthetic_trace(settings["trace"], settings["requests"], settings["rate"])
    shared = settings["shared_prefix"]
    if not shared:
        return list(trace)
    draw, made = random.Random(0), []
    for number, (arrival, length, output_tokens) in enumerate(trace):
        prefix = [draw.randrange(settings["prefixes"])] * shared
        made.append(TimedRequest(arrival, prefix + [1000 + number] * length, output_tokens))
    return made


@lru_cache(maxsize=64)
def _simulated(size: int, **settings) -> tuple[FleetResult, RecordingRouter]:
    """Simulate a fleet; limits do not matter here, so the page can change them without another simulation."""
    made, router = requests(settings), RecordingRouter(ROUTERS[settings["router"]](), size)
    failing = made[len(made) * settings["failure"] // 100 :] if settings["failure"] else []
    failures, cost = [(one.arrival, 0) for one in failing[:1]], CostModel.load(MACHINES[settings["machine"]])
    options = {"failures": failures, "start_seconds": START_SECONDS}
    return simulate_fleet(router.watch(made), config(settings), cost, size, router, **options), router


def run(settings: dict | None = None, size: int | None = None) -> dict:
    """Simulate a fleet, and return what the page shows of it.

    Args:
        settings: changes of DEFAULTS.
        size: the number of replicas; None for the settings' own.
    """
    settings = DEFAULTS | (settings or {})
    size = settings["replicas"] if size is None else size
    kept = {name: value for name, value in settings.items() if name not in ("replicas", "ttft_limit", "tpot_limit")}
    result, router = _simulated(size, **kept)
    limits = {"ttft": settings["ttft_limit"] / 1000, "tpot": settings["tpot_limit"] / 1000}
    return {
        "size": size,
        "goodput": result.goodput(**limits),
        "within": result.within(**limits),
        "ttft": [result.percentile("ttft", percent) for percent in (50, 99)],
        "busy": result.utilization,
        "cached": router.cached_tokens / router.routed_tokens,
        "missing": [result.lifetimes[0].stopped, result.lifetimes[size].ready] if settings["failure"] else [],
        "moved": result.resumed,
        "lost_tokens": result.lost_tokens,
        "times": router.times,
        "replicas": [
            {
                "outstanding": [seen[place] for seen in router.outstanding],
                "requests": router.choices.count(place),
                "busy": sum(result.busy_seconds[place::size]) / result.seconds,  # with that of a replacement
            }
            for place in range(size)
        ],
    }


def about(settings: dict) -> str:
    """Return what the cost model describes, and where its numbers come from."""
    described = CostModel.load(MACHINES[settings["machine"]]).about
    return f"{described.get('model')} on {described.get('machine')}, {described.get('source', 'measured')}"


def command(settings: dict) -> str:
    """Return the command that prints the same numbers; "" if it has no options for the settings."""
    if settings["shared_prefix"] or settings["failure"]:
        return ""
    names = {"synthetic": "trace", "rate": "rate", "requests": "requests", "router": "router", "cost": "machine"}
    options = " ".join(f"--{option} {settings[name]}" for option, name in names.items())
    limits = f"ttft={settings['ttft_limit'] / 1000:g},tpot={settings['tpot_limit'] / 1000:g}"
    return f"python -m helpers.simulator {options} --replicas 1..{settings['replicas']} --slo {limits}"
