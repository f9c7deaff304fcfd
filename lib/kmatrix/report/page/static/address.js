// What is shown is part of the address, so that a link or a bookmark shows it again: #filter=muon&mode=gap.
const ADDRESS_RADIOS = ["metric", "mode", "part", "axis0", "axis1"], ADDRESS_BOXES = ["seeds", "bands", "logx", "logy"], ADDRESS_VALUES = ["smooth", "colour"];
function writeAddress() {
  const words = new URLSearchParams();
  if (filter.text) words.set("filter", filter.text);
  for (const name of ADDRESS_RADIOS) {
    const chosen = $(`#curves input[name=${name}]:checked`);
    if (chosen && !chosen.defaultChecked) words.set(name, chosen.value);
  }
  for (const id of ADDRESS_BOXES) { const box = $(`#${id}`); if (box && box.checked !== box.defaultChecked) words.set(id, box.checked ? "y" : "n"); }
  for (const id of ADDRESS_VALUES) { const input = $(`#${id}`); if (input?.value && input.value !== input.defaultValue) words.set(id, input.value); }
  const text = words.toString();
  // Without a choice, the address of a section stays.
  if (!text && !location.hash.includes("=")) return;
  try { history.replaceState(null, "", `#${text}`); } catch { /* a sandboxed page has no address of its own */ }
}
function readAddress() { // values that no control has are ignored
  if (!location.hash.includes("=")) return;
  const words = new URLSearchParams(location.hash.slice(1));
  const changed = (input) => input.dispatchEvent(new Event(input.type === "range" ? "input" : "change"));
  for (const name of ADDRESS_RADIOS) for (const radio of $$(`#curves input[name=${name}]`)) if (radio.value === words.get(name) && !radio.disabled) { radio.checked = true; changed(radio); }
  for (const id of ADDRESS_BOXES) { const box = $(`#${id}`); if (box && words.has(id)) { box.checked = words.get(id) === "y"; changed(box); } }
  for (const id of ADDRESS_VALUES) {
    const input = $(`#${id}`), former = input?.value;
    if (!input || !words.has(id)) continue;
    input.value = words.get(id);
    if (input.value !== words.get(id)) input.value = former;
    else changed(input);
  }
  filter.text = words.get("filter") ?? "";
  $("#filter").value = filter.text;
}
onFilter.push(writeAddress);
