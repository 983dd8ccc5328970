// A window into the engine: reads /events and shows them as a timeline, as figures and in words.

import { send } from "./requests.js";
import { Refused, hasKey, messages, request, useKey } from "./server.js";
import { Timeline, hueOf, legend, numberOf } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const QUEUE_SHOWN = 40;
const SILENCE = 10; // seconds without a message until the page reconnects; the server sends one every two seconds
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

// --- what the engine does -----------------------------------------------------------------------------------------

const timeline = new Timeline($("timeline"));
const tokens = new Map(); // generated since the page was opened, for each request that has a row
const finished = new Set(); // of these, the requests that have finished
let now = null; // the last message
let last = null; // the last iteration
let seconds = null; // per iteration, on average over the last message that had any
let planned = false;

function receive(message) {
  now = message;
  timeline.add(message.iterations);
  last = message.iterations.at(-1) ?? last;
  const computing = message.iterations.reduce((sum, iteration) => sum + iteration.seconds, 0);
  if (message.iterations.length) seconds = computing / message.iterations.length;
  for (const [id, , , newTokens] of message.iterations.flatMap(({ slots }) => slots).filter(Boolean)) {
    numberOf(id); // numbered here, in the order in which they ran
    tokens.set(id, (tokens.get(id) ?? 0) + newTokens);
  }
  // A finished request stays visible for as long as it has a row: with static batching, until its batch ends.
  for (const { id } of message.finished) finished.add(id);
  timeline.groups = message.replicas?.length ? message.replicas : [{ name: "", rows: message.rows }];
  const slots = timeline.groups.flatMap(({ name }) => timeline.last(name)?.slots ?? []);
  const onRows = new Set(slots.filter(Boolean).map(([id]) => id));
  for (const id of finished) {
    if (!onRows.has(id) && finished.delete(id)) tokens.delete(id);
  }
  // With reduced motion, the page changes once per second; otherwise with every message.
  if (!planned) setTimeout(() => requestAnimationFrame(show), reducedMotion.matches ? 1000 : 0);
  planned = true;
}

function show() {
  planned = false;
  const { rows, policy, blocks, waiting_count: waiting } = now;
  const how = policy === "static"
    ? "static batching, in which the next batch waits for the longest request of this one"
    : "continuous batching, in which a row takes the next request as soon as it is free";
  setText($("policy"), `${rows} ${rows === 1 ? "row" : "rows"}, policy ${policy}: ${how}.`);
  makeRows();
  timeline.draw();
  const lines = $("rows").querySelectorAll("tr[data-work]");
  rowsNow().forEach(([id, work], row) => {
    const line = lines[row];
    const texts = [id ? `#${numberOf(id)}` : "–", work, id ? `${tokens.get(id) ?? 0}` : ""];
    texts.forEach((text, column) => setText(line.children[column + 1], text));
    line.dataset.work = work;
  });
  setText($("rate"), now.tokens_per_second.toFixed(0));
  setText($("iterations"), last ? (last.n + 1).toLocaleString("en") : "0");
  setText($("seconds"), last ? `${(1000 * seconds).toFixed(1)} ms` : "–");
  setText($("row-use"), timeline.rowUse === null ? "–" : `${(100 * timeline.rowUse).toFixed(0)} %`);
  setText($("queue-count"), `${waiting} waiting, of at most ${now.max_queue}`);
  showQueue();
  $("blocks").hidden = !blocks;
  if (blocks) {
    const free = blocks.total - blocks.used - blocks.cached;
    for (const kind of ["used", "cached"]) $(`blocks-${kind}`).style.width = `${(100 * blocks[kind]) / blocks.total}%`;
    const { total, used, cached } = blocks;
    setText($("blocks-text"), `${used} used, ${cached} cached for shared prefixes, ${free} free, of ${total}`);
  }
  showPace();
}

/** Return [request, work] of each row: those of its replica's last iteration, unless nothing runs any more. */
function rowsNow() {
  return timeline.groups.flatMap(({ name, rows }) => {
    const slots = (now.running_count && timeline.last(name)?.slots) || [];
    return Array.from({ length: rows }, (_, row) => slots[row] ?? [null, "empty"]);
  });
}

/** Make a line for each replica, if there are several, and one for each of its rows. */
function makeRows() {
  const wanted = JSON.stringify(timeline.groups);
  if ($("rows").dataset.groups === wanted) return;
  $("rows").dataset.groups = wanted;
  $("rows").replaceChildren(...timeline.groups.flatMap(({ name, state, rows }) => {
    const lines = Array.from({ length: rows }, (_, row) => {
      const line = document.createElement("tr");
      line.append(document.createElement("th"), ...Array.from({ length: 3 }, () => document.createElement("td")));
      line.firstChild.scope = "row";
      line.firstChild.textContent = row;
      line.dataset.work = "empty";
      return line;
    });
    if (!name) return lines;
    const head = document.createElement("tr");
    head.append(document.createElement("th"));
    head.className = "replica";
    head.firstChild.colSpan = 4;
    head.firstChild.textContent = `${name}: ${state}`;
    return [head, ...lines];
  }));
}

function showQueue() {
  const chips = now.waiting.slice(0, QUEUE_SHOWN).map((id) => {
    const chip = document.createElement("li");
    chip.textContent = `#${numberOf(id)}`;
    chip.style.setProperty("--hue", hueOf(numberOf(id)));
    return chip;
  });
  const more = now.waiting_count - chips.length;
  $("queue").replaceChildren(...chips, ...(more ? [`and ${more} more`] : []));
}

/** Set an element's text if it differs: screen readers and selections notice every change. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// The state in words, for screen readers, at a pace at which a user can listen.
setInterval(() => {
  if (!now) return;
  const busy = rowsNow().filter(([id, work]) => id && work !== "finished").length;
  const waiting = now.waiting_count;
  const words = `${busy} of ${now.rows} rows busy, ${waiting} waiting, ${$("rate").textContent} tokens per second.`;
  setText($("live"), busy || waiting ? words : "All rows are empty.");
}, 4000);

// --- the connection -----------------------------------------------------------------------------------------------

async function followEvents() {
  for (let delay = 0.5; ; delay = Math.min(2 * delay, 5)) {
    const aborter = new AbortController();
    let reason = "The server does not respond.";
    let silence;
    const restartTimer = () => {
      clearTimeout(silence);
      silence = setTimeout(() => aborter.abort(), 1000 * SILENCE);
    };
    try {
      restartTimer();
      const response = await request("events", null, aborter.signal);
      timeline.clear(); // the first message repeats the last iterations
      tokens.clear();
      finished.clear();
      last = null;
      connection("Connected.", "ok");
      if ($("key-form").contains(document.activeElement)) $("prompts").focus();
      $("key-form").hidden = true;
      for await (const message of messages(response)) {
        restartTimer();
        delay = 0.5;
        receive(message);
      }
    } catch (error) {
      reason = error instanceof Refused ? `The server refuses to show its events: ${error.message}` : reason;
      if (error instanceof Refused && error.status === 401) {
        connection(hasKey() ? "The server does not accept this key." : "The server requires a key.", "warning");
        await enteredKey();
        delay = 0;
        continue;
      }
    } finally {
      clearTimeout(silence);
      aborter.abort(); // an abandoned stream would keep its connection
    }
    connection(`${reason} You see its last state. Reconnecting …`, "warning");
    await new Promise((resolve) => setTimeout(resolve, 1000 * delay));
  }
}

function connection(text, kind) {
  setText($("connection"), text);
  document.body.dataset.connection = kind;
}

function enteredKey() {
  $("key-form").hidden = false;
  $("key").focus();
  return new Promise((resolve) => {
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      useKey($("key").value);
      $("key").value = "";
      showCurl();
      resolve();
    };
  });
}

// --- the controls -------------------------------------------------------------------------------------------------

function say(text) {
  $("news").textContent = text;
}

function sendAll(prompts) {
  if (!prompts.length) return;
  $("none-yet").hidden = true;
  const settings = { max_tokens: $("max-tokens").valueAsNumber, temperature: $("temperature").valueAsNumber };
  send(prompts, settings, now ? now.rows + now.max_queue : Infinity, say);
}

$("send-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sendAll($("prompts").value.split("\n").filter((line) => line.trim()));
});

$("prompts").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("send-form").requestSubmit();
});

// Openings that the embedded model can continue. Only stories, one in four, are long.
const TRAITS = ["brave", "clever", "proud", "hungry", "patient", "lonely", "cheerful", "wise", "tiny", "merry", "shy"];
const ANIMALS = ["fox", "bear", "goose", "badger", "frog", "donkey", "cat"];
const OPENINGS = [
  (trait, animal) => `Once upon a time, a ${trait} ${animal}`,
  (trait, animal) => `Even a ${trait} ${animal}`,
  (trait, animal) => `Question: What does the ${trait} ${animal} eat?\nAnswer:`,
  (trait) => `Question: How does a ${trait} baker bake bread?\nAnswer:`,
];

$("burst-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const opening = (_, i) => OPENINGS[i % OPENINGS.length](TRAITS[i % TRAITS.length], ANIMALS[i % ANIMALS.length]);
  sendAll(Array.from({ length: $("burst").valueAsNumber }, opening));
});

let pace = null; // as last reported; a choice on this page stays until the server reports another pace

function showPace() {
  if (now.pace === pace) return;
  pace = now.pace;
  const isPace = (option) => +option.value === pace;
  if (![...$("pace").options].some(isPace)) $("pace").add(new Option(`${1000 * pace} ms per iteration`, pace));
  $("pace").selectedIndex = [...$("pace").options].findIndex(isPace);
}

$("pace").addEventListener("change", async () => {
  try {
    await request("pace", { seconds: +$("pace").value });
    setText($("pace-error"), "");
  } catch (error) {
    pace = null;
    setText($("pace-error"), `The speed is unchanged: ${error.message}`);
  }
});

$("view").addEventListener("change", () => {
  timeline.view = +$("view").value;
  timeline.draw();
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  legend($("legend"));
  timeline.draw();
});

function showCurl() {
  const base = new URL("v1", location);
  const header = hasKey() ? ' \\\n  -H "Authorization: Bearer $COURSE_API_KEY"' : "";
  $("address").textContent = base;
  $("curl").textContent = `curl ${base}/completions -H "Content-Type: application/json"${header} \\\n` +
    `  -d '{"prompt": "The quick brown", "max_tokens": 20}'`;
}

$("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText($("curl").textContent);
    $("copy").textContent = "Copied";
    setTimeout(() => ($("copy").textContent = "Copy"), 2000);
  } catch {
    getSelection().selectAllChildren($("curl")); // browsers refuse the clipboard to other machines' http pages
  }
});

if (innerWidth < 600) $("view").value = timeline.view = 100;
legend($("legend"));
showCurl();
followEvents();
