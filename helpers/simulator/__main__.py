"""The command line of the simulator: how many replicas does this trace need?

    python -m helpers.simulator --trace FILE --replicas 1..32 --slo ttft=1,tpot=0.05      a trace file
    python -m helpers.simulator --synthetic conversation --rate 20 --replicas 4..12       invented requests
    python -m helpers.simulator --trace FILE --price-per-hour 2.5                         the price of tokens
    python -m helpers.simulator --trace FILE --replicas 4,8 --autoscale 1..8              a fleet that grows and shrinks
    python -m helpers.simulator --trace FILE --replicas 3 --disaggregate 1:2,2:1          prefill : decode

The whole trace is simulated on each fleet. Rates are per second from the first arrival to the last token. --cost names
a JSON file of a `CostModel`, or one in `machines/` beside this file. The default, h100_llama_8b, is an estimate from
data sheets and contains no overhead.

The exit status is 0 on success, 2 for an invalid setting or file, 130 after Ctrl-C.
"""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from tqdm import tqdm

from ..cluster.autoscaling import QueueLengthAutoscaler
from ..cluster.routing import ROUTERS, FreeRowsFirst
from ..command_line import fields_of, latency_limits, make_command, one_value, options_from, parse, refuse
from ..engine import POLICIES, EngineConfig
from .cost_model import MACHINES, CostModel
from .disaggregation import simulate_disaggregated
from .fleet import TimedRequest, simulate_fleet
from .fleet_result import FleetResult
from .synthetic import TRACES, synthetic_trace
from .trace_files import at_rate, read_trace

REQUESTS, FLEET, FURTHER, RESULTS = "Requests", "Fleet", "Further fleets", "Results"


def _sizes(text: str) -> list[int]:
    try:
        first, dots, last = text.partition("..")
        sizes = list(range(int(first), int(last) + 1)) if dots else [int(size) for size in text.split(",")]
        if not sizes or min(sizes) < 1:
            raise ValueError
        return sorted(set(sizes))
    except ValueError:
        raise ValueError(f"sizes are like 4, 1..8 or 1,2,4, not {text!r}") from None


def _pairs(text: str) -> list[tuple[int, int]]:
    try:
        pairs = [tuple(int(number) for number in pair.split(":")) for pair in text.split(",")]
        if any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
            raise ValueError
        return pairs
    except ValueError:
        raise ValueError(f"pairs are like 2:1 or 1:1,2:1, not {text!r}") from None


FleetOptions = options_from(
    EngineConfig,
    FLEET,
    num_blocks=Annotated[
        int | None, Parameter(name=("--blocks", "--num-blocks"), help="blocks of KV cache; unlimited if omitted.")
    ],
    block_size=int,
    policy=Annotated[Literal[*POLICIES], Parameter(help="order of the queue.")],
)


@dataclass(frozen=True, kw_only=True)
class SimulatorOptions(FleetOptions):
    """The options of `python -m helpers.simulator`.

    Attributes:
        trace: a CSV file in the format of Azure's LLM traces or BurstGPT's.
        synthetic: invented requests with the statistics of such a trace.
        rate: scale the gaps of arrivals to this many requests per second.
        requests: only this many requests; --synthetic makes 1000 if omitted.
        seed: of --synthetic.
        replicas: how many, such as 4, 1..8 or 1,2,4. [default: 1,2,4]
        router: routing policy; while some replicas have a free row, it chooses among these.
        cost: a file with a cost model, or the name of one in `machines/`.
        rows: rows per replica.
        tokens: tokens per iteration.
        autoscale: also a fleet that grows and shrinks, such as 1..8.
        target: with --autoscale, unfinished requests per replica; the number of rows if omitted.
        start_seconds: with --autoscale, until a replica is ready.
        disaggregate: also P replicas that prefill and D that decode, P:D,...
        transfer_seconds: to move the keys and values of a token; the default is 131 kB at 50 GB/s.
        slo: latency limits in seconds, such as ttft=1,tpot=0.05,e2e=10.
        share: share of requests within the limits.
        price_per_hour: of one replica; adds the price of tokens.

    Raises:
        ValueError: an option is outside its range, or excludes another one.
    """

    trace: Annotated[str | None, Parameter(group=REQUESTS)] = None
    synthetic: Annotated[Literal[*TRACES] | None, Parameter(group=REQUESTS)] = None
    rate: Annotated[float | None, Parameter(group=REQUESTS)] = None
    requests: Annotated[int | None, Parameter(group=REQUESTS)] = None
    seed: Annotated[int, Parameter(group=REQUESTS)] = 0
    replicas: Annotated[Any, one_value(_sizes), Parameter(group=FLEET, show_default=False)] = (1, 2, 4)
    router: Annotated[Literal[*ROUTERS], Parameter(group=FLEET)] = "least_outstanding_tokens"
    cost: Annotated[str, Parameter(group=FLEET)] = "h100_llama_8b"
    rows: Annotated[int, Parameter(group=FLEET)] = 64
    tokens: Annotated[int, Parameter(group=FLEET)] = 2048
    autoscale: Annotated[Any, one_value(_sizes), Parameter(group=FURTHER)] = None
    target: Annotated[float | None, Parameter(group=FURTHER)] = None
    start_seconds: Annotated[float, Parameter(group=FURTHER)] = 60.0
    disaggregate: Annotated[Any, one_value(_pairs), Parameter(group=FURTHER)] = None
    transfer_seconds: Annotated[float, Parameter(group=FURTHER)] = 2.6e-6
    slo: Annotated[Any, one_value(latency_limits), Parameter(group=RESULTS)] = None
    share: Annotated[float, Parameter(group=RESULTS)] = 0.99
    price_per_hour: Annotated[float | None, Parameter(group=RESULTS)] = None

    def __post_init__(self):
        if (self.trace is None) == (self.synthetic is None):
            raise ValueError("Give one of --trace FILE and --synthetic NAME.")
        if not 0 < self.share <= 1:
            raise ValueError(f"--share is above 0 and at most 1, not {self.share}.")
        if self.price_per_hour is not None and not 0 <= self.price_per_hour < math.inf:
            raise ValueError(f"--price-per-hour is a number of at least 0, not {self.price_per_hour}.")
        if self.requests is not None and self.requests < 1:
            raise ValueError(f"--requests is at least 1, not {self.requests}.")
        _ = self.config

    @property
    def limits(self) -> dict[str, float]:
        """The limits of latencies, in seconds."""
        return self.slo or {}

    @property
    def config(self) -> EngineConfig:
        """The settings of each replica."""
        return EngineConfig(
            self.rows,
            self.tokens,
            **fields_of(FleetOptions, self),
            prefix_caching=False,  # a trace does not say which prompts begin alike
        )


command = make_command("helpers.simulator", __doc__, SimulatorOptions)


def read_requests(args: SimulatorOptions) -> list[TimedRequest]:
    """Return the requests that the arguments describe."""
    if args.synthetic:
        rate = 1.0 if args.rate is None else args.rate
        return list(synthetic_trace(args.synthetic, args.requests or 1000, rate, args.seed))
    requests = read_trace(args.trace)[: args.requests]
    return requests if args.rate is None else at_rate(requests, args.rate)


def plan_capacity(requests: Sequence[TimedRequest], cost: CostModel, args: SimulatorOptions) -> dict[str, FleetResult]:
    """Simulate the requests on each fleet, with a progress bar; the keys say how many replicas each of them has."""
    results, fleets = {}, _fleets(cost, args)
    with tqdm(total=len(requests) * len(fleets), unit="request", leave=False, disable=None) as bar:
        for name, simulate in fleets.items():
            results[name] = simulate(_counted(requests, bar))
    return results


def _fleets(cost: CostModel, args: SimulatorOptions) -> dict[str, Callable[[Iterable[TimedRequest]], FleetResult]]:
    """Return a function for each fleet that simulates a trace on it."""
    config = args.config

    def router() -> FreeRowsFirst:
        return FreeRowsFirst(ROUTERS[args.router]())

    fleets = {f"{size}": partial(simulate_fleet, replicas=size, router=router()) for size in args.replicas}
    if args.autoscale:
        least, most = args.autoscale[0], args.autoscale[-1]
        target = config.max_batch_size if args.target is None else args.target
        fleets[f"{least}..{most}"] = partial(
            simulate_fleet,
            replicas=least,
            router=router(),
            autoscaler=QueueLengthAutoscaler(least, most, target),
            start_seconds=args.start_seconds,
        )
    for prefills, decodes in args.disaggregate or ():
        fleets[f"{prefills}:{decodes}"] = partial(
            simulate_disaggregated,
            prefill_replicas=prefills,
            decode_replicas=decodes,
            prefill_router=router(),
            decode_router=router(),
            seconds_per_token=args.transfer_seconds,
        )
    return {name: partial(simulate, config=config, cost=cost) for name, simulate in fleets.items()}


def _counted(requests: Iterable[TimedRequest], bar: tqdm) -> Iterable[TimedRequest]:
    for request in requests:
        yield request
        bar.update()


def price_per_million(result: FleetResult, price_per_hour: float) -> float:
    """Return the price of a million output tokens, with the time in which replicas start or are idle."""
    return price_per_hour * result.replica_seconds / 3600 / (sum(result.output_tokens) / 1e6)


def table(results: dict[str, FleetResult], args: SimulatorOptions) -> str:
    """Return a line for each fleet."""
    heads = ["replicas", "finished/s", "goodput/s", "within", "TTFT p50", "p99 (s)", "TPOT p99", "busy", "preempted"]
    heads += ["mean size"] * (args.autoscale is not None)
    heads += ["price per 1M"] * (args.price_per_hour is not None)
    lines = ["".join(f"{head:>13}" for head in heads)]
    for name, result in results.items():
        latencies = result.percentile("ttft", 50), result.percentile("ttft", 99), result.percentile("tpot", 99)
        cells = [name, f"{len(result) / result.seconds:.3g}", f"{result.goodput(**args.limits):.3g}"]
        cells += [f"{result.within(**args.limits):.1%}", *("-" if one is None else f"{one:.3g}" for one in latencies)]
        cells += [f"{result.utilization:.0%}", f"{sum(result.preemptions)}"]
        if args.autoscale is not None:
            cells.append(f"{result.mean_replicas:.3g}")
        if args.price_per_hour is not None:
            cells.append(f"{price_per_million(result, args.price_per_hour):.3g}")
        lines.append("".join(f"{cell:>13}" for cell in cells))
    return "\n".join(lines)


def answer(results: dict[str, FleetResult], args: SimulatorOptions) -> str:
    """Return a sentence that names the smallest fleet with the required share of requests within the limits."""
    limits = " and ".join(f"{name.upper()} <= {limit:g} s" for name, limit in args.limits.items())
    enough = [name for name, result in results.items() if result.within(**args.limits) >= args.share]
    served = f"To serve {100 * args.share:.4g}% of the requests with {limits},"
    if not enough:
        return f"{served} all of these fleets are too small: try more replicas."
    smallest = min(enough, key=lambda name: results[name].mean_replicas)
    return f"{served} the smallest of these fleets has {smallest} replica{'s' * (smallest != '1')}."


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate what the arguments describe.

    Returns:
        The exit status: 0 on success, 130 after Ctrl-C.

    Raises:
        SystemExit: 2 for an invalid setting or file; 0 after --help.
    """
    args = parse(command, argv)
    try:
        cost = CostModel.load(MACHINES.get(args.cost, args.cost))
        requests = read_requests(args)
        results = plan_capacity(requests, cost, args)
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError) as error:
        file = getattr(error, "filename", None)
        refuse(command, f"cannot open {file}: {error.strerror}." if file else str(error))
    about = [cost.about.get(name, f"unknown {name}") for name in ("model", "machine", "source")]
    count = "1 request arrives" if len(requests) == 1 else f"{len(requests)} requests arrive"
    arrive = f"{count} within {requests[-1].arrival:.4g} simulated seconds"
    print(f"{arrive}; {about[0]} on {about[1]}, {about[2]}")
    print(f"\n{table(results, args)}")
    if args.slo:
        print(f"\n{answer(results, args)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
