"""Pictures stay readable with long names, simulated and failed runs, several nodes, ranks and impossible values."""

from __future__ import annotations

from dataclasses import replace

import matplotlib.style
import pytest

from figure_layout import layout_problems
from gpu_factory import FakeGpus, record, write_phases, write_samples
from kmatrix.records.files import write_json
from kmatrix.records.jobs.paths import NodeDir
from kmatrix.records.paths import RunDir
from kmatrix.report.figure import RC_PARAMS
from kmatrix.report.folders import with_timelines
from kmatrix.report.gpu.graphs.balance import load_balance
from kmatrix.report.gpu.graphs.device_memory import memory_by_device
from kmatrix.report.gpu.graphs.device_timelines import METRICS, over_time
from kmatrix.report.gpu.graphs.memory_timeline import memory_over_time
from kmatrix.report.gpu.graphs.palette import DEVICE_COLOURS
from kmatrix.report.gpu.graphs.run_memory import memory_by_run
from kmatrix.report.gpu.graphs.shared import MAX_PANELS
from kmatrix.report.gpu.numbers import RunGpus
from kmatrix.report.gpu.read_gpu import TrainingTotals, read_gpu

LONG = "a-results-folder-with-a-long-name-" * 5
FOUR = (memory_by_run, memory_by_device, load_balance, memory_over_time)


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


@pytest.mark.parametrize("count", [1, 2, 5, *(pytest.param(count, marks=pytest.mark.slow) for count in (16, 30))])
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


def test_the_name_of_a_folder_is_shortened(tmp_path):
    runs = [run_of(tmp_path, f"gpt2_adamw_{number}") for number in range(2)]
    figure = figure_of(tmp_path, runs, "power", name=LONG)
    assert layout_problems(figure) == []
    assert "time since the start of each recording" in all_texts(figure)
    for picture in FOUR:
        with matplotlib.style.context(["default", RC_PARAMS]):
            assert layout_problems(picture(LONG, with_timelines(tmp_path, runs))) == []


def nodes_of(root, *, without_phases=False):
    run_dir = RunDir(root / "gpt2_adamw_8gpu")
    for number in range(2):
        node = NodeDir(run_dir, number)
        node.recording.path.mkdir(parents=True, exist_ok=True)
        write_json(node.node_json, {"schema": 1, "node": number, "host": f"n{number + 1}", "ranks": [0, 1, 2, 3]})
        record(node.recording, FakeGpus(samples=20))
        if number == 0 or not without_phases:
            write_phases(node.recording, ("set-up", 0, 5))
    gpu = read_gpu(run_dir, TrainingTotals(device="gpu"))
    return RunGpus(name=run_dir.name, optimizer="adamw", status="finished", gpu=gpu)


def with_long_hosts(gpu):
    devices = tuple(replace(one, host=f"ip-10-0-12-{one.host}.eu-west-1.compute.internal") for one in gpu.devices)
    return replace(gpu, devices=devices, nodes={at: with_long_hosts(node) for at, node in gpu.nodes.items()})


def test_long_names_of_hosts_fit_in_the_legend(tmp_path):
    run = nodes_of(tmp_path)
    figure = figure_of(tmp_path, [replace(run, gpu=with_long_hosts(run.gpu))], "power")
    assert figure.legends[0].get_texts()[4].get_text() == "GPU 0 on ip-10-0-12-n2.eu-west-1.compute.internal"
    assert layout_problems(figure) == []


def test_a_node_that_has_no_place_in_time_is_counted(tmp_path):
    figure = figure_of(tmp_path, [nodes_of(tmp_path, without_phases=True)], "power")
    assert "without 1 node of unknown time" in all_texts(figure)
    assert {line.get_color() for line in figure.axes[0].lines} == set(DEVICE_COLOURS[:4])


def test_ranks_have_no_capacity_of_their_own(tmp_path):
    ranks = FakeGpus(samples=20, memory=(800.0, 810.0), power=(None, None), utilization=(99.0, 98.0), device_type="cpu")
    figure = figure_of(tmp_path, [run_of(tmp_path, "gpt2_adamw_2gpu", ranks, device="cpu")], "memory")
    assert figure.get_supylabel() == "memory (MiB)"
    assert figure.axes[0].get_ylim()[1] < 1000  # not up to the memory of the machine
    assert not any("capacity" in text.get_text() for text in figure.legends[0].get_texts())


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


def test_a_long_line_above_the_panels_is_wrapped(tmp_path):
    runs = [run_of(tmp_path, f"gpt2_adamw_{count}", FakeGpus(samples=count)) for count in (1, 20, 4000)]
    runs.append(run_of(tmp_path, "gpt2_adamw_none", FakeGpus(samples=20, power=(None,) * 4)))
    figure = figure_of(tmp_path, runs, "power", name=LONG)
    assert "without 2 runs (one sample, power unknown)" in all_texts(figure).replace("\n  ", " ")
    assert layout_problems(figure) == []


def test_a_run_of_unknown_memory_is_counted(tmp_path):
    runs = [run_of(tmp_path, f"gpt2_adamw_{at}", FakeGpus(samples=20)) for at in range(2)]
    lost, gpus = RunDir(tmp_path / "gpt2_adamw_lost"), FakeGpus(samples=20, lost={1: 0})
    lost.path.mkdir()
    write_samples(lost.gpu_samples, gpus, list(gpus.snapshots()))
    runs.append(RunGpus(name=lost.name, optimizer="adamw", status="finished", gpu=read_gpu(lost, TrainingTotals())))
    with matplotlib.style.context(["default", RC_PARAMS]):
        figure = memory_over_time("matrix", with_timelines(tmp_path, runs))
    assert "without 1 run of unknown memory" in " ".join(text.get_text() for text in figure.axes[0].texts)
    assert layout_problems(figure) == []


def test_runs_that_are_not_drawn_are_counted(tmp_path):
    runs = [run_of(tmp_path, f"gpt2_adamw_{number}", FakeGpus(samples=4)) for number in range(MAX_PANELS + 2)]
    figure = figure_of(tmp_path, runs, "power")
    assert "the first 30 of 32 runs" in all_texts(figure)
