"""Write a student's page: for each task the points, the check's message and picture, the code and what it printed.

Everything on it is text that the template escapes, or Markdown of which only harmless tags are left. No script can run,
and nothing is loaded. The page's size is limited, whatever was handed in. Points given by hand are filled in later.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import bleach
import mistune
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from .examination import Task
from .plain import plain
from .submissions import Submission

MAX_CHARACTERS = 500_000  # of a page
MAX_CELLS = 40  # of a task, the last ones
MAX_MARKDOWN = 30_000  # characters of a text that is rendered: a longer one is shown as it was written
TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
MARKDOWN = mistune.create_markdown(escape=True, plugins=["table", "strikethrough"])
TAGS = ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "del", "code", "pre", "blockquote"]
TAGS += ["ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td"]
SLOT = re.compile(r"<!--(total|points|comment) ?([\w-]*)-->.*?<!--/-->", re.DOTALL)


@dataclass(frozen=True)
class Mark:
    """What the instructor gives a text: points out of `most`, None before that, and a comment."""

    most: float
    points: float | None = None
    comment: str = ""


def page(
    submission: Submission, tasks: list[Task], note: str = "", seed: str = "", max_score: float | None = None
) -> str:
    """Return the page of a submission.

    Args:
        submission: whose page it is.
        tasks: graded, in the notebook's order.
        note: on the submission as a whole.
        seed: of the cases; "" if there were none.
        max_score: the most points without those given by hand; by default the tasks'.
    """
    template, limit = TEMPLATES.get_template("page.html"), MAX_CHARACTERS
    texts = [text for task in tasks for work in task.work[-MAX_CELLS:] for text in (work.source, work.printed)]
    while sum(min(len(text), limit) for text in texts) > MAX_CHARACTERS:
        limit //= 4
    pictures = [task.grids and task.grids.picture()._repr_mimebundle_() for task in tasks]
    marks = {task.name: Mark(task.by_hand) for task in tasks if task.by_hand}
    earned = sum(task.earned for task in tasks)
    most = sum(task.points for task in tasks) if max_score is None else max_score
    named = f"{submission.name} ({submission.student})" if submission.name else submission.student
    while True:
        shown = [_shown(task, picture, limit) for task, picture in zip(tasks, pictures, strict=True)]
        about = {"assignment": plain(submission.assignment), "student": plain(named), "note": plain(note)}
        text = fill(template.render(about, tasks=shown, seed=seed), earned, most, marks)
        if len(text) <= MAX_CHARACTERS:
            return text
        limit //= 4


def fill(text: str, score: float, max_score: float, marks: Mapping[str, Mark]) -> str:
    """Return a page with the points and comments that the instructor has given so far.

    Args:
        text: a page.
        score, max_score: the points of the tasks that the grader examines.
        marks: of the texts that are graded by hand, by name.
    """
    given = sum(mark.points or 0 for mark in marks.values())
    most = sum(mark.most for mark in marks.values())
    open_points = sum(mark.most for mark in marks.values() if mark.points is None)
    total = f"{score + given:g} of {max_score + most:g} points"
    if open_points:
        total += f" so far, {open_points:g} of which your instructor has yet to give"

    def words(slot: re.Match) -> str:
        kind, name = slot.groups()
        mark = marks.get(name, Mark(0))
        match kind:
            case "total":
                said = total
            case "points" if mark.points is None:
                said = f"up to {mark.most:g} points, given by hand"
            case "points":
                said = f"{mark.points:g} of {mark.most:g} points"
            case _:
                said = plain(mark.comment, 5000)
        return f"<!--{kind} {name}-->{escape(said)}<!--/-->"

    return SLOT.sub(words, text)


def rendered(text: str) -> Markup | None:
    """Return Markdown as HTML without links, pictures and attributes; None for what is too long or nested too deep."""
    if len(text) > MAX_MARKDOWN:
        return None
    try:
        return Markup(bleach.clean(MARKDOWN(text), tags=TAGS, attributes={}, strip=True))
    except RecursionError:
        return None


def _shown(task: Task, drawn: tuple[dict, dict] | None, limit: int) -> dict:
    works = task.work[-MAX_CELLS:]
    shown = {
        "name": task.name,
        "earned": f"{task.earned:g}",
        "points": f"{task.points:g}",
        "passed": bool(task.earned),
        "by_hand": task.by_hand,
        "message": plain(task.message),
        "work": [{"source": plain(work.source, limit), "printed": plain(work.printed, limit)} for work in works],
    }
    if task.by_hand:
        for work in shown["work"]:
            work["html"] = rendered(work["source"])
    if drawn:
        bundle, details = drawn[0], drawn[1]["image/png"]
        picture = bundle["image/png"] if len(bundle["image/png"]) <= limit else ""
        shown |= {"picture": picture, "alt": plain(details["alt"]), "width": details["width"]}
    return shown
