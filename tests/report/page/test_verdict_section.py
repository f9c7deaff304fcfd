"""The verdict and the rankings on the page: their numbers are those of results.json and of SciPy, digit for digit."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from html_reader import Element, read_html
from kmatrix.records.files import write_json
from kmatrix.report.analysis import analyse
from kmatrix.report.formats.results_json import write_results
from kmatrix.report.page.assemble import render_page
from page_sections import page, rows, script_data, section
from records_factory import FakeRun, make_matrix, runs_with_seeds

LEVELS = {"adamw": 3.2817, "lion": 3.2712, "muon": 3.2700, "sgd": 3.3950, "soap": 3.2698}
SIGMA = 0.002


def losses_of(optimizer: str, seeds: Sequence[int], sigma: float = SIGMA) -> list[float]:
    """Return losses of which a part of the noise belongs to the seed."""
    shared = [random.Random(f"{seed}").gauss(0, 0.8 * sigma) for seed in seeds]
    own = [random.Random(f"{optimizer}{seed}").gauss(0, 0.5 * sigma) for seed in seeds]
    return [LEVELS[optimizer] + a + b for a, b in zip(shared, own, strict=True)]


def runs_of(*optimizers: str, seeds: int = 5, sigma: float = SIGMA, **fields: Any) -> list[FakeRun]:
    every = range(1, seeds + 1)
    return [
        run
        for optimizer in optimizers
        for run in runs_with_seeds(seeds, losses_of(optimizer, every, sigma), optimizer=optimizer, **fields)
    ]


def matrix_of(folder: Path, runs: Sequence[FakeRun], rules: Mapping[str, Any], **fields: Any) -> tuple[Element, Any]:
    """Return the page and results.json of a matrix with these rules in its matrix.json."""
    matrix = make_matrix(folder, runs, **fields)
    plan = json.loads(matrix.matrix_json.read_text())
    write_json(matrix.matrix_json, {**plan, "verdict": dict(rules)})
    numbers = analyse(matrix)
    write_results(matrix, numbers)
    return read_html(render_page(numbers)), json.loads(matrix.results.read_text())


SCENES: dict[str, tuple[list[FakeRun], dict[str, Any]]] = {
    "all pairs": (runs_of(*LEVELS), {}),
    "seven seeds": (runs_of("adamw", "muon", seeds=7), {}),
    "tiny noise": (runs_of("adamw", "lion", "muon", sigma=2e-5), {"min_difference": 0.004}),
    "baseline": (runs_of("adamw", "lion", "muon"), {"baseline": {"optimizer": "adamw"}}),
    "adaptive": (
        runs_of("lion", "muon", seeds=6),
        {"seeds_auto": True, "seeds": [1, 2, 3, 4, 5, 6, 7, 8], "seeds_min": 3},
    ),
}


@pytest.fixture(scope="module", params=SCENES)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Element, Any]:
    runs, rules = SCENES[request.param]
    return matrix_of(tmp_path_factory.mktemp("scene"), runs, rules)


def numbers_in(text: str) -> list[str]:
    """Return the numbers of a text that have decimals, without thousands separators."""
    return [found.replace(",", "").replace("−", "-") for found in re.findall(r"[−+]?\d[\d,]*\.\d+", text)]


def configurations(found: Element) -> list[str]:
    return [group["full"] for group in script_data(found)["groups"]]


def losses_by_seed(results: Any) -> dict[str, dict[int, float]]:
    seed_of = {run["name"]: run["seed"] for run in results["runs"]}
    return {one["name"]: {seed_of[run]: loss for run, loss in one["counted"].items()} for one in results["groups"]}


def test_the_marks_of_a_strip_are_in_the_order_of_the_losses(scene):
    found, results = scene
    losses = losses_by_seed(results)
    seen: list[tuple[float, float]] = []
    for row in section(found, "ranking").one("table", "rank").one("tbody").all("tr"):
        if "data-g" not in row.attributes:
            continue
        name = configurations(found)[int(row.attributes["data-g"])]
        strip = row.one("td", "loss-strip").one("svg")
        places = [float(mark.attributes["cx"].rstrip("%")) for mark in strip.all("circle", "seed")]
        if places:  # the configuration does not lie beyond the axis
            seen += zip(losses[name].values(), places, strict=True)
    ordered = sorted(seen)
    assert [place for _, place in ordered] == sorted(place for _, place in ordered)
    assert all(0 <= place <= 100 for _, place in ordered)


def test_every_pair_has_its_outcome_in_the_grid(tmp_path):
    found, results = matrix_of(tmp_path, *SCENES["all pairs"])
    sign = {"better": "<", "worse": ">", "equivalent": "≈", "open": "?"}
    reversed_sign = {"<": ">", ">": "<", "≈": "≈", "?": "?"}
    table = section(found, "ranking").one("table", "grid-of-pairs")
    names = [head.text for head in table.one("thead").all("th")]
    cells = {
        (row.one("th").text, names[at]): cell.all("span")[0].text if cell.all("span") else ""
        for row in table.one("tbody").all("tr")
        for at, cell in enumerate(row.all("td"))
    }
    pairs = results["rankings"][0]["pairs"]
    assert len(pairs) == 10
    for pair in pairs:
        a, b = pair["a"].partition(",")[0], pair["b"].partition(",")[0]
        assert cells[a, b] == sign[pair["outcome"]]
        assert cells[b, a] == reversed_sign[cells[a, b]]
    assert all(cells[name, name] == "" for name in names)


def verdict_of(found: Element) -> tuple[str, str, str]:
    """Return the kind of the first verdict, its mark and its sentence."""
    article = section(found, "verdict").all("article")[0]
    (kind,) = article.classes - {"verdict"}
    return kind, article.one("div", "mark").text.partition(" test_matrix")[0], article.one("h1").text


def test_a_verdict_that_is_partly_open_says_what_would_decide_it(tmp_path):
    found = page(tmp_path, runs_of("adamw", "lion", "muon", seeds=3))
    assert verdict_of(found) == ("partly", "Partly open", "muon leads, but lion is not distinguishable from it")
    (command,) = [one.one("code").text for one in section(found, "verdict").all("span", "cmd")]
    assert re.fullmatch(r".*make .*add TARGET=\S+ SEED=4(,\d)*", command)


@pytest.mark.parametrize("seeds", [1, 3])
def test_runs_that_are_planned_come_before_further_seeds(tmp_path, seeds):
    runs = [replace(run, status="planned") if run.seed > seeds else run for run in runs_of("lion", "muon")]
    found = page(tmp_path, runs)
    assert verdict_of(found)[1].endswith(", preliminary")
    text = section(found, "verdict").one("dl", "lines")
    assert f"{2 * (5 - seeds)} runs that the verdict needs now" in text.text
    assert text.one("code").text == "make continue TARGET=test_matrix_results_20261120_052300"


def test_a_matrix_that_ended_before_its_first_run_is_not_called_running(tmp_path):
    first, *rest = runs_of("adamw", "muon")
    found = page(tmp_path, [replace(first, status="stopped", kind="lost", stop_at=20, result=False)], planned=rest)
    assert verdict_of(found) == ("open", "No run finished yet", "No verdict yet: no run has finished")
    assert found.by_id("ranking") is None


def test_a_matrix_without_a_finished_run_leads_to_its_failures(tmp_path):
    told = {"status": "failed", "kind": "oom", "reason": "out of memory", "stop_at": 20}
    found = page(tmp_path, [replace(run, **told) for run in runs_of("adamw", "muon", seeds=2)])
    kind, mark, sentence = verdict_of(found)
    assert (kind, mark, sentence) == ("bad", "No run finished", "No verdict: no run finished")
    (link,) = section(found, "verdict").all("a")
    assert found.by_id(link.attributes["href"].removeprefix("#")) is not None


def test_runs_that_diverged_are_counted_in_the_ranking_and_in_the_verdict(tmp_path):
    runs = runs_of("adamw", "muon")
    runs = [
        replace(run, final_loss=11.5) if (run.optimizer, run.seed) in (("muon", 2), ("muon", 4)) else run
        for run in runs
    ]
    found, results = matrix_of(tmp_path, runs, {})
    (muon,) = [
        row for row in section(found, "ranking").one("table", "rank").one("tbody").all("tr") if "muon" in row.text
    ]
    assert "2 of 5 diverged" in muon.all("td", "opt")[1].text
    assert "diverged" in section(found, "verdict").one("dl", "lines").text
    assert sum(results["rankings"][0]["diverged"].values()) == 2


def test_a_configuration_of_which_every_run_diverged_stays_in_the_ranking(tmp_path):
    runs = [replace(run, final_loss=11.5) if run.optimizer == "sgd" else run for run in runs_of("adamw", "muon", "sgd")]
    found, _ = matrix_of(tmp_path, runs, {})
    last = rows(section(found, "ranking").one("table", "rank"))[-1]
    assert last[1] == "sgd"
    assert last[0] == last[3] == "–"
    assert "no result: 5 of 5 runs diverged" in last[-1]
    # Its pairs have no test, and were compared from the start: they count in Holm's correction.
    assert "corrected for 3 comparisons" in section(found, "ranking").all("p", "note")[0].text
    assert "(Holm, 3 comparisons)" in section(found, "verdict").text


def test_each_ranking_has_its_own_verdict(tmp_path):
    first = [replace(run, axes={**run.axes, "dataset": "stdlib"}) for run in runs_of("adamw", "muon")]
    second = [
        replace(run, axes={**run.axes, "dataset": "web"}, data_sha256="f" * 64) for run in runs_of("adamw", "muon")
    ]
    found = page(tmp_path, [*first, *second])
    articles = section(found, "verdict").all("article")
    assert [article.all("h1") != [] for article in articles] == [True, False]
    assert [article.one("div", "mark").text.split(" · ")[1][:13] for article in articles] == [
        "data 1a2b3c4d",
        "data ffffffff",
    ]
    heads = [head.text for head in section(found, "ranking").all("h2")]
    assert heads == [f"Ranking by mean final validation loss, data {sha256}" for sha256 in ("1a2b3c4d", "ffffffff")]


def test_a_page_of_1000_runs_has_a_table_below_its_limit(tmp_path):
    matrix = make_matrix(
        tmp_path, runs_of("adamw", "muon", axes={"learning_rate": "0.0006"}, device="cuda", gpus=4, mfu=0.4)
    )
    numbers = analyse(matrix)
    many = tuple(
        replace(
            run,
            name=f"{run.name}_{number:04}",
            links={"wandb": f"https://wandb.ai/someone/{run.name}/runs/{number:08}"},
        )
        for number in range(100)
        for run in numbers.runs
    )
    assert len(many) == 1000
    group = replace(numbers.groups[0], runs=many)
    text = render_page(replace(numbers, runs=many, groups=(group,), rankings=()))
    (table,) = re.findall(r'<section id="runs".*?</section>', text, re.DOTALL)
    assert len(read_html(table).one("tbody").all("tr")) == 1000
    assert len(table.encode()) < 900_000


def test_results_that_no_round_asked_for_are_in_no_mean(tmp_path):
    rules = {"seeds_auto": True, "seeds": [1, 2, 3, 4, 5, 6], "seeds_min": 3}
    found, results = matrix_of(tmp_path, runs_of("adamw", "muon", seeds=6), rules)
    (comparison,) = results["rankings"][0]["comparisons"]
    assert comparison["seeds"] == [1, 2, 3]
    shown = rows(section(found, "ranking").one("table", "rank"))
    means = [float(numbers_in(row[3])[0]) for row in shown[-2:]]
    difference = float(numbers_in(shown[-1][6])[0])
    assert [row[2] for row in shown[-2:]] == ["3", "3"]
    assert means[1] - means[0] == pytest.approx(difference, abs=1.5e-4)
    assert "6 results are not used" in section(found, "verdict").text
