"""INSTRUCTOR.md says what is true: its quotes, points, commands and links are those of the course."""

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import build_site
import nbformat
import pytest

from helpers.checks.exercises import EXERCISES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "INSTRUCTOR.md").read_text(encoding="utf-8")
NOTEBOOKS = sorted((ROOT / "notebooks" / "exercises" / "source").glob("*/*.ipynb"))


def texts_of_the_checks():
    """Every piece of text in the checks' code; those of an f-string are cut where a value is filled in."""
    for path in (ROOT / "helpers" / "checks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def assignment(path):
    """Return the name of an assignment on the page: lesson 4, codelab 4, memo 10; exercise 19 if it has no lesson."""
    kind = "lesson" if (ROOT / "notebooks" / path.name).exists() else "exercise"
    kind = next((kind for kind in ("codelab", "memo", "capstone") if kind in path.stem), kind)
    return f"{kind} {path.stem.partition('_')[0]}"


def test_every_message_that_the_page_quotes_is_a_check_s():
    quotes = re.findall(r'\| `(\w+)` \| "(.+)" \|', PAGE)
    assert len(quotes) > 12 and {task for task, _ in quotes} <= set(EXERCISES)
    texts = "\n".join(texts_of_the_checks())
    assert [quote for _, quote in quotes if quote not in texts] == []


def test_the_points_are_those_of_the_exercises():
    told = dict(re.findall(r"^\| ((?:lesson|codelab|memo|capstone|exercise) \d+) \| (\d+) \|", PAGE, re.MULTILINE))
    points = {}
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        points[assignment(path)] = str(sum(cell.metadata.get("nbgrader", {}).get("points", 0) for cell in cells))
    assert told == points


def stated_minutes(path):
    first = nbformat.read(path, as_version=4).cells[0].source
    return int(re.search(r"\*\*Time:\*\* about (\d+) minutes(?: to read|\.)", first)[1])


def test_the_minutes_are_those_that_the_notebooks_state_and_add_up_to_the_hours_of_the_plans():
    reading, exercises = 0, {}
    for path, minutes, more in re.findall(
        r"^\| \[.+\]\((notebooks/\S+)\) .*\| (\d+)(?: \+ (\d+))? \|$", PAGE, re.MULTILINE
    ):
        if "/exercises/" in path:
            exercises[Path(path).stem] = int(minutes)
            continue
        assert int(minutes) == stated_minutes(ROOT / path), path
        if more:  # the others are extra
            reading, exercises[Path(path).stem] = reading + int(minutes), int(more)
    assert exercises == {path.stem: stated_minutes(path) for path in NOTEBOOKS}
    hours = f"{reading / 60:.0f} hours of reading and {sum(exercises.values()) / 60:.0f} hours of exercises"
    assert hours in (ROOT / "docs/teaching.md").read_text(encoding="utf-8")


def test_its_commands_and_links_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", PAGE)) <= targets
    for link in re.findall(r"\]\(([^)]+)\)", re.sub("`.*?`", "", PAGE)):
        assert (ROOT / link).exists(), link


@pytest.fixture(scope="module")
def handed_out(tmp_path_factory):
    """What `make handout` packs, unpacked."""
    folder = tmp_path_factory.mktemp("handout")
    command = ["make", "--no-print-directory", "-C", ROOT, "handout", f"ZIP={folder / 'course.zip'}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    with zipfile.ZipFile(folder / "course.zip") as archive:
        archive.extractall(folder / "course")
    return folder / "course"


def test_what_is_handed_out_has_the_course_but_no_solutions_no_history_and_not_this_page(handed_out):
    assert all((handed_out / name).exists() for name in ("Makefile", "README.md", "notebooks/exercises/release"))
    assert not any((handed_out / name).exists() for name in (".git", "INSTRUCTOR.md", "tests/answers"))
    chapter = PAGE[PAGE.index("**Submissions are programs.**") : PAGE.index("## Before the next term")]
    lines = [line for line in chapter.splitlines() if len(line) > 60]
    notebooks = 0
    for path in [*handed_out.rglob("*.ipynb"), *handed_out.rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        notebooks += path.suffix == ".ipynb"
        assert "### BEGIN SOLUTION" not in text, path
        assert len(lines) > 10 and not any(line in text for line in lines), path
    assert notebooks > 2 * len(NOTEBOOKS) - 5


def test_the_site_has_neither_the_instructor_s_page_nor_a_link_to_it():
    assert "INSTRUCTOR.md" not in build_site.PAGES
    for path in [*ROOT.glob("README.md"), *(ROOT / "docs").rglob("*.md")]:
        assert "](INSTRUCTOR" not in path.read_text(encoding="utf-8").replace("../", ""), path
        assert "<INSTRUCTOR" not in path.read_text(encoding="utf-8"), path


@pytest.mark.slow
def test_a_copy_for_students_collects_the_tests_that_need_no_solutions(handed_out):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", ""]
    result = subprocess.run(command, cwd=handed_out, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:]
    assert "test_engine.py" in result.stdout and "test_grading.py" not in result.stdout
    result = subprocess.run([*command[:3], "-q", "-k", "link_leads", "tests/test_readme.py"], cwd=handed_out)
    assert result.returncode == 0, "a page links to what is not handed out"


MINE = '''"""My own exercise."""

from ..exercise import Exercise

'''
ANSWERS = '''"""Answers to my own exercise."""

from answers import WRONG, right


@right("double")
def shifted(number):
    return number << 1


WRONG["double"] |= {"should be 6, but is 7": lambda number: 2 * number + 1}
'''
SOLVED = "    ### BEGIN SOLUTION\n    return number + number\n    ### END SOLUTION"
TEXT = "## Task 1: doubling (2 points)\n\n**Example:** `double(3)` is `6`.\n\n<details>Add.</details>"


@pytest.mark.slow
def test_an_exercise_of_one_s_own_that_follows_the_page_s_steps_passes_the_tests_that_it_names(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", "node_modules")
    for name in ("benchmarks", "docs", "helpers", "notebooks", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    example = ast.get_docstring(ast.parse((ROOT / "helpers/checks/exercise.py").read_text(encoding="utf-8")))
    code = re.sub(r"^    ", "", "\n".join(re.findall(r"^    .*|^$", example, re.MULTILINE)), flags=re.MULTILINE)
    (tmp_path / "helpers/checks/exercises/lesson_19_mine.py").write_text(MINE + code)
    (tmp_path / "tests/answers/mine.py").write_text(ANSWERS)
    answers = tmp_path / "tests/answers/__init__.py"
    answers.write_text(answers.read_text().replace("    lesson_18,\n", "    lesson_18,\n    mine,\n"))

    nb = nbformat.read(ROOT / "notebooks/exercises/source/2_static_batching/2_static_batching.ipynb", as_version=4)
    index = next(index for index, cell in enumerate(nb.cells) if cell.metadata.get("nbgrader", {}).get("solution"))
    first, set_up, imports, text, solution, check = *nb.cells[:3], *nb.cells[index - 1 : index + 2]
    first.source, imports.source, text.source = "**Time:** about 5 minutes.", "from helpers.checks import check", TEXT
    solution.source, check.source = f"def double(number):\n{SOLVED}", 'assert check("double", double)'
    solution.metadata.nbgrader.grade_id, check.metadata.nbgrader.grade_id = "double", "test_double"
    check.metadata.nbgrader.points = 2
    nb.cells = [first, set_up, imports, text, solution, check]
    (tmp_path / "notebooks/exercises/source/19_mine").mkdir()
    nbformat.write(nb, tmp_path / "notebooks/exercises/source/19_mine/19_mine.ipynb")
    (lines,) = re.findall(r"For a notebook without a lesson they are `(.*)` and `(.*)` \|", PAGE)
    page = PAGE + "".join(f"\n{line}\n" for line in lines).replace("\\|", "|")
    (tmp_path / "INSTRUCTOR.md").write_text(page, encoding="utf-8")

    def run(*command):
        result = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, (result.stdout + result.stderr)[-2000:]

    run("notebooks/exercises/grade.py", "release")
    # What a new notebook cannot change.
    others = "not up_to_date and not commands_and_links and not students and not handed_out and not course_s_own"
    run("-m", "pytest", "-q", "-k", others, "tests/test_exercises.py", "tests/test_instructor.py")
    run("-m", "pytest", "-q", "-k", "double or every_task or messages_of", "tests/test_checks.py")
