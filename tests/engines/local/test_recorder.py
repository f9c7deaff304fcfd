"""The recorder of a run lives as long as the run and never affects it."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import kmatrix.simulate.library as simulate
from kmatrix.engines.local.recorder import RecorderLauncher
from kmatrix.gpu.formats.json_array import last_entry
from kmatrix.packing import Limits
from kmatrix.records.files import read_json, read_jsonl
from kmatrix.records.paths import RunDir
from kmatrix.runner.loop import drive
from once import session_folder
from running import engine, processes_naming, recorder_launcher
from skips import require_program
from waiting import wait_until


@pytest.fixture(scope="module")
def two_gpu_recorder(tmp_path_factory) -> RecorderLauncher:
    """A launcher of recorders that sees two simulated GPUs."""
    require_program("gcc")
    library = simulate.build(session_folder(tmp_path_factory))
    return recorder_launcher(
        simulated=True, environment=simulate.environment(library, simulate.SCENARIOS / "calm.scn", 2)
    )


@pytest.mark.process
def test_a_run_is_recorded_from_its_start_to_its_end(matrix, plan, two_gpu_recorder):
    planned = plan("a", "until asked")

    def show(_):
        if last_entry(planned.dir.gpu_stats_multi):
            (planned.dir.path / "enough").touch()

    local_engine = engine(recorders=two_gpu_recorder)
    assert drive(matrix, [planned], local_engine, on_progress=show, poll_s=0.02).exit_code == 0
    summary = read_json(planned.dir.gpu_summary)
    assert (summary["final"], summary["simulated"], len(summary["gpus"])) == (True, True, 2)
    assert [line["event"] for line in read_jsonl(planned.dir.gpu_events)][-1] == "ended"
    assert len(json.loads(planned.dir.gpu_stats_multi.read_text())) >= 1
    assert processes_naming(matrix) == []


def looks_for_ranks(matrix):
    """Return whether a recorder of the matrix runs, and has blocked SIGTERM, which would end it before."""
    for process in processes_naming(matrix):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if "kmatrix.gpu.recorder" in process.cmdline():
                status = Path(f"/proc/{process.pid}/status").read_text()
                blocked = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk")), 16)
                return bool(blocked >> (signal.SIGTERM - 1) & 1)
    return False


@pytest.mark.nightly
def test_a_run_without_gpus_and_ranks_reports_it_in_one_line(matrix, plan):
    planned = plan("a", "until asked")

    def show(_):
        if looks_for_ranks(matrix):
            (planned.dir.path / "enough").touch()

    assert drive(matrix, [planned], engine(recorders=recorder_launcher()), on_progress=show, poll_s=0.02).exit_code == 0
    assert "nothing is recorded" in planned.dir.output_log.read_text()


@pytest.mark.process
def test_without_a_monitor_nothing_is_recorded(matrix, plan):
    run = plan("a")
    assert drive(matrix, [run], engine(), poll_s=0.02).exit_code == 0
    assert list(run.dir.path.glob("gpu_*")) == []


@pytest.mark.process
@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"])
def test_a_recorder_that_fails_to_start_or_dies_does_not_affect_the_run(matrix, plan, python):
    run = plan("a")
    assert drive(matrix, [run], engine(recorders=recorder_launcher(python=Path(python))), poll_s=0.02).exit_code == 0
    assert read_json(run.dir.status)["status"] == "finished"


@pytest.mark.process
def test_an_unresponsive_recorder_is_killed(matrix, plan, tmp_path, monkeypatch):
    deaf = tmp_path / "deaf"
    deaf.write_text(f"#!{sys.executable}\nimport signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(600)\n")
    deaf.chmod(0o755)
    # The recorder ignores SIGTERM in any case, so the test need not wait as long as the engine does.
    monkeypatch.setattr("kmatrix.engines.local.recorder.WAIT_S", 0.2)
    monkeypatch.setattr("kmatrix.engines.local.process.END_S", 0.2)  # its output goes to the log of the run
    run = plan("a")
    assert drive(matrix, [run], engine(recorders=recorder_launcher(python=deaf)), poll_s=0.02).exit_code == 0
    wait_until(lambda: not [p for p in psutil.process_iter(["cmdline"]) if str(deaf) in (p.info["cmdline"] or [])])


def test_the_recorder_of_a_later_node_gets_the_rank_of_its_first_gpu(plan, tmp_path):
    folder = RunDir(tmp_path / "nodes" / "1")
    command = recorder_launcher().command(plan("a"), 1, gpus=("u", "v"), folder=folder, first_rank=2)
    assert command[command.index("--first-rank") + 1] == "2"
    assert "--first-rank" not in recorder_launcher().command(plan("b"), 1, gpus=("u", "v"))


def test_a_restarted_recorder_continues_the_attempt_and_the_scenario(plan, monkeypatch):
    launcher, started = recorder_launcher(simulated=True), []
    tree = SimpleNamespace(pid=1, start_companion=lambda command, **options: started.append((command, options["env"])))
    launcher.start(replace(plan("a"), attempt=3), tree, since=1000.0)
    ((command, environment),) = started
    assert command[command.index("--attempt") + 1] == "3"
    assert environment["KMATRIX_SIMULATE_EPOCH"] == "1000.0"


def test_concurrent_runs_share_the_simulated_gpus_and_a_single_run_sees_all(plan):
    simulated = recorder_launcher(simulated=True, gpus=("a", "b", "c"))
    assert simulated.seen(plan("x", ranks=2), (), shared=False) == ()  # all GPUs
    assert simulated.seen(plan("x", ranks=2), (), shared=True) == ("a", "b")
    assert simulated.seen(plan("x", ranks=2), ("a", "b"), shared=True) == ("c",)
    assert simulated.seen(plan("x"), ("a", "b", "c"), shared=True) is None
    assert recorder_launcher().seen(plan("x", cuda=True, gpus=("u",)), (), shared=True) == ("u",)


def test_a_run_without_a_free_simulated_gpu_reports_it_and_trains(plan):
    run = plan("x")
    assert recorder_launcher(simulated=True).start(run, None, gpus=None) is None
    assert "no simulated GPU is left" in run.dir.output_log.read_text()


@pytest.mark.nightly
def test_packed_cpu_runs_are_recorded_on_disjoint_gpus(matrix, plan, tmp_path_factory):
    require_program("gcc")
    library = simulate.build(session_folder(tmp_path_factory))
    environment = simulate.environment(library, simulate.SCENARIOS / "calm.scn", 4)
    uuids = simulate.uuids(environment)
    recorder = recorder_launcher(simulated=True, environment=environment, gpus=uuids)
    plans = [plan("a", "hang", ranks=1), plan("b", "hang", ranks=2), plan("c", "hang", ranks=1)]
    local_engine = engine(recorders=recorder, cores=8, limits=Limits(jobs=3))
    local_engine.submit(plans)
    local_engine.poll()
    try:
        wait_until(lambda: all(last_entry(run.dir.gpu_stats_multi) for run in plans))
        recorded = [[gpu["uuid"] for gpu in last_entry(run.dir.gpu_stats_multi)["multi_gpu_data"]] for run in plans]
    finally:
        local_engine.cancel(now=True)
    assert sorted(map(len, recorded)) == [1, 1, 2]
    assert sorted(uuid for group in recorded for uuid in group) == sorted(uuids)
