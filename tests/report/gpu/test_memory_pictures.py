"""No text of a GPU picture is cut or on top of another, from one GPU and run to 64 GPUs and 30 runs."""

from __future__ import annotations

from dataclasses import replace

import matplotlib.style
import pytest

from figure_layout import layout_problems
from kmatrix.report.figure import RC_PARAMS
from kmatrix.report.gpu.graphs.balance import load_balance
from kmatrix.report.gpu.graphs.device_memory import memory_by_device
from kmatrix.report.gpu.graphs.memory_timeline import memory_over_time
from kmatrix.report.gpu.graphs.run_memory import memory_by_run
from kmatrix.report.gpu.numbers import DeviceNumbers, GpuNumbers, RecordedPhase, RunGpus, Statistics, TimelinePoint

OPTIMIZERS = ("adamw", "muon", "sgd", "adam", "adafactor")
NAMES = {
    "short": "gpt2_{optimizer}_{gpus}gpu_seed{place}",
    "long": "gpt2_{optimizer}_a-data-mix-with-a-long-name-{place}_lr6e-4_cosine-with-restarts_{gpus}gpu_seed{place}",
}
PICTURES = (memory_by_run, memory_by_device, load_balance, memory_over_time)
ALL = [(gpus, count) for gpus in (1, 8, 64) for count in (1, 5, 30)]
SIZES = [pytest.param(*size, marks=() if size in ((1, 1), (8, 5)) else pytest.mark.nightly) for size in ALL]


def runs_of(gpus, count, names="short", mib=21_000.0):
    """Return runs that differ in memory; the fourth one failed."""
    runs = []
    for place in range(count):
        optimizer = OPTIMIZERS[place % len(OPTIMIZERS)]
        used = [mib + 350 * place + 13 * index for index in range(gpus)]
        devices = tuple(
            DeviceNumbers(
                gpu_index=index,
                gpu_name="NVIDIA H100 80GB HBM3",
                rank=index,
                memory_total=81_559.0,
                memory_used=Statistics(mean=mean, deviation=0.02 * mean, minimum=0.9 * mean, maximum=1.1 * mean),
                utilization=Statistics(mean=95 - index % 7, deviation=1.0, minimum=0.0, maximum=100.0),
                power=Statistics(mean=600.0 + index % 5, deviation=5.0, minimum=70.0, maximum=700.0),
            )
            for index, mean in enumerate(used)
        )
        gpu = GpuNumbers(
            evidence=f"r{place}/gpu_summary.json",
            device_type="nvidia",
            devices=devices,
            samples=600,
            seconds=600.0 + 50 * place,
            total_mean=sum(used),
            total_max=1.1 * sum(used),
            phases=(
                RecordedPhase(name="set-up", begin=0.0, end=30.0),
                RecordedPhase(name="evaluation", begin=200.0, end=260.0),
                RecordedPhase(name="checkpoint", begin=300.0, end=330.0),
                RecordedPhase(name="ending", begin=580.0, end=600.0),
            ),
            timeline=tuple(TimelinePoint(10.0 * at, tuple(used)) for at in range(60 + 5 * place)),
        )
        name = NAMES[names].format(optimizer=optimizer, gpus=gpus, place=place)
        runs.append(RunGpus(name=name, optimizer=optimizer, status="failed" if place == 3 else "finished", gpu=gpu))
    return runs


def figure_of(picture, runs):
    with matplotlib.style.context(["default", RC_PARAMS]):
        return picture("test_matrix_results_20250115_103000", runs)


@pytest.mark.parametrize(("gpus", "count"), SIZES)
@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.__name__)
def test_no_text_of_the_four_pictures_is_cut_or_covered(picture, gpus, count):
    figure = figure_of(picture, runs_of(gpus, count, "long"))
    if isinstance(figure, str):
        assert gpus == 1
        return
    assert layout_problems(figure) == []


def test_a_panel_has_the_capacity_and_the_peak_of_its_gpu():
    figure = figure_of(memory_by_device, runs_of(2, 1))
    first, second = figure.axes
    assert [text.get_text() for text in second.texts] == ["22.6"]  # 1.1 * 21,013 MiB
    (capacity,) = [line for line in first.lines if line.get_linestyle() == "--"]
    assert list(capacity.get_xdata()) == pytest.approx([81_559.0 / 1024] * 2)
    assert first.get_xlim()[1] > 81_559.0 / 1024
    assert figure.get_supxlabel().endswith("dashed: capacity")


def whiskers(figure, mean, unit=1024.0):
    """Return how far the whiskers of the first panel reach below and above the mean, MiB."""
    spans = [segment for lines in figure.axes[0].collections for segment in lines.get_segments()]
    return [(mean - unit * one[0][0], unit * one[1][0] - mean) for one in spans]


def test_a_whisker_does_not_reach_beyond_the_measured_values():
    (run,) = runs_of(2, 1)
    memory = Statistics(mean=20_000.0, deviation=9_000.0, minimum=18_000.0, maximum=23_000.0)
    devices = tuple(replace(device, memory_used=memory) for device in run.gpu.devices)
    figure = figure_of(memory_by_device, [replace(run, gpu=replace(run.gpu, devices=devices))])
    assert whiskers(figure, 20_000.0) == [(pytest.approx(2_000.0), pytest.approx(3_000.0))]
