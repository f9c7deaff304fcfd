"""Successive halving in every report: who was ended where, and no comparison of losses of different steps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from scipy import stats

import kmatrix.report.formats
from halved import halved_matrix, run_scripted
from html_reader import read_html
from kmatrix.records.files import write_json
from kmatrix.records.paths import MatrixDir
from kmatrix.report.analysis import analyse
from kmatrix.report.formats.ending import render_ending
from kmatrix.report.formats.junit import junit
from kmatrix.report.formats.results_md import markdown
from kmatrix.report.page.assemble import render_page
from kmatrix.report.summary import render_summary
from kmatrix.report.target import target_numbers
from kmatrix.report.write import write_summary
from page_sections import script_data
from scripted import NAN

SCHEMA = json.loads((Path(kmatrix.report.formats.__file__).parent / "results.schema.json").read_text(encoding="utf-8"))
# Of twelve, four survive step 10 and two step 30. d was better than all of them at the end, had it trained on.
CURVES = {name: {10: 3.0 + place / 10, 30: 2.9 - place / 10, 90: 2.5 + place / 10} for place, name in enumerate("abcd")}
CURVES |= {name: {10: 4.0 + place / 10} for place, name in enumerate("efghijk")} | {"l": {7: NAN}}


@pytest.fixture
def matrix(tmp_path):
    folder = MatrixDir(tmp_path / "test_matrix_results_20260101_000000")
    folder.path.mkdir()
    return halved_matrix(folder, "abcdefghijkl", seeds=2)


def flat(text):
    return " ".join(text.split())


def test_the_verdict_compares_the_survivors_and_the_others_are_listed_with_their_rung(matrix):
    run_scripted(matrix, CURVES)
    numbers = analyse(matrix)
    (ranking,) = numbers.rankings
    assert [group.name for group in ranking.groups] == ["c, 1 rank", "d, 1 rank"]
    assert len(ranking.verdict.pairs) == 1
    assert numbers.states == {"finished": 4, "failed": 2, "ended at a rung": 18}
    text = flat(render_summary(numbers))
    assert "Rung: step 10: 4 of 12 configurations trained on: a, 1 rank; b, 1 rank; c, 1 rank; d, 1 rank" in text
    assert "Rung: step 30: 2 of 4 configurations trained on: d, 1 rank; c, 1 rank" in text
    assert "an early loss can mislead" in text
    assert "configuration ended at step val loss there" in text
    assert "b, 1 rank 30 2.8000 a, 1 rank 30 2.9000 e, 1 rank 10 4.0000" in text
    assert "l, 1 rank 10 diverged" in text
    assert "in reserve" not in text
    assert "gpt2_e_seed1_1cpu stopped" not in text
    short = flat(render_ending(numbers, ["report.html"]))
    assert "18 ended at a rung" in short.replace("\N{NO-BREAK SPACE}", " ")


def test_results_json_markdown_and_junit_have_the_rungs(matrix):
    run_scripted(matrix, CURVES)
    numbers = analyse(matrix)
    write_summary(numbers)
    found = json.loads(matrix.results.read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    (ranking,) = found["rankings"]
    assert ranking["order"] == ["c, 1 rank", "d, 1 rank"]
    assert ranking["halving"] == found["halving"][0]
    assert ranking["halving"]["eta"] == 3
    first, second = ranking["halving"]["rungs"]
    assert (first["step"], first["kept"]) == (10, [f"{name}, 1 rank" for name in "abcd"])
    assert (second["step"], second["kept"]) == (30, ["d, 1 rank", "c, 1 rank"])
    known = {one["name"]: (one["loss"], one["diverged"]) for one in first["configurations"]}
    assert (known["e, 1 rank"], known["l, 1 rank"]) == ((4.0, False), (None, True))
    runs = {run["name"]: run for run in found["runs"]}
    text = "ended at step 10: not among the best 4 of 12"
    assert runs["gpt2_e_seed1_1cpu"]["rung"] == {"step": 10, "ended": True, "text": text}
    assert runs["gpt2_e_seed1_1cpu"]["reason"] == text
    assert runs["gpt2_c_seed1_1cpu"]["rung"] is None
    marked = markdown(numbers)
    assert "| `b, 1 rank` | 30 | 2.8000 |" in marked
    cases = {case.get("name"): case for case in ElementTree.fromstring(junit(numbers)).iter("testcase")}
    assert cases["gpt2_e_seed1_1cpu"].find("skipped").get("message") == text
    assert cases["gpt2_l_seed1_1cpu"].find("failure") is not None


@pytest.mark.parametrize(("baseline", "reference"), [("d", "d, 1 rank"), ("e", "c, 1 rank")])
def test_survivors_are_compared_with_the_baseline_unless_a_rung_ended_it(matrix, baseline, reference):
    plan = json.loads(matrix.matrix_json.read_text())
    write_json(matrix.matrix_json, {**plan, "verdict": {**plan["verdict"], "baseline": {"optimizer": baseline}}})
    run_scripted(matrix, CURVES)
    (ranking,) = analyse(matrix).rankings
    assert (ranking.verdict.reference, ranking.verdict.rules.baseline is None) == (reference, baseline == "e")


def test_the_target_is_corrected_for_the_configurations_that_a_rung_ended(matrix):
    """Survivors are chosen by losses that go with the tested ones: corrected for them alone, p would be too small."""
    plan = json.loads(matrix.matrix_json.read_text())
    write_json(matrix.matrix_json, {**plan, "verdict": {**plan["verdict"], "target_loss": 3.0}})
    losses = {"c": (2.70, 2.71), "d": (2.80, 2.83)}
    curves = CURVES | {name: [{**CURVES[name], 90: loss} for loss in each] for name, each in losses.items()}
    run_scripted(matrix, curves)
    groups = {group.name: group for group in target_numbers(analyse(matrix)).groups}
    p = {name: stats.ttest_1samp(each, 3.0, alternative="less").pvalue for name, each in losses.items()}
    assert groups["c, 1 rank"].test.p == pytest.approx(p["c"], rel=1e-9)
    assert groups["c, 1 rank"].test.p_holm == pytest.approx(12 * p["c"], rel=1e-9)
    assert groups["d, 1 rank"].test.p_holm == pytest.approx(11 * p["d"], rel=1e-9)
    assert "b, 1 rank" not in groups


def test_the_page_lists_them_below_the_ranking(matrix):
    run_scripted(matrix, CURVES)
    text = render_page(analyse(matrix))
    marked = [run["n"] for run in script_data(read_html(text))["run"] if "r" in run]
    assert len(marked) == 18  # without those that diverged before the rung
    assert not any(name.startswith(("gpt2_c_", "gpt2_d_", "gpt2_l_")) for name in marked)
    page = flat(text)
    assert "10 configurations ended at a rung" in page
    assert re.search(r'</svg>b, 1 rank</th><td class="n">30</td><td class="n">2.8000</td></tr>', page)
    assert "An early loss can mislead" in page
    assert "| marks a run that ended, or waits, at a rung, " in page


def test_a_matrix_between_two_rungs_says_what_it_waits_for(matrix):
    run_scripted(matrix, CURVES, starts=20)
    numbers = analyse(matrix)
    assert numbers.rankings == ()
    assert numbers.states == {"planned": 4, "waiting at a rung": 20}
    text = flat(render_summary(numbers))
    assert "Rung: step 10: not decided yet, 12 configurations train to step 10" in text
