(() => {
  "use strict";
  document.documentElement.classList.add("js");
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector) => [...document.querySelectorAll(selector)];
  const D = JSON.parse($("#data").textContent);
  const FALL = 0.25; // share of the training that is left out at first: the steep fall of the loss
  const DASHES = [[], [7, 3], [2.5, 3], [9, 3, 2.5, 3]];
  const digits = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 6 });
  const number = (v) => (v == null ? "–" : digits.format(v));
  const probe = Object.assign(document.body.appendChild(document.createElement("i")), { hidden: true });
  const colourOf = (name) => { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; };
  let shown = new Set(D.groups.flatMap((group) => group.runs)); // names of the runs that the filter leaves
  const shownGroups = () => D.groups.filter((group) => group.runs.some((run) => shown.has(run)));

  // ---------------------------------------------------------------- figures
  // The lines of a figure over x: each has a table of x, y, and perhaps of the lowest and the highest seed.
  const curves = (x, kind) => shownGroups().filter((group) => group[kind]?.[x]).map((group) => {
    const { [x]: xs, loss, low, high } = group[kind];
    return { ...group, table: [xs, loss, low, high].map((column) => column.filter((_, at) => xs[at] !== null)) };
  });
  const costs = (x) => shownGroups().slice(0, 24).filter((group) => group.mean !== null && group.cost[x] !== undefined)
    .map((group) => ({ ...group, table: [[group.cost[x]], [group.mean]] }));
  function families(x) { // a line joins the configurations that differ in this axis alone
    const found = new Map();
    for (const { axes, mean } of shownGroups().filter((group) => group.mean !== null && !isNaN(group.axes[x]))) {
      const name = Object.entries(axes).filter(([label]) => label !== x).map((pair) => pair.join(" ")).join(", ");
      const [xs, losses] = found.get(name) || [[], []];
      found.set(name, [[...xs, Number(axes[x])], [...losses, mean]]);
    }
    return [...found].filter(([, [xs]]) => xs.length > 2)
      .map(([name, table], k) => ({ name: name || "mean", colour: k % 8, dash: Math.floor(k / 8) % 4, table }));
  }

  function draw(host) {
    const { kind } = host.dataset, choice = $("select", host.parentElement), x = choice ? choice.value : host.dataset.x;
    const lines = ({ cost: costs, axis: families }[kind] || curves)(x, kind);
    const xs = lines.flatMap((line) => line.table[0]), end = Math.max(...xs);
    host.figure?.destroy();
    host.parentElement.hidden = !choice && !xs.length;
    host.textContent = xs.length ? "" : "nothing to draw";
    if (!xs.length) return;
    const value = (_, v) => number(v), series = [{ label: D.titles[x] || x, value }], bands = [];
    const isCurve = lines[0].table.length > 2;
    const edge = { class: "edge", stroke: "transparent", spanGaps: true, points: { show: false } };
    for (const { name: label, colour, dash, table } of lines) {
      const stroke = colourOf(`--k${colour}`), fill = `color-mix(in srgb, ${stroke} 18%, transparent)`;
      const points = { show: table[0].length < 30, fill: stroke, size: table[0].length > 1 ? 5 : 11 };
      const look = { class: `k${colour}-d${dash}`, stroke, dash: DASHES[dash], width: 2, spanGaps: true, points };
      const at = series.push({ label, value, ...look }) - 1;
      if (!isCurve) continue;
      series.push({ ...edge }, { ...edge });
      bands.push({ series: [at + 2, at], fill }, { series: [at, at + 1], fill });
    }
    const grid = { stroke: colourOf("--grid"), width: 1 };
    const values = (_, ticks) => ticks.map((v) => (v === null ? "" : number(v)));
    const axis = { stroke: colourOf("--faint"), grid, ticks: grid, values };
    const isLog = kind === "axis" && Math.min(...xs) > 0 && end >= 8 * Math.min(...xs);
    host.figure = new uPlot({
      width: host.clientWidth, height: 340, bands, series,
      axes: [{ ...axis, label: series[0].label }, { ...axis, size: 70 }],
      scales: { x: { time: false, distr: isLog ? 3 : 1 } },
      // Both figures with a choice of x show the values at the same share of their width.
      cursor: choice ? { sync: { key: "loss", setSeries: true, scales: [null, null] } } : {},
    }, uPlot.join(lines.map((line) => line.table)), host);
    if (isCurve) host.figure.setScale("x", { min: FALL * end, max: end });
  }
  const drawAll = () => $$(".plot").forEach(draw);

  // ---------------------------------------------------------------- filter and order
  const heads = $$("#runs thead th"), titles = heads.map((head) => head.textContent.toLowerCase());
  const axesOf = new Map(D.groups.flatMap((group) => group.runs.map((run) => [run, group.axes])));
  const rows = $$("#runs tbody tr").map((row) => {
    const cells = [...row.cells].map((cell) => cell.textContent.trim());
    const values = [...cells.map((text, k) => [titles[k], text]), ...Object.entries(axesOf.get(cells[0]) || {})];
    return { row, cells, values: values.map((pair) => pair.join("=").toLowerCase()) };
  });
  $("#filter").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    const isIn = (word) => (text) => (word.includes("=") ? text === word : text.split("=")[1].includes(word));
    for (const { row, values } of rows) row.hidden = !words.every((word) => values.some(isIn(word)));
    shown = new Set(rows.filter(({ row }) => !row.hidden).map(({ cells }) => cells[0]));
    const names = new Set(shownGroups().map((group) => group.name));
    for (const row of $$("[data-g]")) row.classList.toggle("dim", !names.has(row.dataset.g));
    $("#filtered").textContent = words.length ? `${shown.size} of ${rows.length} runs` : "";
    drawAll();
  });
  const UNITS = { d: 86400, h: 3600, m: 60, s: 1, k: 1e3, M: 1e6, B: 1e9, T: 1e12 };
  function numberIn(text) { // "3.2811*", "3.2811@100", "12.4k" or "1m05s"; null: unknown
    const parts = [...text.split("@")[0].matchAll(/(\d[\d.,]*(?:e[-+]?\d+)?)([dhmskMBT]?)/g)];
    const values = parts.map(([, digits, unit]) => Number(digits.replaceAll(",", "")) * (UNITS[unit] || 1));
    return values.length ? values.reduce((a, b) => a + b) : null;
  }
  function sortBy(head) {
    const isUp = head.getAttribute("aria-sort") !== "ascending", isWord = head.classList.contains("w");
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
    const words = new Intl.Collator("en", { numeric: true });
    const compare = (a, b) => (isWord ? words.compare(a, b) : a - b);
    const key = ({ cells }) => (isWord ? cells[head.cellIndex] : numberIn(cells[head.cellIndex]));
    // What is unknown comes last in both orders.
    const order = (a, b) => (a === null) - (b === null) || (isUp ? 1 : -1) * compare(a, b);
    rows.sort((a, b) => order(key(a), key(b)));
    $("#runs tbody").append(...rows.map(({ row }) => row));
  }

  // ---------------------------------------------------------------- start
  for (const head of heads) {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    button.addEventListener("click", () => sortBy(head));
    head.append(button);
  }
  for (const choice of $$("#curves select")) choice.addEventListener("change", drawAll);
  for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", drawAll);
  let width = innerWidth; // the height changes whenever a telephone hides its bar
  addEventListener("resize", () => { if (width !== (width = innerWidth)) drawAll(); });
  drawAll();
})();
