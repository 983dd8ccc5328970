"""Compare machines: `python -m benchmarks.compare first.json second.json` prints their reports side by side.

Each figure is a median of output tokens per second. The number in brackets says how many times as fast as the engine
named by --against the engine is on that machine, as the median of the ratios of runs made in turn.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from .measure import Measurement
from .report import LABELS, ratios, read_json, tokens_per_second


def main(arguments: list[str] | None = None) -> int:
    """Print the comparison, and return the exit status: 0, or 2 if a file is not a report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="benchmark.json of each machine")
    parser.add_argument("--against", default="vllm", choices=list(LABELS), help="the engine that others are divided by")
    options = parser.parse_args(arguments)
    try:
        reports = [read_json(file) for file in options.files]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for number, (measurements, setting) in enumerate(reports, start=1):
        machine = setting["machine"]
        bandwidth = statistics.median([value for measured in measurements for value in measured.bandwidth] or [0])
        units = ", ".join(machine["matrix units"]) or "none known"
        print(
            f"{number}. {machine['processor']}, {machine['cores']} cores, matrix units: {units}; memory read at "
            f"{bandwidth / 1e9:.0f} GB/s; {machine['date']}"
        )
    print(table([measurements for measurements, _ in reports], options.against))
    return 0


def table(machines: Sequence[Sequence[Measurement]], against: str) -> str:
    """Return a Markdown table with a line per dtype, workload and engine, and a column per machine."""
    found = [
        {(measurement.dtype, measurement.workload, measurement.engine): measurement for measurement in measurements}
        for measurements in machines
    ]
    keys = dict.fromkeys(key for measured in found for key in measured)
    numbers = [str(number) for number in range(1, len(machines) + 1)]
    lines = [f"| dtype | workload | engine | {' | '.join(numbers)} |", "| --- | --- | --- |" + " --- |" * len(numbers)]
    for dtype, workload, engine in keys:
        cells = []
        for measured in found:
            measurement, reference = measured.get((dtype, workload, engine)), measured.get((dtype, workload, against))
            cells.append(_cell(measurement, reference))
        lines.append(f"| {dtype} | {workload} | {LABELS.get(engine, engine)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(measurement: Measurement | None, reference: Measurement | None) -> str:
    if measurement is None:
        return ""
    speed = f"{tokens_per_second(measurement).median:.0f}"
    return speed if reference is None else f"{speed} ({ratios(reference, measurement).median:.2f})"


if __name__ == "__main__":
    sys.exit(main())
