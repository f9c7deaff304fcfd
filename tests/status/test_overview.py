"""The status of a matrix and the logs of its runs, for a running matrix and a finished one."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import threading
import time
from dataclasses import dataclass

import pexpect
import pytest
from rich.console import Console

import kmatrix.status.view.overview as overview_module
from kmatrix.cli.status import cells, drawn, most_urgent, plain, screen
from kmatrix.errors import SchemaError
from kmatrix.records.files import append_jsonl, read_json, write_json
from kmatrix.records.jobs.paths import NodeDir
from kmatrix.records.lock import held
from kmatrix.records.runs import Status
from kmatrix.status.view import changes
from kmatrix.status.view.overview import Overview
from programs import ROOT, run
from records_factory import CREATED, FakeRun, make_matrix
from running import wait_for_start
from waiting import wait_until


@pytest.fixture
def mixed_matrix(tmp_path):
    """A matrix with a run of each kind."""
    runs = [
        FakeRun(),
        FakeRun(optimizer="sgd", status="failed", kind="nan", reason="loss is nan at step 47", stop_at=47),
        FakeRun(optimizer="muon", status="stopped", reason="asked to stop", stop_at=50),
        FakeRun(optimizer="adam", gpus=4, status="skipped", reason="needs 4 GPUs, found 1"),
        FakeRun(optimizer="adafactor", status="planned"),
    ]
    return make_matrix(tmp_path, runs)


def view_of(matrix, name, **options):
    (view,) = [view for view in Overview(matrix).poll(**options).runs if name in view.name]
    return view


def test_every_run_is_shown_with_its_status_and_numbers(mixed_matrix):
    lines = plain(Overview(mixed_matrix).poll())
    assert lines[0] == f"{mixed_matrix.name}: stopped, 1 planned, 1 finished, 1 failed, 1 stopped, 1 skipped"
    columns = {line.split()[0]: line.split()[1:] for line in lines[2:7]}
    assert columns["gpt2_adamw_1cpu"][:6] == ["finished", "100/100", "100%", "3.312", "3.2800", "4.00k"]
    assert columns["gpt2_sgd_1cpu"][:2] == ["failed", "45/100"]
    assert columns["gpt2_muon_1cpu"][:2] == ["stopped", "50/100"]
    assert columns["gpt2_adam_4cpu"][:2] == ["skipped", "-"]
    assert columns["gpt2_adafactor_1cpu"][:2] == ["planned", "-"]
    assert lines[7:] == [
        "gpt2_sgd_1cpu failed: loss is nan at step 47",
        "gpt2_adam_4cpu skipped: needs 4 GPUs, found 1",
        "gpt2_muon_1cpu stopped: asked to stop",
        f"continue: make continue TARGET={mixed_matrix.path}",
    ]


def test_json_has_the_same_facts_and_null_for_unknown_values(mixed_matrix):
    result = run("status", f"TARGET={mixed_matrix.path}", "JSON=1")
    view = json.loads(result.out)
    assert (result.status, view["schema"], view["status"], view["running"]) == (0, 1, "stopped", False)
    assert view["counts"] == {"planned": 1, "finished": 1, "failed": 1, "stopped": 1, "skipped": 1}
    runs = {entry["name"]: entry for entry in view["runs"]}
    assert runs["gpt2_sgd_1cpu"]["reason"] == "loss is nan at step 47"
    assert runs["gpt2_adafactor_1cpu"]["loss"] is None
    assert runs["gpt2_adamw_1cpu"]["memory_mib"] is None


def test_a_running_status_counts_only_while_the_matrix_has_a_runner(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(status="running", stop_at=30)], took=None)
    assert view_of(matrix, "adamw").status is Status.STOPPED
    assert Overview(matrix).poll().status is Status.STOPPED
    with held(matrix):
        view = Overview(matrix).poll()
        assert (view.status, view.running, view.runs[0].status) == (Status.RUNNING, True, Status.RUNNING)


def test_the_time_left_is_that_of_the_remaining_steps_at_the_pace_of_this_attempt(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(status="running", stop_at=50, tokens_per_s=1024.0)], took=None)
    with held(matrix):
        view = view_of(matrix, "adamw", now=CREATED + 50.0)
    assert view.elapsed_s == pytest.approx(50.0)
    assert view.left_s == pytest.approx(50.0, abs=5.1)  # one step per second; the last line is of step 45 or 50


def test_the_end_of_the_matrix_is_known_once_that_of_every_run_is(tmp_path):
    runs = [FakeRun(seed=seed, axes={"seed": str(seed)}, status="planned") for seed in (2, 3)]
    matrix = make_matrix(tmp_path, [FakeRun(seed=1, axes={"seed": "1"}), *runs], took=None)
    with held(matrix):
        assert Overview(matrix).poll().left_s == pytest.approx(120.0)
        assert re.search(r"left 2m00s, until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d$", plain(Overview(matrix).poll())[0])
    view = Overview(matrix).poll()
    assert (view.running, view.left_s) == (False, pytest.approx(120.0))  # if it still ran
    assert "left" not in plain(view)[0]


def test_the_numbers_are_those_of_the_last_attempt(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(status="running", stop_at=90)], took=None)
    folder = matrix.run(FakeRun().name)
    attempts = [
        {"attempt": 1, "status": "failed", "kind": "oom", "started": CREATED, "ended": CREATED + 30},
        {"attempt": 2, "status": "running", "resume": "auto", "micro_batch": 4, "started": CREATED + 30},
    ]
    write_json(folder.status, read_json(folder.status) | {"attempt": 2, "attempts": attempts})
    append_jsonl(folder.metrics, {"step": 40, "time": CREATED + 40, "attempt": 2, "train/loss": 2.0})
    with held(matrix):
        view = view_of(matrix, "adamw", now=CREATED + 50)
        assert (view.step, view.loss, view.attempt, view.micro_batch) == (40, 2.0, 2, 4)
        assert view.elapsed_s == pytest.approx(50.0)
        assert f"{folder.name}: attempt 2, micro-batch 4" in plain(Overview(matrix).poll())


def test_unknown_values_are_dashes_and_never_zero(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(status="planned")])
    assert cells(view_of(matrix, "adamw"))[2:8] == ("-", "-", "-", "-", "-", "-")


def test_memory_of_a_run_over_several_nodes_is_that_of_the_devices_of_all_of_them(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(gpus=2)])
    run = matrix.run(FakeRun(gpus=2).name)
    for node, host in enumerate(("n1", "n2")):
        folder = NodeDir(run, node)
        folder.path.mkdir(parents=True)
        write_json(folder.node_json, {"node": node, "host": host, "attempt": 1})
        gpu = {"gpu_index": node, "memory_used": {"max": 100.0 + node}, "memory_total": 23028.0}
        write_json(folder.recording.gpu_summary, {"gpus": [gpu]})

    memory = view_of(matrix, "adamw").memory

    assert [(device.host, device.device, device.most) for device in memory] == [("n1", "0", 100.0), ("n2", "1", 101.0)]


def test_a_matrix_of_a_newer_kmatrix_is_refused(mixed_matrix):
    overview = Overview(mixed_matrix)
    overview.poll()
    path = mixed_matrix.run("gpt2_adamw_1cpu").status
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 9'))
    age(mixed_matrix)
    for _ in range(2):  # also if no file has changed since
        with pytest.raises(SchemaError):
            overview.poll()


def test_a_damaged_run_json_is_shown_as_one_failed_run(mixed_matrix):
    mixed_matrix.run("gpt2_muon_1cpu").run_json.write_text("{")
    view = view_of(mixed_matrix, "muon")
    assert (view.status, "run.json is damaged" in view.reason) == (Status.FAILED, True)


def terminal(matrix):
    """Start `kmatrix status` on a terminal of 24 lines."""
    arguments = ["-m", "kmatrix", "status", f"TARGET={matrix.path}"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'lib'}:{ROOT}", "TERM": "xterm", "COLUMNS": "140"}
    return pexpect.spawn(
        sys.executable, arguments, dimensions=(24, 140), env=environment, timeout=240, encoding="utf-8"
    )


@pytest.mark.process
def test_on_a_terminal_a_running_matrix_is_drawn_until_its_runner_exits(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(status="running", stop_at=30)], took=None)
    with held(matrix):
        screen = terminal(matrix)
        screen.expect("30/100")
        append_jsonl(matrix.run(FakeRun().name).metrics, {"step": 40, "attempt": 1, "train/loss": 2.5})
        screen.expect("40/100")
        assert screen.isalive()
    screen.expect("its runner died")
    screen.expect(pexpect.EOF)


def test_a_matrix_taller_than_the_terminal_shows_the_most_important_runs(tmp_path):
    runs = [FakeRun(seed=seed, axes={"seed": str(seed)}) for seed in range(40)]
    runs[20] = FakeRun(seed=20, axes={"seed": "20"}, status="failed", reason="why")
    view = Overview(make_matrix(tmp_path, runs)).poll()
    shown = most_urgent(view.runs, 3)
    assert [run.name for run in shown] == [f"gpt2_adamw_seed{seed}_1cpu" for seed in (0, 1, 20)]
    text = io.StringIO()
    Console(file=text, width=140).print(drawn(screen(view, width=140, height=10)))
    assert len(text.getvalue().splitlines()) <= 10
    assert "and 34 more runs" in text.getvalue()


# Logs


def test_without_a_runner_the_end_of_the_last_log_is_printed(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(), FakeRun(optimizer="muon")])
    matrix.run("gpt2_muon_1cpu").output_log.write_text("".join(f"line {i}\n" for i in range(100)))
    lines = run("logs", f"TARGET={matrix.path}").out.splitlines()
    assert (lines[0], lines[1], lines[-1], len(lines)) == ("==> gpt2_muon_1cpu", "line 60", "line 99", 41)


def test_a_run_can_be_selected_by_a_pattern_or_by_its_directory(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(), FakeRun(optimizer="muon")])
    for name in ("gpt2_adamw_1cpu", "gpt2_muon_1cpu"):
        matrix.run(name).output_log.write_text(f"of {name}\n")
    assert run("logs", f"TARGET={matrix.path}", "RUN=*adamw*").out == "==> gpt2_adamw_1cpu\nof gpt2_adamw_1cpu\n"
    assert run("logs", f"RUN={matrix.path}/gpt2_muon_1cpu").out == "==> gpt2_muon_1cpu\nof gpt2_muon_1cpu\n"
    assert "matches no run of" in run("logs", f"TARGET={matrix.path}", "RUN=*lion*").err


@pytest.mark.process
def test_the_log_of_a_running_matrix_is_followed_from_run_to_run(matrix, plan, start_runner):
    plans = [plan("a", "hang"), plan("b")]
    write_json(matrix.matrix_json, {"runs": [{"name": run.name} for run in plans]})
    process = start_runner("b", "a=hang")
    wait_for_start(plans[0])
    results = []
    reader = threading.Thread(target=lambda: results.append(run("logs", f"TARGET={matrix.path}")))
    reader.start()

    def output_of(text):  # run() replaces sys.stdout by a buffer
        return text in getattr(sys.stdout, "getvalue", str)()

    wait_until(lambda: output_of("threads 1"))
    with plans[0].dir.output_log.open("a") as log:
        log.write("a line in the middle: ü\n")
    wait_until(lambda: output_of("a line in the middle: ü"))
    process.terminate()
    reader.join(240)
    assert results[0].status == 0
    assert results[0].out.splitlines()[0] == "==> a"
    assert "threads 1 gpus ''" in results[0].out
    assert results[0].out.splitlines()[-1] == "a line in the middle: ü"


# Thousands of runs


def age(matrix, seconds=60.0):
    """Make all files older: a file that was just written is read again, because it may change within a clock tick."""
    at = time.time() - seconds
    for path in (*matrix.path.rglob("*"), matrix.path):
        os.utime(path, (at, at))


def test_a_run_is_read_again_only_if_a_file_of_it_has_changed(mixed_matrix, monkeypatch):
    age(mixed_matrix)
    overview = Overview(mixed_matrix)
    before = overview.poll()
    read = []
    real = overview_module.recover_status
    monkeypatch.setattr(overview_module, "recover_status", lambda run, **o: read.append(run.name) or real(run, **o))
    assert overview.poll() is not None
    assert [name for name in read if name not in {view.name for view in before.runs if view.status == "running"}] == []
    finished = next(view.name for view in before.runs if view.status == "finished")
    write_json(mixed_matrix.run(finished).status, {"status": "skipped", "reason": "needs 8 GPUs", "attempts": []})
    for path in (mixed_matrix.run(finished).result, mixed_matrix.run(finished).metrics):
        path.unlink()
    (view,) = [view for view in overview.poll().runs if view.name == finished]
    assert (view.status, finished in read) == (Status.SKIPPED, True)


@dataclass
class Clock:
    """The clocks of the overview."""

    now: float

    def time(self):
        return self.now

    monotonic = time


def written_at(matrix, ns):
    for path in (*matrix.path.rglob("*"), matrix.path):
        os.utime(path, ns=(ns, ns))


# Times in parts of a second, and in whole seconds, whose clock may advance every two seconds.
@pytest.mark.parametrize(
    ("ns", "within_s", "after_s"),
    [(1_700_000_000_250_000_000, 0.05, 0.2), (1_700_000_000_000_000_000, 1.5, 2.1)],
    ids=["fine", "coarse"],
)
def test_a_change_within_a_tick_of_the_clock_is_found_and_a_file_just_written_is_read_twice(
    ns, within_s, after_s, tmp_path, monkeypatch
):
    matrix = make_matrix(tmp_path, [FakeRun(status="skipped", reason="A"), FakeRun(optimizer="sgd")])
    clock = Clock(ns / 1e9)
    monkeypatch.setattr(overview_module, "time", clock)
    monkeypatch.setattr(changes, "time", clock)
    written_at(matrix, ns)
    overview = Overview(matrix)
    assert overview.poll().runs[0].reason == "A"
    # Before the clock of the file system advances, the file is written in place: the same time, size and inode.
    clock.now += within_s
    assert overview.poll().runs[0].reason == "A"
    status = matrix.run(FakeRun().name).status
    status.write_bytes(status.read_bytes().replace(b'"A"', b'"B"'))
    written_at(matrix, ns)
    clock.now = ns / 1e9 + after_s
    assert overview.poll().runs[0].reason == "B"
    monkeypatch.setattr(overview_module, "recover_status", None)  # from now on, no run is read
    assert overview.poll().runs[0].reason == "B"
