"""Estimate the end of runs and matrices from files with known times, so that the correct answer is known."""

from __future__ import annotations

import json

import pytest

from kmatrix.cli.watch.estimate import lines
from kmatrix.config import RunConfig
from kmatrix.experiment.cluster.nodes import Nodes
from kmatrix.experiment.machine import Machine
from kmatrix.packing import PackedJob
from kmatrix.records.attempts import Attempt, End, path_of
from kmatrix.records.decode import as_json, replaced
from kmatrix.records.events import PhaseLine
from kmatrix.records.files import append_jsonl, write_json
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import MetricLine
from kmatrix.records.train_config import TrainConfig
from kmatrix.status.estimate import (
    EstimateSource,
    Measured,
    MeasuredRuns,
    ends_of,
    measured_on,
    pace_of,
    rest_of_run,
)
from kmatrix.status.look import look
from kmatrix.status.view import Viewer
from programs import run
from records_factory import FakeRun, make_matrix, provenance, train_fields
from times import Times, pulse

T0 = 1_795_152_180.0
STEPS, STEP_S, EVAL_S, EVERY, START_S = 1000, 0.5, 6.0, 100, 20.0
TRAIN = {
    **{"optimizer": "adamw", "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_size": 256},
    **{"num_gpus": 1, "device": "cuda", "dtype": "bf16", "global_batch": 4, "max_iters": STEPS},
    **{"eval_interval": EVERY, "checkpoint_interval": 0, "cpu_threads": 1, "gpu_hour_price": 3.6, "model": "custom"},
}


def true_duration(step_s=STEP_S):
    """Return the time (s) of a whole run: start-up, steps, and the evaluations before the first and each 100 steps."""
    return START_S + STEPS * step_s + (1 + STEPS // EVERY) * EVAL_S


class Script:
    """A matrix on four GPUs whose runs are written as they would be at a moment."""

    def __init__(self, root, times, name="test_matrix_results_20260101_000000"):
        self.made, self.times, self.runs = MatrixDir(root / name), times, []

    def add(self, name, *, at=None, step_s=STEP_S, **train):
        """Add a run. at: seconds after its start, at which it is seen; None: it is planned."""
        fields = TRAIN | train
        planned = {"run_id": f"id-{name}", "name": name, "axes": {}, "symbols": {}, "train": fields}
        self.runs.append(planned | {"train_tokens": 64_000})
        about = provenance([]) | {"cores": 4, "gpus": [{"index": n, "name": "A10G", "uuid": f"G{n}"} for n in range(4)]}
        common = {"symbols": {"PARALLEL_JOBS": "0"}}
        write_json(self.made.matrix_json, {"runs": self.runs, "provenance": about, "common": common})
        if at is not None:
            self._train(self.made.run(name), at, step_s)
        return self

    def _train(self, folder, seconds, step_s):
        now, at = T0 + seconds, T0 + START_S
        ended = true_duration(step_s) <= seconds
        folder.path.mkdir()
        for step in range(STEPS + 1):
            if step % EVERY == 0:
                if at + EVAL_S > now:
                    break
                append_jsonl(folder.phases, {"phase": "evaluation", "step": step, "begin": at, "end": at + EVAL_S})
                at += EVAL_S
            at += step_s
            if step == STEPS or at > now:
                break
            if step % 10 == 0:
                append_jsonl(folder.metrics, {"step": step, "time": at, "attempt": 1, "train/loss": 3.0})
        seconds = true_duration(step_s) if ended else seconds
        end = End(kind="finished", seconds=seconds) if ended else None
        self.attempt(folder.name, Attempt(number=1, host="n", started=T0, seconds=seconds, end=end))
        if ended:
            result = {"run_id": f"id-{folder.name}", "attempt": 1, "status": "finished", "step": STEPS}
            write_json(folder.result, result)

    def attempt(self, name, one):
        write_json(path_of(self.made.run(name).path, one.number), as_json(one))

    def stop(self, name, seconds):
        self.attempt(name, Attempt(number=1, host="n", started=T0, end=End(kind="stopped", seconds=seconds)))

    def see(self, seconds):
        self.times.unix = T0 + seconds
        pulse(self.made, self.times.unix)
        return Viewer(path=self.made.path).view(look(self.made.path))

    def run(self, name, seconds):
        return next(run for run in self.see(seconds).runs if run.name == name)


@pytest.fixture
def script(tmp_path, monkeypatch):
    return Script(tmp_path, Times(T0, monkeypatch))


# One run


@pytest.mark.parametrize("share", [0.11, 0.3, 0.5, 0.75, 0.95])
def test_the_estimate_of_a_run_at_ten_percent_is_accurate(script, share):
    now = share * true_duration()
    view = script.add("a", at=now).run("a", now)
    assert view.left_from is EstimateSource.OWN
    assert now + view.left_s == pytest.approx(true_duration(), rel=0.03)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_time_left_of_a_resumed_run_does_not_jump(script, number):
    killed = 0.5 * true_duration()
    script.add("a", at=killed)
    script.attempt("a", Attempt(number=1, host="n", end=End(kind="lost", step=400, seconds=killed)))
    script.attempt("a", Attempt(number=2, host="n", step=400, resume="auto"))
    now = killed + START_S
    for step in range(400, 400 + 10 * number, 10):
        now += 10 * STEP_S
        value = {"step": step, "time": T0 + now, "attempt": 2, "train/loss": 3.0}
        append_jsonl(script.made.run("a").metrics, value)
    view, step = script.run("a", now), 400 + 10 * max(0, number - 1)
    assert view.left_from is EstimateSource.OWN
    assert view.left_s == pytest.approx((STEPS - step) * STEP_S + (10 - step // EVERY) * EVAL_S, rel=0.03)


def test_a_stopped_run_takes_what_is_left_after_its_checkpoint(script):
    killed = 0.5 * true_duration()
    script.add("a", at=killed).stop("a", killed)
    write_json(script.made.run("a").checkpoints / "step_400.json", {})
    view = script.run("a", 9e4)
    assert (view.status, view.left_from) == ("stopped", EstimateSource.OWN)
    assert view.left_s == pytest.approx((STEPS - 400) * STEP_S + 6 * EVAL_S, rel=0.03)


def test_a_stopped_run_without_a_pace_of_its_own_uses_that_of_runs_like_it(script):
    script.add("a", at=10 * true_duration()).add("b", at=START_S + EVAL_S).stop("b", 30.0)
    view = script.run("b", 9e4)
    assert (view.status, view.left_from) == ("stopped", EstimateSource.MATRIX)
    assert view.left_s == pytest.approx(true_duration())


def test_a_budget_ends_a_run_before_its_last_step(script):
    now = 0.3 * true_duration()
    script.add("cut", at=now, max_time=0.5 * true_duration()).add("long", at=now, max_time=2 * true_duration())
    assert script.run("cut", now).left_s == pytest.approx(0.2 * true_duration(), rel=0.03)
    assert script.run("long", now).left_s == pytest.approx(0.7 * true_duration(), rel=0.03)


def line(step, time, step_s=None):
    return MetricLine(step=step, time=time, values={} if step_s is None else {"throughput/step_ms": 1e3 * step_s})


def test_a_wall_clock_that_was_set_back_does_not_change_the_estimate():
    train = {"max_iters": 104}
    times = (86_400.0, 86_400.5, 1.0, 1.5)
    recorded = [line(step, at, 0.5) for step, at in enumerate(times)]
    assert rest_of_run(recorded, [], train, since_s=-86_400.0) == pytest.approx(50.0)
    unrecorded = [line(step, at) for step, at in enumerate(times)]
    assert rest_of_run(unrecorded, [], train, since_s=0.0) == pytest.approx(50.0)
    back = PhaseLine(phase="evaluation", begin=100.0, end=90.0)
    assert back.duration_s == 0.0
    assert replaced(back, begin_monotonic=5.0, end_monotonic=8.0).duration_s == 3.0


def test_the_pace_is_that_of_recent_steps_and_ignores_a_suspension():
    slow_then_fast = [line(step, None, 10.0 if step < 5 else 1.0) for step in range(25)][-20:]
    assert pace_of(slow_then_fast, []) == 1.0
    suspended = [line(step, step + 3600.0 * (step > 7)) for step in range(20)]
    assert pace_of(suspended, []) == 1.0


# Pending runs


def test_a_pending_run_uses_the_pace_of_its_optimizer_or_of_any_other_else_the_plan():
    measured = [Measured(TRAIN, 100.0, 1000), Measured(TRAIN | {"optimizer": "muon"}, 300.0, 1000)]
    here = MeasuredRuns(measured, EstimateSource.MATRIX)
    assert here.whole(TRAIN) == (100.0, EstimateSource.MATRIX)
    assert here.whole(TRAIN | {"optimizer": "sgd"})[0] == 200.0
    assert here.whole(TRAIN | {"n_embd": 64}, 7200.0) == (7200.0, EstimateSource.PLAN)
    assert here.whole(TRAIN | {"n_embd": 64}) is None


def test_a_pending_run_uses_the_pace_of_a_similar_run_in_an_earlier_matrix_on_such_a_machine(script, tmp_path):
    earlier = Script(tmp_path, script.times, name="test_matrix_results_20250101_000000").add("a", at=5000.0)
    view = script.add("b").run("b", 0.0)
    assert (view.left_s, view.left_from) == (pytest.approx(true_duration()), EstimateSource.EARLIER)
    about = json.loads(earlier.made.matrix_json.read_text())
    write_json(earlier.made.matrix_json, about | {"provenance": {"cpu": "another one"}})
    assert script.run("b", 0.0).left_s is None


def test_earlier_runs_tell_a_plan_their_speed(tmp_path, monkeypatch):
    monkeypatch.setattr("kmatrix.experiment.machine.cpu_name", lambda: "AMD EPYC 7R32")
    monkeypatch.setattr("kmatrix.experiment.machine.usable_cores", lambda: 2)
    make_matrix(tmp_path, [FakeRun(tokens_per_s=4000.0, train={"cpu_threads": 2})])
    train = FakeRun(train={"cpu_threads": 2})
    made = TrainConfig(**(train_fields(train) | {"optimizer": "muon"}))
    here = Machine(results_dir=tmp_path)
    assert here.earlier.speed(made) == (4000.0, f"test_matrix_results_20261120_052300/{train.name}")
    assert here.earlier.whole_s(made) == pytest.approx(60.0)
    config = RunConfig(train=made, asked_iters=0, asked_batch=None, bound="max_iters")
    speed = here.cpu_speed(config)
    assert speed.slow == pytest.approx(4000.0 * made.shape.flops_per_token / speed.cores / 1.5)
    other = Machine(results_dir=tmp_path, nodes=Nodes(name="another one"))
    assert (other.earlier.speed(made), other.earlier.whole_s(made, 7.0)) == (None, 7.0)
    assert "assumed" in other.cpu_speed(config).source


def test_a_matrix_that_cannot_be_read_measures_nothing(tmp_path):
    made = make_matrix(tmp_path, [FakeRun()])
    made.matrix_json.write_text("{")
    assert measured_on(tmp_path, ("AMD EPYC 7R32", 2, ())) == []


# Packed runs


def test_the_estimated_end_of_a_packed_matrix_is_within_ten_percent(script):
    now = 0.12 * true_duration()
    for number in range(4):
        script.add(f"a{number}", at=now)
    for number in range(3):
        script.add(f"b{number}")
    view = script.see(now)
    assert now + view.left_s == pytest.approx(2 * true_duration(), rel=0.1)
    assert sum(1 for run in view.runs if run.starts_s == 0.0) == 4


def test_a_run_that_does_not_fit_on_the_machine_has_no_end():
    wide = PackedJob(name="a", width=2, seconds=10.0)
    assert ends_of({True: [], False: [wide]}, {True: 1, False: 1}, {"a"}, 0) is None


def test_runs_on_the_cpu_begin_after_those_on_gpus_that_run_now():
    gpu, cpu = PackedJob(name="gpu", width=1, seconds=10.0), PackedJob(name="cpu", width=1, seconds=5.0)
    found = ends_of({True: [gpu], False: [cpu]}, {True: 1, False: 4}, {"gpu"}, 0)
    assert found == {"gpu": (0.0, 10.0), "cpu": (10.0, 15.0)}


# The command


def test_the_estimate_has_progress_date_and_cost(script):
    now = 0.5 * true_duration()
    view = script.add("a", at=now).add("b", num_gpus=4, global_batch=16).see(now)
    text = "\n".join(lines(view, T0 + now))
    assert "its own steps" in text
    assert "480/1000  0.96/2.00" in text
    assert view.dollars == pytest.approx(3.6 * true_duration() / 3600 / 2, rel=0.01)
    assert "time left: unknown (no measurement for b yet)" in text
    assert "$0.29 so far, - in total" in text


def test_the_command_prints_text_and_json(tmp_path):
    runs = [FakeRun(seed=1, axes={"seed": "1"}), FakeRun(seed=2, axes={"seed": "2"}, status="planned")]
    matrix = make_matrix(tmp_path, runs)
    result = run("estimate", f"TARGET={matrix.path}")
    assert (result.status, "not running: make continue" in result.out) == (0, True)
    value = json.loads(run("estimate", f"TARGET={matrix.path}", "JSON=1").out)
    assert value["left_s"] == pytest.approx(value["ends"] - value["now"], abs=1.0)
    assert [run["left_from"] for run in value["runs"]] == [None, "runs like it here"]
