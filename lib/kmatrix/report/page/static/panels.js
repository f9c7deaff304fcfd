// The two figures, Progress and Cost. uPlot has the axes, the cursor and the zoom; the lines are drawn here, because
// each run has its own x. The cursor is shared by step: each configuration has its mark at the step that it had reached.
const rem = () => parseFloat(getComputedStyle(document.documentElement).fontSize);
const font = (scale) => `${Math.round(rem() * scale)}px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif`;
const ink = () => ({ text: colourOf("ink"), faint: colourOf("faint"), grid: colourOf("grid"), back: colourOf("bg"), bad: colourOf("bad") });
const fade = (index) => (pointer.focus === null || pointer.focus === index ? 1 : 0.13);
const MANY = 24; // configurations, above which lines are thin and ranges are left out
const NAMED = 12; // configurations, above which only some are named in a figure

function axisOptions(label, format, size, side = 2) {
  const c = ink();
  return {
    stroke: c.faint, font: font(0.75), labelFont: font(0.75), label, labelSize: label ? rem() * 1.15 : 0, labelGap: 0, size, gap: 4, side,
    grid: { stroke: c.grid, width: 1 }, ticks: { stroke: c.grid, width: 1, size: 4 },
    ...(format ? { values: (_, ticks) => ticks.map((v) => (v == null ? "" : format(v))) } : {}),
  };
}
function timeTicks(last) { // round values in hours, minutes or seconds
  const [size, unit] = last >= 3 * 3600 ? [3600, "h"] : last >= 180 ? [60, "min"] : [1, "s"];
  const steps = [1, 2, 5, 10, 15, 20, 30, 60, 120, 300].map((s) => s * size).concat(size === 1 ? [0.1, 0.2, 0.5] : [size / 2, size / 12]).sort((a, b) => a - b);
  return { size, incrs: steps, label: `training time (${unit})`, format: (v) => String(Number((v / size).toPrecision(4))) };
}
function niceTicks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((f) => f * power >= rough * 0.999) * power, out = [];
  for (let v = Math.ceil(low / step) * step; v <= high * 1.0001 && out.length < 50; v += step) out.push(Number(v.toPrecision(12)));
  return out;
}
function logTicks(low, high, unit) { // 1, 2 and 5 times the powers of ten, in the unit of the labels
  const out = [];
  for (let power = Math.floor(Math.log10(low / unit)); power <= Math.log10(high / unit); power++)
    for (const f of [1, 2, 5]) { const v = f * 10 ** power * unit; if (v >= low && v <= high) out.push(v); }
  return out.length > 1 ? out : niceTicks(low, high, 4);
}
function tickDigits(v, all) {
  const step = Math.abs((all[1] ?? v) - all[0]) || 1;
  return Math.max(0, Math.min(4, Math.ceil(-Math.log10(step) - 1e-9)));
}
function project(u) { // value -> device pixels, for thousands of points
  const { left, top, width, height } = u.bbox, x = u.scales.x, y = u.scales.y;
  const lx = x.distr === 3, ly = y.distr === 3, log = Math.log10;
  const x0 = lx ? log(x.min) : x.min, x1 = lx ? log(x.max) : x.max, y0 = ly ? log(y.min) : y.min, y1 = ly ? log(y.max) : y.max;
  const kx = width / (x1 - x0), ky = height / (y1 - y0);
  return [(v) => left + ((lx ? log(v) : v) - x0) * kx, (v) => top + height - ((ly ? log(v) : v) - y0) * ky];
}
function trace(context, px, py, x, y) { // the path of a line, with a gap where a value is not known
  context.beginPath();
  let pen = false;
  for (let k = 0; k < x.length; k++) {
    const a = px(x[k]), b = py(y[k]);
    if (!Number.isFinite(a) || !Number.isFinite(b)) { pen = false; continue; }
    if (pen) context.lineTo(a, b); else { context.moveTo(a, b); pen = true; }
  }
}

class LossFigure {
  constructor(number) {
    this.number = number;
    this.host = $(`#plot${number}`);
    this.lines = [];
    this.overlay = make("canvas", null, { class: "marks", "aria-hidden": "true" });
    new ResizeObserver(() => this.u && this.host.clientWidth && this.render()).observe(this.host);
    this.host.addEventListener("keydown", (event) => this.key(event));
    this.host.addEventListener("blur", () => hover(null));
  }

  render() {
    this.u?.destroy();
    this.u = null;
    this.lines = build(this.number);
    this.extent = extent(this.lines, this.number);
    $(".empty", this.host)?.remove();
    const note = $(`#note${this.number}`), e = this.extent;
    note.textContent = e ? this.words(e) : "";
    if (!e) this.host.append(make("p", "No run shown has this curve.", { class: "note empty" }));
    else if (this.host.clientWidth) {
      this.u = new uPlot(this.options(e), [e.x, [null, null]], this.host);
      this.u.over.append(this.overlay);
      this.mark();
    }
  }
  words(e) {
    const loss = `${view.metric === "val" ? "validation" : "training"} loss, nats/token`;
    const about = isGap(this.number) ? `difference to the ${referenceWord}, nats/token; band: ${Number((100 * D.curves.level).toPrecision(4))} % interval` : loss;
    return [about, e.cut ? "begins above the view" : "", view.zoom[this.number] ? "zoomed" : ""].filter(Boolean).join(" · ");
  }
  options(e) {
    const axis = view.axes[this.number], width = this.host.clientWidth, height = this.host.clientHeight;
    const time = axis === "time" ? timeTicks(e.x[1]) : null;
    const x = axisOptions(time ? time.label : AXES[axis].name, time ? time.format : AXES[axis].tick, rem() * 1.9);
    x.space = rem() * 4;
    if (view.logx) x.splits = () => logTicks(e.x[0], e.x[1], time ? time.size : 1); else if (time) x.incrs = time.incrs;
    const y = axisOptions(null, null, rem() * 3.1, 3);
    if (e.log) y.splits = () => (e.y[1] / e.y[0] < 8 ? niceTicks(e.y[0], e.y[1], 7) : logTicks(e.y[0], e.y[1], 1));
    y.values = (_, ticks) => ticks.map((v) => (v == null ? "" : fixed(v, tickDigits(v, ticks))));
    return {
      width, height, legend: { show: false }, padding: [rem() * 0.5, this.roomForNames(width, height), 0, 0],
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => zoom(this.number, null) } },
      scales: { x: { time: false, distr: view.logx ? 3 : 1, range: () => e.x }, y: { distr: e.log ? 3 : 1, range: () => e.y } },
      axes: [x, y],
      series: [{}, { scale: "y", paths: () => null, points: { show: false } }],
      hooks: {
        draw: [(u) => this.draw(u)],
        setCursor: [(u) => hover(u.cursor.left >= 0 ? { figure: this.number, x: u.posToVal(u.cursor.left, "x") } : null)],
        setSelect: [(u) => { if (u.select.width >= 4) zoom(this.number, [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]); }],
      },
    };
  }
  roomForNames(width, height) { // at the right edge; none in a narrow figure
    this.named = [];
    if (width < 26 * rem()) return rem();
    const context = document.createElement("canvas").getContext("2d");
    context.font = font(0.78);
    const most = Math.min(this.lines.length > NAMED ? 8 : 99, Math.max(3, Math.floor((height - 3 * rem()) / (rem() * 1.05))));
    const best = [...this.lines].sort((a, b) => (a.group.rank ?? 1e9) - (b.group.rank ?? 1e9)).slice(0, most);
    const limit = Math.min(width * 0.26, 11 * rem());
    let widest = 0;
    for (const line of best) {
      let name = line.group.name;
      while (name.length > 4 && context.measureText(name).width > limit - 1.4 * rem()) name = `${name.slice(0, -2).trimEnd()}…`;
      widest = Math.max(widest, context.measureText(name).width);
      this.named.push({ line, name });
    }
    return widest + 1.8 * rem();
  }

  draw(u) {
    const context = u.ctx, scale = devicePixelRatio, [px, py] = project(u), { left, top, width, height } = u.bbox;
    context.save();
    context.beginPath();
    context.rect(left, top, width, height);
    context.clip();
    context.lineJoin = "round";
    if (isGap(this.number)) {
      context.strokeStyle = ink().faint; context.lineWidth = scale;
      context.beginPath(); context.moveTo(left, py(0)); context.lineTo(left + width, py(0)); context.stroke();
    }
    const reversed = [...this.lines].reverse(); // the leader on top
    for (const one of reversed) this.drawRuns(context, scale, px, py, one);
    for (const one of reversed) this.drawMean(context, scale, px, py, one, top, height);
    context.restore();
    this.drawNames(u, context, scale, px, py);
  }
  drawRuns(context, scale, px, py, { index, thin, line }) {
    const many = this.lines.length > MANY;
    context.strokeStyle = context.fillStyle = colourOf(groupColour[index]);
    if (view.metric === "train" && view.seeds) for (const { x, raw } of thin) { // raw points stay visible below the smooth line
      context.globalAlpha = Math.max(0.11, 0.34 / Math.max(1, thin.length, many ? 4 : 1)) * fade(index);
      context.lineWidth = scale;
      if (raw.lo) {
        context.beginPath();
        for (let k = 0; k < x.length; k++) { const a = px(x[k]); context.moveTo(a, py(raw.lo[k])); context.lineTo(a, py(raw.hi[k])); }
      } else trace(context, px, py, x, raw.y);
      context.stroke();
    }
    if (view.bands && line.range && !many && (isGap(this.number) || view.metric === "val")) {
      context.globalAlpha = 0.17 * fade(index);
      context.beginPath();
      for (let k = 0; k < line.x.length; k++) context[k ? "lineTo" : "moveTo"](px(line.x[k]), py(line.hi[k]));
      for (let k = line.x.length - 1; k >= 0; k--) context.lineTo(px(line.x[k]), py(line.lo[k]));
      context.fill();
    }
    if ((view.seeds && thin.length > 1) || thin.some((one) => one.ended !== "finished")) for (const { x, y } of thin) {
      context.globalAlpha = (many ? 0.22 : 0.5) * fade(index);
      context.lineWidth = scale * 0.9;
      trace(context, px, py, x, y);
      context.stroke();
    }
  }
  drawMean(context, scale, px, py, { index, group, line, thin }, top, height) {
    const many = this.lines.length > MANY;
    context.strokeStyle = colourOf(groupColour[index]);
    context.globalAlpha = (many ? 0.75 : 1) * fade(index);
    context.lineWidth = (many ? 1.3 : 2.2) * scale;
    context.setLineDash(DASHES[group.dash].map((d) => d * scale));
    trace(context, px, py, line.x, line.y);
    context.stroke();
    context.setLineDash([]);
    context.lineWidth = 2 * scale;
    for (const { x, y, ended } of thin) if (!["finished", "running", "planned"].includes(ended)) { // how a run ended, if not at its last step
      let k = y.length - 1;
      while (k > 0 && !known(y[k])) k--;
      const a = px(x[k]), b = Math.max(top + 6 * scale, Math.min(top + height - 6 * scale, py(y[k]))), r = 4 * scale;
      context.beginPath();
      context.strokeStyle = ink().bad;
      context.moveTo(a - r, b - r); context.lineTo(a + r, b + r); context.moveTo(a + r, b - r); context.lineTo(a - r, b + r);
      context.stroke();
    }
  }
  drawNames(u, context, scale, px, py) {
    const c = ink(), dash = rem() * 0.9 * scale, space = 4 * scale;
    context.save();
    context.font = font(0.78 * scale);
    context.textBaseline = "middle";
    context.textAlign = "left";
    for (const item of this.placeNames(u, context, scale, px, py, dash, space)) {
      const { index, group } = item.line, alpha = fade(index) < 1 ? 0.25 : 1;
      context.strokeStyle = colourOf(groupColour[index]);
      context.globalAlpha = 0.55 * alpha;
      context.lineWidth = scale;
      if (Math.abs(item.y - item.want) > 1 || item.x - item.end > 2 * space) { context.beginPath(); context.moveTo(item.end, item.want); context.lineTo(item.x, item.y); context.stroke(); }
      context.globalAlpha = alpha;
      context.lineWidth = 2.4 * scale;
      context.setLineDash(DASHES[group.dash].map((d) => d * scale));
      context.beginPath(); context.moveTo(item.x, item.y); context.lineTo(item.x + dash, item.y); context.stroke();
      context.setLineDash([]);
      context.lineJoin = "round";
      context.lineWidth = 3 * scale; context.strokeStyle = c.back;
      context.strokeText(item.name, item.x + dash + space, item.y);
      context.fillStyle = c.text;
      context.fillText(item.name, item.x + dash + space, item.y);
    }
    context.restore();
  }
  placeNames(u, context, scale, px, py, dash, space) { // at the end of a line if there is room to the right of it, else at the edge
    const { left, top, width, height } = u.bbox, tall = rem() * 1.05 * scale, edge = left + width;
    const items = this.named.map(({ line, name }) => {
      const { x, y } = line.line;
      let k = x.length - 1;
      while (k > 0 && (!known(y[k]) || x[k] > u.scales.x.max)) k--;
      const end = Math.min(px(x[k]), edge), wide = context.measureText(name).width + dash + 3 * space;
      const want = Math.max(top + tall / 2, Math.min(top + height, py(y[k])));
      return { line, name, end, wide, want, y: want, x: this.lines.length <= NAMED && end + wide + 6 * space < edge ? end + space : edge + space };
    }).sort((p, q) => p.want - q.want);
    const clash = (p, q) => p !== q && Math.abs(p.y - q.y) < tall - 0.5 && p.x < q.x + q.wide && q.x < p.x + p.wide;
    const outside = items.filter((item) => item.x > edge), inside = items.filter((item) => item.x <= edge);
    let last = -Infinity, limit = top + height + tall / 3;
    for (const item of outside) { item.y = Math.max(item.want, last + tall); last = item.y; }
    for (const item of [...outside].reverse()) { item.y = Math.min(item.y, limit); limit = item.y - tall; }
    const fixedItems = [...outside];
    for (const item of inside) { // pushed up, where falling curves leave room
      for (let other; (other = fixedItems.find((one) => clash(item, one)));) item.y = other.y - tall;
      fixedItems.push(item);
    }
    return items;
  }

  mark() { // the shared cursor: each configuration at its own step
    if (!this.u) return;
    const { over } = this.u, scale = devicePixelRatio, context = this.overlay.getContext("2d"), back = ink().back;
    this.overlay.width = over.clientWidth * scale;
    this.overlay.height = over.clientHeight * scale;
    this.overlay.style.width = `${over.clientWidth}px`;
    this.overlay.style.height = `${over.clientHeight}px`;
    for (const { index, line } of this.lines) {
      const step = pointer.at?.steps.get(index);
      if (step == null) continue;
      const k = nearest(line.step, step);
      const x = this.u.valToPos(line.x[k], "x") * scale, y = this.u.valToPos(line.y[k], "y") * scale;
      if (!(x >= 0 && x <= this.overlay.width && y >= 0 && y <= this.overlay.height)) continue;
      context.globalAlpha = fade(index);
      context.beginPath(); context.arc(x, y, 4 * scale, 0, 7);
      context.fillStyle = colourOf(groupColour[index]); context.fill();
      context.lineWidth = 1.5 * scale; context.strokeStyle = back; context.stroke();
    }
  }
  key(event) {
    if (!this.u || event.ctrlKey || event.metaKey || event.altKey) return;
    const [x0, x1] = this.extent.x, now = pointer.at?.figure === this.number ? pointer.at.x : x0, far = event.shiftKey ? 10 : 1;
    const to = { ArrowRight: now + (x1 - x0) * 0.01 * far, ArrowLeft: now - (x1 - x0) * 0.01 * far, Home: x0, End: x1 }[event.key];
    if (to !== undefined) hover({ figure: this.number, x: Math.max(x0, Math.min(x1, to)) }, true);
    else if (["+", "=", "-"].includes(event.key)) {
      const factor = event.key === "-" ? 1.6 : 0.625, left = Math.max(0, now - (now - x0) * factor);
      zoom(this.number, event.key === "-" && (x1 - x0) * factor >= this.wholeWidth() ? null : [left, now + (x1 - now) * factor]);
    } else if (event.key === "Escape") { view.zoom = [null, null]; hover(null); schedule(); } else return;
    event.preventDefault();
  }
  wholeWidth() { // of the x axis without zoom
    const own = view.zoom[this.number];
    view.zoom[this.number] = null;
    const [x0, x1] = extent(this.lines, this.number).x;
    view.zoom[this.number] = own;
    return x1 - x0;
  }
}

const figures = D.curves && $("#plot0") ? [new LossFigure(0), new LossFigure(1)] : [];
function zoom(figure, range) {
  view.zoom[figure] = range;
  schedule();
}
let marking = false;
function hover(at, speak = false) {
  if (at) at.steps = new Map(figures[at.figure].lines.map(({ index, line }) => [index, line.step[nearest(line.x, at.x)]]));
  pointer.at = at;
  if (marking && !speak) return;
  marking = true;
  requestAnimationFrame(() => {
    marking = false;
    for (const figure of figures) figure.mark();
    legend(speak);
  });
}
if (figures.length) {
  onFilter.push(() => {
    pointer.at = null;
    if (view.colour) recolour();
    for (const figure of figures) figure.render();
    legend();
  });
  onTheme.push(() => { for (const figure of figures) if (figure.u) figure.render(); });
}
