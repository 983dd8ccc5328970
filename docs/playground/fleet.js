// The view of a fleet: controls for playground_fleet.py, and tables with pictures of what each run returns.
// Fleets of 1, 2, ... replicas, or of up to that many, are simulated one after another, and the page answers in between.

import { element, exampleButtons, examplesOf, linkedExample, slider, toJS } from "./shared.js";

const LABELS = {
  replicas: "replicas", rate: "requests per second", requests: "requests in all",
  ttft_limit: "TTFT limit in milliseconds", tpot_limit: "TPOT limit in milliseconds",
  shared_prefix: "shared prefix, in tokens", prefixes: "number of different prefixes",
  failure: "replica 1 fails after … % of the requests (0: never)",
  prefills: "separate prefill replicas (0: none)", target: "autoscaling target: unfinished requests per replica",
};
const CHOICES = { router: "router", trace: "requests like those of", machine: "cost model", scaling: "number of replicas" };
const $ = (id) => document.getElementById(`pg-fleet-${id}`);
const percent = (share) => `${Math.floor(1000 * share + 1e-6) / 10}%`;  // never rounded up: 99.96% is not all
const milliseconds = (seconds) => Math.round(1000 * seconds).toLocaleString("en");
let module, current = 0;

export function makeFleet(python) {
  module = python.pyimport("playground_fleet");
  const examples = examplesOf(module), settings = toJS(module.SETTINGS), choices = toJS(module.CHOICES);
  for (const [name, options] of Object.entries(choices)) {
    const select = element("select", { id: `pg-fleet-${name}`, onchange: run }, ...options.map((option) => new Option(option.replaceAll("_", " "), option)));
    $("controls").append(element("label", {}, `${CHOICES[name]}: `, select));
  }
  for (const [name, range] of Object.entries(settings))
    $("controls").append(slider(`pg-fleet-${name}`, LABELS[name], range, "change", run));
  const markExample = exampleButtons($("presets"), examples, (settings) => { show(settings); run(); });

  const linked = linkedExample(examples);
  show(examples[linked] ?? Object.values(examples)[0]);
  for (const view of ["engine", "fleet"])
    document.getElementById(`pg-show-${view}`).addEventListener("change", () => choose(view));
  choose(linked || location.hash === "#fleet" ? "fleet" : "engine");

  // For the tests that compare these numbers with CPython's.
  window.playgroundFleet = (changes, size) => toJS(module.run(python.toPy(changes), size));
  window.playgroundFleetSettings = chosen;

  async function run() {
    const mine = ++current, settings = chosen(), results = [];
    const sizes = [settings.replicas, ...Array.from({ length: settings.replicas - 1 }, (_, index) => index + 1)];
    const given = python.toPy(settings);
    markExample(settings);
    $("about").textContent = module.about(given);
    const options = module.command(given).split(/ (?=--)/);  // an option stays on one line
    $("command").replaceChildren(...options.flatMap((option) => [element("span", { textContent: option }), " "]));
    $("command-text").hidden = !options[0];
    $("status").textContent = "Simulating…";
    $("progress").max = sizes.length;
    $("progress").value = 0;
    $("progress").hidden = false;
    for (const size of sizes) {
      await new Promise((resume) => setTimeout(resume, 20));  // here the page draws, and controls are heard
      if (mine !== current) return given.destroy();
      results.push(toJS(module.run(given, size)));
      $("progress").value = results.length;
      if (results.length === 1) drawReplicas(results[0]);
      drawSizes([...results].sort((a, b) => a.size - b.size), settings.replicas);
    }
    given.destroy();
    $("progress").hidden = true;
    $("status").textContent = answer(results, settings);
  }

  function choose(view) {
    document.getElementById(`pg-show-${view}`).checked = true;
    for (const name of ["engine", "fleet"]) document.getElementById(`pg-${name}`).hidden = name !== view;
    if (view === "fleet" && !current) run();
  }
}

function show(settings) {
  for (const [name, value] of Object.entries(settings)) {
    $(name).value = value;
    const shown = $(name).parentElement.querySelector(".pg-value");
    if (shown) shown.textContent = value;
  }
}

const chosen = () => Object.fromEntries(
  [...Object.keys(CHOICES).map((name) => [name, $(name).value]), ...Object.keys(LABELS).map((name) => [name, Number($(name).value)])]);

function answer(results, settings) {
  const enough = results.filter((fleet) => fleet.within >= module.SHARE);
  const limits = `TTFT up to ${settings.ttft_limit} ms and TPOT up to ${settings.tpot_limit} ms`;
  const served = `To serve ${percent(module.SHARE)} of the requests with ${limits},`;
  const replicas = (name) => `${name} replica${name === "1" ? "" : "s"}`;
  if (!enough.length) return `${served} ${replicas(results[0].name)} ${results[0].name === "1" ? "is" : "are"} too few.`;
  const [least] = enough.sort((a, b) => a.mean_size - b.mean_size || a.size - b.size);
  return `${served} the smallest of these fleets has ${replicas(least.name)}.`;
}

// --- pictures --------------------------------------------------------------------------------------------------

const cell = (...content) => element("td", {}, ...content);
const head = (text) => element("th", { scope: "row", textContent: text });

function drawSizes(results, chosenSize) {
  $("sizes").replaceChildren(...results.map((fleet) => {
    const bar = element("span", { className: "pg-bar", style: `--share:${100 * fleet.within}%` });
    const row = element("tr", {}, head(fleet.name), element("td", { className: "pg-bar-cell" }, bar), cell(percent(fleet.within)),
      cell(fleet.goodput.toPrecision(3)), ...fleet.ttft.map((value) => cell(milliseconds(value))), cell(fleet.mean_size.toFixed(1)), cell(percent(fleet.busy)));
    if (fleet.size === chosenSize) row.setAttribute("aria-current", "true");
    return row;
  }));
}

function drawReplicas(result) {
  const { pictures } = result, highest = {}, count = (number) => number.toLocaleString("en");
  const last = Math.max(...pictures.map((picture) => picture.times.at(-1) ?? 0));
  for (const { unit, values } of pictures) highest[unit] = Math.max(1, highest[unit] ?? 0, ...values);
  const heights = Object.entries(highest).map(([unit, most]) => `${count(most)} ${unit}`).join(" or ");
  const missing = pictures.flatMap((picture) => picture.missing);
  $("replicas-text").textContent = `Replicas: ${result.name}, as the router sees them at each arrival, ` +
    `from 0 to ${last.toFixed(1)} s. Every picture is ${heights} high.` +
    (missing.length ? ` The first replica is missing from ${missing[0].toFixed(1)} to ${missing[1].toFixed(1)} s.` : "") +
    (result.moved ? ` Requests that moved to another replica: ${count(result.moved)}; computed tokens that were lost: ${count(result.lost_tokens)}.` : "") +
    (result.cached ? ` ${percent(result.cached)} of all prompt tokens are in the chosen replica's cache when their request arrives.` : "");
  $("loads").replaceChildren(...pictures.map((picture) => element("tr", {}, head(picture.name),
    element("td", { className: "pg-load-cell" }, area(picture, highest[picture.unit], last || 1)),
    cell(count(Math.max(0, ...picture.values))), cell(picture.requests ?? ""), cell(picture.requests == null ? "" : percent(picture.busy)))));
}

// A curve with steps, as a value holds until the next one. `missing` is the time without a replica.
function area({ times, values, missing }, highest, last) {
  const x = (time) => (600 * Math.min(time / last, 1)).toFixed(1), y = (value) => (30 - 30 * value / highest).toFixed(2);
  const steps = values.map((value, index) => `L${x(times[index])} ${y(value)}H${x(times[index + 1] ?? times[index])}`);
  const picture = shape("svg", { viewBox: "0 0 600 30", preserveAspectRatio: "none", class: "pg-load", "aria-hidden": "true" });
  picture.append(shape("path", { d: `M${x(times[0] ?? 0)} 30${steps.join("")}V30Z` }));
  if (missing.length) picture.append(shape("rect", { x: x(missing[0]), y: 0, height: 30, width: x(missing[1]) - x(missing[0]), class: "pg-missing" }));
  return picture;
}

function shape(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
