// What both views of the playground use.

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export function toJS(proxy) {
  const value = proxy.toJs({ dict_converter: Object.fromEntries });
  proxy.destroy?.();
  return value;
}

// Return a labelled slider that shows its value. `event` is "input" to act while it moves, "change" to act afterwards.
export function slider(id, label, [least, most, step, value], event, act) {
  const output = element("span", { className: "pg-value", textContent: value });
  const input = element("input", { type: "range", id, min: least, max: most, step, value });
  input.addEventListener("input", () => { output.textContent = input.value; });
  input.addEventListener(event, act);
  return element("label", {}, `${label}: `, output, input);
}

// Return the examples of a Python module, each with all settings.
export function examplesOf(module) {
  const defaults = toJS(module.DEFAULTS);
  return Object.fromEntries(Object.entries(toJS(module.PRESETS)).map(([name, changes]) => [name, { ...defaults, ...changes }]));
}

// Make a button for each example. Return a function that marks the example with the given settings, if there is one.
export function exampleButtons(container, examples, choose) {
  const buttons = Object.entries(examples).map(([name, settings]) =>
    [element("button", { type: "button", textContent: name, onclick: () => choose(settings) }), Object.entries(settings)]);
  container.append(...buttons.map(([button]) => button));
  return (chosen) => {
    for (const [button, settings] of buttons)
      button.setAttribute("aria-pressed", settings.every(([name, value]) => chosen[name] === value));
  };
}

// Return the name of the example that the page's address asks for, as in playground.html#chunked_prefill, or undefined.
export function linkedExample(examples) {
  const wanted = decodeURIComponent(location.hash.slice(1)).replaceAll("_", " ").toLowerCase();
  return Object.keys(examples).find((name) => wanted && name.toLowerCase().startsWith(wanted));
}
