"""An animation of a trace that plays in a notebook without a kernel."""

import html
import json
import textwrap
from hashlib import sha256

from ..trace import WORK, Trace
from .picture import SKY, WORK_COLORS, WORK_MEANING
from .rows import runs_of


class Player:
    """A timeline that plays in the browser: iteration by iteration, rows prefill, decode and become free.

    It consists of HTML and a few lines of script, and needs no server and no download. Where scripts do not run (in a
    preview, or in a notebook that is not trusted yet), the whole timeline is shown as a still picture.
    """

    def __init__(self, trace: Trace, title: str):
        self.trace, self.title = trace, title

    def __repr__(self) -> str:
        return f"Player: {self.title}, {self.trace.forward_passes} iterations on {self.trace.rows} rows"

    def _repr_html_(self) -> str:
        trace, unit, left, right = self.trace, 22, 190, 700
        scale = right / max(1, trace.forward_passes)
        marks = []
        for row in range(trace.rows):
            for start, length, work, nth in runs_of(trace, row):
                color = SKY if work == "decode" and nth % 2 else WORK_COLORS[work]
                geometry = f'x="{left + start * scale:.2f}" y="{row * unit + 2}" width="{length * scale:.2f}"'
                marks.append(f'<rect {geometry} height="{unit - 4}" fill="{color}"/>')
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
        data = json.dumps(frames, separators=(",", ":")).replace("</", "<\\/")
        legend = "".join(
            f'<span style="margin-right:14px"><span style="display:inline-block;width:11px;height:11px;'
            f'background:{WORK_COLORS[kind]};border:1px solid #999"></span> {html.escape(WORK_MEANING[kind])}</span>'
            for kind in WORK
        )
        id = "play" + sha256((data + self.title).encode()).hexdigest()[:10]
        return PLAYER.format(
            id=id, title=html.escape(self.title), marks="".join(marks), data=data, legend=legend,
            width=left + right, height=trace.rows * unit + 4, left=left, right=right, unit=unit, last=len(frames),
            colors=json.dumps([WORK_COLORS[kind] for kind in WORK]), kinds=json.dumps(list(WORK)),
            text=html.escape(repr(self)),
        )  # fmt: skip


PLAYER = textwrap.dedent("""\
    <div id="{id}" style="max-width:{width}px;font:13px sans-serif;color:#222;background:#fff;padding:6px">
    <div style="margin-bottom:4px"><b>{title}</b></div>
    <div style="display:flex;gap:8px;align-items:center;margin-bottom:4px">
    <button type="button" style="width:70px">Play</button>
    <input type="range" min="1" max="{last}" value="{last}" style="flex:1" aria-label="iteration">
    <span style="width:130px;text-align:right">iteration {last} of {last}</span></div>
    <svg viewBox="0 0 {width} {height}" width="100%" role="img" aria-label="{text}">
    <g class="timeline">{marks}</g><rect class="veil" x="{width}" y="0" width="0" height="{height}" fill="#fff"/>
    <g class="now"></g></svg>
    <div style="font-size:11px;margin-top:2px">{legend}</div>
    <script>(() => {{
    const root = document.getElementById("{id}"), frames = {data}, colors = {colors}, kinds = {kinds};
    const [button, slider] = [root.querySelector("button"), root.querySelector("input")];
    const label = root.querySelector("span"), now = root.querySelector(".now"), veil = root.querySelector(".veil");
    let timer = null;
    function mark(name, attributes, text) {{
      const node = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const key in attributes) node.setAttribute(key, attributes[key]);
      if (text) node.textContent = text;
      now.appendChild(node);
    }}
    function show() {{
      const n = +slider.value, edge = {left} + {right} * n / frames.length;
      label.textContent = "iteration " + n + " of " + frames.length;
      veil.setAttribute("x", edge); veil.setAttribute("width", {width} - edge);
      now.replaceChildren();
      frames[n - 1].forEach(([name, kind, tokens], row) => {{
        const y = row * {unit} + 2;
        mark("rect", {{x: 0, y, width: {left} - 12, height: {unit} - 4, fill: colors[kind], stroke: "#999"}});
        const dark = kinds[kind] == "decode" || kinds[kind] == "finished";
        mark("text", {{x: 6, y: y + 13, "font-size": 11, fill: dark ? "#fff" : "#222"}},
          name == "" ? "empty" : "request " + name + ": " + kinds[kind] + ", " + tokens + " tok");
      }});
    }}
    function stop() {{ clearInterval(timer); timer = null; button.textContent = "Play"; }}
    button.onclick = () => {{
      if (timer) return stop();
      if (+slider.value >= frames.length) slider.value = 1;
      button.textContent = "Pause";
      timer = setInterval(() => {{
        if (+slider.value >= frames.length) return stop();
        slider.value = +slider.value + 1; show();
      }}, 80);
    }};
    slider.oninput = () => {{ stop(); show(); }};
    show();
    }})()</script></div>""")


def play(trace: Trace, title: str = "Rows, iteration by iteration") -> Player:
    """Return an animation of a trace, with a play button and a slider."""
    return Player(trace, title)
