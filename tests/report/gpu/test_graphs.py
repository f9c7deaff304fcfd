"""The pictures of devices: complete, readable, with gaps, and in colours that all readers tell apart."""

from __future__ import annotations

import json
import math
from datetime import datetime, timedelta
from itertools import combinations, product
from pathlib import Path

import matplotlib.style
import pytest
from matplotlib.text import Text

from colour_vision import VISION, distance
from figure_layout import layout_problems
from gpu_factory import FakeGpus, record, write_phases
from kmatrix.records.paths import RunDir
from kmatrix.report.figure import RC_PARAMS
from kmatrix.report.gpu import graphs
from kmatrix.report.gpu.graphs import draw_recordings, main, read_recordings
from kmatrix.report.gpu.measure import gpu_of
from kmatrix.report.gpu.recordings import recordings_of
from kmatrix.report.gpu.timeline import timeline_of
from kmatrix.report.results import Run

NAMES = [
    *("gpu_memory_comparison", "per_gpu_memory_breakdown", "gpu_load_balance_analysis", "gpu_timeline_utilization"),
    *("gpu_memory_timeline", "gpu_timeline_power", "gpu_timeline_temperature", "gpu_timeline_sm_clock"),
]
SIZES = [(1, 1), (8, 5), *(pytest.param(*size, marks=pytest.mark.nightly) for size in ((4, 30), (64, 1), (64, 30)))]
OPTIMIZERS = ("adamw", "muon", "sgd", "adam", "adafactor")


def runs_of(root, devices, count, **values):
    """Return runs that differ in memory; the fourth one failed."""
    found = []
    for number in range(count):
        optimizer = OPTIMIZERS[number % 5]
        run_dir = RunDir(root / f"gpt2_{optimizer}_a-data-mix-with-a-long-name_lr{6 + number // 5}e-4_seed{number}")
        of_each = {"power": 150.0, "utilization": 95.0, "memory": 12_000.0 + 350 * number} | values
        gpus = {name: (value,) * devices for name, value in of_each.items() if isinstance(value, float)}
        rest = {name: value for name, value in values.items() if not isinstance(value, float)}
        record(run_dir, FakeGpus(samples=40, **gpus, **rest))
        write_phases(run_dir, ("set-up", 0, 8), ("evaluation", 15, 18), ("checkpoint", 25, 27), end=35)
        gpu = gpu_of(run_dir)
        status = "failed" if number == 3 else "finished"
        found.append(Run(name=run_dir.name, optimizer=optimizer, status=status, gpu=gpu))
    return found


def figures(root, runs):
    """Return the figures of runs by name, or the reason why there is none."""
    known = [(one, one.gpu) for one in runs]
    timed = [(row, timeline_of(recordings_of(RunDir(root / row[0].name)))) for row in known]
    with matplotlib.style.context(["default", RC_PARAMS]):
        return {
            "bars": graphs.bars("matrix", known),
            "per_gpu": graphs.per_gpu("matrix", known),
            "balance": graphs.balance("matrix", known),
            **{quantity: graphs.over_time("matrix", timed, quantity) for quantity in graphs.METRICS},
        }


@pytest.mark.parametrize(("devices", "count"), SIZES)
def test_no_text_is_cut_off_or_overlaps(tmp_path, devices, count):
    drawn = figures(tmp_path, runs_of(tmp_path, devices, count))
    assert [name for name, figure in drawn.items() if isinstance(figure, str)] == (
        ["per_gpu", "balance"] if devices == 1 else []
    )
    for figure in drawn.values():
        if not isinstance(figure, str):
            assert layout_problems(figure) == []


def test_a_file_per_picture_is_written_and_what_is_missing_is_named(tmp_path):
    runs = runs_of(tmp_path, 2, 1)
    unread = gpu_of(RunDir(tmp_path / "bad"))
    assert unread is None
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "gpu_metrics.csv").write_text("timestamp,gpu_index\n")
    bad = Run(name="bad", status="finished", gpu=gpu_of(RunDir(tmp_path / "bad")))
    files, (note,) = graphs.draw(tmp_path, [*runs, bad], {}, tmp_path / "graphs")
    assert [path.stem for path in files] == NAMES
    assert all(path.stat().st_size > 0 for path in files)
    assert note.startswith("bad: gpu_metrics.csv is not a GPU recording")


@pytest.mark.parametrize(
    ("devices", "shape"), [(2, (1, 2)), (4, (2, 2)), (6, (2, 3)), (8, (2, 4)), (16, (4, 4)), (12, (3, 4))]
)
def test_the_grid_of_a_panel_per_gpu(tmp_path, devices, shape):
    figure = graphs.per_gpu("matrix", [(one, one.gpu) for one in runs_of(tmp_path, devices, 1)])
    grid = figure.axes[0].get_subplotspec().get_gridspec()
    assert (grid.nrows, grid.ncols, len(figure.axes)) == (*shape, devices)


def test_memory_has_its_unit_its_peak_and_its_capacity(tmp_path):
    drawn = figures(tmp_path, runs_of(tmp_path, 2, 1))
    (axes,) = drawn["bars"].axes
    assert "23.43 GiB on 2 GPUs, peak 23.53 of 48.00" in axes.get_yticklabels()[0].get_text()
    assert [line.get_xdata()[0] for line in axes.lines[-1:]] == [48.0]
    panel = drawn["memory_used"].axes[0]
    assert drawn["memory_used"].get_supylabel() == "memory (GiB)"
    assert 24.0 in [line.get_ydata()[0] for line in panel.lines]
    assert panel.get_ylim()[1] > 24.0


def test_a_lost_gpu_is_a_gap_of_its_line(tmp_path):
    panel = figures(tmp_path, runs_of(tmp_path, 2, 1, lost={1: 20}))["power"].axes[0]
    unknown = [[math.isnan(value) for value in line.get_ydata()] for line in panel.lines]
    assert unknown == [[False] * 40, [False] * 20 + [True] * 20]


def test_the_worst_of_many_gpus_is_named_next_to_their_range(tmp_path):
    each = [150.0] * 9 + [90.0]
    run_dir = RunDir(tmp_path / "gpt2_adamw")
    record(run_dir, FakeGpus(memory=(1.0,) * 10, power=each, utilization=(1.0,) * 10))
    runs = [Run(name="gpt2_adamw", status="finished", gpu=gpu_of(run_dir))]
    figure = figures(tmp_path, runs)["power"]
    assert figure.axes[0].get_title(loc="left") == "gpt2_adamw, GPU 9"
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["mean, lowest and highest of all", "the one farthest from the mean"]


def test_simulated_gpus_are_marked_in_every_picture(tmp_path):
    for name, figure in figures(tmp_path, runs_of(tmp_path, 2, 2, name="NVIDIA A10G (simulated)")).items():
        texts = [text.get_text() for text in figure.findobj(Text)]
        assert sum("(simulated" in text for text in texts) >= 2, name


@pytest.mark.parametrize("vision", VISION)
def test_colours_that_occur_together_differ_for_all_readers(vision):
    phases = [*graphs.PHASE_COLOURS.values(), "#FFFFFF"]
    assert min(distance(*pair, vision) for pair in combinations(phases, 2)) > 15
    assert min(distance(*pair, vision) for pair in combinations(graphs.DEVICE_COLOURS, 2)) > 20
    assert min(distance(*pair, vision) for pair in product(graphs.DEVICE_COLOURS, phases)) > 15


# ---- single recordings -------------------------------------------------------------------------------------------


def original(path, *, count=200, base=80.0, gpus=None, whole=True, name="AMD Radeon PRO W7900"):
    """Write a file as the original project's gputop.py writes it; gpus: in its layout for several GPUs."""

    def gpu(index, at):
        return {
            **{"gpu_index": index, "gpu_name": name, "utilization": base + at % 5, "memory_used": 9000.0 + at},
            **{"memory_total": 24576.0, "temperatures": {"edge": 60.0, "junction": 75.0 + index}},
            **{"temp_limits": {}, "power": 200.0 + 10 * index, "clocks": {"graphics": 2100.0}, "clock_states": {}},
        }

    begin, entries = datetime(2025, 1, 2, 3, 4, 5), []
    for at in range(count):
        stamp = (begin + timedelta(seconds=at)).isoformat()
        several = {"multi_gpu_data": [gpu(index, at) for index in range(gpus or 0)], "aggregate_stats": {}}
        entries.append({"timestamp": stamp, **(several if gpus else gpu(0, at))})
    text = json.dumps(entries, indent=2)
    path.write_text(text if whole else text[: 2 * len(text) // 3])
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("gpus", [None, 4])
def test_a_file_of_the_original_is_drawn_with_its_summary(here, capsys, gpus):
    path = original(here / "stats.json", gpus=gpus)
    assert main(["--gen-graph", str(path)]) == 0
    assert (here / "stats_plot.png").read_bytes().startswith(b"\x89PNG")
    summary = (here / "stats_summary.txt").read_text()
    assert "200 samples in 199.0 s" in summary
    (line,) = [line for line in summary.splitlines() if line.startswith("utilization, %   GPU 0,")]
    assert line.split()[-3:] == ["82.00", "80.00", "84.00"]
    assert sum(line.startswith("power, W") for line in summary.splitlines()) == (gpus or 1)
    out = capsys.readouterr().out
    assert summary in out
    assert f"wrote {here / 'stats_plot.png'}" in out


def test_two_files_are_compared_in_the_current_folder(here, capsys):
    first, second = original(here / "a.json"), original(here / "b.json", base=40.0, count=100)
    assert main(["--compare", str(first), str(second)]) == 0
    assert (here / "gpu_comparison_plot.png").is_file()
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines() if line.startswith("utilization, %")]
    assert [(Path(line[2]).name, line[3]) for line in lines] == [("a.json", "82.00"), ("b.json", "42.00")]
    assert "b.json: 100 samples in 99.0 s" in out


@pytest.mark.parametrize("gpus", [2, pytest.param(64, marks=pytest.mark.nightly)])
def test_the_graphs_of_recordings_are_readable_and_marked_if_simulated(here, gpus):
    one, other = read_recordings(
        [original(here / "a.json", gpus=gpus), original(here / "b.json", name="NVIDIA A10G (simulated)")]
    )
    with matplotlib.style.context(["default", RC_PARAMS]):
        drawn = [draw_recordings(each) for each in ([one], [one, other], [other])]
    assert [layout_problems(figure) for figure in drawn] == [[], [], []]
    marks = [" ".join(text.get_text() for text in figure.findobj(Text)) for figure in drawn]
    assert ["simulated" in mark for mark in marks] == [False, True, True]


def test_the_gpus_of_a_recording_are_a_band_around_their_mean(here):
    recordings = read_recordings([original(here / "a.json", gpus=4), original(here / "b.json")])
    with matplotlib.style.context(["default", RC_PARAMS]):
        figure = draw_recordings(recordings)
    (power,) = [axes for axes in figure.axes if axes.get_title(loc="left") == "power, W"]
    heights = power.collections[0].get_paths()[0].vertices[:, 1]  # of the file with several GPUs
    assert (heights.min(), heights.max()) == (200.0, 230.0)
    assert power.lines[0].get_ydata()[0] == 215.0


def test_a_truncated_file_is_drawn_and_the_loss_is_reported(here, capsys):
    original(here / "cut.json", whole=False)
    assert main(["--gen-graph", "cut.json"]) == 0
    assert "truncated: 133 complete samples" in (here / "cut_summary.txt").read_text()
    assert main(["--compare", "cut.json", "cut.json"]) == 0
    assert "\n! cut.json: truncated" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["[]", "not json", None])
def test_a_file_without_a_sample_is_one_error_and_writes_nothing(here, capsys, text):
    if text is not None:
        (here / "x.json").write_text(text)
    assert main(["--gen-graph", "x.json"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: x.json")
    assert "Traceback" not in err
    assert [path.name for path in here.iterdir()] == (["x.json"] if text is not None else [])
