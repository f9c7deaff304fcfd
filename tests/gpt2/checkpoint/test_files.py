"""A checkpoint file that cannot be used is refused with one error that names it; it never runs code."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch

from factories import train_config
from gpt2.checkpoint.files import load_checkpoint, save_checkpoint
from gpt2.checkpoint.state import restore, snapshot
from gpt2.inference.restore import load_model
from gpt2.model.registry import build_model
from kmatrix.errors import RecordError
from reading import training_state


def training(**changes):
    config = train_config(**changes)
    return training_state(config, build_model(config))


def sound():
    return snapshot(training(), step=1, run_id="a")


class Hostile:
    def __reduce__(self):
        return os.system, ("touch /tmp/kmatrix-hostile",)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"root:x:0:0:root:/root:/bin/bash\n" * 40,
        b"\x80\x05K\x07.",
        pickle.dumps(Hostile()),
        b"PK\x03\x04" + bytes(100),
        b"]" * 100_000,
        json.dumps({"run_id": "a", "model": {}}).encode(),
    ],
)
def test_a_file_of_another_program_is_refused(data, tmp_path):
    path = tmp_path / "passwd"
    path.write_bytes(data)
    with pytest.raises(RecordError) as raised:
        load_checkpoint(path)
    assert raised.value.what == f"{path} is damaged"
    assert "\n" not in raised.value.why


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([1, 2], "object"),
        ({"step": 3}, "run_id"),
        ({"run_id": "a", "step": 3, "config": {}, "model": [], "optimizer": {}}, "model"),
        ({"run_id": "a", "model": Hostile()}, "could run code"),
    ],
)
def test_a_file_that_is_not_our_checkpoint_is_refused(tmp_path, value, why):
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises(RecordError, match="is damaged") as raised:
        load_checkpoint(tmp_path / "x.pt")
    assert why in raised.value.why
    assert "weights_only" not in raised.value.why
    with pytest.raises(RecordError, match=r"none\.pt is missing"):
        load_checkpoint(tmp_path / "none.pt")


def test_weights_of_another_shape_are_named(tmp_path):
    value = sound()
    value["model"]["wpe.weight"] = torch.zeros(3, 16)
    save_checkpoint(tmp_path / "c.pt", value)
    loaded = load_checkpoint(tmp_path / "c.pt")
    with pytest.raises(RecordError, match=r"(?s)wpe\.weight is \(3, 16\)"):
        load_model(loaded, tmp_path / "c.pt")


def test_weights_alone_and_the_checkpoint_of_another_configuration_cannot_be_resumed():
    with pytest.raises(RecordError, match="holds weights alone"):
        restore(sound() | {"optimizer": {}}, training())
    with pytest.raises(RecordError, match="belongs to another configuration") as raised:
        restore(sound(), training(learning_rate=5e-4))
    assert "learning_rate was 0.001 and is 0.0005" in raised.value.why
