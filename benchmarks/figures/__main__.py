"""Print the table of published figures: `python -m benchmarks.figures`. This takes about ten seconds."""

from types import ModuleType

from tqdm.auto import tqdm

from . import anyscale, distserve, orca, sarathi, vllm
from .replica import Figure

PAPERS: dict[str, ModuleType] = {
    "Orca, 2022": orca,
    "Anyscale, 2023": anyscale,
    "vLLM, 2023": vllm,
    "Sarathi-Serve, 2024": sarathi,
    "DistServe, 2024": distserve,
}


def table(figures: dict[str, list[Figure]]) -> str:
    """Return the figures of each paper as a Markdown table."""
    lines = ["| | | published | ours | why they differ |", "| --- | --- | --- | --- | --- |"]
    for paper, rows in figures.items():
        for number, row in enumerate(rows):
            cells = ["" if number else paper, row.quantity, row.published, row.ours, row.why]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table({paper: module.figures() for paper, module in tqdm(PAPERS.items(), unit="paper", leave=False)}))
