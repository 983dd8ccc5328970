"""The command line of the simulator: how many replicas does this trace need?

    python -m helpers.simulator --trace FILE --replicas 1..32 --slo ttft=1,tpot=0.05      a trace file
    python -m helpers.simulator --synthetic conversation --rate 20 --replicas 4..12       invented requests
    python -m helpers.simulator --trace FILE --price-per-hour 2.5 --picture fleet.svg     costs and a picture
    python -m helpers.simulator --trace FILE --replicas 4,8 --autoscale 1..8              a fleet that grows and shrinks
    python -m helpers.simulator --trace FILE --replicas 3 --disaggregate 1:2,1..4:1..2    prefill : decode
    python -m helpers.simulator --trace FILE --replicas 4..6 --fail-every 3600            replicas fail
    python -m helpers.simulator --fit machine.json                                        measures this machine

The whole trace is simulated on each fleet. Rates are per second from the first arrival to the last token. --cost names
a file that --fit wrote, or one in `machines/` beside this file. The default, h100_llama_8b, is an estimate from data
sheets and contains no overhead.

The exit status is 0 on success, 2 for an invalid setting or file, 130 after Ctrl-C.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from tqdm import tqdm

from ..cluster.autoscaling import QueueLengthAutoscaler
from ..cluster.routing import ROUTERS, FreeRowsFirst
from ..engine import POLICIES, EngineConfig
from .cost_model import MACHINES, CostModel
from .disaggregation import simulate_disaggregated
from .fleet import TimedRequest, random_failures, simulate_fleet
from .fleet_result import FleetResult
from .synthetic import TRACES, synthetic_trace
from .trace_files import at_rate, read_trace

LIMITS = ("ttft", "tpot", "e2e")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m helpers.simulator",
        usage="%(prog)s (--trace FILE | --synthetic NAME | --fit FILE) [options]",
        description="Simulate a trace of requests on fleets of several sizes, and report goodput and cost.",
        allow_abbrev=False,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="FILE", help="a CSV file in the format of Azure's LLM traces or BurstGPT's")
    source.add_argument("--synthetic", choices=TRACES, help="invented requests with the statistics of such a trace")
    source.add_argument("--fit", metavar="FILE", help="measure a model on this machine, and write its costs")

    group = parser.add_argument_group("requests")
    group.add_argument("--rate", type=float, metavar="R", help="scale the gaps of arrivals to R requests per second")
    group.add_argument("--requests", type=int, metavar="N", help="only N requests (--synthetic: 1000, --fit: 3000)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of --synthetic and of random routers")

    group = parser.add_argument_group("--fit")
    group.add_argument(
        "--model", metavar="NAME", help="a folder, a GGUF file or a Hub id (default: the embedded model)"
    )
    group.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")

    add = parser.add_argument_group("fleet").add_argument
    add("--replicas", type=_sizes, default=[1, 2, 4], metavar="N|N..M|N,M", help="how many (default: 1,2,4)")
    router = "routing policy; while some replicas have a free row, it chooses among these (default: %(default)s)"
    add("--router", choices=ROUTERS, default="least_outstanding_tokens", help=router)
    known = f"a file of --fit, or one of {', '.join(MACHINES)}"
    add("--cost", default="h100_llama_8b", metavar="FILE", help=f"{known} (default: %(default)s)")
    add("--rows", type=int, metavar="N", help="rows per replica (default: 64; --fit: 16)")
    add("--tokens", type=int, metavar="N", help="tokens per iteration (default: 2048; --fit: 256)")
    add("--blocks", type=int, metavar="N", help="blocks of KV cache per replica (default: unlimited)")
    add("--block-size", type=int, default=16, metavar="N", help="tokens per block (default: 16)")
    add("--policy", choices=POLICIES, default="fcfs", help="order of the queue (default: fcfs)")

    add = parser.add_argument_group("further fleets and their events").add_argument
    add("--autoscale", type=_sizes, metavar="N..M", help="also a fleet that grows and shrinks")
    target = "unfinished requests per replica where their number changes (default: the number of rows)"
    add("--target", type=float, metavar="N", help=target)
    add("--start-seconds", type=float, default=60, metavar="S", help="until a replica is ready (60)")
    add("--fail-every", type=float, metavar="S", help="mean seconds from one failure of a replica to the next")
    pairs = "also P replicas that prefill, D that decode; N..M for a number that grows and shrinks"
    add("--disaggregate", type=_pairs, default={}, metavar="P:D,...", help=pairs)
    transfer = "to move the keys and values of a token (default: 2.6e-06, which is 131 kB at 50 GB/s)"
    add("--transfer-seconds", type=float, default=2.6e-6, metavar="S", help=transfer)

    add = parser.add_argument_group("results").add_argument
    add("--slo", type=_slo, default={}, metavar="NAME=S,...", help=f"latency limits in seconds: {', '.join(LIMITS)}")
    add("--share", type=_share, default=0.99, help="share of requests within the limits (default: 0.99)")
    add("--price-per-hour", type=float, metavar="P", help="of one replica; adds the price of tokens")
    add("--picture", metavar="FILE", help="an SVG file: goodput for each of --replicas")
    return parser


def _sizes(text: str) -> list[int]:
    try:
        first, dots, last = text.partition("..")
        sizes = list(range(int(first), int(last) + 1)) if dots else [int(one) for one in text.split(",")]
        if not sizes or min(sizes) < 1:
            raise ValueError
        return sorted(set(sizes))
    except ValueError:
        raise argparse.ArgumentTypeError(f"sizes are like 4, 1..8 or 1,2,4, not {text!r}") from None


def _pairs(text: str) -> dict[str, tuple[list[int], list[int]]]:
    pairs = {}
    try:
        for pair in text.split(","):
            prefills, decodes = pair.split(":")
            pairs[pair] = _sizes(prefills), _sizes(decodes)
        return pairs
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"pairs are like 2:1, 1:1,2:1 or 1..4:2, not {text!r}") from None


def _slo(text: str) -> dict[str, float]:
    try:
        limits = {name: float(seconds) for name, seconds in (one.split("=") for one in text.split(","))}
        if not set(limits) <= set(LIMITS) or not all(0 < limit < float("inf") for limit in limits.values()):
            raise ValueError
        return limits
    except ValueError:
        known = ",".join(f"{name}=SECONDS" for name in LIMITS)
        raise argparse.ArgumentTypeError(f"limits are some of {known}, not {text!r}") from None


def _share(text: str) -> float:
    try:
        if 0 < float(text) <= 1:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"a share is above 0 and at most 1, not {text!r}")


def read_requests(args: argparse.Namespace) -> list[TimedRequest]:
    """Return the requests that the arguments describe.

    Raises:
        OSError, ValueError: see `read_trace`, `at_rate` and `synthetic_trace`.
    """
    if args.synthetic:
        rate = 1.0 if args.rate is None else args.rate
        return list(synthetic_trace(args.synthetic, args.requests or 1000, rate, args.seed))
    requests = read_trace(args.trace)[: args.requests]
    return requests if args.rate is None else at_rate(requests, args.rate)


def plan_capacity(
    requests: Sequence[TimedRequest], cost: CostModel, args: argparse.Namespace
) -> dict[str, FleetResult]:
    """Simulate the requests on each fleet, with a progress bar; the keys say how many replicas each of them has.

    Raises:
        ValueError: see `simulate_fleet` and `simulate_disaggregated`.
    """
    results, fleets = {}, _fleets(cost, args)
    with tqdm(total=len(requests) * len(fleets), unit="request", leave=False, disable=None) as bar:
        for name, simulate in fleets.items():
            results[name] = simulate(_counted(requests, bar))
    return results


def _fleets(cost: CostModel, args: argparse.Namespace) -> dict[str, Callable[[Iterable[TimedRequest]], FleetResult]]:
    """Return a function for each fleet that simulates a trace on it."""
    config = EngineConfig(
        max_batch_size=args.rows,
        max_tokens_per_step=args.tokens,
        num_blocks=args.blocks,
        block_size=args.block_size,
        policy=args.policy,
        prefix_caching=False,  # a trace does not say which prompts begin alike
    )

    def replicas(sizes: list[int], kind: str = "", seed: int = args.seed) -> dict:
        """Return the arguments for the replicas of one kind: the first of these sizes, at most the last one."""
        least, most, autoscaler = sizes[0], sizes[-1], None
        if least < most:
            autoscaler = QueueLengthAutoscaler(least, most, args.rows if args.target is None else args.target)
        failures = () if args.fail_every is None else random_failures(most, args.fail_every, seed)
        router = FreeRowsFirst(ROUTERS[args.router](*[args.seed] * (args.router == "power_of_two_choices")))
        options = {"replicas": least, "router": router, "failures": failures, "autoscaler": autoscaler}
        return {f"{kind}{name}": value for name, value in options.items()}

    options = {"config": config, "cost": cost, "start_seconds": args.start_seconds}
    fleets = {f"{size}": partial(simulate_fleet, **options, **replicas([size])) for size in args.replicas}
    if args.autoscale:
        sizes = args.autoscale
        fleets[f"{sizes[0]}..{sizes[-1]}"] = partial(simulate_fleet, **options, **replicas(sizes))
    options["seconds_per_token"] = args.transfer_seconds
    for pair, (prefills, decodes) in args.disaggregate.items():
        kinds = replicas(prefills, "prefill_") | replicas(decodes, "decode_", args.seed + 1)
        fleets[pair] = partial(simulate_disaggregated, **options, **kinds)
    return fleets


def _counted(requests: Iterable[TimedRequest], bar: tqdm) -> Iterable[TimedRequest]:
    for request in requests:
        yield request
        bar.update()


def price_per_million(result: FleetResult, price_per_hour: float) -> float:
    """Return the price of a million output tokens, with the time in which replicas start or are idle."""
    return price_per_hour * result.replica_seconds / 3600 / (sum(result.output_tokens) / 1e6)


def table(results: dict[str, FleetResult], args: argparse.Namespace) -> str:
    """Return a line for each fleet."""
    heads = ["replicas", "finished/s", "goodput/s", "within", "TTFT p50", "p99 (s)", "TPOT p99", "busy", "preempted"]
    scales = args.autoscale is not None or any(".." in pair for pair in args.disaggregate)
    heads += ["mean size"] * scales + ["resumed"] * (args.fail_every is not None)
    heads += ["price per 1M"] * (args.price_per_hour is not None)
    lines = ["".join(f"{head:>13}" for head in heads)]
    for name, result in results.items():
        latencies = result.percentile("ttft", 50), result.percentile("ttft", 99), result.percentile("tpot", 99)
        cells = [name, f"{len(result) / result.seconds:.3g}", f"{result.goodput(**args.slo):.3g}"]
        cells += [f"{result.within(**args.slo):.1%}", *("-" if one is None else f"{one:.3g}" for one in latencies)]
        cells += [f"{result.utilization:.0%}", f"{sum(result.preemptions)}"]
        if scales:
            cells.append(f"{result.mean_replicas:.3g}")
        if args.fail_every is not None:
            cells.append(f"{result.resumed}")
        if args.price_per_hour is not None:
            cells.append(f"{price_per_million(result, args.price_per_hour):.3g}")
        lines.append("".join(f"{cell:>13}" for cell in cells))
    return "\n".join(lines)


def answer(results: dict[str, FleetResult], args: argparse.Namespace) -> str:
    """Return a sentence that names the smallest fleet with the required share of requests within the limits."""
    limits = " and ".join(f"{name.upper()} <= {limit:g} s" for name, limit in args.slo.items())
    enough = [name for name, result in results.items() if result.within(**args.slo) >= args.share]
    served = f"To serve {100 * args.share:.4g}% of the requests with {limits},"
    if not enough:
        return f"{served} all of these fleets are too small: try more replicas."
    smallest = min(enough, key=lambda name: results[name].mean_replicas)
    return f"{served} the smallest of these fleets has {smallest} replica{'s' * (smallest != '1')}."


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate what the arguments describe, or measure this machine.

    Returns:
        The exit status: 0 on success, 130 after Ctrl-C.

    Raises:
        SystemExit: 2 for an invalid setting or file; 0 after --help.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    rows, tokens = (16, 256) if args.fit else (64, 2048)
    args.rows, args.tokens = rows if args.rows is None else args.rows, tokens if args.tokens is None else args.tokens
    if args.picture and not args.picture.endswith(".svg"):
        parser.error(f"--picture writes SVG: end the file name with .svg, unlike {args.picture!r}.")
    if args.price_per_hour is not None and not 0 <= args.price_per_hour < float("inf"):
        parser.error(f"--price-per-hour is a number of at least 0, not {args.price_per_hour}.")
    try:
        if args.requests is not None and args.requests < 1:
            raise ValueError(f"--requests is at least 1, not {args.requests}.")
        if args.fail_every is not None and not 1 <= args.fail_every < float("inf"):
            raise ValueError(f"--fail-every is a number of at least 1, not {args.fail_every}.")
        if args.fit:
            from .fit import fit_machine  # only here: it needs a model, torch and numpy

            fit_machine(args.fit, args.requests or 3000, args.model, args.dtype, args.rows, args.tokens)
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
        parser.error(f"cannot open {file}: {error.strerror}." if file else str(error))
    about = [cost.about.get(name, f"unknown {name}") for name in ("model", "machine", "source")]
    print(f"{len(requests)} requests in {requests[-1].arrival:.4g} s; {about[0]} on {about[1]}, {about[2]}")
    print(f"\n{table(results, args)}")
    if args.slo:
        print(f"\n{answer(results, args)}")
    if args.picture:
        _draw(results, args)
    return 0


def _draw(results: dict[str, FleetResult], args: argparse.Namespace) -> None:
    from .. import plots  # only here: importing matplotlib takes a while

    sizes, fixed = args.replicas, [results[f"{size}"] for size in args.replicas]
    series = {"finished": (sizes, [len(result) / result.seconds for result in fixed])}
    if args.slo:
        series["within the limits"] = (sizes, [result.goodput(**args.slo) for result in fixed])
    plots.lines(series, "replicas", "requests per second").save(args.picture)


if __name__ == "__main__":
    sys.exit(main())
