"""The pictures of the devices over time: complete, readable, with gaps, and in colours that all readers tell apart."""

from __future__ import annotations

import math
from itertools import combinations, product

import matplotlib.style
import pytest
from matplotlib.figure import Figure

from colour_vision import VISION, distance
from figure_layout import layout_problems
from gpu_factory import FakeGpus, record, write_phases
from kmatrix.records.paths import RunDir
from kmatrix.report.figure import COLOURS, OTHER_COLOURS, RC_PARAMS
from kmatrix.report.gpu.graphs.device_timelines import METRICS, draw, over_time
from kmatrix.report.gpu.graphs.palette import CLASS_COLOURS, DEVICE_COLOURS, PHASE_COLOURS, TRAINING_COLOUR
from kmatrix.report.gpu.numbers import RunGpus
from kmatrix.report.gpu.read_gpu import TrainingTotals, read_gpu

NAMES = [f"gpu_timeline_{word}.png" for word in ("utilization", "power", "temperature", "sm_clock", "memory")]
QUICK = [(1, 1), (9, 5)]  # devices, runs
ALL = list(product((1, 8, 64), (1, 5, 30)))
OPTIMIZERS = ("adamw", "muon", "sgd", "adam", "adafactor")


def runs_of(root, devices, runs, **values):
    found = []
    for number in range(runs):
        optimizer = OPTIMIZERS[number % 5]
        run_dir = RunDir(root / f"gpt2_{optimizer}_lr{6 + number // 5}e-4_{devices}gpu_seed{number}")
        of_each = {"power": 150.0, "utilization": 95.0, "memory": 12_000.0} | values
        gpus = {name: (value,) * devices for name, value in of_each.items() if name not in ("lost", "device_type")}
        rest = {name: value for name, value in values.items() if name in ("lost", "device_type")}
        record(run_dir, FakeGpus(samples=40, **gpus, **rest))
        write_phases(run_dir, ("set-up", 0, 8), ("evaluation", 15, 18), ("checkpoint", 25, 27))
        gpu = read_gpu(run_dir, TrainingTotals(device=values.get("device_type", "gpu")))
        status = "failed" if number == 3 else "finished"
        found.append(RunGpus(name=run_dir.name, optimizer=optimizer, status=status, gpu=gpu))
    return found


def figure_of(root, runs, word):
    metric = next(each for each in METRICS if each.word == word)
    with matplotlib.style.context(["default", RC_PARAMS]):
        return over_time("matrix", runs, root, metric)


def check_layout(root, devices, runs, metrics):
    made = runs_of(root, devices, runs)
    for metric in metrics:
        with matplotlib.style.context(["default", RC_PARAMS]):
            figure = over_time("matrix", made, root, metric)
            assert isinstance(figure, Figure)
            assert layout_problems(figure) == []
            assert sum(axes.get_visible() for axes in figure.axes) == runs + (devices > 8)  # with its bar of colours


@pytest.mark.parametrize(("devices", "runs"), QUICK)
def test_no_text_is_cut_off_or_overlaps(tmp_path, devices, runs):
    check_layout(tmp_path, devices, runs, METRICS[-1:])  # memory has the longest legend


@pytest.mark.nightly
@pytest.mark.parametrize(("devices", "runs"), ALL)
def test_no_text_is_cut_off_or_overlaps_with_any_number_of_devices_and_runs(tmp_path, devices, runs):
    is_extreme = (devices, runs) in {ALL[0], ALL[-1]}
    # The metrics differ in a label and in their ticks: all of them at both ends, the first and the last at all sizes.
    check_layout(tmp_path, devices, runs, METRICS if is_extreme else (METRICS[0], METRICS[-1]))


def test_a_picture_per_metric_is_written(tmp_path):
    runs = runs_of(tmp_path, 2, 1)
    files, missing = draw("m", runs, tmp_path, tmp_path / "graphs")
    assert ([path.name for path in files], missing) == (NAMES, [])
    assert all(path.stat().st_size > 0 for path in files)


def test_a_lost_gpu_is_a_gap(tmp_path):
    figure = figure_of(tmp_path, runs_of(tmp_path, 2, 1, lost={1: 20}), "power")
    lines = [line for line in figure.axes[0].lines if line.get_linestyle() == "-"]
    unknown = [[math.isnan(value) for value in line.get_ydata()] for line in lines]
    assert unknown == [[False] * 40, [False] * 20 + [True] * 20]


def test_memory_is_in_gib_with_the_line_of_the_capacity(tmp_path):
    figure = figure_of(tmp_path, runs_of(tmp_path, 1, 1), "memory")
    assert figure.get_supylabel() == "memory (GiB)"
    heights = [line.get_ydata()[0] for line in figure.axes[0].lines]
    assert 24.0 in heights  # of 24,576 MiB
    assert figure.axes[0].get_ylim()[1] > 24


def test_many_devices_are_a_heat_map_with_a_row_each(tmp_path):
    figure = figure_of(tmp_path, runs_of(tmp_path, 16, 1, lost={3: 20}), "power")
    axes, bar = figure.axes
    (image,) = axes.images
    rows = image.get_array()
    assert rows.shape == (16, 40)
    assert [row.mask.sum() for row in rows[2:5]] == [0, 20, 0]  # the lost GPU
    assert (bar.get_ylabel(), axes.get_title(loc="left")) == ("power (W)", "gpt2_adamw_lr6e-4_16gpu_seed0")
    assert [text.get_text() for text in axes.get_yticklabels()] == [str(place) for place in range(0, 16, 2)]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["set-up", "evaluation", "checkpoint", "no sample"]


def test_lines_with_equal_values_are_all_visible(tmp_path):
    figure = figure_of(tmp_path, runs_of(tmp_path, 4, 1), "power")
    dashed = [line for line in figure.axes[0].lines if line.get_linewidth() > 2]
    # matplotlib scales the pattern with the width of the line.
    offsets = [line._unscaled_dash_pattern[0] for line in dashed]
    patterns = [line._unscaled_dash_pattern[1] for line in dashed]
    assert offsets == [0.0, 3.0, 6.0, 9.0]
    assert patterns == [(3.0, 9.0)] * 4  # each is alone on a quarter of the length


@pytest.mark.parametrize("vision", VISION)
def test_colours_that_occur_together_differ_for_all_readers(vision):
    phases = [*PHASE_COLOURS.values(), "#FFFFFF"]
    assert min(distance(*pair, vision) for pair in combinations(phases, 2)) > 15
    assert min(distance(*pair, vision) for pair in combinations(DEVICE_COLOURS, 2)) > 20
    assert min(distance(*pair, vision) for pair in product(DEVICE_COLOURS, phases)) > 15
    assert min(distance(TRAINING_COLOUR, phase, vision) for phase in phases) > 20
    runs = [*COLOURS.values(), *OTHER_COLOURS]
    assert min(distance(*pair, vision) for pair in combinations(runs, 2)) > 14
    assert min(distance(*pair, vision) for pair in product(runs, [*phases, TRAINING_COLOUR])) > 13
    assert min(distance(*pair, vision) for pair in combinations(CLASS_COLOURS.values(), 2)) > 18


def test_the_simulation_knows_the_colours_that_red_green_blind_readers_confuse():
    pair = ("#C00000", "#5A5A00")
    assert distance(*pair, "normal") > 2 * distance(*pair, "deuteranopia")
