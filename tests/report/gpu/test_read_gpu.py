"""GPU reports from our recordings and those of the original project: numbers, text, JSON, graphs, scripts."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_factory import FakeGpus, record, write_arrays, write_foreign, write_timings
from kmatrix.errors import RecordError
from kmatrix.gpu.devices import Device
from kmatrix.gpu.formats.binary import COLUMNS
from kmatrix.gpu.recorder.summary import RunTotals
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import RunDir
from kmatrix.report.analysis import analyse
from kmatrix.report.figure import ALARM
from kmatrix.report.folders import find_recorded, read_folder, summarize
from kmatrix.report.gpu.graphs.memory_timeline import memory_over_time
from kmatrix.report.gpu.graphs.run_memory import memory_by_run
from kmatrix.report.gpu.numbers import (
    DeviceNumbers,
    GpuNumbers,
    RunGpus,
    Statistics,
    TimelinePoint,
)
from kmatrix.report.gpu.read_gpu import TrainingTotals, add_timeline, read_gpu
from kmatrix.report.gpu.text import consolidated, gpu_sections, problems
from kmatrix.report.numbers import gpu_runs
from kmatrix.report.write import draw_graphs, write_summary
from kmatrix.status.stragglers import read_ranks
from kmatrix.text import WIDTH
from records_factory import FakeRun, make_matrix

ROOT = Path(__file__).resolve().parents[3]
FILES = [
    "gpu_memory_comparison.png",
    "per_gpu_memory_breakdown.png",
    "gpu_load_balance_analysis.png",
    "gpu_memory_timeline.png",
]
MEANS = [12_800.0, 12_750.0, 12_825.0, 12_780.0]


def gpu_run(name="gpt2_adamw_4gpu", optimizer="adamw", status="finished", gpu=None):
    return RunGpus(name=name, optimizer=optimizer, status=status, gpu=gpu)


def numbers_of(means, **changes):
    """Return the numbers of devices with these means of memory."""
    devices = tuple(
        DeviceNumbers(
            gpu_index=index,
            gpu_name="NVIDIA A10G",
            memory_used=Statistics(mean=value, deviation=1.0, minimum=value - 1, maximum=value + 1),
        )
        for index, value in enumerate(means)
    )
    facts = {"evidence": "x", "device_type": "nvidia", "samples": 10, "seconds": 10.0, "total_mean": sum(means)}
    return GpuNumbers(devices=devices, **{**facts, "total_max": sum(means) + len(means), **changes})


def read(folder, gpus, **work):
    record(RunDir(folder), gpus)
    return read_gpu(RunDir(folder), TrainingTotals(**work))


# Numbers


def test_the_summary_and_the_recording_of_the_recorder_give_the_same_numbers(tmp_path):
    summed = read(tmp_path, FakeGpus())
    RunDir(tmp_path).gpu_summary.unlink()
    RunDir(tmp_path).gpu_samples.unlink()
    streamed = read_gpu(RunDir(tmp_path), TrainingTotals())
    assert summed.evidence.endswith("gpu_summary.json")
    assert streamed.evidence.endswith("_multi_gpu.json")
    for left, right in zip(summed.devices, streamed.devices, strict=True):
        for quantity in ("memory_used", "utilization", "power", "temperature", "sm_clock"):
            a, b = getattr(left, quantity), getattr(right, quantity)
            assert (a.mean, a.minimum, a.maximum) == pytest.approx((b.mean, b.minimum, b.maximum))
            assert a.deviation == pytest.approx(b.deviation)
    assert [device.memory_used.mean for device in streamed.devices] == pytest.approx(MEANS)
    assert [device.memory_used.deviation for device in streamed.devices] == pytest.approx([45.0] * 4)
    assert summed.total_max == streamed.total_max == pytest.approx(sum(MEANS) + 4 * 45)


@pytest.mark.parametrize(
    ("cv", "quality"),
    [(4.99, "Excellent"), (5.0, "Good"), (9.99, "Good"), (10.0, "Fair"), (19.99, "Fair"), (20.0, "Poor")],
)
def test_a_bound_belongs_to_the_class_above_it(cv, quality):
    gpu = numbers_of([100 - cv, 100 + cv])  # the CV of two values is half their difference divided by their mean
    assert gpu.balance("memory_used").quality == quality


def test_the_energy_of_some_gpus_is_not_the_energy_of_the_run(tmp_path):
    gpus = FakeGpus(memory=(100.0, 200.0), power=(None, 150.0), utilization=(1.0, 2.0))
    totals = {"joules": 9000.0, "memory_used_max": 300.0}
    record(RunDir(tmp_path), gpus, summary={"totals": totals})
    assert read_gpu(RunDir(tmp_path), TrainingTotals()).joules is None


def test_a_lost_gpu_keeps_its_values_without_adding_zeros(tmp_path):
    gpus = FakeGpus(lost={1: 20}, samples=60)
    write_arrays(RunDir(tmp_path), list(gpus.snapshots()))
    gpu = read_gpu(RunDir(tmp_path), TrainingTotals())
    assert gpu.devices[1].samples == 20
    assert gpu.devices[1].memory_used.mean == pytest.approx(12_750)
    assert gpu.devices[1].power.minimum == 150


def test_energy_is_the_area_under_the_power_curve_without_gaps(tmp_path):
    path = write_foreign(
        tmp_path / "gpt2_adamw", FakeGpus(memory=(100.0,), power=(200.0,), utilization=(90.0,), samples=11)
    )
    assert read_gpu(RunDir(path.parent), TrainingTotals()).joules == pytest.approx(10 * 200.0)
    entries = json.loads(path.read_text())
    entries[5:] = [{**entry, "timestamp": entry["timestamp"].replace("12:00", "13:00")} for entry in entries[5:]]
    path.write_text(json.dumps(entries))
    gpu = read_gpu(RunDir(path.parent), TrainingTotals())
    assert gpu.joules == pytest.approx(9 * 200.0)
    assert gpu.energy_source == "power"


def test_the_energy_counter_is_preferred_to_power_and_may_restart(tmp_path):
    path = write_foreign(
        tmp_path / "gpt2_adamw", FakeGpus(memory=(100.0,), power=(200.0,), utilization=(90.0,), samples=4)
    )
    entries = [
        {**gpu, "timestamp": entry["timestamp"], "energy_j": energy}
        for entry, energy in zip(json.loads(path.read_text()), [1000.0, 1100.0, 30.0, 80.0], strict=True)
        for gpu in entry["multi_gpu_data"]
    ]
    path.write_text(json.dumps(entries))
    gpu = read_gpu(RunDir(path.parent), TrainingTotals())
    assert (gpu.joules, gpu.energy_source) == (150.0, "counter")


def test_energy_per_token_needs_a_recording_of_the_whole_training(tmp_path):
    record(RunDir(tmp_path), FakeGpus(samples=60))
    complete = read_gpu(RunDir(tmp_path), TrainingTotals(tokens=9000, seconds=62.0))
    assert complete.joules_per_token == pytest.approx(4 * 60 * 150 / 9000)
    partial = read_gpu(RunDir(tmp_path), TrainingTotals(tokens=9000, seconds=120.0))
    assert partial.joules_per_token is None
    assert "covers 60 s of 120 s" in partial.notes[-1]


@pytest.mark.parametrize("layout", ["multi", "mixed"])
def test_multi_gpu_layouts_of_the_original_project_are_read(tmp_path, layout):
    write_foreign(tmp_path / "gpt2_adamw", FakeGpus(), layout=layout)
    gpu = read_gpu(RunDir(tmp_path / "gpt2_adamw"), TrainingTotals())
    assert [device.memory_used.mean for device in gpu.devices] == pytest.approx(MEANS)
    assert gpu.devices[2].temperature.mean == 62
    assert (gpu.samples, gpu.seconds) == (60, 59.0)


def test_without_a_recording_there_are_no_numbers_and_an_empty_one_gives_a_note(tmp_path):
    assert read_gpu(RunDir(tmp_path), TrainingTotals()) is None
    (tmp_path / "gpu_stats_x.json").write_text("[]")
    gpu = read_gpu(RunDir(tmp_path), TrainingTotals())
    assert gpu.devices == ()
    assert (gpu.total_mean, gpu.device_type) == (None, "")
    assert gpu.notes == ("gpu_stats_x.json has no sample",)


def test_ranks_on_the_cpu_are_identified_by_name_in_text_files(tmp_path):
    gpus = FakeGpus(memory=(812.0, 820.0), power=(None, None), utilization=(99.0, 98.0), device_type="cpu")
    write_arrays(RunDir(tmp_path), list(gpus.snapshots()))
    gpu = read_gpu(RunDir(tmp_path), TrainingTotals())
    assert [gpu.label(device) for device in gpu.devices] == ["rank 0", "rank 1"]
    assert (gpu.joules, gpu.energy_source) == (None, None)


def test_a_damaged_or_newer_summary_is_ignored(tmp_path):
    record(RunDir(tmp_path), FakeGpus())
    for text in ('{"schema": 1, "gpus": [', '{"schema": 99}'):
        RunDir(tmp_path).gpu_summary.write_text(text)
        assert read_gpu(RunDir(tmp_path), TrainingTotals()).evidence.endswith("gpu_samples.bin")


def test_xid_errors_are_listed_with_their_gpu_number_and_time(tmp_path):
    def xid(second, index, code, count=1, uuid=None):
        text = f"NVIDIA A10G ({uuid or f'GPU-{index}'}): XID {code}"
        known = {"event": "xid", "gpu_index": index, "text": text, "xid": code, "xid_count": count}
        return json.dumps({"time": 1_794_000_000 + second, **known}) + "\n"

    lines = [
        xid(0, 2, 31, 3),
        xid(9, 2, 79),
        xid(60, 2, 31),
        xid(61, 7, 48),
        xid(62, 0, 13, uuid="GPU-of-another-node"),
    ]
    RunDir(tmp_path).gpu_events.write_text("".join(lines) + '{"time": 1, "event": "xid", "gpu_index": 1}\n')
    numbers = read(tmp_path, FakeGpus())
    assert [len(device.xids) for device in numbers.devices] == [0, 0, 2, 0]
    assert list(problems(numbers, numbers.devices[2])) == [
        "GPU 2: XID 31: memory page fault: an illegal address in a kernel, or a defect"
        " (4 times, from 2026-11-06 21:20:00 UTC to 2026-11-06 21:21:00 UTC)",
        "GPU 2: XID 79: the GPU has fallen off the bus (once, at 2026-11-06 21:20:09 UTC)",
    ]
    assert [note.partition(" (")[0] for note in numbers.notes[-2:]] == [
        "GPU 7 of an earlier attempt: XID 48: uncorrectable memory error",
        "GPU 0 of an earlier attempt: XID 13: exception in a kernel, often an access out of bounds",
    ]


def test_the_arithmetic_of_the_recorder_gives_the_same_numbers(tmp_path):
    gpus = FakeGpus(lost={1: 20})
    record(RunDir(tmp_path), gpus)
    expected = read_gpu(RunDir(tmp_path), TrainingTotals())
    devices = [Device(gpu_index=i, gpu_name=gpus.name, uuid=f"GPU-{i}", memory_total=24_576.0) for i in range(4)]
    aggregate = RunTotals(devices)
    for snapshot in gpus.snapshots():
        values = [getattr(sample, name) for sample in snapshot.samples for name in COLUMNS]
        floats = [math.nan if value is None else float(value) for value in values]
        aggregate.add(snapshot.monotonic, snapshot.time, floats)
    write_json(RunDir(tmp_path).gpu_summary, aggregate.summary({"device_type": "nvidia"}, final=True))
    gpu = read_gpu(RunDir(tmp_path), TrainingTotals())
    for left, right in zip(gpu.devices, expected.devices, strict=True):
        assert left.samples == right.samples
        assert left.memory_used.mean == pytest.approx(right.memory_used.mean)
        assert left.memory_used.deviation == pytest.approx(right.memory_used.deviation)
    assert (gpu.total_mean, gpu.total_max) == pytest.approx((expected.total_mean, expected.total_max))
    assert gpu.balance("memory_used").cv == pytest.approx(expected.balance("memory_used").cv)


# Stragglers


def test_a_straggler_is_named_with_its_cost(tmp_path):
    write_timings(RunDir(tmp_path), [100.0, 100.0, 100.0, 130.0], step_ms=150.0)
    ranks = read_ranks(RunDir(tmp_path))
    assert dict(ranks.compute_ms) == {0: 100.0, 1: 100.0, 2: 100.0, 3: 130.0}
    assert ranks.efficiency == pytest.approx(107.5 / 130)
    assert ranks.waiting == pytest.approx((130 - 107.5) / 150)
    assert (ranks.slowest, ranks.slowest_share, ranks.steps) == (3, 1.0, 100)


@pytest.mark.parametrize(("slow", "expected"), [(130.0, True), (104.0, False)])
def test_a_straggler_hidden_by_an_excellent_cv_is_reported(tmp_path, slow, expected):
    write_timings(RunDir(tmp_path), [100.0] * 63 + [slow], step_ms=1.05 * slow)
    gpu = replace(numbers_of([12_800.0] * 64), ranks=read_ranks(RunDir(tmp_path)))
    assert gpu.hides_straggler is expected
    text = consolidated("m", [gpu_run(gpu=gpu)])
    assert ("the CV does not show rank 63" in text) is expected


# Text and JSON


def matrix_of_all_kinds(root):
    """A matrix with two GPU runs, a failed, a simulated and a CPU run, and one without a recording."""
    runs = [
        FakeRun(gpus=4, device="cuda", tokens_per_s=6900.0),
        FakeRun(optimizer="muon", gpus=2, device="cuda", status="failed", reason="out of memory", stop_at=40),
        FakeRun(optimizer="adam", device="cuda"),
        FakeRun(optimizer="sgd", gpus=2),
        FakeRun(optimizer="sgd", device="cuda"),
    ]
    matrix = make_matrix(root, runs)
    failed = FakeGpus(memory=(22_000.0, 17_000.0), power=(150.0, None), utilization=(95.0, 50.0), samples=20)
    simulated = FakeGpus(memory=(9000.0,), power=(100.0,), utilization=(88.0,), name="NVIDIA A10G (simulated)")
    ranks = FakeGpus(
        memory=(812.0, 820.0), power=(None, None), utilization=(99.0, 98.0), device_type="cpu", name="EPYC"
    )
    for run, gpus in zip(runs, (FakeGpus(), failed, simulated, ranks), strict=False):
        record(matrix.run(run.name), gpus)
    write_timings(matrix.run(runs[0].name), [100.0, 100.0, 100.0, 130.0])
    return matrix


@pytest.mark.process
def test_summary_of_a_matrix_with_gpus_and_ranks(golden, tmp_path):
    golden("summary_gpus.txt", write_summary(analyse(matrix_of_all_kinds(tmp_path))))


def test_consolidated_summary_of_a_matrix(golden, tmp_path):
    golden("consolidated_gpus.txt", summarize(matrix_of_all_kinds(tmp_path).path))


def test_simulated_numbers_are_marked_everywhere(tmp_path):
    matrix = matrix_of_all_kinds(tmp_path)
    text = write_summary(analyse(matrix))
    assert "gpt2_adam_1gpu (simulated)" in text
    assert "gpt2_adamw_4gpu (simulated)" not in text
    by_name = {run["name"]: run for run in read_json(matrix.results)["runs"]}
    assert by_name["gpt2_adam_1gpu"]["gpu"]["simulated"] is True
    assert "gpt2_adam_1gpu (simulated)" in summarize(matrix.path)


def test_results_json_has_the_numbers_of_each_device_and_null_for_unknown_values(tmp_path):
    matrix = matrix_of_all_kinds(tmp_path)
    write_summary(analyse(matrix))
    runs = {run["name"]: run["gpu"] for run in read_json(matrix.results)["runs"]}
    good, bad = runs["gpt2_adamw_4gpu"], runs["gpt2_muon_2gpu"]
    assert [device["memory_used"]["mean"] for device in good["gpus"]] == MEANS
    assert good["balance"]["memory"]["quality"] == "Excellent"
    assert good["totals"]["joules_per_token"] == pytest.approx(36_000 / 409_600)
    assert good["ranks"]["slowest_rank"] == 3
    assert bad["gpus"][1]["power"] is None
    assert (bad["totals"]["joules"], bad["balance"]["power"]) == (None, None)
    assert runs["gpt2_sgd_1gpu"] is None


def test_all_results_json_has_memory_and_energy_of_the_run(tmp_path):
    matrix = matrix_of_all_kinds(tmp_path)
    write_summary(analyse(matrix))
    rows = {row["test_id"]: row for row in json.loads(matrix.all_results.read_text())}
    finished = rows["gpt2_adamw_4gpu"]
    assert (finished["gpu_memory_mean"], finished["gpu_memory_max"], finished["joules"]) == (
        51_155.0,
        51_335.0,
        36_000.0,
    )
    assert finished["joules_per_token"] == pytest.approx(36_000 / 409_600)
    keys = ("gpu_memory_mean", "gpu_memory_max", "joules", "joules_per_token")
    assert [rows["gpt2_sgd_1gpu"][key] for key in keys] == [None] * 4


@given(st.integers(1, 64), st.text("abc_0123456789", min_size=1, max_size=150))
def test_no_line_of_the_gpu_sections_is_wider_than_80_columns(devices, name):
    run = gpu_run(name=name, gpu=numbers_of([12_800.0 + i for i in range(devices)], notes=("a note " * 30,)))
    lines = [line for _, body in gpu_sections([run]) for line in body if line.split(" (")[0] != name]
    assert max(map(len, lines)) <= WIDTH


# Graphs


def test_the_four_gpu_graphs_are_drawn_next_to_the_others(tmp_path):
    run = FakeRun(gpus=2, device="cuda")
    matrix = make_matrix(tmp_path, [run])
    record(matrix.run(run.name), FakeGpus(memory=(22_000.0, 17_000.0), power=(150.0, 90.0), utilization=(95.0, 50.0)))
    files, missing = draw_graphs(analyse(matrix))
    assert [path.name for path in files][-4:] == FILES
    assert missing == []
    assert all(struct.unpack(">II", path.read_bytes()[16:24])[0] == 1200 for path in files)
    assert "graphs/gpu_memory_timeline.png" in write_summary(analyse(matrix))


def test_the_timeline_shows_the_total_and_marks_the_end_of_a_failed_run(tmp_path):
    matrix = matrix_of_all_kinds(tmp_path)
    numbers = analyse(matrix)
    runs = [replace(run, gpu=run.gpu and add_timeline(matrix.run(run.name), run.gpu)) for run in gpu_runs(numbers)]
    axes = memory_over_time("m", runs).axes[0]
    first, *_ = [line for line in axes.lines if line.get_marker() != "X"]
    (cross,) = [line for line in axes.lines if line.get_marker() == "X"]
    assert list(first.get_ydata())[:2] == pytest.approx([(51_155 - 180) / 1024, (51_155 + 180) / 1024])
    assert cross.get_xdata()[0] == pytest.approx(19.0)


def test_attempts_on_other_gpus_have_their_own_peak_and_capacity_in_the_graphs():
    a10g = {"gpu_name": "NVIDIA A10G", "memory_total": 24_576.0}
    last, first = (
        replace(numbers, devices=tuple(replace(one, **a10g) for one in numbers.devices))
        for numbers in (numbers_of([10_000.0] * 2), numbers_of([10_000.0] * 8))
    )
    edges = (TimelinePoint(9.0, ()), TimelinePoint(20.0, ()))
    early, late = (
        [TimelinePoint(begin + at, (10_000.0,) * count, 24_576.0 * count) for at in range(10)]
        for begin, count in ((0.0, 8), (20.0, 2))
    )
    gpu = replace(last, earlier=(first,), timeline=(*early, *edges, *late))
    bars = memory_by_run("m", [gpu_run(gpu=gpu)]).axes[0]
    label = "19.5 GiB on 2 GPUs, peak 19.5 of 48.0\nearlier attempt on 8 GPUs: peak 78.1 of 192.0"
    assert label in [text.get_text() for text in bars.texts]
    assert max(max(line.get_xdata()) for line in bars.lines) == 48.0
    panel = memory_over_time("m", [gpu_run(gpu=gpu)]).axes[0]
    dashed = [line for line in panel.lines if line.get_color() == ALARM]
    assert [(list(line.get_xdata()), line.get_ydata()[0]) for line in dashed] == [([0, 9], 192), ([20, 29], 48)]
    assert [text.get_text() for text in panel.texts if "GPUs" in text.get_text()] == ["8 GPUs", "2 GPUs"]
    assert panel.get_ylim()[1] > 192
    assert panel.get_xlabel().endswith("gap: no sample")


# Directories and scripts


def foreign_folder(root):
    """Two runs of the original project, one of them failed; the first has two files."""
    folder = root / "test_matrix_results_20250919_120000"
    write_foreign(folder / "gpt2_adamwprune_state_50", FakeGpus())
    write_foreign(folder / "gpt2_adamwprune_state_50", FakeGpus(), layout="single")
    write_foreign(
        folder / "gpt2_adamw_magnitude_50", FakeGpus(memory=(14_000.0, 10_000.0), power=(150, 90), samples=20)
    )
    results = [
        {"test_id": "gpt2_adamwprune_state_50", "optimizer": "adamwprune", "success": True, "elapsed_time": 60.0},
        {"test_id": "gpt2_adamw_magnitude_50", "optimizer": "adamw", "success": False},
    ]
    (folder / "all_results.json").write_text(json.dumps(results))
    return folder


def test_a_folder_of_the_original_project_is_read(tmp_path):
    _, _, (finished, failed) = read_folder(foreign_folder(tmp_path))
    assert (finished.optimizer, finished.status, len(finished.gpu.devices)) == ("adamwprune", "finished", 4)
    assert (failed.optimizer, failed.status, failed.gpu.balance("memory_used").quality) == ("adamw", "failed", "Fair")


def test_the_newest_matrix_is_the_default_and_a_missing_directory_is_refused(tmp_path):
    folder = foreign_folder(tmp_path)
    (tmp_path / "test_matrix_results_20990101_000000").mkdir()
    assert find_recorded(None, tmp_path) == folder
    with pytest.raises(RecordError, match="is not a directory"):
        find_recorded(tmp_path / "nothing", tmp_path)
    with pytest.raises(RecordError, match="no matrix in"):
        find_recorded(None, folder)


def script(name, *arguments, cwd):
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.nightly
def test_the_script_draws_into_the_output_directory(tmp_path):
    result = script("generate_gpu_memory_comparison.py", foreign_folder(tmp_path), "--output", "out", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FILES)
    assert result.stdout.splitlines() == [f"wrote out/{name}" for name in FILES]


@pytest.mark.process
def test_the_script_prints_the_report_of_the_newest_matrix(tmp_path):
    foreign_folder(tmp_path)
    result = script("generate_consolidated_gpu_summary.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "ADAMWPRUNE Training - Per-GPU Breakdown:\n    GPU 0: 12800.0 MB (±45.0)\n" in result.stdout
    assert "gpt2_adamw_magnitude_50 (failed)" in result.stdout
