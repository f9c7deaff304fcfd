"""Run a recorder on simulated GPUs in its own process, and read its recording."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kmatrix.simulate.library as simulate
from kmatrix.gpu.devices import Device
from kmatrix.gpu.formats.binary import read_samples
from kmatrix.gpu.formats.summary import SummaryFile
from kmatrix.records.decode import convert, decode_lines
from kmatrix.records.files import write_json
from kmatrix.records.paths import RunDir
from once import session_folder
from skips import require_program

ROOT = Path(__file__).resolve().parents[2]
# Second 0 of a scenario is the first call of the driver, however long the process took to start.
BEGIN_NOW = """
import os, sys, time
from kmatrix.gpu.recorder.__main__ import main
os.environ["KMATRIX_SIMULATE_EPOCH"] = repr(time.time())
sys.exit(main(sys.argv[1:]))
"""
PROGRAM = ("-m", "kmatrix.gpu.recorder")
DEVICES = [Device(gpu_index=i, gpu_name="NVIDIA A10G", uuid=f"GPU-{i}", memory_total=1000.0) for i in range(2)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    require_program("gcc")
    return simulate.build(session_folder(tmp_path_factory))


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "gpt2_adamw_4gpu"
    path.mkdir()
    write_json(path / "run.json", {"run_id": "0123456789"})
    return RunDir(path)


@pytest.fixture
def start_recorder(run_dir, library, tmp_path):
    """Start a recorder on simulated GPUs. lines: the scenario."""
    started = []

    def start(*arguments, lines="", gpus=2, epoch=None):
        scenario = tmp_path / "scenario.scn"
        scenario.write_text(lines)
        environment = simulate.environment(library, scenario, gpus, epoch)
        program = ("-c", BEGIN_NOW) if epoch is None else PROGRAM
        return launch_recorder(run_dir.path, *arguments, started=started, environment=environment, program=program)

    yield start
    for process in started:
        process.kill()
        process.wait()


def launch_recorder(path, *arguments, started=None, environment=None, program=PROGRAM):
    command = [sys.executable, *program, str(path), *map(str, arguments)]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'lib'}", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if started is not None:
        started.append(process)
    return process


def sample_count(run_dir):
    with contextlib.suppress(Exception):
        return len(read_samples(run_dir.gpu_samples))
    return 0


def stop_recorder(process):
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=240)
    assert (process.returncode, errors) == (0, "")
    return output


def read_jsonl(path):
    """Return the objects of the complete lines of a log."""
    return decode_lines(path, dict[str, Any])


def events_of(run_dir, kind):
    return [line for line in read_jsonl(run_dir.gpu_events) if line["event"] == kind]


def summary_file(totals, *, final):
    """Return the summary of these totals as the next attempt reads it."""
    return convert(totals.summary({}, final=final), SummaryFile, "gpu_summary.json")
