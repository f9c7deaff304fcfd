"""The section on the target loss: fastest first, and what was missed."""

from __future__ import annotations

import pytest

from html_reader import read_html
from kmatrix.records.files import read_json, write_json
from kmatrix.report.analysis import analyse
from kmatrix.report.page.assemble import render_page
from kmatrix.report.page.parts.groups import page_groups
from kmatrix.report.page.target import target
from records_factory import FakeRun, make_matrix, runs_with_seeds


def section_of(matrix, value=None):
    if value is not None:
        write_json(matrix.matrix_json, {**read_json(matrix.matrix_json), "verdict": {"target_loss": value}})
    numbers = analyse(matrix)
    return target(numbers, page_groups(numbers))


def row_of(section, optimizer):
    return next(row for row in section.rows if row.group.numbers.axes["optimizer"] == optimizer)


def test_missed_runs_are_counted_and_have_no_mark(tmp_path):
    section = section_of(make_matrix(tmp_path, runs_with_seeds(5, (3.27, 3.28, 3.29, 3.31, 3.32))), 3.295)

    row = row_of(section, "adamw")
    assert (row.reached, row.runs, row.missed, len(row.marks)) == (3, 5, 2, 3)
    assert (section.missed, section.runs, section.is_set) == (2, 5, True)
    assert not row.is_too_few
    assert section.quantities == ("step", "tokens", "seconds")


def test_configurations_without_a_finished_run_are_listed(tmp_path):
    runs = [
        *runs_with_seeds(2, (3.27, 3.28)),
        FakeRun(optimizer="sgd", seed=1, axes={"seed": "1"}, status="failed", kind="nan", stop_at=40),
    ]
    section = section_of(make_matrix(tmp_path, runs), 3.295)

    assert [row.group.numbers.axes["optimizer"] for row in section.rows] == ["adamw", "sgd"]
    assert (row_of(section, "sgd").reached, row_of(section, "sgd").runs) == (0, 1)


def test_no_section_without_a_ranking_and_a_target(tmp_path):
    assert section_of(make_matrix(tmp_path, [FakeRun(status="failed", stop_at=40)])) is None


def test_a_target_holds_for_every_ranking(tmp_path):
    runs = [
        *runs_with_seeds(3, (3.27, 3.271, 3.272), optimizer="muon"),
        *runs_with_seeds(3, (3.28, 3.281, 3.282), optimizer="adamw", data_sha256="f" * 64),
        *runs_with_seeds(3, (3.5, 3.6, 3.7), optimizer="sgd", data_sha256="f" * 64),
    ]
    section = section_of(make_matrix(tmp_path, runs), 3.295)

    found = {row.group.numbers.axes["optimizer"]: row for row in section.rows}
    assert {name: (row.reached, row.runs) for name, row in found.items()} == {
        "muon": (3, 3),
        "adamw": (3, 3),
        "sgd": (0, 3),
    }
    # Holm's correction is that of each family: one comparison for muon, two for the others.
    assert found["muon"].test.p_holm == pytest.approx(found["muon"].test.p)
    assert found["adamw"].test.p_holm == pytest.approx(2 * found["adamw"].test.p)
    assert {name: row.test.is_below for name, row in found.items()} == {"muon": True, "adamw": True, "sgd": False}


def test_a_configuration_without_a_run_that_ended_has_no_result(tmp_path):
    runs = [
        *runs_with_seeds(3, (3.27, 3.28, 3.29)),
        FakeRun(optimizer="soap", status="stopped", seed=1, axes={"seed": "1"}, stop_at=20),
        FakeRun(optimizer="soap", status="skipped", seed=2, axes={"seed": "2"}),
    ]
    matrix = make_matrix(tmp_path, runs)
    row = row_of(section_of(matrix, 3.295), "soap")
    assert (row.runs, row.pending, row.is_too_few) == (0, 1, False)
    page = read_html(render_page(analyse(matrix)))
    reached = [cell for cell in page.all("td") if cell.attributes.get("data-q") == "reached"]
    assert [cell.attributes.get("data-pending") for cell in reached] == [None, "1"]
