"""The command line of the load generator.

    python -m helpers.load_test --rate 4                      open loop: Poisson arrivals, 4 requests per second
    python -m helpers.load_test --rate 4 --cv 3               the same rate in bursts
    python -m helpers.load_test --closed 8                    closed loop: 8 users who wait for their responses
    python -m helpers.load_test --sweep                       rates from idle to overloaded, and the knee
    python -m helpers.load_test --sweep 1 2 4 --limit ttft=0.5

Lengths are in tokens: fixed:N, uniform:LOW-HIGH, exponential:MEAN-MAX or lognormal:MEDIAN-P95-MAX.

The exit status is 0 on success; 1 if a request failed (a refusal is not a failure); 2 for an invalid setting, or if no
server answers; 130 after Ctrl-C.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from ..command_line import json_object, latency_limits, make_command, one_value, parse, refuse
from ..request import Request
from .load import run_load
from .report import LoadResult
from .sweep import sweep, table
from .workload import MIXES, lengths, texts, token_ids
from .workload import parse as parse_lengths

DEFAULT_RATE = 4.0
ARRIVALS, LENGTHS = "Arrivals", "Lengths"


def _lengths(spec: str) -> str:
    parse_lengths(spec)
    return spec


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The options of `python -m helpers.load_test`.

    Attributes:
        url: address of the server.
        model: name of the model on the server; the first one listed if omitted.
        api_key: the server's key; the environment's COURSE_API_KEY, if any, if omitted.
        chat: send chat completions.
        body: additional fields of each request, a JSON object such as '{"ignore_eos": true}'.
        timeout: seconds until a request fails.
        rate: requests per second, 4 if omitted.
        closed: instead, this many users who wait for their responses.
        sweep: instead, a series of rates; seven if none is given.
        cv: 0 like a clock, 1 Poisson, above 1 in bursts.
        requests: requests per test.
        seed: of arrivals, lengths and texts.
        mix: lengths of prompts and outputs.
        prompt: prompt lengths, instead of the mix's.
        output: maximum output lengths, instead of the mix's.
        token_ids: send random token ids: exact lengths, meaningless text.
        limit: NAME=SECONDS; count requests within this limit as good; may be repeated.

    Raises:
        ValueError: an option is outside its range, or excludes another one.
    """

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    api_key: str | None = field(default_factory=lambda: os.environ.get("COURSE_API_KEY"))
    chat: Annotated[bool, Parameter(negative=())] = False
    body: Annotated[Any, one_value(json_object)] = None
    timeout: float = 600.0
    rate: Annotated[float | None, Parameter(group=ARRIVALS)] = None
    closed: Annotated[int | None, Parameter(group=ARRIVALS)] = None
    sweep: Annotated[list[float] | None, Parameter(group=ARRIVALS, consume_multiple=True, negative_iterable=())] = None
    cv: Annotated[float, Parameter(group=ARRIVALS)] = 1.0
    requests: Annotated[int, Parameter(group=ARRIVALS)] = 100
    seed: Annotated[int, Parameter(group=ARRIVALS)] = 0
    mix: Annotated[Literal[*MIXES], Parameter(group=LENGTHS)] = "chat"
    prompt: Annotated[Any, one_value(_lengths), Parameter(group=LENGTHS)] = None
    output: Annotated[Any, one_value(_lengths), Parameter(group=LENGTHS)] = None
    token_ids: Annotated[bool, Parameter(group=LENGTHS, negative=())] = False
    limit: Annotated[list[str] | None, Parameter(negative_iterable=())] = None

    def __post_init__(self):
        given = [name for name in ("rate", "closed", "sweep") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"--{given[0]} and --{given[1]} exclude each other: give one of them.")
        if self.requests < 1:
            raise ValueError(f"--requests is at least 1, not {self.requests}.")
        if self.chat and self.token_ids:
            raise ValueError("--token-ids cannot be combined with --chat: a chat message is text.")
        _ = self.limits

    @property
    def limits(self) -> dict[str, float]:
        """The limits of good requests, in seconds."""
        return {name: limit for text in self.limit or () for name, limit in latency_limits(text).items()}

    @property
    def server(self) -> dict[str, Any]:
        """The settings of `run_load` that concern the server and what it is sent."""
        body = {"temperature": 0} | (self.body or {})
        return {name: getattr(self, name) for name in ("model", "api_key", "chat", "timeout")} | {"body": body}


command = make_command("helpers.load_test", __doc__, LoadOptions)


def _requests(options: LoadOptions) -> Callable[[int], list[Request]]:
    """Return a function that makes the requests of a test: all tests have the same lengths, but different texts."""
    count, of_mix = options.requests, MIXES[options.mix]
    prompt, output = options.prompt or of_mix[0], options.output or of_mix[1]
    prompts, outputs = lengths(prompt, count, [options.seed, 1]), lengths(output, count, [options.seed, 2])

    def make(number: int) -> list[Request]:
        seed = 1000 * options.seed + number
        contents = token_ids(prompts, seed) if options.token_ids else texts(prompts, seed)
        return [Request(content, length) for content, length in zip(contents, outputs, strict=True)]

    return make


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load tests that the arguments describe, and return the exit status.

    Raises:
        SystemExit: 2 for an invalid setting, or if no server answers; 0 after --help.
    """
    options = parse(command, argv)
    try:
        results = _run(options)
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError) as error:
        refuse(command, str(error))
    return int(any(result.with_status("failed") for result in results))


def _run(options: LoadOptions) -> list[LoadResult]:
    requests = _requests(options)
    settings = options.server | {"limits": options.limits}
    arrivals = {"cv": options.cv, "seed": options.seed}
    if options.sweep is not None:
        results = sweep(options.url, options.sweep or None, requests, **settings, **arrivals)
        print(table(results))
    elif options.closed is not None:
        results = [run_load(options.url, requests(0), users=options.closed, **settings)]
        print(results[0])
    else:
        rate = DEFAULT_RATE if options.rate is None else options.rate
        results = [run_load(options.url, requests(0), rate, **settings, **arrivals)]
        print(results[0])
    return results


if __name__ == "__main__":
    sys.exit(main())
