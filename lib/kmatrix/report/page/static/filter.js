// The filter over all runs: it changes what is drawn and listed, never a number of the verdict or the ranking.
const FIELDS = { loss: (run) => run.f, seed: (run) => run.e, gpus: (run) => run.w, ranks: (run) => run.w, status: (run) => run.s, name: (run) => run.n };
D.axes.forEach((axis, k) => { FIELDS[axis.label.toLowerCase()] = (run) => (run.a[k] < 0 ? null : axis.values[run.a[k]]); });
const haystack = D.run.map((run) => `${run.n} ${run.s} ${run.a.map((v, k) => (v < 0 ? "" : D.axes[k].values[v])).join(" ")}`.toLowerCase());
const sameValue = (a, b) => a.toLowerCase() === b.toLowerCase() || (asNumber(a) !== null && asNumber(a) === asNumber(b));
const COMPARED = { "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b };

const filter = { text: "" };
const terms = () => filter.text.trim().split(/\s+/).filter(Boolean);

function fieldTest(read, operator, value) {
  if (operator === "=") {
    const wanted = value.split(",");
    return (i) => { const own = read(D.run[i]); return own != null && wanted.some((word) => sameValue(String(own), word)); };
  }
  const limit = Number(value), holds = COMPARED[operator];
  return (i) => { const own = asNumber(read(D.run[i])); return own !== null && holds(own, limit); };
}
function termTest(word) {
  if (word.startsWith("-") && word.length > 1) {
    const test = termTest(word.slice(1));
    return (i) => !test(i);
  }
  const [, field, operator, value] = /^([^=<>]+)(<=|>=|=|<|>)(.*)$/.exec(word) || [];
  if (field && Object.hasOwn(FIELDS, field.toLowerCase())) return fieldTest(FIELDS[field.toLowerCase()], operator, value);
  const low = word.toLowerCase();
  return (i) => haystack[i].includes(low);
}

const marked = $$("[data-g]");
function applyFilter() {
  const tests = terms().map(termTest);
  shown = D.run.map((_, i) => tests.every((test) => test(i)));
  const count = shown.filter(Boolean).length;
  const some = D.groups.map((group) => group.runs.some((i) => shown[i]));
  for (const element of marked) element.classList.toggle("dim", !some[element.dataset.g]);
  const words = count === D.run.length ? plural(count, "run") : `${fixed(count, 0)} of ${plural(D.run.length, "run")}`;
  $("#filtered").textContent = filter.text ? words : "";
  const counter = $("#runs-count");
  if (counter) counter.textContent = words;
  for (const chip of $$("button[data-term]")) chip.setAttribute("aria-pressed", String(terms().includes(chip.dataset.term)));
  schedule();
}
function setFilter(text) {
  filter.text = text;
  const input = $("#filter");
  if (input.value !== text) input.value = text;
  applyFilter();
}
function toggleTerm(term) {
  const list = terms();
  setFilter((list.includes(term) ? list.filter((one) => one !== term) : [...list, term]).join(" "));
}
