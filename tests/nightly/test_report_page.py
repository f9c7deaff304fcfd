"""The page of a large matrix, and a gallery, in a real browser: small, and they need no network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By

from axe import serious_violations
from browsing import Browser, browser
from kmatrix.report.analyse import analyse
from kmatrix.report.page import write_gallery, write_page
from kmatrix.report.write import write_summary
from large_matrix import make_large_matrix
from records_factory import make_matrix, runs_with_seeds

pytestmark = pytest.mark.nightly

MOST_BYTES = 4_000_000
VISIBLE = "return [...document.querySelectorAll('#runs tbody tr')].filter((row) => !row.hidden).length"


@pytest.fixture
def window(tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path / "downloads") as opened:
        yield opened


def test_a_page_of_1000_runs_is_small_and_answers(window, tmp_path):
    matrix = make_large_matrix(tmp_path, 1_000)
    page = write_page(matrix, analyse(matrix))
    assert page.stat().st_size <= MOST_BYTES
    window.get(page.as_uri())
    assert len(window.find_elements(By.CSS_SELECTOR, "#curves .uplot")) == 4
    assert serious_violations(window) == []
    window.find_element(By.ID, "filter").send_keys("muon seed=1")
    window.wait_until(lambda: window.execute_script(VISIBLE) == 10, "ten runs are left")
    assert window.console() == []


def test_a_gallery_leads_to_the_pages(window, tmp_path):
    matrices = []
    for day in range(2):
        runs = runs_with_seeds(3, [3.270, 3.281, 3.279], optimizer="muon")
        matrix = make_matrix(tmp_path, runs, name=f"test_matrix_results_2026112{day}_052300")
        results = analyse(matrix)
        write_page(matrix, results), write_summary(matrix, results)
        matrices.append(matrix)
    gallery = write_gallery(tmp_path, matrices)
    for width, scheme in ((1280, "light"), (400, "dark")):
        window.emulate(width, scheme=scheme)
        window.get(gallery.as_uri())
        assert serious_violations(window) == [], (width, scheme)
    assert {address.partition("#")[0] for address in window.requests()} == {gallery.as_uri()}
    window.find_element(By.CSS_SELECTOR, "main a").click()
    window.wait_until(lambda: window.current_url == matrices[0].page.as_uri(), "the link opens the page")
    assert window.console() == []
