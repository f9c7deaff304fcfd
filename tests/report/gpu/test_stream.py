"""Numbers and timelines from text and binary recordings, with earlier attempts and reasons for missing ones."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_factory import FakeGpus, damage, overwrite, record, summary_of, write_foreign, write_samples
from kmatrix.records.files import append_jsonl, write_json
from kmatrix.records.paths import RunDir
from kmatrix.report.folders import summarize
from kmatrix.report.gpu.graphs.matrix import draw
from kmatrix.report.gpu.numbers import RunGpus
from kmatrix.report.gpu.read_gpu import NOTHING_RECORDED, TrainingTotals, add_timeline, read_gpu
from kmatrix.report.gpu.stream import (
    MAX_TIMELINE_POINTS,
    TimelineBuilder,
)
from records_factory import FakeRun, make_matrix


@given(st.integers(1, 3000), st.integers(1, 700))
@settings(max_examples=30, deadline=None)
def test_a_timeline_is_short_keeps_its_mean_and_does_not_depend_on_the_blocks(count, size):
    at_once, in_parts = TimelineBuilder(), TimelineBuilder()
    seconds = [float(number) for number in range(count)]
    memory = {0: [100.0 + second for second in seconds], 1: [math.nan if second % 2 else 7.0 for second in seconds]}
    at_once.add(seconds, memory)
    for start in range(0, count, size):
        in_parts.add(
            seconds[start : start + size], {device: values[start : start + size] for device, values in memory.items()}
        )
    points = in_parts.points([0, 1, 2])
    assert points == at_once.points([0, 1, 2])
    assert min(count, MAX_TIMELINE_POINTS // 2) <= len(points) <= MAX_TIMELINE_POINTS
    assert all(a.seconds < b.seconds for a, b in pairwise(points))
    assert [m.memory[0] for m in points] == pytest.approx([100 + m.seconds for m in points])
    assert {m.memory[1] for m in points} <= {7.0, None}
    assert {m.memory[2] for m in points} == {None}


# Binary recordings


def write_earlier_recording(run_dir, gpus, *, seconds_before=100.0, number=1):
    """Write the recording of an earlier attempt on other GPUs, archived as the recorder does."""
    snapshots = [replace(snapshot, time=snapshot.time - seconds_before) for snapshot in gpus.snapshots()]
    write_samples(run_dir.gpu_samples.with_suffix(f".{number}.bin"), gpus, snapshots)


def test_a_recorder_killed_before_its_first_summary_leaves_every_sample(tmp_path):
    record(RunDir(tmp_path), FakeGpus())
    expected = read_gpu(RunDir(tmp_path), TrainingTotals())
    RunDir(tmp_path).gpu_summary.unlink()
    numbers = read_gpu(RunDir(tmp_path), TrainingTotals())
    assert numbers.evidence.endswith("/gpu_samples.bin")
    assert "wrote no summary" in numbers.notes[0]
    assert (numbers.device_type, numbers.samples, numbers.final) == ("nvidia", 60, False)
    for left, right in zip(numbers.devices, expected.devices, strict=True):
        for name in ("gpu_index", "rank", "uuid", "memory_total"):
            assert getattr(left, name) == getattr(right, name)
        assert left.memory_used.mean == pytest.approx(right.memory_used.mean)
        assert left.power.deviation == pytest.approx(right.power.deviation)


def test_samples_after_the_last_summary_are_counted(tmp_path):
    gpus = FakeGpus(samples=60)
    record(RunDir(tmp_path), gpus)
    first_half = summary_of(gpus, list(gpus.snapshots())[:30])
    first_half["gpus"][1]["throttled_s"] = {"heat (hardware)": 3.0}
    write_json(RunDir(tmp_path).gpu_summary, {**first_half, "samples": 30, "final": False})
    numbers = read_gpu(RunDir(tmp_path), TrainingTotals())
    assert numbers.samples == 60
    assert numbers.devices[0].samples == 60
    assert numbers.devices[1].throttled_s == (("heat (hardware)", 3.0),)
    assert numbers.joules == pytest.approx(4 * 59 * 150)


def test_gpus_of_an_earlier_attempt_are_in_the_totals_and_are_named(tmp_path):
    run_dir = RunDir(tmp_path)
    record(run_dir, FakeGpus())
    single = read_gpu(run_dir, TrainingTotals())
    write_earlier_recording(run_dir, FakeGpus(memory=(20_000.0,) * 4, name="NVIDIA L4"))
    both = read_gpu(run_dir, TrainingTotals())
    assert both.devices == single.devices
    assert both.samples == 120
    assert both.seconds == single.seconds + 59
    assert both.joules == pytest.approx(single.joules + 4 * 59 * 150)
    assert both.total_max == single.total_max  # compared with the capacity of the current devices
    assert both.run_max == pytest.approx(4 * 20_045)
    assert [one.total_max for one in both.earlier] == pytest.approx([4 * 20_045])
    assert "4 GPUs (NVIDIA L4), 59 s in gpu_samples.1.bin, peak 80180 of 98304 MiB" in both.notes[-1]
    points = add_timeline(run_dir, both).timeline
    assert [len(point.memory) for point in points] == [*[4] * 60, 0, 0, *[4] * 60]
    assert [points[0].total, points[62].total] == pytest.approx([4 * 19_955, single.total_mean - 4 * 45])
    assert [points[at].seconds for at in (0, 59, 60, 61, 62)] == [0, 59, 59, 100, 100]


def test_the_time_between_two_attempts_on_the_same_gpus_is_a_gap_of_the_timeline(tmp_path):
    run_dir = RunDir(tmp_path)
    record(run_dir, FakeGpus())
    before, after = list(FakeGpus(samples=30).snapshots()), list(FakeGpus(samples=2000).snapshots())
    later = [replace(one, time=one.time + 3600, monotonic=one.monotonic + 3600) for one in after]
    run_dir.gpu_samples.unlink()
    write_samples(run_dir.gpu_samples, FakeGpus(), [*before, *later])
    points = add_timeline(run_dir, read_gpu(run_dir, TrainingTotals())).timeline
    (end, begin) = [at for at, point in enumerate(points) if not point.memory]
    assert begin == end + 1
    assert (points[end].seconds, points[begin].seconds) == (29, 3600)
    assert points[end - 1].seconds <= 29
    assert points[begin + 1].seconds >= 3600
    assert len(points) <= MAX_TIMELINE_POINTS + 2


def test_simulated_numbers_are_never_combined_with_those_of_real_gpus(tmp_path):
    run_dir = RunDir(tmp_path)
    record(run_dir, FakeGpus())
    single = read_gpu(run_dir, TrainingTotals())
    write_earlier_recording(run_dir, FakeGpus(name="NVIDIA A10G (simulated)"))
    both = read_gpu(run_dir, TrainingTotals())
    assert (both.joules, both.samples) == (single.joules, single.samples)
    assert both.notes[-1].endswith("not included in these numbers")


def test_a_damaged_earlier_recording_is_reported(tmp_path):
    run_dir = RunDir(tmp_path)
    record(run_dir, FakeGpus())
    (tmp_path / "gpu_samples.1.bin").write_bytes(b"half")
    assert "gpu_samples.1.bin is not a GPU recording" in read_gpu(run_dir, TrainingTotals()).notes[-1]


# Why a recording is missing


def test_the_report_explains_a_missing_recording(tmp_path):
    run_dir = make_matrix(tmp_path, [FakeRun(device="cuda")]).run("gpt2_adamw_1gpu")
    reason = "no GPU and no rank found: nothing is recorded; the NVIDIA driver does not respond: Unknown Error"
    append_jsonl(run_dir.gpu_events, {"time": 1.0, "event": NOTHING_RECORDED, "gpu_index": None, "text": reason})
    numbers = read_gpu(run_dir, TrainingTotals())
    assert (numbers.devices, numbers.notes) == ((), (reason,))
    assert reason in " ".join(summarize(run_dir.path.parent).split())
    assert draw("m", [RunGpus(name="a", optimizer="adamw", status="", gpu=numbers)], tmp_path) == ([], [])


# Foreign recordings with values that cannot be true


def change_entries(path, change):
    entries = json.loads(path.read_text())
    path.write_text(json.dumps(change(entries) or entries))
    return read_gpu(RunDir(path.parent), TrainingTotals())


def with_one_index(entries):
    for entry in entries:
        for gpu in entry["multi_gpu_data"][:2]:
            gpu["gpu_index"] = 0


def with_negative_memory(entries):
    entries[5]["multi_gpu_data"][1]["memory_used"] = -1.0


def with_one_time(entries):
    for entry in entries:
        entry["timestamp"] = entries[0]["timestamp"]


def with_more_memory_than_there_is(entries):
    entries[5]["multi_gpu_data"][1]["memory_used"] = 24_577.0


def with_infinite_power(entries):
    entries[5]["multi_gpu_data"][1]["power"] = 1e308


def without_power(first, last):
    def change(entries):
        for entry in entries[first:last]:
            entry["multi_gpu_data"][1]["power"] = None

    return change


def with_repeated_times(entries):
    return [entry for pair in zip(entries, entries, strict=True) for entry in pair]


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (with_one_index, "several GPUs have the index 0"),
        (with_negative_memory, "1 negative value of memory_used"),
        (with_more_memory_than_there_is, "1 value of memory_used above what a GPU has"),
        (with_infinite_power, "1 value of power above what a GPU has"),
        (with_one_time, "59 samples with the time of the one before"),
        (with_repeated_times, "60 samples with the time of the one before"),
    ],
)
def test_impossible_values_are_reported_and_have_no_balance(tmp_path, change, note):
    path = write_foreign(tmp_path / "gpt2_adamw", FakeGpus(spread=0.0))
    gpu = change_entries(path, change)
    assert any(note in text for text in gpu.notes)
    assert gpu.balance("memory_used") is None
    text = summarize(tmp_path)
    assert "Excellent" not in text
    assert "n/a (impossible values)" in text
    assert note in " ".join(text.split())


def test_power_that_is_unknown_for_some_time_leaves_no_energy(tmp_path):
    path = write_foreign(tmp_path / "gpt2_adamw", FakeGpus())
    gpu = change_entries(path, without_power(20, 23))
    assert [device.joules is None for device in gpu.devices] == [False, True, False, False]
    assert "GPU 1 has no power for more than 2 s: its energy is unknown" in gpu.notes
    assert change_entries(path, without_power(40, 41)).joules is None
    path = write_foreign(tmp_path / "gpt2_sgd", FakeGpus())
    assert change_entries(path, without_power(20, 21)).joules == pytest.approx(4 * 59 * 150)


# Binary recordings that are damaged, or have values that cannot be true


@pytest.mark.parametrize(("count", "seconds"), [(1, 59.0), (4, 54.0)])  # a longer hole is a gap, as after a kill
def test_a_hole_of_zeros_changes_neither_energy_nor_the_timeline(tmp_path, count, seconds):
    run = RunDir(tmp_path / "gpt2_adamw")
    record(run, FakeGpus(counter=True))
    run.gpu_summary.unlink()
    whole = add_timeline(run, read_gpu(run, TrainingTotals()))
    damage(run.gpu_samples, 28, count)
    gpu = add_timeline(run, read_gpu(run, TrainingTotals()))
    assert (gpu.joules, gpu.seconds, gpu.samples) == (whole.joules, seconds, 60 - count)
    assert gpu.timeline[-1].seconds == whole.timeline[-1].seconds == 59
    assert gpu.notes[-1].startswith("gpu_samples.bin is damaged: ")
    assert gpu.balance("memory_used") is not None


@pytest.mark.parametrize(("column", "value"), [("memory_used", math.inf), ("power", -5000.0), ("energy_j", math.inf)])
def test_impossible_values_of_a_binary_recording_are_unknown(tmp_path, column, value):
    run = RunDir(tmp_path / "gpt2_adamw")
    record(run, FakeGpus(counter=True))
    run.gpu_summary.unlink()
    overwrite(run.gpu_samples, 30, column, value)
    gpu = add_timeline(run, read_gpu(run, TrainingTotals()))
    assert gpu.joules == 4 * 59 * 150.0
    kind = "1 negative value" if value < 0 else "1 value"
    assert any(note.startswith(f"gpu_samples.bin: {kind} of {column}") for note in gpu.notes)
    assert gpu.balance("memory_used") is None
    device = gpu.devices[0]
    if column != "energy_j":
        assert getattr(device, column).count == 59
        assert getattr(device, column).maximum < 15_000
    assert all(0 < value < 15_000 for point in gpu.timeline for value in point.memory if value is not None)
    if column == "power":
        drawn, _ = draw("m", [RunGpus(name="a", optimizer="adamw", status="", gpu=gpu)], tmp_path)
        assert drawn


@pytest.mark.parametrize("data", [b"", b"garbage", b"KMXGPU3\n\xff"])
def test_an_unreadable_recording_is_reported_with_and_without_a_summary(tmp_path, data):
    run = RunDir(tmp_path / "gpt2_adamw")
    record(run, FakeGpus())
    run.gpu_samples.write_bytes(data)
    gpu = read_gpu(run, TrainingTotals())
    assert len(gpu.devices) == 4
    (note,) = [note for note in gpu.notes if "gpu_samples.bin" in note]
    assert note.endswith("phases and training alone are unknown")
    for path in (run.gpu_summary, run.gpu_stats, run.gpu_stats_multi):
        path.unlink()
    gpu = read_gpu(run, TrainingTotals())
    assert not gpu.devices
    (note,) = gpu.notes
    assert note.startswith("gpu_samples.bin ")
    assert str(tmp_path) not in note
