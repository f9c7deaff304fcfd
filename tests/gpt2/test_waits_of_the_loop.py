"""A step of the loop reads no tensor: on a GPU each read would wait for all work in its queue."""

from __future__ import annotations

from dataclasses import asdict

import pytest

import forked
from factories import environment, make_run, trainer
from kmatrix.records.files import read_json
from kmatrix.records.train_config import TrainConfig
from optim_factory import Settings

pytestmark = pytest.mark.process

DOUBLE = ("tests/support/no_waits.py",)
RUN = {"batch_size": 2, "gradient_accumulation": 2, "log_interval": 3, "eval_interval": 4, "max_iters": 7}
RUN |= {"n_layer": 1, "eval_samples": 2, "save_checkpoint": False, "save_best": False}
PRUNED = {"pruning_warmup": 0.0, "pruning_ramp_end": 0.9, "pruning_frequency": 2, "target_sparsity": 0.5}


def train_under_double(run_dir, **variables):
    process = forked.start(trainer(run_dir, program=DOUBLE), {**environment(), **variables})
    output = "".join(process.communicate())
    return process.returncode, output


def of_optimizer(name):
    """Return the fields of a run with an optimizer at its defaults."""
    values = asdict(Settings(optimizer=name, learning_rate=1e-3, spam_interval=4, spam_warmup_steps=2))
    fields = {field: value for field, value in values.items() if field in TrainConfig.names()}
    fields |= {"max_iters": RUN["max_iters"], "amsgrad": name == "adamwadv"}
    return fields | ({"pruning": "state", **PRUNED} if name == "adamwprune" else {})


@pytest.mark.parametrize("optimizer", ["muon", "adamwprune"])  # test_waits.py has all of them
def test_a_step_reads_no_tensor_with(tmp_path, optimizer):
    run_dir = make_run(tmp_path, **RUN | of_optimizer(optimizer) | {"schedule": "constant"})
    code, output = train_under_double(run_dir)
    assert code == 0, output
    assert read_json(run_dir.result)["step"] == RUN["max_iters"]


@pytest.mark.parametrize("rule", ["published", None])
def test_a_step_that_prunes_reads_no_tensor(tmp_path, rule):
    pruning = {"pruning": "movement", "movement_rule": rule} if rule else {"pruning": "magnitude"}
    code, output = train_under_double(make_run(tmp_path, **RUN | pruning | PRUNED))
    assert code == 0, output
