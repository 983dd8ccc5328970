// A window into the engine: watches /events and shows what they tell, in pictures, figures and words.

import { send } from "./requests.js";
import { Refused, ask, hasKey, messages, useKey } from "./server.js";
import { Timeline, hueOf, legend, numberOf } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const QUEUE_SHOWN = 40;
const SILENCE = 10; // seconds without a message, though there is one every two: the server hangs or is gone
const calm = matchMedia("(prefers-reduced-motion: reduce)");

// --- what the engine does -----------------------------------------------------------------------------------------

const timeline = new Timeline($("timeline"), 0);
const tokens = new Map(); // of each request that has a row, since the page looks
let now = null; // the last message
let last = null; // the last iteration,
let seconds = null; // and how long those of the last message took on average
let planned = false;

function take(message) {
  // Who ended in the last message was still to be seen in it.
  for (const { id } of now?.finished ?? []) tokens.delete(id);
  now = message;
  timeline.add(message.iterations);
  last = message.iterations.at(-1) ?? last;
  const computing = message.iterations.reduce((sum, iteration) => sum + iteration.seconds, 0);
  if (message.iterations.length) seconds = computing / message.iterations.length;
  for (const [id, , , newTokens] of message.iterations.flatMap(({ slots }) => slots).filter(Boolean)) {
    numberOf(id); // here, in the order in which they ran
    tokens.set(id, (tokens.get(id) ?? 0) + newTokens);
  }
  // Whoever wants less motion gets a picture a second, the others one for every message.
  if (!planned) setTimeout(() => requestAnimationFrame(show), calm.matches ? 1000 : 0);
  planned = true;
}

function show() {
  planned = false;
  const { rows, policy, blocks, waiting_count: waiting } = now;
  const how = policy === "static"
    ? "static batching, the next batch waits for the longest of this one"
    : "continuous batching, a row takes the next request as soon as it is free";
  tell($("policy"), `${rows} ${rows === 1 ? "row" : "rows"}, policy ${policy}: ${how}.`);
  if (timeline.rows !== rows) makeRows(rows);
  timeline.draw();
  rowsNow().forEach(([id, work], row) => {
    const line = $("rows").children[row];
    const texts = [id ? `#${numberOf(id)}` : "–", work, id ? `${tokens.get(id) ?? 0}` : ""];
    texts.forEach((text, column) => tell(line.children[column + 1], text));
    line.dataset.work = work;
  });
  tell($("rate"), now.tokens_per_second.toFixed(0));
  tell($("iterations"), last ? (last.n + 1).toLocaleString("en") : "0");
  tell($("seconds"), last ? `${(1000 * seconds).toFixed(1)} ms` : "–");
  tell($("at-work"), timeline.atWork === null ? "–" : `${(100 * timeline.atWork).toFixed(0)} %`);
  tell($("queue-count"), `${waiting} waiting, room for ${now.max_queue}`);
  showQueue();
  $("blocks").hidden = !blocks;
  if (blocks) {
    const free = blocks.total - blocks.used - blocks.cached;
    for (const kind of ["used", "cached"]) $(`blocks-${kind}`).style.width = `${(100 * blocks[kind]) / blocks.total}%`;
    const { total, used, cached } = blocks;
    tell($("blocks-text"), `${used} used, ${cached} cached for beginnings alike, ${free} free, of ${total}`);
  }
  $("burst").max = rows + now.max_queue;
  showPace();
}

/** [request, work] of each row. The last iteration tells, unless nothing runs any more. */
function rowsNow() {
  const slots = now.running_count && last ? last.slots : [];
  return Array.from({ length: now.rows }, (_, row) => slots[row] ?? [null, "empty"]);
}

function makeRows(rows) {
  timeline.rows = rows;
  $("rows").replaceChildren(...Array.from({ length: rows }, (_, row) => {
    const line = document.createElement("tr");
    line.append(document.createElement("th"), ...Array.from({ length: 3 }, () => document.createElement("td")));
    line.firstChild.scope = "row";
    line.firstChild.textContent = row;
    return line;
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

/** Text that changes only if it is another one: screen readers and selections notice every change. */
function tell(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// In words, for those who do not see the picture; not more often than one can listen to.
setInterval(() => {
  if (!now) return;
  const busy = rowsNow().filter(([id]) => id).length;
  const waiting = now.waiting_count;
  const words = `${busy} of ${now.rows} rows busy, ${waiting} waiting, ${$("rate").textContent} tokens a second.`;
  tell($("live"), busy || waiting ? words : "All rows are empty.");
}, 4000);

// --- the connection -----------------------------------------------------------------------------------------------

async function watch() {
  for (let delay = 0.5; ; delay = Math.min(2 * delay, 5)) {
    const aborter = new AbortController();
    let silence;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => aborter.abort(), 1000 * SILENCE);
    };
    try {
      heard();
      const response = await ask("events", null, aborter.signal);
      timeline.clear(); // the first message tells the last iterations again
      tokens.clear();
      last = null;
      connection("Connected.", "ok");
      if ($("key-form").contains(document.activeElement)) $("prompts").focus();
      $("key-form").hidden = true;
      for await (const message of messages(response)) {
        heard();
        delay = 0.5;
        take(message);
      }
    } catch (error) {
      if (error instanceof Refused && error.status === 401) {
        connection(hasKey() ? "The server does not know this key." : "The server wants a key.", "warning");
        await enteredKey();
        delay = 0;
        continue;
      }
    } finally {
      clearTimeout(silence);
      aborter.abort(); // or a stream that is given up would keep its connection
    }
    connection("The server does not answer: what you see is its last news. Trying again …", "warning");
    await new Promise((resolve) => setTimeout(resolve, 1000 * delay));
  }
}

function connection(text, kind) {
  tell($("connection"), text);
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
  send(prompts, { max_tokens: $("max-tokens").valueAsNumber, temperature: $("temperature").valueAsNumber }, say);
}

$("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sendAll($("prompts").value.split("\n").filter((line) => line.trim()));
});

$("prompts").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask-form").requestSubmit();
});

// Openings that the embedded model knows how to continue. Only stories are long: one in four.
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

let pace = null; // as the server said last; what was chosen here stays until it says something else

function showPace() {
  if (now.pace === pace) return;
  pace = now.pace;
  const isPace = (option) => +option.value === pace;
  if (![...$("pace").options].some(isPace)) $("pace").add(new Option(`${1000 * pace} ms an iteration`, pace));
  $("pace").selectedIndex = [...$("pace").options].findIndex(isPace);
}

$("pace").addEventListener("change", async () => {
  try {
    await ask("pace", { seconds: +$("pace").value });
    tell($("pace-error"), "");
  } catch (error) {
    pace = null;
    tell($("pace-error"), `The speed stays as it was: ${error.message}`);
  }
});

$("view").addEventListener("change", () => {
  timeline.view = +$("view").value;
  timeline.draw();
});

$("freeze").addEventListener("click", () => {
  const frozen = $("freeze").getAttribute("aria-pressed") === "false";
  $("freeze").setAttribute("aria-pressed", frozen);
  timeline.freeze(frozen);
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
    getSelection().selectAllChildren($("curl")); // browsers let only https pages and this machine's own write there
  }
});

if (innerWidth < 600) $("view").value = timeline.view = 100;
legend($("legend"));
showCurl();
watch();
