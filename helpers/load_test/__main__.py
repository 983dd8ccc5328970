"""The command line of the load generator.

    python -m helpers.load_test --rate 4                      open loop: Poisson arrivals, 4 requests per second
    python -m helpers.load_test --rate 4 --cv 3               the same rate in bursts
    python -m helpers.load_test --closed 8                    closed loop: 8 users who wait for their responses
    python -m helpers.load_test --sweep                       rates from idle to overloaded, and the knee
    python -m helpers.load_test --sweep 1 2 4 --picture out.svg --limit ttft=0.5

The exit status is 0 on success; 1 if a request failed (a refusal is not a failure); 2 for an invalid setting, or if no
server answers; 130 after Ctrl-C.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..request import Request
from .lengths import MIXES, lengths, parse
from .load import run_load
from .prompts import texts, token_ids, words
from .report import LIMITS, LoadResult
from .sweep import sweep, table

DEFAULT_RATE = 4.0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m helpers.load_test",
        usage="%(prog)s [options]",
        description="Put load on an OpenAI-compatible server, and measure latency, throughput and goodput.",
        epilog="LENGTHS, in tokens: fixed:N, uniform:LOW-HIGH, exponential:MEAN-MAX, lognormal:MEDIAN-P95-MAX.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("server").add_argument
    add("--url", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)")
    add("--model", help="name of the model on the server (default: the first one listed)")
    add("--api-key", default=os.environ.get("COURSE_API_KEY"), help="(default: $COURSE_API_KEY)")
    add("--chat", action="store_true", help="send chat completions")
    add("--body", type=_object, default={}, metavar="JSON", help="additional fields of each request")
    add("--ignore-eos", action="store_true", help="continue past EOS, if the server supports it")
    add("--timeout", type=float, default=600, metavar="S", help="seconds until a request fails (default: %(default)s)")

    group = parser.add_argument_group("arrivals")
    add = group.add_mutually_exclusive_group().add_argument
    add("--rate", type=float, metavar="R", help=f"requests per second (default: {DEFAULT_RATE:g})")
    add("--closed", type=int, metavar="N", help="instead, N users who wait for their responses")
    add("--sweep", type=float, nargs="*", metavar="R", help="a series of rates (default: seven)")
    add = group.add_argument
    add("--cv", type=float, default=1, help="0 like a clock, 1 Poisson, above 1 in bursts (default: %(default)s)")
    add("--think", type=float, default=0, metavar="S", help="a user's pause between requests (default: %(default)s)")
    add("--requests", type=int, default=100, metavar="N", help="requests per test (default: %(default)s)")
    add("--warm-up", type=int, default=0, metavar="N", help="requests sent before, not measured (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of arrivals, lengths and texts (default: %(default)s)")

    add = parser.add_argument_group("lengths").add_argument
    add("--mix", choices=list(MIXES), default="chat", help="lengths of prompts and outputs (default: %(default)s)")
    add("--prompt", type=_lengths, metavar="LENGTHS", help="prompt lengths, instead of the mix's")
    add("--output", type=_lengths, metavar="LENGTHS", help="maximum output lengths, instead of the mix's")
    add("--token-ids", action="store_true", help="send random token ids: exact lengths, meaningless text")

    add = parser.add_argument_group("figures").add_argument
    good = f"count requests within this limit as good ({', '.join(LIMITS)})"
    add("--limit", type=_limit, action="append", default=[], metavar="NAME=S", help=good)
    add("--json", metavar="FILE", help="write all results, including the times of every request")
    add("--picture", metavar="FILE", help="draw the results as SVG")
    return parser


def _object(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text).items())
    except (ValueError, AttributeError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object") from None


def _lengths(spec: str) -> str:
    try:
        parse(spec)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return spec


def _limit(text: str) -> tuple[str, float]:
    name, _, seconds = text.partition("=")
    try:
        if not 0 < float(seconds) < float("inf"):
            raise ValueError
        return LIMITS[LIMITS.index(name)], float(seconds)
    except ValueError:
        known = ", ".join(f"{name}=SECONDS" for name in LIMITS)
        raise argparse.ArgumentTypeError(f"a limit is one of {known}, not {text!r}") from None


def _requests(args: argparse.Namespace, server: dict[str, Any]) -> Callable[[int], list[Request]]:
    """Return a function that makes the requests of a test: all tests have the same lengths, but different texts."""
    count = args.warm_up + args.requests
    of_mix = MIXES[args.mix]
    prompt, output = args.prompt or of_mix[0], args.output or of_mix[1]
    prompts, outputs = lengths(prompt, count, [args.seed, 1]), lengths(output, count, [args.seed, 2])
    if not args.token_ids:
        ratio = _tokens_per_word(args.url, server, 1000 * args.seed + 999)

    def make(number: int) -> list[Request]:
        seed = 1000 * args.seed + number
        contents = token_ids(prompts, seed) if args.token_ids else texts(prompts, ratio, seed)
        return [Request(content, length) for content, length in zip(contents, outputs, strict=True)]

    return make


def _tokens_per_word(url: str, server: dict[str, Any], seed: int) -> float:
    """Measure the tokens per word of the server's tokenizer with a request of a hundred words."""
    stream = words(seed)
    prompt = " ".join(next(stream) for _ in range(100))
    (result,) = run_load(url, [(prompt, 1)], users=1, progress=False, **server).requests
    if result.status == "failed":
        raise ValueError(f"The server failed on a trial request: {result.error}")
    return (result.prompt_tokens or 133) / 100


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load tests that the arguments describe.

    Returns:
        The exit status: 0 on success, 1 if a request failed, 130 after Ctrl-C.

    Raises:
        SystemExit: 2 for an invalid setting, or if no server answers; 0 after --help.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.requests < 1 or args.warm_up < 0:
        parser.error("--requests is at least 1, and --warm-up at least 0.")
    if args.chat and args.token_ids:
        parser.error("--token-ids cannot be combined with --chat: a chat message is text.")
    if args.think and args.closed is None:
        parser.error("--think requires --closed: in an open loop, users do not wait for responses.")
    if args.picture and not args.picture.endswith(".svg"):
        parser.error(f"--picture writes SVG: end the file name with .svg, unlike {args.picture!r}.")
    body = {"temperature": 0} | ({"ignore_eos": True} if args.ignore_eos else {}) | args.body
    server = {name: getattr(args, name) for name in ("model", "api_key", "chat", "timeout")} | {"body": body}
    try:
        results = _run(args, server)
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return int(any(result.with_status("failed") for result in results))


def _run(args: argparse.Namespace, server: dict[str, Any]) -> list[LoadResult]:
    requests = _requests(args, server)
    for file in filter(None, (args.json, args.picture)):
        Path(file).touch()  # fail now rather than after an hour of load
    settings = server | {"warm_up": args.warm_up, "limits": dict(args.limit)}
    arrivals = {"cv": args.cv, "seed": args.seed}
    if args.sweep is not None:
        results = sweep(args.url, args.sweep or None, requests, **settings, **arrivals)
        print(table(results))
    elif args.closed is not None:
        results = [run_load(args.url, requests(0), users=args.closed, think=args.think, **settings)]
        print(results[0])
    else:
        rate = DEFAULT_RATE if args.rate is None else args.rate
        results = [run_load(args.url, requests(0), rate, **settings, **arrivals)]
        print(results[0])

    if args.json:
        saved = results[0].as_dict() if args.sweep is None else {"results": [result.as_dict() for result in results]}
        Path(args.json).write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    if args.picture:
        from .. import plots  # only here: importing matplotlib takes a while

        picture = plots.load_run(results[0]) if args.sweep is None else plots.load_sweep({"this server": results})
        picture.save(args.picture)
    return results


if __name__ == "__main__":
    sys.exit(main())
