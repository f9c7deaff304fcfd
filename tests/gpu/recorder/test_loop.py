"""The recorder in its own process, on simulated GPUs and on the ranks of a CPU run."""

import contextlib
import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import kmatrix.simulate.library as simulate
from kmatrix.errors import RecordError
from kmatrix.gpu.formats.binary import read_samples
from kmatrix.gpu.processes import ProcessHandle
from kmatrix.records.files import read_json
from recordings import ROOT, events_of, launch_recorder, read_jsonl, sample_count, stop_recorder
from waiting import wait_until

pytestmark = pytest.mark.process


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
    several, single = json.loads(run_dir.gpu_stats_multi.read_text()), json.loads(run_dir.gpu_stats.read_text())
    assert [entry["timestamp"] for entry in several] == [entry["timestamp"] for entry in single]
    assert len(several) >= 2
    assert several[0]["multi_gpu_data"][0].items() <= single[0].items()
    assert several[0]["multi_gpu_data"][1]["utilization"] == 50
    assert [line["event"] for line in read_jsonl(run_dir.gpu_events)][0::2] == ["started", "ended"]
    assert recording.header["calibration"] == summary["calibration"]


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
    entries = (entry["multi_gpu_data"] for entry in json.loads(run_dir.gpu_stats_multi.read_text()))
    assert next(first["power"] for first, second in entries if second["utilization"] is None) == 100
    summary = read_json(run_dir.gpu_summary)
    assert summary["gpus"][1]["samples"] < summary["gpus"][0]["samples"]
    assert summary["gpus"][1]["lost_at"] is None
    assert summary["gpus"][1]["power"]["min"] == 100


@pytest.mark.nightly
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
    newest = json.loads(run_dir.gpu_stats_multi.read_text())[-1]["multi_gpu_data"][1]
    assert facts.items() <= newest.items()


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
@pytest.mark.parametrize(("hz", "gpus"), [(20, 8), (100, 8), (1000, 4)])
def test_every_tick_is_a_sample_or_counted_as_late_and_memory_stays_small(start_recorder, run_dir, hz, gpus):
    """The number of late ticks depends on the machine: bench/monitor.py prints the rate that is reached."""
    process = start_recorder("--hz", hz, lines="0 * power 200\n", gpus=gpus)
    wait_until(lambda: sample_count(run_dir) > 10, "10 samples")
    wait_until(lambda: (times := read_samples(run_dir.gpu_samples).times) and times[-1] - times[0] > 3, "3 seconds")
    status = Path(f"/proc/{process.pid}/status").read_text()
    rss = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))
    stop_recorder(process)
    summary = read_json(run_dir.gpu_summary)
    assert rss < 26 * 1024
    assert summary["samples"] + summary["late"] == pytest.approx(hz * summary["seconds"], rel=0.1)


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


@pytest.mark.nightly
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
    assert not any(entry["multi_gpu_data"][0]["power"] for entry in json.loads(run_dir.gpu_stats_multi.read_text()))


@pytest.mark.nightly
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


def test_exited_and_zombie_processes_are_not_alive():
    process = subprocess.Popen(["true"])
    handle = ProcessHandle(process.pid)
    wait_until(lambda: not handle.is_alive(), "it is a zombie")
    process.wait()
    assert not handle.is_alive()
    assert ProcessHandle(os.getpid()).is_alive()


def test_a_run_on_gpus_whose_driver_is_not_loaded_is_not_recorded_as_ranks(start_recorder, run_dir):
    process = start_recorder("--gpus", "GPU-0", "--ranks-of", os.getpid(), lines="init !no_driver\n")
    output, _ = process.communicate(timeout=240)
    (event,) = events_of(run_dir, "nothing recorded")
    assert event["text"] == "no GPU found: nothing is recorded; the NVIDIA driver does not respond: Driver Not Loaded"
    assert event["text"] in output
