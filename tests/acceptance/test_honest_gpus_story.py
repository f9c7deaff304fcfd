"""Report a GPU that was lost and returned, a GPU that timed out, and a clock that was set back by a day."""

from __future__ import annotations

import contextlib
import csv
import json
import re
from pathlib import Path

import pytest

from gpu_stage import background_process, load_json, load_jsonl, on_gpus, scenario
from kmatrix.gpu.formats.binary import read_samples
from kmatrix.records.paths import MatrixDir
from records_factory import FakeRun, make_matrix
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(900)]

GPUS = 2
DAY = 86_400
LOST = ("20 1 all !lost", "60 1 all ok", "60 1 energy 0")  # the energy counter restarts
SILENT = ("20 1 all !timeout", "60 1 all ok")  # every query fails
# Second 0 of the scenario is when the recorder begins, however long Python and its modules took to start.
RECORDER = """
import os, sys, time
from kmatrix.gpu.recorder.__main__ import main
os.environ["KMATRIX_SIMULATE_EPOCH"] = repr(time.time())
sys.exit(main())
"""
CLOCK = '''
"""A wall clock with the offset (s) in a file, in the processes of Python."""
import time
wall, wall_ns = time.time, time.time_ns

def offset():
    with open({path!r}) as file:
        return int(file.read() or 0)

time.time = lambda: wall() + offset()
time.time_ns = lambda: wall_ns() + offset() * 10**9
'''


def recorder(clone, run, *lines, name, extra=""):
    """Return the command that records two simulated GPUs, ten times as fast as the scenario says."""
    path = scenario(run.path.parent.parent, f"gpus {GPUS}", "speed 10", "0 * power 100", *lines, name=name)
    paths = f"PYTHONPATH={extra}:{clone.root / 'lib'}:{clone.root}"
    return on_gpus(clone, path, "env", paths, clone.python, "-c", RECORDER, str(run.path), "--hz", "20")


def samples(run) -> int:
    with contextlib.suppress(Exception):
        return len(read_samples(run.gpu_samples))
    return 0


def events(run, kind) -> list:
    return [event for event in load_jsonl(run.gpu_events) if event["event"] == kind] if run.gpu_events.exists() else []


def negative(value, path="") -> list[str]:
    """Return the paths of the negative times and energies in a JSON value."""
    if isinstance(value, dict):
        return [found for name, item in value.items() for found in negative(item, f"{path}/{name}")]
    if isinstance(value, list):
        return [found for number, item in enumerate(value) for found in negative(item, f"{path}/{number}")]
    is_amount = re.search(r"(seconds|_s|joules|kwh|hours|power|hz_reached)$", path)
    return [f"{path}: {value}"] if isinstance(value, int | float) and value < 0 and is_amount else []


@pytest.fixture
def recorded(clone, tmp_path) -> MatrixDir:
    """A matrix with a run whose GPU is lost, one whose GPU times out, and one whose clock is set back."""
    fakes = [FakeRun(optimizer=name, gpus=GPUS, device="cuda") for name in ("adamw", "muon", "sgd")]
    matrix = make_matrix(tmp_path / "results", fakes)
    lost, silent, clocked = (matrix.run(fake.name) for fake in fakes)
    clock, folder = tmp_path / "clock", tmp_path / "patched"
    clock.write_text("0")
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(CLOCK.format(path=str(clock)), encoding="utf-8")
    commands = [
        recorder(clone, lost, *LOST, name="lost"),
        recorder(clone, silent, *SILENT, name="silent"),
        recorder(clone, clocked, name="clocked", extra=str(folder)),
    ]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(background_process(clone, *command)) for command in commands]
        wait_until(lambda: samples(clocked) > 40, "two seconds are recorded")
        clock.write_text(str(-DAY))
        wait_until(lambda: events(lost, "found"), "the lost GPU is found again")
        wait_until(lambda: events(silent, "found"), "the silent GPU is found again")
        counts = {run: samples(run) for run in (lost, silent, clocked)}
        for run, count in counts.items():
            wait_until(lambda run=run, count=count: samples(run) > count + 40, "two more seconds are recorded")
        for process in processes:
            process.terminate()
            assert process.wait(timeout=60) == 0
    return matrix


def test_reports_say_what_is_unknown_and_no_time_is_negative(clone, recorded, tmp_path):
    for target in ("summary", "update-graphs"):
        ended = clone.make(target, f"TARGET={recorded.path}")
        assert ended.returncode == 0, ended.stderr
        assert "Traceback" not in ended.stderr
    results = load_json(recorded.results)
    lost, silent, clocked = (run["gpu"] for run in results["runs"])
    summary = " ".join(recorded.summary.read_text(encoding="utf-8").split())

    # Lost, and back with a restarted counter: nobody knows the energy.
    assert (lost["totals"]["joules"], lost["totals"]["joules_per_token"], lost["totals"]["mean_power"]) == (None,) * 3
    assert lost["gpus"][0]["joules"] > 0
    assert lost["gpus"][1]["joules"] is None
    assert lost["gpus"][1]["lost_at"] is None
    assert lost["balance"]["power"] is None
    # Timed out: the counter continued, but the mean power of the time without a response is unknown.
    assert silent["totals"]["joules"] > 0
    assert silent["totals"]["mean_power"] is None
    names = [run["name"] for run in results["runs"]]
    for name, gpu in zip(names[:2], (lost, silent), strict=True):
        (event,) = events(recorded.run(name), "lost")
        assert event["gpu_index"] == 1
        assert 1.5 < gpu["gpus"][1]["lost_s"] < 60
        assert any(re.match(r"GPU 1 did not respond for \d+\.\d s: its .* unknown", note) for note in gpu["notes"])
    assert summary.count("GPU 1 did not respond for") == 2

    # Set back by a day: nothing changes.
    run = recorded.run(names[2])
    assert clocked["totals"]["mean_power"] == pytest.approx(200, abs=1)
    assert not any("did not respond" in note for note in clocked["notes"])
    assert 2 < clocked["seconds"] < 600
    power = clocked["totals"]["joules"] / clocked["seconds"]
    assert power == pytest.approx(2000, rel=0.1), "the scenario is ten times as fast: 200 W for 10 s per second"
    recording = read_samples(run.gpu_samples)
    assert recording.times[len(recording) - 1] < recording.times[0] - DAY / 2

    for name in names:
        summed = load_json(recorded.run(name).gpu_summary)
        (written,) = (one["gpu"] for one in results["runs"] if one["name"] == name)
        assert written["totals"]["memory_used_mean"] == summed["totals"]["memory_used_mean"]
        assert negative(summed) == []
    assert negative(results) == []
    assert negative(json.loads((recorded.all_results).read_text(encoding="utf-8"))) == []
    assert (recorded.graphs / "gpu_memory_timeline.png").exists()

    # The other readers of a recording.
    exported = clone.run(clone.python, "-m", "kmatrix.gpu.recorder", str(run.path), "--format", "csv")
    assert exported.returncode == 0, exported.stderr
    with Path(exported.stdout.strip()).open(newline="") as file:
        elapsed = [float(row["elapsed_sec"]) for row in csv.DictReader(file)]
    assert elapsed == sorted(elapsed)
    assert elapsed[0] == 0
    for arguments in (["--once"], ["--once", "--at", "1"], ["--json"]):
        shown = clone.run(clone.python, "scripts/gputop.py", "--replay", str(run.path), *arguments)
        assert shown.returncode == 0, shown.stderr
    # Without its summary, as after a kill of the recorder, the report says the same.
    run.gpu_summary.unlink()
    assert clone.make("summary", f"TARGET={recorded.path}").returncode == 0
    again = load_json(recorded.results)["runs"][2]["gpu"]
    assert again["totals"]["joules"] == pytest.approx(clocked["totals"]["joules"], rel=0.01)
    assert again["seconds"] == pytest.approx(clocked["seconds"], abs=1)
    assert negative(again) == []
