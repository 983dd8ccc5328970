"""Measure how long it takes to grade a class.

    python -m tests.tools.grade_class --students 150 --jobs 1 2     on an idle machine

Students hand in what students do: mostly right answers, in several styles; wrong ones; tasks left out; and programs
that crash, end their process, are slow or never end. The proportions are guesses (KINDS), and the same in every run.
Right answers must get full points, or the measurement fails.
"""

import argparse
import ast
import builtins
import csv
import inspect
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from answers import RIGHT, WRONG  # noqa: E402
from handing_in import CODELAB, TWO, answers_of, hand_in, notebook  # noqa: E402

KINDS = {"right": 72, "wrong": 17, "left out": 6, "crashes": 2, "slow": 1.5, "ends its process": 1, "never ends": 0.5}
PROGRAMS = {
    "crashes": "return undefined_name",
    "slow": "import time\n    time.sleep(0.5)\n    return None",
    "ends its process": "import os\n    os._exit(1)",
    "never ends": "while True:\n        pass",
}
LATER_WRONG = """

right, calls = {task}, []

def {task}(*arguments):
    calls.append(1)
    return right(*arguments) if len(calls) < 3 else None
"""


def source_of(function: Callable, task: str) -> str | None:
    """Return a cell that defines `task` as a function of tests/answers, or None if it needs more than imports."""
    if not inspect.isfunction(function) or function.__name__ == "<lambda>" or function.__closure__:
        return None
    module = inspect.getmodule(function)
    imports = [
        node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    imports = [node for node in imports if getattr(node, "module", "") not in ("answers", "answers.solutions")]
    known = {name.asname or name.name for node in imports for name in node.names} | set(vars(builtins))
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    definition.decorator_list = []
    names = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}
    if any(name in vars(module) and name not in known for name in names - {function.__name__}):
        return None
    return "\n".join([*map(ast.unparse, imports), "", ast.unparse(definition), f"{task} = {function.__name__}"])


def cells_of(assignment: str) -> dict[str, dict[str, list[str]]]:
    """Return the cells that students could write, by task and kind."""
    checks = re.findall(r'check\("(\w+)", (\w+)', "\n".join(cell.source for cell in notebook(assignment, {}).cells))
    cells = {}
    for task, solved in answers_of(assignment).items():
        names = [name for name, checked in checks if checked == task]
        others = {each.__name__: each for name in names for each in [*WRONG[name].values(), *RIGHT[name].values()]}
        sources = {name: source for name, each in others.items() if (source := source_of(each, task))}
        right = {name for name in sources if all(name in RIGHT[each] for each in names)}
        cells[task] = {
            "right": [solved] * 3 + [sources[name] for name in sorted(right)],  # most write what the lesson shows
            "wrong": [f"def {task}(*arguments):\n    return None", solved + LATER_WRONG.format(task=task)]
            + [sources[name] for name in sorted(sources.keys() - right)],
        }
        cells[task] |= {kind: [f"def {task}(*arguments):\n    {body}"] for kind, body in PROGRAMS.items()}
    return cells


def write_class(folder: Path, assignment: str, students: int) -> tuple[Counter, set[str]]:
    """Write a folder per student; return how many answers are of each kind, and the students whose are all right."""
    random, cells, kinds, flawless = Random(0), cells_of(assignment), Counter(), set()
    for student in (f"student_{number:03}" for number in range(students)):
        chosen = {task: random.choices(list(KINDS), KINDS.values())[0] for task in cells}
        answers = {task: random.choice(cells[task][kind]) for task, kind in chosen.items() if kind != "left out"}
        kinds.update(chosen.values())
        if set(chosen.values()) == {"right"}:
            flawless.add(student)
        hand_in(folder / student / f"{assignment}.ipynb", notebook(assignment, answers))
    return kinds, flawless


def grade(folder: Path, out: Path, jobs: int, flawless: set[str]) -> float:
    """Grade a class as `make grade` does; return the seconds, start included."""
    command = [
        sys.executable,
        "notebooks/exercises/grade.py",
        "grade",
        "--jobs",
        str(jobs),
        "--out",
        out,
        "--seed",
        "1",
    ]
    start = time.perf_counter()
    done = subprocess.run([*command, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"The grader stopped:\n{done.stdout[-2000:]}")
    with (out / "grades.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    lost = [row["student"] for row in rows if row["student"] in flawless and row["score"] != row["max_score"]]
    if lost or len(rows) != len(list(folder.iterdir())):
        sys.exit(f"{len(rows)} lines in the table; right answers lost points: {', '.join(lost) or 'none'}")
    return seconds


def main() -> None:
    """Measure what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--students", type=int, default=150)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2], help="measure each of these numbers of jobs")
    parser.add_argument("--assignments", nargs="+", default=[TWO, CODELAB])
    parser.add_argument("--out", type=Path, help="where submissions and grades go (default: a temporary folder)")
    args = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the Makefile does
    with tempfile.TemporaryDirectory(prefix="class-") as temporary:
        out = args.out or Path(temporary)
        for assignment in args.assignments:
            folder = out / assignment / "submitted"
            kinds, flawless = write_class(folder, assignment, args.students)
            told = ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS)
            print(f"{args.students} submissions of {assignment}. Answers: {told}.", flush=True)
            for jobs in args.jobs:
                seconds = grade(folder, out / assignment / f"grades-{jobs}", jobs, flawless)
                each = seconds / args.students
                print(f"  --jobs {jobs}: {seconds / 60:.1f} minutes, {each:.1f} s per submission", flush=True)


if __name__ == "__main__":
    main()
