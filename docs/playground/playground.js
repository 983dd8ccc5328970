// The page around playground.py: controls, and pictures of what each step returns. The engine runs in Pyodide.
// The view of a fleet is in fleet.js.

import { element, exampleButtons, examplesOf, linkedExample, slider, toJS } from "./shared.js";
import { makeFleet } from "./fleet.js";

const COLORS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a500", "#6a51a3"];
const LABELS = {
  rows: "rows", blocks: "blocks of 4 tokens", token_budget: "token budget per iteration", requests: "requests",
  prompt: "prompt tokens, about", output: "output tokens", long_every: "one output in … is three times as long (0: none)",
  gap: "iterations between arrivals", shared_prefix: "shared prefix, in tokens",
};
const SWITCHES = { chunked: "chunked prefill", mixed: "prefills and decodes share iterations", prefix_caching: "prefix caching" };
const $ = (id) => document.getElementById(`pg-${id}`);
const panel = (id) => $(`panel-${id}`);
const color = (request) => COLORS[request % COLORS.length];
let python, game, timer, latest, markExample;

// --- controls --------------------------------------------------------------------------------------------------

function makeControls(module) {
  const settings = toJS(module.SETTINGS), policies = toJS(python.runPython("from helpers.engine import POLICIES; list(POLICIES)"));
  for (const [name, [least, most, value]] of Object.entries(settings))
    $("controls").append(slider(`pg-${name}`, LABELS[name], [least, most, 1, value], "input", restart));
  const select = element("select", { id: "pg-policy", onchange: restart }, ...policies.map((name) => new Option(name)));
  $("controls").append(element("label", {}, "policy: ", select));
  for (const [name, text] of Object.entries(SWITCHES))
    $("controls").append(element("label", { className: "pg-switch" }, element("input", { type: "checkbox", id: `pg-${name}`, onchange: restart }), ` ${text}`));
  const examples = examplesOf(module);
  markExample = exampleButtons($("presets"), examples, (settings) => { show(settings); restart(); });
  show(examples[linkedExample(examples) ?? Object.keys(examples)[1]]);
}

function show(settings) {
  for (const [name, value] of Object.entries(settings)) {
    const input = $(name);
    if (input.type === "checkbox") input.checked = value;
    else input.value = value;
    if (input.type === "range") input.parentElement.querySelector(".pg-value").textContent = value;
  }
}

const chosen = () => Object.fromEntries([
  ...Object.keys(LABELS).map((name) => [name, Number($(name).value)]),
  ...Object.keys(SWITCHES).map((name) => [name, $(name).checked]),
  ["policy", $("policy").value],
]);

function restart() {
  pause();
  game?.destroy();
  game = undefined;
  latest = undefined;
  markExample(chosen());
  try {
    game = python.pyimport("playground").Playground(python.toPy(chosen()));
    $("status").textContent = "Ready. Step through the iterations, or play them.";
  } catch (error) {
    $("status").textContent = String(error.message).trim().split("\n").at(-1).replace(/^ValueError: /, "");
  }
  for (const name of ["step", "play"]) $(name).disabled = !game;
  for (const shown of document.querySelectorAll("[id^=pg-panel-]")) shown.replaceChildren();
}

function pause() {
  clearInterval(timer);
  timer = undefined;
  $("play").textContent = "Play";
  $("status").ariaLive = "polite";
}

function play() {
  if (timer) return pause();
  if (latest?.finished) restart();
  $("play").textContent = "Pause";
  $("status").ariaLive = "off";  // a screen reader would read up to 20 sentences per second; the last one is enough
  timer = setInterval(step, 1000 / Number($("speed").value));
}

function step() {
  latest = toJS(game.step());
  if (latest.finished) pause();
  draw(latest);
  $("step").disabled = latest.finished;
}

// --- pictures --------------------------------------------------------------------------------------------------

const chip = (request, text = "") => element("span", { className: "pg-chip", textContent: `${request}${text}`, style: `--c:${color(request)}` });

function draw(state) {
  const { chunks, preempted } = state.plan;
  const tokens = chunks.reduce((sum, chunk) => sum + chunk.tokens, 0), budget = Number($("token_budget").value);
  $("status").textContent = `Iteration ${state.iteration} computed ${tokens} of at most ${budget} tokens for ${chunks.length} requests.` +
    (preempted.length ? ` Preempted: ${preempted.join(", ")}.` : "") + (state.finished ? " All requests are finished." : "");
  panel("queue").replaceChildren(...(state.waiting.length ? state.waiting.flatMap((request) => [chip(request), " "]) : ["empty"]));
  panel("running").replaceChildren(...state.running.map((sequence) => {
    const total = sequence.prompt + sequence.max_tokens;
    const bar = element("span", { className: "pg-progress", style: `--c:${color(sequence.request)};--computed:${100 * sequence.computed / total}%` });
    return element("div", { className: "pg-row" }, chip(sequence.request), bar, `${sequence.generated} of ${sequence.max_tokens} tokens`);
  }));
  panel("budget").replaceChildren(...chunks.map((chunk) => element("span", {
    className: `pg-part ${chunk.work}`, style: `--c:${color(chunk.request)};width:${100 * chunk.tokens / budget}%`,
    textContent: chunk.request, title: `request ${chunk.request}: ${chunk.work} of ${chunk.tokens} tokens from position ${chunk.start}`,
  })));
  panel("blocks").replaceChildren(...state.blocks.map((users, block) => {
    const owned = Array.isArray(users);
    return element("span", { className: `pg-block ${owned ? "used" : users}`, style: owned ? `--c:${color(users[0])}` : "", textContent: owned ? users.join(",") : "", title: `block ${block}: ${owned ? `requests ${users.join(", ")}` : users}` });
  }));
  const column = element("div", { className: "pg-column" }, ...state.rows.map((row) => element("span", {
    className: `pg-cell ${row.work}`, style: row.request === null || row.request === undefined ? "" : `--c:${color(row.request)}`,
    textContent: row.request ?? "", title: `iteration ${state.iteration}: ${row.work}${row.tokens ? `, ${row.tokens} tokens` : ""}`,
  })));
  panel("timeline").append(column);
  panel("timeline").scrollLeft = panel("timeline").scrollWidth;
  panel("counts").replaceChildren(...Object.entries(state.counts).map(([name, value]) =>
    element("tr", {}, element("th", { scope: "row", textContent: name }), element("td", { textContent: value }))));
}

// --- start -----------------------------------------------------------------------------------------------------

async function start() {
  const folder = new URL(".", import.meta.url);
  const { loadPyodide } = await import(new URL("pyodide/pyodide.mjs", folder));
  python = await loadPyodide({ indexURL: new URL("pyodide/", folder).href });
  const files = await fetch(new URL("course.zip", folder));
  if (!files.ok) throw new Error(`The course's files did not arrive (${files.status}).`);
  python.unpackArchive(await files.arrayBuffer(), "zip", { extractDir: "/course" });
  python.runPython("import sys; sys.path.insert(0, '/course')");
  makeControls(python.pyimport("playground"));
  $("step").onclick = step;
  $("play").onclick = play;
  $("reset").onclick = restart;
  $("speed").onchange = () => { if (timer) { play(); play(); } };
  makeFleet(python);
  $("app").hidden = false;
  $("loading").hidden = true;
  restart();
  if (!location.hash && !matchMedia("(prefers-reduced-motion: reduce)").matches) play();
  // For the test that compares plans with the engine's.
  window.playgroundPlans = (settings) => toJS(python.pyimport("playground").run(python.toPy(settings)));
}

start().catch((error) => { $("loading").textContent = `The playground cannot start: ${error.message}`; });
