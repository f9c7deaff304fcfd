// The table below the figures is their legend and the readout of the cursor; at rest it shows the end of the runs.
const LEGEND_ROWS = 14;
function legend(speak = false) {
  const body = $("#legend");
  if (!body) return;
  const list = D.groups.map((group, index) => ({ group, index })).filter(({ group }) => group.runs.some((i) => shown[i]));
  const visible = list.slice(0, LEGEND_ROWS);
  const key = JSON.stringify([visible.map(({ index }) => [index, groupColour[index]]), list.length]);
  if (body.dataset.key !== key) { // rows are made again only if others are shown: the cursor changes their cells alone
    body.dataset.key = key;
    body.replaceChildren(...visible.map(legendRow));
    if (list.length > visible.length) {
      const row = make("tr");
      row.append(make("td", `and ${plural(list.length - visible.length, "more configuration")}: filter to list them`, { colspan: 8, class: "faint" }));
      body.append(row);
    }
  }
  const drawn = new Map(figures.flatMap((figure) => (isGap(figure.number) ? [] : figure.lines)).map((one) => [one.index, one.line]));
  const leaders = D.groups.flatMap((group, index) => (group.rank === 1 ? [index] : []));
  const references = new Map([...leaders, ...D.curves.baselines].map((index) => [D.groups[index].ranking, index])); // a baseline replaces the leader
  const spoken = [];
  visible.forEach(({ group, index }, k) => {
    const row = body.children[k], line = drawn.get(index);
    row.classList.toggle("off", view.hidden.has(index));
    const values = readout(group, index, line, group.rank === null ? undefined : references.get(group.ranking), drawn);
    $$("td", row).forEach((cell, c) => { cell.textContent = values[c]; });
    if (line && spoken.length < 4) spoken.push(`${group.name}: step ${values[2]}, loss ${values[3]}`);
  });
  if (speak) $("#spoken").textContent = spoken.join("; ");
}
function legendRow({ group, index }) {
  const row = make("tr", null, { "data-g": index, class: groupColour[index] });
  const head = make("th", null, { scope: "row" }), label = make("label"), box = make("input", null, { type: "checkbox", "aria-label": `Draw ${group.name}` });
  box.checked = !view.hidden.has(index);
  box.addEventListener("change", () => { if (box.checked) view.hidden.delete(index); else view.hidden.add(index); schedule(); });
  label.append(box, swatch(groupColour[index], group.dash), make("span", group.name, { title: group.full }));
  head.append(label);
  row.append(head, ...Array.from({ length: isKnown("energy") ? 7 : 6 }, () => make("td", "", { class: "n" })));
  const focus = (on) => () => { pointer.focus = on; for (const figure of figures) figure.u?.redraw(false, false); };
  row.addEventListener("mouseenter", focus(index));
  row.addEventListener("mouseleave", focus(null));
  return row;
}
function readout(group, index, line, first, drawn) { // the cells of a configuration
  const { counted } = membersOf(group), finals = average(counted.map((i) => D.run[i].f));
  const head = [`${group.runs.filter((i) => shown[i]).length} of ${group.runs.length}`, fine(finals)];
  const step = pointer.at ? pointer.at.steps.get(index) : line?.step[line.step.length - 1];
  if (!line || step == null) return [...head, "", "", "", "", ""];
  const at = nearest(line.step, step);
  const there = first !== undefined && first !== index && drawn.has(first) ? drawn.get(first).step.indexOf(line.step[at]) : -1;
  const mean = (axis) => average(counted.map((i) => { const x = place(i, view.metric, axis); return x ? x[nearest(curve(i, view.metric).step, line.step[at])] : NaN; }));
  return [
    ...head, fixed(line.step[at], 0), fine(line.y[at]), there < 0 ? "" : signed(line.y[at] - drawn.get(first).y[there]),
    AXES.time.text(mean("time")), isKnown("energy") ? AXES.energy.text(mean("energy")) : "",
  ];
}

// ------------------------------------------------------------------ controls
const CHIP_VALUES = 10; // of an axis; one with more has no chips
function smoothWords() {
  const half = halfLife();
  $("#smooth-label").hidden = view.metric !== "train";
  $("#smooth-words").textContent = half ? `half-life ${plural(Math.max(1, Math.round(half)), "step")}` : "off";
}
function thinWords() {
  return "Long curves show a part of their points: those at regular distances, and those farthest from the line through them.";
}
function startCurves() {
  const on = (selector, event, act) => { for (const element of $$(selector)) element.addEventListener(event, () => { act(element); smoothWords(); schedule(); }); };
  on("input[name=metric]", "change", (radio) => { view.metric = radio.value; });
  on("input[name=mode]", "change", (radio) => { view.mode = radio.value; });
  on("input[name=part]", "change", (radio) => { view.part = radio.value; view.zoom = [null, null]; });
  for (const k of [0, 1]) on(`input[name=axis${k}]`, "change", (radio) => { view.axes[k] = radio.value; view.zoom[k] = null; });
  for (const name of ["seeds", "bands", "logx", "logy"]) on(`#${name}`, "change", (box) => { view[name] = box.checked; view.zoom = [null, null]; });
  on("#smooth", "input", (range) => { view.smooth = Number(range.value); });
  on("#colour", "change", (select) => { view.colour = select.value || null; recolour(); });
  for (const axis of Object.keys(AXES)) if (!isKnown(axis)) for (const radio of $$(`#curves input[value=${axis}]`)) {
    radio.disabled = true;
    radio.closest("label").title = { energy: "not recorded", money: "no price was set" }[axis] ?? "not known";
  }
  $("#legend-energy").hidden = !isKnown("energy");
  if (!D.run.some((_, i) => curve(i, "val"))) { view.metric = "train"; $("input[name=metric][value=train]").checked = true; }
  if (D.groups.length < 2 || !D.groups.some((group) => group.rank !== null)) $("input[name=mode][value=gap]").disabled = true;
  const varying = D.axes.filter((axis) => axis.values.length > 1);
  $("#colour").append(make("option", varying.length > 1 ? "default" : "configuration", { value: "" }), ...varying.filter((axis) => axis.label !== "seed").map((axis) => make("option", axis.label, { value: axis.label })));
  for (const axis of varying) if (axis.values.length <= CHIP_VALUES) {
    const chips = axis.values.filter((value) => !/\s/.test(value)).map((value) => make("button", value.length > 24 ? `${value.slice(0, 23)}…` : value, { type: "button", "data-term": `${axis.label}=${value}`, "aria-pressed": "false" }));
    if (chips.length) $("#chips").append(make("span", axis.label, { class: "axisname" }), ...chips);
  }
  $("#thin-note").textContent = thinWords();
  smoothWords();
}
if (figures.length) startCurves();
