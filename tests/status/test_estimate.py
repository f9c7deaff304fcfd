"""Estimate the end of runs and matrices from files with known times, so that the correct answer is known."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from checkpoints import add_checkpoint
from kmatrix.cli.status import lines
from kmatrix.packing import Limits
from kmatrix.records.files import append_jsonl, read_json, write_json
from kmatrix.records.lock import held
from kmatrix.records.train_config import TrainConfig
from kmatrix.status.alerts import Thresholds
from kmatrix.status.estimate import (
    EstimateSource,
    Measured,
    MeasuredRuns,
    Phase,
    Rest,
    TrainingLine,
    ends_of,
    measured_before,
    pace_of,
    rest_of_run,
)
from kmatrix.status.view.overview import Overview
from kmatrix.status.watch import RunWatch
from programs import run
from records_factory import FakeRun, make_matrix

T0 = 1_795_152_180.0
STEPS, STEP_S, EVAL_S, EVERY, START_S = 1000, 0.5, 6.0, 100, 20.0
TRAIN = {
    **{"optimizer": "adamw", "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_size": 256},
    **{"num_gpus": 1, "device": "cuda", "dtype": "bf16", "global_batch": 4, "max_iters": STEPS},
    **{"eval_interval": EVERY, "checkpoint_interval": 0, "cpu_threads": 1, "gpu_hour_price": 3.6, "model": "custom"},
}
RECORDED = TrainConfig(**TRAIN)


def true_duration(steps=STEPS, step_s=STEP_S):
    """Return the seconds of a whole run: start, steps, and evaluations before step 0, every EVERY steps and last."""
    return START_S + steps * step_s + (1 + steps // EVERY) * EVAL_S


class Script:
    """Write the files of runs that train on a known timetable, as seen at a given time."""

    def __init__(self, root, gpu_count=4, name="test_matrix_results_20260101_000000", **symbols):
        self.made = make_matrix(root, [], name=name, took=None)
        self.gpus = [{"index": i, "name": "A", "uuid": f"GPU-{i}"} for i in range(gpu_count)]
        self.symbols = {"PARALLEL_JOBS": "0", "EXCLUSIVE": "n"} | symbols
        self.names = []

    def add(self, name, *, started=None, at=0.0, step_s=STEP_S, **train):
        """Add a run that started `started` seconds after T0 (None: not yet) and is observed at T0 + at."""
        folder = self.made.run(name)
        fields = TRAIN | train
        provenance = {"cpu": "EPYC", "cores": 4, "gpus": self.gpus}
        record = {
            "run_id": f"id-{name}",
            "name": name,
            "train": fields,
            "symbols": self.symbols,
            "provenance": provenance,
        }
        write_json(folder.run_json, record | {"train_tokens": 64_000})
        self.names.append(name)
        write_json(self.made.matrix_json, {"runs": [{"name": each} for each in self.names]})
        if started is not None:
            self._write_training(folder, started, at, step_s, fields)

    def _write_training(self, folder, started, at, step_s, fields):
        now, clock, steps = T0 + at, T0 + started + START_S, fields["max_iters"]
        ended = clock + (1 + steps // EVERY) * EVAL_S + steps * step_s <= now
        for step in range(steps + 1):
            if step % EVERY == 0:
                if clock + EVAL_S > now:
                    break
                line = {"phase": "evaluation", "step": step, "attempt": 1, "begin": clock, "end": clock + EVAL_S}
                append_jsonl(folder.phases, line)
                clock += EVAL_S
            clock += step_s
            if step == steps or clock > now:
                break
            if step % 10 == 0:
                append_jsonl(folder.metrics, {"step": step, "time": clock, "attempt": 1, "train/loss": 3.0})
        status = "finished" if ended else "running"
        end = T0 + started + true_duration(steps, step_s) if ended else None
        attempt = {"attempt": 1, "status": status, "started": T0 + started, "ended": end}
        write_json(folder.status, attempt | {"attempts": [attempt]})
        if ended:
            write_json(folder.result, {"run_id": f"id-{folder.name}", "attempt": 1, "status": status, "step": steps})

    def observe(self, now):
        with held(self.made):
            return Overview(self.made).poll(T0 + now)


def write_checkpoint(run, step):
    add_checkpoint(run.checkpoints, step)


@pytest.fixture
def script(tmp_path):
    return lambda **known: Script(tmp_path, **known)


# One run


@pytest.mark.parametrize("share", [0.11, 0.3, 0.5, 0.75, 0.95])
def test_the_estimate_of_a_run_at_ten_percent_is_accurate(script, share):
    made, now = script(), share * true_duration()
    made.add("a", started=0.0, at=now)
    (view,) = made.observe(now).runs
    assert view.left_from is EstimateSource.OWN
    assert now + view.left_s == pytest.approx(true_duration(), rel=0.03)


@pytest.mark.parametrize("lines", [0, 1, 2])
def test_the_time_left_of_a_resumed_run_does_not_jump(script, lines):
    made, killed = script(), 0.5 * true_duration()
    made.add("a", started=0.0, at=killed)
    run = made.made.run("a")
    resumed = {"attempt": 2, "status": "running", "resume": "auto", "started": T0 + killed}
    known = read_json(run.status)["attempts"][0] | {"status": "stopped", "ended": T0 + killed}
    write_json(run.status, {"status": "running", "attempt": 2, "attempts": [known, resumed]})
    write_checkpoint(run, 400)
    watch = RunWatch(run, Thresholds(), RECORDED, attempt=2, resume="auto")
    now = killed + START_S
    for number in range(lines):
        now += 10 * STEP_S
        step = 400 + 10 * number
        append_jsonl(run.metrics, {"step": step, "time": T0 + now, "attempt": 2, "train/loss": 3.0})
    (view,) = made.observe(now).runs
    step = 400 + 10 * max(0, lines - 1)
    expected = (STEPS - step) * STEP_S + 6 * EVAL_S
    assert (view.step, view.left_from) == (step, EstimateSource.OWN)
    assert view.left_s == pytest.approx(expected, rel=0.03)
    update = watch.poll(T0 + now, clock=now)
    assert (update.start, update.step) == (400, step if lines else None)
    assert update.left_s == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("kept", "step"), [(400, 400), (None, 0)])
def test_a_stopped_run_takes_its_own_pace_from_its_checkpoint_not_that_of_finished_runs(script, kept, step):
    made, killed = script(), 0.5 * true_duration()
    made.add("slow", started=0.0, at=10 * true_duration(), step_s=9 * STEP_S)
    made.add("a", started=0.0, at=killed)
    run = made.made.run("a")
    append_jsonl(run.phases, {"phase": "set-up", "step": 0, "attempt": 1, "begin": T0, "end": T0 + START_S})
    stopped = read_json(run.status)["attempts"][0] | {"status": "stopped", "ended": T0 + killed, "seconds": killed}
    write_json(run.status, stopped | {"attempts": [stopped]})
    result = {"run_id": "id-a", "attempt": 1, "status": "stopped", "step": 470, "seconds": killed}
    write_json(run.result, result)
    if kept is not None:
        write_checkpoint(run, kept)
    view = next(view for view in made.observe(9e4).runs if view.name == "a")
    assert (view.status, view.left_from) == ("stopped", EstimateSource.OWN)
    assert view.left_s == pytest.approx(START_S + (STEPS - step) * STEP_S + (10 - step // EVERY) * EVAL_S, rel=0.01)


def test_a_stopped_run_without_a_pace_of_its_own_uses_that_of_runs_like_it(script):
    made = script()
    made.add("a", started=0.0, at=10 * true_duration())
    made.add("b", started=0.0, at=START_S + EVAL_S)
    status = read_json(made.made.run("b").status)["attempts"][0] | {"status": "stopped", "ended": T0 + 30.0}
    write_json(made.made.run("b").status, status | {"attempts": [status]})
    view = next(view for view in made.observe(9e4).runs if view.name == "b")
    assert (view.status, view.left_from) == ("stopped", EstimateSource.MATRIX)
    assert view.left_s == pytest.approx(true_duration())


def test_the_share_of_the_schedule_at_which_a_budget_ends_a_running_run_is_estimated(script):
    made, now = script(), 0.3 * true_duration()
    made.add("cut", started=0.0, at=now, max_time=0.5 * true_duration())
    made.add("long", started=0.0, at=now, max_time=2 * true_duration())
    views = {view.name: view for view in made.observe(now).runs}
    assert views["cut"].schedule_share == pytest.approx(0.5, abs=0.03)
    assert views["cut"].left_s == pytest.approx(0.2 * true_duration(), rel=0.03)
    assert views["long"].schedule_share is None


def test_the_share_of_a_pending_run_comes_from_runs_like_it_and_is_a_warning(script):
    made = script()
    made.add("a", started=0.0, at=10 * true_duration())
    made.add("b", max_time=0.14 * true_duration())
    views = {view.name: view for view in made.observe(9e4).runs}
    assert views["b"].schedule_share == pytest.approx(0.14)
    assert views["a"].schedule_share is None
    out = run("estimate", f"TARGET={made.made.path}").out
    assert "warning: the budget ends at 14 % of the schedule of b\n" in out


def test_pending_evaluations_are_included(script):
    made, now = script(), 0.15 * true_duration()
    made.add("a", started=0.0, at=now, eval_interval=EVERY)
    (view,) = made.observe(now).runs
    steps_alone = (STEPS - view.step) * STEP_S
    assert view.left_s - steps_alone == pytest.approx(9 * EVAL_S, rel=0.25)


def test_a_wall_clock_that_was_set_back_does_not_change_the_estimate():
    lines = [TrainingLine(step, at - 86_400 * (step > 1), 0.5) for step, at in enumerate((0.0, 0.5, 1.0, 1.5))]
    assert rest_of_run(lines, [], TrainConfig(max_iters=104), since_s=-86_400.0) == pytest.approx(50.0)
    unrecorded = [TrainingLine(line.step, line.at) for line in lines]
    assert rest_of_run(unrecorded, [], TrainConfig(max_iters=104), since_s=0.0) == pytest.approx(50.0)
    assert Phase("evaluation", 100.0, 90.0).duration_s == 0.0
    assert Phase("evaluation", 100.0, 90.0, seconds=3.0).duration_s == 3.0


def test_the_pace_is_that_of_recent_steps_and_ignores_a_suspension():
    slow_then_fast = [TrainingLine(step, None, 10.0 if step < 5 else 1.0) for step in range(25)][-20:]
    assert pace_of(slow_then_fast, []) == 1.0
    suspended = [TrainingLine(step, step + 3600.0 * (step > 7)) for step in range(20)]
    assert pace_of(suspended, []) == 1.0


# Pending runs


def test_a_pending_run_uses_the_pace_of_its_optimizer_or_of_any_other(script):
    measured = [Measured(RECORDED, 100.0, 1000), Measured(replace(RECORDED, optimizer="muon"), 300.0, 1000)]
    assert MeasuredRuns(measured, []).whole(RECORDED).seconds == 100.0
    assert MeasuredRuns(measured, []).whole(replace(RECORDED, optimizer="sgd")).seconds == 200.0
    assert MeasuredRuns([], measured[:1]).whole(RECORDED).source is EstimateSource.EARLIER


def test_a_pending_run_uses_the_pace_of_a_similar_run_in_an_earlier_matrix(tmp_path):
    Script(tmp_path, name="test_matrix_results_20250101_000000").add("a", started=0.0, at=5000.0)
    made = Script(tmp_path)
    made.add("b")
    (only,) = measured_before(made.made)
    assert (only.seconds, only.steps) == (pytest.approx(true_duration()), STEPS)
    (view,) = made.observe(0.0).runs
    assert (view.left_s, view.left_from) == (pytest.approx(true_duration()), EstimateSource.EARLIER)


# Packed runs


def test_the_estimated_end_of_a_packed_matrix_is_within_ten_percent(script):
    made, now = script(), 0.12 * true_duration()
    for number in range(4):
        made.add(f"a{number}", started=0.0, at=now)
    for number in range(3):
        made.add(f"b{number}")
    made.add("wide", num_gpus=4, global_batch=16)
    view = made.observe(now)
    assert now + view.left_s == pytest.approx(3 * true_duration(), rel=0.1)
    assert sum(1 for run in view.runs if run.starts_s == 0.0) == 4


def test_groups_of_exclusive_runs_wait_for_each_other(script):
    made, now = script(EXCLUSIVE="y"), 0.2 * true_duration()
    made.add("slow", started=0.0, at=now, step_s=2 * STEP_S)
    made.add("fast", started=0.0, at=now)
    made.add("next")
    views = {view.name: view for view in made.observe(now).runs}
    assert views["next"].starts_s == pytest.approx(views["slow"].left_s)


def test_a_run_that_does_not_fit_on_the_machine_has_no_end():
    runs = [Rest(name="a", width=2, cuda=True, running=False, seconds=10.0)]
    assert ends_of(runs, gpus=1, cores=1, limits=Limits()) is None


# The command


def test_the_estimate_has_progress_date_memory_and_cost(script):
    made, now = script(), 0.5 * true_duration()
    made.add("a", started=0.0, at=now)
    made.add("b", num_gpus=4, global_batch=16)
    gpus = [{"gpu_index": 0, "memory_used": {"max": 2048.0}, "memory_total": 81920.0}]
    write_json(made.made.run("a").gpu_summary, {"gpus": gpus})
    view = made.observe(now)
    text = "\n".join(lines(view, T0 + now))
    assert "GPU 0 2.0 of 80.0" in text
    assert "its own steps" in text
    assert "480/1000  0.96/2.00" in text
    hours = true_duration() / 3600
    assert view.dollars == pytest.approx(3.6 * hours / 2, rel=0.01)
    assert view.all_dollars == pytest.approx(3.6 * 5 * hours, rel=0.1)
    assert "end: 20" in text


def test_a_matrix_without_measurements_prints_what_is_missing(script):
    made = script()
    made.add("a")
    text = lines(made.observe(0.0), T0)
    assert "time left: unknown (no measurement for a yet)" in text


def test_the_command_prints_text_and_json(tmp_path):
    runs = [FakeRun(seed=1, axes={"seed": "1"}), FakeRun(seed=2, axes={"seed": "2"}, status="planned")]
    matrix = make_matrix(tmp_path, runs)
    result = run("estimate", f"TARGET={matrix.path}")
    assert (result.status, "not running: make continue" in result.out) == (0, True)
    value = json.loads(run("estimate", f"TARGET={matrix.path}", "JSON=1").out)
    assert value["left_s"] == pytest.approx(value["ends"] - value["now"])
    assert [run["left_from"] for run in value["runs"]] == [None, "runs like it here"]


# Before the first measurement


def test_the_planned_time_is_used_until_there_is_a_measurement():
    assert MeasuredRuns([], []).whole(RECORDED, 7200.0).source is EstimateSource.PLAN
    assert MeasuredRuns([], []).whole(RECORDED, 7200.0).seconds == 7200.0
    assert MeasuredRuns([], [Measured(RECORDED, 300.0, STEPS)]).whole(RECORDED, 7200.0).source is EstimateSource.EARLIER
    assert MeasuredRuns([], []).whole(RECORDED) is None
