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

// Return the name of the example that the page's address asks for, as in playground.html#chunked_prefill, or undefined.
export function linkedExample(presets) {
  const wanted = decodeURIComponent(location.hash.slice(1)).replaceAll("_", " ").toLowerCase();
  return Object.keys(presets).find((name) => wanted && name.toLowerCase().startsWith(wanted));
}
