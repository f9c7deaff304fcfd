"""Read recordings with independent scripts, and after SIGKILL."""

from __future__ import annotations

import csv
import json
import random
import re
import struct
import subprocess
import time
from datetime import datetime
from pathlib import Path

import pytest

from gpu_stage import background_process, load_json, load_jsonl, on_gpus, read_independently, scenario
from kmatrix.gpu.formats.binary import read_samples
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1500)]

RUN = "gpt2_adamw_4gpu"


@pytest.fixture
def run(tmp_path) -> Path:
    path = tmp_path / RUN
    path.mkdir()
    return path


def recorder_command(clone, run: Path, scenario_path: Path, *arguments: str) -> list[str]:
    return on_gpus(clone, scenario_path, clone.python, "-m", "kmatrix.gpu.recorder", str(run), *arguments)


def record(clone, run: Path, scenario_path: Path, seconds: int, *arguments: str) -> None:
    """Record until both arrays cover this many seconds, and stop the recorder cleanly."""
    multi = run / f"gpu_stats_{RUN}_multi_gpu.json"
    with background_process(clone, *recorder_command(clone, run, scenario_path, *arguments)) as process:
        wait_until(lambda: multi.exists() and len(load_json(multi)) >= seconds, f"{seconds} seconds are recorded")
        process.terminate()
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_script_without_kmatrix_reads_both_layouts(clone, run, tmp_path, count):
    record(clone, run, scenario(tmp_path, f"gpus {count}", "0 * power 100..180", "0 * temp 50..70"), 2)
    found = read_independently(run / f"gpu_stats_{RUN}.json", run / f"gpu_stats_{RUN}_multi_gpu.json")
    assert found["gpus"] == count
    expected = [100 + 80 * gpu / max(1, count - 1) for gpu in range(count)]
    assert found["power"] == pytest.approx(expected, abs=0.001)


def test_a_recording_is_converted_to_the_csv_of_the_first_monitor(clone, run, tmp_path):
    """The columns are those of the first monitor (timestamp, elapsed_sec, gpu0_power_w, ...), at 100 samples/s."""
    record(clone, run, scenario(tmp_path, "gpus 2", "0 * power 100..180", "0 * temp 50..70"), 3, "--hz", "100")
    completed = clone.run(clone.python, "-m", "kmatrix.gpu.recorder", str(run), "--format", "csv")
    assert completed.returncode == 0, completed.stderr
    path = Path(completed.stdout.strip())
    assert re.fullmatch(r"gpu_metrics_\d{8}_\d{6}\.csv", path.name)
    with path.open(newline="") as file:
        titles, *rows = csv.reader(file)
    first_monitor = ["timestamp", "elapsed_sec", "gpu0_power_w", "gpu0_temp_c", "gpu1_power_w", "gpu1_temp_c"]
    assert titles == [*first_monitor, "simulated"]
    assert len(rows) == load_json(run / "gpu_summary.json")["samples"]
    assert rows[-1][2:] == ["100", "50", "180", "70", "1"]
    assert all(re.search(r"\.\d{3}\b", row[0]) for row in rows), "times are to the millisecond"
    begin, end = (datetime.fromisoformat(row[0]) for row in (rows[0], rows[-1]))
    assert (end - begin).total_seconds() == pytest.approx(float(rows[-1][1]), abs=0.009), "less than one sample"


def test_fifty_kills_lose_no_complete_sample(clone, run, tmp_path):
    """After each SIGKILL at a random time, every file is readable up to the last sample."""
    scenario_path, chance = scenario(tmp_path, "gpus 4", "0 * power 200"), random.Random(7)
    samples, before = run / "gpu_samples.bin", 0
    for _ in range(50):
        with background_process(clone, *recorder_command(clone, run, scenario_path, "--hz", "500")) as process:
            wait_until(lambda least=before: complete_records(samples) > least, "it continues")
            time.sleep(chance.uniform(0, 0.3))
            count = complete_records(samples)
            process.kill()
            process.wait()
        recording = read_samples(samples)
        assert len(recording) >= count > before
        before = len(recording)
        assert list(recording.times) == sorted(recording.times)
        assert all(columns["power"][-1] == 200 for columns in recording.columns)
        for path in run.glob("*.json"):
            json.loads(path.read_text())
    joules = list(read_samples(samples).columns[0]["energy_j"])
    assert joules == sorted(joules)
    read_independently(run / f"gpu_stats_{RUN}.json", run / f"gpu_stats_{RUN}_multi_gpu.json")


def complete_records(path: Path) -> int:
    """Return the number of complete records, computed from the file size as docs/gpu-monitoring.md describes."""
    if not path.exists() or path.stat().st_size < 12:
        return 0
    with path.open("rb") as file:
        (length,) = struct.unpack("<I", file.read(12)[8:])
        header = file.read(length)
    if len(header) < length:
        return 0
    header_fields = json.loads(header)
    record = 3 * 8 + len(header_fields["gpus"]) * struct.calcsize(f"<{header_fields['types']}")
    return (path.stat().st_size - 12 - length) // record


def test_without_a_gpu_or_rank_the_recorder_prints_one_line(clone, run, tmp_path):
    scenario_path = scenario(tmp_path, "init !no_driver")
    completed = subprocess.run(
        recorder_command(clone, run, scenario_path),
        cwd=clone.root,
        env=clone.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (completed.returncode, completed.stderr) == (0, "")
    assert completed.stdout == "kmatrix recorder: no GPU and no rank found: nothing is recorded\n"
    (event,) = load_jsonl(run / "gpu_events.jsonl")
    assert (event["event"], event["text"]) == ("nothing recorded", completed.stdout.strip().partition(": ")[2])
    assert [path.name for path in run.iterdir()] == ["gpu_events.jsonl"]
