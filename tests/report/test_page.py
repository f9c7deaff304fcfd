"""report.html without a browser: it loads nothing, shows text of others as text, and needs no scripts to be read."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from itertools import combinations

import pytest

from colour_vision import VISION, distance
from gpu_factory import FakeGpus, record
from html_reader import read_html, rows_of, text_of
from kmatrix.records.decode import replaced
from kmatrix.report.analyse import analyse
from kmatrix.report.figure import DASHES, PALETTE, marks_of
from kmatrix.report.page import render_page
from records_factory import FakeRun, make_matrix, runs_with_seeds

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028\x1b[31m"
LOSSES = {"muon": (3.270, 3.281, 3.279), "adamw": (3.372, 3.379, 3.383)}
RUNS = [run for name, losses in LOSSES.items() for run in runs_with_seeds(3, losses, optimizer=name)]
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
SECTIONS = ("ranking", "curves", "target", "cost", "axes", "scaling", "devices", "settings", "failures", "runs")


def page_of(matrix, results=None):
    """Return the page of a matrix as text and as a tree."""
    html = render_page(matrix, results or analyse(matrix))
    return html, read_html(html)


def section(tree, name):
    return tree.find(f".//section[@id='{name}']")


def hash_of(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_a_page_loads_nothing_and_only_its_own_scripts_run(tmp_path):
    matrix = make_matrix(tmp_path, RUNS)
    matrix.graphs.mkdir()
    (matrix.graphs / "loss_vs_steps.png").write_bytes(b"\x89PNG")
    html, tree = page_of(matrix)
    (policy,) = [one.get("content") for one in tree.iter("meta") if "http-equiv" in one.attrib]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    scripts = [hash_of(text) for text in re.findall(r"<script>(.*?)</script>", html, re.DOTALL)]
    styles = [hash_of(text) for text in re.findall(r"<style>(.*?)</style>", html, re.DOTALL)]
    assert rules.pop("img-src") == "data:"
    assert rules.pop("script-src").split() == scripts
    assert rules.pop("style-src").split() == styles
    assert set(rules) == {"default-src", "base-uri", "form-action"}
    assert set(rules.values()) == {"'none'"}
    for element in tree.iter():
        names = [name for name in element.attrib if name.startswith("on") or name == "style"]
        assert not names, (element.tag, names)
        address = element.get("src") or element.get("href") or "#"
        assert address.startswith(("#", "data:")), address
    assert "url(" not in "".join(re.findall(r"<style>(.*?)</style>", html, re.DOTALL))


def hostile_page(folder):
    """Return a page, in which every text that a user, a log or a tracker wrote is hostile, and its data."""
    runs = [replace(run, axes={**run.axes, "note": HOSTILE.replace("/", "|")}) for run in RUNS]
    failed = {"reason": HOSTILE, "log_tail": (HOSTILE,), "stop_at": 20, "result": False}
    runs.append(FakeRun(optimizer="sgd", status="failed", **failed))
    matrix = make_matrix(folder, runs, cuts=[(3, HOSTILE)])
    results = analyse(matrix)
    links = {HOSTILE: HOSTILE, "wandb": "JavaScript:alert(1)", "trackio": "https://host/a?<b>&c"}
    results = replaced(
        results,
        command=HOSTILE,
        overrides=(HOSTILE,),
        facts=dict.fromkeys((*results.facts, HOSTILE), HOSTILE),
        warnings=(HOSTILE,),
        runs=(replaced(results.runs[0], links=links, adjusted=(HOSTILE,)), *results.runs[1:]),
    )
    html, tree = page_of(matrix, results)
    return html, tree, json.loads(DATA.search(html)[1])


def test_text_of_users_logs_and_trackers_is_text(tmp_path):
    html, tree, data = hostile_page(tmp_path)
    assert [one.tag for one in tree.iter() if one.tag in ("img", "iframe", "object", "form")] == []
    assert len(list(tree.iter("script"))) == 2  # the data and the page's own
    assert [one.get("href") for one in tree.iter("a") if "://" in one.get("href")] == ["https://host/a?<b>&c"]
    assert "javascript" not in " ".join(one.get("href", "").lower() for one in tree.iter())
    assert "\x1b" not in html
    assert "<script>alert(1)" in text_of(section(tree, "failures"))
    assert "<" not in DATA.search(html)[1]
    assert any("<|script>" in group["name"] for group in data["groups"])


def test_verdict_tables_and_pictures_need_no_scripts(tmp_path):
    matrix = make_matrix(tmp_path, RUNS)
    matrix.graphs.mkdir()
    for name in ("loss_vs_steps", "final_loss_by_run"):
        (matrix.graphs / f"{name}.png").write_bytes(b"\x89PNG")
    _, tree = page_of(matrix)
    assert text_of(tree.find(".//h1")) == "muon beats adamw by 0.1013 ± 0.0076 nats/token"
    ranked = rows_of(section(tree, "ranking"))
    assert [row[:2] for row in ranked[1:]] == [["1 muon", "3.2767"], ["2 adamw", "3.3780"]]
    assert any("p < 0.001: worse" in cell for cell in ranked[2])
    listed = {row[0] for row in rows_of(section(tree, "runs"))[1:]}
    assert listed == {run.name for run in RUNS}
    without = [one for one in tree.iter() if "js-only" in one.get("class", "")]
    assert not [table for one in without for table in one.iter("table")]
    assert [one.get("alt") for one in tree.find(".//noscript").iter("img")] == ["loss vs steps", "final loss by run"]


def test_simulated_devices_are_marked(tmp_path):
    runs = [FakeRun(optimizer=name, device="cuda", gpus=2) for name in ("muon", "adamw")]
    matrix = make_matrix(tmp_path, runs)
    for run, name in zip(runs, ("A GPU (simulated)", "A GPU"), strict=True):
        gpus = FakeGpus(memory=(9_000.0,) * 2, power=(150.0,) * 2, utilization=(50.0,) * 2, samples=60, name=name)
        record(matrix.run(run.name), gpus)
    _, tree = page_of(matrix)
    simulated, real = sorted(rows_of(section(tree, "devices"))[1:], key=lambda row: runs[0].name != row[0])
    assert (simulated[1], real[1]) == ("2 GPUs (simulated)", "2 GPUs")
    assert "The energy of simulated GPUs is not measured" in text_of(section(tree, "curves"))


def test_what_is_unknown_is_a_dash_and_never_0(tmp_path):
    runs = [FakeRun(), FakeRun(optimizer="muon", status="failed", stop_at=0, result=False, reason="no GPU")]
    _, tree = page_of(make_matrix(tmp_path, runs, planned=[FakeRun(optimizer="sgd")]))
    titles, *rows = rows_of(section(tree, "runs"))
    planned = next(dict(zip(titles, row, strict=True)) for row in rows if "sgd" in row[0])
    assert {planned[name] for name in ("val loss", "best@step", "ppl", "tokens", "tok/s", "time")} == {"-"}
    (ranked,) = [row for row in rows_of(section(tree, "ranking")) if "1 adamw" in row]
    assert ranked[1:4] == ["3.2800", "-", "-"]  # a single seed has no interval and no deviation


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([], "curves runs"),
        ([FakeRun()], "ranking curves target cost runs"),
        (RUNS, "ranking curves target cost settings runs"),
        ([FakeRun(gpus=gpus) for gpus in (1, 2)], "ranking curves target cost scaling settings runs"),
        ([FakeRun(status="failed", result=False, stop_at=20)], "ranking curves failures runs"),
    ],
)
def test_a_section_appears_with_its_data(tmp_path, runs, expected):
    _, tree = page_of(make_matrix(tmp_path, runs, planned=[] if runs else [FakeRun()]))
    assert [name for name in SECTIONS if section(tree, name) is not None] == expected.split()
    links = [one.get("href") for one in tree.find(".//nav")]
    assert [name for name in SECTIONS if f"#{name}" in links] == expected.split()


def test_the_same_runs_give_the_same_bytes(tmp_path):
    first, second = (make_matrix(tmp_path / folder, RUNS) for folder in "ab")
    assert page_of(first)[0].replace("/a/", "/b/") == page_of(second)[0]


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("paper", ["light", "dark"])
def test_colours_of_configurations_can_be_told_apart(paper, vision):
    colours = [light if paper == "light" else dark for light, dark in PALETTE]
    assert min(distance(*pair, vision) for pair in combinations(colours, 2)) > 15
    background = "#ffffff" if paper == "light" else "#14171c"
    assert min(distance(colour, background, vision) for colour in colours) > 25


def test_configurations_of_one_optimizer_differ_in_their_dashes(tmp_path):
    runs = [FakeRun(optimizer=name, axes={"lr": str(lr)}) for name in ("muon", "adamw") for lr in range(len(DASHES))]
    results = analyse(make_matrix(tmp_path, runs))
    assert len(set(marks_of(results.configurations).values())) == len(runs)
