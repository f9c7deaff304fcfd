// The table of the target loss, counted again for another target from the curves of the page: as in report/target.py.
const targetInput = $("#target-loss");
const TARGET_TEXTS = {
  step: (v) => fixed(Math.round(v), 0), tokens: big, seconds: duration, dollars: money,
  joules: (v) => `${Number((v / 1000).toPrecision(4))}`,
};
const among = (list, i) => Boolean(list?.includes(i));
function columnOf(i, quantity) { // of the evaluations of a run; null: not known
  const axis = { step: "step", tokens: "tokens", seconds: "time", joules: "energy", dollars: "money" }[quantity];
  if ((quantity === "joules" && among(D.target.simulated, i)) || (quantity === "dollars" && among(D.target.reused, i))) return null;
  return place(i, "val", axis);
}
function firstWithin(i, loss) { // the place of the first evaluation at or below a loss; -1: there is none
  return curve(i, "val")?.y.findIndex((y) => y <= loss) ?? -1;
}
function medianReach(runs, hits, quantity) { // null: half of the runs or more did not reach it, or it is not known
  const reached = [], missed = [];
  for (const [at, i] of runs.entries()) {
    const values = columnOf(i, quantity);
    if (hits[at] >= 0) reached.push(values?.[hits[at]] ?? NaN);
    else missed.push(among(D.target.never, i) ? Infinity : values?.at(-1) ?? NaN);
  }
  if (2 * reached.length <= runs.length || !reached.every(known)) return null;
  const all = [...reached.sort((a, b) => a - b), ...missed.map(() => Infinity)];
  const low = all[(runs.length - 1) >> 1], high = all[runs.length >> 1];
  return known(high) && missed.every((end) => end >= high) ? (low + high) / 2 : null;
}
function countTarget(loss) { // per configuration: its row of the table, undefined if it has none, and what it took
  const rows = Object.fromEntries($$("#target tbody tr").map((row) => [row.dataset.g, row]));
  return D.target.groups.map((g) => {
    const runs = D.groups[g].runs.filter((i) => ["finished", "failed"].includes(D.run[i].s));
    const hits = runs.map((i) => firstWithin(i, loss)), reached = hits.filter((at) => at >= 0).length;
    const medians = Object.fromEntries(D.target.quantities.map((quantity) => [quantity, medianReach(runs, hits, quantity)]));
    return { row: rows[g], runs: runs.length, reached, medians };
  });
}
const targetCells = targetInput ? $$("#target tbody [data-q]").map((cell) => [cell, [...cell.childNodes], cell.className]) : [];
function resetTarget() {
  for (const [cell, nodes, name] of targetCells) { cell.replaceChildren(...nodes); cell.className = name; }
  $("#target-value").textContent = D.target.text;
  $("#target-note").textContent = "";
  $("#target-from").hidden = false;
}
function showTarget(loss) {
  const rows = countTarget(loss), times = rows.map((one) => one.medians[D.target.strip]).filter(known), fastest = Math.min(...times);
  for (const { row, runs, reached, medians } of rows.filter((one) => one.row)) {
    for (const cell of $$("[data-q]", row)) {
      const quantity = cell.dataset.q, median = medians[quantity], ratio = medians[D.target.strip] / fastest;
      if (quantity === "reached") {
        cell.replaceChildren(`${reached} of ${runs}`);
        if (reached < runs) cell.append(make("br"), make("small", `not reached in ${runs - reached}`));
        if (cell.dataset.pending) cell.append(make("br"), make("small", `${cell.dataset.pending} to come`));
        cell.classList.toggle("warn", reached < runs);
      } else if (quantity === "ratio") cell.textContent = known(ratio) && medians[D.target.strip] !== null ? `${fixed(ratio, 2)}×` : UNKNOWN;
      else if (quantity === "test") cell.textContent = UNKNOWN;
      else if (quantity === "strip") cell.replaceChildren();
      else cell.textContent = median !== null ? TARGET_TEXTS[quantity](median) : runs && 2 * reached <= runs ? "not reached" : UNKNOWN;
    }
  }
  const missed = rows.reduce((sum, one) => sum + one.runs - one.reached, 0), all = rows.reduce((sum, one) => sum + one.runs, 0);
  const late = D.target.stride ? ` Evaluations in this page are thinned: a step may be up to ${fixed(D.target.stride, 0)} too late.` : "";
  $("#target-value").textContent = String(loss);
  $("#target-from").hidden = true;
  $("#target-note").textContent = `${missed ? `Not reached in ${missed} of ${plural(all, "run")}.` : `Reached in ${all === 1 ? "the run" : `all ${all} runs`}.`} Marks and p are those of ${D.target.text} alone.${late}`;
}
if (targetInput) {
  targetInput.addEventListener("input", () => {
    const loss = asNumber(targetInput.value.trim());
    if (loss === null || loss === D.target.value) resetTarget(); else showTarget(loss);
  });
  $("#target-reset").addEventListener("click", () => { targetInput.value = D.target.text; resetTarget(); targetInput.focus(); });
}
