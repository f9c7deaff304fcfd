// The recording of a run over time: a line per device, or a strip of colours each if there are many. Phases are shaded.
if (D.devices && D.devices.runs) {
  const { lines: mostLines, runs: recordings } = D.devices;
  const select = $("#timeline-run"), holder = $("#timeline-lanes"), legend = $("#timeline-legend");
  const QUANTITIES = [["u", "utilization"], ["p", "power"], ["m", "memory"]];
  const ramp = (k, count) => (count > 1 ? `r${Math.round(((k % 7) * 6) / (Math.min(7, count) - 1)) % 7}` : "r2"); // not the colours of optimizers
  const withAlpha = (colour, alpha) => colour.replace(/rgb\(([^)]+)\)/, `rgba($1, ${alpha})`);
  const LINE = 1.8; // width of a line, pixels
  let plots = [];

  // Mean, lowest and highest of a lane; one list stands for all three.
  const part = (lane, which) => lane[which] || lane[0];

  function unitOf(run, key) {
    if (key === "u") return { unit: "%", size: 1, digits: 0 };
    if (key === "p") return { unit: "W", size: 1, digits: 0 };
    const most = Math.max(...run.d.flatMap((device) => (device.m ? part(device.m, 2).filter(known) : [0])), 0);
    return most >= 4096 ? { unit: "GiB", size: 1024, digits: 1 } : { unit: "MiB", size: 1, digits: 0 };
  }
  function timeUnit(seconds) {
    return seconds < 180 ? [1, "s"] : seconds < 10_800 ? [60, "min"] : [3600, "h"];
  }
  function axisOf(heat, extra) {
    const font = `${Math.round(rem() * 0.72)}px system-ui, sans-serif`;
    return { stroke: colourOf("faint"), font, labelFont: font, grid: { show: !heat, stroke: colourOf("grid"), width: 1 }, ticks: { show: false }, ...extra };
  }
  // What the table shows: the values at the cursor, else the mean of the recording. cell: of the table.
  function showValue(cell, lane, at, { unit, size, digits }) {
    if (!lane) { cell.textContent = UNKNOWN; return; }
    const text = (value) => fixed(value / size, digits);
    if (at == null) { const all = average(lane[0]); cell.textContent = known(all) ? `mean ${text(all)} ${unit}` : UNKNOWN; return; }
    const [mean, low, high] = [0, 1, 2].map((which) => part(lane, which)[at]);
    cell.textContent = mean == null ? UNKNOWN : `${text(mean)} ${unit}${low === high ? "" : ` (${text(low)} to ${text(high)})`}`;
  }
  function shadePhases(u, run) {
    for (const [phase, begin, end] of run.ph) {
      const left = u.valToPos(begin, "x", true), right = Math.max(u.valToPos(end, "x", true), left + devicePixelRatio);
      u.ctx.fillStyle = withAlpha(colourOf(phase === "set-up" ? "setup" : phase), 0.55);
      u.ctx.fillRect(left, u.bbox.top, right - left, u.bbox.height);
    }
  }
  function drawHeat(u, run, key, top) {
    const { left, top: begin, width, height } = u.bbox, colour = colourOf("k0");
    const x = (at) => Math.round(left + (at * width) / run.c), y = (k) => Math.round(begin + (k * height) / run.d.length);
    const gap = height / run.d.length > 6 ? devicePixelRatio : 0;
    run.d.forEach((device, k) => device[key]?.[0].forEach((value, at) => {
      if (value == null) return; // unknown: the phases below stay visible
      u.ctx.fillStyle = withAlpha(colour, 0.08 + 0.92 * Math.min(1, value / top));
      u.ctx.fillRect(x(at), y(k), x(at + 1) - x(at), y(k + 1) - y(k) - gap);
    }));
  }
  // A cross marks the last value of a device that was lost; a rank that has ended is not lost.
  function markLost(u, run, key, size) {
    run.d.forEach((device) => {
      const last = device.x && device[key] ? device[key][0].findLastIndex((value) => value != null) : -1;
      if (last < 0 || last >= run.c - 2) return;
      const x = u.valToPos(((last + 0.5) * run.s) / run.c, "x", true), y = u.valToPos(device[key][0][last] / size, "y", true), arm = 5 * devicePixelRatio;
      u.ctx.strokeStyle = colourOf("bad");
      u.ctx.lineWidth = 2.5 * devicePixelRatio;
      u.ctx.beginPath();
      for (const side of [-1, 1]) { u.ctx.moveTo(x - arm, y - side * arm); u.ctx.lineTo(x + arm, y + side * arm); }
      u.ctx.stroke();
    });
  }
  // Devices with the same values would hide each other: over the lines, each has dashes where the others have none.
  function drawDashes(u, run, key, size) {
    const drawn = run.d.map((device, k) => k).filter((k) => run.d[k][key]), dash = 7 * devicePixelRatio;
    if (drawn.length < 2) return;
    u.ctx.save();
    u.ctx.lineWidth = LINE * devicePixelRatio;
    u.ctx.setLineDash([dash, dash * (drawn.length - 1)]);
    drawn.forEach((k, place) => {
      u.ctx.strokeStyle = colourOf(ramp(k, run.d.length));
      u.ctx.lineDashOffset = -dash * place;
      u.ctx.beginPath();
      let joined = false;
      run.d[k][key][0].forEach((value, at) => {
        if (value == null) { joined = false; return; }
        const x = u.valToPos(((at + 0.5) * run.s) / run.c, "x", true), y = u.valToPos(value / size, "y", true);
        if (joined) u.ctx.lineTo(x, y); else u.ctx.moveTo(x, y);
        joined = true;
      });
      u.ctx.stroke();
    });
    u.ctx.restore();
  }
  function drawCapacity(u, capacity) {
    const y = u.valToPos(capacity, "y", true);
    u.ctx.strokeStyle = colourOf("bad");
    u.ctx.lineWidth = 1.5 * devicePixelRatio;
    u.ctx.beginPath();
    u.ctx.moveTo(u.bbox.left, y);
    u.ctx.lineTo(u.bbox.left + u.bbox.width, y);
    u.ctx.stroke();
  }

  function rowsOf(run, heat) {
    const row = (name, mark) => {
      const line = make("tr"), head = make("th", null, { scope: "row" });
      if (mark) head.append(mark);
      head.append(make("span", name));
      line.append(head, ...QUANTITIES.map(() => make("td", "", { class: "n" })));
      return line;
    };
    if (heat) return [row("", null)];
    return run.d.map((device, k) => row(device.l, swatch(ramp(k, run.d.length), Math.floor(k / 7) % 4)));
  }

  function addLane(run, [key, title], rows, heat, isLast) {
    const about = unitOf(run, key), column = QUANTITIES.findIndex(([one]) => one === key);
    const has = run.d.some((device) => device[key]);
    for (const [k, row] of rows.entries()) if (!heat) showValue($$("td", row)[column], run.d[k][key], null, about);
    if (!has) return;
    const head = make("div", null, { class: "head" }), box = make("div", null, { class: "plot low", tabindex: "0", role: "img" });
    const most = Math.max(...run.d.flatMap((device) => (device[key] ? part(device[key], 2).filter(known) : [])), 0);
    const capacities = key === "m" && !run.cpu ? [...new Set(run.d.map((device) => device.t).filter((total) => total))] : [];
    const top = Math.max(key === "u" && !run.cpu ? 100 : 0, most, ...capacities) || 1;
    const scaled = `0 to ${fixed(top / about.size, about.digits)} ${about.unit}`;
    head.append(make("b", title), make("span", heat ? `${scaled}, the stronger the colour the more` : `${about.unit} per device${capacities.length ? `; red line${capacities.length > 1 ? "s" : ""}: capacity` : ""}`, { class: "faint" }));
    box.setAttribute("aria-label", `${title} of each device over time, ${scaled}. Left and right move the cursor${heat ? ", up and down choose the device" : ""}.`);
    if (heat) box.style.height = `${Math.min(26, 2.6 + run.d.length * (run.d.length > 32 ? 0.3 : 0.7))}rem`;
    holder.append(head, box);
    const [tick, tickName] = timeUnit(run.s), width = run.s / run.c;
    const x = Array.from({ length: run.c }, (_, at) => (at + 0.5) * width);
    const data = [x], series = [{}], bands = [];
    if (heat) { data.push(x.map(() => 0)); series.push({ show: true, stroke: "transparent", points: { show: false } }); } else run.d.forEach((device, k) => {
      if (!device[key]) return;
      const colour = colourOf(ramp(k, run.d.length)), first = data.length, plain = { stroke: "transparent", width: 0, points: { show: false } };
      data.push(...[0, 2, 1].map((which) => part(device[key], which).map((value) => (value == null ? null : value / about.size))));
      series.push({ stroke: colour, width: LINE, dash: DASHES[Math.floor(k / 7) % 4], points: { show: false } }, plain, plain);
      bands.push({ series: [first + 1, first + 2], fill: withAlpha(colour, 0.13) });
    });
    let chosen = 0; // the device that the table of a heat map shows
    const show = (u) => {
      const at = u.cursor.left == null || u.cursor.left < 0 ? null : u.cursor.idx;
      if (!heat) { for (const [k, row] of rows.entries()) showValue($$("td", row)[column], run.d[k][key], at, about); return; }
      if (at == null) { $("th", rows[0]).textContent = `all ${run.d.length} devices`; showValue($$("td", rows[0])[column], [run.d.flatMap((device) => (device[key] ? device[key][0] : []))], null, about); return; }
      if (document.activeElement !== box && u.cursor.top >= 0) chosen = Math.min(run.d.length - 1, Math.floor((u.cursor.top * run.d.length) / (u.bbox.height / devicePixelRatio)));
      $("th", rows[0]).textContent = run.d[chosen].l;
      showValue($$("td", rows[0])[column], run.d[chosen][key], at, about);
    };
    const names = (u, marks) => marks.map((mark) => (Number.isInteger(mark) && run.d[mark] ? `${mark}` : ""));
    const plot = new uPlot({
      width: box.clientWidth, height: box.clientHeight, legend: { show: false }, padding: [rem() * 0.4, rem(), 0, 0],
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false }, sync: { key: "devices", setSeries: false, scales: ["x", "y"] } },
      scales: { x: { time: false, range: () => [0, run.s] }, y: { dir: heat ? -1 : 1, range: () => (heat ? [-0.5, run.d.length - 0.5] : [0, (top / about.size) * 1.06]) } },
      axes: [
        axisOf(heat, { size: rem() * 1.3, gap: 2, labelGap: 2, label: isLast ? `time of the recording (${tickName})` : undefined, labelSize: rem() * 1.2, incrs: [1, 2, 5, 10, 15, 20, 30, 60, 100, 120, 200, 500, 1000].map((step) => step * tick), values: (u, marks) => marks.map((mark) => fixed(mark / tick, 0)) }),
        axisOf(heat, { size: rem() * 3.1, gap: 4, space: rem() * 1.6, ...(heat ? { incrs: [1, 2, 4, 8, 16, 32] } : {}), values: heat ? names : (u, marks) => marks.map((mark) => fixed(mark, mark % 1 ? 1 : 0)) }),
      ],
      series, bands,
      hooks: {
        drawClear: [(u) => { shadePhases(u, run); if (heat) drawHeat(u, run, key, top); }],
        draw: [(u) => {
          if (heat) return;
          drawDashes(u, run, key, about.size);
          for (const capacity of capacities) drawCapacity(u, capacity / about.size);
          markLost(u, run, key, about.size);
        }],
        setCursor: [show],
      },
    }, data, box);
    box.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key], other = heat && { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!move && !other) return;
      event.preventDefault();
      if (other) chosen = Math.max(0, Math.min(run.d.length - 1, chosen + other));
      const now = plot.cursor.left == null || plot.cursor.left < 0 ? (move > 0 ? -1 : run.c) : plot.cursor.idx ?? 0;
      const next = Math.max(0, Math.min(run.c - 1, now + (move || 0) * (event.shiftKey ? 10 : 1)));
      plot.setCursor({ left: plot.valToPos(x[next], "x"), top: ((chosen + 0.5) * plot.bbox.height) / devicePixelRatio / run.d.length }, true, true);
    });
    plots.push(plot);
    plot.setCursor({ left: -10, top: -10 });
  }

  function drawTimeline() {
    const focused = $$(".plot", holder).indexOf(document.activeElement);
    for (const plot of plots) plot.destroy();
    plots = [];
    holder.replaceChildren();
    const run = recordings[Number(select.value)], heat = run.d.length > mostLines;
    const rows = rowsOf(run, heat);
    legend.replaceChildren(...rows);
    const present = QUANTITIES.filter(([key]) => run.d.some((device) => device[key]));
    for (const quantity of QUANTITIES) addLane(run, quantity, rows, heat, quantity === present.at(-1));
    const keys = ["set-up", "evaluation", "checkpoint", "ending"].filter((phase) => run.ph.some(([one]) => one === phase)).map((phase) => {
      const key = make("span", null, { class: "phasekey" });
      key.append(make("i", null, { class: `ph-${phase}` }), phase);
      return key;
    });
    const thin = run.thin ? `Each point is a column of ${duration(run.s / run.c)}: its mean${heat ? "" : ", with the lowest and the highest as a band"}. ` : "Each point is a sample. ";
    const part = run.whole ? `The recording that can be read holds ${duration(run.s)} of ${duration(run.whole)}. ` : "";
    const out = run.out ? `${plural(run.out, "node")} left out: when training began there is not known, so it has no place on this time. ` : "";
    $("#timeline-note").replaceChildren(`${run.simulated ? "Simulated, not measured. " : ""}${part}${out}${thin}`, ...keys);
    // A new theme or width draws new figures: the reader's place on the page stays.
    if (focused >= 0) $$(".plot", holder)[focused]?.focus({ preventScroll: true });
  }

  recordings.forEach((run, k) => select.append(make("option", run.n, { value: String(k) })));
  select.addEventListener("change", drawTimeline);
  let drawnWidth = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.round(entry.contentRect.width);
    if (width !== drawnWidth) { drawnWidth = width; drawTimeline(); }
  }).observe(holder);
  onTheme.push(() => { if (drawnWidth) drawTimeline(); });
}
