"""A notebook runs on any machine: the first cell, the badge, and the repository that they name.

The end-to-end tests put a lone notebook into an empty folder of a machine that looks like Colab's: `google.colab` can
be imported, torch is there, the repository is a clone of this working tree. By default one lesson runs to its end, the
others and one exercise up to where they have a model; with COLAB_FULL=1 in the environment all lessons run to their
ends, and all exercises with their solutions.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import colab
import install_missing
import nbformat
import pytest
import torch
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).parents[1]
NOTEBOOKS = colab.notebooks_of()
FULL = bool(os.environ.get("COLAB_FULL"))
SHORTEST = "notebooks/2_static_batching.ipynb"  # the lesson that runs to its end in every test run
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def name_of(path):
    return path.relative_to(ROOT / "notebooks").as_posix()


# --- stamping ------------------------------------------------------------------------------------------------------

OWN_WAY = 'import sys\nfrom pathlib import Path\n\nsys.path.insert(0, str(Path.cwd().parent))  # "helpers"'
README = """# Course

See [lesson 1](notebooks/1_one.ipynb).

| | lesson | you build |
| --- | --- | --- |
| 1 | [One](notebooks/1_one.ipynb) | a loop |
| 2 | [Elsewhere](https://example.org/2.ipynb), [practice](notebooks/exercises/release/one/one.ipynb) | a batch |
"""


def notebook(*code, title="# One\n\nText.", executed=True):
    cells = [new_markdown_cell(title, id="title")]
    for number, source in enumerate(code, start=1):
        result = new_output("execute_result", data={"text/plain": "3"}, execution_count=number)
        outputs = {"outputs": [result], "execution_count": number} if executed else {}
        cells.append(new_code_cell(source, id=f"cell-{number}", **outputs))
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    return new_notebook(cells=cells, metadata=metadata)


@pytest.fixture
def course(tmp_path):
    """A folder with a README, an executed lesson, and an exercise that was never run."""
    exercise = notebook(f"# Find it.\n{OWN_WAY}", "from helpers import load_model", "answer = 3", executed=False)
    exercise.cells[1].metadata["nbgrader"] = {"grade_id": "setup", "locked": True}
    for name, nb in {
        "1_one.ipynb": notebook(f"{OWN_WAY}\n\nimport time", "1 + 2"),
        "exercises/source/one/one.ipynb": exercise,
        "exercises/release/one/one.ipynb": exercise,
    }.items():
        path = tmp_path / "notebooks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(nb, path)
    (tmp_path / "README.md").write_text(README)
    return tmp_path


def read(course, name="1_one.ipynb"):
    return nbformat.read(course / "notebooks" / name, as_version=4)


def contents(course):
    return {path: path.read_text() for path in course.rglob("*.*") if path.is_file()}


def test_a_stamped_lesson_has_a_badge_and_a_first_cell_and_is_otherwise_the_same(course):
    before = read(course)
    assert len(colab.stamp(course, "someone/course")) == 4

    nb = read(course)
    nbformat.validate(nb)
    badge = colab.badge("someone/course", "notebooks/1_one.ipynb")
    assert badge.endswith("(https://colab.research.google.com/github/someone/course/blob/main/notebooks/1_one.ipynb)")
    title, first, imports, last = nb.cells
    assert title.source == f"# One\n\n{badge}\n\nText."
    assert first.source == colab.first_cell("someone/course") and 'REPOSITORY = "someone/course"' in first.source
    assert first.metadata.tags == ["bootstrap"]
    assert imports.source == "import time"  # without the lesson's own way to `helpers`
    assert last.source == "1 + 2" and last.outputs[0].data == before.cells[2].outputs[0].data
    assert nb.metadata == before.metadata
    # As if the new cell had run with the others, and had printed nothing.
    assert [cell.execution_count for cell in nb.cells[1:]] == [1, 2, 3]
    assert first.outputs == [] and last.outputs[0].execution_count == 3


def test_a_notebook_that_was_never_run_stays_so(course):
    colab.stamp(course, "someone/course")
    nb = read(course, "exercises/source/one/one.ipynb")
    assert [cell.execution_count for cell in nb.cells[1:]] == [None, None, None]


def test_a_cell_that_only_finds_the_package_becomes_the_first_cell_and_stays_locked(course):
    colab.stamp(course, "someone/course")
    _, first, imports, _ = read(course, "exercises/source/one/one.ipynb").cells
    assert first.source == colab.first_cell("someone/course")
    assert (first.id, first.metadata.nbgrader.locked, first.metadata.tags) == ("cell-1", True, ["bootstrap"])
    assert imports.source == "from helpers import load_model"


def test_a_locked_cell_of_a_release_gets_a_new_checksum(course):
    compute_checksum = pytest.importorskip("nbgrader.utils").compute_checksum
    nb = read(course, "exercises/release/one/one.ipynb")
    nb.cells[1].metadata.nbgrader |= {"checksum": "of the old source", "grade": False}
    colab.stamp_notebook(nb, "someone/course", "notebooks/one.ipynb")
    assert nb.cells[1].metadata.nbgrader.checksum == compute_checksum(nb.cells[1]) != "of the old source"


def test_the_readme_has_a_badge_behind_each_notebook_in_its_tables(course):
    colab.stamp(course, "someone/course")
    lines = (course / "README.md").read_text().splitlines()
    assert lines[2] == "See [lesson 1](notebooks/1_one.ipynb)."
    one = colab.badge("someone/course", "notebooks/1_one.ipynb")
    assert lines[6] == f"| 1 | [One](notebooks/1_one.ipynb) {one} | a loop |"
    assert lines[7].count("[![") == 1  # not behind the link to another place


def test_stamping_twice_changes_nothing(course):
    colab.stamp(course, "someone/course")
    before = contents(course)
    assert colab.stamp(course, "someone/course") == []
    assert contents(course) == before


def test_another_repository_takes_the_place_of_the_first_everywhere(course):
    colab.stamp(course, "someone/course")
    colab.stamp(course, "else.where/new-name")
    assert {repository for _, repository, _ in colab.stamps(course)} == {"else.where/new-name"}
    assert not any("someone" in text for text in contents(course).values())


def test_without_a_repository_there_are_no_badges_and_nothing_else_is_lost(course):
    colab.stamp(course, "")
    before = contents(course)
    assert before[course / "README.md"] == README
    assert {stamp[1:] for stamp in colab.stamps(course)} == {("", "")}
    colab.stamp(course, "someone/course")
    colab.stamp(course, "")
    assert contents(course) == before


def test_the_source_of_an_exercise_is_stamped_like_its_release(course):
    colab.stamp(course, "someone/course")
    source, release = (read(course, f"exercises/{kind}/one/one.ipynb") for kind in ("source", "release"))
    assert source == release
    assert "/blob/main/notebooks/exercises/release/one/one.ipynb)" in source.cells[0].source


@pytest.mark.parametrize(
    "title, stamped",
    [("# Title", "# Title\n\nBADGE"), ("# Title\ntext", "# Title\n\nBADGE\n\ntext"), ("text", "BADGE\n\ntext")],
)
def test_the_badge_stands_below_the_title_where_there_is_one(title, stamped):
    nb = notebook("1 + 2", title=title)
    badge = colab.badge("someone/course", "notebooks/1_one.ipynb")
    for _ in range(2):
        colab.stamp_notebook(nb, "someone/course", "notebooks/1_one.ipynb")
        assert nb.cells[0].source.replace(badge, "BADGE") == stamped


@pytest.mark.parametrize(
    "address, repository",
    [
        ("https://github.com/someone/course.git", "someone/course"),
        ("https://github.com/someone/a.course", "someone/a.course"),
        ("https://user:secret@github.com/someone/course/", "someone/course"),
        ("git@github.com:someone/course.git", "someone/course"),
        ("ssh://git@github.com/someone/course", "someone/course"),
        ("https://example.org/someone/course.git", ""),
        ("https://notgithub.com/someone/course.git", ""),
        ("../course", ""),
        (None, ""),
    ],
)
def test_the_default_is_the_git_remote(course, capsys, address, repository):
    git(course, "init", "--quiet")
    if address:
        git(course, "remote", "add", "origin", address)
    assert colab.main([], course) == 0
    assert {found for _, found, _ in colab.stamps(course)} == {repository}
    assert ("no git remote" in capsys.readouterr().out) == (not repository)


def test_a_repository_that_is_not_the_git_remote_is_pointed_out(course, capsys):
    git(course, "init", "--quiet")
    colab.main(["--repo", "someone/course"], course)
    shown = capsys.readouterr().out
    assert shown.startswith("3 notebooks and README.md name github.com/someone/course. Files changed: 4.\n")
    assert "Until someone/course exists, these badges lead nowhere." in shown


@pytest.mark.parametrize("name", ["course", "https://github.com/someone/course", "some one/course", 'a/b"'])
def test_anything_but_owner_and_name_is_refused(course, name):
    before = contents(course)
    with pytest.raises(SystemExit):
        colab.main(["--repo", name], course)
    assert contents(course) == before


# --- this checkout -------------------------------------------------------------------------------------------------


def repositories():
    return {repository for _, repository, _ in colab.stamps()} or {"(make colab was never run)"}


def test_all_notebooks_and_the_readme_name_the_same_repository():
    assert len(repositories()) == 1, "make colab [REPO=owner/name] writes one name everywhere"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_a_committed_notebook_is_stamped(path):
    nb = nbformat.read(path, as_version=4)
    before = nbformat.writes(nb)
    colab.stamp_notebook(nb, min(repositories()), path.relative_to(ROOT).as_posix())
    assert nbformat.writes(nb) == before, "run make colab"


def test_the_readme_is_stamped():
    text = (ROOT / "README.md").read_text()
    assert colab.stamp_readme(text, min(repositories())) == text, "run make colab"


def test_a_badge_opens_a_notebook_that_is_here():
    assert [path for _, _, path in colab.stamps() if path and not (ROOT / path).is_file()] == []


def test_the_repository_exists_as_far_as_this_checkout_knows():
    """The checkout's own git remote is the only proof that needs no network."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    remotes = subprocess.run(["git", "-C", ROOT, "remote", "-v"], capture_output=True, text=True, check=True).stdout
    addresses = {line.split()[1] for line in remotes.splitlines()}
    known = {found["repository"] for found in map(colab.GITHUB.search, addresses) if found}
    assert repositories() <= known | {""}, "make colab names the git remote; or add this repository as a git remote"


# --- the first cell ------------------------------------------------------------------------------------------------


def git(folder, *arguments):
    """Run git without this machine's settings."""
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    environment = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, env=environment)


@pytest.fixture
def machine(tmp_path):
    """Like Colab: `google.colab` can be imported, torch is there. pip only writes down what it is asked for."""
    packages = tmp_path / "packages"
    for package in ("google/colab", "pip"):
        (packages / package).mkdir(parents=True)
        (packages / package / "__init__.py").touch()
    (packages / "pip" / "__main__.py").write_text(
        "import pathlib, sys\n"
        "pathlib.Path(__file__).with_name('asked').write_text('\\n'.join(sys.argv[1:]))\n"
        "sys.exit('ERROR: no network' if pathlib.Path(__file__).with_name('fails').exists() else 0)"
    )
    (tmp_path / "empty").mkdir()
    return Machine(tmp_path)


class Machine:
    """A folder to work in, packages that Python finds first, and a record of what pip was asked for."""

    def __init__(self, folder):
        self.cwd, self.pip = folder / "empty", folder / "packages" / "pip"
        self.environment = os.environ | {"PYTHONPATH": str(folder / "packages")}

    def asked_of_pip(self):
        return (self.pip / "asked").read_text().split("\n") if (self.pip / "asked").exists() else []

    def start(self, repository="", cwd=None, **changes):
        """Run the first cell; what it printed, or the message with which it stopped."""
        # Twice, as a learner may run a cell: the second time there is nothing left to do.
        cell = colab.first_cell("") + "\nassert has_course(course) and sys.path[0] == str(course)\n"
        environment = self.environment | {"COURSE_REPOSITORY": str(repository)} | changes
        command = [sys.executable, "-c", cell + cell]
        done = subprocess.run(command, cwd=cwd or self.cwd, env=environment, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else done.stderr.splitlines()[-1]


def small_course(folder, requirements="torch>=2.6\nnumpy>=1.26  # arrays\n\n-c constraints.txt\n"):
    """A git repository with just what the first cell looks for."""
    for name in ("notebooks/install_missing.py", "helpers/batching.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "requirements.txt").write_text(requirements)
    for arguments in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message=all"]):
        git(folder, *arguments)
    return folder


@pytest.mark.parametrize("folder", ["", "notebooks", "tests"])
def test_in_a_checkout_the_first_cell_does_nothing(machine, folder):
    assert machine.start(cwd=ROOT / folder) == ""
    assert machine.asked_of_pip() == []


def test_where_helpers_can_be_imported_the_first_cell_does_nothing(machine):
    assert machine.start(PYTHONPATH=f"{machine.environment['PYTHONPATH']}{os.pathsep}{ROOT}") == ""


def test_elsewhere_it_fetches_the_course_once(machine, tmp_path):
    course = small_course(tmp_path / "a.course")
    torch_stays = f"Nothing had to be installed. torch {install_missing.metadata.version('torch')} stays as it is."
    for repository in (course, course.as_uri()):
        shown = machine.start(repository)
        assert shown == f"The course from {repository} is in the folder a.course.\n{torch_stays}\n"
        assert (machine.cwd / "a.course" / "helpers" / "batching.py").is_file()
    assert machine.asked_of_pip() == []


def test_it_installs_what_is_missing_or_too_old_and_never_torch(machine, tmp_path):
    course = small_course(tmp_path / "course", "torch>=99\nnumpy>=99\ntqdm>=4\nno-such-package>=1\n")
    shown = machine.start(course)
    assert "\nInstalling numpy>=99, no-such-package>=1. torch" in shown
    asked = machine.asked_of_pip()
    assert asked[0] == "install" and [word for word in asked if not word.startswith("-")][1:] == [
        "numpy>=99",
        "no-such-package>=1",
    ]


def test_a_missing_torch_is_installed(monkeypatch):
    monkeypatch.setattr(install_missing.util, "find_spec", lambda name: None)

    def version(name):
        if name == "torch":
            raise install_missing.metadata.PackageNotFoundError(name)
        return "2.0"

    monkeypatch.setattr(install_missing.metadata, "version", version)
    assert install_missing.missing("torch>=2.6\nnumpy>=1.26") == ["torch>=2.6"]


def test_what_only_opens_notebooks_is_in_the_requirements():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    names = {install_missing.name_of(line) for line in lines if line and line[0] not in "#-"}
    assert names > install_missing.NEEDED_BY_NO_CELL


def test_a_pip_that_fails_gives_a_message_with_what_is_missing(machine, tmp_path):
    (machine.pip / "fails").touch()
    shown = machine.start(small_course(tmp_path / "course", "no-such-package>=1"))
    assert shown.endswith(
        "CannotStart: pip could not install no-such-package>=1 (ERROR: no network). Is there a network? Once they are "
        "installed, by whatever means, run this cell again."
    )


def test_without_a_repository_it_says_what_to_do(machine):
    shown = machine.start()
    assert "CannotStart: " in shown and "Open it inside a copy of the course. Or " in shown
    assert "%env COURSE_REPOSITORY=owner/name" in shown


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/someone/course", "file:///no/such/course"])
def test_without_a_network_or_a_course_it_says_what_to_do(machine, address):
    shown = machine.start(address)
    assert shown.startswith(f"CannotStart: the course could not be fetched from {address} (fatal: ")
    assert "Is there a network?" in shown and "open this notebook inside that copy" in shown


@pytest.mark.parametrize("folder", ["/no/such/course", "../cuorse", "~/no-such-course", "course", "no/such/course"])
def test_a_folder_that_does_not_exist_is_not_taken_for_a_name_on_github(machine, folder):
    shown = machine.start(folder)
    assert shown.startswith(f"CannotStart: there is no folder {folder}")
    assert "%env COURSE_REPOSITORY=" in shown and "github.com" not in shown


def test_a_folder_in_the_home_directory_may_be_named_with_a_tilde(machine, tmp_path):
    course = small_course(tmp_path / "course")
    assert machine.start("~/course", HOME=str(tmp_path)).startswith(f"The course from {course} is in the folder")


def test_without_git_it_says_so(machine):
    assert "(" + "[Errno 2] No such file or directory: 'git')" in machine.start("someone/course", PATH="")


# --- a lone notebook -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """The address of a repository that holds this working tree, as it would be pushed."""
    folder = tmp_path_factory.mktemp("remote") / "course"
    list_files = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(list_files, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    for name in filter(None, names):
        if (ROOT / name).is_file():  # and not deleted since the last commit
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    colab.stamp(folder, "")
    for arguments in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message=all"]):
        git(folder, *arguments)
    return folder


PROBE = """
import json, google.colab, helpers, torch
print(json.dumps([helpers.__file__, torch.__file__, torch.__version__]))"""


def run_alone(machine, published, path, to_the_end):
    """Run a copy of a notebook in the empty folder, to the end or up to where it has a model, then the probe."""
    copy = machine.cwd / path.name
    shutil.copy(published / path.relative_to(ROOT), copy)
    nb = nbformat.read(copy, as_version=4)
    code = [cell for cell in nb.cells if cell.cell_type == "code" and cell.source.strip()]
    if not to_the_end:
        loads = [number for number, cell in enumerate(code) if "load_model()" in cell.source]
        code = code[: 1 + min([number for number in loads if number] or [1])]
    nb.cells = [*code, new_code_cell(PROBE)]
    for cell in nb.cells:
        cell.outputs = []
    client = NotebookClient(nb, kernel_name="python3", resources={"metadata": {"path": str(machine.cwd)}})
    with client.setup_kernel(env=machine.environment | {"COURSE_REPOSITORY": published.as_uri()}):
        for index, cell in enumerate(nb.cells):
            client.execute_cell(cell, index)
    first, *_, probe = nb.cells
    return first.outputs[0].text.splitlines(), json.loads(probe.outputs[0].text)


RELEASES = [path for path in NOTEBOOKS if "release" in path.parts]
LESSONS = [path for path in NOTEBOOKS if "exercises" not in path.parts]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS if FULL else [*LESSONS, RELEASES[0]], ids=name_of)
def test_a_lone_notebook_runs_in_an_empty_folder(machine, published, path):
    # A release has yet to be filled in: only its beginning can run.
    to_the_end = path == ROOT / SHORTEST or (FULL and "release" not in path.parts)
    shown, (helpers, torch_file, torch_version) = run_alone(machine, published, path, to_the_end)
    assert shown == [
        f"The course from {published.as_uri()} is in the folder course.",
        f"Nothing had to be installed. torch {torch_version} stays as it is.",
    ]
    assert Path(helpers).parent == machine.cwd / "course" / "helpers"
    assert (torch_file, torch_version) == (torch.__file__, torch.__version__)
    assert machine.asked_of_pip() == []


@pytest.mark.slow
def test_a_lone_notebook_that_cannot_start_says_why_without_a_traceback(machine):
    nb = notebook(colab.first_cell(""), executed=False)
    client = NotebookClient(nb, kernel_name="python3", resources={"metadata": {"path": str(machine.cwd)}})
    with pytest.raises(CellExecutionError), client.setup_kernel(env=machine.environment | {"COURSE_REPOSITORY": ""}):
        client.execute_cell(nb.cells[1], 1)
    (output,) = nb.cells[1].outputs
    assert len(output.traceback) == 1 and output.traceback[0].startswith("Cannot start: this notebook needs")
