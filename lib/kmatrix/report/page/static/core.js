// What all scripts share: the data, elements, numbers as text, colours. Text becomes an element's textContent, never markup.
const D = JSON.parse(document.getElementById("data").textContent);
const $ = (selector, from = document) => from.querySelector(selector);
const $$ = (selector, from = document) => [...from.querySelectorAll(selector)];
const UNKNOWN = "–";
const DASHES = [[], [7, 3], [2.5, 3], [9, 3, 2.5, 3]];

function make(tag, content, attributes = {}) {
  const element = document.createElement(tag);
  if (content != null) element.textContent = content;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
function shape(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
function swatch(colour, dash) {
  const svg = shape("svg", { class: `swatch ${colour}`, width: "1.6rem", height: "0.7rem", viewBox: "0 0 26 10", "aria-hidden": "true" });
  svg.append(shape("line", { class: `d${dash}`, x1: 1, x2: 25, y1: 5, y2: 5 }));
  return svg;
}

// ------------------------------------------------------------------ numbers as text: as in parts/text.py
const grouped = (digits) => new Intl.NumberFormat("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const FORMATS = [0, 1, 2, 3, 4].map(grouped);
const known = (value) => typeof value === "number" && Number.isFinite(value);
function fixed(value, digits = 4) {
  if (!known(value)) return UNKNOWN;
  const text = FORMATS[digits].format(value);
  return /[1-9]/.test(text) ? text.replace("-", "−") : text.replace("-", "");
}
function signed(value, digits = 4) {
  const text = fixed(value, digits);
  return known(value) && value > 0 && /[1-9]/.test(text) ? `+${text}` : text;
}
function fine(value, digits = 4) { // not 0 for what is not 0
  const text = fixed(value, digits);
  if (!value || !known(value) || /[1-9]/.test(text)) return text;
  return (Math.abs(value) < 1e-5 ? value.toExponential(1) : value.toFixed(1 - Math.floor(Math.log10(Math.abs(value))))).replace(/^-/, "−");
}
function duration(seconds) {
  if (!known(seconds)) return UNKNOWN;
  if (seconds > 0 && seconds < 0.0995) return seconds < 0.001 ? "< 1 ms" : `${fixed(1000 * seconds, 0)} ms`;
  if (seconds < 99.95) return `${fixed(seconds, 1)} s`;
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60);
  if (minutes < 100) return `${minutes} min ${String(whole % 60).padStart(2, "0")} s`;
  const all = Math.round(seconds / 60);
  return all < 6000 ? `${Math.floor(all / 60)} h ${String(all % 60).padStart(2, "0")} min` : `${fixed(Math.floor(all / 60) / 24, 1)} d`;
}
function big(value) {
  if (!known(value)) return UNKNOWN;
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}${unit}`;
  return `${Number(value.toPrecision(3))}`;
}
const money = (value) => (known(value) ? `$${value >= 0.1 || !value ? fixed(value, 2) : Number(value.toPrecision(2))}` : UNKNOWN);
const kilojoules = (value) => (known(value) ? `${fixed(value / 1000, 1)} kJ` : UNKNOWN);
const average = (values) => { const all = values.filter(known); return all.length ? all.reduce((a, b) => a + b) / all.length : NaN; };
const asNumber = (text) => (text !== "" && text !== null && Number.isFinite(Number(text)) ? Number(text) : null);
const plural = (number, noun) => `${fixed(number, 0)} ${noun}${number === 1 ? "" : "s"}`;

// ------------------------------------------------------------------ colours: what the browser makes of a custom property
const probe = make("span", null, { "aria-hidden": "true", hidden: "" });
document.body.append(probe);
let palette = {};
function colourOf(token) {
  if (!(token in palette)) {
    probe.style.color = `var(--${token})`;
    palette[token] = getComputedStyle(probe).color;
  }
  return palette[token];
}
const groupColour = D.groups.map((group) => group.colour); // "k3"; changed by "colour by"

// ------------------------------------------------------------------ what sections ask for when something changes
const onFilter = []; // functions that draw again when the filter, or what is drawn, has changed
const onTheme = []; // functions that draw again when the colours have changed
let shown = D.run.map(() => true); // by the filter
let waiting = false;
function schedule() { // at most once per frame
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    for (const draw of onFilter) draw();
  });
}
