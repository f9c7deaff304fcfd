"""TrainConfig is typed once. tests/project/test_drift.py compares its fields with gpt2/Kconfig."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from factories import train_fields
from kmatrix.errors import ConfigError, RecordError
from kmatrix.records.decode import convert
from kmatrix.records.train_config import MAY_DIFFER, NEUTRAL, TrainConfig


def fields(**overrides):
    return train_fields(Path("/data"), "ab" * 32, **overrides)


def test_a_configuration_survives_json_in_the_order_of_its_fields():
    config = TrainConfig.from_json(fields())
    assert TrainConfig.from_json(config.to_json()) == config
    assert tuple(config.to_json()) == TrainConfig.names()


def test_an_integer_is_accepted_for_a_float():
    assert TrainConfig.from_json(fields(grad_clip=1)).grad_clip == 1.0


WRONG = [
    ("max_iters", "12"),
    ("max_iters", 12.5),
    ("max_iters", True),
    ("max_iters", None),
    ("max_iters", -1),
    ("max_iters", 10**400),
    ("learning_rate", 10**400),
    ("learning_rate", math.nan),
    ("learning_rate", "6e-4"),
    ("max_time", math.inf),
    ("bias", 1),
    ("optimizer", 7),
]


@pytest.mark.parametrize("name, value", WRONG)
def test_a_value_of_another_type_is_refused_with_the_name_of_the_field(name, value):
    with pytest.raises(RecordError) as refused:
        TrainConfig.from_json(fields(**{name: value}))
    assert name in refused.value.why
    with pytest.raises(RecordError, match="is damaged"):
        convert({name: value}, TrainConfig, "run.json")


def test_the_trainer_needs_exactly_the_fields_and_other_readers_get_defaults():
    values = fields()
    del values["warmup_steps"]
    for wrong in (values, fields(bta1=0.9)):
        with pytest.raises(RecordError, match=r"train\.(warmup_steps|bta1) in run\.json"):
            TrainConfig.from_json(wrong)
    assert convert({}, TrainConfig, "run.json") == TrainConfig()
    found = convert({"max_iters": 12, "bias": False, "of_tomorrow": 1}, TrainConfig, "run.json")
    assert (found.max_iters, found.bias, found.optimizer) == (12, False, "")


def test_what_cannot_change_a_result_may_differ_when_a_run_is_resumed():
    assert NEUTRAL < MAY_DIFFER < set(TrainConfig.names())
    assert {"log_interval", "save_best", "profile"} <= NEUTRAL
    assert not {"batch_size", "num_gpus", "dtype"} & NEUTRAL
    assert not {"learning_rate", "seed", "data_sha256", "n_layer", "optimizer"} & MAY_DIFFER


def test_another_micro_batch_keeps_the_global_batch_or_is_refused():
    config = TrainConfig.from_json(fields())
    assert (config.with_micro_batch(2).gradient_accumulation, config.with_micro_batch(2).global_batch) == (2, 4)
    with pytest.raises(ConfigError, match="a micro-batch of 3"):
        config.with_micro_batch(3)
