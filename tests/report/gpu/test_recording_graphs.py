"""Graphs of single recordings: the original project's files and ours, truncated, damaged and compared."""

from __future__ import annotations

import json
import math
from datetime import datetime, timedelta

import matplotlib.style
import pytest

from figure_layout import layout_problems
from gputop_values import Recorder
from kmatrix.report.figure import RC_PARAMS
from kmatrix.report.gpu.graphs.recordings import (
    draw_comparison,
    draw_histograms,
    draw_recording,
    main,
    read_recording,
    run,
)


def original(path, *, count=200, base=80.0, gpus=None, whole=True):
    """Write a file as the original project's gputop.py writes it; gpus: in its layout for several GPUs."""

    def gpu(index, at):
        return {
            **{"gpu_index": index, "gpu_name": "AMD Radeon PRO W7900", "gpu_type": "amd"},
            **{"utilization": base + at % 5, "memory_used": 9000.0 + at, "memory_total": 24576.0},
            **{"memory_percent": 40.0, "temperatures": {"edge": 60.0, "junction": 75.0 + index}},
            **{"temp_limits": {}, "power": 200.0 + 10 * index, "power_limit": 300.0, "fan_speed": 30},
            **{"clocks": {"graphics": 2100.0}, "clock_states": {}, "performance_level": "auto"},
        }

    begin, entries = datetime(2025, 1, 2, 3, 4, 5), []
    for at in range(count):
        stamp = (begin + timedelta(seconds=at)).isoformat()
        several = {"multi_gpu_data": [gpu(index, at) for index in range(gpus or 0)], "aggregate_stats": {}}
        entries.append({"timestamp": stamp, **(several if gpus else gpu(0, at))})
    text = json.dumps(entries, indent=2)
    path.write_text(text if whole else text[: 2 * len(text) // 3])
    return path


def drawn(path):
    data = path.read_bytes()
    return data.startswith(b"\x89PNG") and len(data) > 10_000


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("gpus", [None, 4])
def test_a_file_of_the_original_is_drawn_with_its_summary(here, capsys, gpus):
    path = original(here / "stats.json", gpus=gpus)
    assert main(["--gen-graph", str(path)]) == 0
    assert drawn(here / "stats_plot.png")
    summary = (here / "stats_summary.txt").read_text()
    assert "200 in 199.0 s" in summary
    (line,) = [line for line in summary.splitlines() if line.startswith("utilization, %") and line.split()[2] == "0"]
    assert line.split()[3:] == ["82.00", "80.00", "84.00"]
    assert sum(line.startswith("power, W") for line in summary.splitlines()) == (gpus or 1)
    out = capsys.readouterr().out
    assert summary in out
    assert f"wrote {here / 'stats_plot.png'}" in out


def test_two_files_are_compared_in_the_current_folder(here, capsys):
    first, second = original(here / "a.json"), original(here / "b.json", base=40.0, count=100)
    assert main(["--compare", str(first), str(second)]) == 0
    assert drawn(here / "gpu_comparison.png")
    assert drawn(here / "gpu_comparison_histograms.png")
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("utilization, %")]
    assert line.split()[2:] == ["82.00", "42.00", "-48.8", "%"]
    assert "b.json: 100 samples in 99.0 s" in out


@pytest.mark.parametrize("gpus", [2, pytest.param(64, marks=pytest.mark.nightly)])
def test_the_graphs_of_recordings_are_readable_with_any_number_of_gpus(here, gpus):
    recording = read_recording(original(here / "a.json", gpus=gpus))
    other = read_recording(original(here / "b.json"))
    with matplotlib.style.context(["default", RC_PARAMS]):
        figure = draw_recording(recording)
        assert layout_problems(figure) == []
        assert layout_problems(draw_comparison([recording, other], ["a", "b"])) == []
        assert layout_problems(draw_histograms([recording, other], ["a", "b"])) == []
    assert [image.get_array().shape for axes in figure.axes for image in axes.images] == (
        [(64, 200)] * 5 if gpus == 64 else []
    )
    if gpus == 2:
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["GPU 0", "GPU 1"]


def test_the_gpus_of_a_recording_are_a_band_around_their_mean(here):
    recordings = [read_recording(original(here / "a.json", gpus=4)), read_recording(original(here / "b.json"))]
    panels = draw_comparison(recordings, ["a", "b"]).axes
    (power,) = [axes for axes in panels if any("power" in text.get_text() for text in axes.texts)]
    (band,) = power.collections  # of the file with several GPUs
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (200.0, 230.0)
    assert power.lines[0].get_ydata()[0] == 215.0


def marked(figure):
    return "(simulated)" in " ".join(text.get_text() for text in figure.texts)


def test_graphs_and_texts_of_simulated_gpus_are_marked(here, capsys):
    name = "NVIDIA A10G (simulated)"
    original(here / "real.json")
    path = original(here / "sim.json")
    path.write_text(path.read_text().replace("AMD Radeon PRO W7900", name))
    Recorder(here / "gpt2_adamw_2gpu", name=name).write(50, utilization=60.0)
    sim, run_dir, real = map(read_recording, (path, here / "gpt2_adamw_2gpu", here / "real.json"))
    with matplotlib.style.context(["default", RC_PARAMS]):
        for draw in (draw_comparison, draw_histograms):
            one = draw([sim, real], ["a", "b"])
            assert "(some recordings simulated)" in " ".join(text.get_text() for text in one.texts)
            assert [text.get_text() for text in one.legends[0].get_texts()] == ["a (simulated)", "b"]
        assert marked(draw_histograms([sim, sim], ["a", "b"]))
        assert [marked(draw_recording(one)) for one in (run_dir, real)] == [True, False]
    main(["--gen-graph", "sim.json"])
    assert "simulated, not measured" in capsys.readouterr().out


def test_the_time_between_two_attempts_is_a_gap(here):
    recorder = Recorder(here / "gpt2_adamw_2gpu")
    recorder.write(50, utilization=60.0)
    recorder.count = 7200  # half a second each
    recorder.write(50, utilization=60.0)
    line = read_recording(here / "gpt2_adamw_2gpu").lines["utilization"][0]
    unknown = [time for time, value in zip(line.times, line.values, strict=True) if math.isnan(value)]
    assert unknown == [24.5, 3600.0]


def test_a_truncated_file_is_drawn_and_the_loss_is_reported(here, capsys):
    original(here / "cut.json", whole=False)
    assert main(["--gen-graph", "cut.json"]) == 0
    assert "the file is truncated" in capsys.readouterr().out
    assert "the file is truncated" in (here / "cut_summary.txt").read_text()
    assert main(["--compare", "cut.json", "cut.json"]) == 0
    assert "\nnote: cut.json: the file is truncated" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["[]", "not json", None])
def test_a_file_without_a_sample_is_one_error_and_writes_nothing(here, capsys, text):
    if text is not None:
        (here / "x.json").write_text(text)
    assert run(["--gen-graph", "x.json"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: x.json")
    assert "Traceback" not in err
    assert [path.name for path in here.iterdir()] == (["x.json"] if text is not None else [])


@pytest.mark.parametrize(("column", "value"), [("temperatures", -5000.0)])
def test_values_that_cannot_be_true_are_not_drawn(here, capsys, column, value):
    path = original(here / "a.json", gpus=2)
    entries = json.loads(path.read_text())
    entries[5]["multi_gpu_data"][1][column] = {"junction": value} if column == "temperatures" else value
    path.write_text(json.dumps(entries))
    assert main(["--gen-graph", str(path)]) == 0
    assert drawn(here / "a_plot.png")
    out = capsys.readouterr().out
    kind = "negative value" if value < 0 else "value"
    assert f"note       1 {kind} of {column.removesuffix('s')}" in out
    assert max(map(len, out.splitlines())) < 160
