"""Open report.html in a real browser: it answers, follows the pointer and the filter, and asks for nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kmatrix.report.analysis import analyse

from browsing import Browser, browser
from kmatrix.report.write import write_page
from records_factory import make_matrix, runs_with_seeds

pytestmark = pytest.mark.story

LEGEND = "return [...document.querySelectorAll('#legend tr')].map((row) => row.innerText)"
DRAWN = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done(true)));"
ROWS = "return [...document.querySelectorAll('#runs-table tbody tr')].filter((row) => !row.hidden).length"


@pytest.fixture
def window(tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path / "downloads") as opened:
        opened.resize(1280, 900)
        yield opened


def test_the_page_answers_and_needs_no_network(window, tmp_path):
    means = {"muon": 3.280, "adamw": 3.292}
    runs = [
        run
        for optimizer, mean in means.items()
        for run in runs_with_seeds(
            5, [mean + 0.001 * (seed * len(optimizer) % 7) for seed in range(5)], optimizer=optimizer
        )
    ]
    page = write_page(analyse(make_matrix(tmp_path, runs)))
    window.requests(), window.console()
    window.open(page.as_uri())
    window.run_until_called(DRAWN)
    headline = window.run("return document.querySelector('#verdict h1').innerText")
    assert set(means) <= set(re.findall(r"\w+", headline)), headline
    ranked = window.run("return [...document.querySelectorAll('.rank tbody tr[data-g]')].map((row) => row.innerText)")
    assert [name in row for name, row in zip(means, ranked, strict=True)] == [True, True]

    # The pointer marks a step; the filter changes lists and figures, and no number of the verdict.
    at_rest = window.run(LEGEND)
    assert len(at_rest) == 2
    window.point_at("#plot0", 0.5)
    window.wait_until(lambda: window.run(LEGEND) != at_rest, "the readout follows the pointer")
    window.type("/")
    window.type("muon seed=1,2")
    window.wait_until(lambda: window.run(ROWS) == 2, "two runs are left")
    assert window.run("return document.querySelector('#verdict h1').innerText") == headline
    assert sorted(row["seed"] for row in window.download_csv("#csv")) == ["1", "2"]

    # Without scripts, all is there to read.
    window.allow_scripts(False)
    window.open(page.as_uri())
    assert headline in window.text
    assert "gpt2_muon_seed5_1cpu" in window.text
    assert {address.partition("#")[0] for address in window.requests()} <= {page.as_uri(), "about:blank"}
    assert window.console() == []
