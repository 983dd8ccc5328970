"""Check a task of a notebook from the command line: `python -m helpers.checks notebook.ipynb engine_cached`.

The notebook's cells run in this process, up to the first one that checks something, and the cases are drawn anew.
It's for a student's own machine or a repository's workflow; the grader runs submissions in a sandbox.
"""

import json
import re
import secrets
import sys
from pathlib import Path

from .calling import answer
from .examining import examine


def main(path: str, task: str) -> int:
    """Print the message and return the exit status: 0 if the task is passed."""
    from .exercises import EXERCISES

    cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    function = re.search(rf'check\("{task}", (\w+)\)', "\n".join(sources))
    if task not in EXERCISES or function is None:
        print(f"{path} has no check of a task {task!r}.")
        return 2
    names: dict = {"__name__": "notebook"}
    for source in sources:
        if re.match(r"assert check\(", source):
            break
        try:
            exec("\n".join(line for line in source.splitlines() if not line.startswith("%")), names)
        except Exception as error:
            print(f"A cell stopped with {type(error).__name__}: {error}")
    if function[1] not in names:
        print(f"{task}: no cell defines `{function[1]}`, or the cell that does so failed.")
        return 1
    verdict = examine(EXERCISES[task], lambda question: answer(question, names[function[1]]), secrets.randbits(64))
    print(f"{task}: {verdict.message}")
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
