// The picture: a band for each row, a column for each iteration, the newest at the right. The upper part of a cell says
// who: the request's number, on its hue. The lower part says what: the kind of work, by colour and by pattern.

export const KINDS = {
  prefill: "prefill: reads a prompt, first token",
  decode: "decode: one more token",
  stalled: "stalled: waits for a prefill",
  finished: "finished: waits for the longest",
  empty: "empty: no request",
};
const KEPT = 400; // iterations: the widest view
const WHO = 14; // pixels of a row that say who,
const ROW = 30; // of so many (page.css gives the rows of the table the same height)

// The ids of answers are long: people get numbers, in the order in which the page first saw them.
const numbers = new Map();
let count = 0;

export function numberOf(id) {
  if (!numbers.has(id)) numbers.set(id, ++count);
  if (numbers.size > 5000) numbers.delete(numbers.keys().next().value); // a load test sends many
  return numbers.get(id);
}

/** Neighbours get hues far apart: the golden angle. */
export function hueOf(number) {
  return Math.round((number * 137.5) % 360);
}

/** A small tile that repeats: what tells kinds of work apart without colour. */
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

export class Timeline {
  view = 200; // iterations that fit in
  atWork = null; // share of the cells in view that did a request good
  #iterations = [];
  #frozen = null;

  constructor(canvas, rows) {
    this.canvas = canvas;
    this.rows = rows;
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  /** Iterations as the server tells them. A gap is drawn where there were more than it tells. */
  add(iterations) {
    for (const iteration of iterations) {
      const last = this.#iterations.at(-1);
      if (last && iteration.n !== last.n + 1) this.#iterations.push({ n: iteration.n - 1, slots: [], gap: true });
      this.#iterations.push(iteration);
    }
    this.#iterations.splice(0, this.#iterations.length - KEPT);
  }

  clear() {
    this.#iterations = [];
  }

  freeze(frozen) {
    this.#frozen = frozen ? [...this.#iterations] : null;
  }

  draw() {
    const { canvas, rows } = this;
    const [width, height, scale] = [canvas.clientWidth, rows * ROW, window.devicePixelRatio];
    if (!width || !height) return; // not laid out yet
    canvas.style.height = `${height}px`;
    canvas.width = width * scale; // which also wipes it
    canvas.height = height * scale;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const colors = palette();
    const fills = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, pattern(context, kind, colors)]));
    const shown = (this.#frozen ?? this.#iterations).slice(-this.view);
    const cell = width / this.view;

    const cells = shown.flatMap(({ slots }) => slots);
    const good = cells.filter((slot) => slot && (slot[1] === "prefill" || slot[1] === "decode"));
    this.atWork = cells.length ? good.length / cells.length : null;
    for (let row = 0; row < rows; row++) {
      const top = row * ROW + 1;
      context.fillStyle = colors.empty; // a line to write on
      context.fillRect(0, top + ROW - 4, width, 1);
      for (const [start, length, kind] of runs(shown, ({ slots }) => slots.length && (slots[row]?.[1] ?? "empty"))) {
        context.fillStyle = fills[kind];
        if (kind) context.fillRect(start * cell, top + WHO, length * cell, ROW - WHO - 3);
      }
      for (const [start, length, id] of runs(shown, ({ slots }) => slots[row]?.[0])) {
        if (!id) continue;
        const [number, left] = [numberOf(id), start * cell];
        context.fillStyle = `hsl(${hueOf(number)} 65% ${colors.who})`;
        context.fillRect(left, top, length * cell, WHO);
        context.fillStyle = colors.edge; // where a request begins, and another may have ended
        context.fillRect(left, top, 1, ROW - 3);
        const label = `#${number}`;
        if (context.measureText(label).width + 5 > length * cell) continue;
        context.fillStyle = colors.ink;
        context.fillText(label, left + 3, top + WHO / 2 + 0.5);
      }
    }
    context.fillStyle = colors.ink;
    shown.forEach(({ gap }, place) => gap && context.fillRect(place * cell, 0, 1, height));
  }
}

/** [start, length, value] of neighbouring iterations with the same value. */
function runs(iterations, value) {
  const found = [];
  iterations.forEach((iteration, place) => {
    const now = value(iteration);
    if (found.length && found.at(-1)[2] === now) found.at(-1)[1]++;
    else found.push([place, 1, now]);
  });
  return found;
}

/** The colours of page.css, which has some for light and some for dark. */
function palette() {
  const style = getComputedStyle(document.documentElement);
  const names = [...Object.keys(KINDS), "mark", "who", "edge", "ink"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

/** Fill a list with a sample of each kind of work, drawn as in the timeline. */
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
