"use strict";
(() => {
  document.documentElement.classList.add("js");
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const D = JSON.parse($("#data").textContent);
  const DASHES = [[], [7, 3], [2.5, 3], [9, 3, 2.5, 3]];
  const UNITS = { step: "steps", tokens: "tokens", seconds: "time", joules: "energy, J" };
  const probe = document.body.appendChild(document.createElement("i"));
  probe.hidden = true;
  const style = (name) => { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; }; // what a canvas reads
  const colour = (group) => style(`--k${group.colour}`);
  const number = (value) => (value == null ? "–" : Math.abs(value) >= 1e4 ? value.toLocaleString("en-US", { maximumFractionDigits: 0 }) : String(Number(value.toPrecision(6))));
  const duration = (s) => (s == null ? "–" : s < 60 ? `${Number(s.toFixed(1))}s` : s < 3600 ? `${Math.floor(s / 60)}m${String(Math.round(s % 60)).padStart(2, "0")}s` : `${(s / 3600).toFixed(2)}h`);
  let shown = new Set(D.groups.flatMap((group) => group.runs)); // names of runs that the filter leaves
  const isShown = (group) => group.runs.some((run) => shown.has(run));

  // ---------------------------------------------------------------- figures
  const figures = new Map(); // host -> uPlot
  function draw(host, series, tables, { x, bands = [], y = {}, log = false, sync = null }) {
    figures.get(host)?.destroy();
    host.replaceChildren();
    if (!tables.length) {
      host.textContent = "nothing to draw";
      return;
    }
    const grid = { stroke: style("--grid"), width: 1 }, ink = style("--faint");
    const values = x === "seconds" ? (_, ticks) => ticks.map(duration) : (_, ticks) => ticks.map((tick) => (tick == null ? "" : tick.toLocaleString("en-US")));
    const plot = new uPlot({
      width: host.clientWidth, height: 340, bands, series,
      axes: [{ stroke: ink, grid, ticks: grid, values, label: UNITS[x] || x }, { stroke: ink, grid, ticks: grid, size: 70 }],
      scales: { x: { time: false, distr: log ? 3 : 1 }, y },
      cursor: sync ? { sync: { key: sync, setSeries: true } } : {},
    }, uPlot.join(tables), host);
    figures.set(host, plot);
  }
  const sortedTable = (x, columns) => { // uPlot needs ascending x, without unknown ones
    const order = x.map((value, at) => [value, at]).filter(([value]) => value != null).sort(([a], [b]) => a - b);
    return [order.map(([value]) => value), ...columns.map((column) => order.map(([, at]) => column[at]))];
  };

  function drawLosses() {
    const kind = $("#kind").value, logx = $("#logx").checked, logy = $("#logy").checked;
    $$("#curves .plot").forEach((host, k) => {
      const x = $$("#curves select.axis")[k].value;
      const series = [{ value: (_, v) => (x === "seconds" ? duration(v) : number(v)), label: UNITS[x] }], tables = [], bands = [], losses = [];
      for (const group of D.groups) {
        const curve = group[kind];
        if (!curve || !isShown(group) || !curve[x] || !curve.loss || !curve[x].some((value) => value != null)) continue;
        const at = series.length, stroke = colour(group), low = curve.low || curve.loss, high = curve.high || curve.loss;
        tables.push(sortedTable(curve[x].map((value) => (logx && value === 0 ? null : value)), [curve.loss, low, high]));
        series.push({ label: group.name, stroke, dash: DASHES[group.dash], width: 2, spanGaps: true, points: { show: curve.loss.length < 30 }, value: (_, v) => number(v) });
        for (let edge = 0; edge < 2; edge++) series.push({ class: "edge", stroke: "transparent", spanGaps: true, points: { show: false } });
        bands.push({ series: [at + 2, at + 1], fill: `color-mix(in srgb, ${stroke} 18%, transparent)` });
        losses.push(...curve.loss.slice(Math.floor(curve.loss.length * Number($("#part").value))).filter((value) => value != null));
        if ($("#seeds").checked && kind === "val") for (const seed of group.seeds || []) {
          tables.push(sortedTable(seed[x].map((value) => (logx && value === 0 ? null : value)), [seed.loss]));
          series.push({ label: `${group.name}, seed ${seed.seed}`, stroke, width: 0.8, spanGaps: true, points: { show: false }, value: (_, v) => number(v) });
        }
      }
      const y = { distr: logy ? 3 : 1 };
      if ($("#part").value !== "0" && losses.length) {
        const low = Math.min(...losses), high = Math.max(...losses), room = 0.05 * (high - low || low || 1);
        y.range = (_, min) => [Math.min(min ?? low, low) - room, high + room];
        y.auto = true;
      }
      draw(host, series, tables, { x, bands, y, log: logx, sync: "loss" });
    });
  }

  function drawSweeps() {
    const box = $("#sweeps");
    if (!box) return;
    box.replaceChildren();
    for (const sweep of D.sweeps) {
      const figure = document.createElement("figure"), caption = document.createElement("figcaption"), host = document.createElement("div");
      caption.textContent = `Loss over ${sweep.axis}`;
      host.className = "plot";
      figure.append(caption, host);
      box.append(figure);
      const xs = sweep.lines.flatMap((line) => line.x), log = Math.min(...xs) > 0 && Math.max(...xs) >= 8 * Math.min(...xs);
      const series = [{ label: sweep.axis, value: (_, v) => number(v) }, ...sweep.lines.map((line, k) => ({ label: line.name, stroke: style(`--k${k % 8}`), dash: DASHES[Math.floor(k / 8) % 4], width: 2, spanGaps: true, points: { show: true, size: 7 }, value: (_, v) => number(v) }))];
      draw(host, series, sweep.lines.map((line) => [line.x, line.y]), { x: sweep.axis, log });
    }
  }

  function drawLanes() {
    const box = $("#lanes");
    if (!box) return;
    if (!D.lanes.length) {
      box.hidden = true;
      return;
    }
    const runs = $("#lane-run"), quantities = $("#lane-quantity");
    if (!runs.options.length) {
      D.lanes.forEach((lane, k) => runs.add(new Option(lane.run, k)));
      Object.keys(D.lanes[0].quantities).forEach((name) => quantities.add(new Option(name.replace("_", " "), name)));
      runs.addEventListener("change", drawLanes);
      quantities.addEventListener("change", drawLanes);
    }
    const lane = D.lanes[Number(runs.value)], lines = lane.quantities[quantities.value] || [];
    const series = [{ label: "time", value: (_, v) => duration(v) }, ...lines.map((line, k) => ({ label: line.name, stroke: style(`--k${k % 8}`), dash: DASHES[Math.floor(k / 8) % 4], width: 1.4, points: { show: false }, value: (_, v) => number(v) }))];
    draw($(".plot", box), series, lines.length ? [[lane.seconds, ...lines.map((line) => line.values)]] : [], { x: "seconds" });
  }

  // ---------------------------------------------------------------- filter and order
  const axesOf = new Map(D.groups.flatMap((group) => group.runs.map((run) => [run, group.axes])));
  const rows = $$("#runs tbody tr");
  function termTest(word) {
    const [, field, value] = /^([^=]+)=(.*)$/.exec(word) || [], titles = $$("#runs thead th").map((head) => head.textContent.toLowerCase());
    const column = field ? titles.indexOf(field) : -1;
    return (row) => {
      if (column >= 0) return value.split(",").includes(row.children[column].textContent.trim().toLowerCase());
      if (field && D.axes.includes(field)) return value.split(",").includes(String(axesOf.get(row.dataset.run)?.[field] ?? "").toLowerCase());
      return `${row.textContent} ${Object.values(axesOf.get(row.dataset.run) || {}).join(" ")}`.toLowerCase().includes(word);
    };
  }
  function applyFilter() {
    const tests = $("#filter").value.trim().toLowerCase().split(/\s+/).filter(Boolean).map(termTest);
    shown = new Set();
    for (const row of rows) {
      row.hidden = !tests.every((test) => test(row));
      if (!row.hidden) shown.add(row.dataset.run);
    }
    for (const element of $$("[data-g]")) element.classList.toggle("dim", !isShown(D.groups[element.dataset.g]));
    const words = tests.length ? `${shown.size} of ${rows.length} runs` : `${rows.length} ${rows.length === 1 ? "run" : "runs"}`;
    $("#filtered").textContent = tests.length ? words : "";
    $("#runs-count").textContent = words;
    drawLosses();
  }
  const UNITS_OF = { k: 1e3, M: 1e6, B: 1e9, T: 1e12 };
  function sortKey(text) {
    const time = /^(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:([\d.]+)s)?$/.exec(text);
    if (text && time && time[0]) return 86400 * (time[1] || 0) + 3600 * (time[2] || 0) + 60 * (time[3] || 0) + Number(time[4] || 0);
    const found = /^[<$]?\s*([-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?)([kMBT])?/.exec(text);
    return found ? Number(found[1].replaceAll(",", "")) * (UNITS_OF[found[2]] || 1) : null;
  }
  function sortBy(head) {
    const up = head.getAttribute("aria-sort") !== "ascending", column = [...head.parentElement.children].indexOf(head);
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const words = new Intl.Collator("en", { numeric: true });
    const keyed = rows.map((row) => [head.classList.contains("n") ? sortKey(row.children[column].textContent.trim()) : row.children[column].textContent, row]);
    // What is unknown comes last in both orders.
    const compare = (a, b) => (typeof a === "number" ? a - b : words.compare(a, b));
    keyed.sort(([a], [b]) => (a === null) - (b === null) || (a === null ? 0 : (up ? 1 : -1) * compare(a, b)));
    rows[0].parentElement.append(...keyed.map(([, row]) => row));
  }

  // ---------------------------------------------------------------- start
  for (const head of $$(".sorts thead th")) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    button.addEventListener("click", () => sortBy(head));
    head.replaceChildren(button);
  }
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-copy]");
    if (button) navigator.clipboard?.writeText($("code", button.parentElement).textContent).then(() => { button.textContent = "Copied"; });
  });
  const drawAll = () => { drawLosses(); drawSweeps(); drawLanes(); };
  for (const control of $$("#curves select, #curves input")) control.addEventListener("change", drawLosses);
  $("#filter").addEventListener("input", applyFilter);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
  drawAll();
})();
