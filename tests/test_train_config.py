"""TrainConfig: typed, and checked once. That its fields are the symbols of gpt2/Kconfig is test_drift's."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import train_fields

from gpt2.config import TrainConfig
from kmatrix.errors import ConfigError


def fields(**overrides):
    return train_fields(Path("/data"), "ab" * 32, Path("/checkpoints"), **overrides)


def test_json_and_back_gives_the_same_configuration():
    config = TrainConfig.from_json(fields())
    assert TrainConfig.from_json(config.to_json()) == config


def test_a_whole_number_may_stand_for_a_float():
    assert TrainConfig.from_json(fields(grad_clip=1)).grad_clip == 1.0


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_iters", "12"),
        ("max_iters", 12.0),
        ("max_iters", True),
        ("max_iters", None),
        ("max_iters", 0),
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
def test_a_wrong_value_is_refused_and_the_message_names_the_field(name, value):
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
