"""Check the data, axes and files of graphs, not their pixels."""

from __future__ import annotations

import itertools
import struct

import pytest

from kmatrix.report.analysis import analyse
from kmatrix.report.figure import COLOURS, group_styles
from kmatrix.report.graphs import (
    Curve,
    CurvePoint,
    final_losses,
    loss_graph,
    loss_graphs,
    mean_curve,
    throughput,
    top_of_view,
)
from kmatrix.report.write import draw_graphs
from kmatrix.text import shortened
from records_factory import FakeRun, make_matrix, runs_with_seeds

FILES = [
    "loss_vs_steps.png",
    "loss_vs_tokens.png",
    "loss_vs_time.png",
    "final_loss_by_run.png",
    "throughput_by_run.png",
]


def line(*points):
    x, y = tuple(p[0] for p in points), tuple(p[1] for p in points)
    return Curve(x=x, y=y, low=y, high=y)


def bold_lines(axes, colour):
    """Return the lines of validation loss in one color."""
    return [curve for curve in axes.lines if curve.get_linewidth() > 2 and curve.get_color().lower() == colour.lower()]


def size_of(path):
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return struct.unpack(">II", head[16:24])


def test_all_graphs_have_the_documented_size_and_are_the_same_each_time(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(), FakeRun(optimizer="muon", gpus=2)])
    files, missing = draw_graphs(analyse(matrix))
    assert [path.name for path in files] == FILES
    assert missing == []
    assert {size_of(path) for path in files} == {(1200, 750)}
    assert sorted(path.name for path in matrix.graphs.iterdir()) == sorted(FILES)
    first = {path.name: path.read_bytes() for path in files}
    assert {path.name: path.read_bytes() for path in draw_graphs(analyse(matrix))[0]} == first


def test_without_data_there_is_a_note_and_no_file(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(status="skipped", reason="needs 8 GPUs")])
    files, missing = draw_graphs(analyse(matrix))
    assert files == []
    assert [text.split()[0] for text in missing] == FILES
    assert not matrix.graphs.exists()


def test_a_run_with_one_measurement_is_drawn(tmp_path):
    files, missing = draw_graphs(analyse(make_matrix(tmp_path, [FakeRun(status="running", stop_at=0)])))
    assert [path.name for path in files] == [*FILES[:3], FILES[4]]
    assert missing == ["final_loss_by_run.png was not drawn: no run finished with a validation loss"]


def test_a_seed_without_metrics_does_not_hide_the_others(tmp_path):
    matrix = make_matrix(tmp_path, runs_with_seeds(2, [3.0, 3.2]))
    matrix.run("gpt2_adamw_seed2_1cpu").metrics.unlink()
    numbers = analyse(matrix)
    (curve,) = bold_lines(loss_graph(numbers, loss_graphs(numbers)[0]).axes[0], COLOURS["adamw"])
    assert curve.get_ydata()[-1] == 3.0


def test_seeds_are_drawn_with_their_mean_as_a_bold_line(tmp_path):
    runs = [*runs_with_seeds(2, [3.0, 3.2]), FakeRun(optimizer="muon", axes={"seed": "1"}, seed=1)]
    numbers = analyse(make_matrix(tmp_path, runs))
    figure = loss_graph(numbers, loss_graphs(numbers)[0])
    (mean_line,) = bold_lines(figure.axes[0], COLOURS["adamw"])
    assert list(mean_line.get_xdata()) == list(range(0, 101, 10))
    assert mean_line.get_ydata()[-1] == pytest.approx(3.1)
    assert figure.axes[0].get_xlabel() == "steps (optimizer updates)"


def test_points_are_drawn_at_their_tokens_and_time(tmp_path):
    numbers = analyse(make_matrix(tmp_path, [FakeRun(tokens_per_s=100.0)]))
    _, tokens, seconds = loss_graphs(numbers)
    assert bold_lines(loss_graph(numbers, tokens).axes[0], COLOURS["adamw"])[0].get_xdata()[-1] == 102_400
    figure = loss_graph(numbers, seconds)
    assert bold_lines(figure.axes[0], COLOURS["adamw"])[0].get_xdata()[-1] == pytest.approx(1024 / 60)
    assert figure.axes[0].get_xlabel() == "time since the start of the run (minutes)"


def test_the_end_of_a_failed_run_is_marked(tmp_path):
    failed = FakeRun(optimizer="sgd", status="failed", reason="loss is nan at step 47", stop_at=47, result=False)
    numbers = analyse(make_matrix(tmp_path, [FakeRun(), failed]))
    marks = [curve for curve in loss_graph(numbers, loss_graphs(numbers)[0]).axes[0].lines if curve.get_marker() == "X"]
    assert [marker.get_xdata()[0] for marker in marks] == [40]
    texts = [text.get_text() for text in final_losses(numbers).axes[0].texts]
    assert "failed: loss is nan at step 47" in texts


def test_final_losses_are_dots_on_an_axis_that_does_not_start_at_zero(tmp_path):
    numbers = analyse(make_matrix(tmp_path, runs_with_seeds(3, [3.2811, 3.2834, 3.2802])))
    axes = final_losses(numbers).axes[0]
    dots = next(curve for curve in axes.lines if curve.get_marker() == "o")
    assert sorted(dots.get_xdata()) == [3.2802, 3.2811, 3.2834]
    assert axes.get_xlim()[0] > 3.27
    assert not axes.patches


def test_the_reason_of_a_failure_cannot_change_the_writing_direction(tmp_path):
    failed = FakeRun(optimizer="sgd", status="failed", stop_at=20, result=False, reason="\x1b[31mout of\u202e memory")
    axes = final_losses(analyse(make_matrix(tmp_path, [FakeRun(), failed]))).axes[0]
    assert "failed: out of memory" in [text.get_text() for text in axes.texts]


def test_an_outlier_is_an_arrow_with_its_value(tmp_path):
    runs = [FakeRun(optimizer=name, final_loss=loss) for name, loss in (("muon", 3.27), ("adamw", 3.28), ("sgd", 6.1))]
    axes = final_losses(analyse(make_matrix(tmp_path, runs))).axes[0]
    assert [curve.get_ydata()[0] for curve in axes.lines if curve.get_marker() == ">"] == [2]
    assert axes.get_xlim()[1] < 3.3
    assert "6.1000  n=1" in [text.get_text() for text in axes.texts]


def test_throughput_bars_start_at_zero_and_show_mfu(tmp_path):
    runs = [FakeRun(gpus=n, device="cuda", tokens_per_s=1000.0 * n, mfu=0.438) for n in (1, 2)]
    axes = throughput(analyse(make_matrix(tmp_path, runs))).axes[0]
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 1000.0), (0, 2000.0)]
    assert [text.get_text() for text in axes.texts][-1] == "2.00k tok/s   MFU 43.8%"


def test_sixteen_long_names_do_not_overlap(tmp_path):
    axes_of = {"schedule": "constant-with-a-long-name", "wd": "0.123456789"}
    runs = [FakeRun(optimizer="adafactor", axes={**axes_of, "lr": f"0.00{n:08d}"}) for n in range(16)]
    figure = throughput(analyse(make_matrix(tmp_path, runs)))
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert all(upper.y0 >= lower.y1 for upper, lower in itertools.pairwise(boxes))
    assert min(box.x0 for box in boxes) >= 0
    assert len({label.get_text() for label in figure.axes[0].get_yticklabels()}) == 16


def test_the_mean_curve_covers_only_steps_that_all_seeds_measured():
    seeds_ = [
        [CurvePoint(0, 0, 0.0, 4.0), CurvePoint(10, 10, 2.0, 2.0)],
        [CurvePoint(0, 0, 0.0, 6.0), CurvePoint(20, 20, 9.0, 1.0)],
    ]
    assert mean_curve(seeds_, lambda point: point.step) == Curve(x=(0,), y=(5.0,), low=(4.0,), high=(6.0,))


def test_values_between_two_measurements_are_interpolated():
    assert top_of_view([line((0, 10.0), (16, 6.0), (100, 3.0))]) == pytest.approx(8.0)


def test_an_optimizer_keeps_its_color_and_its_configurations_get_shades(tmp_path):
    numbers = analyse(make_matrix(tmp_path, [FakeRun(axes={"lr": f"{n}"}) for n in range(6)]))
    colours = [colour for colour, _ in group_styles(numbers, numbers.groups).values()]
    assert len(set(colours)) == 6
    assert group_styles(numbers, numbers.groups[:1])["adamw, lr 0, 1 rank"][0].lower() == COLOURS["adamw"].lower()


def test_a_long_name_is_shortened_in_the_middle():
    assert shortened("gpt2_adamw_seed1_4gpu", 11) == "gpt2_…_4gpu"
    assert shortened("short", 11) == "short"
