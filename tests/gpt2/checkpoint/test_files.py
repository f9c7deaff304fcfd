"""A checkpoint file that cannot be used is refused with one error that names it; it never runs code."""

from __future__ import annotations

import os
import pickle

import pytest
import torch

from factories import train_config
from gpt2.checkpoint import load_checkpoint, restore, save_checkpoint, snapshot
from gpt2.inference.restore import load_model
from gpt2.model.registry import build_model
from kmatrix.errors import RecordError
from reading import training_state


def training(**changes):
    config = train_config(**changes)
    return training_state(config, build_model(config))


class Hostile:
    def __reduce__(self):
        return os.system, ("touch /tmp/kmatrix-hostile",)


FOREIGN = (
    *(b"", b"root:x:0:0:root:/root:/bin/bash\n" * 40, b"\x80\x05K\x07.", b"PK\x03\x04" + bytes(100), b"]" * 100_000),
    *(
        pickle.dumps(Hostile()),
        b'{"run_id": "a", "model": {}}',
        [1, 2],
        {"step": 3},
        {"run_id": "a", "model": Hostile()},
    ),
)


@pytest.mark.parametrize("content", FOREIGN)
def test_a_file_of_another_program_is_refused(content, tmp_path):
    path = tmp_path / "x.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(RecordError) as raised:
        load_checkpoint(path)
    assert raised.value.what == f"{path} is damaged"
    assert "weights_only" not in raised.value.why  # PyTorch's advice, which runs code
    with pytest.raises(RecordError, match=r"none\.pt is missing"):
        load_checkpoint(tmp_path / "none.pt")


def test_weights_of_another_shape_weights_alone_and_another_configuration_are_refused(tmp_path):
    value = snapshot(training(), step=1, run_id="a")
    with pytest.raises(RecordError, match="holds weights alone"):
        restore(value | {"optimizer": {}}, training())
    with pytest.raises(RecordError, match=r"(?s)another configuration.*learning_rate was 0\.001 and is 0\.0005"):
        restore(value, training(learning_rate=5e-4))
    value["model"]["wpe.weight"] = torch.zeros(3, 16)
    save_checkpoint(tmp_path / "c.pt", value)
    with pytest.raises(RecordError, match=r"(?s)c\.pt is damaged.*wpe\.weight"):
        load_model(load_checkpoint(tmp_path / "c.pt"), tmp_path / "c.pt")
