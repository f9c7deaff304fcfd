"use strict";
(() => {
  document.documentElement.classList.add("js");
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const D = JSON.parse($("#data").textContent);
  const FALL = 0.25; // share of the training that is left out at first: the steep fall of the loss
  const DASHES = [[], [7, 3], [2.5, 3], [9, 3, 2.5, 3]];
  const TITLES = { step: "steps", seconds: "time", joules: "energy, J", peak_memory_mib: "peak memory, MiB" };
  const probe = Object.assign(document.body.appendChild(document.createElement("i")), { hidden: true });
  const colourOf = (name) => { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; }; // for a canvas
  const number = (v) => {
    if (v == null) return "–";
    return Math.abs(v) >= 1e4 ? Math.round(v).toLocaleString("en-US") : String(Number(v.toPrecision(6)));
  };
  const duration = (s) => {
    if (s == null) return "–";
    if (s < 60) return `${Number(s.toFixed(1))}s`;
    return s < 3600 ? `${Math.floor(s / 60)}m${String(Math.floor(s % 60)).padStart(2, "0")}s` : `${(s / 3600).toFixed(2)}h`;
  };
  let shown = new Set(D.groups.flatMap((group) => group.runs)); // names of the runs that the filter leaves
  const isShown = (group) => group.runs.some((run) => shown.has(run));

  // ---------------------------------------------------------------- figures
  const figures = new Map(); // host -> uPlot
  function draw(host, lines, { x, bands = [], scales = {}, sync }) {
    figures.get(host)?.destroy();
    figures.delete(host);
    host.replaceChildren(lines.some((line) => line.table[0].length) ? "" : "nothing to draw");
    if (host.textContent) return;
    const value = x === "seconds" ? duration : number, label = TITLES[x] || x;
    const grid = { stroke: colourOf("--grid"), width: 1 }, axis = { stroke: colourOf("--faint"), grid, ticks: grid };
    const series = lines.flatMap(({ name, colour, dash, edges = 0, table, ...rest }) => [
      {
        label: name, class: `k${colour}-d${dash}`, stroke: colourOf(`--k${colour}`), dash: DASHES[dash], width: 2,
        spanGaps: true, points: { show: table[0].length < 30 }, value: (_, v) => number(v), ...rest,
      },
      ...Array(edges).fill({ class: "edge", stroke: "transparent", spanGaps: true, points: { show: false } }),
    ]);
    figures.set(host, new uPlot({
      width: host.clientWidth, height: 340, bands, series: [{ label, value: (_, v) => value(v) }, ...series],
      axes: [{ ...axis, label, values: (_, ticks) => ticks.map((v) => (v == null ? "" : value(v))) }, { ...axis, size: 70 }],
      scales: { ...scales, x: { time: false, ...scales.x } },
      cursor: sync ? { sync: { key: sync, setSeries: true, scales: [null, null] } } : {}, // by the share of the width
    }, uPlot.join(lines.map((line) => line.table)), host));
  }
  // Draw figures into a grid that has all of them before the first is drawn: each is its title and what `draw` takes.
  function drawInto(grid, plots) {
    const hosts = plots.map(([title]) => {
      const [figure, caption, host] = ["figure", "figcaption", "div"].map((tag) => document.createElement(tag));
      caption.textContent = title;
      host.className = "plot";
      figure.append(caption, host);
      return host;
    });
    grid.replaceChildren(...hosts.map((host) => host.parentElement));
    plots.forEach(([, ...what], k) => draw(hosts[k], ...what));
  }
  const marked = (lines) => lines.map((line, k) => ({ colour: k % 8, dash: Math.floor(k / 8) % 4, ...line }));
  const sortedTable = (x, columns) => { // uPlot needs ascending x, without unknown ones
    const order = x.map((_, at) => at).filter((at) => x[at] != null).sort((a, b) => x[a] - x[b]);
    return [x, ...columns].map((column) => order.map((at) => column[at]));
  };

  function drawLosses() {
    const is = (name) => $(`#${name}`).checked, kind = is("training") ? "train" : "val";
    $$("#curves .plot").forEach((host, k) => {
      const x = $$("#curves .axis")[k].value, lines = [], bands = [];
      const table = (curve, ...columns) => sortedTable(curve[x] || [], columns);
      for (const group of D.groups) {
        const curve = group[kind], at = lines.length + 2 * bands.length + 1;
        if (!curve?.loss || !isShown(group)) continue;
        lines.push({ ...group, edges: 2, table: table(curve, curve.loss, curve.low, curve.high) });
        bands.push({ series: [at + 2, at + 1], fill: `color-mix(in srgb, ${colourOf(`--k${group.colour}`)} 18%, transparent)` });
        if (!is("seeds") || kind !== "val") continue;
        for (const seed of group.seeds || []) {
          lines.push({ ...group, name: `${group.name}, seed ${seed.seed}`, width: 0.8, table: table(seed, seed.loss) });
        }
      }
      const first = Math.min(...lines.map((line) => line.table[0][0] ?? Infinity));
      const from = (is("start") ? 0 : FALL) * Math.max(...lines.map((line) => line.table[0].at(-1) ?? 0));
      // What is far above most losses where the figure begins does not make all others look equal.
      const tops = lines.map(({ table: [xs, ys] }) => ys[xs.findIndex((v) => v >= from)]).filter((v) => v != null).sort((a, b) => a - b);
      const low = Math.min(...lines.flatMap((line) => line.table[1].filter((v) => v != null)));
      const cap = is("start") ? Infinity : low + 3 * (tops[Math.floor(tops.length / 2)] - low);
      const scales = {
        x: { range: (_, min, max) => [min === first && from > min ? from : min, max] },
        y: { range: (_, min, max) => uPlot.rangeNum(min, min < cap ? Math.min(max, cap) : max, 0.05, false) },
      };
      draw(host, lines, { x, bands, scales, sync: "loss" });
    });
  }

  const drawCosts = () => drawInto($("#costs"), ["seconds", "peak_memory_mib"].map((x) => {
    const known = D.groups.filter((group) => group.cost?.[x]);
    const isBeaten = (one) => known.some((other) => other.mean < one.mean && other.cost[x] < one.cost[x]);
    const lines = known.filter((group, place) => isShown(group) && (place < 24 || !isBeaten(group))).map((group) => {
      const fill = colourOf(isBeaten(group) ? "--bg" : `--k${group.colour}`);
      return { ...group, table: [[group.cost[x]], [group.mean]], points: { show: true, size: 11, width: 2, fill } };
    });
    return [`Loss over ${TITLES[x]} (filled: beaten in both by no other)`, lines, { x }];
  }).filter(([, lines, { x }]) => new Set(lines.map((line) => line.cost[x].toPrecision(3))).size > 1));

  // The loss over each axis with three numbers or more: a line joins the configurations that differ in it alone.
  const drawAxes = () => drawInto($("#axes"), D.axes.map((axis) => {
    const families = new Map();
    for (const { axes, mean } of D.groups.filter((group) => group.mean != null && !Number.isNaN(Number(group.axes[axis])))) {
      const name = Object.keys(axes).filter((label) => label !== axis).map((label) => axes[label]).join(", ");
      families.set(name, [...(families.get(name) || []), [Number(axes[axis]), mean]]);
    }
    const lines = [...families].filter(([, points]) => points.length > 2).map(([name, points]) => (
      { name: name || axis, table: sortedTable(points.map(([x]) => x), [points.map(([, loss]) => loss)]) }));
    const xs = lines.flatMap((line) => line.table[0]), isLog = Math.min(...xs) > 0 && Math.max(...xs) >= 8 * Math.min(...xs);
    return [`Loss over ${axis}`, marked(lines), { x: axis, scales: { x: { distr: isLog ? 3 : 1 } } }];
  }).filter(([, lines]) => lines.length));

  // ---------------------------------------------------------------- filter and order
  const rows = $$("#runs tbody tr"), titles = $$("#runs thead th").map((head) => head.textContent.toLowerCase());
  const runOf = (row) => row.cells[0].textContent.trim();
  const axesOf = new Map(D.groups.flatMap((group) => group.runs.map((run) => [run, group.axes])));
  function termTest(word) {
    const [, field, values] = /^([^=]+)=(.*)$/.exec(word) || [], column = field ? titles.indexOf(field) : -1;
    return (row) => {
      const axes = axesOf.get(runOf(row)) || {};
      if (column >= 0) return values.split(",").includes(row.cells[column].textContent.trim().toLowerCase());
      if (D.axes.includes(field)) return values.split(",").includes(String(axes[field] ?? "").toLowerCase());
      return `${row.textContent} ${Object.values(axes).join(" ")}`.toLowerCase().includes(word);
    };
  }
  function applyFilter() {
    const tests = $("#filter").value.toLowerCase().split(/\s+/).filter(Boolean).map(termTest);
    for (const row of rows) row.hidden = !tests.every((test) => test(row));
    shown = new Set(rows.filter((row) => !row.hidden).map(runOf));
    for (const element of $$("[data-g]")) element.classList.toggle("dim", !isShown(D.groups[element.dataset.g]));
    $("#filtered").textContent = tests.length ? `${shown.size} of ${rows.length} runs` : "";
    drawLosses();
    if ($("#costs")) drawCosts();
  }
  function sortKey(text) { // of a duration, or a number with sign, thousands and unit; null: unknown
    const time = /^(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:([\d.]+)s)?$/.exec(text);
    if (text && time) return [86400, 3600, 60, 1].reduce((sum, unit, k) => sum + unit * (time[k + 1] || 0), 0);
    const found = /^[<$]?\s*([-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?)([kMBT])?/.exec(text);
    return found && Number(found[1].replaceAll(",", "")) * 1e3 ** (" kMBT".indexOf(found[2] || " "));
  }
  function sortBy(head) {
    const up = head.getAttribute("aria-sort") !== "ascending", isWord = head.classList.contains("w");
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => { const text = row.cells[head.cellIndex].textContent.trim(); return isWord ? text : sortKey(text); };
    const words = new Intl.Collator("en", { numeric: true }), compare = (a, b) => (isWord ? words.compare(a, b) : a - b);
    const keyed = rows.map((row) => [key(row), row]);
    // What is unknown comes last in both orders.
    keyed.sort(([a], [b]) => (a === null) - (b === null) || (a === null ? 0 : (up ? 1 : -1) * compare(a, b)));
    rows[0].parentElement.append(...keyed.map(([, row]) => row));
  }

  // ---------------------------------------------------------------- start
  for (const head of $$(".sorts thead th")) {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    button.addEventListener("click", () => sortBy(head));
    head.append(button);
  }
  function drawAll() {
    drawLosses();
    if ($("#costs")) drawCosts();
    drawAxes();
  }
  for (const control of $$("#curves .axis, #curves input")) control.addEventListener("change", drawLosses);
  $("#filter").addEventListener("input", applyFilter);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let width = innerWidth; // the height changes whenever a telephone hides its bar
  addEventListener("resize", () => { if (width !== (width = innerWidth)) drawAll(); });
  drawAll();
})();
