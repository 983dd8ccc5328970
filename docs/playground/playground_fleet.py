"""A fleet in a browser: `simulate_fleet` on requests of `synthetic_trace`, once for each number of replicas.

Simulator, engine and routers are the course's own files. A run depends on nothing but the settings. So what the page
shows is what the same call returns anywhere, and without shared prefixes it is what the command line prints.
"""

import random
from functools import lru_cache
from pathlib import Path

import helpers.simulator
from helpers.cluster.routing import ROUTERS
from helpers.engine import EngineConfig
from helpers.simulator import CostModel, FleetResult, TimedRequest, simulate_fleet, synthetic_trace
from helpers.simulator.synthetic import TRACES

ROWS, TOKEN_BUDGET = 64, 2048  # the defaults of `python -m helpers.simulator`
BLOCK_SIZE, BLOCKS = 64, 1024  # with shared prefixes: 65,536 tokens per replica
SHARE = 0.99  # of the requests, within the limits
SETTINGS = {  # name: (least, most, step, default)
    "replicas": (1, 16, 1, 4),
    "rate": (5, 100, 5, 60),
    "requests": (100, 400, 100, 200),
    "ttft_limit": (50, 2000, 50, 200),
    "tpot_limit": (5, 100, 5, 20),
    "shared_prefix": (0, 4096, 256, 0),
    "prefixes": (1, 64, 1, 16),
}
MACHINES = {file.stem: file for file in Path(helpers.simulator.__file__).parent.glob("machines/*.json")}
CHOICES = {"router": list(ROUTERS), "trace": list(TRACES), "machine": sorted(MACHINES)}
DEFAULTS = {name: default for name, (_, _, _, default) in SETTINGS.items()}
DEFAULTS |= {"router": "least_outstanding_tokens", "trace": "conversation", "machine": "h100_llama_8b"}
PREFIXES = {"trace": "code", "rate": 20, "shared_prefix": 4096, "prefixes": 32}
PRESETS = {
    "How many replicas? (lesson 12)": {},
    "Bursts in turn (lesson 11)": {"trace": "bursts", "rate": 100, "router": "round_robin"},
    "Bursts by load (lesson 11)": {"trace": "bursts", "rate": 100},
    "Shared prefixes in turn (lesson 11)": PREFIXES | {"router": "round_robin"},
    "Shared prefixes stay together (lesson 11)": PREFIXES | {"router": "prefix_aware"},
}


class RecordingRouter:
    """A router that also keeps what it sees at each arrival: the outstanding and the cached tokens."""

    def __init__(self, router):
        self.router, self.outstanding, self.choices, self.cached = router, [], [], 0

    def choose(self, prompt_token_ids: list[int], replicas: list) -> int:
        self.outstanding.append([replica.outstanding_tokens for replica in replicas])
        index = self.router.choose(prompt_token_ids, replicas)
        self.choices.append(index)
        self.cached += replicas[index].cached_tokens(prompt_token_ids)
        return index


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
def _simulated(size: int, **settings) -> tuple[FleetResult, RecordingRouter, list[float]]:
    """Simulate a fleet; limits do not matter here, so the page can change them without another simulation."""
    made, router = requests(settings), RecordingRouter(ROUTERS[settings["router"]]())
    cost = CostModel.load(MACHINES[settings["machine"]])
    result = simulate_fleet(made, config(settings), cost, size, router)
    return result, router, [one.arrival for one in made]


def run(settings: dict | None = None, size: int | None = None) -> dict:
    """Simulate a fleet, and return what the page shows of it.

    Args:
        settings: changes of DEFAULTS.
        size: the number of replicas; None for the settings' own.
    """
    settings = DEFAULTS | (settings or {})
    size = settings["replicas"] if size is None else size
    kept = {name: value for name, value in settings.items() if name not in ("replicas", "ttft_limit", "tpot_limit")}
    result, router, arrivals = _simulated(size, **kept)
    limits = {"ttft": settings["ttft_limit"] / 1000, "tpot": settings["tpot_limit"] / 1000}
    return {
        "size": size,
        "goodput": result.goodput(**limits),
        "within": result.within(**limits),
        "ttft": [result.percentile("ttft", percent) for percent in (50, 99)],
        "tpot": result.percentile("tpot", 99),
        "busy": result.utilization,
        "cached": router.cached / sum(result.prompt_tokens),
        "arrivals": arrivals,
        "replicas": [
            {
                "outstanding": [seen[index] for seen in router.outstanding],
                "requests": router.choices.count(index),
                "busy": result.busy_seconds[index] / result.seconds,
            }
            for index in range(size)
        ],
    }


def about(settings: dict) -> str:
    """Return what the cost model describes, and where its numbers come from."""
    described = CostModel.load(MACHINES[settings["machine"]]).about
    return f"{described.get('model')} on {described.get('machine')}, {described.get('source', 'measured')}"


def command(settings: dict) -> str:
    """Return the command that prints the same numbers; "" with shared prefixes, which it does not have."""
    if settings["shared_prefix"]:
        return ""
    names = {"synthetic": "trace", "rate": "rate", "requests": "requests", "router": "router", "cost": "machine"}
    options = " ".join(f"--{option} {settings[name]}" for option, name in names.items())
    limits = f"ttft={settings['ttft_limit'] / 1000:g},tpot={settings['tpot_limit'] / 1000:g}"
    return f"python -m helpers.simulator {options} --replicas 1..{settings['replicas']} --slo {limits}"
