"""A step of the loop reads no tensor: on a GPU each read would wait for all work in its queue."""

from __future__ import annotations

from dataclasses import asdict

import pytest

import no_waits
from factories import make_run
from kmatrix.records.files import read_json
from kmatrix.records.train_config import TrainConfig
from optim_factory import Settings
from training import train_here

RUN = {"batch_size": 2, "gradient_accumulation": 2, "log_interval": 3, "eval_interval": 4, "max_iters": 7}
RUN |= {"n_layer": 1, "eval_samples": 2, "save_checkpoint": False, "save_best": False, "schedule": "constant"}
PRUNED = {"pruning_warmup": 0.0, "pruning_ramp_end": 0.9, "pruning_frequency": 2, "target_sparsity": 0.5}


def of_optimizer(name):
    """Return the fields of a run with an optimizer at its defaults."""
    values = asdict(Settings(optimizer=name, learning_rate=1e-3, spam_interval=4, spam_warmup_steps=2))
    fields = {field: value for field, value in values.items() if field in TrainConfig.names()}
    return fields | {"max_iters": RUN["max_iters"]}


@pytest.mark.parametrize(
    "fields",
    [  # test_waits.py has all optimizers
        of_optimizer("muon"),
        of_optimizer("adamwprune") | {"pruning": "state", **PRUNED},
        {"pruning": "movement", **PRUNED},
        {"pruning": "magnitude", **PRUNED},
    ],
    ids=["muon", "state", "movement", "magnitude"],
)
def test_a_step_reads_no_tensor(tmp_path, monkeypatch, fields):
    no_waits.install(monkeypatch.setattr)
    run_dir = make_run(tmp_path, **RUN | fields)
    trained = train_here(run_dir)
    assert (trained.returncode, read_json(run_dir.result)["reason"]) == (0, None)
    assert read_json(run_dir.result)["step"] == RUN["max_iters"]


def test_a_step_that_reads_one_is_noticed(tmp_path, monkeypatch):
    no_waits.install(monkeypatch.setattr)
    monkeypatch.setattr("gpt2.train.clip", lambda parameters, _: parameters[0].grad.norm().item())
    run_dir = make_run(tmp_path, **RUN)
    train_here(run_dir)
    assert "in <lambda>" in read_json(run_dir.result)["reason"]
