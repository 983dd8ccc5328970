"""Write a student's page: for each task the points, the check's message and picture, the code and what it printed.

Everything on it is text that the template escapes, and no script can run. Its size is limited, whatever was handed in.
"""

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from .examination import Task

MAX_CHARACTERS = 500_000  # of a page
MAX_CELLS = 40  # of a task
TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
CONTROL = re.compile(
    r"\x1b\[[0-9;?]*[a-zA-Z]|[^\n\t\x20-\x7e\xa0-\U0010ffff]|[\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def page(assignment: str, tasks: list[Task], note: str = "", seed: int | None = None) -> str:
    """Return the page of a submission.

    Args:
        assignment: its name.
        tasks: graded, in the notebook's order.
        note: on the submission as a whole.
        seed: of the cases; None if there were none.
    """
    totals = {name: f"{sum(getattr(task, name) for task in tasks):g}" for name in ("earned", "points")}
    template, limit = TEMPLATES.get_template("page.html"), MAX_CHARACTERS
    texts = [text for task in tasks for work in task.work[:MAX_CELLS] for text in (work.source, work.printed)]
    while sum(min(len(text), limit) for text in texts) > MAX_CHARACTERS:
        limit //= 4
    pictures = [task.grids and task.grids.picture()._repr_mimebundle_() for task in tasks]
    while True:
        shown = [_shown(task, picture, limit) for task, picture in zip(tasks, pictures, strict=True)]
        text = template.render(assignment=_plain(assignment), tasks=shown, note=_plain(note), seed=seed, **totals)
        if len(text) <= MAX_CHARACTERS:
            return text
        limit //= 4


def _shown(task: Task, drawn: tuple[dict, dict] | None, limit: int) -> dict:
    shown = {
        "name": task.name,
        "earned": f"{task.earned:g}",
        "points": f"{task.points:g}",
        "passed": bool(task.earned),
        "by_hand": f"{task.by_hand:g}" if task.by_hand else "",
        "message": _plain(task.message),
        "work": [
            {"source": _plain(work.source, limit), "printed": _plain(work.printed, limit)}
            for work in task.work[:MAX_CELLS]
        ],
    }
    if drawn:
        bundle, details = drawn[0], drawn[1]["image/png"]
        picture = bundle["image/png"] if len(bundle["image/png"]) <= limit else ""
        shown |= {"picture": picture, "alt": _plain(details["alt"]), "width": details["width"]}
    return shown


def _plain(text: str, limit: int = 1000) -> str:
    """Return text without colors and control characters, cut to a length."""
    text = CONTROL.sub("", text[: 2 * limit]).strip("\n")
    return text if len(text) <= limit else f"{text[:limit]}\n[The rest is cut.]"
