"""Pictures that move: a trace that plays iteration by iteration, and a series of pictures to leaf through.

They consist of HTML and a few lines of script, and need no server, no kernel and no download. Where scripts do not run
(on paper, in a preview, or in a notebook that is not trusted yet), a still picture is shown instead, and a line says
what to do. The controls are a button and a slider, which a keyboard operates as well.
"""

import html
import json
from collections.abc import Sequence
from hashlib import sha256
from string import Template

from ..trace import Trace
from .colors import BLUE
from .picture import Picture
from .rows import slot_timeline
from .style import HERE, styled

# The script builds the controls, because a notebook that is not trusted keeps buttons and loses what they do.
PAGE = Template(
    """\
<div id="$id" style="$theme;max-width:800px;font-size:14px;color:var(--plot-ink);padding:6px 0">
<div style="margin-bottom:6px"><b>$title</b></div>
<div class="show"><img src="$still" alt="$text" style="width:100%">
<div style="font-style:italic">$hint</div></div>

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

VEIL_SCRIPT = """\
const veil = root.querySelector(".veil"), [left, width] = ["x", "width"].map((name) => +veil.getAttribute(name));
function draw(n) {
  veil.setAttribute("x", left + width * n / last); veil.setAttribute("width", width - width * n / last);
}"""

LEAF_SCRIPT = """\
const leaves = [...root.querySelectorAll(".leaf")];
function draw(n) { leaves.forEach((leaf, index) => leaf.hidden = index != n - 1); }"""


class Player:
    """A timeline of rows that plays in the browser: a veil leaves it, iteration by iteration."""

    def __init__(self, trace: Trace, title: str = "Rows, iteration by iteration"):
        self.trace, self.title = trace, title

    def __repr__(self) -> str:
        return f"Player: {self.title}, {self.trace.forward_passes} iterations on {self.trace.rows} rows"

    def _repr_html_(self) -> str:
        picture = styled(slot_timeline)({f"{self.trace.rows} rows": self.trace})
        drawn, last = picture.svg(), self.trace.forward_passes
        moving = drawn.replace("</svg>", f"{veil(picture.figure.axes[0])}</svg>")
        return PAGE.substitute(
            id="play" + sha256((picture.alt + self.title).encode()).hexdigest()[:10],
            title=html.escape(self.title), text=html.escape(repr(self)), last=last, unit="iteration",
            still="data:image/png;base64," + picture.png(),
            hint="This is the whole timeline. Run the cell to play it iteration by iteration.",
            moving=_json(CONTROLS.substitute(last=last, unit="iteration") + moving),
            script=VEIL_SCRIPT, milliseconds=120,
        )  # fmt: skip


def veil(ax) -> str:
    """Return a rectangle that hides a panel of a picture, for the SVG of its figure, which was just drawn."""
    box, scale = ax.get_window_extent(), 72 / ax.figure.dpi
    top = 72 * ax.figure.get_figheight() - box.y1 * scale
    return (
        f'<rect class="veil" x="{box.x0 * scale + 1:.1f}" y="{top:.1f}" '
        f'style="fill:var(--plot-page);fill-opacity:.85" '
        f'width="{box.width * scale:.1f}" height="{box.height * scale - 1:.1f}"/>'
    )


def _json(value) -> str:
    return json.dumps(value, separators=(",", ":")).replace("</", "<\\/")


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
            moving=_json(controls + leaves), script=LEAF_SCRIPT, milliseconds=1600,
        )  # fmt: skip


play, flip_book = Player, FlipBook  # by the names of functions, as all pictures
