"""Submit a matrix to a fake Slurm whose jobs are run here: time limit, stop, continue, report."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from fake_slurm import LIVE, FakeSlurm
from scripted_story import attempts
from story import load_json

pytestmark = pytest.mark.story

SLURM = ("ENGINE=slurm", "DEVICE=cpu", "SLURM_TIME=10m", "REUSE=n")


def live(slurm: FakeSlurm) -> list[str]:
    return [job["id"] for job in slurm.jobs() if job["state"] in LIVE]


def test_a_matrix_is_submitted_requeued_at_its_time_limit_stopped_and_continued(story, tmp_path):
    slurm = FakeSlurm(tmp_path / "slurm")

    def make(*words: str) -> str:
        return story.make(*words, PATH=slurm.path)

    story.script({"adamw": [3.3], "muon": [3.2]})
    story.hold()
    refused = story.clone.refused("test-matrix", *story.words(*SLURM, "SLURM_PARTITION=nope"), PATH=slurm.path)
    assert "main" in refused
    make("test-matrix", *story.words(*SLURM))
    matrix = story.newest()
    adamw, muon = (f"gpt2_{name}_1cpu" for name in ("adamw", "muon"))
    target = f"TARGET={matrix.path}"
    jobs = live(slurm)
    assert len(jobs) == 3, "one for each run, and one for the report"
    make("continue", target)
    assert live(slurm) == jobs, "no run is submitted twice"
    assert "queued" in make("status", target)

    with ThreadPoolExecutor(1) as pool:
        # Slurm announces the time limit: the run stops, and its job waits again.
        job = pool.submit(slurm.run_next)
        story.wait_for_start(1)
        assert "running" in make("status", target)
        (running,) = [one for one in slurm.jobs() if one["state"] == "RUNNING"]
        psutil.Process(running["pid"]).send_signal(signal.SIGUSR1)
        assert job.result() == running["id"]
        assert load_json(matrix.run(adamw).path / "result.json")["status"] == "stopped"
        assert running["id"] in live(slurm)

        # `stop` ends the job that runs, and those that wait.
        job = pool.submit(slurm.run_next)
        story.wait_for_start(2)
        make("stop", target)
        job.result()
    assert slurm.run_next() == jobs[-1], "the report"
    assert live(slurm) == []
    story.let_go()
    make("continue", target)
    while slurm.run_next():
        pass
    assert [run for run, _ in story.starts(matrix)] == [adamw, adamw, adamw, muon]
    assert [one["status"] for one in attempts(matrix.path / adamw)] == ["stopped", "stopped", "finished"]
    assert live(slurm) == []
    assert {run.name: load_json(run.result)["final_val_loss"] for run in matrix.runs()} == {adamw: 3.3, muon: 3.2}
    shown = make("status", target)
    assert "2 finished" in shown
    assert "leader: gpt2_muon" in " ".join(matrix.summary.read_text().split())
    assert "nothing" in make("continue", target)
