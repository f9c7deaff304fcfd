"""The screen of `make status`: sizes, GPUs of the machine, jobs, and the most urgent facts first; and the logs."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from factories import ROOT
from kmatrix.cli.watch.estimate import lines
from kmatrix.cli.watch.jobs import look_with_jobs, queue_of, waits
from kmatrix.cli.watch.screen import cells, drawn, gpu_lines, headline, most_urgent, plain, screen
from kmatrix.engines.ports import UnreachableError
from kmatrix.engines.slurm import Slurm
from kmatrix.engines.slurm_nodes import read_settings
from kmatrix.records.attempts import Attempt, End, path_of
from kmatrix.records.control import stop
from kmatrix.records.decode import as_json, replaced
from kmatrix.records.files import write_json
from kmatrix.status.live import GpuView
from kmatrix.status.look import look
from kmatrix.status.view import ENDED, RUNS, WAITS, JobView, Viewer
from programs import run
from records_factory import FakeRun, make_matrix

NOW = 1_795_152_230.0


def view_of(matrix, jobs=None, **options):
    return Viewer(path=matrix.path).view(look(matrix.path), jobs, **options)


def text_of(view):
    return "\n".join(plain(view))


@pytest.fixture
def mixed_matrix(tmp_path):
    """A matrix with a run of each kind."""
    runs = [
        FakeRun(),
        FakeRun(optimizer="sgd", status="failed", kind="nan", reason="loss is nan at step 47", stop_at=47),
        FakeRun(optimizer="muon", status="stopped", reason="asked by user", stop_at=50),
        FakeRun(optimizer="adam", gpus=4, status="skipped", reason="needs 4 GPUs, found 1"),
    ]
    return make_matrix(tmp_path, runs, planned=[FakeRun(optimizer="adafactor")])


@pytest.fixture
def busy(tmp_path):
    """The view of two runs on three of four GPUs, one failed and one pending run; GPU 3 is free."""
    runs = [
        FakeRun(device="cuda", status="running", stop_at=40),
        FakeRun(device="cuda", gpus=2, status="running", stop_at=20),
        FakeRun(optimizer="sgd", device="cuda", status="failed", reason="loss is nan at step 47", stop_at=47),
    ]
    matrix = make_matrix(tmp_path, runs, planned=[FakeRun(optimizer="muon", device="cuda")])
    view = view_of(matrix)
    held = {"gpt2_adamw_1gpu": ("GPU-0",), "gpt2_adamw_2gpu": ("GPU-1", "GPU-2")}
    owner = {uuid: name for name, uuids in held.items() for uuid in uuids}
    gpus = [GpuView(index=n, name="NVIDIA A10G", uuid=f"GPU-{n}", run=owner.get(f"GPU-{n}", "")) for n in range(4)]
    known = {"utilization": 97.0, "memory_used": 17000.0, "memory_total": 23028.0, "power": 228.0, "temperature": 63.0}
    gpus = [replaced(gpu, **known) if gpu.run else gpu for gpu in gpus]
    found = tuple(replaced(run, gpus=held.get(run.name, ())) for run in view.runs)
    return replace(view, gpus=tuple(gpus), runs=found)


def test_every_run_is_shown_with_its_status_and_numbers(mixed_matrix):
    shown = plain(view_of(mixed_matrix))
    assert shown[0] == f"{mixed_matrix.name}: stopped, 1 planned, 1 finished, 1 failed, 1 stopped, 1 skipped"
    columns = {line.split()[0]: line.split()[1:] for line in shown[2:7]}
    assert columns["gpt2_adamw_1cpu"][:6] == ["finished", "100/100", "100%", "3.312", "3.2800", "4.00k"]
    assert columns["gpt2_sgd_1cpu"][0] == "failed"
    assert columns["gpt2_muon_1cpu"][:2] == ["stopped", "50/100"]
    assert columns["gpt2_adam_4cpu"][:2] == ["skipped", "-"]
    assert columns["gpt2_adafactor_1cpu"][:2] == ["planned", "-"]
    assert shown[7:] == [
        "gpt2_sgd_1cpu failed: loss is nan at step 47",
        "gpt2_adam_4cpu skipped: needs 4 GPUs, found 1",
        "gpt2_muon_1cpu stopped: asked by user",
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
    only = json.loads(run("status", f"TARGET={mixed_matrix.path}", "JSON=1", "STATUS=failed,skipped").out)
    assert [entry["status"] for entry in only["runs"]] == ["failed", "skipped"]


def test_a_command_that_reads_writes_nothing(mixed_matrix):
    before = sorted(mixed_matrix.path.rglob("*"))
    for command in ("status", "estimate", "logs"):
        assert run(command, f"TARGET={mixed_matrix.path}").status == 0
    assert sorted(mixed_matrix.path.rglob("*")) == before


def test_unknown_values_are_dashes_and_never_zero(tmp_path):
    view = view_of(make_matrix(tmp_path, [], planned=[FakeRun()]))
    assert cells(view.runs[0])[2:8] == ("-",) * 6


def test_a_run_with_several_attempts_tells_how_they_ended(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(status="stopped", reason="SIGTERM")])
    for number, kind, reason in ((1, "lost", ""), (2, "lost", "its process was killed"), (3, "signal", "SIGTERM")):
        end = End(kind=kind, reason=reason, step=number)
        one = Attempt(number=number, step=number - 1, micro_batch=4, end=end)
        write_json(path_of(matrix.path / FakeRun().name, number), as_json(one))
    told = "gpt2_adamw_1cpu: attempt 3, micro-batch 4, before: 2 x lost (its process was killed)"
    assert told in plain(view_of(matrix))


def test_a_stopped_matrix_says_who_stopped_it_and_a_spent_budget_how_to_go_on(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(status="stopped", seconds=7236.0, symbols={"BUDGET_HOURS": "2"})])
    why = "the budget is spent: 2.01 of 2 hours (continue with a larger BUDGET_HOURS=)"
    stop(matrix.path, "asked by user")
    assert plain(view_of(matrix))[-2:] == ["stopped: asked by user", why]
    assert why in "\n".join(lines(view_of(matrix), NOW))


# The machine


def test_the_gpus_of_the_machine_are_a_table(busy):
    shown = [line.text for line in gpu_lines(busy, None)]
    assert shown[:3] == [
        "",
        "GPU            run              util            memory  power  temp",
        "0 NVIDIA A10G  gpt2_adamw_1gpu   97%  16.6 of 22.5 GiB   228W   63C",
    ]
    assert shown[5].split() == ["3", "NVIDIA", "A10G", "free", "-", "-", "-", "-"]
    assert "gpu 1,2" in text_of(busy)
    assert gpu_lines(replace(busy, running=False), None) == []


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (40, 20), (80, 10), (60, 6)])
def test_the_screen_is_never_larger_than_the_terminal(busy, width, height):
    shown = screen(busy, width=width, height=height)
    assert len(shown) <= height
    if width >= 60:
        assert max(len(line.text) for line in shown) <= width


def test_a_small_screen_shows_running_and_failed_runs_first(busy):
    text = "\n".join(line.text for line in screen(busy, width=80, height=12))
    assert "gpt2_adamw_1gpu" in text
    assert "loss is nan at step 47" in text
    assert "GPUs: 3 in use, 1 free" in text


def test_a_matrix_taller_than_the_terminal_shows_the_most_important_runs(tmp_path):
    runs = [FakeRun(seed=seed, axes={"seed": str(seed)}) for seed in range(40)]
    runs[20] = FakeRun(seed=20, axes={"seed": "20"}, status="failed", reason="why")
    view = view_of(make_matrix(tmp_path, runs))
    assert [run.name for run in most_urgent(view.runs, 3)] == [f"gpt2_adamw_seed{seed}_1cpu" for seed in (0, 1, 20)]
    text = io.StringIO()
    Console(file=text, width=140).print(drawn(screen(view, width=140, height=10)))
    assert len(text.getvalue().splitlines()) <= 10
    assert "and 34 more runs" in text.getvalue()


def test_the_headline_shows_the_estimated_end_and_cost(busy):
    runs = tuple(replaced(run, dollars=1.0) for run in busy.runs)
    view = replace(busy, runs=runs, left_s=3725.0, ends=NOW + 3725, dollars=4.0, all_dollars=9.5)
    (line,) = headline(view)
    assert re.search(r"left 1h02m, until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, cost \$4\.00 of \$9\.50$", line)
    first, *more = headline(view, 60)
    assert first == f"{view.name}: running"
    assert all(len(text) <= 60 for text in more)


@pytest.mark.parametrize(
    ("read", "total", "shown"),
    [(0.00003, 0.0009, "<0.0001/0.0009"), (0.0, 0.012, "0.00/0.01"), (1.5, 3.0, "1.50/3.00")],
)
def test_few_epochs_are_shown_without_an_exponent(busy, read, total, shown):
    runs = tuple(replaced(run, epochs=read, all_epochs=total) for run in busy.runs)
    rows = lines(replace(busy, runs=runs), NOW)[2 : 2 + len(runs)]
    assert all(f" {shown} " in row for row in rows), rows


def test_a_failed_run_that_was_ordered_again_is_part_of_the_estimate(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(status="failed", kind="killed")])
    assert lines(view_of(matrix), NOW)[-1] == "1 failed or skipped: not counted"
    write_json(matrix.path / "control/requests.json", {"again": {FakeRun().name: {"after": 1}}})
    assert "not counted" not in lines(view_of(matrix), NOW)[-1]


# A cluster


def job(phase, reason="", **fields):
    return JobView(id="12_0", phase=phase, state=fields.pop("state", "PENDING"), reason=reason, **fields)


def test_jobs_of_a_cluster_are_told_in_the_words_of_the_scheduler(tmp_path):
    names = ("adamw", "muon", "sgd", "adam", "lion")
    runs = [FakeRun(optimizer=name, train={"num_nodes": 2}) for name in names]
    matrix = make_matrix(tmp_path, [], planned=runs, engine="slurm")
    jobs = {run.name: job(WAITS, "Resources") for run in runs[:2]}
    jobs[runs[2].name] = job(RUNS, state="RUNNING", nodes="n[1-2]")
    jobs[runs[3].name] = job(ENDED, "NonZeroExitCode", state="FAILED")
    view = view_of(matrix, jobs)
    assert headline(view) == [f"{matrix.name}: running, 5 planned, jobs: 1 running, 2 waiting"]
    rows = {line.split()[0]: line.split() for line in plain(view)[2:7]}
    assert rows["gpt2_adamw_1cpu"][1] == "queued"
    assert rows["gpt2_sgd_1cpu"][1] == "starting"
    assert "n[1-2]" in rows["gpt2_sgd_1cpu"]
    assert list(waits(view)) == [
        "gpt2_adamw_1cpu, gpt2_muon_1cpu queued (PENDING: Resources)",
        "gpt2_adam_1cpu without a job, the last one ended (FAILED: NonZeroExitCode)",
        f"2 runs without a job: the last job submits what is due, or make continue TARGET={matrix.path}",
    ]


def test_an_end_that_depends_on_the_queue_is_unknown_because_of_it(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun()], planned=[FakeRun(optimizer="muon")], engine="slurm")
    assert queue_of(view_of(matrix)) == "1 run without a job"
    waiting = view_of(matrix, {"gpt2_muon_1cpu": job(WAITS)})
    assert queue_of(waiting) == "Slurm expects no start of 1 run yet"
    assert "time left: unknown (Slurm expects no start of 1 run yet)" in lines(waiting, NOW)


def test_a_scheduler_that_does_not_answer_is_one_line_above_what_the_files_say(tmp_path, monkeypatch):
    class Silent:
        asked = 0

        def poll(self, label):
            self.asked += 1
            raise UnreachableError("Slurm does not answer", why="timed out")

    silent = Silent()
    monkeypatch.setattr("kmatrix.engines.schedulers.scheduler_of", lambda plan: silent)
    matrix = make_matrix(tmp_path, [FakeRun()], planned=[FakeRun(optimizer="muon")], engine="slurm")
    seen, jobs, why = look_with_jobs(matrix.path)
    shown = plain(Viewer(path=matrix.path).view(seen, jobs, silent=why))
    assert shown[1] == "Slurm does not answer: timed out; what follows is from the files of the runs"
    assert silent.asked == 1
    assert len(shown) == len(plain(view_of(matrix))) + 1


def test_a_matrix_of_a_cluster_is_shown_on_a_machine_without_its_scheduler(tmp_path, monkeypatch):
    def missing(*words, **options):
        raise FileNotFoundError

    slurm = Slurm(read_settings({}, {}), run=missing)
    monkeypatch.setattr("kmatrix.engines.schedulers.scheduler_of", lambda plan: slurm)
    matrix = make_matrix(tmp_path, [FakeRun()], engine="slurm")
    result = run("status", f"TARGET={matrix.path}")
    assert result.status == 0
    assert "squeue not found" in result.out
    assert "gpt2_adamw_1cpu  finished" in result.out


# Logs


def test_without_a_runner_the_end_of_the_last_log_is_printed(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(), FakeRun(optimizer="muon")])
    matrix.run("gpt2_muon_1cpu").output_log.write_text("".join(f"line {i}\n" for i in range(100)))
    shown = run("logs", f"TARGET={matrix.path}").out.splitlines()
    assert (shown[0], shown[1], shown[-1], len(shown)) == ("==> gpt2_muon_1cpu", "line 60", "line 99", 41)


def test_a_run_can_be_selected_by_a_pattern_or_by_its_directory(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(), FakeRun(optimizer="muon", status="failed", reason="why")])
    for name in ("gpt2_adamw_1cpu", "gpt2_muon_1cpu"):
        matrix.run(name).output_log.write_text(f"of {name}\n")
    assert run("logs", f"TARGET={matrix.path}", "RUN=*adamw*").out == "==> gpt2_adamw_1cpu\nof gpt2_adamw_1cpu\n"
    told = "==> gpt2_muon_1cpu\nof gpt2_muon_1cpu\n==> gpt2_muon_1cpu failed: why\n"
    assert run("logs", f"RUN={matrix.path}/gpt2_muon_1cpu").out == told
    assert "matches no run of" in run("logs", f"TARGET={matrix.path}", "RUN=*lion*").err


def test_the_log_of_a_job_tells_why_its_run_never_began(tmp_path):
    matrix = make_matrix(tmp_path, [], planned=[FakeRun()])
    assert "has a log yet" in run("logs", f"TARGET={matrix.path}").err
    log = matrix.path / "jobs" / f"{FakeRun().name}.log"
    log.parent.mkdir()
    log.write_text("no space left\n")
    assert run("logs", f"TARGET={matrix.path}").out == "==> gpt2_adamw_1cpu, log of its job\nno space left\n"


def test_each_node_of_a_run_has_its_log(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun()])
    folder = matrix.run(FakeRun().name)
    (folder.path / "nodes").mkdir()
    (folder.path / "nodes" / "1.log").write_text("of node 1\n")
    assert run("logs", f"TARGET={matrix.path}", "NODE=1").out == "==> gpt2_adamw_1cpu, node 1\nof node 1\n"
    assert "has a log of node 2" in run("logs", f"TARGET={matrix.path}", "NODE=2").err
    assert "NODE=x" in run("logs", f"TARGET={matrix.path}", "NODE=x").err


# Weight


@pytest.mark.process
def test_status_and_estimate_import_no_driver_no_report_and_no_screen(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun()])
    words = [sys.executable, "-X", "importtime", "-m", "kmatrix", "status", f"TARGET={matrix.path}", f"O={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "lib")}
    completed = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in completed.stderr.splitlines()}
    assert "kmatrix.status.view" in imported
    heavy = ("numpy", "torch", "matplotlib", "jinja2", "pynvml", "psutil", "rich", "subprocess")
    ours = ("kmatrix.gpu.nvml", "kmatrix.report", "kmatrix.gputop", "kmatrix.engines.jobs", "kmatrix.verdict.replay")
    assert not [name for name in imported if name.startswith((*heavy, *ours))]
