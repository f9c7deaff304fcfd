// The table of runs: what the filter leaves, in any order; the details of a run, and the rows shown as CSV.
const RUN_ROWS = 100; // that are laid out; the others wait for a click, so that the filter stays fast
let runRows = $$("#runs-table tbody tr").map((row) => [Number(row.dataset.i), row]); // in the order of the table
let allRows = false;

const textNumber = (text) => asNumber((/[−+]?[\d,]*\.?\d+(e[-−]?\d+)?/.exec(text)?.[0] ?? "").replaceAll(",", "").replaceAll("−", "-"));
const cellNumber = (cell) => (cell.dataset.v === undefined ? textNumber(cell.textContent) : Number(cell.dataset.v));

function showRows() {
  let count = 0;
  for (const [i, row] of runRows) {
    const visible = shown[i] && (++count <= RUN_ROWS || allRows);
    if (row.hidden === visible) row.hidden = !visible;
    if (!visible) closeRun(row);
  }
  const more = $("#rows-more");
  more.hidden = count <= RUN_ROWS;
  $("button", more).textContent = allRows ? `Show the first ${RUN_ROWS} rows` : `Show all ${fixed(count, 0)} rows`;
}

// ------------------------------------------------------------------ the details of a run
const shellWord = (word) => (/^[\w./:=,+-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);
function withCopy(text, label) {
  const line = make("span", null, { class: "cmd" });
  line.append(make("code", text, { tabindex: "0", role: "group", "aria-label": label }), make("button", "Copy", { type: "button", class: "copy", "data-copy": "", "aria-label": `Copy: ${label}` }));
  return line;
}
function configurationOf(i) {
  const { reference, diffs, names, values } = D.runs, diff = diffs[i];
  if (!diff) return "not recorded";
  if (D.run[i].n === reference) return "the run that all others are compared with";
  const parts = [];
  for (let k = 0; k < diff.length; k += 3) parts.push(`${names[diff[k]]} ${values[diff[k + 2]]} (${values[diff[k + 1]]})`);
  return parts.length ? `unlike ${reference} (its values in brackets): ${parts.join("; ")}` : `as ${reference}, but for the seed`;
}
function openRun(row) {
  const i = Number(row.dataset.i), name = D.run[i].n, details = D.runs.details[i] || {}, list = make("dl");
  const line = (term, content) => { const dd = make("dd"); dd.append(content); list.append(make("dt", term), dd); };
  line("Repeat", withCopy(`make reproduce RUN=${shellWord(`${D.name}/${name}`)}`, `the command that repeats ${name}`));
  line("Configuration", configurationOf(i));
  if (details.r) line("Reason", details.r);
  if (details.at) line("Attempts", String(details.at));
  if (details.ru) line("Reused from", details.ru);
  if (details.ad) line("Adjusted", details.ad.join("; "));
  if (details.al) line("Alerts", details.al.join("; "));
  line("Files", make("code", `${name}/`));
  const more = make("tr", null, { class: "more-row" }), cell = make("td", null, { colspan: row.children.length });
  cell.append(list);
  more.append(cell);
  row.after(more);
  $(".open", row).setAttribute("aria-expanded", "true");
}
function closeRun(row) {
  if (!row.nextElementSibling?.classList.contains("more-row")) return;
  row.nextElementSibling.remove();
  $(".open", row).setAttribute("aria-expanded", "false");
}

// ------------------------------------------------------------------ order and export
const naturalOrder = new Intl.Collator("en", { numeric: true });
function sortRows(head) {
  const up = head.getAttribute("aria-sort") !== "ascending", column = [...head.parentElement.children].indexOf(head);
  for (const other of $$("#runs-table thead th[aria-sort]")) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const keyed = runRows.map(([i, row]) => {
    closeRun(row);
    const cell = row.children[column];
    return [cell.classList.contains("n") ? cellNumber(cell) : cell.textContent, i, row];
  });
  // What is unknown comes last in both orders.
  const compare = (a, b) => (typeof a === "number" ? a - b : naturalOrder.compare(a, b));
  keyed.sort(([a], [b]) => (a === null) - (b === null) || (a === null ? 0 : (up ? 1 : -1) * compare(a, b)));
  runRows = keyed.map(([, i, row]) => [i, row]);
  $("#runs-table tbody").append(...runRows.map(([, row]) => row));
  showRows();
}
function csvCell(value) {
  const text = String(value ?? "");
  // What a spreadsheet would take for a formula gets an apostrophe.
  const safe = /^[=+\-@\t\r]/.test(text) && asNumber(text) === null ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
function exportRuns() {
  const heads = $$("#runs-table thead th").map((head) => head.dataset.export || head.textContent.trim());
  const value = (cell) => (cell.classList.contains("n") ? cellNumber(cell) : cell.textContent.trim().replace(/^–$/, ""));
  const rows = runRows.filter(([i]) => shown[i]).map(([i, row]) => [D.run[i].n, ...[...row.children].slice(1).map(value)]);
  const link = make("a", null, { download: `${D.name.replace(/[^\w.-]+/g, "_").slice(0, 80)}_runs.csv` });
  link.href = URL.createObjectURL(new Blob([[heads, ...rows].map((cells) => `${cells.map(csvCell).join(",")}\n`).join("")], { type: "text/csv" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

if ($("#runs-table")) {
  for (const head of $$("#runs-table thead th[aria-sort]")) {
    const button = make("button", head.textContent, { type: "button" });
    button.addEventListener("click", () => sortRows(head));
    head.replaceChildren(button);
  }
  for (const [, row] of runRows) {
    const head = row.firstElementChild, button = make("button", null, { type: "button", class: "open", "aria-expanded": "false" });
    button.append(make("span", head.textContent, { class: "clip" }));
    head.replaceChildren(button);
  }
  $("#runs-table tbody").addEventListener("click", (event) => {
    const button = event.target.closest(".open"), row = button?.closest("tr");
    if (row) (button.getAttribute("aria-expanded") === "true" ? closeRun : openRun)(row);
  });
  $("#rows-more button").addEventListener("click", () => { allRows = !allRows; showRows(); });
  $("#csv").addEventListener("click", exportRuns);
  onFilter.push(showRows);
}
