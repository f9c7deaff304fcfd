"""Read report.html in a real browser: it answers, follows the pointer and the filter, loads nothing, and shows text.

Screenshots are in test-artifacts/.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import kmatrix.report.formats
import pytest
from kmatrix.report.analysis import analyse
from kmatrix.report.gallery.assemble import write_gallery
from markdown_it import MarkdownIt

from axe import serious_violations
from browsing import Browser, browser
from gpu_factory import FakeGpus, record, write_phases
from kmatrix.records.paths import MatrixDir
from kmatrix.report.write import write_page
from large_matrix import make_large_matrix
from records_factory import FakeRun, make_matrix, runs_with_seeds
from story import load_json, matrices

pytestmark = pytest.mark.nightly

TINY = ("MODEL=tiny", "MAX_ITERS=12", "EVAL_INTERVAL=3", "EVAL_SAMPLES=8", "BATCH_SIZE=2", "GLOBAL_BATCH=2")
MATRIX = ("OPTIMIZER=adamw,muon", "SEED=1,2,3,4,5", "NUM_GPUS=1", "PARALLEL_JOBS=2", "LOG_INTERVAL=1")
MARKUP = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
SIZES = {100: 1.5, 1_000: 4.0}  # runs -> MB (10**6 bytes) of the page
FILTER = """const [text, done] = arguments, input = document.getElementById("filter"), began = performance.now();
input.value = text;
input.dispatchEvent(new Event("input", {bubbles: true}));
requestAnimationFrame(() => requestAnimationFrame(() => {
  const channel = new MessageChannel();
  channel.port1.onmessage = () => done(performance.now() - began);
  channel.port2.postMessage(0);
}));"""
WORDS = ("muon", "seed=1", "-seed=1", "loss<3.205", "", "finished", "")
LEGEND = "return [...document.querySelectorAll('#legend tr')].map((row) => row.innerText)"
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
# What Tab should reach, from the top: of radio buttons with one name, the one that is chosen.
ALL_REACHABLE = """const all = 'a[href], button, input, select, summary, [tabindex="0"]';
const reachable = [...document.querySelectorAll(all)]
  .filter((one) => one.checkVisibility() && !one.disabled && !(one.type === 'radio' && !one.checked));
"""
REACHABLE = f"{ALL_REACHABLE}return reachable.map((one) => one.outerHTML.slice(0, 120));"
# The number of the element with the focus, whether a line around it shows so, and whether it is in view.
FOCUSED = f"""{ALL_REACHABLE}const one = document.activeElement;
const drawn = one.type === 'radio' ? one.closest('label') : one;
const style = getComputedStyle(drawn), place = drawn.getBoundingClientRect(), bar = document.querySelector('.bar');
const top = bar.contains(one) || drawn.matches('.skip') ? 0 : bar.getBoundingClientRect().bottom;
const line = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2;
return [reachable.indexOf(one), line, place.bottom > top && place.top < innerHeight];"""
EDGES = """return [...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth + 1)
  .map((one) => [one.tabIndex === 0, one.classList.contains('more-left'), one.classList.contains('more-right')]);"""
# The columns of pixels within a figure in which the line of each optimizer is drawn.
COLUMNS = """const figure = document.getElementById(arguments[0]), canvas = figure.querySelector('canvas');
const place = figure.querySelector('.u-over').getBoundingClientRect(), all = canvas.getBoundingClientRect();
const scale = canvas.width / all.width, pixels = canvas.getContext('2d');
const [left, top] = [scale * (place.left - all.left), scale * (place.top - all.top)].map(Math.round);
const [width, height] = [scale * place.width, scale * place.height].map(Math.round);
const { data } = pixels.getImageData(left, top, width, height);
const colours = {adamw: [10, 74, 150], muon: [191, 79, 38]}, found = {};
for (const [name, colour] of Object.entries(colours)) {
  const columns = new Set();
  for (let at = 0; at < data.length; at += 4) {
    const near = colour.every((value, k) => Math.abs(data[at + k] - value) < 12);
    if (near && data[at + 3] > 240) columns.add((at / 4) % width);
  }
  found[name] = columns.size;
}
return found;"""
DRAWN = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done(true)));"
MARKED = """return [...document.querySelectorAll('.marks')].map((canvas) => {
  const blank = document.createElement('canvas');
  blank.width = canvas.width;
  blank.height = canvas.height;
  return canvas.toDataURL() !== blank.toDataURL();
});"""


@pytest.fixture
def window(tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path / "downloads") as opened:
        opened.resize(1280, 900)
        yield opened


def page_of(matrix: MatrixDir) -> Path:
    return write_page(analyse(matrix))


def open_page(window: Browser, path: Path) -> None:
    """Open a page; whatever was in the log of the browser belongs to an earlier one."""
    window.requests(), window.console()
    window.open(path.as_uri())


def check_quiet(window: Browser, page: Path) -> None:
    """Check that the page has asked for nothing, and that the browser has refused nothing and reported no error."""
    assert {address.partition("#")[0] for address in window.requests()} <= {page.as_uri(), "about:blank"}
    assert window.console() == []


def test_a_matrix_ends_with_a_page_that_answers(clone, window, tmp_path):
    results = tmp_path / "results"
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    completed = clone.make("test-matrix", f"RESULTS_DIR={results}", *TINY, *MATRIX)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (matrix,) = matrices(results)
    page = matrix / "report.html"
    assert f"Report: {page}" in completed.stdout
    again = clone.make("summary", f"RESULTS_DIR={results}")
    assert again.stderr.endswith(f"wrote {page}\n"), again.stdout + again.stderr
    check_files(matrix, again.stdout)

    open_page(window, page)
    check_verdict(window, matrix)
    check_ranking(window, matrix)
    check_cursor(window)
    check_controls(window)
    check_filter(window)
    for theme in ("light", "dark"):
        window.prefer(prefers_color_scheme=theme)
        window.run("window.scrollTo(0, 0)")
        window.save_screenshot(f"report-{theme}")
        assert serious_violations(window) == [], theme
    check_tab_order(window)
    check_focus_in_a_new_theme(window)
    check_widths(window)
    check_quiet(window, page)
    check_address(window, page)
    assert window.console() == []


def check_files(matrix: Path, summary: str) -> None:
    """Check that programs read the same losses in every file, and people in the summary."""
    results = load_json(matrix / "results.json")
    schema = load_json(Path(kmatrix.report.formats.__file__).parent / "results.schema.json")
    jsonschema.validate(results, schema)
    losses = {run["name"]: run["final_val_loss"] for run in results["runs"]}
    assert len(losses) == 10
    with (matrix / "results.csv").open(newline="", encoding="utf-8") as file:
        assert {row["run"]: float(row["final_val_loss"]) for row in csv.DictReader(file)} == losses
    suites = ElementTree.parse(matrix / "junit.xml").getroot()
    assert {case.get("name") for case in suites.iter("testcase")} == losses.keys()
    assert (suites.get("tests"), suites.get("failures"), suites.get("errors")) == ("10", "0", "0")
    html = MarkdownIt("commonmark").enable("table").render((matrix / "report.md").read_text(encoding="utf-8"))
    tree = ElementTree.fromstring(f"<html>{html}</html>")
    ranked = list(tree.find(".//table").iter("tr"))[1:]
    names = ["".join(row[1].itertext()) for row in ranked]
    assert names == results["rankings"][0]["order"]
    for row, name in zip(ranked, names, strict=True):
        mean = statistics.fmean(losses[run] for run in results_group(results, name)["counted"])
        assert row[2].text == f"{mean:.{len(row[2].text.partition('.')[2])}f}"
        assert f"{mean:.4f}" in summary
    assert results["verdict"][0].split(",")[0] in " ".join(summary.split())
    assert (matrix / "summary_report.txt").read_text(encoding="utf-8").rstrip() in summary


def results_group(results: Any, name: str) -> Any:
    (group,) = [one for one in results["groups"] if one["name"] == name]
    return group


def check_verdict(window: Browser, matrix: Path) -> None:
    """Check that the sentence names the two optimizers as results.json ranks them."""
    headline = window.run("return document.querySelector('#verdict h1').innerText")
    (ranking,) = load_json(matrix / "results.json")["rankings"]
    leader = ranking["order"][0].split(",")[0]
    assert leader in headline
    assert {"adamw", "muon"} <= set(re.findall(r"\w+", headline)), headline
    assert window.run("return document.title").endswith(matrix.name)


def check_ranking(window: Browser, matrix: Path) -> None:
    rows = window.run("return [...document.querySelectorAll('.rank tbody tr[data-g]')].map((row) => row.innerText)")
    results = load_json(matrix / "results.json")
    means = {group["name"]: group["mean_final_val_loss"] for group in results["groups"]}
    assert len(rows) == 2
    for row, name in zip(rows, results["rankings"][0]["order"], strict=True):
        assert name.split(",")[0] in row
        assert f"{means[name]:.4f}" in row


def check_cursor(window: Browser) -> None:
    """Check that pointing at one figure marks the same step of each configuration in both, and changes the readout."""
    window.run_until_called(DRAWN)
    at_rest = window.run(LEGEND)
    assert len(at_rest) == 2
    assert all("5 of 5" in row for row in at_rest)
    assert window.run(MARKED) == [False, False]
    window.run("document.querySelector('input[name=part][value=start]').click()")  # marks above the view are not drawn
    window.run_until_called(DRAWN)
    seen = [at_rest]
    for figure, share in (("#plot1", 0.3), ("#plot1", 0.6), ("#plot0", 0.5)):
        window.point_at(figure, share)
        seen.append(
            window.wait_until(lambda: (rows := window.run(LEGEND)) != seen[-1] and rows, f"{figure} at {share}")
        )
        window.wait_until(lambda: window.run(MARKED) == [True, True], "marks in both figures")
    window.run("document.getElementById('plot0').focus()")
    window.type("\ue011")  # Home
    window.wait_until(lambda: "step 0" in window.run("return document.getElementById('spoken').textContent"), "a key")


def check_controls(window: Browser) -> None:
    """Check that each control of the figures changes what is painted."""

    def painted() -> list[str]:
        return window.run("return ['plot0', 'plot1'].map((id) => document.querySelector(`#${id} canvas`).toDataURL())")

    pictures = [painted()]
    for selector in ("#logy", "#logx", "#seeds", "input[name=mode][value=gap]", "input[name=metric][value=train]"):
        window.run("document.querySelector(arguments[0]).click()", selector)
        pictures.append(window.wait_until(lambda: (now := painted()) != pictures[-1] and now, f"{selector} is drawn"))
    assert window.run("return !document.getElementById('smooth-label').hidden")
    assert window.run("return document.getElementById('smooth-words').textContent") == "half-life 1 step"
    address = window.run("return location.href")
    assert "mode=gap" in address
    window.open("about:blank")  # an address that differs in its view alone would not load the page again
    window.open(address.partition("#")[0])


def check_filter(window: Browser) -> None:
    """Check that the filter changes lists and figures, and no number of the verdict and the ranking."""
    judged = "return [...document.querySelectorAll('#verdict, .rank')].map((one) => one.innerText)"
    before = window.run(judged)
    window.type("/")
    window.type("muon seed=1,2")
    window.wait_until(lambda: "2 of 10 runs" in window.text, "two runs are left")
    window.wait_until(lambda: [row.count("2 of 5") for row in window.run(LEGEND)] == [1], "one line is left")
    visible = "return [...document.querySelectorAll('#runs-table tbody tr')].filter((row) => !row.hidden).length"
    assert window.run(visible) == 2
    assert window.run("return document.querySelectorAll('.rank tr.dim').length") == 1
    assert window.run(judged) == before
    assert sorted(row["seed"] for row in window.download_csv("#csv")) == ["1", "2"]
    window.run("document.getElementById('filter').focus()")
    window.type("\ue00c")  # Escape
    window.wait_until(lambda: window.run(visible) == 10, "all runs are back")


def check_address(window: Browser, page: Path) -> None:
    """Check that the address of a view shows it again, and that one that makes no sense shows the page."""
    window.run("document.querySelector('input[name=mode][value=gap]').click()")
    window.run("document.getElementById('logx').click()")
    window.run("document.getElementById('filter').focus()")
    window.type("muon")
    window.wait_until(lambda: "filter=muon" in window.run("return location.hash"), "the filter is in the address")
    address = window.run("return location.href")
    shown = "return [document.querySelector('input[name=mode]:checked').value, document.getElementById('logx').checked]"
    for opened, text, view in (
        (address, "muon", ["gap", True]),
        (f"{page.as_uri()}#mode=%00&logx=&smooth=1e999&colour=<b>&axis0=money&filter=x%3C%3D", "x<=", ["loss", False]),
        (page.as_uri(), "", ["loss", False]),
    ):
        window.open("about:blank")
        window.open(opened)
        assert window.run("return document.getElementById('filter').value") == text
        assert window.run(shown) == view
    window.requests()


def check_tab_order(window: Browser) -> None:
    """Check that Tab reaches every control once, in the order of the page, each in view and with a line around it."""
    window.prefer(prefers_reduced_motion="reduce")  # what comes into view is there at once
    reachable = window.run(REACHABLE)
    # Where Tab begins: an element that had the focus.
    window.run("document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')")
    window.run("scrollTo({top: 0, behavior: 'instant'})")
    assert len(reachable) > 30
    for at, element in enumerate(reachable):
        window.type("\ue004")  # Tab
        assert window.run(FOCUSED) == [at, True, True], element
    window.prefer()


def check_focus_in_a_new_theme(window: Browser) -> None:
    """Check that the timelines, which are drawn again for another theme, keep the focus."""
    window.run(
        "const lanes = document.querySelectorAll('#timeline-lanes .plot'); lanes[1].focus(); lanes[1].dataset.old = 1"
    )
    window.prefer(prefers_color_scheme="dark")
    window.wait_until(
        lambda: not window.run("return document.querySelector('[data-old]')"), "the lanes are drawn again"
    )
    lanes = "return [...document.querySelectorAll('#timeline-lanes .plot')].indexOf(document.activeElement)"
    assert window.run(lanes) == 1
    window.prefer()


def check_widths(window: Browser) -> None:
    """Check that a telephone and a large screen show the page without scrolling sideways, and wide tables say so."""
    window.prefer(prefers_color_scheme="light")
    for width, height in ((400, 800), (3840, 2160)):
        window.resize(width, height)
        window.wait_until(lambda: window.run(OVERFLOW) == 0, f"{width} px hold the page")
        window.save_screenshot(f"report-{width}")
        assert serious_violations(window) == [], width
        if width == 400:
            check_edges(window)
    window.resize(1280, 900)


def check_edges(window: Browser) -> None:
    """Check that a table that is cut shows at which edge it goes on."""
    at_rest = window.run(EDGES)
    assert at_rest == [[True, False, True]] * len(at_rest) != []
    window.run("for (const one of document.querySelectorAll('.scroll')) one.scrollTo({left: 9e9, behavior: 'instant'})")
    window.wait_until(lambda: window.run(EDGES) == [[True, True, False]] * len(at_rest), "the other edge is marked")


def two_optimizers(seeds: int) -> list[FakeRun]:
    means = {"muon": 3.280, "adamw": 3.292}
    return [
        run
        for optimizer, mean in means.items()
        for run in runs_with_seeds(seeds, [mean + 0.001 * (seed % 3) for seed in range(seeds)], optimizer=optimizer)
    ]


def test_the_verdict_needs_no_scripts_and_no_screen(window, tmp_path):
    page = page_of(make_matrix(tmp_path, two_optimizers(5)))
    open_page(window, page)
    headline = window.run("return document.querySelector('#verdict h1').innerText")
    window.prefer("print")
    static = "return getComputedStyle(document.querySelector('#curves figure.nojs')).display"
    assert window.run(static) == "block"
    window.prefer()
    window.allow_scripts(False)
    open_page(window, page)
    assert headline in window.text
    assert "Ranking by mean final validation loss" in window.text
    assert "Mean validation loss by step" in window.text
    assert "gpt2_muon_seed5_1cpu" in window.text
    window.save_screenshot("report-without-scripts")
    check_quiet(window, page)


def test_both_of_two_configurations_are_in_view_after_the_fall(window, tmp_path):
    """With few evaluations, the last ones of the better one span far less than the distance of the two."""
    shape = {"eval_interval": 90, "steps": 100}
    runs = [
        run
        for optimizer, loss in (("muon", 2.42), ("adamw", 2.69))
        for run in runs_with_seeds(2, [loss, loss + 0.001], optimizer=optimizer, **shape)
    ]
    open_page(window, page_of(make_matrix(tmp_path, runs)))
    window.run_until_called(DRAWN)
    for figure in ("plot0", "plot1"):
        columns = window.run(COLUMNS, figure)
        assert set(columns) == {"muon", "adamw"}
        assert min(columns.values()) > 20, columns  # pixels from left to right


def reach_cells(window: Browser) -> dict[str, dict[str, str]]:
    """Return the cells of the table of the target: configuration -> quantity -> text."""
    rows = window.run(
        "return [...document.querySelectorAll('#target tbody tr')].map((row) => [row.querySelector('th').innerText, "
        "Object.fromEntries([...row.querySelectorAll('[data-q]')].map((cell) => [cell.dataset.q, cell.innerText]))])"
    )
    return {name.strip(): cells for name, cells in rows}


@pytest.mark.parametrize("target", [3.5, 3.2805, 3.2815, 3.2001])
def test_the_target_is_counted_again_for_another_loss(window, tmp_path, target):
    """What the script counts for a target is what the report counts if it is TARGET_LOSS."""
    broken = [
        FakeRun(optimizer="sgd", seed=1, axes={"seed": "1"}, status="failed", kind="nan", stop_at=40),
        FakeRun(optimizer="sgd", seed=2, axes={"seed": "2"}, final_loss=3.3),
        FakeRun(optimizer="sgd", seed=3, axes={"seed": "3"}, final_loss=3.4),
    ]
    pages = {}
    for value in (3.2935, target):
        rules = {"target_loss": value}
        pages[value] = page_of(make_matrix(tmp_path / str(value), [*two_optimizers(5), *broken], verdict=rules))
    open_page(window, pages[target])
    expected, quantities = reach_cells(window), ("reached", "step", "tokens", "seconds")
    open_page(window, pages[3.2935])
    before = reach_cells(window)
    window.run("document.getElementById('target-loss').focus(); document.getElementById('target-loss').select()")
    window.type(str(target))
    for name, cells in reach_cells(window).items():
        for quantity in quantities:
            assert cells[quantity] == expected[name][quantity], (name, quantity)
        ratios = cells["ratio"], expected[name]["ratio"]
        if ratios[0] != ratios[1]:  # the page has seconds with one decimal
            assert float(ratios[0][:-1]) == pytest.approx(float(ratios[1][:-1]), abs=0.02)
    assert window.run("return document.querySelector('#target h2').innerText") == f"Time and cost to a loss of {target}"
    note = window.run("return document.getElementById('target-note').innerText")
    assert "not reached in" not in note
    assert ("Not reached in" in note) == any("not reached in" in cells["reached"] for cells in expected.values())
    window.save_screenshot("report-target")
    window.run("document.getElementById('target-reset').click()")
    assert reach_cells(window) == before
    check_quiet(window, pages[3.2935])


def test_hostile_text_is_text_in_a_browser(window, tmp_path):
    hidden = f"\x1b[31m\u202e{MARKUP}"
    runs = [
        *runs_with_seeds(3, [3.1, 3.2, 3.3], axes={"note": MARKUP.replace("/", "|")}),
        FakeRun(
            optimizer="sgd",
            axes={"note": "b"},
            status="failed",
            reason=hidden,
            stop_at=20,
            result=False,
            log_tail=(hidden, "x" * 10_000),
        ),
    ]
    page = page_of(make_matrix(tmp_path, runs, cuts=[(3, hidden)]))
    open_page(window, page)
    window.run("for (const one of document.querySelectorAll('details')) one.open = true;")
    window.run("for (const one of document.querySelectorAll('#runs .open')) one.click();")
    assert window.run("return document.title") != "owned"
    assert window.run("return document.querySelectorAll('img, iframe, object, embed').length") == 0
    assert "<script>document.title='owned'" in window.text
    assert "␛[31m" in window.text
    assert window.run(OVERFLOW) == 0
    window.resize(400, 800)
    window.wait_until(lambda: window.run(OVERFLOW) == 0, "400 px hold the page")
    assert serious_violations(window) == []
    check_quiet(window, page)
    refused = "try { document.body.insertAdjacentHTML('beforeend', '<b>x</b>'); return false; } catch { return true; }"
    assert window.run(refused), "a script can turn text into markup"


def test_the_selection_is_exported_as_text_that_no_spreadsheet_calculates(window, tmp_path):
    formula = '=HYPERLINK("http:||x","a")'
    runs = [run for note in (formula, "b") for run in runs_with_seeds(2, [3.1, 3.200_001], axes={"note": note})]
    page = page_of(make_matrix(tmp_path, runs))
    open_page(window, page)
    window.run("document.getElementById('filter').focus()")
    window.type("seed=2")
    window.wait_until(lambda: "2 of 4 runs" in window.text, "two runs are left")

    rows = window.download_csv("#csv")

    assert [row["note"] for row in rows] == [f"'{formula}", "b"]
    assert [row["run"] for row in rows] == [run.name for run in runs if run.seed == 2]
    assert [float(row["final loss"]) for row in rows] == [3.200_001, 3.200_001]
    assert [row["best loss"] for row in rows] == [row["final loss"] for row in rows]
    check_quiet(window, page)


# Colours of the devices in a lane of the timeline, each with the number of pixels that have exactly that colour.
PIXELS = """
const canvas = document.querySelectorAll('#timeline-lanes canvas')[arguments[0]];
const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height), counts = {};
for (let k = 0; k < data.length; k += 4) {
  const colour = data[k + 3] === 255 ? `rgb(${data[k]}, ${data[k + 1]}, ${data[k + 2]})` : '';
  counts[colour] = (counts[colour] || 0) + 1;
}
const lines = [...document.querySelectorAll('#timeline-legend line')];
return lines.map((line) => counts[getComputedStyle(line).stroke] || 0);
"""


@pytest.mark.parametrize("count", [2, 3, 8])
def test_devices_with_equal_values_do_not_hide_each_other(window, tmp_path, count):
    (run,) = runs = [FakeRun(gpus=count, device="cuda")]
    matrix = make_matrix(tmp_path, runs)
    same = FakeGpus(memory=(9_000.0,) * count, power=(150.0,) * count, utilization=(50.0,) * count, samples=60)
    record(matrix.run(run.name), same)
    page = page_of(matrix)
    open_page(window, page)
    window.wait_until(lambda: window.run(READOUT), "the run is drawn")
    for lane in range(3):
        pixels = window.run(PIXELS, lane)
        assert len(pixels) == count
        assert min(pixels) > 0.5 * max(pixels) / (2 if count > 7 else 1), pixels  # the eighth has the first's colour
    window.run("document.getElementById('timeline').scrollIntoView({behavior: 'instant'})")
    window.save_screenshot(f"report-equal-devices-{count}")
    check_quiet(window, page)


POWER, LOAD, MEMORY = (150.0, 210.0, 149.0, 151.0), (95.0, 60.0, 96.0, 94.0), (18_800.0, 12_750.0, 12_825.0, 12_780.0)
READOUT = "return [...document.querySelectorAll('#timeline-legend tr')].map((row) => row.innerText.split('\\t'))"


def test_recordings_are_read_out_with_the_keyboard(window, tmp_path):
    runs = [FakeRun(optimizer="muon", gpus=4, device="cuda"), FakeRun(gpus=12, device="cuda", final_loss=3.4)]
    matrix = make_matrix(tmp_path, runs)
    few, many = (matrix.run(run.name) for run in runs)
    record(few, FakeGpus(memory=MEMORY, power=POWER, utilization=LOAD, samples=60))
    record(many, FakeGpus(memory=(9_000.0,) * 12, power=tuple(map(float, range(100, 112))), utilization=(50.0,) * 12))
    write_phases(few, ("set-up", 0, 8), ("evaluation", 20, 23), ("checkpoint", 23, 25))
    page = page_of(matrix)
    open_page(window, page)

    at_rest = window.wait_until(lambda: window.run(READOUT), "the first run is drawn")
    assert at_rest == [
        [f"GPU {k}", f"mean {LOAD[k]:.0f} %", f"mean {POWER[k]:.0f} W", f"mean {MEMORY[k] / 1024:.1f} GiB"]
        for k in range(4)
    ]
    shades = window.run("return [...document.querySelectorAll('#timeline-note .phasekey')].map((one) => one.innerText)")
    assert shades == ["set-up", "evaluation", "checkpoint", "ending"]  # after the end of the trainer
    window.run("document.querySelector('#timeline-lanes .plot').focus()")
    for keys in ("\ue014", "\ue008\ue014\ue008"):  # Right; Right with Shift
        window.type(keys)
        moved = window.wait_until(lambda: (now := window.run(READOUT)) != at_rest and now, "the cursor moves")
        for k, row in enumerate(moved):
            assert row[:3] == [f"GPU {k}", f"{LOAD[k]:.0f} %", f"{POWER[k]:.0f} W"]
    assert window.run("return document.activeElement.matches('.plot')")
    assert window.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"

    window.run("document.getElementById('timeline-run').focus()")
    window.type("\ue015")  # Down
    window.wait_until(lambda: [row[0] for row in window.run(READOUT)] == ["all 12 devices"], "the second run is drawn")
    window.run("document.querySelector('#timeline-lanes .plot').focus()")
    window.type("\ue014")
    window.wait_until(lambda: window.run(READOUT)[0][0] == "GPU 0", "Right reads out the first device")
    window.type("\ue015")
    window.wait_until(lambda: window.run(READOUT)[0][0] == "GPU 1", "Down reads out the next one")
    for theme in ("light", "dark"):
        window.prefer(prefers_color_scheme=theme)
        window.run("document.getElementById('timeline').scrollIntoView({behavior: 'instant'})")
        window.save_screenshot(f"report-devices-{theme}")
        assert serious_violations(window) == [], theme
    behaviour = "return getComputedStyle(document.documentElement).scrollBehavior"
    window.prefer(prefers_reduced_motion="reduce")
    assert window.run(behaviour) == "auto"
    window.prefer(prefers_reduced_motion="no-preference")
    assert window.run(behaviour) == "smooth"
    check_quiet(window, page)


def test_a_gallery_needs_no_network_and_leads_to_the_pages(window, tmp_path):
    names = [f"test_matrix_results_2026112{day}_052300" for day in range(3)]
    matrices = [make_matrix(tmp_path, two_optimizers(3), name=name) for name in names[:2]]
    pages = [page_of(matrix) for matrix in matrices]
    (tmp_path / names[2]).mkdir()
    gallery = write_gallery(tmp_path, [*matrices, MatrixDir(tmp_path / names[2])])
    open_page(window, gallery)
    assert "the matrix cannot be read" in window.text
    for theme, width in (("light", 1280), ("dark", 1280), ("light", 400), ("light", 3840)):
        window.prefer(prefers_color_scheme=theme)
        window.resize(width, 900)
        window.wait_until(lambda: window.run(OVERFLOW) == 0, "the page holds the gallery")
        window.save_screenshot(f"gallery-{theme}-{width}")
        assert serious_violations(window) == [], (theme, width)
    check_quiet(window, gallery)
    window.resize(1280, 900)
    window.click("main a")
    window.wait_until(lambda: window.run("return location.href") == pages[0].as_uri(), "the link opens the page")


@pytest.mark.parametrize("count", SIZES)
def test_pages_of_large_matrices_are_small_and_quick(window, tmp_path, capsys, count):
    page = page_of(make_large_matrix(tmp_path, count))
    size = page.stat().st_size / 1e6
    open_page(window, page)
    window.wait_until(lambda: window.run("return document.querySelectorAll('.uplot').length") >= 2, "figures are drawn")
    times = [window.run_until_called(FILTER, word) for word in WORDS]
    with capsys.disabled():  # how quick depends on the machine: printed for the reader, not asserted
        middle = statistics.median(times)
        print(f"\n{count:,} runs: {size:.2f} MB, filter: median {middle:.0f} ms, worst {max(times):.0f} ms")
    assert size <= SIZES[count]
    assert window.run("return document.getElementById('runs-count').textContent") == f"{count:,} runs"
    check_quiet(window, page)
