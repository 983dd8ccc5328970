"""From seconds to a report: a Markdown table of ratios with their spread, a JSON file with everything, and a plot.

A ratio is taken within a repeat, from two runs a few seconds apart, so a slow minute of the machine affects both. The
report gives the median, the smallest and the largest of these ratios.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from helpers.plots import BLUE, INK, ORANGE, SKY, Picture

from .measure import Measurement
from .other_programs import OtherPrograms

# How many cores other programs may keep busy: a system's services do, and so does the watching itself.
MOST_OTHER_CORES = 0.25

LABELS = {
    "transformers": "transformers generate, static",
    "generate_batch": "transformers generate_batch",
    "static": "course, static",
    "padded": "course, padded",
    "ragged": "course, ragged",
    "ragged-longest": "course, ragged, longest first",
    "ragged-int8": "course, ragged, integer products",
    "vllm": "vLLM",
    "llama": "llama.cpp",
}


@dataclass(frozen=True)
class Spread:
    """The median, the smallest and the largest of some figures."""

    median: float
    least: float
    greatest: float

    @classmethod
    def from_figures(cls, figures: Sequence[float]) -> "Spread":
        return cls(statistics.median(figures), min(figures), max(figures))

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.least:{spec}}–{self.greatest:{spec}})"


def ratios(reference: Measurement, other: Measurement) -> Spread:
    """Return how many times as fast as the reference an engine is, taken repeat by repeat."""
    return Spread.from_figures([a / b for a, b in zip(reference.seconds, other.seconds, strict=True)])


def tokens_per_second(measurement: Measurement) -> Spread:
    """Return the requested output tokens per second; what a static batch computes beyond them does not count."""
    return Spread.from_figures([measurement.output_tokens / seconds for seconds in measurement.seconds])


def bandwidth_share(measurement: Measurement, weight_bytes: int) -> Spread:
    """Return the share (0 to 1) of the memory bandwidth at which the decoding of a single request reads the weights."""
    passes = measurement.output_tokens  # one forward pass per token, the first token included
    readable = statistics.mean(measurement.bandwidth)
    return Spread.from_figures([weight_bytes * passes / seconds / readable for seconds in measurement.seconds])


def panels(measurements: Sequence[Measurement]) -> list[list[Measurement]]:
    """Group the measurements by workload and dtype, the reference first."""
    return [list(group) for _, group in groupby(measurements, key=lambda measured: (measured.workload, measured.dtype))]


def markdown(measurements: Sequence[Measurement], setting: dict) -> str:
    """Return the report as Markdown, with one table per workload and dtype.

    Args:
        measurements: from `measure`, workload by workload.
        setting: "model" in words, "machine" (from `machine.describe`), "weight bytes" by dtype, and "skipped" engines
            and workloads with the reasons.
    """
    machine = setting["machine"]
    lines = [
        f"Model: {setting['model']}.",
        f"Machine: {machine['processor']}, {machine['cores']} cores, "
        f"matrix units: {', '.join(machine['matrix units']) or 'none known'}.",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in machine["versions"].items()) + ".",
        "Median (least–greatest) of the repeats. Ratios are taken within a repeat.",
        "Same tokens: the share of requests with exactly the tokens of the first engine. In all other requests, every "
        "token is the model's best one after the tokens before it, or nearly tied with it. In brackets: by which share "
        "of the logits' range a token falls short of the best one at most. With integer products, the model is another "
        "one: every token is compared with the best one of its integer reference.",
        *skipped_lines(setting["skipped"]),
    ]
    for panel in panels(measurements):
        first = panel[0]
        single = first.requests == 1
        lines += [
            "",
            f"### {first.workload}, {first.dtype}: {first.requests} {'request' if single else 'requests'}, "
            f"{first.prompt_tokens} prompt tokens, {first.output_tokens} output tokens, rows: {first.rows}, "
            f"repeats: {len(first.seconds)}",
            "",
            "Memory was read at {:.1f} GB/s before and {:.1f} GB/s after.".format(*(b / 1e9 for b in first.bandwidth))
            + warning(first),
            "",
            f"| engine | output tokens per second | times {LABELS.get(first.engine, first.engine)} | same tokens |"
            + (" share of memory bandwidth |" if single else ""),
            "| --- | --- | --- | --- |" + (" --- |" if single else ""),
        ]
        for measured in panel:
            name, speed = LABELS.get(measured.engine, measured.engine), tokens_per_second(measured)
            row = f"| {name} | {speed:.0f} | {ratios(first, measured):.2f} |"
            row += f" {_same_tokens(measured)} |"
            if single:
                share = bandwidth_share(measured, setting["weight bytes"][measured.dtype])
                row += " |" if measured.rounds else f" {share:.0%} |"
            lines.append(row)
    return "\n".join(lines)


def _same_tokens(measured: Measurement) -> str:
    if measured.identical is None:
        return "drawn at random"
    return f"{measured.identical:.0%}" + (f" ({measured.shortfall:.2%})" if measured.identical < 1 else "")


def warning(measurement: Measurement) -> str:
    """Return a sentence that begins with a space if other programs ran beside the engines, otherwise ""."""
    others = measurement.other_programs
    if others.cores <= MOST_OTHER_CORES:
        return ""
    busiest = f", {others.busiest} most of all" if others.busiest else ""
    return f" **Not idle**: other programs kept {others.cores:.1f} cores busy{busiest}."


def skipped_lines(skipped: dict[str, str]) -> list[str]:
    """Return a sentence for each skipped engine or workload, with the reason."""
    return [f"Skipped: {name}, {reason}." for name, reason in skipped.items()]


def write_json(file: Path, measurements: Sequence[Measurement], setting: dict) -> None:
    """Write everything to a file, including the raw seconds."""
    results = [
        asdict(measured)
        | {"tokens per second": asdict(tokens_per_second(measured)), "ratio": asdict(ratios(panel[0], measured))}
        for panel in panels(measurements)
        for measured in panel
    ]
    file.write_text(json.dumps(setting | {"results": results}, indent=1) + "\n")


def read_json(file: Path) -> tuple[list[Measurement], dict]:
    """Return the measurements and the setting that `write_json` wrote.

    Raises:
        ValueError: it is not such a file.
    """
    try:
        setting = json.loads(file.read_text())
        names = {field.name for field in fields(Measurement)}
        results = [{name: result[name] for name in names} for result in setting.pop("results")]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is no report of this benchmark ({type(error).__name__}: {error}).") from None
    for result in results:
        result |= {"bandwidth": tuple(result["bandwidth"]), "other_programs": OtherPrograms(**result["other_programs"])}
    return [Measurement(**result) for result in results], setting


def plot(measurements: Sequence[Measurement], setting: dict) -> Picture:
    """Draw bars of useful tokens per second, one panel per workload and dtype; whiskers span all repeats."""
    groups = panels(measurements)
    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)
    height = 0.3 * max(len(group) for group in groups) + 0.9
    figure = Figure(figsize=(5.6 * columns, rows * height + 0.6), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    described = []
    for ax, group in zip(axes, groups, strict=False):
        speeds = [tokens_per_second(measured) for measured in group]
        names = [LABELS.get(measured.engine, measured.engine) for measured in group]
        whiskers = [[s.median - s.least for s in speeds], [s.greatest - s.median for s in speeds]]
        colors = [
            BLUE if measured.ours else SKY if "transformers" in LABELS.get(measured.engine, "") else ORANGE
            for measured in group
        ]
        ax.barh(names, [s.median for s in speeds], xerr=whiskers, color=colors, error_kw={"ecolor": INK, "capsize": 3})
        for y, measured in enumerate(group):
            ax.text(
                speeds[y].greatest, y, f"  {ratios(group[0], measured).median:.1f}x", va="center", fontsize=8, color=INK
            )
        ax.invert_yaxis()
        ax.margins(x=0.14)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
        ax.set_xlabel("useful output tokens per second", fontsize=9)
        title = f"{group[0].workload}, {group[0].dtype}"
        ax.set_title(f"{title}, rows: {group[0].rows}", loc="left", fontsize=10)
        listed = ", ".join(f"{name} {speed.median:.0f}" for name, speed in zip(names, speeds, strict=True))
        described.append(f"{title}: {listed}.")
    for ax in axes[len(groups) :]:
        ax.set_visible(False)
    colors = {"this course": BLUE, "transformers": SKY, "other engines": ORANGE}
    handles = [Patch(facecolor=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    figure.suptitle(setting["model"], x=0.01, ha="left", fontsize=9)
    return Picture(figure, f"Bars of output tokens per second, {setting['model']}. {' '.join(described)}")
