"""Write the set-up cell and the repository's name into all notebooks and README.md: what `make colab` does.

Every notebook begins with the same cell. It does nothing in a copy of the course; elsewhere it installs the package
`helpers` from the repository, at the tag of this version. A badge opens the notebook in Colab at the same tag. Without
a repository there are no badges, and the cell says what is missing: nothing ever points at a repository that does not
exist. Running this twice changes nothing.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
TAG = "bootstrap"  # of the cell
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

# pip leaves the requirements alone; helpers/set_up.py then installs those that are missing, and never touches torch.
SET_UP = """
# @title Set up: run this cell first
import sys
from pathlib import Path

sys.path[:0] = [str(f) for f in [Path.cwd(), *Path.cwd().parents] if (f / "helpers" / "set_up.py").is_file()]
if not any((Path(f) / "helpers" / "set_up.py").is_file() for f in sys.path):  # elsewhere, this needs a network
    {install}
%reload_ext helpers.set_up
""".strip()
INSTALL = """
    import subprocess

    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "{archive}"]
    if subprocess.run(pip, capture_output=True).returncode:
        raise ConnectionError("Cannot install from github.com/{repository}: is there a network? Is it public?")
""".strip()
REFUSE = """
    raise FileNotFoundError(
        f"There is no folder helpers in {Path.cwd()} or above it. This notebook needs the whole course: "
        "get it from where this notebook is from, and open the notebook inside it."
    )
""".strip()

GITHUB = re.compile(r"(?:^|[@/])(?:www\.)?github\.com[:/]+(?P<repository>[\w.-]+/[\w.-]+?)(?:\.git)?/*$")
BADGE_IMAGE = "https://colab.research.google.com/assets/colab-badge.svg"
OVERVIEW = "notebooks/0_in_ten_minutes.ipynb"  # what README's own badge opens
BADGE = re.compile(
    r"\[!\[[^\]]*\]\(" + re.escape(BADGE_IMAGE) + r"\)\]"
    r"\(https://colab\.research\.google\.com/github/(?P<repository>[^/]+/[^/]+)/blob/[^/]+/(?P<path>[^)]*)\)"
)


def repository_of_remote(root: Path = ROOT) -> str:
    """Return owner/name of the git remote `origin`; "" if there is none or it is not on GitHub."""
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    try:
        address = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
    found = GITHUB.search(address)
    return found["repository"] if found else ""


def notebooks_of(root: Path = ROOT) -> list[Path]:
    """Return the lessons, the extra notebooks and those of the exercises."""
    found = (root / "notebooks").rglob("*.ipynb")
    return sorted(path for path in found if ".ipynb_checkpoints" not in path.parts)


def set_up_cell(repository: str) -> str:
    """Return the source of a notebook's first code cell; "" is no repository."""
    archive = f"https://github.com/{repository}/archive/refs/tags/v{VERSION}.zip"
    return SET_UP.format(install=INSTALL.format(archive=archive, repository=repository) if repository else REFUSE)


def badge(repository: str, path: str) -> str:
    """Return the badge as Markdown; "" without a repository. `path` is the notebook's, from the root.

    The badge of an exercise's source opens its release: the two differ in nothing but the solutions.
    """
    if not repository:
        return ""
    path = path.replace("notebooks/exercises/source/", "notebooks/exercises/release/")
    target = f"https://colab.research.google.com/github/{repository}/blob/v{VERSION}/{path}"
    return f"[![Open in Colab]({BADGE_IMAGE})]({target})"


def stamp_notebook(nb: NotebookNode, repository: str, path: str) -> None:
    """Give a notebook its badge and its first code cell, in place; `path` is where it is, from the root."""
    _stamp_badge(nb, badge(repository, path))
    _stamp_set_up_cell(nb, set_up_cell(repository))


def _stamp_badge(nb: NotebookNode, text: str) -> None:
    cell = next((cell for cell in nb.cells if cell.cell_type == "markdown"), None)
    if cell is None:
        raise ValueError("the notebook has no text that a badge could stand in")
    source = re.sub(BADGE.pattern + r"\n*", "", cell.source).rstrip("\n")
    if text:  # below the title, which stays the first thing that a reader and a table of contents meet
        title = re.search(r"^# .*$", source, re.MULTILINE)
        end = title.end() if title else 0
        parts = [source[:end], text, source[end:].lstrip("\n")]
        source = "\n\n".join(part for part in parts if part)
    cell.source = source


def _stamp_set_up_cell(nb: NotebookNode, source: str) -> None:
    code = [cell for cell in nb.cells if cell.cell_type == "code" and cell.source.strip()]
    first = next((cell for cell in code if TAG in cell.metadata.get("tags", [])), None)
    if first is None:  # with an id that is always the same, so that stamping is repeatable
        first = nbformat.v4.new_code_cell(id=TAG)
        nb.cells.insert(nb.cells.index(code[0]) if code else len(nb.cells), first)
    first.source, first.outputs, first.execution_count = source, [], None
    first.metadata["tags"] = [TAG]
    # It is no part of the lesson: the first folds it in JupyterLab, the second in Colab.
    first.metadata["jupyter"], first.metadata["cellView"] = {"source_hidden": True}, "form"
    if "checksum" in first.metadata.get("nbgrader", {}):  # a release, with locked cells
        from nbgrader.utils import compute_checksum

        first.metadata.nbgrader.checksum = compute_checksum(first)
    others = [cell for cell in code if cell is not first]
    if others and all(cell.execution_count for cell in others):  # as if it had run with them: it prints nothing
        for number, cell in enumerate([first, *others], start=1):
            cell.execution_count = number
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = number


def stamp_readme(text: str, repository: str) -> str:
    """Return README.md with the repository's address, and badges below its title and behind the notebooks in tables."""
    text = re.sub(r"(?<=git clone https://github\.com/)\S+", repository or "OWNER/REPOSITORY", text)
    text = re.sub(r"^.*/actions/workflows/.*\n\n", "", text, flags=re.MULTILINE)  # the badges below the title
    text = re.sub(" ?" + BADGE.pattern, "", text)
    link = re.compile(r"\[[^\]]*\]\((?P<path>[^):]+\.ipynb)\)")

    def with_badge(line: str) -> str:
        if not (repository and line.startswith("|")):
            return line
        return link.sub(lambda found: f"{found[0]} {badge(repository, found['path'])}", line)

    if repository:
        ci = f"https://github.com/{repository}/actions/workflows/ci.yml"
        badges = f"[![CI]({ci}/badge.svg)]({ci}) {badge(repository, OVERVIEW)}"
        text = re.sub(r"\A(# .*\n\n)", rf"\1{badges}\n\n", text)
    return "\n".join(map(with_badge, text.split("\n")))


def stamp(root: Path, repository: str) -> list[Path]:
    """Stamp everything below `root`; return the files that this changed."""
    changed = []
    for path in notebooks_of(root):
        before = path.read_text(encoding="utf-8")
        nb = nbformat.reads(before, as_version=4)
        stamp_notebook(nb, repository, path.relative_to(root).as_posix())
        after = nbformat.writes(nb) + "\n"
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path)
    readme = root / "README.md"
    before = readme.read_text(encoding="utf-8")
    if (after := stamp_readme(before, repository)) != before:
        readme.write_text(after, encoding="utf-8")
        changed.append(readme)
    return changed


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Stamp the notebooks and the README; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repo", help='owner/name on GitHub; "" removes all badges (default: the git remote origin)')
    args = parser.parse_args(argv)
    repository = repository_of_remote(root) if args.repo is None else args.repo
    if repository and not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        parser.error(f"a repository is named as owner/name, and {repository!r} is not")
    changed = stamp(root, repository)
    name = f"github.com/{repository}" if repository else "no repository, and have no badges"
    print(f"{len(notebooks_of(root))} notebooks and README.md name {name}. Files changed: {len(changed)}.")
    if repository:
        print("Colab can install the course only while this repository is public, and only from its tag:")
        print(f"git tag v{VERSION} && git push origin v{VERSION}")
    else:
        print("make colab REPO=owner/name names a repository on GitHub.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
