"""Read recordings with independent scripts, with nvitop, and after SIGKILL."""

from __future__ import annotations

import json
import random
import struct
import time
from pathlib import Path

import pytest

from gpu_stage import background_process, on_gpus, read_independently, scenario
from kmatrix.gpu.formats.binary import read_samples
from story import load_json
from waiting import wait_until

pytestmark = pytest.mark.nightly

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
    """Return the number of complete records, computed from the file size as docs/gpus.md describes."""
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
