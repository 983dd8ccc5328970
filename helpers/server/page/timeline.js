// The timeline: a band per row, a column per iteration, the newest on the right. The upper part of a cell shows the
// request: its number, on its hue. The lower part shows the kind of work, by color and by pattern.

export const KINDS = {
  prefill: "prefill: computes a prompt, first token",
  decode: "decode: one more token",
  stalled: "stalled: waits for a prefill",
  finished: "finished: waits for the longest request",
  empty: "empty: no request",
};
const KEPT = 400; // iterations: the widest view
const ROW = 30; // pixels per row (page.css gives the rows of the table the same height)
const REQUEST = 14; // of these, the pixels that show the request

// The server's ids are long: the page shows numbers, in the order in which it first saw the ids.
const numbers = new Map();
let count = 0;

export function numberOf(id) {
  if (!numbers.has(id)) numbers.set(id, ++count);
  if (numbers.size > 5000) numbers.delete(numbers.keys().next().value); // a load test sends many
  return numbers.get(id);
}

/** Return a hue; consecutive numbers get distant hues, the golden angle apart. */
export function hueOf(number) {
  return Math.round((number * 137.5) % 360);
}

/** Make the repeating tile that tells a kind of work apart without color. */
function pattern(context, kind, colors) {
  const tile = new OffscreenCanvas(8, 8);
  const pen = tile.getContext("2d");
  pen.fillStyle = colors[kind];
  pen.fillRect(0, 0, 8, 8);
  pen.fillStyle = pen.strokeStyle = colors.mark;
  pen.lineWidth = 1.5;
  pen.beginPath();
  if (kind === "prefill") for (const x of [-4, 4, 12]) (pen.moveTo(x - 5, 9), pen.lineTo(x + 5, -1)); // slanted stripes
  if (kind === "finished") for (const y of [2, 6]) (pen.moveTo(0, y), pen.lineTo(8, y)); // level stripes
  if (kind === "stalled") for (const [x, y] of [[2, 2], [6, 6]]) pen.rect(x - 1, y - 1, 1, 1); // dots
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

// Each replica has its own iterations, in lanes below a line with its name; a single engine has neither name nor line.
export class Timeline {
  view = 200; // iterations in view, of each replica
  rowUse = null; // share of the cells in view that advanced a request
  groups = [{ name: "", rows: 0 }]; // the replicas, from top to bottom
  #iterations = new Map(); // by the name of the replica
  #newest = null;

  constructor(canvas) {
    this.canvas = canvas;
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  /** Add iterations that the server reported, with a gap for those that it left out. */
  add(iterations) {
    for (const iteration of iterations) {
      if (this.#newest !== null && iteration.n !== this.#newest + 1) {
        for (const list of this.#iterations.values()) list.push({ slots: [], gap: true });
      }
      this.#newest = iteration.n;
      const name = iteration.replica ?? "";
      if (!this.#iterations.has(name)) this.#iterations.set(name, []);
      this.#iterations.get(name).push(iteration);
    }
    for (const list of this.#iterations.values()) list.splice(0, list.length - KEPT);
  }

  clear() {
    this.#iterations.clear();
    this.#newest = null;
  }

  /** Return the last iteration of a replica, or undefined. */
  last(name) {
    return this.#iterations.get(name)?.at(-1);
  }

  draw() {
    const { canvas, groups } = this;
    const lines = groups.reduce((sum, { name, rows }) => sum + rows + (name ? 1 : 0), 0);
    const [width, height, scale] = [canvas.clientWidth, lines * ROW, window.devicePixelRatio];
    if (!width || !height) return; // not laid out yet
    canvas.style.height = `${height}px`;
    canvas.width = width * scale; // this also clears it
    canvas.height = height * scale;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const colors = palette();
    const fills = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, pattern(context, kind, colors)]));
    const shown = new Map(groups.map(({ name }) => [name, (this.#iterations.get(name) ?? []).slice(-this.view)]));
    const cells = [...shown.values()].flat().flatMap(({ slots }) => slots);
    const useful = cells.filter((slot) => slot && (slot[1] === "prefill" || slot[1] === "decode"));
    this.rowUse = cells.length ? useful.length / cells.length : null;
    let top = 1;
    for (const { name, rows } of groups) {
      if (name) top += ROW;
      this.#drawLanes(context, shown.get(name), rows, top, { width, colors, fills });
      top += rows * ROW;
    }
  }

  #drawLanes(context, shown, rows, first, { width, colors, fills }) {
    const cell = width / this.view;
    for (let row = 0; row < rows; row++) {
      const top = first + row * ROW;
      context.fillStyle = colors.empty; // a base line
      context.fillRect(0, top + ROW - 4, width, 1);
      for (const [start, length, kind] of runs(shown, ({ slots }) => slots.length && (slots[row]?.[1] ?? "empty"))) {
        context.fillStyle = fills[kind];
        if (kind) context.fillRect(start * cell, top + REQUEST, length * cell, ROW - REQUEST - 3);
      }
      for (const [start, length, id] of runs(shown, ({ slots }) => slots[row]?.[0])) {
        if (!id) continue;
        const [number, left] = [numberOf(id), start * cell];
        context.fillStyle = `hsl(${hueOf(number)} 65% ${colors.tint})`;
        context.fillRect(left, top, length * cell, REQUEST);
        context.fillStyle = colors.edge; // the beginning of a request, perhaps right behind another one
        context.fillRect(left, top, 1, ROW - 3);
        const label = `#${number}`;
        if (context.measureText(label).width + 5 > length * cell) continue;
        context.fillStyle = colors.ink;
        context.fillText(label, left + 3, top + REQUEST / 2 + 0.5);
      }
    }
    context.fillStyle = colors.ink;
    shown.forEach(({ gap }, place) => gap && context.fillRect(place * cell, first - 1, 1, rows * ROW));
  }
}

/** Return [start, length, value] for each run of neighboring iterations with the same value. */
function runs(iterations, value) {
  const found = [];
  iterations.forEach((iteration, place) => {
    const now = value(iteration);
    if (found.length && found.at(-1)[2] === now) found.at(-1)[1]++;
    else found.push([place, 1, now]);
  });
  return found;
}

/** Return the colors of page.css, which has two sets: light and dark. */
function palette() {
  const style = getComputedStyle(document.documentElement);
  const names = [...Object.keys(KINDS), "mark", "tint", "edge", "ink"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

/** Fill a list with a sample of each kind of work as the timeline draws it. */
export function legend(list) {
  const items = Object.entries(KINDS).map(([kind, meaning]) => {
    const [item, sample] = [document.createElement("li"), document.createElement("canvas")];
    [sample.width, sample.height] = [24, 14];
    const context = sample.getContext("2d");
    context.fillStyle = pattern(context, kind, palette());
    context.fillRect(0, 0, 24, 14);
    item.append(sample, meaning);
    return item;
  });
  list.replaceChildren(...items);
}
