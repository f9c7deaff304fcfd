"""PREFLIGHT=y: which run represents the others, what a trial excludes, and the message if a shape fails."""

from __future__ import annotations

import pytest

from kmatrix.experiment.preflight import STEPS, by_shape, trial_fields
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


AXES = ("NUM_GPUS=1", "LR=1e-3")


def fields(program, *arguments):
    """Return the fields of the trainer by run of a matrix."""
    return {name: config.train.to_json() for name, config in program.plan(*AXES, *arguments).configs.items()}


def test_runs_that_differ_only_in_numbers_have_one_shape(program):
    runs = fields(program, "OPTIMIZER=adamw", "SEED=1,2,3", "WEIGHT_DECAY=0,0.1", "MAX_ITERS=100,200")
    (group,) = by_shape(runs).values()
    assert len(group) == 12


@pytest.mark.parametrize("axis", ["OPTIMIZER=adamw,sgd", "BATCH_SIZE=3,6", "BLOCK_SIZE=64,128", "RECOMPUTE=y,n"])
def test_fields_that_change_memory_or_code_paths_make_another_shape(program, axis):
    arguments = () if axis.startswith("OPTIMIZER") else ("OPTIMIZER=adamw", "GLOBAL_BATCH=12")
    assert len(by_shape(fields(program, *arguments, axis))) == 2


def test_a_trial_runs_two_steps_and_keeps_no_files(program):
    arguments = ("OPTIMIZER=adamw", "WARMUP_FRACTION=0.1", "CHECKPOINT_INTERVAL=10", "MAX_TIME=1h")
    (run,) = fields(program, *arguments).values()
    found = trial_fields(run)
    assert (found["max_iters"], found["checkpoint_interval"], found["save_checkpoint"]) == (STEPS, 0, False)
    assert (found["warmup_steps"], found["warmup_fraction"], found["max_time"]) == (0, None, None)
    assert found["eval_samples"] <= run["batch_size"]


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
        "PREFLIGHT=y",
        f"RESULTS_DIR={tmp_path / 'results'}",
        "REUSE=n",
    )
    message = program.refused("test-matrix", *arguments)
    assert "preflight: 2 of 4 runs fail; nothing was started" in message
    assert "gpt2_sgd_seed1_1cpu, gpt2_sgd_seed2_1cpu: RuntimeError: heads; do not: fit" in message
    assert list((tmp_path / "results").iterdir()) == []


@pytest.mark.process
def test_the_symbol_enables_preflight_and_the_command_line_overrides_it(program, fake_trainer, tmp_path, monkeypatch):
    log = fake_trainer()
    monkeypatch.setattr("kmatrix.cli.run.start", lambda *_: 0)
    program.check("olddefconfig", "PREFLIGHT=y")
    arguments = (*AXES, "OPTIMIZER=adamw", "SEED=1,2", f"RESULTS_DIR={tmp_path / 'results'}", "REUSE=n")
    result = program.check("test-matrix", *arguments)
    assert "preflight: two steps of 1 shape, for 2 runs" in result.out
    assert log.read_text().count("\n") == 1
    log.unlink()
    program.check("test-matrix", *arguments, "PREFLIGHT=n")
    assert not log.exists()
