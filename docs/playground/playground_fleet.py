"""A fleet in a browser: requests of `synthetic_trace` on replicas, once for each number of replicas.

Simulator, engine, routers and autoscaler are the course's own files. A run depends on nothing but the settings. So what
the page shows is what the same call returns anywhere, and what the command line prints where it has the same settings.
"""

import random
from functools import lru_cache

from helpers.cluster.autoscaling import QueueLengthAutoscaler
from helpers.cluster.routing import ROUTERS, FreeRowsFirst
from helpers.engine import EngineConfig
from helpers.simulator import (
    CostModel,
    FleetResult,
    TimedRequest,
    simulate_disaggregated,
    simulate_fleet,
    synthetic_trace,
)
from helpers.simulator.cost_model import MACHINES
from helpers.simulator.synthetic import TRACES

ROWS, TOKEN_BUDGET = 64, 2048  # the defaults of `python -m helpers.simulator`
BLOCK_SIZE, BLOCKS = 128, 512  # with shared prefixes: 65,536 tokens per replica
START_SECONDS = 2  # until a replica is ready; a real one takes longer to load a model
INTERVAL = 1.0  # seconds from one decision of an autoscaler to the next
TRANSFER_SECONDS = 2.6e-6  # per token, the default of `python -m helpers.simulator`
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
    "prefills": (0, 8, 1, 0),
    "target": (1, 64, 1, 16),
}
CHOICES = {
    "router": list(ROUTERS),
    "trace": list(TRACES),
    "machine": list(MACHINES),
    "scaling": ["fixed", "autoscaled"],
}
DEFAULTS = {name: default for name, (_, _, _, default) in SETTINGS.items()}
DEFAULTS |= {"router": "least_outstanding_tokens", "trace": "conversation"}
DEFAULTS |= {"machine": "h100_llama_8b", "scaling": "fixed"}
PREFIXES = {"trace": "code", "rate": 30, "requests": 200, "shared_prefix": 2048, "prefixes": 32}
PRESETS = {
    "How many replicas? (lesson 18)": {},
    "Bursts in turn (lesson 17)": {"trace": "bursts", "rate": 100, "router": "round_robin"},
    "Bursts by load (lesson 17)": {"trace": "bursts", "rate": 100},
    "Shared prefixes in turn (lesson 17)": PREFIXES | {"router": "round_robin"},
    "Shared prefixes stay together (lesson 17)": PREFIXES | {"router": "prefix_aware"},
    "A replica fails (lesson 17)": {"failure": 40},
    "An autoscaler is late (lesson 18)": {"trace": "bursts", "rate": 20, "requests": 800, "scaling": "autoscaled"},
    "Prefill and decode apart (lesson 18)": {"prefills": 2, "replicas": 2, "tpot_limit": 10},
}


class RecordingRouter:
    """A router that also keeps what it sees: outstanding tokens of replicas, and cached tokens of prompts."""

    def __init__(self, router):
        self.router = router
        self.times, self.outstanding, self.choices = [], [], []
        self.routed_tokens = self.cached_tokens = 0

    def choose(self, prompt_token_ids: list[int], replicas: list) -> int:
        self.times.append(replicas[0].now)
        self.outstanding.append([replica.outstanding_tokens for replica in replicas])
        index = self.router.choose(prompt_token_ids, replicas)
        self.choices.append(index)
        self.routed_tokens += len(prompt_token_ids)
        self.cached_tokens += replicas[index].cached_tokens(prompt_token_ids)
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
def _simulated(size: int, **settings) -> tuple[FleetResult, dict[str, RecordingRouter]]:
    """Simulate a fleet; limits do not matter here, so the page can change them without another simulation.

    Returns:
        The result, and the router of each kind of replica.
    """
    made, prefills = requests(settings), settings["prefills"]
    sizes = {"prefill_": prefills, "decode_": size} if prefills else {"": size}
    routers = {kind: RecordingRouter(FreeRowsFirst(ROUTERS[settings["router"]]())) for kind in sizes}
    options = {f"{kind}replicas": most for kind, most in sizes.items()}
    options |= {f"{kind}router": router for kind, router in routers.items()}
    given = made, config(settings), CostModel.load(MACHINES[settings["machine"]])
    if prefills:
        return simulate_disaggregated(*given, **options, seconds_per_token=TRANSFER_SECONDS), routers
    if settings["scaling"] == "autoscaled":
        options |= {"replicas": 1, "autoscaler": QueueLengthAutoscaler(1, size, settings["target"], INTERVAL)}
    failing = made[len(made) * settings["failure"] // 100 :][:1] if settings["failure"] else []
    options["failures"] = [(request.arrival, 0) for request in failing]
    return simulate_fleet(*given, **options, start_seconds=START_SECONDS), routers


def complete(settings: dict | None = None) -> dict:
    """Return all settings; with separate prefill replicas, the numbers are fixed and no replica fails."""
    settings = DEFAULTS | (settings or {})
    return settings | ({"scaling": "fixed", "failure": 0} if settings["prefills"] else {})


def run(settings: dict | None = None, size: int | None = None) -> dict:
    """Simulate a fleet, and return what the page shows of it.

    Args:
        settings: changes of DEFAULTS.
        size: the number of replicas, without those that only prefill; None for the settings' own.
    """
    settings = complete(settings)
    size = settings["replicas"] if size is None else size
    kept = {name: value for name, value in settings.items() if name not in ("replicas", "ttft_limit", "tpot_limit")}
    result, routers = _simulated(size, **kept)
    limits = {"ttft": settings["ttft_limit"] / 1000, "tpot": settings["tpot_limit"] / 1000}
    first = next(iter(routers.values()))
    return {
        "size": size,
        "name": fleet_name(settings, size),
        "mean_size": result.mean_replicas,
        "goodput": result.goodput(**limits),
        "within": result.within(**limits),
        "ttft": [result.percentile("ttft", percent) for percent in (50, 99)],
        "busy": result.utilization,
        "cached": first.cached_tokens / first.routed_tokens,
        "moved": result.resumed,
        "lost_tokens": result.lost_tokens,
        "seconds": max(result.last_tokens),
        "pictures": _pictures(settings, size, result, routers),
    }


def fleet_name(settings: dict, size: int) -> str:
    """Return the name of a fleet on the command line: 4, 1..4 or 2:4."""
    if settings["prefills"]:
        return f"{settings['prefills']}:{size}"
    return f"1..{size}" if settings["scaling"] == "autoscaled" else f"{size}"


def _pictures(settings: dict, size: int, result: FleetResult, routers: dict[str, RecordingRouter]) -> list[dict]:
    """Return the curves of each kind of replica: of each one, or of all together where their number changes."""
    if settings["scaling"] == "autoscaled":
        (router,) = routers.values()
        loads = [sum(seen) for seen in router.outstanding]
        times, counts, _ = (list(column) for column in zip(*result.sizes, strict=True))
        every = _curve("all", "tokens", router.times, loads, len(router.choices), result.utilization)
        return [every, _curve("number", "replicas", times, counts)]
    pictures, split = [], settings["prefills"]
    parts = {"": slice(None), "prefill_": slice(split), "decode_": slice(split, None)}
    for kind, router in routers.items():
        lifetimes, busy = result.lifetimes[parts[kind]], result.busy_seconds[parts[kind]]
        label, most = kind.replace("_", " "), split if kind == "prefill_" else size
        missing = [most - len(seen) for seen in router.outstanding]  # the first one, until it is replaced
        for replica in range(most):
            loads = [([0] * gone + seen)[replica] for gone, seen in zip(missing, router.outstanding, strict=True)]
            chosen = sum(gone + choice == replica for gone, choice in zip(missing, router.choices, strict=True))
            share = sum(busy[replica::most]) / result.seconds  # with that of a replacement
            pictures.append(_curve(f"{label}{replica + 1}", "tokens", router.times, loads, chosen, share))
        if len(lifetimes) > most:
            pictures[-most]["missing"] = [lifetimes[0].stopped, lifetimes[most].ready]
    return pictures


def _curve(name: str, unit: str, times: list, values: list, requests: int | None = None, busy: float = 0.0) -> dict:
    """Return a curve with steps: each value holds from its time on."""
    about = {"name": name, "unit": unit, "requests": requests, "busy": busy, "missing": []}
    return about | {"times": times, "values": values}


def about(settings: dict) -> str:
    """Return what the cost model describes, and where its numbers come from."""
    described = CostModel.load(MACHINES[settings["machine"]]).about
    return f"{described.get('model')} on {described.get('machine')}, {described.get('source', 'measured')}"


def command(settings: dict) -> str:
    """Return the command that prints the same numbers; "" if it has no options for the settings."""
    settings = complete(settings)
    if settings["shared_prefix"] or settings["failure"] or settings["scaling"] == "autoscaled":
        return ""
    names = {"synthetic": "trace", "rate": "rate", "requests": "requests", "router": "router", "cost": "machine"}
    options = " ".join(f"--{option} {settings[name]}" for option, name in names.items())
    limits = f"ttft={settings['ttft_limit'] / 1000:g},tpot={settings['tpot_limit'] / 1000:g}"
    if settings["prefills"]:
        names = (fleet_name(settings, size) for size in range(1, settings["replicas"] + 1))
        options += f" --disaggregate {','.join(names)}"
    return f"python -m helpers.simulator {options} --replicas 1..{settings['replicas']} --slo {limits}"
