"""A run is repeated with the settings of this machine, not with those of the machine that it ran on."""

from __future__ import annotations

import pytest

from kmatrix.experiment.configure import text_of_config
from kmatrix.experiment.plan import make_plan
from kmatrix.matrix.expand import visit
from programs import Program

THEIRS = {
    "ON_FINISH": "touch /tmp/theirs",
    "RESULTS_DIR": "/their/results",
    "DATA_DIR": "/their/data",
    "CHECKPOINT_DIR": "/their/checkpoints",
    "TRACKER_PROJECT": "theirs",
}


@pytest.fixture
def config(tmp_path):
    """The .config of a run whose owner set much of their machine."""
    program = Program(tmp_path / "theirs")
    (tmp_path / "theirs").mkdir()
    program.check("defconfig-gpt2-cpu-quick", *(f"{name}={text}" for name, text in THEIRS.items()), "TRACKER=wandb")
    return program.config


def plan(config, machine, **assignments):
    return make_plan(config, assignments, one=True, machine=machine)


def test_no_setting_of_a_machine_is_taken_from_a_run(config, tmp_path):
    found = plan(config, tmp_path / "none")

    control = found.config
    assert (control.on_finish, control.results_dir, control.data_dir, control.checkpoint_dir) == ("", ".", "data", "")
    assert control.trackers == ()
    assert not [text for text in THEIRS.values() if text in text_of_config(found.tree, found.lines)]


def test_the_settings_of_the_user_apply_instead(config, tmp_path):
    program = Program(tmp_path)
    program.check("defconfig-gpt2-cpu-quick", f"DATA_DIR={tmp_path}", "ON_FINISH=true", "TRACKER=tensorboard")

    control = plan(config, program.config, RESULTS_DIR="here").config

    assert (control.data_dir, control.on_finish, control.results_dir) == (str(tmp_path), "true", "here")
    assert control.trackers == ("tensorboard",)


def test_the_id_of_the_run_stays_the_same(config, tmp_path):
    theirs = make_plan(config, {}, one=True)
    list(visit(theirs.tree, theirs.base, theirs.matrix.runs))
    config.write_text(theirs.tree.config_text(), encoding="utf-8")  # as in the directory of a run

    assert plan(config, tmp_path / "none").runs[0].run_id == theirs.runs[0].run_id


@pytest.mark.parametrize("argument", ["SEED=7", "OPTIMIZER=muon", "NUM_NODES=2", "MATRIX=y"])
def test_an_assignment_that_makes_another_run_is_refused(config, argument):
    result = Program(config.parent)("reproduce", f"RUN={config.parent}", "ENGINE=slurm", "SLURM_TIME=5m", argument)

    assert result.status == 2
    assert f"reproduce does not take {argument.partition('=')[0]}=" in result.err
