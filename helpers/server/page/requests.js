// The requests that this page sends: a card for each, with its text as it comes.

import { Refused, messages, request } from "./server.js";
import { hueOf, numberOf } from "./timeline.js";

// A browser opens at most six connections to a server. One is for the events and one must stay free for other requests,
// which leaves this many streams at once. More prompts than free streams go into one HTTP request and share its stream.
const STREAMS = 4;
const CARDS = 200;

let free = STREAMS;
const turns = [];

async function myTurn() {
  if (free > 0) free--;
  else await new Promise((turn) => turns.push(turn));
}

function endTurn() {
  if (turns.length) turns.shift()();
  else free++;
}

/** The card of one request: its text, and the times that the page measured. */
class Card {
  #text = "";
  #state = "waiting";
  #description = "waiting";
  #sent = performance.now();
  #first = null;
  #last = null;
  #tokens = 0;

  constructor(prompt, stop) {
    const find = (selector) => this.element.querySelector(selector);
    this.element = document.getElementById("card").content.cloneNode(true).firstElementChild;
    [this.title, this.stateLine, this.text, this.output, this.metrics, this.button] =
      ["h3", ".state", ".text", ".output", ".metrics", ".stop"].map(find);
    find(".prompt").textContent = prompt;
    this.button.addEventListener("click", stop);
    this.show();
  }

  get over() {
    return this.#state !== "waiting" && this.#state !== "running";
  }

  /** Show its number, which depends on the server's id: known from the first token on. */
  name(id) {
    const number = numberOf(id);
    this.title.textContent = `Request #${number}`;
    this.element.style.setProperty("--hue", hueOf(number));
  }

  add(text, reason) {
    if (this.over) return;
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.#tokens++; // the server sends a chunk for every token
    this.#text += text;
    this.#state = this.#description = "running";
    if (reason) this.end("done", reason === "stop" ? "done: the text ended" : "done: max tokens");
    changed(this);
  }

  end(state, description) {
    if (this.over) return;
    [this.#state, this.#description] = [state, description];
    changed(this);
  }

  show() {
    this.element.dataset.state = this.#state;
    this.stateLine.textContent = this.#description;
    this.output.textContent = this.#text;
    if (this.#tokens) {
      const [ttft, seconds] = [this.#first - this.#sent, (this.#last - this.#first) / 1000];
      const rate = this.#tokens > 1 && seconds > 0 ? `, ${((this.#tokens - 1) / seconds).toFixed(0)} tokens/s` : "";
      const tokens = `${this.#tokens} ${this.#tokens === 1 ? "token" : "tokens"}`;
      this.metrics.textContent = `${tokens}, TTFT ${ttft.toFixed(0)} ms${rate}`;
    }
    if (this.over) hide(this.button, this.element);
    const overflows = this.text.scrollHeight > this.text.clientHeight;
    if (this.over && overflows) this.text.tabIndex = 0; // so that arrow keys scroll it
  }
}

/** Hide a button. If it has the focus, move that on, or the keyboard would restart at the top of the page. */
function hide(button, next) {
  if (document.activeElement === button) next.focus();
  button.hidden = true;
}

// Tokens come faster than people read, and showing them takes time: the page shows new ones every 50 ms.
const toShow = new Set();
function changed(card) {
  if (!toShow.size) setTimeout(() => requestAnimationFrame(showChanged), 50);
  toShow.add(card);
}
function showChanged() {
  for (const card of toShow) card.show();
  toShow.clear();
}

/**
 * Send prompts, each in its own HTTP request if there are enough connections. `capacity` is how many sequences the
 * server holds, and `say` announces how the requests ended.
 */
export function send(prompts, settings, capacity, say) {
  const groups = grouped(prompts, capacity);
  const list = document.getElementById("requests");
  list.prepend(...groups.flatMap((group) => sendTogether(group, settings, say)));
  while (list.children.length > CARDS && !["waiting", "running"].includes(list.lastElementChild.dataset.state)) {
    list.lastElementChild.remove();
  }
}

/**
 * Return the prompts of each HTTP request. One request holds all prompts that share a stream. If the server has no room
 * for all of them, there are several requests, as many as can be sent at once: it accepts some and refuses the others.
 */
function grouped(prompts, capacity) {
  if (prompts.length <= free) return prompts.map((prompt) => [prompt]);
  if (prompts.length <= capacity) return [prompts];
  const size = Math.min(Math.ceil(prompts.length / Math.max(free, 2)), capacity);
  return Array.from({ length: Math.ceil(prompts.length / size) }, (_, i) => prompts.slice(i * size, (i + 1) * size));
}

/** Send one HTTP request and return its elements. Closing its connection cancels all of its prompts. */
function sendTogether(prompts, settings, say) {
  const aborter = new AbortController();
  const endAll = (...how) => cards.forEach((card) => card.end(...how));
  const stop = () => {
    aborter.abort(); // the server notices the closed connection and frees the rows
    endAll("stopped", "stopped");
  };
  const cards = prompts.map((prompt) => new Card(prompt, stop));
  const several = document.getElementById("together").content.cloneNode(true).firstElementChild;
  const stopAll = several.querySelector("button");
  if (cards.length > 1) {
    several.firstElementChild.textContent = `${cards.length} prompts in one HTTP request, which share a connection.`;
    stopAll.textContent = `Stop all ${cards.length}`;
    stopAll.addEventListener("click", stop);
    for (const card of cards) card.button.hidden = true;
  }
  const run = async () => {
    await myTurn();
    try {
      const response = await request("v1/completions", { ...settings, prompt: prompts, stream: true }, aborter.signal);
      let named = false;
      for await (const chunk of messages(response)) {
        if (chunk.error) throw new Error(chunk.error.message);
        if (!named) cards.forEach((card, index) => card.name(index ? `${chunk.id}/${index}` : chunk.id));
        named = true;
        for (const { index, text, finish_reason } of chunk.choices) cards[index].add(text, finish_reason);
      }
      endAll("failed", "failed: the stream ended early");
    } catch (error) {
      const status = error instanceof Refused ? ` (${error.status})` : "";
      if (error.retryAfter) endAll("refused", `refused${status}: ${error.message} Retry-After: ${error.retryAfter} s.`);
      else endAll("failed", `failed${status}: ${error.message}`);
    } finally {
      aborter.abort(); // an abandoned stream would keep its connection
      endTurn();
    }
    showChanged();
    hide(stopAll, cards[0].element);
    const [{ title, stateLine }] = cards;
    const one = `${title.textContent}: ${stateLine.textContent.replace(/\.?$/, ".")}`;
    say(cards.length === 1 ? one : `All ${cards.length} requests have ended.`);
  };
  run();
  return [...(cards.length > 1 ? [several] : []), ...cards.map((card) => card.element)];
}
