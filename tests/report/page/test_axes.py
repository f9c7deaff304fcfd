"""The section on axes: the loss over each numeric axis, and over two axes at once."""

from __future__ import annotations

import statistics

import pytest

from kmatrix.report.analysis import analyse
from kmatrix.report.page.assemble import render_page
from kmatrix.report.page.axes import axes
from kmatrix.report.page.parts.groups import page_groups
from records_factory import make_matrix, runs_with_seeds

RATES = ("2e-4", "6e-4", "2e-3", "6e-3")
AT_RATE = {"2e-4": 3.31, "6e-4": 3.28, "2e-3": 3.29, "6e-3": 3.35}


def sweep(optimizer="adamw", rates=RATES, decays=("0", "0.1"), shift=0.0):
    """Return two seeds per learning rate and weight decay; without decay the loss is 0.01 higher."""
    return [
        run
        for rate in rates
        for decay in decays
        for loss in [AT_RATE[rate] + shift + (0.01 if decay == "0" else 0.0)]
        for run in runs_with_seeds(2, (loss, loss + 0.002), optimizer=optimizer, axes={"lr": rate, "wd": decay})
    ]


def section_of(root, runs):
    numbers = analyse(make_matrix(root, runs))
    return axes(numbers, page_groups(numbers))


def test_a_line_joins_the_configurations_that_differ_in_one_axis(tmp_path):
    (figure,) = section_of(tmp_path, sweep()).figures

    assert (figure.axis, figure.is_logarithmic) == ("lr", True)
    assert [line.short for line in figure.lines] == ["wd 0.1", "wd 0"]
    best = figure.lines[0]
    assert best.best == "6e-4"
    assert best.best_loss == pytest.approx(3.281)
    assert best.spread == pytest.approx(0.07)
    assert not best.is_edge
    assert (len(best.means), len(best.seeds)) == (4, 8)
    xs = [x for x, _, _ in best.means]
    assert xs == sorted(xs)
    # 2e-4 to 2e-3 is a factor of ten, as 6e-4 to 6e-3 is: equal distances on a logarithmic axis.
    assert xs[2] - xs[0] == pytest.approx(xs[3] - xs[1], abs=0.1)
    lowest = max(y for _, y, _ in best.means)  # a figure's axis points down
    assert best.means[1][1] == lowest


def test_a_map_has_the_mean_of_each_configuration_and_frames_the_lowest(tmp_path):
    (found,) = section_of(tmp_path, sweep()).maps

    assert (found.row_axis, found.column_axis, found.columns, found.seeds) == ("wd", "lr", RATES, 2)
    cells = {(row, column): cell for row, each in found.rows for column, cell in zip(found.columns, each, strict=True)}
    for (row, column), cell in cells.items():
        loss = AT_RATE[column] + (0.01 if row == "0" else 0.0)
        assert cell.loss == pytest.approx(statistics.fmean((loss, loss + 0.002)))
    assert [at for at, cell in cells.items() if cell.is_best] == [("0.1", "6e-4")]
    assert cells["0.1", "6e-4"].level == 6
    levels = [cells["0.1", column].level for column in ("6e-4", "2e-3", "2e-4", "6e-3")]
    assert levels == sorted(levels, reverse=True)


def test_optimizers_and_seeds_alone_are_in_the_ranking(tmp_path):
    runs = [*runs_with_seeds(3, (3.28, 3.29, 3.30)), *runs_with_seeds(3, (3.3, 3.31, 3.32), optimizer="muon")]

    assert section_of(tmp_path, runs) is None


def test_the_section_is_on_the_page(tmp_path):
    html = render_page(analyse(make_matrix(tmp_path, sweep())))

    assert '<section id="axes"' in html
    assert '<a href="#axes">' in html
    assert "3.2810" in html
