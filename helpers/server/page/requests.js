// The requests that this page sends, each as a card with its text as it comes.

import { Refused, ask, messages } from "./server.js";
import { hueOf, numberOf } from "./timeline.js";

// A browser opens six connections to a server at most. One is for the events, one has to stay free for the rest: so
// this many streams at once. More prompts than that go as one request, which gets all its answers in one stream.
const STREAMS = 4;
const CARDS = 200;

let free = STREAMS;
const turns = [];

async function myTurn() {
  if (free > 0) free--;
  else await new Promise((turn) => turns.push(turn));
}

function handOn() {
  if (turns.length) turns.shift()();
  else free++;
}

/** One answer: its text, and what the page measured of it. */
class Card {
  #text = "";
  #state = "waiting";
  #words = "waiting";
  #sent = performance.now();
  #first = null;
  #last = null;
  #tokens = 0;

  constructor(prompt, stop) {
    const find = (selector) => this.element.querySelector(selector);
    this.element = document.getElementById("card").content.cloneNode(true).firstElementChild;
    [this.title, this.stateLine, this.text, this.answer, this.measures, this.button] =
      ["h3", ".state", ".text", ".answer", ".measures", ".stop"].map(find);
    find(".prompt").textContent = prompt;
    this.button.addEventListener("click", stop);
    this.show();
  }

  get over() {
    return this.#state !== "waiting" && this.#state !== "running";
  }

  /** The server's name for it is known from its first token on. */
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
    this.#state = this.#words = "running";
    if (reason) this.end("done", reason === "stop" ? "done: the text ended" : "done: max tokens");
    changed(this);
  }

  end(state, words) {
    if (this.over) return;
    [this.#state, this.#words] = [state, words];
    changed(this);
  }

  show() {
    this.element.dataset.state = this.#state;
    this.stateLine.textContent = this.#words;
    this.answer.textContent = this.#text;
    if (this.#tokens) {
      const [ttft, seconds] = [this.#first - this.#sent, (this.#last - this.#first) / 1000];
      const rate = this.#tokens > 1 && seconds > 0 ? `, ${((this.#tokens - 1) / seconds).toFixed(0)} tokens/s` : "";
      const tokens = `${this.#tokens} ${this.#tokens === 1 ? "token" : "tokens"}`;
      this.measures.textContent = `${tokens}, TTFT ${ttft.toFixed(0)} ms${rate}`;
    }
    if (this.over) hide(this.button, this.element);
    if (this.over && this.text.scrollHeight > this.text.clientHeight) this.text.tabIndex = 0; // for the arrow keys
  }
}

/** Hide a button. If it has the focus, hand that on, or the keyboard would start anew at the top of the page. */
function hide(button, next) {
  if (document.activeElement === button) next.focus();
  button.hidden = true;
}

// Tokens come much faster than anybody can read, and showing them takes time: all that is new is shown every 50 ms.
const toShow = new Set();
function changed(card) {
  if (!toShow.size) setTimeout(() => requestAnimationFrame(showChanged), 50);
  toShow.add(card);
}
function showChanged() {
  for (const card of toShow) card.show();
  toShow.clear();
}

/** Send prompts, each as a request of its own if there are connections for that; `say` hears in words how it ended. */
export function send(prompts, settings, say) {
  const groups = prompts.length > free ? [prompts] : prompts.map((prompt) => [prompt]);
  const list = document.getElementById("requests");
  list.prepend(...groups.flatMap((group) => sendTogether(group, settings, say)));
  while (list.children.length > CARDS && !["waiting", "running"].includes(list.lastElementChild.dataset.state)) {
    list.lastElementChild.remove();
  }
}

/** One HTTP request, whose prompts share their fate: closing its connection takes all of them back. Its elements. */
function sendTogether(prompts, settings, say) {
  const aborter = new AbortController();
  const endAll = (...how) => cards.forEach((card) => card.end(...how));
  const stop = () => {
    aborter.abort(); // the server sees the connection close, and frees the rows
    endAll("stopped", "stopped");
  };
  const cards = prompts.map((prompt) => new Card(prompt, stop));
  const several = document.getElementById("together").content.cloneNode(true).firstElementChild;
  const stopAll = several.querySelector("button");
  if (cards.length > 1) {
    several.firstElementChild.textContent = `${cards.length} prompts in one request, whose answers share a connection.`;
    stopAll.textContent = `Stop all ${cards.length}`;
    stopAll.addEventListener("click", stop);
    for (const card of cards) card.button.hidden = true;
  }
  const run = async () => {
    await myTurn();
    try {
      const response = await ask("v1/completions", { ...settings, prompt: prompts, stream: true }, aborter.signal);
      let named = false;
      for await (const chunk of messages(response)) {
        if (chunk.error) throw new Error(chunk.error.message);
        if (!named) cards.forEach((card, index) => card.name(index ? `${chunk.id}/${index}` : chunk.id));
        named = true;
        for (const { index, text, finish_reason } of chunk.choices) cards[index].add(text, finish_reason);
      }
      endAll("failed", "failed: the answer broke off");
    } catch (error) {
      const status = error instanceof Refused ? ` (${error.status})` : "";
      if (error.retryAfter) endAll("refused", `refused${status}: ${error.message} Retry-After: ${error.retryAfter} s.`);
      else endAll("failed", `failed${status}: ${error.message}`);
    } finally {
      aborter.abort(); // or a stream that is given up would keep its connection
      handOn();
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
