"""A leaderboard of what submissions achieve in a contest, as a table and as a page for the class.

A milestone that is not passed counts for nothing, so more milestones rank higher. Then the costs decide, in the order
of their columns, as percentages of what the course's engine needs for the same work: runs with different seeds compare.
"""

from pathlib import Path

from markupsafe import escape

from .examiners import Grade
from .tables import read_csv, write_csv

COLUMNS = ["rank", "student", "name", "assignment", "milestones"]
PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Leaderboard</title>
<style>body {{ font: 1rem/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 60rem; margin: 2rem auto;
padding: 0 1rem; overflow-x: auto }} table {{ border-collapse: collapse }} td, th {{ border-bottom: 1px solid #ccc;
padding: .3rem .8rem; text-align: right }} .name {{ text-align: left }}</style>
<h1>Leaderboard</h1>
{tables}<p>In percent of what the course's engine needs for the same requests; less is better. Engines with equally many
milestones are ordered by the first of the costs, then by the next ones.</p>
</html>
"""


class Leaderboard:
    """The standings in a folder, from one run to the next.

    Args:
        folder: it need not have a leaderboard yet.
    """

    def __init__(self, folder: Path):
        self.path = folder / "leaderboard.csv"
        self.lines: dict[tuple[str, str], dict[str, str]] = {}
        if self.path.exists():
            heads, *lines = read_csv(self.path)
            for line in lines:
                fields = dict(zip(heads, line, strict=True))
                self.lines[fields["student"], fields["assignment"]] = fields

    def enter(self, grade: Grade) -> None:
        """Replace a student's line by that of a new grade; without a milestone there is none."""
        self.lines.pop((grade.student, grade.assignment), None)
        if not grade.scores:
            return
        fields = {"student": grade.student, "name": grade.name, "assignment": grade.assignment}
        fields["milestones"] = str(len(grade.scores))
        for measure in grade.scores[0]:
            mine, course = (sum(score[measure][place] for score in grade.scores) for place in (0, 1))
            fields[measure] = f"{100 * mine / course:.1f}" if course else "100.0"
        self.lines[grade.student, grade.assignment] = fields

    def write(self, is_anonymous: bool = False) -> None:
        """Write the table, and the page, which may leave out the names. Nothing is written without a line."""
        tables = ""
        heads = COLUMNS + [name for fields in self.lines.values() for name in fields if name not in COLUMNS]
        heads = list(dict.fromkeys(heads))
        ranked = []
        for assignment in sorted({assignment for _, assignment in self.lines}):
            lines = [fields for fields in self.lines.values() if fields["assignment"] == assignment]
            costs = [name for name in heads[len(COLUMNS) :] if name in lines[0]]
            lines.sort(key=lambda one: (-int(one["milestones"]), *(float(one[name]) for name in costs), one["student"]))
            body = ""
            for place, fields in enumerate(lines):
                ties = place and all(fields[name] == lines[place - 1][name] for name in ("milestones", *costs))
                fields["rank"] = lines[place - 1]["rank"] if ties else str(place + 1)
                name = f"Engine {place + 1}" if is_anonymous else fields["name"] or fields["student"]
                cells = "".join(f"<td>{escape(fields[key])}</td>" for key in ("milestones", *costs))
                body += f'<tr><td>{fields["rank"]}</td><td class="name">{escape(name)}</td>{cells}</tr>\n'
            named = "".join(f"<th>{escape(name)}</th>" for name in ("milestones", *costs))
            head = f'<tr><th>rank</th><th class="name">engine</th>{named}</tr>\n'
            tables += f"<h2>{escape(assignment)}</h2>\n<table>\n{head}{body}</table>\n"
            ranked += lines
        if ranked:
            write_csv(self.path, [heads, *([fields.get(name, "") for name in heads] for fields in ranked)])
            self.path.with_suffix(".html").write_text(PAGE.format(tables=tables), encoding="utf-8", errors="replace")
