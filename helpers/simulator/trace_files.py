"""Trace files: when requests arrived and how long they were, in two formats that services have published.

    Azure     TIMESTAMP,ContextTokens,GeneratedTokens           a date and time
    BurstGPT  Timestamp,Model,Request tokens,Response tokens,…  seconds

The first is the format of the Azure LLM inference traces (Patel et al., "Splitwise", ISCA 2024), the second that of
BurstGPT (Wang et al., arXiv 2401.17644). Neither contains any text, so all prompts count as different.
"""

import csv
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from .fleet import TimedRequest

AZURE = "TIMESTAMP", "ContextTokens", "GeneratedTokens"
BURSTGPT = "Timestamp", "Request tokens", "Response tokens"
FORMATS = {"azure": AZURE, "burstgpt": BURSTGPT}


def read_trace(path: str | Path) -> list[TimedRequest]:
    """Read a trace; its first line shows the format.

    Requests without prompt or output tokens are left out, because they failed.

    Returns:
        The requests in order of arrival; the first one arrives at 0.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has neither format, a line is not valid, or there are no requests.
    """
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        try:
            columns = next((names for names in FORMATS.values() if set(names) <= set(rows.fieldnames or ())), None)
            if columns is None:
                known = " or ".join(", ".join(names) for names in FORMATS.values())
                raise ValueError(f"{path} is not a trace: its first line must name the columns {known}.")
            requests = [_request(row, columns, f"{path}, line {rows.line_num}") for row in rows]
        except csv.Error as error:
            raise ValueError(f"{path}, after line {rows.line_num}: {error}.") from error
    requests = sorted(request for request in requests if request.prompt > 0 and request.output_tokens > 0)
    if not requests:
        raise ValueError(f"{path} has no requests with both prompt tokens and output tokens.")
    start = requests[0].arrival
    return [request._replace(arrival=request.arrival - start) for request in requests]


def _request(row: dict[str, str], columns: tuple[str, str, str], location: str) -> TimedRequest:
    time, prompt, output = (row[column] for column in columns)
    try:
        arrival = _seconds(time) if columns is AZURE else float(time)
        request = TimedRequest(arrival, int(prompt), int(output))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{location}: {error}. A line has the columns {', '.join(columns)}.") from error
    if not abs(arrival) < float("inf") or request.prompt < 0 or request.output_tokens < 0:
        raise ValueError(f"{location}: a time and two numbers of tokens are expected, not {time}, {prompt}, {output}.")
    return request


def _seconds(text: str) -> float:
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def write_trace(path: str | Path, requests: Iterable[TimedRequest], format: str = "azure") -> None:
    """Write a trace as "azure" or "burstgpt". The dates of "azure" begin with the first day of 2000.

    Of a prompt with token ids, only the length is written.

    Raises:
        OSError: the file cannot be written.
        ValueError: the format is unknown.
    """
    if format not in FORMATS:
        raise ValueError(f"There is no format {format!r}: choose one of {', '.join(FORMATS)}.")
    lengths = ((arrival, _length(prompt), output) for arrival, prompt, output in requests)
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        if format == "azure":
            rows.writerow(AZURE)
            start = datetime(2000, 1, 1)
            for arrival, prompt, output in lengths:
                rows.writerow([(start + timedelta(seconds=arrival)).isoformat(" ", "microseconds"), prompt, output])
        else:
            rows.writerow(["Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"])
            for arrival, prompt, output in lengths:
                rows.writerow([f"{arrival:.3f}", "ChatGPT", prompt, output, prompt + output, "API log"])


def _length(prompt: list[int] | int) -> int:
    return prompt if isinstance(prompt, int) else len(prompt)


def at_rate(requests: list[TimedRequest], rate: float) -> list[TimedRequest]:
    """Return the same requests with all gaps scaled, so that `rate` requests arrive per second.

    Raises:
        ValueError: the rate is not positive, or all requests arrive at once.
    """
    seconds = requests[-1].arrival - requests[0].arrival
    if not 0 < rate < float("inf"):
        raise ValueError(f"The rate must be a number of requests per second above 0, not {rate}.")
    if seconds <= 0:
        raise ValueError("All requests of the trace arrive at once, so it has no rate to change: do not set one.")
    factor = (len(requests) - 1) / rate / seconds
    return [request._replace(arrival=request.arrival * factor) for request in requests]
