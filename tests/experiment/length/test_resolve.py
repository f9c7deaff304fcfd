"""MAX_ITERS=0 with a budget: the steps follow from the speed, with a trainer whose speed is scripted."""

from __future__ import annotations

import functools
import json
import re
import sys
from dataclasses import replace

import pytest

from kmatrix.engines.local.engine import LocalEngine
from kmatrix.experiment.length.resolve import FOREVER, calibration_config
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import matrix_dirs
from programs import Program, give_gpus

START_S = 6.0  # of each run, before its first step
# A trainer that takes no time, and says that it took START_S and a time per step; a calibration ends by its budget.
TRAINER = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--attempt") - 1])
run = json.loads((folder / "run.json").read_text())
train, speeds = run["train"], json.loads(pathlib.Path({speeds!r}).read_text())
step_s = speeds[train["optimizer"]]
steps = train["max_iters"]
if train["max_time"] and not train["length_from"]:
    steps = min(steps, int((train["max_time"] - {start}) / step_s))
with open({seen!r}, "a") as file:
    file.write(json.dumps([run["name"], train["max_iters"], train["max_time"], train["length_from"]]) + "\\n")
base = {{"schema": 1, "run_id": run["run_id"], "attempt": 1, "status": "finished", "step": steps}}
spent = {{"spent_s": {start} + steps * step_s, "seconds": steps * step_s, "ended_by": "max_iters"}}
rate = {{"tokens_per_second": train["global_batch"] * train["block_size"] / step_s, "final_val_loss": 2.0}}
if speeds.get("fails"):
    base["status"], base["kind"], base["reason"] = "failed", "error", speeds["fails"]
(folder / "run_used.json").write_text(json.dumps({{"schema": 1, "train": train, "adjusted": []}}))
(folder / "result.json").write_text(json.dumps({{**base, **spent, **rate}}))
"""
BUDGET = ("NUM_GPUS=1", "LR=1e-3", "EVAL_INTERVAL=1000000", "MAX_ITERS=0", "TIME=100s")


class Lab:
    """kmatrix in this process with the scripted trainer."""

    def __init__(self, folder, monkeypatch):
        give_gpus(monkeypatch, 0)
        self.folder, self.results = folder, folder / "results"
        self.program = Program(folder)
        self.program.check("defconfig-gpt2-cpu-quick")
        self.speeds(adamw=0.5, sgd=0.25)
        script = folder / "trainer.py"
        paths = {"speeds": str(folder / "speeds.json"), "seen": str(folder / "seen.jsonl")}
        script.write_text(TRAINER.format(start=START_S, **paths))
        engine = functools.partial(LocalEngine, torchrun=(sys.executable, str(script)))
        monkeypatch.setattr("kmatrix.runner.execute.LocalEngine", engine)

    def speeds(self, **seconds):
        """Set the seconds of a step by optimizer."""
        (self.folder / "speeds.json").write_text(json.dumps(seconds))

    def arguments(self, *more):
        return (*BUDGET, *more, f"RESULTS_DIR={self.results}", "AUTO_GENERATE_GRAPHS=n", "GPU_MONITOR=n")

    def check(self, command, *more):
        return self.program.check(command, *self.arguments(*more)).out

    def refused(self, command, *more):
        return self.program.refused(command, *self.arguments(*more))

    @property
    def trained(self):
        """The runs that the trainer has got: name, max_iters, max_time, length_from."""
        path = self.folder / "seen.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def trains(self, number=-1):
        """The fields "train" of the runs of a matrix, the newest by default, by name."""
        return {run.name: read_json(run.run_json)["train"] for run in matrix_dirs(self.results)[number].runs()}

    def steps(self, number=-1):
        return {name: train["max_iters"] for name, train in self.trains(number).items()}


@pytest.fixture
def lab(tmp_path, monkeypatch):
    return Lab(tmp_path, monkeypatch)


def test_the_steps_follow_from_a_calibration_and_are_reported_before_the_run(lab):
    out = lab.check("train", "OPTIMIZER=adamw", "WARMUP_FRACTION=0.1")
    # 100 s less a reserve of 6 s, and 6 s around the steps of 0.5 s each
    (train,) = lab.trains().values()
    assert (train["max_iters"], train["warmup_steps"], train["length_from"]) == (176, 18, "max_time")
    line = next(line for line in out.splitlines() if line.startswith("length: "))
    assert line == (
        "length: gpt2_adamw_1cpu: 176 steps in about 1m34s, by MAX_TIME (1m40s); "
        "measured in a calibration: 500 ms per step, 6.0s around them"
    )
    assert out.index(line) < out.index("1 run in")
    calibration, run = lab.trained
    assert calibration == ["gpt2_adamw_1cpu", FOREVER, 25.0, ""]
    assert run == ["gpt2_adamw_1cpu", 176, 100.0, "max_time"]
    assert read_json(next(matrix_dirs(lab.results)[0].path.glob("*/run.json")))["expected_s"] == 94.0


def test_each_shape_has_its_own_length_and_seeds_and_rates_of_a_shape_share_one(lab):
    lab.check("test-matrix", "OPTIMIZER=adamw,sgd", "SEED=1,2", "WEIGHT_DECAY=0,0.1")
    steps = lab.steps()
    assert {count for name, count in steps.items() if "adamw" in name} == {176}
    assert {count for name, count in steps.items() if "sgd" in name} == {352}
    assert len(steps) == 8
    calibrations = [name for name, most, _, _ in lab.trained if most == FOREVER]
    assert len(calibrations) == 2  # one per shape


def test_a_cost_budget_is_converted_by_the_price(lab):
    arguments = (*BUDGET[:-1], "OPTIMIZER=adamw", "COST=0.1", "MACHINE_HOUR_PRICE=3.6", f"RESULTS_DIR={lab.results}")
    out = lab.program.check("train", *arguments, "AUTO_GENERATE_GRAPHS=n", "GPU_MONITOR=n").out
    assert "176 steps in about 1m34s, by MAX_COST=$0.1 (1m40s)" in out
    (train,) = lab.trains().values()
    assert train["length_from"] == "max_cost"


def test_the_same_command_again_reuses_the_run_with_its_length(lab):
    lab.check("train", "OPTIMIZER=adamw")
    lab.speeds(adamw=0.6)  # another speed now: the length of the finished run holds
    out = lab.check("train", "OPTIMIZER=adamw")
    assert "reused from" in out
    assert lab.steps() == {"gpt2_adamw_1cpu": 176}
    assert len(lab.trained) == 2


def test_another_seed_in_a_new_matrix_gets_the_length_of_the_first(lab):
    lab.check("train", "OPTIMIZER=adamw", "SEED=1")
    lab.speeds(adamw=0.6)
    out = lab.check("train", "OPTIMIZER=adamw", "SEED=2")
    assert re.search(r"176 steps, by MAX_TIME \(1m40s\); as in test_matrix_\S+, which ended near this budget", out)
    assert lab.steps() == {"gpt2_adamw_1cpu": 176}


def test_another_budget_uses_the_speed_of_the_earlier_run(lab):
    lab.check("train", "OPTIMIZER=adamw")
    arguments = [word for word in lab.arguments("OPTIMIZER=adamw") if not word.startswith("TIME=")]
    out = lab.program.check("train", *arguments, "TIME=1000s").out
    assert "1976 steps" in out.replace(",", "")  # the reserve is the time around the steps
    assert "measured in test_matrix_results_" in out
    assert "calibration:" not in out


def test_a_run_that_missed_its_budget_gives_its_speed_but_not_its_length(lab):
    lab.check("train", "OPTIMIZER=adamw")
    (run,) = matrix_dirs(lab.results)[0].runs()
    record = read_json(run.result)
    write_json(run.result, {**record, "spent_s": 6.0 + 176 * 0.7, "tokens_per_second": 1536 / 0.7})
    out = lab.check("train", "OPTIMIZER=adamw", "SEED=2")
    assert lab.steps() == {"gpt2_adamw_1cpu": int(88 / 0.7)}
    assert "700 ms per step" in out


def test_a_run_of_other_code_or_of_another_machine_does_not_count(lab):
    lab.check("train", "OPTIMIZER=adamw")
    (run,) = matrix_dirs(lab.results)[0].runs()
    record = read_json(run.run_json)
    for change in ({"code": "other"}, {"cpu": "other"}, {"cores": 999}):
        write_json(run.run_json, {**record, "provenance": {**record["provenance"], **change}})
        assert "calibration: 1 shape" in lab.check("train", "OPTIMIZER=adamw", "REUSE=n")
        for matrix in matrix_dirs(lab.results)[1:]:
            for made in matrix.runs():
                made.result.unlink(missing_ok=True)


def test_runs_that_are_added_get_the_length_of_the_matrix(lab):
    lab.check("test-matrix", "OPTIMIZER=adamw", "SEED=1,2")
    lab.speeds(adamw=0.6)
    (matrix,) = matrix_dirs(lab.results)
    for run in matrix.runs():
        run.result.unlink()  # not finished: the length is planned
        run.status.unlink()
    out = lab.program.check("add", f"TARGET={matrix.path}", "SEED=3").out
    assert f"as in {matrix.name}" in out
    assert set(lab.steps().values()) == {176}
    assert len(lab.steps()) == 3


def test_a_repetition_takes_the_length_of_the_run(lab):
    lab.check("train", "OPTIMIZER=adamw")
    (run,) = matrix_dirs(lab.results)[0].runs()
    record = read_json(run.result)
    write_json(run.result, {**record, "spent_s": 500.0})  # far from its budget: nothing else would give its length
    lab.speeds(adamw=0.6)
    lab.program("reproduce", f"RUN={run.path}", f"RESULTS_DIR={lab.results}")
    assert lab.steps() == {"gpt2_adamw_1cpu": 176}


def test_a_budget_without_room_for_a_step_is_refused_with_one_that_has_room(lab):
    lab.check("train", "OPTIMIZER=adamw")
    lab.speeds(adamw=5.0)
    arguments = [word for word in lab.arguments("OPTIMIZER=adamw") if not word.startswith("TIME=")]
    message = lab.program.refused("train", *arguments, "TIME=6s")
    assert "MAX_TIME of gpt2_adamw_1cpu allows no step: 6.0s" in message
    assert "start, evaluations and end take about 6.5s" in message
    assert "pass MAX_TIME=13s, or more" in message
    assert len(matrix_dirs(lab.results)) == 1


def test_a_failed_calibration_starts_nothing_and_names_the_reason(lab):
    lab.speeds(adamw=0.5, fails="RuntimeError: no heads")
    message = lab.refused("train", "OPTIMIZER=adamw")
    assert "the calibration of gpt2_adamw_1cpu failed; nothing was started" in message
    assert "RuntimeError: no heads" in message
    assert "MAX_ITERS=<steps>" in message
    assert not matrix_dirs(lab.results)


def test_with_a_number_of_steps_the_budget_cuts_as_before(lab):
    arguments = ["MAX_ITERS=50" if word == "MAX_ITERS=0" else word for word in lab.arguments("OPTIMIZER=adamw")]
    lab.program.check("train", *[word for word in arguments if not word.startswith("EVAL_INTERVAL")])
    (train,) = lab.trains().values()
    assert (train["max_iters"], train["length_from"]) == (50, "")
    assert [most for _, most, _, _ in lab.trained] == [50]


def test_tokens_decide_before_a_budget_does(lab):
    lab.check("train", "OPTIMIZER=adamw", "TOKENS=76800")
    (train,) = lab.trains().values()
    assert (train["max_iters"], train["length_from"]) == (50, "")


def test_a_calibration_trains_with_the_settings_of_the_run_and_a_rate_near_0(lab):
    plan = lab.program.plan(*lab.arguments("OPTIMIZER=adamw", "CHECKPOINT_MINUTES=60"))
    (config,) = plan.configs.values()
    train = calibration_config(config, 100.0).train
    changed = {name for name in train.names() if getattr(train, name) != getattr(config.train, name)}
    assert changed == {"max_iters", "max_time", "warmup_steps", "warmup_fraction", "length_from", "checkpoint_minutes"}
    assert calibration_config(replace(config), 31 * 3600.0).train.max_time == 15 + 60
    assert calibration_config(replace(config), 20.0).train.max_time == 10.0
