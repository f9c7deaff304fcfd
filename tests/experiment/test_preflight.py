"""PREFLIGHT=1: which run represents the others, what a trial excludes, and the message if a shape fails."""

from __future__ import annotations

import os
import socket

import pytest

from kmatrix.experiment.preflight import FOLDER, STEPS, FailedRuns, _folder, advice, by_shape, trial_config
from programs import Program, give_gpus, prepare_here

TRAINER = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
run = json.loads((folder / "run.json").read_text())
base = {{"schema": 1, "run_id": run["run_id"], "attempt": int(sys.argv[sys.argv.index("--attempt") + 1])}}
open({seen!r}, "a").write(json.dumps([run["name"], run["train"]["max_iters"], run["tracking"]]) + "\\n")
failed = {{"status": "failed", "kind": "error", "reason": "RuntimeError: heads; do not: fit"}}
ended = failed if run["train"]["optimizer"] in {bad!r} else {{"status": "finished", "step": run["train"]["max_iters"]}}
(folder / "result.json").write_text(json.dumps({{**base, **ended}}))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    give_gpus(monkeypatch, 0)
    made = Program(tmp_path)
    made.check("defconfig-gpt2-cpu-quick")
    return made


@pytest.fixture
def configs(program):
    """Return the configurations of the planned runs of a matrix."""

    def plan(*arguments):
        made = program.plan(*arguments)
        return made, made.configs

    return plan


AXES = ("NUM_GPUS=1", "LR=1e-3")


def test_runs_that_differ_only_in_numbers_have_one_shape(configs):
    _, found = configs(*AXES, "OPTIMIZER=adamw", "SEED=1,2,3", "WEIGHT_DECAY=0,0.1", "MAX_ITERS=100,200")
    (group,) = by_shape(found).values()
    assert len(group) == 12


@pytest.mark.parametrize("axis", ["OPTIMIZER=adamw,sgd", "BATCH_SIZE=3,6", "BLOCK_SIZE=64,128", "RECOMPUTE=y,n"])
def test_fields_that_change_memory_or_code_paths_make_another_shape(configs, axis):
    arguments = () if axis.startswith("OPTIMIZER") else ("OPTIMIZER=adamw", "GLOBAL_BATCH=12")
    _, found = configs(*AXES, *arguments, axis)
    assert len(by_shape(found)) == 2


def test_a_trial_runs_two_steps_and_keeps_no_files(configs):
    _, found = configs(*AXES, "OPTIMIZER=adamw", "WARMUP_FRACTION=0.1", "CHECKPOINT_INTERVAL=10", "MAX_TIME=1h")
    (config,) = found.values()
    fields = trial_config(config).train
    assert (fields.max_iters, fields.checkpoint_interval, fields.save_checkpoint) == (STEPS, 0, False)
    assert (fields.warmup_steps, fields.warmup_fraction, fields.max_time) == (0, None, None)
    assert fields.eval_samples <= config.train.batch_size


def test_the_hint_excludes_the_bad_runs_and_no_others(configs):
    plan, _ = configs(*AXES, "OPTIMIZER=adamw,sgd,muon", "SEED=1,2")
    runs = plan.matrix.runs
    sgd = tuple(run.name for run in runs if "sgd" in run.name)
    assert advice(runs, [FailedRuns(names=sgd, reason="no memory")]) == "OPTIMIZER=adamw,muon"
    assert advice(runs, [FailedRuns(names=sgd[:1], reason='no; "memory": x')]) == (
        'MATRIX_EXCLUDE="OPTIMIZER=sgd SEED=1: no, memory"'
    )
    assert advice(runs, [FailedRuns(names=tuple(run.name for run in runs), reason="why")]).startswith("MATRIX_EXCLUDE=")


@pytest.fixture
def fake_trainer(monkeypatch, tmp_path):
    """Replace the trainer by a short script that fails for the named optimizers."""

    prepare_here(monkeypatch)

    def fail_for(*optimizers):
        log = tmp_path / "seen.jsonl"

        def copy(_sources, _code, into):
            (into / "gpt2").mkdir(parents=True)
            (into / "gpt2/__init__.py").touch()
            (into / "gpt2/train.py").write_text(TRAINER.format(bad=optimizers, seen=str(log)))

        monkeypatch.setattr("kmatrix.experiment.create.copy_code", copy)
        return log

    return fail_for


@pytest.mark.process
def test_a_bad_shape_refuses_the_matrix_names_its_runs_and_leaves_no_files(program, fake_trainer, tmp_path):
    fake_trainer("sgd")
    arguments = (
        *AXES,
        "OPTIMIZER=adamw,sgd",
        "SEED=1,2",
        "PREFLIGHT=1",
        f"RESULTS_DIR={tmp_path / 'results'}",
        "REUSE=n",
    )
    message = program.refused("test-matrix", *arguments)
    assert "preflight: 2 of 4 runs fail; nothing was started" in message
    assert "gpt2_sgd_seed1_1cpu, gpt2_sgd_seed2_1cpu: RuntimeError: heads; do not: fit" in message
    assert "leave them out with OPTIMIZER=adamw\n" in message + "\n"
    assert list((tmp_path / "results").iterdir()) == []


@pytest.mark.process
def test_the_printed_hint_fixes_the_matrix(program, fake_trainer, tmp_path, monkeypatch):
    log = fake_trainer("sgd")
    monkeypatch.setattr("kmatrix.cli.running.start.execute", lambda *_: 0)
    arguments = (*AXES, "SEED=1,2", f"RESULTS_DIR={tmp_path / 'results'}", "REUSE=n")
    result = program.check("test-matrix", *arguments, "PREFLIGHT=y", "OPTIMIZER=adamw")
    assert "preflight: two steps of 1 shape, for 2 runs" in result.out
    assert log.read_text().count("\n") == 1
    (matrix,) = (tmp_path / "results").iterdir()
    assert matrix.name.startswith("test_matrix_results_")


@pytest.mark.process
def test_the_symbol_enables_preflight_and_the_command_line_overrides_it(program, fake_trainer, tmp_path, monkeypatch):
    log = fake_trainer()
    monkeypatch.setattr("kmatrix.cli.running.start.execute", lambda *_: 0)
    with program.config.open("a") as file:
        file.write("CONFIG_PREFLIGHT=y\n")
    text = program.config.read_text().replace("# CONFIG_PREFLIGHT is not set\n", "")
    program.config.write_text(text)
    arguments = (*AXES, "OPTIMIZER=adamw", f"RESULTS_DIR={tmp_path / 'results'}", "REUSE=n")
    program.check("train", *arguments)
    assert log.exists()
    log.unlink()
    program.check("train", *arguments, "PREFLIGHT=0")
    assert not log.exists()


def test_the_next_preflight_removes_the_files_of_a_killed_one(tmp_path):
    leftover, other = (tmp_path / f"{FOLDER}{socket.gethostname()}_{pid}" for pid in (999999999, os.getppid()))
    leftover.mkdir()
    other.mkdir()
    with _folder(tmp_path) as folder:
        assert folder.is_dir()
        assert not leftover.exists()
        assert other.exists()  # the files of another preflight that is still running
    assert not folder.exists()


def test_the_files_of_a_preflight_on_another_host_stay(tmp_path):
    other, own = tmp_path / f"{FOLDER}n2_999999999", tmp_path / f"{FOLDER}{socket.gethostname()}_999999999"
    other.mkdir()
    own.mkdir()
    with _folder(tmp_path):
        assert not own.exists()
    assert other.exists()
