"""The recorder beside a run: it is there while the run is, it is gone afterwards, and it can hurt nothing."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest
from launching import ROOT, engine, processes_of
from skips import need

from kmatrix.gpu import simulate
from kmatrix.launch.drive import drive
from kmatrix.launch.monitor import Monitor
from kmatrix.records import read_json, read_jsonl, write_json

PYTHON = Path(sys.executable)


def monitor(**known) -> Monitor:
    return Monitor(**{"python": PYTHON, "root": ROOT, "hz": 20} | known)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory) -> Monitor:
    """A monitor that sees two simulated GPUs."""
    need("gcc")
    library = simulate.build(tmp_path_factory.mktemp("simulate"))
    return monitor(simulated=True, environment=simulate.environment(library, simulate.SCENARIOS / "calm.scn", 2))


def test_a_run_is_recorded_from_its_start_to_its_end(matrix, plan, simulated):
    one = plan("a")
    run = read_json(one.dir.run_json)
    write_json(one.dir.run_json, run | {"train": run["train"] | {"max_iters": 80}})  # a second or two
    assert drive(matrix, [one], engine(monitor=simulated), poll_s=0.02).exit_code == 0
    summary = read_json(one.dir.gpu_summary)
    assert (summary["final"], summary["simulated"], len(summary["gpus"])) == (True, True, 2)
    assert [line["event"] for line in read_jsonl(one.dir.gpu_events)][-1] == "ended"
    assert len(json.loads(one.dir.gpu_stats_multi.read_text())) >= 1
    assert processes_of(matrix) == []


def test_a_run_without_gpus_and_ranks_says_so_in_one_line(matrix, plan):
    one = plan("a")
    run = read_json(one.dir.run_json)
    write_json(one.dir.run_json, run | {"train": run["train"] | {"max_iters": 80}})
    assert drive(matrix, [one], engine(monitor=monitor()), poll_s=0.02).exit_code == 0
    assert "nothing is recorded" in one.dir.output_log.read_text()


def test_without_a_monitor_nothing_is_recorded(matrix, plan):
    one = plan("a")
    assert drive(matrix, [one], engine(), poll_s=0.02).exit_code == 0
    assert list(one.dir.path.glob("gpu_*")) == []


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"])
def test_a_recorder_that_cannot_start_or_dies_hurts_nothing(matrix, plan, python):
    one = plan("a")
    assert drive(matrix, [one], engine(monitor=monitor(python=Path(python))), poll_s=0.02).exit_code == 0
    assert read_json(one.dir.status)["status"] == "finished"


def test_a_recorder_that_hears_nothing_is_killed(matrix, plan, tmp_path, monkeypatch):
    deaf = tmp_path / "deaf"
    deaf.write_text(f"#!{sys.executable}\nimport signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(600)\n")
    deaf.chmod(0o755)
    monkeypatch.setattr("kmatrix.launch.monitor.WAIT_S", 0.2)
    one = plan("a")
    assert drive(matrix, [one], engine(monitor=monitor(python=deaf)), poll_s=0.02).exit_code == 0
    time.sleep(0.1)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(deaf) in (p.info["cmdline"] or [])]


def test_the_port_for_prometheus_is_passed_on_only_where_there_is_one(plan):
    assert monitor(prometheus=9400).command(plan("a"), 1)[-4:] == ["--prometheus", "9400", "--device", "cpu"]
    assert "--prometheus" not in monitor().command(plan("b"), 1)
