"""The pictures of a matrix: their data, axes and files, not their pixels."""

from __future__ import annotations

import struct

import pytest

from kmatrix.report.analyse import analyse
from kmatrix.report.figure import PALETTE, colour_of, draw_jobs, marks_of
from kmatrix.report.graphs import draw, mean_curve
from kmatrix.report.write import draw_graphs
from records_factory import FakeRun, make_matrix, runs_with_seeds

FILES = [*(f"loss_vs_{axis}.png" for axis in ("steps", "tokens", "time")), "final_loss_by_run.png"]
ADAMW = PALETTE[colour_of("adamw")][0]


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """Return a function that returns the figures of a matrix of these runs, by file."""

    def of(*runs):
        found = {}

        def keep(jobs, folder):
            found.update((name, make()) for name, make in jobs)
            return [], []

        monkeypatch.setattr("kmatrix.report.figure.draw_jobs", keep)
        draw(analyse(make_matrix(tmp_path, runs)), tmp_path)
        monkeypatch.setattr("kmatrix.report.figure.draw_jobs", draw_jobs)
        return found

    return of


def lines_of(axes, colour=ADAMW):
    return [line for line in axes.lines if line.get_color() == colour]


def row_labels(figure):
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_all_graphs_are_written_and_are_the_same_each_time(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(), FakeRun(optimizer="muon", gpus=2)])
    files, missing = draw_graphs(matrix, analyse(matrix))
    assert ([path.name for path in files], missing) == (FILES, [])
    first = {path.name: path.read_bytes() for path in files}
    assert {struct.unpack(">I", data[16:20])[0] for data in first.values()} == {1200}
    assert {path.name: path.read_bytes() for path in draw_graphs(matrix, analyse(matrix))[0]} == first


def test_without_data_there_is_a_reason_and_no_file(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(status="skipped", reason="needs 8 GPUs")])
    files, missing = draw_graphs(matrix, analyse(matrix))
    assert files == []
    assert [text.split()[0] for text in missing] == FILES
    assert not matrix.graphs.exists()


def test_a_curve_is_the_mean_over_the_seeds_that_have_a_log(figures):
    found = figures(*runs_with_seeds(2, [3.0, 3.2]), FakeRun(optimizer="muon", axes={"seed": "1"}, seed=1))
    whole, late = found["loss_vs_steps.png"].axes
    (line,) = lines_of(whole)
    assert list(line.get_xdata()) == list(range(0, 101, 10))
    assert line.get_ydata()[-1] == pytest.approx(3.1)
    assert late.get_ylim()[1] < whole.get_ylim()[1]
    assert whole.get_xlabel() == "steps (optimizer updates)"


def test_points_are_drawn_at_their_tokens_and_time(figures):
    found = figures(FakeRun(tokens_per_s=100.0))
    assert lines_of(found["loss_vs_tokens.png"].axes[0])[0].get_xdata()[-1] == 102_400
    time = found["loss_vs_time.png"].axes[0]
    assert lines_of(time)[0].get_xdata()[-1] == pytest.approx(1024 / 60)
    assert time.get_xlabel() == "time since the start of the run (minutes)"


def test_runs_that_failed_are_marked_with_their_ends(figures):
    found = figures(FakeRun(), FakeRun(optimizer="sgd", status="failed", reason="nan", stop_at=47, result=False))
    marks = [line for line in found["loss_vs_steps.png"].axes[0].lines if line.get_marker() == "x"]
    assert [mark.get_xdata()[0] for mark in marks] == [40]
    assert "sgd\n-  n=0, 1 of 1 run failed" in row_labels(found["final_loss_by_run.png"])


def test_an_outlier_among_final_losses_is_an_arrow_with_its_value(figures):
    losses = (("muon", 3.27), ("adamw", 3.28), ("sgd", 6.1))
    figure = figures(*(FakeRun(optimizer=name, final_loss=loss) for name, loss in losses))["final_loss_by_run.png"]
    (axes,) = figure.axes
    assert [line.get_ydata()[0] for line in axes.lines if line.get_marker() == ">"] == [2]
    assert axes.get_xlim()[1] < 3.3
    assert row_labels(figure)[2] == "sgd\n6.1000  n=1"


def test_the_mean_curve_covers_only_steps_that_all_seeds_measured(tmp_path):
    matrix = make_matrix(tmp_path, [*runs_with_seeds(1, [3.0]), FakeRun(seed=2, axes={"seed": "2"}, eval_interval=20)])
    curve = mean_curve(analyse(matrix).runs, "val")
    assert list(curve["step"]) == [0, 20, 40, 60, 80, 100]
    assert (curve["low"] <= curve["loss"]).all()
    assert (curve["loss"] <= curve["high"]).all()


def test_an_optimizer_has_its_colour_in_every_matrix():
    names = ("adamw", "muon", "sgd", "adam", "adafactor", "lion", "soap")
    assert len({colour_of(name) for name in names}) == len(names)
    assert colour_of("a new one") == colour_of("a new one") < len(PALETTE)


@pytest.mark.parametrize("optimizers", [("muon",), ("muon", "lion", "adamwadv")])
def test_configurations_have_their_own_marks_the_first_in_the_colour_of_its_optimizer(tmp_path, optimizers):
    runs = [FakeRun(optimizer=name, axes={"lr": f"{lr}e-3"}) for lr in range(4) for name in optimizers]
    found = marks_of(analyse(make_matrix(tmp_path, runs)).configurations)
    assert len({colour for colour, _ in found.values()}) == (4 if len(optimizers) == 1 else 2)  # lion, adamwadv: one
    assert found["muon, lr 0e-3"] == (colour_of("muon"), 0)
    muons = [mark for name, mark in found.items() if name.startswith("muon")]
    assert len(set(muons)) == 4
