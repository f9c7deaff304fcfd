// Buttons, keys, the theme, print and the bar; then everything is drawn for the first time.
async function copy(button) {
  const code = $("code", button.parentElement);
  try { await navigator.clipboard.writeText(code.textContent); } catch { // no permission: select the text, so that Ctrl+C takes it
    const range = document.createRange();
    range.selectNodeContents(code);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    if (!document.execCommand("copy")) { button.textContent = "Press Ctrl+C"; return; }
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}
function showAll(button) {
  const table = $("table", button.parentElement.previousElementSibling), all = table.classList.toggle("all");
  button.setAttribute("aria-expanded", String(all));
  button.textContent = button.textContent.replace(/^(Show all|Show the first of)/, all ? "Show the first of" : "Show all");
}
document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.copy !== undefined) copy(button);
  else if (button.dataset.all !== undefined) showAll(button);
  else if (button.dataset.term) toggleTerm(button.dataset.term);
});
const filterInput = $("#filter");
filterInput.addEventListener("input", () => setFilter(filterInput.value));
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) { event.preventDefault(); filterInput.focus(); }
  if (event.key === "Escape" && event.target === filterInput) setFilter("");
});

const THEMES = { auto: ["Auto", "Auto: the theme of the system"], light: ["Light", "Light theme"], dark: ["Dark", "Dark theme"] };
const themeButton = $("#theme");
let theme = document.documentElement.dataset.theme || "auto";
function showTheme() {
  const [text, label] = THEMES[theme];
  themeButton.textContent = text;
  themeButton.setAttribute("aria-label", label);
  palette = {};
  for (const draw of onTheme) draw();
}
themeButton.addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme = names[(names.indexOf(theme) + 1) % names.length];
  if (theme === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("kmatrix-theme", theme); } catch { /* no storage: until the page is closed */ }
  showTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => showTheme());

const opened = []; // details that only print opens
addEventListener("beforeprint", () => { for (const details of $$("details[data-print]:not([open])")) { details.open = true; opened.push(details); } });
addEventListener("afterprint", () => { for (const details of opened.splice(0)) details.open = false; });

const links = new Map($$(".bar nav a").map((link) => [link.hash.slice(1), link]));
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) {
    for (const link of links.values()) link.removeAttribute("aria-current");
    links.get(entry.target.id)?.setAttribute("aria-current", "true");
  }
}, { rootMargin: "-20% 0px -70% 0px" });
for (const section of $$("main > section")) seen.observe(section);

// A table that is wider than the page can be scrolled with the keyboard, and shows at which edge it goes on.
function showEdges(table) {
  const hidden = table.scrollWidth - table.clientWidth, at = Math.abs(table.scrollLeft);
  table.classList.toggle("more-left", hidden > 1 && at > 1);
  table.classList.toggle("more-right", hidden > 1 && at < hidden - 1);
}
const scrollers = new ResizeObserver((entries) => {
  for (const table of new Set(entries.map(({ target }) => target.closest(".scroll")))) {
    showEdges(table);
    if (table.scrollWidth > table.clientWidth + 1) {
      table.setAttribute("tabindex", "0");
      table.setAttribute("role", "group");
      table.setAttribute("aria-label", `${$("h2", table.closest("section"))?.textContent.trim() || "Table"}: table, scrolls sideways`);
    } else for (const name of ["tabindex", "role", "aria-label"]) table.removeAttribute(name);
  }
});
for (const table of $$(".scroll")) {
  scrollers.observe(table);
  if (table.firstElementChild) scrollers.observe(table.firstElementChild); // rows that are added may widen it
  table.addEventListener("scroll", () => showEdges(table), { passive: true });
}

readAddress();
showTheme();
applyFilter();
