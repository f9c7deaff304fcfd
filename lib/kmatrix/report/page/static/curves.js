// The curves of all runs, and what the two figures show of them: means, differences to the leader, and their ranges.
const AXES = {
  step: { name: "steps", text: (v) => fixed(Math.round(v), 0), tick: big },
  tokens: { name: "tokens", text: big, tick: big },
  time: { name: "training time", text: duration, tick: null },
  energy: { name: "energy of all devices (kJ)", text: kilojoules, tick: (v) => big(v / 1000) },
  money: { name: "dollars of the training time", text: money, tick: money },
};
const view = {
  metric: "val", mode: "loss", part: "fall", seeds: true, bands: true, logx: false, logy: false, smooth: 8, colour: null,
  axes: ["step", "time"], zoom: [null, null], hidden: new Set(),
};
const pointer = { at: null, focus: null }; // where the shared cursor is; the configuration whose row is pointed at
const curvesOf = (i) => D.curves?.runs[i] ?? {};

const expand = (list) => (Array.isArray(list) ? list : Array.from({ length: list.n }, (_, i) => list.a + i * list.d));
const column = (list) => Float64Array.from(list, (v) => (v == null ? NaN : v));
function between([xs, ys], x) { // straight lines between knots
  let low = 0, high = xs.length - 1;
  if (x <= xs[0]) return ys[0] ?? NaN;
  if (x >= xs[high]) return ys[high] ?? NaN;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low]);
}
function nearest(sorted, value) { // the index of the value that is closest
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (sorted[middle] <= value) low = middle; else high = middle; }
  return Math.abs(sorted[high] - value) < Math.abs(sorted[low] - value) ? high : low;
}

// Curves are expanded when they are first drawn: a page may hold 1,000 of them.
const cache = new Map();
function cached(key, compute) {
  if (!cache.has(key)) cache.set(key, compute());
  return cache.get(key);
}
function curve(i, metric) { // of a run: step and y, for training losses lo and hi, too; null: it has none
  return cached(`${metric}${i}`, () => {
    const own = metric === "val" ? curvesOf(i).v : curvesOf(i).t;
    if (!own) return null;
    return {
      step: column(expand(own.x)), y: column(metric === "val" ? own.y : own.m), lo: own.lo && column(own.lo), hi: own.hi && column(own.hi),
      s: own.s && column(own.s), j: own.j && column(own.j),
    };
  });
}
function place(i, metric, axis) { // where the points of a run lie on an axis; null: not known
  return cached(`${metric}${axis}${i}`, () => {
    const c = curve(i, metric), own = curvesOf(i);
    const along = (knots) => (knots ? c.step.map((step) => between(knots, step)) : null);
    if (!c) return null;
    if (axis === "step") return c.step;
    if (axis === "tokens") return along(own.k);
    if (axis === "energy") return c.j ?? along(own.j);
    const seconds = c.s ?? along(own.s);
    return axis === "time" || !seconds ? seconds : own.d ? seconds.map((s) => s * own.d) : null;
  });
}
const isKnown = (axis) => cached(`known${axis}`, () => D.run.some((_, i) => place(i, "val", axis) || place(i, "train", axis)));
const longest = () => cached("longest", () => Math.max(1, ...D.run.map((_, i) => (curve(i, "val") ?? curve(i, "train"))?.step.at(-1) ?? 1)));

function halfLife() { // in steps; 0: no smoothing
  return view.metric === "train" && view.smooth ? (longest() / 2000) * 2 ** (view.smooth / 2.2) : 0;
}
function smoothed(c, half) { // exponential mean with a half-life in steps, so that it does not depend on the log interval
  if (!half) return c.y;
  const out = new Float64Array(c.y.length);
  let last = NaN, at = 0;
  for (let k = 0; k < out.length; k++) {
    const y = c.y[k];
    if (!Number.isNaN(y)) {
      last = Number.isNaN(last) ? y : last + (1 - 2 ** (-(c.step[k] - at) / half)) * (y - last);
      at = c.step[k];
    }
    out[k] = last;
  }
  return out;
}

// ------------------------------------------------------------------ lines of configurations
function membersOf(group) { // the runs that are shown, and those of them that the mean is made of: the finished ones, if any
  const members = group.runs.filter((i) => shown[i] && curve(i, view.metric));
  const finished = members.filter((i) => D.run[i].s === "finished");
  return { members, counted: finished.length ? finished : members };
}
const isGap = (panel) => panel === 0 && view.mode === "gap";
const referenceWord = D.curves?.baselines.length ? "baseline" : "leader";
const reference = () => D.groups[D.curves.baselines[0]] ?? D.groups.find((group) => group.rank === 1 && group.ranking === 0) ?? D.groups[0];
function build(panel) { // what a figure shows: per configuration its line, and the thin lines of its runs
  const axis = view.axes[panel], half = halfLife(), found = [];
  for (const [index, group] of D.groups.entries()) {
    if (view.hidden.has(index)) continue;
    const { members, counted } = membersOf(group);
    const thin = [];
    for (const i of members) {
      const raw = curve(i, view.metric), x = place(i, view.metric, axis);
      if (x) thin.push({ i, x, y: smoothed(raw, half), raw, step: raw.step, ended: D.run[i].s });
    }
    const used = thin.filter((one) => counted.includes(one.i));
    const line = isGap(panel) ? gapLine(group, reference(), axis) : meanLine(used);
    if (line) found.push({ index, group, thin: isGap(panel) ? [] : thin, line });
  }
  return found;
}
const sameSteps = (a, b) => a.length === b.length && a[0] === b[0] && a.at(-1) === b.at(-1) && a.every((step, k) => step === b[k]);
function meanLine(used) { // mean, lowest and highest at the steps that all runs have
  if (!used.length) return null;
  const first = used[0].step;
  let at = null, steps = first;
  if (!used.every((one) => sameSteps(one.step, first))) {
    const where = used.map((one) => new Map(Array.from(one.step, (step, k) => [step, k])));
    steps = first.filter((step) => where.every((own) => own.has(step)));
    at = where.map((own) => Array.from(steps, (step) => own.get(step)));
  }
  const n = steps.length, x = new Float64Array(n), y = new Float64Array(n), lo = new Float64Array(n), hi = new Float64Array(n);
  if (!n) return null;
  for (let k = 0; k < n; k++) {
    let sx = 0, sy = 0, low = Infinity, high = -Infinity;
    for (let u = 0; u < used.length; u++) {
      const j = at ? at[u][k] : k, v = used[u].y[j];
      sx += used[u].x[j]; sy += v;
      if (v < low) low = v;
      if (v > high) high = v;
    }
    x[k] = sx / used.length; y[k] = sy / used.length; lo[k] = low; hi[k] = high;
  }
  return { x, y, lo, hi, step: steps, range: used.length > 1 };
}
function gapLine(group, first, axis) { // mean difference to the leader at each step over the seeds that both have
  const mine = membersOf(group).counted, theirs = membersOf(first).counted;
  const bySeed = new Map(theirs.map((i) => [D.run[i].e, i]));
  const pairs = mine.filter((i) => bySeed.has(D.run[i].e) && place(i, view.metric, axis)).map((i) => [curve(i, view.metric), curve(bySeed.get(D.run[i].e), view.metric), i]);
  if (!pairs.length) return null;
  const places = pairs.map((pair) => pair.slice(0, 2).map((c) => new Map(Array.from(c.step, (step, k) => [step, k]))));
  const xs = place(pairs[0][2], view.metric, axis), x = [], y = [], lo = [], hi = [], step = [];
  for (const at of pairs[0][0].step) {
    if (!places.every(([a, b]) => a.has(at) && b.has(at))) continue;
    const d = pairs.map(([a, b], u) => a.y[places[u][0].get(at)] - b.y[places[u][1].get(at)]);
    const n = d.length, mean = d.reduce((a, b) => a + b) / n;
    const t = n > 1 ? D.curves.t[Math.min(D.curves.t.length, n - 1) - 1] : 0;
    const half = n > 1 ? (t * Math.sqrt(d.reduce((a, b) => a + (b - mean) ** 2, 0) / (n - 1))) / Math.sqrt(n) : 0;
    step.push(at); x.push(xs[places[0][0].get(at)]); y.push(mean); lo.push(mean - half); hi.push(mean + half);
  }
  return step.length ? { x, y, lo, hi, step, range: pairs.length > 1 } : null;
}

// ------------------------------------------------------------------ ranges
function xRange(lines, panel) {
  let low = Infinity, high = -Infinity, least = Infinity;
  for (const { line, thin } of lines) for (const { x } of [line, ...thin]) {
    for (const v of [x[0], x[x.length - 1]]) if (known(v)) { low = Math.min(low, v); high = Math.max(high, v); }
    const positive = x.find((v) => v > 0);
    if (positive) least = Math.min(least, positive);
  }
  if (!known(low)) return null;
  if (view.zoom[panel]) return view.zoom[panel];
  low = view.logx ? (known(least) ? least : 1) : Math.min(0, low);
  return [view.part === "end" ? high - (high - low) / 4 : low, high];
}
const FALL = 0.08; // share of a run after which its first steep fall is over
function yRange({ line, thin }, panel, x0, x1, whole) { // of one configuration; start, end: of its curve
  const gap = isGap(panel), from = whole ? x0 : line.x[0] + FALL * (line.x[line.x.length - 1] - line.x[0]);
  const found = { top: -Infinity, bottom: Infinity, start: -Infinity, end: NaN };
  for (let k = 0; k < line.x.length && line.x[k] <= x1; k++) {
    const y = line.y[k], lo = line.lo[k], hi = line.hi[k];
    if (!known(y) || (gap && line.x[k] < from)) continue;
    found.start = Math.max(found.start, hi);
    if (line.x[k] < x0) continue;
    found.end = hi;
    // An interval of two seeds can be enormous: it does not squeeze the line.
    if (line.x[k] >= from) found.top = Math.max(found.top, gap ? Math.max(y, Math.min(hi, y * 2)) : hi);
    found.bottom = Math.min(found.bottom, gap ? Math.max(lo, -Math.abs(y)) : lo);
  }
  if (view.seeds) for (const one of thin) for (let k = 0; k < one.y.length; k++)
    if (one.x[k] >= x0 && one.x[k] <= x1 && known(one.y[k])) found.bottom = Math.min(found.bottom, one.y[k], view.metric === "train" ? (one.raw.lo ?? one.raw.y)[k] : Infinity);
  return found;
}
function extent(lines, panel) { // the ranges of a figure; cut: curves begin above it
  const x = xRange(lines, panel);
  if (!x) return null;
  const [x0, x1] = x, gap = isGap(panel), zoomed = view.zoom[panel], whole = zoomed || view.part !== "fall";
  const own = lines.map((one) => yRange(one, panel, x0, x1, whole));
  // A run that ended at once has its first loss only, far above all others.
  const long = lines.some(({ line }) => line.x.length > 1);
  const drawn = own.filter((_, k) => !long || lines[k].line.x.length > 1), tops = drawn.map((one) => one.top).filter(known);
  let top = Math.max(...tops), bottom = Math.min(...own.map((one) => one.bottom));
  if (!gap && !whole && tops.length) {
    // One that stays high does not squeeze the rest; most of them, of two both, are in view at their ends.
    const ends = drawn.map((one) => one.end).filter(known).sort((a, b) => a - b);
    top = Math.min(top, Math.max(Math.min(...tops) + 1.2 * (Math.min(...tops) - bottom), ends[ends.length >> 1] ?? -Infinity));
  }
  if (gap) { bottom = Math.min(bottom, 0); top = Math.max(top, 0); }
  if (!known(top) || !known(bottom)) { top = 1; bottom = 0; }
  const room = (top - bottom) * 0.05 || Math.abs(top) * 0.01 || 0.5, log = view.logy && !gap && bottom > 0;
  return {
    x: [x0, x1 + (zoomed ? 0 : (x1 - x0) * 0.004) || x0 + 1], y: log ? [bottom * 0.98, top * 1.02] : [bottom - room, top + room],
    cut: Math.max(...own.map((one) => one.start)) > top + room && view.part !== "end", log,
  };
}

// ------------------------------------------------------------------ colours by an axis
function recolour() { // by the values of an axis among the runs shown; without an axis as the report was made
  const axis = D.axes.findIndex((one) => one.label === view.colour);
  const valueOf = (group) => D.axes[axis].values[D.run[group.runs[0]].a[axis]];
  const present = axis < 0 ? [] : [...new Set(D.groups.filter((group) => group.runs.some((i) => shown[i])).map(valueOf))];
  const numeric = present.length > 2 && present.every((value) => asNumber(value) !== null);
  const order = axis < 0 ? [] : numeric ? present.sort((a, b) => asNumber(a) - asNumber(b)) : D.axes[axis].values.filter((value) => present.includes(value));
  D.groups.forEach((group, g) => {
    const at = axis < 0 ? 0 : Math.max(0, order.indexOf(valueOf(group)));
    groupColour[g] = axis < 0 ? group.colour : numeric ? `r${Math.round((at * 6) / Math.max(1, order.length - 1))}` : `k${at % 8}`;
  });
  for (const element of $$("[data-g]")) for (const one of [element, ...$$("svg.swatch", element)]) {
    const own = [...one.classList].filter((name) => /^[kr]\d$/.test(name));
    if (!own.length) continue;
    one.classList.remove(...own);
    one.classList.add(groupColour[element.dataset.g]);
  }
}
