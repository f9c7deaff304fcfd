"""TrainConfig is typed and validated once. tests/project/test_drift.py compares its fields with gpt2/Kconfig."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from factories import train_fields
from kmatrix.errors import ConfigError, RecordError
from kmatrix.records.decode import convert
from kmatrix.records.train_config import TrainConfig, TrainFields


def fields(**overrides):
    return train_fields(Path("/data"), "ab" * 32, **overrides)


def test_a_configuration_survives_json():
    config = TrainConfig.from_json(fields())
    assert TrainConfig.from_json(config.to_json()) == config


def test_an_integer_is_accepted_for_a_float():
    assert TrainConfig.from_json(fields(grad_clip=1)).grad_clip == 1.0


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_iters", "12"),
        ("max_iters", 12.0),
        ("max_iters", True),
        ("max_iters", None),
        ("max_iters", 0),
        ("max_iters", 10**400),
        ("learning_rate", 10**400),
        ("learning_rate", math.nan),
        ("bias", 1),
        ("learning_rate", "6e-4"),
        ("schedule", "step"),
        ("device", "auto"),
        ("n_head", 3),
        ("vocab_size", 50257),
        ("global_batch", 5),
        ("pruning", "state"),
        ("adamwprune_base", "spam"),
    ],
)
def test_an_invalid_value_is_refused_with_the_name_of_the_field(name, value):
    with pytest.raises(ConfigError, match=name):
        TrainConfig.from_json(fields(**{name: value}))


def test_a_missing_field_is_refused_by_name():
    values = fields()
    del values["warmup_steps"]
    with pytest.raises(ConfigError, match=r"train\.warmup_steps in run|train\.warmup_steps is missing"):
        TrainConfig.from_json(values)


def test_an_unknown_field_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"train\.bta1"):
        TrainConfig.from_json(fields(bta1=0.9))


def test_a_named_model_must_have_the_sizes_of_its_name():
    with pytest.raises(ConfigError, match="model tiny is"):
        TrainConfig.from_json(fields(model="tiny"))


def test_a_model_by_depth_must_have_the_sizes_that_follow_from_it():
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 128}
    TrainConfig.from_json(fields(model="depth", depth=2, aspect_ratio=64, head_dim=64, **sizes))
    with pytest.raises(ConfigError, match="model depth is"):
        TrainConfig.from_json(fields(model="depth", depth=3, aspect_ratio=64, head_dim=64, **sizes))


def test_several_ranks_without_ddp_are_refused():
    with pytest.raises(ConfigError, match="use_ddp"):
        TrainConfig.from_json(fields(num_gpus=2, use_ddp=False, ddp_backend=None))


def test_readers_get_none_for_a_missing_field():
    assert convert({}, TrainFields, "run.json") == TrainFields()
    found = convert({"max_iters": 12, "bias": False, "of_tomorrow": 1}, TrainFields, "run.json")
    assert (found.max_iters, found.bias, found.optimizer) == (12, False, None)


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_iters", 12.5),
        ("max_iters", "12"),
        ("max_iters", True),
        ("max_iters", -1),
        ("max_iters", 10**400),
        ("max_time", math.inf),
        ("bias", 1),
        ("optimizer", 7),
    ],
)
def test_a_field_of_another_type_is_damage(name, value):
    with pytest.raises(RecordError, match="is damaged"):
        convert({name: value}, TrainFields, "run.json")


def test_a_complete_record_reads_as_the_trainer_reads_it():
    read, config = convert(fields(), TrainFields, "run.json"), TrainConfig.from_json(fields())
    names = [field.name for field in dataclasses.fields(TrainFields)]
    assert [getattr(read, name) for name in names] == [getattr(config, name) for name in names]


def test_json_keeps_the_order_of_the_fields():
    assert tuple(TrainConfig.from_json(fields()).to_json()) == TrainConfig.names()
    assert set(TrainConfig.names()) == {field.name for field in dataclasses.fields(TrainConfig)}


@pytest.mark.parametrize("method", ["magnitude", "movement"])
def test_adamwprune_prunes_by_its_state_or_not_at_all(method):
    TrainConfig.from_json(fields(optimizer="adamwprune", adamwprune_base="adam", pruning="none"))
    with pytest.raises(ConfigError, match="adamwprune alone prunes by state"):
        TrainConfig.from_json(fields(optimizer="adamwprune", adamwprune_base="adam", pruning=method))
