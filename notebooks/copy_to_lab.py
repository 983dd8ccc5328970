"""Copy notebooks to lab/, where you run and change them: a part of `make lab`. It never overwrites a copy.

The copies lack the stored answers to predictions, as do the notebooks that the site offers. The answers are collapsed,
but JupyterLab shows the first line of a collapsed output, and many answers fit into a line.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

HERE = Path(__file__).resolve().parent


def without_answers(nb: NotebookNode) -> NotebookNode:
    """Return a copy of a notebook that lacks the answers to its predictions."""
    nb = nbformat.from_dict(nb)
    for cell in nb.cells:
        if "hide-output" in cell.metadata.get("tags", []):
            cell.outputs, cell.execution_count = [], None
            cell.metadata.get("jupyter", {}).pop("outputs_hidden", None)
    return nb


def copy(source: Path, target: Path) -> None:
    """Copy a notebook without its answers, unless the copy exists."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(without_answers(nbformat.read(source, as_version=4)), target)


def main(names: Sequence[str], notebooks: Path = HERE, lab: Path = HERE.parent / "lab") -> None:
    """Copy the notebooks of these names, which are relative to both folders."""
    for name in names:
        copy(notebooks / name, lab / name)


if __name__ == "__main__":
    main(sys.argv[1:])
