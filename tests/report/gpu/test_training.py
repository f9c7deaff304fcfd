"""Means, balance and energy per token are of the training; those of the whole run are next to them."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest

from gpu_factory import STARTED, write_phases
from kmatrix.gpu.devices import Device
from kmatrix.gpu.formats.binary import COLUMNS, SampleFile
from kmatrix.gpu.recorder.summary import RunTotals
from kmatrix.records.files import append_jsonl, read_json, write_json
from kmatrix.records.paths import RunDir
from kmatrix.report.gpu.numbers import PeriodNumbers, RunGpus
from kmatrix.report.gpu.read_gpu import TrainingTotals, add_timeline, read_gpu
from kmatrix.report.gpu.text import consolidated, energy_line
from kmatrix.report.results_json import gpu_object

DAY = 86_400.0
PHASES = (("set-up", 0.0, 20.0), ("evaluation", 50.0, 60.0))


def power_at(second):
    return 50.0 if second < 20 else 200.0 if 50 <= second < 60 else 100.0


def memory_at(second, gpu):
    return 100.0 if second < 20 else 400.0 + gpu * 20 + second % 7


def record_run(path, *, gpus=2, seconds=100, back_at=None, final=True, pauses=()):
    """Record GPUs at 1 Hz. back_at: the second at which the clock of the machine is set back by a day.

    pauses: seconds before each of which 4 s are not recorded, between two attempts.
    """
    run = RunDir(path)
    run.path.mkdir(parents=True, exist_ok=True)
    devices = [Device(gpu_index=i, gpu_name="A", uuid=f"GPU-{i}", rank=i, memory_total=1000.0) for i in range(gpus)]
    totals = RunTotals(devices, hz=1)
    header = [{"gpu_index": d.gpu_index, "gpu_name": d.gpu_name, "uuid": d.uuid, "rank": d.rank} for d in devices]
    file = SampleFile(run.gpu_samples, {"gpus": header, "hz": 1, "device_type": "nvidia", "simulated": False})
    joules = 0.0
    for second in range(seconds):
        if any(0 < pause - second <= 4 for pause in pauses):
            continue
        joules += power_at(second - 1) if second and second not in pauses else 0.0
        wall = STARTED + second - (DAY if back_at is not None and second >= back_at else 0)
        values = []
        for gpu in range(gpus):
            known = {"memory_used": memory_at(second, gpu), "power": power_at(second), "energy_j": joules}
            values += [known.get(name, math.nan) for name in COLUMNS]
        totals.seconds += 1.0
        totals.add(500.0 + second, wall, values)
        file.append(wall, 500.0 + second, values)
    file.close()
    write_json(run.gpu_summary, totals.summary({"device_type": "nvidia", "energy_source": "counter"}, final=final))
    return run


def trained(second):
    return not any(begin <= second < end for _, begin, end in PHASES)


def test_means_are_of_the_training_and_those_of_the_run_are_next_to_them(tmp_path):
    run = record_run(tmp_path / "run")
    write_phases(run, *PHASES)
    gpu = read_gpu(run, TrainingTotals(tokens=1000, seconds=100.0))
    expected = [[memory_at(second, index) for second in range(100) if trained(second)] for index in (0, 1)]
    for device, values in zip(gpu.training.devices, expected, strict=True):
        assert device.memory_used.mean == pytest.approx(statistics.fmean(values))
        assert device.memory_used.deviation == pytest.approx(statistics.pstdev(values), rel=1e-4)  # stored rounded
        assert device.memory_used.count == 70
    assert gpu.main is gpu.training
    assert gpu.training.total_mean == pytest.approx(sum(map(statistics.fmean, expected)))
    assert gpu.whole.total_mean < gpu.training.total_mean
    # 2 GPUs: 100 W while training, 50 W during 20 s of set-up, 200 W during 10 s of an evaluation.
    assert gpu.joules == pytest.approx(2 * (20 * 50 + 69 * 100 + 10 * 200))
    assert gpu.training.joules == pytest.approx(2 * 69 * 100)
    assert gpu.training.joules_per_token == pytest.approx(13.8)
    assert gpu.joules_per_token == pytest.approx(19.8)
    assert gpu.training.mean_power == pytest.approx(200)
    assert gpu.training.seconds == pytest.approx(70, abs=1)
    means = [statistics.fmean(values) for values in expected]
    cv = 100 * statistics.pstdev(means) / statistics.fmean(means)
    assert gpu.balance("memory_used").cv == pytest.approx(cv)
    assert gpu.whole.balance("memory_used").cv != pytest.approx(cv)


def test_both_periods_are_labelled_in_text_and_json(tmp_path):
    run = record_run(tmp_path / "gpt2_adamw_2gpu")
    write_phases(run, *PHASES)
    gpu = read_gpu(run, TrainingTotals(tokens=1000, seconds=100.0))
    line = energy_line(gpu)
    assert "training, 13.8 J/token" in line
    assert "whole run, 19.8 J/token" in line
    nothing = PeriodNumbers(devices=(), seconds=None)
    unknown = replace(gpu, devices=(), training=nothing, joules=None, joules_per_token=None, energy_source=None)
    assert energy_line(unknown) == "unknown"
    text = consolidated("m", [RunGpus(name=run.name, optimizer="adamw", status="finished", gpu=gpu)])
    assert f"Total:  {gpu.training.total_mean:.1f} MB  (training; whole run: {gpu.total_mean:.1f} MB)" in text
    written = gpu_object(gpu)
    assert written["totals"]["memory_used_mean"] == read_json(run.gpu_summary)["totals"]["memory_used_mean"]
    assert written["totals"]["joules_per_token"] == pytest.approx(19.8)
    assert written["training"]["joules_per_token"] == pytest.approx(13.8)
    assert written["training"]["memory_used_mean"] == pytest.approx(gpu.training.total_mean)


def test_without_phases_the_numbers_are_of_the_whole_recording(tmp_path):
    gpu = read_gpu(record_run(tmp_path / "run"), TrainingTotals(tokens=1000))
    assert gpu.training is None
    assert gpu.main.total_mean == gpu.total_mean
    assert "training" not in energy_line(gpu)


@pytest.mark.parametrize("result", [95, None])
def test_only_the_time_from_first_to_last_step_of_each_attempt_is_training(tmp_path, result):
    run = record_run(tmp_path / "run", pauses=(30, 60, 75))
    for second in (0.0, 30.0, 60.0, 75.0):
        event = {"time": STARTED + second, "monotonic": 500 + second, "event": "started", "gpu_index": None, "text": ""}
        append_jsonl(run.gpu_events, event)
    # The first attempt is killed after its step at 22 s, the second in its set-up, the third after 69 s.
    write_phases(run, ("set-up", 5.0, 10.0), ("set-up", 66.0, 68.0), ("set-up", 80.0, 85.0))
    for attempt, second in ((1, 12), (1, 22), (3, 69), (4, 87), (4, 93)):
        append_jsonl(run.metrics, {"step": 1, "time": STARTED + second, "attempt": attempt, "train/loss": 1.0})
    run.result.unlink()
    if result:
        write_json(run.result, {"ended": STARTED + result})
    gpu = read_gpu(run, TrainingTotals())
    end = result or 93
    ended = [(10, 22), (68, 69), (85, end)]
    assert [(p.name, p.begin, p.end) for p in gpu.phases] == [
        *(("set-up", 0, 10), ("ending", 22, 25), ("set-up", 30, 55), ("set-up", 60, 68), ("ending", 69, 70)),
        *(("set-up", 75, 85), ("ending", end, 99)),
    ]
    assert gpu.training.seconds == pytest.approx(sum(end - begin for begin, end in ended), abs=4)  # 1 s per sample
    assert gpu.training.joules == pytest.approx(
        sum(2 * power_at(second) for begin, end in ended for second in range(begin, end))
    )


@pytest.mark.parametrize("final", [True, False])
def test_a_clock_that_is_set_back_by_a_day_changes_no_number(tmp_path, final):
    straight, back = record_run(tmp_path / "a", final=final), record_run(tmp_path / "b", back_at=40, final=final)
    for run in (straight, back):
        shift = DAY if run is back else 0.0
        for name, begin, end in PHASES:
            walls = [STARTED + time - (shift if time >= 40 else 0) for time in (begin, end)]
            line = {"phase": name, "attempt": 1, "begin": walls[0], "end": walls[1]}
            append_jsonl(run.phases, {**line, "begin_monotonic": 500 + begin, "end_monotonic": 500 + end})
    totals = TrainingTotals(tokens=1000, seconds=100.0)
    expected, numbers = (add_timeline(run, read_gpu(run, totals)) for run in (straight, back))
    assert gpu_object(numbers) == {**gpu_object(expected), "evidence": numbers.evidence}
    assert numbers.seconds == pytest.approx(100, abs=1)
    assert [point.seconds for point in numbers.timeline] == [point.seconds for point in expected.timeline]
    assert all(before.seconds < after.seconds for before, after in pairwise(numbers.timeline))


def test_the_energy_of_the_host_is_that_of_the_training_too(tmp_path):
    run = RunDir(tmp_path)
    header = {"gpus": [{"gpu_index": 0, "gpu_name": "CPU rank 0", "uuid": "cpu-rank-0", "rank": 0}], "hz": 1}
    file = SampleFile(run.gpu_samples, {**header, "device_type": "cpu", "simulated": False, "energy_source": "rapl"})
    device = Device(gpu_index=0, gpu_name="CPU rank 0", uuid="cpu-rank-0", rank=0)
    totals = RunTotals([device], ranks=True, hz=1)
    for second in range(100):
        values = [100.0, 300.0 if second < 20 else 407.0, *[math.nan] * 5]
        totals.add(second, STARTED + second, values)
        file.append(STARTED + second, second, values, host_joules=10.0 * second)
    totals.host_joules, totals.seconds = 990.0, 100.0
    write_json(run.gpu_summary, totals.summary({"device_type": "cpu", "energy_source": "rapl"}, final=True))
    write_phases(run, ("set-up", 0.0, 20.0))
    gpu = read_gpu(run, TrainingTotals(tokens=100, device="cpu"))
    assert gpu.training.devices[0].memory_used.mean == 407
    assert (gpu.joules, gpu.training.joules) == (990, 790)
    run.gpu_summary.unlink()
    assert read_gpu(run, TrainingTotals(device="cpu")).joules == 990
