"""Every number that a report prints is in results.json, rounded as it is printed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from kmatrix.report.analyse import analyse
from kmatrix.report.page import render_page
from kmatrix.report.write import draw_graphs, write_summary
from records_factory import FakeRun, make_matrix, runs_with_seeds

LEVELS = {"adamw": 3.2817, "lion": 3.2712, "muon": 3.2700, "sgd": 3.3950, "soap": 3.2698}
DECIMALS = r"(?<![\d.:-])\d[\d,]*\.\d{3,}"  # not of times and versions


def runs_of(*optimizers: str, seeds: int = 5, sigma: float = 0.002, **fields: Any) -> list[FakeRun]:
    """Return runs whose noise belongs in part to the seed."""
    shared = [random.Random(f"{seed}").gauss(0, 0.8 * sigma) for seed in range(1, seeds + 1)]
    return [
        run
        for name in optimizers
        for run in runs_with_seeds(
            seeds,
            [
                LEVELS[name] + known + random.Random(f"{name}{seed}").gauss(0, 0.5 * sigma)
                for seed, known in enumerate(shared)
            ],
            optimizer=name,
            **fields,
        )
    ]


ADAPTIVE = {"seeds_auto": True, "seeds": [1, 2, 3, 4, 5, 6, 7, 8], "seeds_min": 3}
FAILED = FakeRun(optimizer="sgd", status="failed", kind="nan", reason="loss is nan", stop_at=47)
SCENES: dict[str, tuple[list[FakeRun], dict[str, Any]]] = {
    "all pairs": (runs_of(*LEVELS), {}),
    "seven seeds": (runs_of("adamw", "muon", seeds=7), {}),
    "tiny noise": (runs_of("adamw", "lion", "muon", sigma=2e-5), {"min_difference": 0.004}),
    "baseline": (runs_of("adamw", "lion", "muon"), {"baseline": {"optimizer": "adamw"}}),
    "adaptive": (runs_of("lion", "muon", seeds=6), ADAPTIVE),
    "one seed each": (runs_of("adamw", "muon", seeds=1), {}),
    "a failed run": ([*runs_of("adamw", "muon", seeds=3), FAILED], {}),
    "a target": (runs_of("adamw", "muon"), {"target_loss": 3.28}),
    "several numbers of GPUs": ([one for gpus in (1, 2) for one in runs_of("muon", seeds=3, gpus=gpus)], {}),
    "axes": ([one for lr in ("1e-3", "2e-3") for one in runs_of("muon", seeds=3, axes={"learning_rate": lr})], {}),
}


def numbers_of(value: Any) -> Iterator[float]:
    """Yield every number of a JSON value, percentages of shares, and half the width of each interval."""
    if isinstance(value, dict):
        if {"low", "high"} <= value.keys() and value["high"] is not None:
            yield (value["high"] - value["low"]) / 2
        for item in value.values():
            yield from numbers_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from numbers_of(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from (abs(float(value)), 100 * abs(float(value)))
    elif isinstance(value, str):  # a value of an axis or a setting
        yield from (float(text) for text in re.findall(DECIMALS, value))


def shown_on(page: str) -> str:
    """Return the text of a page."""
    return re.sub(r"<[^>]+>", " ", page.partition("<main")[2].partition("</main>")[0])


@pytest.mark.parametrize("name", SCENES)
def test_every_number_that_a_report_prints_is_in_results_json(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs, rules = SCENES[name]
    matrix = make_matrix(tmp_path, runs, verdict=rules)
    results = analyse(matrix)
    titles: list[str] = []
    printing = "matplotlib.backends.backend_agg.FigureCanvasAgg.print_png"
    monkeypatch.setattr(printing, lambda canvas, *_, **__: titles.extend(texts_of(canvas.figure)))
    draw_graphs(matrix, results)
    write_summary(matrix, results)
    found = json.loads(matrix.results.read_text())
    known = [*numbers_of(found), sum(run["wall_s"] for run in found["runs"])]  # of the suite of junit.xml
    printed = {
        "summary": matrix.summary.read_text(),
        "report.md": matrix.report_md.read_text(),
        "results.csv": matrix.results_csv.read_text().replace(",", " "),
        "junit.xml": matrix.junit.read_text(),
        "report.html": shown_on(render_page(matrix, results)),
        "pictures": " ".join(titles),
    }
    for what, text in printed.items():
        for number in (found.replace(",", "") for found in re.findall(DECIMALS, text)):
            digits = len(number.partition(".")[2])
            assert any(f"{value:.{digits}f}" == number for value in known), f"{number} of {what}"


def texts_of(figure: Any) -> Iterator[str]:
    """Yield the titles and notes of a picture; the ticks of its axes are no numbers of a report."""
    for axes in figure.axes:
        yield from (text.get_text() for text in (axes.title, *axes.texts))
    yield from (text.get_text() for text in figure.texts)
