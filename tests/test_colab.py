"""A notebook runs on any machine: the set-up cell, the badge, and the repository that they name.

The end-to-end test puts a lone lesson into an empty folder of a machine that looks like Colab's: `google.colab` can
be imported, torch is there, and pip installs a wheel of this working tree.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import colab
import nbformat
import pytest
import torch
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from helpers import set_up

ROOT = Path(__file__).parents[1]
NOTEBOOKS = colab.notebooks_of()
SHORTEST = "notebooks/2_static_batching.ipynb"  # the lesson that runs to its end in every test run
ARCHIVE = re.compile(r"https://github\.com/(?P<repository>[^/\s]+/[^/\s]+)/archive/refs/tags/v(?P<version>\S+)\.zip")
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def name_of(path):
    return path.relative_to(ROOT / "notebooks").as_posix()


# --- stamping ------------------------------------------------------------------------------------------------------

README = """# Course

See [lesson 1](notebooks/1_one.ipynb).
git clone https://github.com/OWNER/REPOSITORY here

| | lesson | you build |
| --- | --- | --- |
| 1 | [One](notebooks/1_one.ipynb) | a loop |
| 2 | [Elsewhere](https://example.org/2.ipynb), [practice](notebooks/exercises/release/one/one.ipynb) | a batch |
"""


def stamps(root=ROOT):
    """Yield all that names a repository: (file, repository, the notebook that a badge opens, or "" for a cell)."""
    for path in colab.notebooks_of(root):
        name = path.relative_to(root).as_posix()
        for cell in nbformat.read(path, as_version=4).cells:
            if colab.TAG in cell.metadata.get("tags", []):
                found = ARCHIVE.search(cell.source)
                yield name, found["repository"] if found else "", ""
            yield from ((name, found["repository"], found["path"]) for found in colab.BADGE.finditer(cell.source))
    for found in colab.BADGE.finditer((root / "README.md").read_text(encoding="utf-8")):
        yield "README.md", found["repository"], found["path"]


@pytest.fixture
def course(tmp_path):
    """A folder with a README, a lesson, and an exercise."""
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    cells = [new_markdown_cell("# One\n\nText.", id="title"), new_code_cell("1 + 2", id="sum")]
    for name in ("1_one.ipynb", "exercises/source/one/one.ipynb", "exercises/release/one/one.ipynb"):
        path = tmp_path / "notebooks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(new_notebook(cells=cells, metadata=metadata), path)
    (tmp_path / "README.md").write_text(README)
    return tmp_path


def contents(course):
    return {path: path.read_text() for path in course.rglob("*.*") if path.is_file()}


def test_a_repository_can_be_named_again_replaced_and_removed(course):
    colab.stamp(course, "")
    without = contents(course)
    assert without[course / "README.md"] == README
    assert {stamp[1:] for stamp in stamps(course)} == {("", "")}
    assert len(colab.stamp(course, "someone/course")) == 4
    assert colab.stamp(course, "someone/course") == []
    title, first, last = nbformat.read(course / "notebooks" / "1_one.ipynb", as_version=4).cells
    assert title.source == f"# One\n\n{colab.badge('someone/course', 'notebooks/1_one.ipynb')}\n\nText."
    assert first.source == colab.set_up_cell("someone/course") and last.source == "1 + 2"
    colab.stamp(course, "else.where/new-name")
    assert {repository for _, repository, _ in stamps(course)} == {"else.where/new-name"}
    assert not any("someone" in text for text in contents(course).values())
    colab.stamp(course, "")
    assert contents(course) == without


# --- this checkout -------------------------------------------------------------------------------------------------


REPOSITORIES = {repository for _, repository, _ in stamps()} or {"(make colab was never run)"}


def test_every_committed_notebook_and_the_readme_are_stamped():
    outdated = []
    for path in NOTEBOOKS:
        nb = nbformat.read(path, as_version=4)
        before = nbformat.writes(nb)
        colab.stamp_notebook(nb, min(REPOSITORIES), path.relative_to(ROOT).as_posix())
        outdated += [name_of(path)] * (nbformat.writes(nb) != before)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    outdated += ["README.md"] * (colab.stamp_readme(text, min(REPOSITORIES)) != text)
    assert outdated == [], "run make colab"


# --- the set-up cell -------------------------------------------------------------------------------------------------


PIP = """
import pathlib, sys, zipfile
here = pathlib.Path(__file__).parent
with open(here / "asked", "a") as asked:
    print(*sys.argv[1:], file=asked)
if (here / "fails").exists():
    sys.exit("ERROR: no network\\n\\x1b[0m")  # as on a terminal with colors
if "://" in sys.argv[-1]:
    for wheel in here.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(here.parent)
"""
# The tests' own environment knows a checkout of the course, and a machine elsewhere does not.
FORGET = """
import os, sys
named = os.environ["PYTHONPATH"].split(os.pathsep)
sys.path[:] = [folder for folder in sys.path if folder in named or not os.path.exists(f"{folder}/helpers/set_up.py")]
"""
RUN_TWICE = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="nocolor", history_manager_class="IPython.core.history.HistoryManager")
shell.history_manager.enabled = False
for _ in range(2):
    if not shell.run_cell({cell!r}).success:
        raise SystemExit(1)
"""


@pytest.fixture
def machine(tmp_path):
    """Like Colab: `google.colab` can be imported, torch is there. pip writes down its arguments and unpacks a wheel."""
    packages = tmp_path / "packages"
    for package in ("google/colab", "pip"):
        (packages / package).mkdir(parents=True)
        (packages / package / "__init__.py").touch()
    (packages / "pip" / "__main__.py").write_text(PIP)
    (packages / "sitecustomize.py").write_text(FORGET)
    (tmp_path / "empty").mkdir()
    return Machine(tmp_path)


class Machine:
    """A folder to work in, packages that Python finds first, and a record of what pip was asked for."""

    def __init__(self, folder):
        self.cwd, self.packages = folder / "empty", folder / "packages"
        self.pip = self.packages / "pip"
        self.environment = os.environ | {"PYTHONPATH": str(self.packages), "IPYTHONDIR": str(folder / "ipython")}

    def asked_of_pip(self):
        return (self.pip / "asked").read_text().splitlines() if (self.pip / "asked").exists() else []

    def start(self, repository="someone/course", cwd=None, **changes):
        """Run the set-up cell twice, as a learner may. Return whether that succeeds, and what is printed."""
        command = [sys.executable, "-c", RUN_TWICE.format(cell=colab.set_up_cell(repository))]
        environment = self.environment | changes
        result = subprocess.run(command, cwd=cwd or self.cwd, env=environment, capture_output=True, text=True)
        shown = result.stdout.replace("Note: you may need to restart the kernel to use updated packages.\n", "")
        return result.returncode == 0, shown + result.stderr

    def execute(self, nb):
        """Run all cells of a notebook in a kernel."""
        client = NotebookClient(nb, kernel_name="python3", resources={"metadata": {"path": str(self.cwd)}})
        with client.setup_kernel(env=self.environment):
            for index, cell in enumerate(nb.cells):
                if cell.cell_type == "code":
                    client.execute_cell(cell, index)


def small_wheel(machine, *requirements):
    """Give pip a wheel with the set-up module and these requirements."""
    lines = "".join(f"Requires-Dist: {line}\n" for line in requirements)
    with zipfile.ZipFile(machine.pip / "small.whl", "w") as wheel:
        wheel.writestr("helpers/__init__.py", "")
        wheel.write(ROOT / "helpers" / "set_up.py", "helpers/set_up.py")
        folder = f"{set_up.PACKAGE.replace('-', '_')}-1.dist-info"
        wheel.writestr(f"{folder}/METADATA", f"Metadata-Version: 2.4\nName: {set_up.PACKAGE}\nVersion: 1\n{lines}")


@pytest.mark.parametrize("folder", ["", "notebooks/exercises/release"])
def test_in_a_copy_of_the_course_the_cell_does_nothing(machine, folder):
    assert machine.start(cwd=ROOT / folder) == (True, "")
    assert machine.asked_of_pip() == []


def test_elsewhere_it_installs_the_package_once_from_its_tag_without_the_extras_that_no_lesson_needs(machine):
    small_wheel(machine, "torch>=2.6", 'numpy>=1.26; extra == "server"', 'no-such-package; extra == "cluster"')
    assert machine.start() == (True, "")
    (asked,) = machine.asked_of_pip()
    assert re.fullmatch(f"install --quiet --no-deps {ARCHIVE.pattern}", asked)["repository"] == "someone/course"


def test_it_installs_what_is_missing_or_too_old_and_never_torch(machine):
    small_wheel(machine, "torch>=99", 'numpy>=99; extra == "server"', "tqdm>=4", "no-such-package>=1,<2")
    succeeds, shown = machine.start()
    assert succeeds and f"Installing numpy>=99, no-such-package<2,>=1. torch {metadata.version('torch')} stays" in shown
    assert machine.asked_of_pip()[1].split()[-2:] == ["numpy>=99", "no-such-package<2,>=1"]


def test_a_course_that_cannot_be_installed_stops_the_cell_with_the_address_and_no_words_of_pip(machine):
    (machine.pip / "fails").touch()
    succeeds, shown = machine.start()
    assert not succeeds and "ERROR: no network" not in shown and "No module named" not in shown
    assert shown.count("Cannot install from github.com/someone/course: is there a network? Is it public?") == 2


def test_without_a_repository_it_says_what_to_do(machine):
    succeeds, shown = machine.start("")
    assert not succeeds and f"There is no folder helpers in {machine.cwd} or above it." in shown
    assert "get it from where this notebook is from" in shown
    assert machine.asked_of_pip() == []


# --- a lone notebook -----------------------------------------------------------------------------------------------


PROBE = """
import json, google.colab, helpers, torch
print(json.dumps([helpers.__file__, torch.__file__, torch.__version__]))"""


@pytest.mark.slow
def test_a_lone_lesson_runs_in_an_empty_folder(machine, wheel):
    shutil.copy(wheel, machine.pip)
    nb = nbformat.read(ROOT / SHORTEST, as_version=4)
    colab.stamp_notebook(nb, "someone/course", SHORTEST)
    nb.cells.append(new_code_cell(PROBE))
    machine.execute(nb)
    helpers, torch_file, torch_version = json.loads(nb.cells[-1].outputs[0].text)
    assert Path(helpers).parent == machine.packages / "helpers"
    assert (torch_file, torch_version) == (torch.__file__, torch.__version__)
    assert len(machine.asked_of_pip()) == 1  # nothing but the course
