"""Pictures that move: a trace that plays iteration by iteration, and a series of pictures to leaf through.

They consist of HTML and a few lines of script, and need no server, no kernel and no download. Where scripts do not run
(on paper, in a preview, or in a notebook that is not trusted yet), a still picture is shown instead, and a line says
what to do. The controls are a button and a slider, which a keyboard operates as well.
"""

import base64
import html
import json
from collections.abc import Hashable, Mapping, Sequence
from hashlib import sha256
from string import Template

from ..trace import WORK, Trace
from .colors import BLUE, PALE, REQUEST_COLORS, WORK_MEANING, ink_on, request_colors, work_color
from .picture import Picture
from .rows import runs_of
from .style import HERE, THEME

UNIT, LEFT, RIGHT = 24, 168, 446  # the height of a row, and the widths of its label and of its timeline, in pixels

# The script builds the controls, because a notebook that is not trusted keeps buttons and loses what they do.
PAGE = Template(
    """\
<div id="$id" style="$theme;max-width:800px;font-size:14px;color:var(--plot-ink);padding:6px 0">
<div style="margin-bottom:6px"><b>$title</b></div>
<div class="show"><img src="$still" alt="$text" style="width:100%">
<div style="font-style:italic">$hint</div></div>
$below
<script>(() => {
const root = document.getElementById("$id"), last = $last;
root.querySelector(".show").innerHTML = $moving;
const [button, slider, label] = ["button", "input", "output"].map((name) => root.querySelector(name));
let timer = null;
$script
function show() { label.textContent = "$unit " + slider.value + " of " + last; draw(+slider.value); }
function stop() {
  clearInterval(timer); timer = null;
  button.textContent = +slider.value >= last ? "Play again" : "Play";
}
button.onclick = () => {
  if (timer) return stop();
  if (+slider.value >= last) { slider.value = 1; show(); }
  button.textContent = "Pause";
  timer = setInterval(() => {
    slider.value = +slider.value + 1; show();
    if (+slider.value >= last) stop();
  }, $milliseconds);
};
slider.oninput = () => { stop(); show(); };
addEventListener("beforeprint", () => { slider.value = last; stop(); show(); });
show();
})()</script></div>""".replace("$theme", HERE)
)

CONTROLS = Template(
    """\
<div style="display:flex;flex-wrap:wrap;gap:8px;align-items:center;margin-bottom:4px">
<button type="button" style="width:92px;padding:4px;font:inherit;color:inherit;background:var(--plot-pale);\
border:1px solid var(--plot-line);border-radius:4px;cursor:pointer">Play</button>
<input type="range" min="1" max="$last" value="1" aria-label="$unit" \
style="flex:1;min-width:120px;accent-color:$accent">
<output style="min-width:120px">$unit 1 of $last</output></div>
""".replace("$accent", BLUE)
)

TRACE_SCRIPT = Template("""\
const frames = $frames, fills = $fills, inks = $inks, kinds = $kinds;
const [now, veil] = [root.querySelector(".now"), root.querySelector(".veil")];
function mark(name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text) node.textContent = text;
  now.appendChild(node);
}
function draw(n) {
  const edge = $left + $right * n / frames.length;
  veil.setAttribute("x", edge); veil.setAttribute("width", $width - edge);
  now.replaceChildren();
  frames[n - 1].forEach(([name, kind, tokens], row) => {
    const y = row * $unit + 2;
    mark("rect", {x: 0, y, width: $left - 8, height: $unit - 4, fill: fills[name][kind]});
    if (name == "") return mark("text", {x: 6, y: y + 15, "font-size": 13, fill: "$muted"}, "empty row");
    if (kinds[kind] == "finished")
      mark("rect", {x: 4, y: y + 2, width: $left - 16, height: $unit - 8, fill: "$page"});
    mark("text", {x: 6, y: y + 15, "font-size": 13, fill: inks[name][kind]},
      name + ": " + kinds[kind] + ", " + tokens + (tokens == 1 ? " token" : " tokens"));
  });
}""")

LEAF_SCRIPT = """\
const leaves = [...root.querySelectorAll(".leaf")];
function draw(n) { leaves.forEach((leaf, index) => leaf.hidden = index != n - 1); }"""


class Player:
    """A timeline that plays in the browser: iteration by iteration, rows prefill, decode and become free."""

    def __init__(self, trace: Trace, title: str = "Rows, iteration by iteration"):
        self.trace, self.title = trace, title

    def __repr__(self) -> str:
        return f"Player: {self.title}, {self.trace.forward_passes} iterations on {self.trace.rows} rows"

    def _repr_html_(self) -> str:
        trace = self.trace
        # One frame per iteration: for each row, the name of its request, its kind of work and its tokens so far.
        generated: dict = {}
        frames = []
        for iteration in trace.passes:
            frame = []
            for row in iteration.row_steps:
                generated[row.request_id] = generated.get(row.request_id, 0) + row.new_tokens
                name = "" if row.request_id is None else str(row.request_id)
                frame.append([name, WORK.index(row.work), generated[row.request_id] if name else 0])
            frames.append(frame)
        id = "play" + sha256((_json(frames) + self.title).encode()).hexdigest()[:10]
        colors = request_colors(request_id for request_id in generated if request_id is not None)
        fills = {str(name): [_fill(work, color, id) for work in WORK] for name, color in colors.items()}
        fills[""] = [_variable("pale")] * len(WORK)
        inks = {str(name): [ink_on(work_color(work, color)) for work in WORK] for name, color in colors.items()}
        script = TRACE_SCRIPT.substitute(
            frames=_json(frames), fills=_json(fills), inks=_json(inks), kinds=_json(WORK),
            left=LEFT, right=RIGHT, width=LEFT + RIGHT, unit=UNIT,
            muted=_variable("muted"), page=_variable("page"),
        )  # fmt: skip
        height, text = trace.rows * UNIT + 4, html.escape(repr(self))
        marks = _marks(trace, colors, id)
        moving = (
            f'<svg viewBox="0 0 {LEFT + RIGHT} {height}" width="100%" role="img" aria-label="{text}">{marks}'
            f'<rect class="veil" x="{LEFT}" y="0" width="{RIGHT}" height="{height}" fill="{_variable("page")}" '
            'fill-opacity="0.75"/><g class="now"></g></svg>'
        )
        still = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{LEFT} 0 {RIGHT} {height}" width="{RIGHT}" '
            f'height="{height}" font-family="sans-serif">{marks}</svg>'
        )
        controls = CONTROLS.substitute(last=len(frames), unit="iteration")
        return PAGE.substitute(
            id=id, title=html.escape(self.title), text=text, last=len(frames), unit="iteration",
            still="data:image/svg+xml;base64," + base64.b64encode(still.encode()).decode(),
            hint="This is the whole timeline. Run the cell to play it iteration by iteration.",
            moving=_json(controls + moving), below=_key(trace, id), script=script, milliseconds=120,
        )  # fmt: skip


def _json(value) -> str:
    return json.dumps(value, separators=(",", ":")).replace("</", "<\\/")


def _variable(name: str) -> str:
    return f"var(--plot-{name}, {THEME[name][0]})"


def _fill(work: str, color: str, id: str) -> str:
    if work == "empty":
        return _variable("pale")
    return f"url(#{id}{color[1:]})" if work == "finished" else work_color(work, color)


def _marks(trace: Trace, colors: Mapping[Hashable, str], id: str) -> str:
    """Return the timeline as SVG: a rectangle per stretch of work, and the number of its request where it fits."""
    used = {colors[held] for row in range(trace.rows) for *_, work, held in runs_of(trace, row) if work == "finished"}
    marks = [
        f'<pattern id="{id}{color[1:]}" width="5" height="5" patternUnits="userSpaceOnUse">'
        f'<rect width="5" height="5" fill="{_variable("page")}"/><path d="M0,5 5,0" stroke="{color}"/></pattern>'
        for color in sorted(used | {colors[first] for first in list(colors)[:1]})
    ]
    scale = RIGHT / max(1, trace.forward_passes)
    for row in range(trace.rows):
        for start, length, work, request_id in runs_of(trace, row):
            x, y, color = LEFT + start * scale, row * UNIT + 2, colors.get(request_id, PALE)
            geometry = f'x="{x:.2f}" y="{y}" width="{length * scale:.2f}" height="{UNIT - 4}"'
            marks.append(f'<rect {geometry} fill="{_fill(work, color, id)}"/>')
            name = html.escape(str(request_id))
            if work == "decode" and 7 * len(name) + 4 < length * scale:
                at = f'x="{x + length * scale / 2:.2f}" y="{y + 14}" text-anchor="middle" font-size="11"'
                marks.append(f'<text {at} fill="{ink_on(color)}">{name}</text>')
    return "".join(marks)


def _key(trace: Trace, id: str) -> str:
    """Return what the colors mean, as HTML: kinds of work in the colors of three requests."""
    thirds = list(zip(REQUEST_COLORS, ("0 33%", "33% 67%", "67%"), strict=False))
    looks = {
        kind: f"linear-gradient(90deg,{','.join(f'{work_color(kind, color)} {part}' for color, part in thirds)})"
        for kind in WORK
    }
    looks["empty"] = _variable("pale")
    looks["finished"] = "repeating-linear-gradient(135deg,var(--plot-ink) 0 1px,var(--plot-page) 1px 4px)"
    entries = [
        f'<span style="margin-right:14px;white-space:nowrap"><span style="display:inline-block;width:21px;height:12px;'
        f'background:{looks[kind]};border:1px solid var(--plot-line)"></span> {WORK_MEANING[kind]}</span>'
        for kind in WORK
        if trace.work[kind]
    ]
    return f'<div style="font-size:12px;margin-top:2px">{" ".join(entries)}</div>'


class FlipBook:
    """Pictures of one thing at several moments, to leaf through in the browser.

    Args:
        pictures: what to show at each step, all of the same size.
        captions: a sentence per picture, which says what has just happened.
        title: what the pictures show together.
    """

    def __init__(self, pictures: Sequence[Picture], captions: Sequence[str], title: str):
        self.pictures, self.captions, self.title = pictures, captions, title

    def __repr__(self) -> str:
        steps = " ".join(f"{number}. {caption}" for number, caption in enumerate(self.captions, 1))
        return f"Flip book: {self.title}. {steps}"

    def _repr_html_(self) -> str:
        leaves = "\n".join(
            f'<div class="leaf"{" hidden" * bool(number)}>'
            f'<div style="min-height:2.5em" aria-live="polite">{html.escape(caption)}</div>'
            f"{picture.svg()}</div>"
            for number, (caption, picture) in enumerate(zip(self.captions, self.pictures, strict=True))
        )
        id = "leaf" + sha256(repr(self).encode()).hexdigest()[:10]
        controls = CONTROLS.substitute(last=len(self.pictures), unit="step")
        return PAGE.substitute(
            id=id, title=html.escape(self.title), text=html.escape(repr(self)), last=len(self.pictures), unit="step",
            still="data:image/png;base64," + self.pictures[-1].png(),
            hint=html.escape(self.captions[-1]) + " Run the cell to leaf through all steps.",
            moving=_json(controls + leaves), below="", script=LEAF_SCRIPT, milliseconds=1600,
        )  # fmt: skip


play, flip_book = Player, FlipBook  # by the names of functions, as all pictures
