// Makes elements. Text is always inserted as text: nothing here or elsewhere on the page parses HTML.

export function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "style") Object.assign(element.style, value);
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key in element && key !== "list") element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function show(parent, ...children) {
  parent.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
}

export function formatNumber(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return value.toPrecision(size >= 1000 ? 6 : 4).replace(/\.?0+$/, "");
}

export function formatTime(seconds) {
  return new Date(seconds * 1000).toLocaleString();
}

export function formatSeconds(seconds) {
  if (seconds >= 3600) return `${(seconds / 3600).toFixed(1)} h`;
  return seconds >= 60 ? `${(seconds / 60).toFixed(1)} min` : `${seconds.toFixed(2)} s`;
}

export function makeTable(heads, rows, properties = {}) {
  return make("table", properties,
    make("thead", {}, make("tr", {}, ...heads.map((head) =>
      head instanceof Node ? head : make("th", {}, head)))),
    make("tbody", {}, ...rows));
}

export function makeSelect(values, chosen, onchange, label) {
  return make("label", {}, `${label} `, make("select", { onchange: (e) => onchange(e.target.value) },
    ...values.map(([value, text]) =>
      make("option", { value: String(value), selected: String(value) === String(chosen) }, text))));
}
