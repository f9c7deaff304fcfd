"""The recorder in its own process, on simulated GPUs and on the ranks of a CPU run."""

import contextlib
import json
import math
import os
import random
import resource
import subprocess
import sys
import time
from array import array
from pathlib import Path

import psutil
import pytest

import kmatrix.simulate.library as simulate
from kmatrix.errors import RecordError
from kmatrix.gpu.devices import COLUMN_INDEX, UNKNOWN, WIDTH, DeviceProcess, ExtraMetrics
from kmatrix.gpu.formats.binary import COLUMNS, Recording, read_samples
from kmatrix.gpu.formats.summary import SummaryFile
from kmatrix.gpu.processes import ProcessHandle, RunProcesses
from kmatrix.gpu.recorder.loop import Calibration, rate_warning
from kmatrix.gpu.recorder.summary import RunTotals
from kmatrix.records.decode import convert
from kmatrix.records.files import read_json, read_jsonl
from kmatrix.stats import RunningStats
from recordings import DEVICES, ROOT, events_of, launch_recorder, sample_count, stop_recorder, summary_file
from stats_reader import read_stats
from waiting import wait_until

PERIOD_TOLERANCE_MS = 30  # of a measured period of 100 ms, on a busy machine


@contextlib.contextmanager
def sleeping_process():
    """A process that sleeps and is killed at the end of the block."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_recording_has_every_file_and_the_files_agree(start_recorder, run_dir):
    process = start_recorder("--hz", 50, lines="0 * power 200\n0 1 util 50\n", gpus=2)
    wait_until(lambda: sample_count(run_dir) > 110, "110 samples")
    stop_recorder(process)
    summary, recording = read_json(run_dir.gpu_summary), read_samples(run_dir.gpu_samples)
    assert summary["final"] is True
    assert summary["simulated"] is True
    assert summary["run_id"] == "0123456789"
    assert summary["samples"] == len(recording)
    assert summary["energy_source"] == "counter"
    assert [gpu["utilization"]["mean"] for gpu in summary["gpus"]] == [95, 50]
    assert summary["gpus"][0]["utilization"]["deviation"] == 0
    assert summary["totals"]["mean_power"] == pytest.approx(400)
    assert summary["balance"]["memory"] == {"cv": 0, "quality": "Excellent"}
    assert summary["balance"]["utilization"]["quality"] == "Poor"
    several, single = list(read_stats(run_dir.gpu_stats_multi)), list(read_stats(run_dir.gpu_stats))
    assert [snapshot.time for snapshot in several] == [snapshot.time for snapshot in single]
    assert len(several) >= 2
    assert several[0].samples[0] == single[0].samples[0]
    assert several[0].samples[1].utilization == 50
    assert [line["event"] for line in read_jsonl(run_dir.gpu_events)][0::2] == ["started", "ended"]
    assert recording.header["calibration"] == summary["calibration"]


def test_the_recorded_energy_is_that_of_the_scenario(start_recorder, run_dir):
    process = start_recorder("--hz", 50, lines="0 0 power 400\n0 1 power 100\n", gpus=2)
    wait_until(lambda: sample_count(run_dir) > 60, "60 samples")
    stop_recorder(process)
    recording, summary = read_samples(run_dir.gpu_samples), read_json(run_dir.gpu_summary)
    seconds = recording.times[-1] - recording.times[0]
    for gpu, watts in zip(summary["gpus"], (400, 100), strict=True):
        assert abs(gpu["joules"] - watts * seconds) <= watts * 0.1 + 1  # one update period of the counter
        assert recording.columns[gpu["gpu_index"]]["energy_j"][-1] == pytest.approx(gpu["joules"], abs=0.01)
    assert summary["totals"]["joules"] == pytest.approx(sum(gpu["joules"] for gpu in summary["gpus"]), abs=0.01)


def test_the_update_period_is_measured_and_a_useless_rate_gives_a_warning(start_recorder, run_dir):
    process = start_recorder("--hz", 100, lines="0 * power 200\n", gpus=1)
    wait_until(lambda: events_of(run_dir, "calibrated"), "the recorder is calibrated")
    wait_until(run_dir.gpu_summary.exists, "a summary before the end")
    assert read_json(run_dir.gpu_summary)["final"] is False
    stop_recorder(process)
    summary = read_json(run_dir.gpu_summary)
    assert summary["calibration"]["energy_j"]["period_ms"] == pytest.approx(100, abs=PERIOD_TOLERANCE_MS)
    assert 0 < summary["calibration"]["utilization"]["call_us"] < 20_000
    assert summary["calibration"]["utilization"]["period_ms"] is None  # unknown, because the value never changed
    assert "100 samples/s requested" in summary["warnings"][0]


def test_the_default_rate_is_kept_without_a_warning(start_recorder, run_dir):
    process = start_recorder(lines="0 * power 200\n", gpus=8)
    wait_until(lambda: sample_count(run_dir) > 30, "30 samples")
    stop_recorder(process)
    summary = read_json(run_dir.gpu_summary)
    assert summary["hz_asked"] == 20
    assert summary["samples"] + summary["late"] == pytest.approx(20 * summary["seconds"], rel=0.1)
    assert summary["hz_reached"] == pytest.approx(summary["samples"] / summary["seconds"], rel=0.1)
    # A busy machine may have skipped ticks.
    assert not [text for text in summary["warnings"] if not text.endswith("late and skipped")]


def test_a_gpu_lost_in_the_middle_is_null_logged_as_an_event_and_recovered(start_recorder, run_dir):
    lines = "0 * power 100\n0.6 1 all !lost\n2.2 1 all ok\n"
    process = start_recorder("--hz", 20, lines=lines, gpus=2)
    wait_until(lambda: events_of(run_dir, "found"), "the GPU is found again")
    wait_until(
        lambda: not math.isnan(read_samples(run_dir.gpu_samples).columns[1]["power"][-1]), "its power is known again"
    )
    stop_recorder(process)
    (lost,), (found,) = events_of(run_dir, "lost"), events_of(run_dir, "found")
    assert lost["gpu_index"] == found["gpu_index"] == 1
    power = read_samples(run_dir.gpu_samples).columns[1]["power"]
    assert any(math.isnan(value) for value in power)
    assert 0 not in list(power)
    lost_snapshot = next(
        snapshot for snapshot in read_stats(run_dir.gpu_stats_multi) if not snapshot.samples[1].is_known
    )
    assert lost_snapshot.samples[0].power == 100
    summary = read_json(run_dir.gpu_summary)
    assert summary["gpus"][1]["samples"] < summary["gpus"][0]["samples"]
    assert summary["gpus"][1]["lost_at"] is None
    assert summary["gpus"][1]["power"]["min"] == 100


def test_a_gpu_that_answers_only_later_gets_its_name_and_memory(start_recorder, run_dir):
    process = start_recorder("--hz", 20, lines="0 1 all !lost\n0.8 1 all ok\n", gpus=2)
    wait_until(lambda: events_of(run_dir, "found"), "the GPU answers")
    found = sample_count(run_dir)
    wait_until(lambda: sample_count(run_dir) > found + 30, "it is sampled")
    header = read_samples(run_dir.gpu_samples).header
    stop_recorder(process)
    first, later = header["gpus"]
    assert (later["gpu_name"], later["memory_total"]) == (first["gpu_name"], first["memory_total"])
    assert later["uuid"].startswith("GPU-")
    assert later["uuid"] != first["uuid"]
    (event,) = events_of(run_dir, "identified")
    facts = {name: later[name] for name in ("gpu_index", "gpu_name", "uuid", "memory_total")}
    assert facts.items() <= event.items()
    assert facts.items() <= read_json(run_dir.gpu_summary)["gpus"][1].items()
    newest = list(read_stats(run_dir.gpu_stats_multi))[-1].samples[1]
    assert {name: getattr(newest, name) for name in facts} == facts


def test_a_gpu_lost_from_the_start_keeps_its_column(start_recorder, run_dir):
    process = start_recorder("--hz", 20, lines="0 0 all !lost\n", gpus=2)
    wait_until(lambda: sample_count(run_dir) > 10, "10 samples")
    stop_recorder(process)
    summary = read_json(run_dir.gpu_summary)
    assert [gpu["gpu_index"] for gpu in summary["gpus"]] == [0, 1]
    assert summary["gpus"][0]["power"] is None
    assert summary["gpus"][0]["joules"] is None
    assert summary["gpus"][0]["lost_at"] is not None
    assert summary["balance"]["power"] is None
    assert events_of(run_dir, "lost")[0]["gpu_index"] == 0


def test_an_unsupported_metric_is_null_and_energy_is_integrated_from_power(start_recorder, run_dir):
    lines = "0 * temp !not_supported\n0 * energy !not_supported\n0 * power 200\n"
    process = start_recorder("--hz", 50, lines=lines, gpus=1)
    wait_until(lambda: sample_count(run_dir) > 40, "40 samples")
    stop_recorder(process)
    summary, recording = read_json(run_dir.gpu_summary), read_samples(run_dir.gpu_samples)
    assert summary["gpus"][0]["temperature"] is None
    assert all(math.isnan(value) for value in recording.columns[0]["temperature"])
    assert summary["energy_source"] == "power"
    seconds = recording.times[-1] - recording.times[0]
    assert summary["totals"]["joules"] == pytest.approx(200 * seconds, rel=0.02)


@pytest.mark.parametrize(("failing", "instant"), [("instant", math.nan), ("average", 123)])
def test_average_power_is_recorded_without_the_newer_fields(start_recorder, run_dir, failing, instant):
    process = start_recorder("--hz", 50, lines=f"0 * {failing} !not_supported\n0 * power 123\n", gpus=1)
    wait_until(lambda: sample_count(run_dir) > 5, "5 samples")
    stop_recorder(process)
    recording = read_samples(run_dir.gpu_samples)
    assert recording.columns[0]["power"][-1] == 123
    assert recording.columns[0]["power_instant"][-1] == pytest.approx(instant, nan_ok=True)


def test_a_slow_driver_causes_late_ticks_that_are_skipped_and_counted(start_recorder, run_dir):
    process = start_recorder("--hz", 200, lines="call_us 3000\n", gpus=2)  # far more than 5 ms per tick
    wait_until(lambda: sample_count(run_dir) > 40, "40 samples")
    stop_recorder(process)
    summary = read_json(run_dir.gpu_summary)
    assert summary["late"] > summary["samples"]
    assert summary["samples"] + summary["late"] == pytest.approx(200 * summary["seconds"], rel=0.1)
    assert any("skipped" in text for text in summary["warnings"])


def recorded_gpus(run_dir) -> int:
    """Return the number of GPUs in the recording, 0 while the file of an earlier attempt is moved away."""
    try:
        return len(read_samples(run_dir.gpu_samples).columns)
    except RecordError:
        return 0


def test_an_attempt_on_other_gpus_overwrites_nothing_and_the_summary_reports_it(start_recorder, run_dir):
    for gpus in (2, 1):
        process = start_recorder("--hz", 50, lines="0 * power 200\n", gpus=gpus)
        wait_until(lambda: sample_count(run_dir) > 5, "5 samples")  # the first file is moved before the second exists
        wait_until(lambda count=gpus: recorded_gpus(run_dir) == count, "its GPUs are recorded")
        wait_until(lambda: sample_count(run_dir) > 5, "5 samples")
        stop_recorder(process)
    assert len(read_samples(run_dir.path / "gpu_samples.1.bin").columns) == 2
    assert len(read_samples(run_dir.gpu_samples).columns) == 1
    warnings = read_json(run_dir.gpu_summary)["warnings"]
    assert any("these numbers exclude an earlier attempt" in text for text in warnings)


def test_an_energy_counter_that_falls_is_a_new_baseline_and_an_event(start_recorder, run_dir):
    process = start_recorder("--hz", 50, lines="0 0 power 100\n5 0 energy 0\n", gpus=1)
    wait_until(lambda: events_of(run_dir, "counter reset"), "the counter falls")
    wait_until(lambda: sample_count(run_dir) > 90, "90 samples")
    stop_recorder(process)
    recording, summary = read_samples(run_dir.gpu_samples), read_json(run_dir.gpu_summary)
    joules = list(recording.columns[0]["energy_j"])
    assert joules == sorted(joules)
    assert summary["totals"]["joules"] == pytest.approx(100 * (recording.times[-1] - recording.times[0]), abs=25)


def test_gpus_are_selected_by_uuid_in_the_order_of_ranks(start_recorder, run_dir, library, tmp_path):
    environ = simulate.environment(library, None, 3, time.time())
    script = "from kmatrix.gpu.nvml.detect import detect; print(','.join(gpu.uuid for gpu in detect().gpus))"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'lib'}", **environ}
    uuids = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True).strip().split(",")
    process = start_recorder("--hz", 20, "--gpus", f"{uuids[2]},{uuids[0]}", lines="", gpus=3)
    wait_until(lambda: sample_count(run_dir) > 5, "5 samples")
    stop_recorder(process)
    gpus = read_json(run_dir.gpu_summary)["gpus"]
    assert [(gpu["gpu_index"], gpu["rank"], gpu["uuid"]) for gpu in gpus] == [(2, 0, uuids[2]), (0, 1, uuids[0])]


def test_throttling_is_an_event_with_its_duration(start_recorder, run_dir):
    process = start_recorder("--hz", 20, lines="0 0 throttle power_cap\n", gpus=2)
    wait_until(lambda: sample_count(run_dir) > 32, "32 samples")
    stop_recorder(process)
    summary = read_json(run_dir.gpu_summary)
    assert list(summary["gpus"][0]["throttled_s"]) == ["power cap"]
    assert 0.9 <= summary["gpus"][0]["throttled_s"]["power cap"] <= summary["seconds"] + 0.1
    assert summary["gpus"][1]["throttled_s"] == {}
    assert "power cap" in events_of(run_dir, "throttle")[0]["text"]


def test_a_gpu_that_is_throttled_every_other_second_is_throttled_half_of_the_time(start_recorder, run_dir):
    lines = "loop 2\n0 0 throttle power_cap\n1 0 throttle none\n"
    process = start_recorder("--hz", 20, lines=lines, gpus=1)
    wait_until(lambda: sample_count(run_dir) > 125, "125 samples")
    stop_recorder(process)
    summary = read_json(run_dir.gpu_summary)
    assert summary["gpus"][0]["throttled_s"]["power cap"] == pytest.approx(summary["seconds"] / 2, abs=1.1)


def test_a_foreign_process_is_named(start_recorder, run_dir):
    with sleeping_process() as rank, sleeping_process() as foreign:
        lines = f"0 0 process {rank.pid} 500\n0 0 process {foreign.pid} 700\n"
        process = start_recorder("--hz", 20, "--ranks-of", rank.pid, lines=lines, gpus=1)
        wait_until(lambda: events_of(run_dir, "foreign"), "the other process is reported")
        stop_recorder(process)
    assert read_json(run_dir.gpu_summary)["gpus"][0]["foreign"] == [
        {"pid": foreign.pid, "name": "sleep", "memory_mib": 700},
    ]


def test_the_recorder_exits_when_its_parent_has_exited(start_recorder, run_dir):
    with sleeping_process() as parent:
        process = start_recorder("--hz", 20, "--parent", parent.pid, gpus=1)
        wait_until(lambda: sample_count(run_dir) > 5, "5 samples")
        parent.kill()
    assert process.wait(timeout=240) == 0
    assert read_json(run_dir.gpu_summary)["final"] is True


def test_a_full_disk_causes_a_reported_gap_and_does_not_stop_the_recorder(start_recorder, run_dir):
    process = start_recorder("--hz", 100, lines="0 * power 200\n", gpus=2)
    wait_until(lambda: sample_count(run_dir) > 20, "20 samples")
    # A limit of the file size fails writes like a full disk, and can be lifted again.
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    count = sample_count(run_dir)
    recorder = psutil.Process(process.pid)
    begin = recorder.num_ctx_switches().voluntary
    wait_until(lambda: recorder.num_ctx_switches().voluntary > begin + 80, "it has waited for 80 ticks")
    assert sample_count(run_dir) <= count + 20
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    wait_until(lambda: sample_count(run_dir) > count + 60, "sampling continues")
    wait_until(lambda: events_of(run_dir, "hole"), "the gap is reported")
    stop_recorder(process)
    summary = read_json(run_dir.gpu_summary)
    assert any("could not be written" in text for text in summary["warnings"])
    missed = int(events_of(run_dir, "hole")[0]["text"].split()[0])
    assert summary["samples"] == sample_count(run_dir) + missed
    assert missed > 20
    json.loads(run_dir.gpu_stats_multi.read_text())


def kill_and_check(start_recorder, run_dir):
    process = start_recorder("--hz", 500, lines="0 * power 200\n", gpus=4)
    before = sample_count(run_dir)
    wait_until(lambda: sample_count(run_dir) > before, "a sample")
    wait_until(lambda: sample_count(run_dir) > before + 100, "100 samples")
    count = sample_count(run_dir)
    process.kill()
    process.wait()
    recording = read_samples(run_dir.gpu_samples)
    assert len(recording) >= count
    assert recording.columns[3]["power"][len(recording) - 1] == 200
    assert list(recording.times) == sorted(recording.times)
    for path in (run_dir.gpu_stats, run_dir.gpu_stats_multi):
        if path.exists():
            assert isinstance(json.loads(path.read_text()), list)
    return len(recording)


def test_after_a_kill_every_complete_sample_is_readable_and_the_next_attempt_continues(start_recorder, run_dir):
    first = kill_and_check(start_recorder, run_dir)
    process = start_recorder("--hz", 50, lines="0 * power 200\n", gpus=4)
    wait_until(lambda: sample_count(run_dir) > first + 20, "20 samples more")
    stop_recorder(process)
    summary = read_json(run_dir.gpu_summary)
    assert summary["samples"] == sample_count(run_dir)
    assert [gpu["power"]["count"] for gpu in summary["gpus"]] == [sample_count(run_dir)] * 4
    joules = list(read_samples(run_dir.gpu_samples).columns[0]["energy_j"])
    assert joules == sorted(joules)
    assert [line["event"] for line in read_jsonl(run_dir.gpu_events)].count("started") == 2


@pytest.mark.slow
@pytest.mark.parametrize(("hz", "gpus"), [(20, 8), (100, 8), (1000, 4)])
def test_every_tick_is_a_sample_or_counted_as_late_and_memory_stays_small(start_recorder, run_dir, hz, gpus):
    """The number of late ticks depends on the machine: bench/recorder.py prints it."""
    process = start_recorder("--hz", hz, lines="0 * power 200\n", gpus=gpus)
    wait_until(lambda: sample_count(run_dir) > 10, "10 samples")
    wait_until(lambda: (times := read_samples(run_dir.gpu_samples).times) and times[-1] - times[0] > 3, "3 seconds")
    status = Path(f"/proc/{process.pid}/status").read_text()
    rss = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))
    stop_recorder(process)
    summary = read_json(run_dir.gpu_summary)
    assert rss < 26 * 1024
    assert summary["samples"] + summary["late"] == pytest.approx(hz * summary["seconds"], rel=0.1)


def test_the_recorder_imports_no_heavy_package():
    script = "import sys, kmatrix.gpu.recorder, kmatrix.gpu.nvml; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'lib'}"}
    modules = set(subprocess.check_output([sys.executable, "-c", script], env=environment, text=True).split())
    assert not modules & {"numpy", "rich", "matplotlib", "torch", "psutil", "pynvml", "kconfiglib"}


def test_without_gpu_and_ranks_the_recorder_reports_it_and_succeeds(start_recorder, run_dir):
    process = start_recorder("--hz", 20, lines="init !no_driver\n", gpus=1)
    output, errors = process.communicate(timeout=240)
    assert (process.returncode, errors) == (0, "")
    assert output == "kmatrix recorder: no GPU and no rank found: nothing is recorded\n"
    assert not run_dir.gpu_summary.exists()


def test_a_run_has_one_recorder_at_a_time(start_recorder, run_dir):
    first = start_recorder("--hz", 20, gpus=1)
    wait_until(lambda: sample_count(run_dir) > 2, "2 samples")
    second = start_recorder("--hz", 20, gpus=1)
    _, errors = second.communicate(timeout=240)
    assert second.returncode == 2
    assert "another recorder holds it" in errors
    stop_recorder(first)
    assert len(events_of(run_dir, "started")) == 1


def test_a_folder_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    _, errors = (process := launch_recorder(tmp_path / "file" / "run")).communicate(timeout=240)
    assert process.returncode == 2
    assert "cannot record to" in errors


@pytest.mark.parametrize("hz", ["0", "-1", "1001", "nan"])
def test_an_impossible_rate_is_refused(run_dir, hz):
    _, errors = (process := launch_recorder(run_dir.path, f"--hz={hz}")).communicate(timeout=240)
    assert process.returncode == 2
    assert "hint: pass --hz 20" in errors


TRAINER = """
import os, sys
block = bytearray(64 << 20)
while not os.path.exists(sys.argv[1] + "/enough"):
    pass
"""
LAUNCHER = """
import os, subprocess, sys
folder, trainer = sys.argv[1:]
ranks = [subprocess.Popen([sys.executable, "-m", "gpt2.train", folder], cwd=trainer,
                          env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"})
         for rank in range(2)]
for rank in ranks:
    rank.wait()
"""


def has_both_ranks(run_dir):
    """Return whether both ranks have used the processor and their memory for a while."""
    columns = read_samples(run_dir.gpu_samples).columns
    return len(columns) == 2 and all(
        sum(value > 64 for value in one["memory_used"]) > 10 and any(value > 0 for value in one["utilization"])
        for one in columns
    )


def test_ranks_on_the_cpu_are_recorded_by_rank(run_dir, tmp_path):
    trainer = tmp_path / "trainer"
    (trainer / "gpt2").mkdir(parents=True)
    (trainer / "gpt2" / "__init__.py").write_text("")
    (trainer / "gpt2" / "train.py").write_text(TRAINER)
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, str(run_dir.path), str(trainer)]) as run:
        try:
            recorder = launch_recorder(
                run_dir.path, "--ranks-of", run.pid, "--parent", run.pid, "--device", "cpu", "--hz", 20
            )
            wait_until(lambda: sample_count(run_dir) > 25 and has_both_ranks(run_dir), "both ranks are recorded")
        finally:
            (run_dir.path / "enough").touch()
    assert recorder.wait(timeout=240) == 0
    summary = read_json(run_dir.gpu_summary)
    assert summary["device_type"] == "cpu"
    assert [(gpu["gpu_name"], gpu["rank"]) for gpu in summary["gpus"]] == [("CPU rank 0", 0), ("CPU rank 1", 1)]
    for gpu in summary["gpus"]:
        assert gpu["memory_used"]["max"] > 64
        assert gpu["memory_total"] > gpu["memory_used"]["max"]
        assert gpu["utilization"]["max"] > 0  # a busy machine may give it little time
        assert gpu["power"] is None
        assert gpu["temperature"] is None
        assert gpu["lost_at"] is None
    assert summary["balance"]["memory"]["quality"] in ("Excellent", "Good")  # one of them may have begun later
    assert not any(snapshot.samples[0].power for snapshot in read_stats(run_dir.gpu_stats_multi))


def test_a_run_that_ends_before_any_rank_starts_is_a_notice(run_dir):
    with subprocess.Popen(["sleep", "0.3"]) as run:
        recorder = launch_recorder(run_dir.path, "--ranks-of", run.pid, "--device", "cpu")
        output, errors = recorder.communicate(timeout=240)
    assert (recorder.returncode, errors) == (0, "")
    assert "nothing is recorded" in output


def values(*, power=UNKNOWN, energy=UNKNOWN, memory=UNKNOWN):
    row = [UNKNOWN] * WIDTH
    row[COLUMN_INDEX["power"]], row[COLUMN_INDEX["energy_j"]], row[COLUMN_INDEX["memory_used"]] = power, energy, memory
    return row


def test_running_statistics_equal_those_of_the_complete_list():
    chance = random.Random(3)
    numbers = [chance.uniform(-5, 900) for _ in range(1000)]
    running = RunningStats()
    for begin, end in ((0, 1), (1, 400), (400, 400), (400, 1000)):
        running.add([*numbers[begin:end], math.nan])
    mean = sum(numbers) / 1000
    summary = running.summary()
    assert summary["mean"] == pytest.approx(mean)
    assert summary["deviation"] == pytest.approx(math.sqrt(sum((n - mean) ** 2 for n in numbers) / 1000))
    assert (summary["min"], summary["max"]) == pytest.approx((min(numbers), max(numbers)), abs=1e-5)


def test_a_summary_continues_an_earlier_one_as_if_uninterrupted():
    uninterrupted, first, second = (RunTotals(DEVICES) for _ in range(3))
    rows = [values(power=100 + index, energy=10.0 * index, memory=500 + index % 7) * 2 for index in range(60)]
    for index, row in enumerate(rows):
        uninterrupted.add(index * 0.1, 1000 + index * 0.1, list(row))
        if index < 30:
            first.add(index * 0.1, 1000 + index * 0.1, list(row))
    second.restore(summary_file(first, final=True), None)
    for index, row in enumerate(rows[30:], 30):
        second.add(index * 0.1, 1000 + index * 0.1, list(row))
    left, right = uninterrupted.summary({}, final=True), second.summary({}, final=True)
    assert right["gpus"][0]["power"] == pytest.approx(left["gpus"][0]["power"], abs=1e-4)
    assert right["totals"]["memory_used_max"] == left["totals"]["memory_used_max"]
    assert right["gpus"][0]["joules"] == left["gpus"][0]["joules"] - 10  # nothing is known about the time in between


def recording_of(*samples):
    """Return a recording of one device: samples of (monotonic s, energy total)."""
    columns = {name: array("d", [math.nan] * len(samples)) for name in COLUMNS}
    columns |= {"energy_j": array("d", [joules for _, joules in samples]), "power": array("d", [100.0] * len(samples))}
    times = array("d", [now for now, _ in samples])
    return Recording({"gpus": []}, array("d", [1000 + now for now in times]), (columns,), monotonic=times)


@pytest.mark.parametrize(
    ("attempt", "counter", "joules"),
    [(1, 800.0, 300), (1, 20.0, 110), (2, 800.0, 110), (None, 800.0, 110)],
    ids=["same attempt", "the counter fell", "next attempt", "unknown attempt"],
)
def test_a_restarted_recorder_continues_the_energy_of_its_attempt(attempt, counter, joules):
    """Kill a recorder after its summary at 1 s and a sample at 2 s; the next one starts at 5 s."""
    first = RunTotals(DEVICES[:1], hz=1)
    for now in (0.0, 1.0):
        first.add(now, 1000 + now, values(power=100.0, energy=500.0 + 100 * now))
        first.seconds += 1
    summary = convert(first.summary({"attempt": 1}, final=False), SummaryFile, "")
    second = RunTotals(DEVICES[:1], hz=1)
    second.restore(summary, recording_of((0.0, 0.0), (1.0, 100.0), (2.0, 110.0)), attempt=attempt)
    assert second.seconds_since_last(5.0) == (2.0 if attempt == 1 else 0.0)
    second.add(5.0, 1005.0, values(power=100.0, energy=counter))
    assert second.summary({}, final=True)["gpus"][0]["joules"] == joules


def test_a_restarted_recorder_integrates_power_over_a_short_gap_only():
    for now, joules in ((3.0, 250), (60.0, 100)):
        first = RunTotals(DEVICES[:1], hz=20)
        for earlier in (0.0, 1.0):
            first.add(earlier, 1000 + earlier, values(power=100.0))
        first.seconds = 1.0
        summary = convert(first.summary({"attempt": 1}, final=False), SummaryFile, "")
        second = RunTotals(DEVICES[:1], hz=20)
        second.restore(summary, recording_of((0.0, 0.0), (1.0, 100.0)), attempt=1)
        second.add(now, 1000 + now, values(power=50.0))
        assert second.summary({}, final=True)["gpus"][0]["joules"] == joules


def test_energy_that_became_unknown_stays_so_after_a_restart():
    first = RunTotals(DEVICES[:1], hz=1)
    first.add(0.0, 1000.0, values(power=100.0, energy=500.0))
    first.seconds = 1.0
    summary = convert(first.summary({"attempt": 1}, final=False), SummaryFile, "")
    second = RunTotals(DEVICES[:1], hz=1)
    second.restore(summary, recording_of((0.0, 0.0), (1.0, 100.0), (2.0, math.nan)), attempt=1)
    second.add(3.0, 1003.0, values(power=100.0, energy=900.0))
    assert second.summary({}, final=True)["gpus"][0]["joules"] is None


def test_a_recorder_killed_within_an_attempt_loses_no_energy(start_recorder, run_dir):
    epoch = time.time()
    for count in (60, 100):
        process = start_recorder(*("--hz", 20, "--attempt", 1), lines="0 * power 200\n", gpus=1, epoch=epoch)
        wait_until(run_dir.gpu_summary.exists, "a summary")
        wait_until(lambda count=count: sample_count(run_dir) > count, f"{count} samples")
        if count == 60:
            process.kill()
            process.wait()
    stop_recorder(process)
    summary, recording = read_json(run_dir.gpu_summary), read_samples(run_dir.gpu_samples)
    seconds = recording.times[-1] - recording.times[0]
    assert [line["attempt"] for line in events_of(run_dir, "started")] == [1, 1]
    assert summary["attempt"] == 1
    assert summary["totals"]["joules"] == pytest.approx(200 * seconds, abs=200 * 0.2)
    assert summary["seconds"] == pytest.approx(seconds, abs=0.3)


def test_power_is_not_integrated_over_a_gap():
    aggregate = RunTotals(DEVICES[:1])
    for now in (0.0, 1.0, 20.0, 21.0):
        aggregate.add(now, now, values(power=100.0))
    assert aggregate.summary({}, final=True)["totals"]["joules"] == 200


def test_unknown_values_are_null_everywhere():
    aggregate = RunTotals(DEVICES)
    aggregate.add(0.0, 0.0, values() * 2)
    summary = aggregate.summary({}, final=True)
    assert summary["totals"]["joules"] is None
    assert summary["totals"]["memory_used_max"] is None
    assert summary["balance"] == {"memory": None, "utilization": None, "power": None}
    assert {summary["gpus"][0][name] for name in ("memory_used", "utilization", "power", "joules")} == {None}


def test_a_period_is_the_median_time_between_changes():
    calibration = Calibration()
    for tick in range(400):
        calibration.add(tick * 0.005, {"power": (float(tick // 20), 3e-6), "utilization": (95.0, 1e-6)})
    assert calibration.result() == {
        "power": {"period_ms": 100.0, "call_us": 3.0},
        "utilization": {"period_ms": None, "call_us": 1.0},
    }


def test_a_value_that_changes_at_every_poll_has_no_known_period():
    calibration = Calibration()
    for tick in range(400):
        calibration.add(tick * 0.005, {"memory_used": (float(tick), 1e-6)})
    assert calibration.result()["memory_used"]["period_ms"] is None


@pytest.mark.parametrize(("hz", "warned"), [(20, False), (22, False), (23, True), (100, True)])
def test_polling_at_more_than_twice_the_hardware_rate_gives_a_warning(hz, warned):
    assert (rate_warning({"power": {"period_ms": 100.0}}, hz) is not None) == warned


def test_without_a_known_period_there_is_no_warning():
    assert rate_warning({"power": {"period_ms": None}}, 1000) is None


def test_pids_of_another_container_are_not_reported_as_foreign_without_evidence():
    dead_pid = 2**22 + 5  # above every pid of the kernel
    run_processes = RunProcesses(os.getpid())
    assert run_processes.others([DeviceProcess(pid=dead_pid, memory_mib=100.0)]) == []
    assert [
        each.pid
        for each in run_processes.others(
            [DeviceProcess(pid=dead_pid, memory_mib=1.0), DeviceProcess(pid=dead_pid + 1, memory_mib=1.0)]
        )
    ] == [dead_pid]
    assert RunProcesses(None).others([DeviceProcess(pid=1, memory_mib=1.0)]) == []


def test_exited_and_zombie_processes_are_not_alive():
    process = subprocess.Popen(["true"])
    handle = ProcessHandle(process.pid)
    wait_until(lambda: not handle.is_alive(), "it is a zombie")
    process.wait()
    assert not handle.is_alive()
    assert ProcessHandle(os.getpid()).is_alive()


# A GPU that does not respond for some time


def silence(totals, seconds, begin, step=0.1, **known):
    """Add samples for some seconds in which the second device has no value."""
    for tick in range(round(seconds / step)):
        totals.add(begin + tick * step, 1000.0 + begin + tick * step, [*values(**known), *values()])


def test_a_lost_gpu_that_returns_leaves_energy_and_mean_power_unknown():
    totals = RunTotals(DEVICES)
    totals.add(0.0, 1000.0, values(power=100.0, energy=500.0, memory=10.0) * 2)
    silence(totals, 40, 0.1, power=100.0, energy=600.0, memory=10.0)
    totals.add(40.1, 1040.1, values(power=100.0, energy=2.0, memory=30.0) * 2)
    summary = totals.summary({}, final=True)
    healthy, returned = summary["gpus"]
    assert healthy["joules"] == 100
    assert (returned["joules"], returned["energy_gap"], returned["lost_s"]) == (
        None,
        True,
        pytest.approx(40.1, abs=0.2),
    )
    assert (summary["totals"]["joules"], summary["totals"]["mean_power"]) == (None, None)
    assert summary["warnings"] == [
        f"GPU 1 did not respond for {returned['lost_s']:.1f} s: its energy and mean power are unknown, "
        "its other means are of the rest"
    ]
    means = [gpu["memory_used"]["mean"] for gpu in summary["gpus"]]
    assert summary["totals"]["memory_used_mean"] == pytest.approx(sum(means))


def test_a_counter_that_continued_during_a_timeout_gives_the_energy_and_no_mean_power():
    totals = RunTotals(DEVICES)
    totals.add(0.0, 1000.0, values(power=100.0, energy=500.0) * 2)
    silence(totals, 10, 0.1, power=100.0, energy=600.0)
    totals.add(10.1, 1010.1, values(power=100.0, energy=1500.0) * 2)
    summary = totals.summary({}, final=True)
    assert [gpu["joules"] for gpu in summary["gpus"]] == [1000, 1000]
    assert summary["totals"]["joules"] == 2000
    assert summary["totals"]["mean_power"] is None


def test_integrated_power_of_a_gpu_that_was_silent_is_unknown():
    totals = RunTotals(DEVICES)
    totals.add(0.0, 1000.0, values(power=100.0) * 2)
    silence(totals, 10, 0.1, power=100.0)
    totals.add(10.1, 1010.1, values(power=100.0) * 2)
    healthy, silent = totals.summary({}, final=True)["gpus"]
    assert healthy["joules"] == pytest.approx(1010)
    assert silent["joules"] is None


def test_a_few_failed_queries_do_not_count_as_a_loss():
    totals = RunTotals(DEVICES)
    totals.add(0.0, 1000.0, values(power=100.0, energy=0.0) * 2)
    silence(totals, 0.5, 0.1, power=100.0, energy=5.0)
    totals.add(0.6, 1000.6, values(power=100.0, energy=60.0) * 2)
    summary = totals.summary({}, final=True)
    assert summary["gpus"][1]["lost_s"] == 0
    assert (summary["totals"]["mean_power"], summary["totals"]["joules"]) == (200, 120)
    assert summary["warnings"] == []


def test_a_resumed_recording_keeps_the_gap_and_warns_once():
    first = RunTotals(DEVICES)
    first.add(0.0, 1000.0, values(power=100.0, energy=500.0) * 2)
    silence(first, 40, 0.1, power=100.0, energy=600.0)
    first.add(40.1, 1040.1, values(power=100.0, energy=2.0) * 2)
    second = RunTotals(DEVICES)
    second.restore(summary_file(first, final=True), None)
    second.add(90.0, 1090.0, values(power=100.0, energy=9.0) * 2)
    summary = second.summary({}, final=True)
    assert summary["gpus"][1]["joules"] is None
    assert len(summary["warnings"]) == 1


def test_a_rank_that_has_not_started_is_not_lost():
    totals = RunTotals(DEVICES, ranks=True)
    silence(totals, 10, 0.0, memory=1.0)
    summary = totals.summary({}, final=True)
    assert [gpu["lost_s"] for gpu in summary["gpus"]] == [0, 0]
    assert summary["warnings"] == []


def test_a_corrected_memory_error_is_not_reported_as_uncorrected():
    totals = RunTotals(DEVICES).totals[0]
    totals.ingest(ExtraMetrics(ecc_corrected=1, ecc_uncorrected=0))
    assert totals.ingest(ExtraMetrics(ecc_corrected=4)) == 0
    assert totals.ecc == {"corrected": 3, "uncorrected": 0}
    assert totals.ingest(ExtraMetrics(ecc_corrected=4, ecc_uncorrected=2)) == 2


def test_samples_after_the_summary_are_found_by_their_time_after_the_clock_was_set_back():
    totals = RunTotals(DEVICES[:1])
    for number, wall in enumerate((1000.0, 1001.0, 500.0)):
        totals.add(float(number), wall, values(memory=1.0))
    clocks = array("d", [1000.0, 1001.0, 500.0, 501.0])
    columns = ({name: array("d", [1.0] * 4) for name in COLUMNS},)
    recording = Recording({"gpus": []}, clocks, columns, monotonic=array("d", [0.0, 1.0, 2.0, 3.0]))
    resumed = RunTotals(DEVICES[:1])
    resumed.restore(summary_file(totals, final=False), recording)
    assert resumed.samples == 4


@pytest.mark.parametrize(
    "error", ["timeout", *(pytest.param(name, marks=pytest.mark.slow) for name in ("unknown", "no_driver"))]
)
def test_a_gpu_of_which_every_query_fails_is_an_event_and_a_warning(start_recorder, run_dir, error):
    # Ten times as fast: GPU 1 fails from second 10 to 50 of the scenario, seconds 1 to 5 of the recording.
    lines = f"speed 10\n0 * power 100\n10 1 all !{error}\n50 1 all ok\n"
    process = start_recorder("--hz", 20, lines=lines)
    wait_until(lambda: events_of(run_dir, "found"), "the GPU is found again")
    stop_recorder(process)
    (lost,), (found,) = events_of(run_dir, "lost"), events_of(run_dir, "found")
    assert (lost["gpu_index"], lost["text"].endswith("values are null")) == (1, True)
    summary = read_json(run_dir.gpu_summary)
    assert summary["gpus"][1]["lost_at"] is None
    between = found["monotonic"] - lost["monotonic"]  # each a second or two after what it reports
    assert max(0, between - 2) < summary["gpus"][1]["lost_s"] < summary["seconds"]
    assert summary["totals"]["mean_power"] is None
    assert any("GPU 1 did not respond" in text for text in summary["warnings"])


def test_a_run_on_gpus_whose_driver_is_not_loaded_is_not_recorded_as_ranks(start_recorder, run_dir):
    process = start_recorder("--gpus", "GPU-0", "--ranks-of", os.getpid(), lines="init !no_driver\n")
    output, _ = process.communicate(timeout=240)
    (event,) = events_of(run_dir, "nothing recorded")
    assert event["text"] == "no GPU found: nothing is recorded; the NVIDIA driver does not respond: Driver Not Loaded"
    assert event["text"] in output
