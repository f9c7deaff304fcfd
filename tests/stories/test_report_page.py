"""Open report.html in a real browser: it answers, asks for nothing, and shows all text as text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By

from axe import serious_violations
from browsing import Browser, browser
from gpu_factory import FakeGpus, record
from kmatrix.report.analyse import analyse
from kmatrix.report.page import write_page
from records_factory import FakeRun, make_matrix, runs_with_seeds

pytestmark = pytest.mark.story

MARKUP = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
MEANS = {"muon": 3.280, "adamw": 3.292}
RUNS = [
    replace(run, device="cuda", gpus=2)
    for optimizer, mean in MEANS.items()
    for run in runs_with_seeds(3, [mean, mean + 0.001, mean - 0.0001 * len(optimizer)], optimizer=optimizer)
]
VISIBLE = "return [...document.querySelectorAll(arguments[0])].filter((one) => !one.hidden).map((one) => one.innerText)"
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
SELECT = "const one = document.querySelector('select'); one.value = 'tokens'; one.dispatchEvent(new Event('change'))"
DOUBLE_CLICK = "document.querySelector('.u-over').dispatchEvent(new MouseEvent('dblclick'))"
PAINTED = "return [...document.querySelectorAll('#curves canvas')].map((one) => one.toDataURL())"
LEGEND = "#curves figure:first-child .u-series:not(.edge)"
ROWS = "#runs tbody tr"


@pytest.fixture(scope="module")
def window(tmp_path_factory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser") / "downloads") as opened:
        yield opened


@pytest.fixture
def page(window, tmp_path) -> Iterator[Path]:
    """Open the page of two optimizers with recorded GPUs; at the end it has asked for nothing, and reported nothing."""
    matrix = make_matrix(tmp_path, RUNS)
    record(matrix.run(RUNS[0].name), FakeGpus(memory=(9_000.0,) * 2, power=(150.0, 210.0), samples=60))
    yield from opened(window, write_page(matrix, analyse(matrix)))


def opened(window: Browser, path: Path) -> Iterator[Path]:
    window.emulate()
    window.requests(), window.console()
    window.get(path.as_uri())
    yield path
    assert {address.partition("#")[0] for address in window.requests()} == {path.as_uri()}
    assert window.console() == []


def visible(window: Browser, selector: str) -> list[str]:
    return window.execute_script(VISIBLE, selector)


def test_curves_answer_to_the_pointer_and_to_their_controls(page, window):
    at_rest = visible(window, LEGEND)
    assert [row.split()[0] for row in at_rest] == ["steps", *MEANS]
    window.point_at("#curves figure:nth-child(2) .u-over", 0.9)
    # Both figures show the losses of their own axis at this share of the training.
    steps, *losses = window.wait_until(
        lambda: (rows := visible(window, LEGEND)) != at_rest and [row.split()[-1] for row in rows], "values are shown"
    )
    assert 80 < float(steps) <= 100
    assert all(3.2 < float(loss) < 3.6 for loss in losses)
    for action in (SELECT, DOUBLE_CLICK):
        seen = window.execute_script(PAINTED)
        window.execute_script(action)
        window.wait_until(lambda seen=seen: window.execute_script(PAINTED) != seen, action)


def test_three_values_of_an_axis_are_a_figure_of_the_loss_over_it(window, tmp_path):
    runs = [FakeRun(axes={"lr": f"{lr}e-4"}, final_loss=3 + abs(lr - 3) / 10) for lr in (1, 3, 9)]
    matrix = make_matrix(tmp_path, runs)
    for _ in opened(window, write_page(matrix, analyse(matrix))):
        assert [one.split("\n")[0] for one in visible(window, "#curves figure")[3:]] == ["Final loss over lr"]
        window.point_at("[data-x=lr] .u-over", 0.95)
        window.wait_until(
            lambda: visible(window, "[data-x=lr] .u-series")[0].split()[-1] == "0.0009", "the last value is shown"
        )


def test_the_filter_dims_and_hides_and_changes_no_number(page, window):
    verdict = visible(window, "#verdict, #ranking table")
    field = window.find_element(By.ID, "filter")
    for words, kept in (("muon seed=1", 1), ("optimizer=adamw", 3), ("nothing", 0), ("finished", 6), ("seed=3", 2)):
        field.clear()
        field.send_keys(words)
        window.wait_until(lambda kept=kept: len(visible(window, ROWS)) == kept, words)
        assert f"{kept} of 6 runs" in window.text
        dimmed = visible(window, "#ranking .dim")
        assert bool(dimmed) == (kept in (0, 3) or "muon" in words)
    assert visible(window, "#verdict, #ranking table") == verdict


def test_runs_are_sorted_by_a_click_on_a_title(page, window):
    titles = window.find_elements(By.CSS_SELECTOR, "#runs thead th button")
    (loss,) = [one for one in titles if one.text == "val loss"]
    for reverse in (False, True):
        loss.click()
        losses = [row.split()[4] for row in visible(window, ROWS)]
        assert losses == sorted(losses, key=float, reverse=reverse)
    titles[0].click()
    names = [row.split()[0] for row in visible(window, ROWS)]
    assert names == sorted(names)


def test_every_screen_and_paper_holds_the_page_without_serious_barriers(page, window):
    for width, media, scheme in ((1280, "", "light"), (1280, "", "dark"), (400, "", "light"), (794, "print", "dark")):
        window.emulate(width, media=media, scheme=scheme)
        window.get(page.as_uri())
        assert window.execute_script(OVERFLOW) <= 0, (width, media)
        if not media:
            assert serious_violations(window) == [], (width, scheme)


def test_without_scripts_all_numbers_are_there_to_read(page, window):
    headline = window.find_element(By.TAG_NAME, "h1").text
    assert set(MEANS) <= set(re.findall(r"\w+", headline))
    window.allow_scripts(False)
    window.get(page.as_uri())
    text = window.text
    window.allow_scripts(True)
    assert headline in text
    assert all(run.name in text for run in RUNS)


def test_hostile_text_is_text(window, tmp_path):
    failed = {"status": "failed", "reason": MARKUP, "stop_at": 20, "result": False, "log_tail": (MARKUP, "x" * 10_000)}
    runs = [replace(run, axes={**run.axes, "note": MARKUP.replace("/", "|")}) for run in RUNS]
    matrix = make_matrix(tmp_path, [*runs, FakeRun(optimizer="sgd", **failed)], cuts=[(3, MARKUP)])
    for _ in opened(window, write_page(matrix, analyse(matrix))):
        assert window.title != "owned"
        assert window.find_elements(By.CSS_SELECTOR, "img, iframe, object") == []
        assert MARKUP in window.text
        for width in (1280, 400):
            window.emulate(width)
            assert window.execute_script(OVERFLOW) == 0
