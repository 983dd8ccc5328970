"""The command line of the simulator: how many replicas does this trace need?

    python -m helpers.simulator --trace FILE --replicas 1..32 --slo ttft=1,tpot=0.05      a trace file
    python -m helpers.simulator --synthetic conversation --rate 20 --replicas 4..12       invented requests
    python -m helpers.simulator --trace FILE --price-per-hour 2.5 --picture fleet.svg     costs and a picture
    python -m helpers.simulator --trace FILE --replicas 4,8 --autoscale 1..8              a fleet that grows and shrinks
    python -m helpers.simulator --trace FILE --replicas 3 --disaggregate 1:2,2:1          prefill : decode
    python -m helpers.simulator --trace FILE --replicas 4..6 --fail-every 3600            replicas fail
    python -m helpers.simulator --trace FILE --replicas 8 --tensor-parallel 2,4           models split over devices
    python -m helpers.simulator --fit machine.json                                        measures this machine

The whole trace is simulated on each fleet. Rates are per second from the first arrival to the last token. --cost names
a file that --fit wrote, or one in `machines/` beside this file. The default, h100_llama_8b, is an estimate from data
sheets and contains no overhead.

The exit status is 0 on success, 2 for an invalid setting or file, 130 after Ctrl-C.
"""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from tqdm import tqdm

from ..cluster.autoscaling import QueueLengthAutoscaler
from ..cluster.routing import ROUTERS, FreeRowsFirst
from ..command_line import fields_of, latency_limits, make_command, one_value, options_from, parse, refuse
from ..engine import POLICIES, EngineConfig
from .cost_model import MACHINES, CostModel
from .disaggregation import simulate_disaggregated
from .fleet import TimedRequest, random_failures, simulate_fleet
from .fleet_result import FleetResult
from .synthetic import TRACES, synthetic_trace
from .trace_files import at_rate, read_trace

REQUESTS, FIT, FLEET, FURTHER, RESULTS = "Requests", "--fit", "Fleet", "Further fleets and their events", "Results"


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
        fit: a file; measure a model on this machine, and write its costs there.
        rate: scale the gaps of arrivals to this many requests per second.
        requests: only this many requests; --synthetic makes 1000 and --fit 3000 if omitted.
        seed: of --synthetic and of --fail-every.
        model: a folder or a Hub id; the embedded model if omitted.
        dtype: the type of the weights.
        replicas: how many, such as 4, 1..8 or 1,2,4. [default: 1,2,4]
        router: routing policy; while some replicas have a free row, it chooses among these.
        cost: a file of --fit, or the name of one in `machines/`.
        rows: rows per replica; 64 if omitted, 16 with --fit.
        tokens: tokens per iteration; 2048 if omitted, 256 with --fit.
        autoscale: also a fleet that grows and shrinks, such as 1..8.
        target: with --autoscale, unfinished requests per replica; the number of rows if omitted.
        start_seconds: with --autoscale or --fail-every, until a replica is ready.
        fail_every: mean seconds from one failure of a device to the next.
        disaggregate: also P replicas that prefill and D that decode, P:D,...
        tensor_parallel: also replicas of so many devices, such as 2,4: as many devices in all as --replicas says, with
            the rows, tokens and blocks of all their devices.
        sum_seconds: of a sum over the devices of a replica; 10 microseconds by default.
        link_bytes: per second between these devices; the default was measured on NVLink.
        transfer_seconds: to move the keys and values of a token; the default is 131 kB at 50 GB/s.
        slo: latency limits in seconds, such as ttft=1,tpot=0.05,e2e=10.
        share: share of requests within the limits.
        price_per_hour: of one device; adds the price of tokens.
        picture: an SVG file: goodput for each of --replicas.

    Raises:
        ValueError: an option is outside its range, or excludes another one.
    """

    trace: Annotated[str | None, Parameter(group=REQUESTS)] = None
    synthetic: Annotated[Literal[*TRACES] | None, Parameter(group=REQUESTS)] = None
    fit: Annotated[str | None, Parameter(group=REQUESTS)] = None
    rate: Annotated[float | None, Parameter(group=REQUESTS)] = None
    requests: Annotated[int | None, Parameter(group=REQUESTS)] = None
    seed: Annotated[int, Parameter(group=REQUESTS)] = 0
    model: Annotated[str | None, Parameter(group=FIT)] = None
    dtype: Annotated[Literal["float32", "bfloat16"], Parameter(group=FIT)] = "float32"
    replicas: Annotated[Any, one_value(_sizes), Parameter(group=FLEET, show_default=False)] = (1, 2, 4)
    router: Annotated[Literal[*ROUTERS], Parameter(group=FLEET)] = "least_outstanding_tokens"
    cost: Annotated[str, Parameter(group=FLEET)] = "h100_llama_8b"
    rows: Annotated[int | None, Parameter(group=FLEET)] = None
    tokens: Annotated[int | None, Parameter(group=FLEET)] = None
    autoscale: Annotated[Any, one_value(_sizes), Parameter(group=FURTHER)] = None
    target: Annotated[float | None, Parameter(group=FURTHER)] = None
    start_seconds: Annotated[float, Parameter(group=FURTHER)] = 60.0
    fail_every: Annotated[float | None, Parameter(group=FURTHER)] = None
    disaggregate: Annotated[Any, one_value(_pairs), Parameter(group=FURTHER)] = None
    tensor_parallel: Annotated[Any, one_value(_sizes), Parameter(group=FURTHER)] = None
    sum_seconds: Annotated[float, Parameter(group=FURTHER)] = 1e-5
    link_bytes: Annotated[float, Parameter(group=FURTHER)] = 366e9
    transfer_seconds: Annotated[float, Parameter(group=FURTHER)] = 2.6e-6
    slo: Annotated[Any, one_value(latency_limits), Parameter(group=RESULTS)] = None
    share: Annotated[float, Parameter(group=RESULTS)] = 0.99
    price_per_hour: Annotated[float | None, Parameter(group=RESULTS)] = None
    picture: Annotated[str | None, Parameter(group=RESULTS)] = None

    def __post_init__(self):
        if sum(source is not None for source in (self.trace, self.synthetic, self.fit)) != 1:
            raise ValueError("Give one of --trace FILE, --synthetic NAME and --fit FILE.")
        if not 0 < self.share <= 1:
            raise ValueError(f"--share is above 0 and at most 1, not {self.share}.")
        if self.picture and not self.picture.endswith(".svg"):
            raise ValueError(f"--picture writes SVG: end the file name with .svg, unlike {self.picture!r}.")
        if self.price_per_hour is not None and not 0 <= self.price_per_hour < math.inf:
            raise ValueError(f"--price-per-hour is a number of at least 0, not {self.price_per_hour}.")
        if self.requests is not None and self.requests < 1:
            raise ValueError(f"--requests is at least 1, not {self.requests}.")
        if self.fail_every is not None and not 1 <= self.fail_every < math.inf:
            raise ValueError(f"--fail-every is a number of at least 1, not {self.fail_every}.")
        if self.fail_every is not None and self.disaggregate:
            raise ValueError("--fail-every excludes --disaggregate: these replicas do not fail in the simulation.")
        undivided = [devices for devices in self.tensor_parallel or () if all(size % devices for size in self.replicas)]
        if undivided:
            raise ValueError(
                f"--tensor-parallel {undivided[0]} divides none of --replicas: add a number that it divides."
            )
        _ = self.config

    @property
    def limits(self) -> dict[str, float]:
        """The limits of latencies, in seconds."""
        return self.slo or {}

    @property
    def config(self) -> EngineConfig:
        """The settings of each replica."""
        rows, tokens = (16, 256) if self.fit else (64, 2048)
        return EngineConfig(
            rows if self.rows is None else self.rows,
            tokens if self.tokens is None else self.tokens,
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

    def replicas(least: int, most: int, devices: int = 1) -> dict:
        """Return the arguments for replicas of so many devices, at first the least number of them."""
        failures = () if args.fail_every is None else random_failures(most, args.fail_every / devices, args.seed)
        return {"replicas": least, "router": router(), "failures": failures, "start_seconds": args.start_seconds}

    options = {"config": config, "cost": cost}
    fleets = {f"{size}": partial(simulate_fleet, **options, **replicas(size, size)) for size in args.replicas}
    for devices in args.tensor_parallel or ():
        split = {
            "config": replace(
                config,
                max_batch_size=config.max_batch_size * devices,
                max_tokens_per_step=config.max_tokens_per_step * devices,
                num_blocks=config.num_blocks and config.num_blocks * devices,
            ),
            "cost": cost.split(devices, args.sum_seconds, args.link_bytes),
        }
        for size in (size // devices for size in args.replicas if size % devices == 0):
            fleets[f"{size}x{devices}"] = partial(simulate_fleet, **split, **replicas(size, size, devices))
    if args.autoscale:
        least, most = args.autoscale[0], args.autoscale[-1]
        target = config.max_batch_size if args.target is None else args.target
        fleets[f"{least}..{most}"] = partial(
            simulate_fleet, **options, **replicas(least, most), autoscaler=QueueLengthAutoscaler(least, most, target)
        )
    for prefills, decodes in args.disaggregate or ():
        fleets[f"{prefills}:{decodes}"] = partial(
            simulate_disaggregated,
            **options,
            prefill_replicas=prefills,
            decode_replicas=decodes,
            prefill_router=router(),
            decode_router=router(),
            seconds_per_token=args.transfer_seconds,
        )
    return fleets


def _counted(requests: Iterable[TimedRequest], bar: tqdm) -> Iterable[TimedRequest]:
    for request in requests:
        yield request
        bar.update()


def price_per_million(result: FleetResult, price_per_hour: float) -> float:
    """Return the price of a million output tokens, with the time in which replicas start or are idle."""
    return price_per_hour * result.replica_seconds / 3600 / (sum(result.output_tokens) / 1e6)


def devices_of(name: str) -> int:
    """Return how many devices each replica of a fleet has, given its name: 2 for 4x2."""
    return int(name.partition("x")[2] or 1)


def table(results: dict[str, FleetResult], args: SimulatorOptions) -> str:
    """Return a line for each fleet."""
    heads = ["replicas", "finished/s", "goodput/s", "within", "TTFT p50", "p99 (s)", "TPOT p99", "busy", "preempted"]
    heads += ["mean size"] * (args.autoscale is not None) + ["resumed"] * (args.fail_every is not None)
    heads += ["price per 1M"] * (args.price_per_hour is not None)
    lines = ["".join(f"{head:>13}" for head in heads)]
    for name, result in results.items():
        latencies = result.percentile("ttft", 50), result.percentile("ttft", 99), result.percentile("tpot", 99)
        cells = [name, f"{len(result) / result.seconds:.3g}", f"{result.goodput(**args.limits):.3g}"]
        cells += [
            f"{result.within(**args.limits):.1%}",
            *("-" if value is None else f"{value:.3g}" for value in latencies),
        ]
        cells += [f"{result.utilization:.0%}", f"{sum(result.preemptions)}"]
        if args.autoscale is not None:
            cells.append(f"{result.mean_replicas:.3g}")
        if args.fail_every is not None:
            cells.append(f"{result.resumed}")
        if args.price_per_hour is not None:
            cells.append(f"{price_per_million(result, args.price_per_hour * devices_of(name)):.3g}")
        lines.append("".join(f"{cell:>13}" for cell in cells))
    return "\n".join(lines)


def answer(results: dict[str, FleetResult], args: SimulatorOptions) -> str:
    """Return a sentence that names the smallest fleet with the required share of requests within the limits."""
    limits = " and ".join(f"{name.upper()} <= {limit:g} s" for name, limit in args.limits.items())
    enough = [name for name, result in results.items() if result.within(**args.limits) >= args.share]
    served = f"To serve {100 * args.share:.4g}% of the requests with {limits},"
    if not enough:
        return f"{served} all of these fleets are too small: try more replicas."
    smallest = min(enough, key=lambda name: results[name].mean_replicas * devices_of(name))
    return f"{served} the smallest of these fleets has {smallest} replica{'s' * (smallest != '1')}."


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate what the arguments describe, or measure this machine.

    Returns:
        The exit status: 0 on success, 130 after Ctrl-C.

    Raises:
        SystemExit: 2 for an invalid setting or file; 0 after --help.
    """
    args = parse(command, argv)
    try:
        if args.fit:
            from .fit import fit_machine  # only here: it needs a model, torch and numpy

            limits = args.config.max_batch_size, args.config.max_tokens_per_step
            fit_machine(args.fit, args.requests or 3000, args.model, args.dtype, *limits)
            return 0
        if args.picture:
            Path(args.picture).touch()  # fail now rather than after a long simulation
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
    if args.picture:
        _draw(results, args)
    return 0


def _draw(results: dict[str, FleetResult], args: SimulatorOptions) -> None:
    from .. import plots  # only here: importing matplotlib takes a while

    sizes, fixed = args.replicas, [results[f"{size}"] for size in args.replicas]
    series = {"finished": (sizes, [len(result) / result.seconds for result in fixed])}
    if args.slo:
        series["within the limits"] = (sizes, [result.goodput(**args.limits) for result in fixed])
    plots.lines(series, "replicas", "requests per second").save(args.picture)


if __name__ == "__main__":
    sys.exit(main())
