"""PREFLIGHT=y: which run represents the others, what a trial is, and the message if a shape fails."""

from __future__ import annotations

import json

import pytest

from programs import Program, give_gpus, prepare_here

TRAINER = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
run = json.loads((folder / "run.json").read_text())
base = {{"schema": 1, "run_id": run["run_id"], "attempt": int(sys.argv[sys.argv.index("--attempt") + 1])}}
open({seen!r}, "a").write(json.dumps([run["tracking"], *(run["train"][name] for name in {fields!r})]) + "\\n")
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


FIELDS = ("max_iters", "max_time", "save_checkpoint", "checkpoint_interval")
AXES = ("NUM_GPUS=1", "LR=1e-3")


@pytest.fixture
def fake_trainer(monkeypatch, tmp_path):
    """Replace the trainer by a short script that fails for the named optimizers."""

    prepare_here(monkeypatch)

    def fail_for(*optimizers):
        log = tmp_path / "seen.jsonl"

        def copy(_sources, into):
            (into / "gpt2").mkdir(parents=True)
            (into / "gpt2/__init__.py").touch()
            (into / "gpt2/train.py").write_text(TRAINER.format(bad=optimizers, seen=str(log), fields=FIELDS))

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
    arguments = (*AXES, "OPTIMIZER=adamw", "SEED=1,2", "MAX_ITERS=100,200", "RECOMPUTE=y,n", "TRACKER=tensorboard")
    arguments += (f"RESULTS_DIR={tmp_path / 'results'}", "REUSE=n", "CHECKPOINT_INTERVAL=10", "MAX_TIME=1h")
    result = program.check("test-matrix", *arguments)
    assert "preflight: two steps of 2 shapes, for 8 runs" in result.out
    untracked = {"trackers": [], "project": "", "limit_s": None}
    assert [json.loads(line) for line in log.read_text().splitlines()] == [[untracked, 2, None, False, 0]] * 2
    log.unlink()
    program.check("test-matrix", *arguments, "PREFLIGHT=n")
    assert not log.exists()
