# Run this cell first. Inside a copy of the course it does nothing. Anywhere else (Colab, Kaggle, this file alone) it
# fetches the course into a folder beside the notebook and installs what is missing; a torch that is there stays.
import os
import runpy
import subprocess
import sys
from pathlib import Path

REPOSITORY = ""  # the course's owner/name on GitHub


class CannotStart(Exception):
    def _render_traceback_(self):  # the message says what to do, and a traceback would bury it
        return [f"Cannot start: {self}"]


def has_course(folder):
    return (folder / "helpers" / "batching.py").is_file()


def fetch_course(repository):
    """Clone the course unless it was cloned before, install what it needs and is missing, return its folder."""
    if not repository:
        raise CannotStart(
            "this notebook needs the rest of the course, and does not know where that is. Open it inside a copy of the "
            "course. Or name a repository on GitHub with %env COURSE_REPOSITORY=owner/name in a cell of its own, and "
            "run this cell again."
        )
    url = repository if ":" in repository else str(Path(repository).expanduser())
    if ":" not in url and not Path(url).exists():
        url = f"https://github.com/{repository}"
        if repository.count("/") != 1 or repository.strip("/.~") != repository:  # no owner/name
            raise CannotStart(
                f"there is no folder {repository} (this notebook runs in {here}). Set %env COURSE_REPOSITORY=... to "
                f"the path of a copy of the course, or to its owner/name on GitHub, and run this cell again."
            )
    folder = Path.cwd() / url.rstrip("/").rpartition("/")[2].removesuffix(".git")
    if not has_course(folder):
        clone = ["git", "clone", "--quiet", "--depth", "1", url, str(folder)]
        try:
            # Asked for a repository that does not exist, GitHub wants a password: fail then, rather than wait for one.
            no_questions = {"env": os.environ | {"GIT_TERMINAL_PROMPT": "0"}, "stdin": subprocess.DEVNULL}
            subprocess.run(clone, check=True, capture_output=True, text=True, **no_questions)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            reason = said[max(said.find("fatal:"), 0) :].splitlines()[0]
            raise CannotStart(
                f"the course could not be fetched from {url} ({reason}). Is there a network? (On Kaggle it has to be "
                f"switched on.) Or copy the course from another machine, and open this notebook inside that copy."
            ) from None
    print(f"The course from {url} is in the folder {folder.name}.")
    runpy.run_path(str(folder / "notebooks" / "install_missing.py"))["install_missing"]()
    return folder


here = Path.cwd()
course = next(filter(has_course, [here, *here.parents, *map(Path, sys.path)]), None)
course = course or fetch_course(os.environ.get("COURSE_REPOSITORY") or REPOSITORY)
if sys.path[0] != str(course):
    sys.path.insert(0, str(course))
