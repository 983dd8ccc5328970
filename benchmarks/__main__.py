"""`python -m benchmarks`: named workloads on every available engine, in turns, as ratios with their spread."""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all models are folders

from tqdm.auto import tqdm

from . import machine, report
from .engines import BenchEngine, all_engines
from .install import HOME
from .measure import Measurement, TokensDiffer, count_runs, measure
from .models import RANDOM, find_model
from .worker import WorkerError
from .workloads import WORKLOADS, sampled, shortened


def main(arguments: list[str] | None = None, engines: list[BenchEngine] | None = None) -> int:
    """Run the benchmark, and return the exit status: 0; 1 if an engine failed; 2 if there is nothing to run.

    Args:
        arguments: the command line's if left out.
        engines: all that exist if left out; the first one is the reference.
    """
    engines = all_engines() if engines is None else engines
    options = _parser([engine.name for engine in engines]).parse_args(arguments)
    if options.smoke:
        options.repeats = 1
    settle = 0.0 if options.smoke else 0.3  # seconds
    try:
        model = find_model(options.model, options.smoke)
        engines, skipped = _choose(engines, options.engines, options.sampled)
        workloads, too_long = _workloads(options, model)
        if not engines or not workloads:
            raise ValueError("\n".join(["There is nothing to run.", *report.skipped_lines(skipped | too_long)]))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    file = options.output / "benchmark.json"
    try:
        measurements = _earlier(file, workloads, options.dtype) if options.keep else []
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    setting = {
        "model": model.description,
        "weight bytes": {dtype: model.weight_bytes(dtype) for dtype in ("float32", "bfloat16")},
        "machine": machine.describe(),
        "skipped": skipped | too_long,
    }
    for line in report.skipped_lines(setting["skipped"]):
        print(line, file=sys.stderr)

    options.output.mkdir(parents=True, exist_ok=True)
    cases = [(workload, dtype) for dtype in options.dtype for workload in workloads]
    with tqdm(total=len(cases) * count_runs(engines, options.repeats), unit="run") as bar:
        for workload, dtype in cases:
            try:
                measured = measure(engines, workload, model.folder, dtype, options.repeats, bar, settle)
            except (TokensDiffer, WorkerError) as error:
                bar.close()
                print(error, file=sys.stderr)
                return 1
            if (warning := report.warning(measured[0])) and not (options.force or options.smoke):
                bar.close()
                print(f"No figures for {workload.name}, {dtype}.{warning} End them, or use --force.", file=sys.stderr)
                return 1
            measurements += measured
            for engine in engines:
                setting["machine"]["versions"] |= engine.versions()
            # After every case: an interrupted run keeps the results so far.
            report.write_json(file, measurements, setting)
            report.plot(measurements, setting).save(options.output / "benchmark.svg")
    text = report.markdown(measurements, setting)
    (options.output / "benchmark.md").write_text(text + "\n")
    print(f"{text}\n\nWritten: benchmark.md, benchmark.json and benchmark.svg in {options.output}")
    return 0


def _parser(names: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition(": ")[2])
    parser.add_argument("--model", default="gpt2", help=f"{', '.join(RANDOM)} (random weights), embedded, or a folder")
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--engines", nargs="+", default=names, choices=names, help="the first is the reference")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, help="rows, instead of each workload's own number")
    parser.add_argument(
        "--sampled", action="store_true", help="temperature 0.8 and top-p 0.9, where an engine has them"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny model and workloads, once: does everything run?")
    parser.add_argument("--force", action="store_true", help="report figures taken beside other programs, and say so")
    parser.add_argument("--keep", action="store_true", help="keep an earlier run's results for all other cases")
    parser.add_argument("--output", type=Path, default=HOME / "results", help="folder for the report")
    return parser


def _earlier(file: Path, workloads: list, dtypes: list[str]) -> list[Measurement]:
    """Return the measurements in a report of this program, if there is one, except those of the cases to be run."""
    rerun = {(workload.name, dtype) for workload in workloads for dtype in dtypes}
    earlier, setting = report.read_json(file) if file.exists() else ([], {})
    if earlier and setting["machine"]["processor"] != machine.processor():
        raise ValueError(f"{file} is from another machine, {setting['machine']['processor']}: name another --output.")
    return [measurement for measurement in earlier if (measurement.workload, measurement.dtype) not in rerun]


def _choose(engines: list[BenchEngine], names: list[str], sampled: bool) -> tuple[list[BenchEngine], dict[str, str]]:
    """Return the named engines that can run on this machine, in this order, and why the others cannot."""
    by_name = {engine.name: engine for engine in engines}
    reasons = {name: by_name[name].why_unavailable() for name in names}
    if sampled:
        cannot = "its adapter decodes greedily only"
        reasons = {name: reason or (None if by_name[name].samples else cannot) for name, reason in reasons.items()}
    available = [by_name[name] for name, reason in reasons.items() if reason is None]
    return available, {name: reason for name, reason in reasons.items() if reason is not None}


def _workloads(options, model) -> tuple[list, dict[str, str]]:
    """Return the requested workloads that fit into the model's context, and why the others do not."""
    chosen, too_long = [], {}
    for name in options.workloads:
        workload = WORKLOADS[name](model.config.vocab_size)
        if options.sampled:
            workload = sampled(workload)
        if options.smoke:
            workload = shortened(workload)
        if options.rows:
            workload = replace(workload, rows=options.rows)
        context = model.config.max_position_embeddings
        if workload.context > context:
            too_long[name] = f"needs {workload.context} tokens of context and the model has {context}"
        else:
            chosen.append(workload)
    return chosen, too_long


if __name__ == "__main__":
    sys.exit(main())
