"""Pictures stay readable with long names, simulated and failed runs, several nodes, ranks and impossible values."""

from __future__ import annotations

from dataclasses import replace

import matplotlib.style
import pytest

from figure_layout import layout_problems
from gpu_factory import FakeGpus, record, write_phases
from kmatrix.records.paths import RunDir
from kmatrix.report.figure import RC_PARAMS
from kmatrix.report.folders import with_timelines
from kmatrix.report.gpu.graphs.device_timelines import METRICS, over_time
from kmatrix.report.gpu.graphs.memory_timeline import memory_over_time
from kmatrix.report.gpu.numbers import RunGpus
from kmatrix.report.gpu.read_gpu import TrainingTotals, read_gpu


def run_of(root, name, gpus=None, *, status="finished", device="gpu"):
    run_dir = RunDir(root / name)
    record(run_dir, gpus or FakeGpus(samples=20))
    write_phases(run_dir, ("set-up", 0, 5))
    return RunGpus(name=name, optimizer="adamw", status=status, gpu=read_gpu(run_dir, TrainingTotals(device=device)))


def figure_of(root, runs, word, name="matrix"):
    metric = next(each for each in METRICS if each.word == word)
    with matplotlib.style.context(["default", RC_PARAMS]):
        return over_time(name, runs, root, metric)


def all_texts(figure):
    return " ".join(text.get_text() for text in figure.texts)


@pytest.mark.parametrize("count", [1, 5, pytest.param(30, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("mixed", [False, True], ids=["all-simulated", "some-simulated"])
def test_titles_with_every_note_have_room(tmp_path, count, mixed):
    simulated = FakeGpus(samples=4, name="NVIDIA A10G (simulated)")
    runs = [
        run_of(
            tmp_path,
            f"gpt2_adamw_lr{number}e-4_mix-{number}_4gpu_seed{number}",
            FakeGpus(samples=4) if mixed and number == 0 else simulated,
            status="skipped" if number % 2 else "failed",
        )
        for number in range(count)
    ]
    figure = figure_of(tmp_path, runs, "power")
    titles = [axes.get_title(loc="left") for axes in figure.axes[:count]]
    assert layout_problems(figure) == []
    assert len(set(titles)) == count
    # The mark is in the title of a run, unless the line above all panels says that all are simulated.
    marks = ["simulated, " if mixed and number else "" for number in range(count)]
    ends = [f" ({mark}{run.status})" for mark, run in zip(marks, runs, strict=True)]
    assert [title.endswith(end) for title, end in zip(titles, ends, strict=True)] == [True] * count
    assert ("simulated" in all_texts(figure)) == (not mixed or count > 1)


@pytest.mark.parametrize(("word", "quantity"), [("temperature", "temperature"), ("sm_clock", "sm_clock")])
def test_an_impossible_value_does_not_stretch_the_axis(tmp_path, word, quantity):
    class Damaged(FakeGpus):
        def _sample(self, number, index, wave):
            sample = super()._sample(number, index, wave)
            return replace(sample, **{quantity: 1e30}) if number == 5 else sample

    figure = figure_of(tmp_path, [run_of(tmp_path, "gpt2_adamw_4gpu", Damaged(samples=20))], word)
    assert figure.axes[0].get_ylim()[1] < 2000


@pytest.mark.parametrize("devices", [2, 9])
def test_each_run_has_its_own_time_if_one_is_much_longer(tmp_path, devices):
    loads = {"memory": (900.0,) * devices, "power": (90.0,) * devices, "utilization": (9.0,) * devices}
    runs = [run_of(tmp_path, f"r{count}", FakeGpus(samples=count, **loads)) for count in (20, 4000)]
    figure = figure_of(tmp_path, runs, "power")
    ends = [axes.get_xlim()[1] for axes in figure.axes[:2]]
    assert ends == pytest.approx([19.0, 3999 / 60])
    assert [axes.get_xlabel() for axes in figure.axes[:2]] == ["time (seconds)", "time (minutes)"]
    assert "on an axis of its own" in all_texts(figure)
    assert layout_problems(figure) == []
    with matplotlib.style.context(["default", RC_PARAMS]):
        memory = memory_over_time("matrix", with_timelines(tmp_path, runs))
    assert [axes.get_xlim()[1] for axes in memory.axes] == pytest.approx([19.0, 3999 / 60], rel=0.01)
    assert "each on an axis of its own" in all_texts(memory)
    assert layout_problems(memory) == []
    alike = figure_of(tmp_path, [run_of(tmp_path, f"s{count}", FakeGpus(samples=count)) for count in (20, 40)], "power")
    assert "axis of its own" not in all_texts(alike)
