"""Look at, stop, hold and continue a matrix from other terminals, and from none."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest

from scripted_story import run_of
from story import load_json, processes_below, processes_of
from waiting import wait_until

pytestmark = pytest.mark.story

ENDS = {"adamw": [3.3, 3.31, 3.29], "muon": [3.2, 3.21, 3.19]}


def test_a_detached_matrix_is_watched_held_stopped_and_continued(story, tmp_path):
    """It also survives a changed .config."""
    story.script(ENDS)
    story.hold()
    printed = story.make("test-matrix", *story.words("SEED=1337,1338", "OPTIMIZER=adamw", "DETACH=1"))
    assert "make stop TARGET=" in printed
    matrix = story.newest()
    first, second = run_of("adamw", 1), run_of("adamw", 2)
    story.wait_for_start(1)
    follower = story.start("logs", f"TARGET={matrix.path}")
    shown = story.make("status", f"RESULTS_DIR={story.results}")
    assert "1 planned, 1 running" in shown
    assert "\x1b" not in shown
    assert "is being run" in story.clone.refused("continue", f"TARGET={matrix.path}")
    facts = json.loads(story.clone.kmatrix("status", f"TARGET={matrix.path}", "JSON=1").stdout)
    assert [(run["name"], run["status"]) for run in facts["runs"]] == [(first, "running"), (second, "planned")]
    assert (facts["status"], facts["runs"][0]["attempt"], facts["runs"][0]["max_iters"]) == ("running", 1, 10)

    # The running one is held: it stops, and the next one starts. Then all stop.
    story.make("hold", f"RESULTS_DIR={story.results}", "RUN=1")
    story.wait_for_start(2)
    assert story.statuses(matrix) == {first: "stopped", second: "running"}
    story.make("stop", f"RESULTS_DIR={story.results}")
    wait_until(lambda: not any(processes_of(matrix.path)[kind] for kind in ("runner", "program", "rank")), "the end")
    assert follower.wait() == 0
    followed = (tmp_path / "output_0.txt").read_text()
    assert followed.startswith(f"==> {first}")
    assert re.search(r"^Iter \d+ \| ", followed, re.MULTILINE)
    assert "\x1b" not in (matrix.path / "runner.log").read_text()
    assert story.statuses(matrix) == {first: "stopped", second: "stopped"}

    # The held one is left out until it is released.
    story.clone.config.write_text("CONFIG_GPT2_MAX_ITERS=7\n")
    story.let_go()
    assert f"Held: {first}" in story.make("continue", f"TARGET={matrix.path}", status=2)
    assert story.statuses(matrix) == {first: "stopped", second: "finished"}
    story.make("release", f"RUN={first}", f"TARGET={matrix.path}")
    story.make("continue", f"TARGET={matrix.path}")
    assert set(story.statuses(matrix).values()) == {"finished"}
    assert story.starts(matrix) == [(first, 1), (second, 1), (second, 2), (first, 2)]
    assert load_json(matrix.run(first).result)["used"]["max_iters"] == 10
    kept = {run.name: run.result.read_bytes() for run in matrix.runs()}
    assert "nothing to run" in story.make("continue", f"TARGET={matrix.path}")
    assert {run.name: run.result.read_bytes() for run in matrix.runs()} == kept


def test_ctrl_c_leaves_no_process_and_no_damaged_file(story, tmp_path):
    story.script(ENDS)
    story.hold(2)
    runner = story.start("test-matrix", *story.words("SEED=1337,1338,1339", "OPTIMIZER=adamw"))
    story.wait_for_start(2)
    os.killpg(runner.pid, signal.SIGINT)
    assert runner.wait() == 130
    matrix = story.newest()
    wait_until(lambda: not processes_below(matrix.path), "no process is left")
    assert list(story.statuses(matrix).values()) == ["finished", "stopped", "planned"]
    assert "Continue: make continue TARGET=" in (tmp_path / "output_0.txt").read_text()
    story.let_go()
    kept = matrix.run(run_of("adamw", 1)).result.read_bytes()
    story.make("continue", f"TARGET={matrix.path}")
    assert set(story.statuses(matrix).values()) == {"finished"}
    assert matrix.run(run_of("adamw", 1)).result.read_bytes() == kept
